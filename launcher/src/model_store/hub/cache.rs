//! The cache that is shared with Hugging Face's own tools. `models--OWNER--NAME/` has
//! `refs/REVISION` (names a commit), `snapshots/COMMIT/` (links) and `blobs/ETAG` (content);
//! `.locks/models--OWNER--NAME/` beside it has the locks.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    HubError,
    listing::is_hex,
    lock,
    selection::{Selection, Weights, Wish, indexed_files},
};
use crate::model_store::name::{MAIN, RepoName};

/// Beside `snapshots`: a file named by the commit for as long as that is being fetched.
const FETCHING: &str = ".fetching";

static NEXT_NAME: AtomicU64 = AtomicU64::new(0);

/// Folders of one repository.
#[derive(Clone, Debug)]
pub struct RepoFolder {
    cache: PathBuf,
    name: String,
}

/// A snapshot that has what a server needs, or lacks something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The model's path: a folder, or the file in it that is the model.
    Whole(PathBuf),
    /// The first thing that is missing.
    InPart(String),
}

impl RepoFolder {
    pub fn new(cache: &Path, id: &str) -> Self {
        Self { cache: cache.to_owned(), name: format!("models--{}", id.replace('/', "--")) }
    }

    pub fn path(&self) -> PathBuf {
        self.cache.join(&self.name)
    }

    pub fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(&self.name)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.path().join("blobs").join(etag)
    }

    pub fn lock_of(&self, etag: &str) -> PathBuf {
        self.locks().join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.path().join("snapshots").join(commit)
    }

    fn mark(&self, commit: &str) -> PathBuf {
        self.path().join(FETCHING).join(commit)
    }

    /// From here to [`Self::finish`] the snapshot is known to lack something.
    pub fn begin(&self, commit: &str) -> Result<(), HubError> {
        for folder in [self.path().join("blobs"), self.snapshot(commit), self.path().join(FETCHING)]
        {
            fs::create_dir_all(&folder).map_err(HubError::io("make the folder", &folder))?;
        }
        let mark = self.mark(commit);
        fs::write(&mark, "").map_err(HubError::io("write", &mark))
    }

    /// All is here: the revision gets its commit. A commit needs no name.
    pub fn finish(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let mark = self.mark(commit);
        if let Err(source) = fs::remove_file(&mark)
            && source.kind() != io::ErrorKind::NotFound
        {
            return Err(HubError::Io { action: "remove", path: mark, source });
        }
        if revision == commit {
            return Ok(());
        }
        let reference = self.path().join("refs").join(revision);
        let folder = reference.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(HubError::io("make the folder", folder))?;
        // A reader sees the old commit or the new one, never half a name.
        // Two downloads may name it at once, in one process too.
        let number = NEXT_NAME.fetch_add(1, Ordering::Relaxed);
        let new = folder.join(format!(".{}-{number}.new", std::process::id()));
        fs::write(&new, commit).map_err(HubError::io("write", &new))?;
        fs::rename(&new, &reference).map_err(HubError::io("name", &reference))
    }

    /// Makes `snapshots/COMMIT/PATH` lead to a blob.
    pub fn link(&self, commit: &str, path: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(path);
        let folder = link.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(HubError::io("make the folder", folder))?;
        let depth = 2 + path.matches('/').count();
        let target = Path::new(&"../".repeat(depth)).join("blobs").join(etag);
        match std::os::unix::fs::symlink(&target, &link) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && link.exists() => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // A link to a blob that someone removed, or to an older one.
                fs::remove_file(&link).map_err(HubError::io("remove", &link))?;
                std::os::unix::fs::symlink(&target, &link).map_err(HubError::io("link", &link))
            }
            // A file system without links: as Hugging Face's tools do there.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
                ) =>
            {
                let blob = self.blob(etag);
                fs::copy(&blob, &link).map(drop).map_err(HubError::io("copy a blob to", &link))
            }
            Err(source) => Err(HubError::Io { action: "link", path: link, source }),
        }
    }

    /// The commit that a revision is here.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let reference = self.path().join("refs").join(revision);
        // A revision may be a commit itself.
        let text = fs::read_to_string(reference).unwrap_or_else(|_| revision.to_owned());
        let commit = text.trim();
        // A ref is another program's text: it must not lead out of the cache.
        let plain = !commit.is_empty() && !commit.contains(['/', '\\']) && !commit.starts_with('.');
        (plain && self.snapshot(commit).is_dir()).then(|| commit.to_owned())
    }

    /// What of a model is here, by the same rules by which it is fetched.
    pub fn find(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        let not_here = || HubError::NotHere { name: repo.to_string(), cache: self.cache.clone() };
        let commit = self.commit(&repo.revision).ok_or_else(not_here)?;
        match self.state(&commit, repo)? {
            State::Whole(path) => Ok(path),
            State::InPart(missing) => Err(HubError::InPart {
                name: repo.to_string(),
                missing,
                snapshot: self.snapshot(&commit),
            }),
        }
    }

    pub fn state(&self, commit: &str, repo: &RepoName) -> Result<State, HubError> {
        let snapshot = self.snapshot(commit);
        let files = files(&snapshot)?;
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let wish = Wish { repo: &repo.id, revision: &repo.revision, file: repo.file.as_deref() };
        let selection = match Selection::of(&names, wish) {
            Ok(selection) => selection,
            Err(error @ HubError::Ambiguous { .. }) => return Err(error),
            Err(_) => {
                let missing = repo.file.clone().unwrap_or_else(|| "a file of weights".to_owned());
                return Ok(State::InPart(missing));
            }
        };
        let weights = match &selection.weights {
            Weights::Files(files) => files.clone(),
            Weights::Indexed(index) => indexed_files(&snapshot.join(index))?,
        };
        // `files` follows links: a link to nothing is not among them.
        if let Some(missing) = weights.iter().find(|path| !names.contains(&path.as_str())) {
            return Ok(State::InPart(missing.clone()));
        }
        // One file that is the model is whole by itself.
        if selection.model_file.is_none() && self.mark(commit).exists() {
            return Ok(State::InPart("a file of the last, interrupted download".to_owned()));
        }
        Ok(State::Whole(selection.model_file.map_or(snapshot.clone(), |file| snapshot.join(file))))
    }

    /// `(revision, commit)` of everything that is here; a commit without a name names itself.
    pub fn revisions(&self) -> Result<Vec<(String, String)>, HubError> {
        let references = self.path().join("refs");
        let mut found: Vec<(String, String)> = files(&references)?
            .into_iter()
            .filter(|(name, _)| !name.starts_with('.'))
            .filter_map(|(name, _)| self.commit(&name).map(|commit| (name, commit)))
            .collect();
        let snapshots = self.path().join("snapshots");
        for commit in folders(&snapshots)? {
            if !found.iter().any(|(_, named)| *named == commit) {
                found.push((commit.clone(), commit));
            }
        }
        found.sort_by_key(|(name, _)| (name != MAIN, name.clone()));
        Ok(found)
    }

    /// Files of a snapshot with their sizes.
    pub fn contents(&self, commit: &str) -> Result<Vec<(String, u64)>, HubError> {
        files(&self.snapshot(commit))
    }

    /// Bytes of downloads that were interrupted.
    pub fn incomplete_bytes(&self) -> Result<u64, HubError> {
        let blobs = files(&self.path().join("blobs"))?;
        let incomplete = blobs.iter().filter(|(name, _)| name.ends_with(".incomplete"));
        Ok(incomplete.map(|(_, bytes)| bytes).sum())
    }

    /// Removes a repository with all its revisions.
    pub fn remove_all(&self) -> Result<(), HubError> {
        for folder in [self.path(), self.locks()] {
            if folder.exists() {
                fs::remove_dir_all(&folder).map_err(HubError::io("remove", &folder))?;
            }
        }
        Ok(())
    }

    /// Removes one revision, or one file of it, and the blobs that nothing else leads to.
    pub fn remove(&self, revision: &str, commit: &str, file: Option<&str>) -> Result<(), HubError> {
        let remove_file = |path: &Path| fs::remove_file(path).map_err(HubError::io("remove", path));
        let snapshot = self.snapshot(commit);
        if let Some(file) = file {
            remove_file(&snapshot.join(file))?;
        } else {
            let reference = self.path().join("refs").join(revision);
            if reference.exists() {
                remove_file(&reference)?;
            }
            let named = self.revisions()?.iter().any(|(name, c)| c == commit && name != commit);
            if !named {
                fs::remove_dir_all(&snapshot).map_err(HubError::io("remove", &snapshot))?;
                let _ = fs::remove_file(self.mark(commit));
            }
        }
        self.sweep()?;
        // Nothing is left: neither is the repository.
        let left = folders(&self.path().join("snapshots"))?;
        let has_files =
            |commit: &String| self.contents(commit).is_ok_and(|files| !files.is_empty());
        if left.iter().any(has_files) { Ok(()) } else { self.remove_all() }
    }

    /// Removes blobs that no snapshot leads to.
    fn sweep(&self) -> Result<(), HubError> {
        let mut used = Vec::new();
        for commit in folders(&self.path().join("snapshots"))? {
            let snapshot = self.snapshot(&commit);
            for (path, _) in files(&snapshot)? {
                used.extend(fs::read_link(snapshot.join(path)).ok().and_then(|target| {
                    target.file_name().map(|name| name.to_string_lossy().into_owned())
                }));
            }
        }
        let blobs = self.path().join("blobs");
        for (name, _) in files(&blobs)? {
            if !used.contains(&name) {
                let path = blobs.join(name);
                fs::remove_file(&path).map_err(HubError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// An error while someone fetches a file of this repository.
    pub fn check_unused(&self, name: &str) -> Result<(), HubError> {
        match lock::held(&self.locks())? {
            Some(lock) => Err(HubError::InUse { name: name.to_owned(), lock }),
            None => Ok(()),
        }
    }
}

/// Ids of the repositories that have a folder in the cache, in order.
pub fn repositories(cache: &Path) -> Result<Vec<String>, HubError> {
    let folders = folders(cache)?.into_iter();
    let ids =
        folders.filter_map(|name| Some(name.strip_prefix("models--")?.replacen("--", "/", 1)));
    Ok(ids.collect())
}

fn folders(folder: &Path) -> Result<Vec<String>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            return Err(HubError::Io { action: "list", path: folder.to_owned(), source });
        }
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

/// Files below a folder, by their relative paths, with the bytes of what links lead to.
fn files(folder: &Path) -> Result<Vec<(String, u64)>, HubError> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(inside) = open.pop() {
        let path = folder.join(&inside);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(HubError::Io { action: "list", path, source }),
        };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let name = if inside.is_empty() { name } else { format!("{inside}/{name}") };
            match fs::metadata(entry.path()) {
                // A link to a folder is no snapshot's; following it might never end.
                Ok(metadata) if metadata.is_dir() => {
                    if !entry.path().is_symlink() {
                        open.push(name);
                    }
                }
                Ok(metadata) => found.push((name, metadata.len())),
                Err(_) => {} // a link to nothing
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a revision is a commit by its look: a branch's name is better not.
pub fn is_commit(revision: &str) -> bool {
    is_hex(revision, 40)
}
