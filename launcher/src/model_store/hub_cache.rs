//! The cache that Hugging Face's own tools keep, read only:
//! `models--OWNER--NAME/refs/REVISION` names a commit, `snapshots/COMMIT/` has its files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{LocalModel, StoreError};

/// The snapshot folder of a repository, or an error that says how it gets there.
pub fn find(cache: &Path, id: &str, revision: &str) -> Result<PathBuf, StoreError> {
    let repo = cache.join(format!("models--{}", id.replace('/', "--")));
    let commit = match fs::read_to_string(repo.join("refs").join(revision)) {
        Ok(commit) => commit.trim().to_owned(),
        Err(_) => revision.to_owned(), // a revision may be a commit
    };
    let snapshot = repo.join("snapshots").join(&commit);
    // A ref is another program's text: it must not lead out of the cache.
    let plain = !commit.is_empty() && !commit.contains(['/', '\\']) && !commit.starts_with('.');
    if plain && snapshot.is_dir() {
        return Ok(snapshot);
    }
    let at = if revision == "main" { String::new() } else { format!(" --revision {revision}") };
    Err(StoreError::Name {
        given: id.to_owned(),
        detail: format!(
            "revision {revision} is not in the Hugging Face cache {}; `hf download {id}{at}` puts it there \
             (trireme itself fetches aliases only), or give a folder or file",
            cache.display()
        ),
    })
}

/// Every repository whose main snapshot is there and looks like a language model.
pub fn list(cache: &Path) -> Result<Vec<LocalModel>, StoreError> {
    let entries = match fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(StoreError::Io { path: cache.to_owned(), cause }),
    };
    let mut models = Vec::new();
    for entry in entries.flatten() {
        let folder = entry.file_name();
        let Some(id) = folder.to_str().and_then(|name| name.strip_prefix("models--")) else {
            continue;
        };
        let id = id.replacen("--", "/", 1);
        let Ok(path) = find(cache, &id, "main") else { continue };
        let (bytes, weights) = contents(&path);
        if weights {
            models.push(LocalModel { name: id, path, bytes, ours: false });
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Bytes of a snapshot, and whether weights are among them.
fn contents(snapshot: &Path) -> (u64, bool) {
    let files = fs::read_dir(snapshot).into_iter().flatten().flatten();
    files.fold((0, false), |(bytes, weights), file| {
        // Entries are links into the cache's blobs: `metadata` of the path follows them.
        let size = fs::metadata(file.path()).map_or(0, |metadata| metadata.len());
        let end = file.path().extension().and_then(|e| e.to_str()).unwrap_or("").to_owned();
        let is_weights = ["safetensors", "gguf", "bin", "pth", "pt"].contains(&end.as_str());
        (bytes + size, weights || is_weights)
    })
}
