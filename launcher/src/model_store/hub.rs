//! The Hugging Face Hub and the cache that its tools share with this one. The protocol is that of
//! <https://huggingface.co/docs/hub/api>; the layout of the cache is that of
//! <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

mod blob;
mod cache;
mod client;
mod error;
mod listing;
mod lock;
mod selection;
mod settings;

use std::{io::Read, path::PathBuf};

use self::{
    blob::{Blob, free_bytes},
    cache::{RepoFolder, State, is_commit},
    client::{Client, Failure, Subject, encoded},
    listing::{Identity, Listing},
    selection::{Selection, Weights, Wish, indexed_files, is_weights},
};
pub use self::{
    error::HubError,
    listing::stays_inside,
    settings::{HubSettings, Patience, Token, user_cache},
};
use super::{LocalModel, name::MAIN, name::RepoName, progress::Progress};
use crate::size;

/// Room that a download leaves on the disk.
const SPARE_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug)]
pub struct Hub {
    pub settings: HubSettings,
}

/// A file that is to be here.
struct Wanted {
    path: String,
    url: String,
    identity: Identity,
}

impl Hub {
    /// The path of a model that is in the cache, without any request.
    pub fn find(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        self.folder(&repo.id).find(repo)
    }

    /// The path of a model, fetched if it is not here yet.
    pub fn fetch(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        match self.find(repo) {
            Err(HubError::NotHere { .. } | HubError::InPart { .. }) => self.download(repo),
            found => found,
        }
    }

    /// As [`Self::fetch`], but asks the Hub whether the revision has moved on. What is here does
    /// when the Hub cannot be asked.
    pub fn refresh(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        let local = self.find(repo);
        // A commit never moves on.
        if is_commit(&repo.revision) && local.is_ok() {
            return local;
        }
        match self.download(repo) {
            Err(error)
                if local.is_ok() && (error.is_outage() || self.settings.offline.is_some()) =>
            {
                Progress::new(&repo.to_string())
                    .say(&format!("{error}; what is here is taken, it may be older"));
                local
            }
            fetched => fetched,
        }
    }

    fn folder(&self, id: &str) -> RepoFolder {
        RepoFolder::new(&self.settings.cache, id)
    }

    fn download(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        if let Some(variable) = self.settings.offline {
            return Err(HubError::Offline { name: repo.to_string(), variable });
        }
        let client = Client::new(&self.settings, self.settings.patience)?;
        let mut progress = Progress::new(&repo.to_string());
        progress.note(&format!("asking {}", self.settings.endpoint));
        let about = Subject { repo: &repo.id, revision: &repo.revision };
        let listing = Listing::fetch(&client, about, &mut progress)?;
        let paths: Vec<&str> = listing.files.iter().map(|file| file.path.as_str()).collect();
        let wish = Wish { repo: &repo.id, revision: &repo.revision, file: repo.file.as_deref() };
        let selection = Selection::of(&paths, wish)?;
        let mut download = Download {
            folder: self.folder(&repo.id),
            about,
            client,
            listing: &listing,
            progress,
            patience: self.settings.patience,
        };
        download.folder.begin(&listing.commit)?;
        download.files(&selection.texts)?;
        let snapshot = download.folder.snapshot(&listing.commit);
        match &selection.weights {
            Weights::Files(files) => download.files(files)?,
            Weights::Indexed(index) => download.files(&indexed_files(&snapshot.join(index))?)?,
        }
        download.folder.finish(&repo.revision, &listing.commit)?;
        download.progress.end();
        download.progress.say(&format!("is here, at commit {}", &listing.commit[..12]));
        Ok(selection.model_file.map_or(snapshot.clone(), |file| snapshot.join(file)))
    }

    /// Every model of the cache that has weights: each revision, and each GGUF file.
    pub fn list(&self) -> Result<Vec<LocalModel>, HubError> {
        let mut models = Vec::new();
        for id in cache::repositories(&self.settings.cache)? {
            let folder = self.folder(&id);
            for (revision, commit) in folder.revisions()? {
                let repo = RepoName { id: id.clone(), revision, file: None };
                models.extend(listed(&folder, repo, &commit)?);
            }
        }
        Ok(models)
    }

    /// Removes a model, a revision of it or a file, from the cache.
    pub fn remove(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        let folder = self.folder(&repo.id);
        let not_here =
            || HubError::NotHere { name: repo.to_string(), cache: self.settings.cache.clone() };
        folder.check_unused(&repo.to_string())?;
        if repo.file.is_none() && repo.revision == MAIN {
            if !folder.path().is_dir() {
                return Err(not_here());
            }
            folder.remove_all()?;
            return Ok(folder.path());
        }
        let commit = folder.commit(&repo.revision).ok_or_else(not_here)?;
        let snapshot = folder.snapshot(&commit);
        let path = if repo.file.is_some() { self.find(repo)? } else { snapshot.clone() };
        let file = path.strip_prefix(&snapshot).ok().and_then(|file| file.to_str());
        folder.remove(&repo.revision, &commit, file.filter(|file| !file.is_empty()))?;
        Ok(path)
    }

    /// One file of a public repository, in one attempt, for who has other places to try.
    pub fn open_once(
        &self,
        id: &str,
        revision: &str,
        file: &str,
    ) -> Result<(String, impl Read + use<>), HubError> {
        if let Some(variable) = self.settings.offline {
            return Err(HubError::Offline { name: id.to_owned(), variable });
        }
        let patience = Patience { attempts: 1, ..self.settings.patience };
        let client = Client::new(&self.settings, patience)?;
        let url = client.url(&format!("{id}/resolve/{revision}/{file}"));
        let answer = client.get(&url, 0, Subject { repo: id, revision });
        let response = answer.map_err(|failure| match failure {
            Failure::Final(error) | Failure::Passing { error, .. } => error,
        })?;
        Ok((url, response.into_body().into_reader()))
    }
}

/// A download under way.
struct Download<'a> {
    folder: RepoFolder,
    about: Subject<'a>,
    client: Client<'a>,
    listing: &'a Listing,
    progress: Progress,
    patience: Patience,
}

impl Download<'_> {
    /// Fetches these files, but for those that are here.
    fn files(&mut self, paths: &[String]) -> Result<(), HubError> {
        let snapshot = self.folder.snapshot(&self.listing.commit);
        let mut wanted = Vec::new();
        for path in paths {
            if !snapshot.join(path).exists() {
                wanted.push(self.wanted(path)?);
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        self.check_space(&wanted)?;
        let total = wanted.iter().map(|file| file.identity.bytes).sum();
        let (count, first) = (wanted.len(), &wanted[0].path);
        let what = if count == 1 { first.clone() } else { format!("{count} files, {first} first") };
        self.progress.note(&format!("fetching {what}: {}", size::display(total)));
        self.progress.start(total);
        let mut base = 0;
        for file in &wanted {
            self.progress.part(base);
            self.file(file)?;
            base += file.identity.bytes;
        }
        Ok(())
    }

    fn wanted(&mut self, path: &str) -> Result<Wanted, HubError> {
        let listed = self.listing.file(path).ok_or_else(|| HubError::NoFile {
            repo: self.about.repo.to_owned(),
            revision: self.about.revision.to_owned(),
            file: path.to_owned(),
            has: "an index that names it".to_owned(),
        })?;
        let place = format!("{}/resolve/{}/", self.about.repo, self.listing.commit);
        let url = self.client.url(&place) + &encoded(path);
        let identity = match &listed.identity {
            Some(identity) => identity.clone(),
            None => Identity::fetch(&self.client, &url, self.about, &mut self.progress)?,
        };
        Ok(Wanted { path: path.to_owned(), url, identity })
    }

    fn check_space(&self, wanted: &[Wanted]) -> Result<(), HubError> {
        let missing = |file: &Wanted| {
            let blob = self.blob(file);
            if blob.path.exists() {
                0
            } else {
                file.identity.bytes - blob.partial_bytes().min(file.identity.bytes)
            }
        };
        let needed_bytes = wanted.iter().map(missing).sum::<u64>();
        let path = self.folder.path();
        let free_bytes = free_bytes(&path)?;
        if needed_bytes > 0 && needed_bytes.saturating_add(SPARE_BYTES) > free_bytes {
            return Err(HubError::Space { path, needed_bytes, free_bytes });
        }
        Ok(())
    }

    fn blob<'f>(&self, file: &'f Wanted) -> Blob<'f> {
        Blob {
            url: &file.url,
            identity: &file.identity,
            path: self.folder.blob(&file.identity.etag),
        }
    }

    /// One file: its blob under the blob's lock, then the link to it.
    fn file(&mut self, file: &Wanted) -> Result<(), HubError> {
        let blob = self.blob(file);
        if !blob.path.exists() {
            let path = self.folder.lock_of(&file.identity.etag);
            let progress = &self.progress;
            let waiting =
                || progress.say(&format!("another process is fetching {}; waiting", file.path));
            let _lock = lock::lock(&path, self.patience.lock, || blob.partial_bytes(), waiting)?;
            if !blob.path.exists() {
                blob.fetch(&self.client, self.about, &mut self.progress)?;
            }
        }
        self.progress.at(file.identity.bytes);
        self.folder.link(&self.listing.commit, &file.path, &file.identity.etag)
    }
}

/// The models of one snapshot as `list` shows them.
fn listed(folder: &RepoFolder, repo: RepoName, commit: &str) -> Result<Vec<LocalModel>, HubError> {
    let contents = folder.contents(commit)?;
    let bytes = contents.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let model = |repo: &RepoName, path: PathBuf, bytes: u64, missing: Option<String>| LocalModel {
        name: repo.to_string(),
        path,
        bytes,
        commit: Some(commit.to_owned()),
        missing,
    };
    let (path, missing) = match folder.state(commit, &repo) {
        Ok(State::Whole(path)) => (path, None),
        // Other files of a repository are no model: a tokenizer, a picture.
        Ok(State::InPart(missing)) => {
            let begun = folder.incomplete_bytes()?;
            if begun == 0 && !contents.iter().any(|(path, _)| is_weights(path)) {
                return Ok(Vec::new());
            }
            return Ok(vec![model(&repo, folder.snapshot(commit), bytes + begun, Some(missing))]);
        }
        Err(HubError::Ambiguous { .. }) => {
            let ggufs = contents.iter().filter(|(path, _)| path.ends_with(".gguf"));
            let each = ggufs.map(|(path, bytes)| {
                let repo = RepoName { file: Some(path.clone()), ..repo.clone() };
                model(&repo, folder.snapshot(commit).join(path), *bytes, None)
            });
            return Ok(each.collect());
        }
        Err(error) => (folder.snapshot(commit), Some(error.to_string())),
    };
    Ok(vec![model(&repo, path, bytes, missing)])
}
