//! The micro-kernel over quantised panels: numbers become f32 in registers, bit-equal to the decoded
//! weights, and join the same chains of multiply-adds as dense ones. Products are therefore bit-equal
//! to those of the decoded matrix in f32.

use std::marker::PhantomData;

use half::f16;

use super::Source;
use crate::matrix::PANEL;
use crate::quantised::QuantisedPanels;
use crate::simd::{LANES, Simd};

/// What the numbers of a block type mean.
pub(super) trait Blocks: Copy + Send + Sync + 'static {
    const NUMBERS: usize;
    const GROUP: usize = 32;
    const NIBBLES: bool = true;
    /// f16 scales of a block and factors of a group, for each output.
    const SCALES: usize = 1;
    const FACTORS: usize = 0;
    /// (scale, offset) of a group from the scales of its block and its factors.
    ///
    /// # Safety
    /// Both point to a vector of 16 outputs; the next of the same output is `PANEL` further.
    unsafe fn group<S: Simd>(s: S, scales: *const f16, factors: *const i8) -> (S::V, S::V);
    /// The value of a number.
    fn value<S: Simd>(s: S, number: S::V, group: (S::V, S::V)) -> S::V;
}

#[derive(Clone, Copy)]
pub(super) struct Q4_0;
#[derive(Clone, Copy)]
pub(super) struct Q4_1;
#[derive(Clone, Copy)]
pub(super) struct Q8_0;
#[derive(Clone, Copy)]
pub(super) struct Q4K;
#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Blocks for Q4_0 {
    const NUMBERS: usize = 32;
    #[inline(always)]
    unsafe fn group<S: Simd>(s: S, scales: *const f16, _: *const i8) -> (S::V, S::V) {
        // SAFETY: the caller vouches for the scales.
        (unsafe { s.load_f16(scales) }, s.splat(8.0))
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, number: S::V, (scale, middle): (S::V, S::V)) -> S::V {
        s.mul(s.sub(number, middle), scale)
    }
}

impl Blocks for Q4_1 {
    const NUMBERS: usize = 32;
    const SCALES: usize = 2;
    #[inline(always)]
    unsafe fn group<S: Simd>(s: S, scales: *const f16, _: *const i8) -> (S::V, S::V) {
        // SAFETY: the caller vouches for both scales.
        unsafe { (s.load_f16(scales), s.load_f16(scales.add(PANEL))) }
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, number: S::V, (scale, offset): (S::V, S::V)) -> S::V {
        s.add(s.mul(number, scale), offset)
    }
}

impl Blocks for Q8_0 {
    const NUMBERS: usize = 32;
    const NIBBLES: bool = false;
    #[inline(always)]
    unsafe fn group<S: Simd>(s: S, scales: *const f16, _: *const i8) -> (S::V, S::V) {
        // SAFETY: the caller vouches for the scales.
        let scale = unsafe { s.load_f16(scales) };
        (scale, scale)
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, number: S::V, (scale, _): (S::V, S::V)) -> S::V {
        s.mul(number, scale)
    }
}

impl Blocks for Q4K {
    const NUMBERS: usize = 256;
    const SCALES: usize = 2;
    const FACTORS: usize = 2;
    #[inline(always)]
    unsafe fn group<S: Simd>(s: S, scales: *const f16, factors: *const i8) -> (S::V, S::V) {
        // SAFETY: the caller vouches for both scales and both factors.
        unsafe {
            let scale = s.mul(s.load_f16(scales), s.load_i8(factors));
            (scale, s.mul(s.load_f16(scales.add(PANEL)), s.load_i8(factors.add(PANEL))))
        }
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, number: S::V, (scale, offset): (S::V, S::V)) -> S::V {
        s.sub(s.mul(number, scale), offset)
    }
}

impl Blocks for Q6K {
    const NUMBERS: usize = 256;
    const GROUP: usize = 16;
    const NIBBLES: bool = false;
    const FACTORS: usize = 1;
    #[inline(always)]
    unsafe fn group<S: Simd>(s: S, scales: *const f16, factors: *const i8) -> (S::V, S::V) {
        // SAFETY: the caller vouches for the scales and the factors.
        let scale = unsafe { s.mul(s.load_f16(scales), s.load_i8(factors)) };
        (scale, scale)
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, number: S::V, (scale, _): (S::V, S::V)) -> S::V {
        s.mul(number, scale)
    }
}

/// The panels of a matrix, with the meaning of its blocks.
pub(super) struct Quantised<'a, B> {
    panels: &'a QuantisedPanels,
    blocks: PhantomData<B>,
}

impl<'a, B> Quantised<'a, B> {
    pub(super) fn new(panels: &'a QuantisedPanels) -> Self {
        Self { panels, blocks: PhantomData }
    }
}

/// Half a panel from the start of a block on.
#[derive(Clone, Copy)]
pub(super) struct Place {
    numbers: *const u8,
    scales: *const f16,
    factors: *const i8,
}

impl<B: Blocks> Source for Quantised<'_, B> {
    type Place = Place;
    const UNIT: usize = B::NUMBERS;

    #[inline(always)]
    fn place(&self, panel: usize, input: usize, half: usize) -> Place {
        debug_assert!(input.is_multiple_of(B::NUMBERS));
        let p = self.panels;
        let (numbers, scales, factors) = p.strides();
        let lane = half * LANES;
        let number = if B::NIBBLES { input / 2 } else { input } * PANEL;
        let scale = input / B::NUMBERS * B::SCALES * PANEL;
        let factor = input / B::GROUP * B::FACTORS * PANEL;
        // SAFETY: within the matrix, by the caller's word for `panel` and `input`; where there are no
        // factors the place is not read, and `wrapping_add` may lead anywhere.
        unsafe {
            Place {
                numbers: p.numbers.as_ptr().add(panel * numbers + number + lane),
                scales: p.scales.as_ptr().add(panel * scales + scale + lane),
                factors: p.factors.as_ptr().wrapping_add(panel * factors + factor + lane),
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
        s: S,
        x: *const f32,
        w: [Place; VECTORS],
        depth: usize,
        (sums_at, sums_stride): (*mut f32, usize),
        fresh: bool,
    ) {
        debug_assert!(depth.is_multiple_of(B::NUMBERS));
        let mut sums = [[s.splat(0.0); VECTORS]; ROWS];
        if !fresh {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: within the sums, which are the caller's.
                    *sum = unsafe { s.load_f32(sums_at.add(row * sums_stride + v * LANES)) };
                }
            }
        }
        for group in 0..depth / B::GROUP {
            let mut scales = [(s.splat(0.0), s.splat(0.0)); VECTORS];
            for (scale, w) in scales.iter_mut().zip(&w) {
                let block = group * B::GROUP / B::NUMBERS;
                // SAFETY: the block is below the depth.
                *scale = unsafe {
                    let factors = w.factors.wrapping_add(group * B::FACTORS * PANEL);
                    B::group(s, w.scales.add(block * B::SCALES * PANEL), factors)
                };
            }
            for pair in group * B::GROUP / 2..(group + 1) * B::GROUP / 2 {
                let mut values = [[s.splat(0.0); 2]; VECTORS];
                for ((values, w), &scale) in values.iter_mut().zip(&w).zip(&scales) {
                    // SAFETY: the pair is below the depth.
                    let numbers = unsafe { numbers::<S, B>(s, w, pair) };
                    *values = numbers.map(|number| B::value(s, number, scale));
                }
                for part in 0..2 {
                    for (row, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: the caller vouches for the depth and the rows.
                        let x = s.splat(unsafe { *x.add((2 * pair + part) * ROWS + row) });
                        for (sum, values) in sums.iter_mut().zip(&values) {
                            *sum = s.fma(x, values[part], *sum);
                        }
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                // SAFETY: within the sums, which are the caller's.
                unsafe { s.store_f32(sum, sums_at.add(row * sums_stride + v * LANES)) };
            }
        }
    }
}

/// Numbers of two neighbouring inputs.
///
/// # Safety
/// The pair is within the panel.
#[inline(always)]
unsafe fn numbers<S: Simd, B: Blocks>(s: S, w: &Place, pair: usize) -> [S::V; 2] {
    // SAFETY: the caller vouches for the pair.
    unsafe {
        if B::NIBBLES {
            let (first, second) = s.load_nibbles(w.numbers.add(pair * PANEL));
            [first, second]
        } else {
            let at = w.numbers.add(2 * pair * PANEL).cast();
            [s.load_i8(at), s.load_i8(at.add(PANEL))]
        }
    }
}
