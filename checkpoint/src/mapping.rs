//! A read-only file in memory, and its bytes seen as ggml's blocks: all `unsafe` of this crate.

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8K,
    GgmlType,
};
use memmap2::{Mmap, UncheckedAdvice};

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

    /// Takes pages that were read out of this process's memory; who reads them again finds them in
    /// the page cache, or the system reads them anew.
    pub(crate) fn release(&self, bytes: Range<usize>) {
        // SAFETY: of a private map that is never written, dropping pages changes no byte: the next
        // access maps the file's pages again. Borrowed slices stay as valid as they were.
        #[allow(unsafe_code)]
        let advised = unsafe {
            self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len())
        };
        // Without it, only memory is held longer.
        drop(advised);
    }
}

/// candle's struct of one ggml block. Only this module implements it: `blocks` relies on that.
pub(crate) trait Block: GgmlType {}

macro_rules! block {
    ($($block:ty: $bytes:literal),*) => {$(
        impl Block for $block {}
        const _: () = assert!(size_of::<$block>() == $bytes);
    )*};
}

block!(
    BlockQ4_0: 18, BlockQ4_1: 20, BlockQ5_0: 22, BlockQ5_1: 24, BlockQ2K: 84,
    BlockQ4K: 144, BlockQ5K: 176, BlockQ6K: 210, BlockQ8K: 292
);

/// Bytes seen as the blocks that they are; none where they are no whole, aligned blocks. candle's
/// own constructor (`GgmlDType::from_data`) copies both the blocks and their values, and panics on
/// bytes that are not aligned.
pub(crate) fn blocks<B: Block>(bytes: &[u8]) -> Option<&[B]> {
    // SAFETY: `B` is one of the structs above, all `repr(C)` arrays of integers, f16 and f32, for
    // which every bit pattern is a value; their sizes are asserted, their source is pinned to one
    // version of candle. Alignment and length are `align_to`'s care, the lifetime is the bytes'.
    #[allow(unsafe_code)]
    let (before, blocks, after) = unsafe { bytes.align_to::<B>() };
    (before.is_empty() && after.is_empty()).then_some(blocks)
}

fn malformed(path: &Path, what: &str, expected: &str, found: &str) -> CheckpointError {
    CheckpointError::Malformed {
        path: path.to_owned(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found: found.to_owned(),
    }
}
