//! A mutable slice that several threads write in places that do not overlap.

use std::marker::PhantomData;
use std::ops::Range;

use crate::matmul::tile::Element;

/// Hands out parts of one exclusive borrow; the threads of a [`crate::Team`] agree on who takes what.
#[derive(Clone, Copy)]
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` split between threads, which may move when `T` may.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: sharing it only allows `part`, whose caller vouches for disjointness.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(all: &'a mut [T]) -> Self {
        Self { start: all.as_mut_ptr(), len: all.len(), borrow: PhantomData }
    }

    /// # Safety
    /// While the part is alive nobody else holds a part that overlaps it.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's word, alive for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

impl<T> Disjoint<'_, T> {
    /// Where `range` starts. To go through it, nobody else may use what is reached.
    #[inline(always)]
    pub(crate) fn reach(&self, range: Range<usize>) -> *mut T {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion.
        unsafe { self.start.add(range.start) }
    }
}

impl<E: Element> Disjoint<'_, E> {
    /// Writes one number, rounded. Two threads may write the same place (a block table that names a
    /// block twice): one of them wins.
    #[inline(always)]
    pub(crate) fn publish(&self, place: usize, value: f32) {
        assert!(place < self.len, "place {place} of {}", self.len);
        // SAFETY: in bounds by the assertion. The store is atomic, and while the borrow is split this
        // way (for an append) nobody reads.
        unsafe { E::store_shared(self.start.add(place), value) };
    }
}
