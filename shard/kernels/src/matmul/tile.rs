//! The micro-kernel under the matrix product and under both products of attention.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

use half::bf16;

use crate::simd::{LANES, Simd};

/// A stored number and how sixteen of them are multiplied.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Inputs stored side by side in one lane.
    const PAIR: usize;
    /// Elements of one vector load.
    const VECTOR: usize = LANES * Self::PAIR;

    /// `depth` rounded up to whole pairs.
    #[inline(always)]
    fn padded(depth: usize) -> usize {
        depth.next_multiple_of(Self::PAIR)
    }

    /// Stores `x`, rounded to nearest even, as one atomic write.
    /// # Safety
    /// `to` is valid for atomic writes.
    unsafe fn store_shared(to: *mut Self, x: f32);

    /// The weights of `PAIR` neighbouring inputs (the second is unused where `PAIR` is 1).
    /// # Safety
    /// `from` points to `VECTOR` readable elements.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> [S::V; 2];
}

impl Element for f32 {
    const PAIR: usize = 1;
    #[inline(always)]
    unsafe fn store_shared(to: *mut f32, x: f32) {
        // SAFETY: valid by the caller's word; `f32` is aligned as `AtomicU32` is.
        unsafe { AtomicU32::from_ptr(to.cast()) }.store(x.to_bits(), Relaxed);
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f32) -> [S::V; 2] {
        // SAFETY: the caller vouches for 16 readable values.
        let v = unsafe { s.load_f32(from) };
        [v, v]
    }
}

impl Element for bf16 {
    const PAIR: usize = 2;
    #[inline(always)]
    unsafe fn store_shared(to: *mut bf16, x: f32) {
        // SAFETY: valid by the caller's word; `bf16` is aligned as `AtomicU16` is.
        unsafe { AtomicU16::from_ptr(to.cast()) }.store(bf16::from_f32(x).to_bits(), Relaxed);
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const bf16) -> [S::V; 2] {
        // SAFETY: the caller vouches for 32 readable values.
        let (first, second) = unsafe { s.load_bf16_pairs(from) };
        [first, second]
    }
}

/// Sums of `ROWS` rows by `VECTORS` vectors of outputs: `sums[r][v] += Σ_k x[k][r] * w[v][k]`, in order
/// of `k`. Vector `v` of weights starts at `w[v]`; its steps are `WIDTH` outputs apart.
pub(crate) struct Tile<S: Simd, E, const ROWS: usize, const VECTORS: usize, const WIDTH: usize> {
    pub s: S,
    pub x: *const f32,
    pub w: [*const E; VECTORS],
    pub depth: usize,
    /// Where the sums of row `r` are: `16 * VECTORS` values from `r * sums_stride`.
    pub sums: *mut f32,
    pub sums_stride: usize,
    /// Start from zero rather than from what is there.
    pub fresh: bool,
}

impl<S: Simd, E: Element, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>
    Tile<S, E, ROWS, VECTORS, WIDTH>
{
    /// `x` of input `k` and row `r` is at `k * K_STEP + r * R_STEP`.
    ///
    /// # Safety
    /// `x` and each of `w` are readable for `depth` inputs (`w`: for `E::padded(depth)`), and `sums` is
    /// ours alone to read and write.
    #[inline(always)]
    pub(crate) unsafe fn run<const K_STEP: usize, const R_STEP: usize>(&self) {
        let mut sums = [[self.s.splat(0.0); VECTORS]; ROWS];
        if !self.fresh {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: within the sums, which are ours.
                    *sum = unsafe { self.s.load_f32(self.sum(row, v)) };
                }
            }
        }
        let pairs = self.depth / E::PAIR;
        for pair in 0..pairs {
            // SAFETY: `pair` is below the depth.
            let w = unsafe { self.weights(pair) };
            for part in 0..E::PAIR {
                // SAFETY: input `pair * PAIR + part` is below the depth.
                unsafe { self.step::<K_STEP, R_STEP>(pair * E::PAIR + part, part, &w, &mut sums) };
            }
        }
        if E::PAIR * pairs < self.depth {
            // SAFETY: the last pair is stored whole; only its first half is used.
            unsafe {
                let w = self.weights(pairs);
                self.step::<K_STEP, R_STEP>(self.depth - 1, 0, &w, &mut sums);
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                // SAFETY: within the sums, which are ours.
                unsafe { self.s.store_f32(sum, self.sum(row, v)) };
            }
        }
    }

    /// # Safety
    /// `row` and `v` are within the tile.
    #[inline(always)]
    unsafe fn sum(&self, row: usize, v: usize) -> *mut f32 {
        // SAFETY: the caller of `run` vouches for the sums.
        unsafe { self.sums.add(row * self.sums_stride + v * LANES) }
    }

    /// # Safety
    /// `pair` is within the depth.
    #[inline(always)]
    unsafe fn weights(&self, pair: usize) -> [[S::V; 2]; VECTORS] {
        let mut loaded = [[self.s.splat(0.0); 2]; VECTORS];
        for (v, loaded) in loaded.iter_mut().enumerate() {
            // SAFETY: the caller of `run` vouches for the depth.
            *loaded = unsafe { E::load(self.s, self.w[v].add(pair * WIDTH * E::PAIR)) };
        }
        loaded
    }

    /// # Safety
    /// `k` is within the depth.
    #[inline(always)]
    unsafe fn step<const K_STEP: usize, const R_STEP: usize>(
        &self,
        k: usize,
        part: usize,
        w: &[[S::V; 2]; VECTORS],
        sums: &mut [[S::V; VECTORS]; ROWS],
    ) {
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller of `run` vouches for the depth and the rows.
            let x = self.s.splat(unsafe { *self.x.add(k * K_STEP + row * R_STEP) });
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum = self.s.fma(x, w[part], *sum);
            }
        }
    }
}

/// Calls a method with the height of a block of rows as its last generic argument.
macro_rules! by_height {
    ($height:expr, $owner:ident.$call:ident::<$isa:ident>($($arg:expr),+)) => {
        by_height!(@ $height, $owner, $call, $isa, ($($arg),+), 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $height:expr, $owner:ident, $call:ident, $isa:ident, $args:tt, $($n:literal)+) => {
        match $height {
            // The heights that this instruction set never uses are not compiled.
            $($n if $n <= $isa::TILE_ROWS => by_height!(@@ $owner, $call, $isa, $n, $args),)+
            height => unreachable!("a block of {height} rows"),
        }
    };
    (@@ $owner:ident, $call:ident, $isa:ident, $n:literal, ($($arg:expr),+)) => {
        $owner.$call::<$isa, $n>($($arg),+)
    };
}
pub(crate) use by_height;
