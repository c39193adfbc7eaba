//! A read-only file in memory: the one `unsafe` of this crate.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use memmap2::Mmap;

use crate::CheckpointError;

/// First line of a Git LFS pointer file (git-lfs specification, version 1).
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A mapped file and its path, for messages.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a file that is neither empty nor a Git LFS pointer.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |action| {
            let path = path.to_owned();
            move |source| CheckpointError::Io { path, action, source }
        };
        let file = File::open(path).map_err(io("open the file"))?;
        let metadata = file.metadata().map_err(io("read the file's size"))?;
        if !metadata.is_file() {
            return Err(malformed(path, "file", "a regular file", "something else"));
        }
        if metadata.len() == 0 {
            return Err(malformed(path, "file", "a checkpoint", "an empty file (0 bytes)"));
        }
        // SAFETY: the map is private and read-only, its length is the file's length at this moment,
        // and `MappedFile` hands out only `&[u8]` bound to itself. What remains is that nobody
        // truncates or rewrites the file while a model is loaded from it: a model folder is
        // written by a download and renamed into place when complete, never edited.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(io("map the file"))?;
        if map.starts_with(LFS_POINTER) {
            let found = "a Git LFS pointer (run `git lfs pull`, or download the file again)";
            return Err(malformed(path, "file", "weights", found));
        }
        Ok(Self { path: path.to_owned(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

fn malformed(path: &Path, what: &str, expected: &str, found: &str) -> CheckpointError {
    CheckpointError::Malformed {
        path: path.to_owned(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found: found.to_owned(),
    }
}
