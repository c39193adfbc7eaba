//! Models from a Hub: a server of this process that speaks the Hub's protocol, well and badly.

mod downloads;
mod faults;
mod python;
mod server;
mod verbs;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use server::HubServer;
use tempfile::TempDir;
use trireme_launcher::model_store::{
    Hub, HubError, HubSettings, ModelName, Patience, RepoName, Token,
};

/// A cache of its own, and a client that is not patient.
struct Bench {
    _folder: TempDir,
    hub: Hub,
}

impl Bench {
    fn new(server: &HubServer) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let patience = Patience {
            connect: Duration::from_secs(5),
            read: Duration::from_secs(5),
            attempts: 3,
            pause: Duration::from_millis(5),
            pause_max: Duration::from_millis(1500),
            lock: Duration::from_secs(60),
        };
        let settings = HubSettings {
            endpoint: server.endpoint(),
            token: None,
            cache: folder.path().join("hub"),
            offline: None,
            certificates: None,
            patience,
        };
        Self { _folder: folder, hub: Hub { settings } }
    }

    fn with_token(mut self, token: &str) -> Self {
        self.hub.settings.token = Token::new(token);
        self
    }

    fn cache(&self) -> &Path {
        &self.hub.settings.cache
    }

    fn fetch(&self, name: &str) -> Result<PathBuf, HubError> {
        self.hub.fetch(&repo(name))
    }

    /// Names of a folder below the repository's, in order.
    fn names(&self, folder: &str) -> Vec<String> {
        let folder = self.cache().join("models--org--model").join(folder);
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn repo(name: &str) -> RepoName {
    match ModelName::parse(name) {
        Ok(ModelName::Repo(repo)) => repo,
        other => panic!("{name}: {other:?}"),
    }
}

/// So many bytes that look like nothing in particular, other ones for each seed.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    std::iter::repeat_with(next).take(bytes).collect()
}
