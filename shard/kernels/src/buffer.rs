//! Zeroed memory on cache-line boundaries, in huge pages where asked.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
#[cfg(target_os = "linux")]
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

/// A 2 MiB page saves 512 misses of the address cache.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// From here on memory comes from the kernel, page by page as it is touched, and returns to it when
/// dropped; an allocator clears aligned memory at once and keeps freed memory in its arenas.
const MAPPED_BYTES: usize = 64 << 10;
const LINE_BYTES: usize = 64;

/// How a buffer will be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// All of it, soon: huge pages, if it is that large.
    Whole,
    /// Here and there, as use grows: small pages, so that what is resident is what is used.
    Sparse,
}

/// `len` values of `T`, zero at first. Large ones are not resident before they are touched.
pub struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
    memory: Memory,
}

/// What is to be given back.
#[derive(Clone, Copy)]
enum Memory {
    None,
    Allocated(Layout),
    #[cfg(target_os = "linux")]
    Mapped {
        base: *mut c_void,
        bytes: usize,
    },
}

// SAFETY: it owns its memory as a `Vec` does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// Memory whose resident part follows its use.
    pub fn sparse(len: usize) -> Self {
        Self::zeroed(len, Touch::Sparse)
    }

    pub(crate) fn zeroed(len: usize, touch: Touch) -> Self {
        const { assert!(size_of::<T>() > 0) };
        const { assert!(align_of::<T>() <= LINE_BYTES) };
        if len == 0 {
            return Self { start: NonNull::dangling(), len, memory: Memory::None };
        }
        let layout = layout::<T>(len);
        #[cfg(target_os = "linux")]
        if layout.size() >= MAPPED_BYTES {
            let (start, memory) = map(layout, touch);
            return Self { start: start.cast(), len, memory };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = touch;
        // SAFETY: the layout is not empty: `len > 0` and `T` has a size.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        Self { start: start.cast(), len, memory: Memory::Allocated(layout) }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` made `len` valid values (`Pod`: all zero is a value); dangling only if 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        match self.memory {
            Memory::None => {}
            // SAFETY: allocated in `zeroed` with this very layout.
            Memory::Allocated(layout) => unsafe { dealloc(self.start.as_ptr().cast(), layout) },
            #[cfg(target_os = "linux")]
            Memory::Mapped { base, bytes } => {
                // SAFETY: mapped in `map` with this length, and nothing else points into it.
                let unmapped = unsafe { rustix::mm::munmap(base, bytes) };
                debug_assert!(unmapped.is_ok(), "{unmapped:?}");
            }
        }
    }
}

fn layout<T>(len: usize) -> Layout {
    let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits the address space");
    Layout::from_size_align(bytes, LINE_BYTES).expect("a buffer fits the address space")
}

/// Private zero pages of the kernel, and where they start: on a huge page's boundary where they
/// shall be huge.
#[cfg(target_os = "linux")]
fn map(layout: Layout, touch: Touch) -> (NonNull<u8>, Memory) {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

    let huge = touch == Touch::Whole && layout.size() >= HUGE_PAGE_BYTES;
    // Room to move the start to a boundary; what lies before it is never touched.
    let slack = if huge { HUGE_PAGE_BYTES } else { 0 };
    let bytes = layout.size().checked_add(slack).expect("a buffer fits the address space");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
    let Ok(base) = base else { handle_alloc_error(layout) };
    let align = if huge { HUGE_PAGE_BYTES } else { LINE_BYTES };
    let offset = base.addr().next_multiple_of(align) - base.addr();
    // SAFETY: the offset is at most `slack` (a mapping starts on a page), so the start lies inside.
    let start = unsafe { base.cast::<u8>().add(offset) };
    let (length, advice) = if huge {
        (layout.size() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, Advice::LinuxHugepage)
    } else {
        (layout.size(), Advice::LinuxNoHugepage)
    };
    // SAFETY: the range is inside our own fresh mapping and the advice changes no contents.
    let advised = unsafe { madvise(start.cast(), length, advice) };
    // Refused where the kernel is built without huge pages; then nothing else changes.
    let _ = advised;
    let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
    (start, Memory::Mapped { base, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(len: usize, touch: Touch) {
        let mut buffer = Buffer::<f32>::zeroed(len, touch);
        assert_eq!(buffer.len(), len);
        assert!(buffer.iter().all(|&x| x == 0.0));
        assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(LINE_BYTES));
        buffer.fill(2.0);
        assert_eq!(buffer.iter().sum::<f32>(), 2.0 * len as f32);
    }

    #[test]
    fn is_zeroed_aligned_and_writable() {
        let huge = HUGE_PAGE_BYTES / 4;
        let mapped = MAPPED_BYTES / 4;
        for len in [0, 1, 63, 4096, mapped - 1, mapped, mapped + 1, huge, huge + 5] {
            check(len, Touch::Whole);
            check(len, Touch::Sparse);
        }
    }

    /// What of the buffer is resident, in KiB.
    #[cfg(target_os = "linux")]
    fn resident_kib(buffer: &Buffer<u8>) -> usize {
        let start = buffer.as_ptr().addr();
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("this host has /proc");
        let mut inside = false;
        let mut sum = 0;
        for line in smaps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let bounds = range.map(|(low, high)| [low, high].map(|n| usize::from_str_radix(n, 16)));
            if let Some([Ok(low), Ok(high)]) = bounds {
                inside = low < start + buffer.len() && high > start;
            } else if let (true, Some(kib)) = (inside, line.strip_prefix("Rss:")) {
                sum += kib.trim().trim_end_matches(" kB").parse::<usize>().expect("a number");
            }
        }
        sum
    }

    /// The kernel may join the mapping with neighbours of other tests: far more than those take.
    #[cfg(target_os = "linux")]
    #[test]
    fn sparse_memory_is_resident_where_it_was_touched() {
        const BYTES: usize = 1 << 30;
        let mut buffer = Buffer::<u8>::sparse(BYTES);
        assert!(resident_kib(&buffer) < BYTES / 1024 / 4, "nothing was touched");
        for at in (0..BYTES).step_by(64 << 20) {
            buffer[at] = 1;
        }
        assert!(resident_kib(&buffer) < BYTES / 1024 / 4, "16 pages were touched");
        buffer[..64 << 20].fill(1);
        assert!(resident_kib(&buffer) >= 64 << 10, "64 MiB were touched");
    }
}
