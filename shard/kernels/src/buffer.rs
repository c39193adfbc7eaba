//! Zeroed memory on cache-line boundaries, in huge pages when it is large.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

/// From here on a buffer asks for huge pages: a 2 MiB page saves 512 misses of the address cache.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const LINE_BYTES: usize = 64;

/// `len` values of `T`, zero at first. It is touched at once, so memory runs out here or never.
pub(crate) struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its memory as a `Vec` does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    pub(crate) fn zeroed(len: usize) -> Self {
        const { assert!(size_of::<T>() > 0) };
        if len == 0 {
            return Self { start: NonNull::dangling(), len };
        }
        let layout = layout::<T>(len);
        // SAFETY: the layout is not empty: `len > 0` and `T` has a size.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        advise_huge_pages(start, layout.size());
        // SAFETY: the allocation is `layout.size()` bytes long and ours.
        unsafe { start.write_bytes(0, layout.size()) };
        Self { start: start.cast(), len }
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
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout::<T>(self.len)) };
        }
    }
}

fn layout<T>(len: usize) -> Layout {
    let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits the address space");
    let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { LINE_BYTES };
    Layout::from_size_align(bytes, align).expect("a buffer fits the address space")
}

/// A hint: where it fails, pages stay small and nothing else changes.
fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    if bytes < HUGE_PAGE_BYTES {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        let whole = bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        // SAFETY: the range is inside our own fresh allocation and the advice changes no contents.
        let advice = unsafe {
            rustix::mm::madvise(start.as_ptr().cast(), whole, rustix::mm::Advice::LinuxHugepage)
        };
        // Refused where the kernel is built without huge pages.
        let _ = advice;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = start;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(len: usize) {
        let mut buffer = Buffer::<f32>::zeroed(len);
        assert_eq!(buffer.len(), len);
        assert!(buffer.iter().all(|&x| x == 0.0));
        assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(LINE_BYTES));
        buffer.fill(2.0);
        assert_eq!(buffer.iter().sum::<f32>(), 2.0 * len as f32);
    }

    #[test]
    fn is_zeroed_aligned_and_writable() {
        for len in [0, 1, 63, 4096, HUGE_PAGE_BYTES / 4, HUGE_PAGE_BYTES / 4 + 5] {
            check(len);
        }
    }
}
