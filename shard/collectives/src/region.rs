//! Zeroed memory that every rank of a world sees: an anonymous mapping for threads, a shared-memory
//! object for processes. The algorithms above it do not know which.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::CollectiveError;
use crate::event::Event;

/// Who may touch which bytes when is the caller's protocol (see `round.rs` and `mailbox.rs`): bytes
/// are written by one owner, published by an [`Event`], and only then read by others.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    /// `None` for an anonymous mapping.
    object: Option<OwnedFd>,
    name: String,
}

// SAFETY: `base` is a mapping owned by this value alone and unmapped only by its `Drop`; all access
// goes through atomics (`event`, `number`) or through `unsafe` methods whose callers keep writers
// and readers apart.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    /// Memory of this process. Pages cost nothing until they are touched.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a null hint asks for a new mapping, which aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Self::new(base.cast(), len, None, "of this process".to_owned())
    }

    /// The first `len` bytes of a shared-memory object, which must be at least that long.
    pub(crate) fn shared(object: OwnedFd, len: usize, name: &str) -> io::Result<Self> {
        // SAFETY: a null hint asks for a new mapping, which aliases no Rust object; other processes
        // map the same object and follow the same protocol.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &object,
                0,
            )
        }?;
        Self::new(base.cast(), len, Some(object), name.to_owned())
    }

    fn new(base: *mut u8, len: usize, object: Option<OwnedFd>, name: String) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, len, object, name })
    }

    /// Takes the pages of `range` now, so that a full `/dev/shm` is an error here and not a `SIGBUS`
    /// at the first write. Keeps what the pages hold.
    pub(crate) fn reserve(&self, range: Range<usize>) -> Result<(), CollectiveError> {
        let Some(object) = &self.object else { return Ok(()) };
        let (offset, len) = (range.start as u64, range.len() as u64);
        match rustix::fs::fallocate(object, FallocateFlags::empty(), offset, len) {
            // A file system without fallocate only loses the early error.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(CollectiveError::SharedMemory {
                name: self.name.clone(),
                source: io::Error::new(
                    io::Error::from(errno).kind(),
                    format!("cannot take {len} bytes: {errno}; is /dev/shm too small?"),
                ),
            }),
        }
    }

    /// The pointer to `len` bytes at `offset`, after a bounds check.
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        let end = offset.checked_add(len).expect("a range of the region");
        assert!(end <= self.len, "bytes {offset}..{end} of a region of {}", self.len);
        // SAFETY: `offset <= len` was checked, so the sum stays inside this one mapping.
        unsafe { self.base.add(offset) }
    }

    /// The event at `offset`.
    pub(crate) fn event(&self, offset: usize) -> &Event {
        assert_eq!(offset % align_of::<Event>(), 0, "an event's alignment");
        // SAFETY: in bounds (`at`), aligned (checked; the mapping is page-aligned), made of atomics
        // only, for which every bit pattern is valid and shared access is allowed. The layout never
        // overlaps events with plain bytes.
        unsafe { self.at(offset, size_of::<Event>()).cast::<Event>().as_ref() }
    }

    /// The atomic number at `offset`.
    pub(crate) fn number(&self, offset: usize) -> &AtomicU64 {
        assert_eq!(offset % align_of::<AtomicU64>(), 0, "a number's alignment");
        // SAFETY: as for `event`.
        unsafe { self.at(offset, size_of::<AtomicU64>()).cast::<AtomicU64>().as_ref() }
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Safety
    /// No other rank reads or writes these bytes until the caller publishes them.
    pub(crate) unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `to` is in bounds; `bytes` is ordinary memory outside the mapping; the caller
        // promises that nobody else touches the target.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) }
    }

    /// Copies from `offset` into `bytes`.
    ///
    /// # Safety
    /// These bytes were published to the caller, and nobody writes them until the caller says so.
    pub(crate) unsafe fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: `from` is in bounds; `bytes` is ordinary memory outside the mapping; the caller
        // promises that nobody writes the source.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    /// The `len` floats at `offset`.
    ///
    /// # Safety
    /// As for [`Region::read`], for as long as the slice lives.
    pub(crate) unsafe fn floats(&self, offset: usize, len: usize) -> &[f32] {
        assert_eq!(offset % align_of::<f32>(), 0, "a float's alignment");
        let from = self.at(offset, len * size_of::<f32>());
        // SAFETY: in bounds, aligned, every bit pattern is a float; the caller promises that nobody
        // writes these bytes while the slice lives.
        unsafe { std::slice::from_raw_parts(from.cast::<f32>().as_ptr(), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are the mapping that `new` took, and no reference outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "the mapping was ours");
    }
}
