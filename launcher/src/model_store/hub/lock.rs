//! Locks between processes, ours and those of Hugging Face's tools: `flock` on a file.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::HubError;

const POLL: Duration = Duration::from_millis(100);

/// Held until dropped; the kernel frees it with the process.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// One try: the lock, or none while someone else holds it.
pub fn try_lock(path: &Path) -> Result<Option<Lock>, HubError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(HubError::io("make the folder", folder))?;
    loop {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .map_err(HubError::io("open the lock", path))?;
        match file.try_lock() {
            // Who held it before may have removed the file: then this is a lock on nothing.
            Ok(()) if is_still(&file, path) => return Ok(Some(Lock { _file: file })),
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(source)) => {
                return Err(HubError::Io { action: "lock", path: path.to_owned(), source });
            }
        }
    }
}

fn is_still(file: &File, path: &Path) -> bool {
    let inode = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|m| (m.dev(), m.ino()));
    inode(file.metadata()) == inode(fs::metadata(path))
}

/// Waits for the lock for as long as `written` (the bytes that its holder has written) grows, and
/// `patience` more.
pub fn lock(
    path: &Path,
    patience: Duration,
    written: impl Fn() -> u64,
    mut waiting: impl FnMut(),
) -> Result<Lock, HubError> {
    let mut last = (written(), Instant::now());
    let mut told = false;
    loop {
        if let Some(lock) = try_lock(path)? {
            return Ok(lock);
        }
        if !told {
            waiting();
            told = true;
        }
        let now = written();
        if now != last.0 {
            last = (now, Instant::now());
        }
        let waited = last.1.elapsed();
        if waited > patience {
            return Err(HubError::Locked { path: path.to_owned(), waited_s: waited.as_secs() });
        }
        thread::sleep(POLL);
    }
}

/// A lock file in this folder that someone holds.
pub fn held(folder: &Path) -> Result<Option<PathBuf>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(HubError::Io { action: "list", path: folder.to_owned(), source });
        }
    };
    for entry in entries.flatten() {
        if try_lock(&entry.path())?.is_none() {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}
