//! The folder of one running instance: its sockets, readable by its owner alone, gone at the end.

use std::{
    env,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

const PREFIX: &str = "trireme-";
/// Where Linux shows shared-memory objects as files.
const SHARED_MEMORY: &str = "/dev/shm";

/// Owned by one launcher. The kernel holds a lock on the folder itself for as long as that process
/// lives, so a folder without a lock is a dead launcher's, whatever its process id is used for now.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    instance: String,
    _lock: File,
}

impl RunFolder {
    /// A new folder below `$XDG_RUNTIME_DIR` or the folder for temporary files; stale ones there
    /// are removed first.
    pub fn create() -> io::Result<Self> {
        let base = env::var_os("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .filter(|path| path.is_dir())
            .unwrap_or_else(env::temp_dir);
        sweep(&base);
        Self::create_in(&base)
    }

    fn create_in(base: &Path) -> io::Result<Self> {
        // A sweep by another launcher can get in between making a folder and locking it.
        for _ in 0..16 {
            let instance = uuid::Uuid::new_v4().simple().to_string()[..8].to_owned();
            let path = base.join(format!("{PREFIX}{instance}"));
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.map_err(|e| naming(e, &path))?,
            }
            if let Ok(lock) = File::open(&path)
                && lock.try_lock().is_ok()
                && same_folder(&lock, &path)
            {
                return Ok(Self { path, instance, _lock: lock });
            }
        }
        Err(io::Error::other(format!("no run folder could be made in {}", base.display())))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names this instance on this machine.
    pub fn instance(&self) -> &str {
        &self.instance
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        remove(&self.path, &self.instance);
    }
}

/// Removes what dead launchers of this user left in `base`.
fn sweep(base: &Path) {
    let user = rustix::process::getuid().as_raw();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(instance) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else {
            continue;
        };
        // Never through a link, never another user's, never what only looks like ours.
        let ours = fs::symlink_metadata(entry.path())
            .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
        let named = instance.len() == 8 && instance.bytes().all(|b| b.is_ascii_hexdigit());
        if !(ours && named) {
            continue;
        }
        let Ok(lock) = File::open(entry.path()) else { continue };
        match lock.try_lock() {
            Ok(()) => remove(&entry.path(), instance),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

fn same_folder(opened: &File, path: &Path) -> bool {
    match (opened.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// The folder with its sockets, and the shared memory that ranks of the instance shared.
fn remove(folder: &Path, instance: &str) {
    let _ = fs::remove_dir_all(folder);
    let objects = format!("{PREFIX}{instance}-");
    for entry in fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&objects)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn naming(error: io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_lives_as_long_as_its_owner() {
        let base = tempfile::tempdir().unwrap();
        let folder = RunFolder::create_in(base.path()).unwrap();
        let path = folder.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(path.join("shard-0.sock"), "").unwrap();
        sweep(base.path());
        assert!(path.join("shard-0.sock").exists(), "a living launcher's folder was swept");
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn only_stale_folders_of_ours_are_swept() {
        let base = tempfile::tempdir().unwrap();
        let check = |name: &str, swept: bool| {
            let path = base.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("control.sock"), "").unwrap();
            sweep(base.path());
            assert_eq!(!path.exists(), swept, "{name}");
        };
        check("trireme-0123abcd", true);
        check("trireme-0123abcd-mine", false);
        check("trireme-notahex8", false);
        check("trireme", false);
        check("other-0123abcd", false);
    }

    #[test]
    fn shared_memory_goes_with_the_folder() {
        let base = tempfile::tempdir().unwrap();
        let folder = RunFolder::create_in(base.path()).unwrap();
        let object = Path::new(SHARED_MEMORY).join(format!("{PREFIX}{}-1", folder.instance()));
        fs::write(&object, "x").unwrap();
        drop(folder);
        assert!(!object.exists());
    }
}
