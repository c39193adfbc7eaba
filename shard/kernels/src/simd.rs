//! Sixteen `f32` lanes, whatever the CPU: one zmm, two ymm, or an array the compiler vectorises.
//!
//! A kernel is written once over [`Simd`] and runs through [`Isa::run`], which compiles it with the
//! instruction set turned on. A value of [`Avx2`] or [`Avx512`] is the proof that the CPU has it.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use half::{bf16, f16};
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

pub(crate) const LANES: usize = 16;

/// One instruction set. All operations are lane by lane unless they say otherwise.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    /// The most rows of a matmul tile whose accumulators stay in registers ...
    const TILE_ROWS: usize;
    /// ... when it is two vectors wide (else one).
    const TILE_IS_WIDE: bool;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    /// # Safety
    /// `from` points to 16 readable `f32`.
    unsafe fn load_f32(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` points to 16 writable `f32`.
    unsafe fn store_f32(self, v: Self::V, to: *mut f32);
    /// Sixteen pairs: (the first of each, the second of each).
    /// # Safety
    /// `from` points to 32 readable `bf16`.
    unsafe fn load_bf16_pairs(self, from: *const bf16) -> (Self::V, Self::V);
    /// # Safety
    /// `from` points to 16 readable `f16`.
    unsafe fn load_f16(self, from: *const f16) -> Self::V;
    /// # Safety
    /// `from` points to 16 readable bytes.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;
    /// Sixteen pairs of numbers from 0 to 15: (the low halves of the bytes, the high halves).
    /// # Safety
    /// `from` points to 16 readable bytes.
    unsafe fn load_nibbles(self, from: *const u8) -> (Self::V, Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`; one rounding where the CPU can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`: a NaN in `b` passes, a NaN in `a` does not.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`: a NaN in `b` passes, a NaN in `a` does not.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? yes : no`.
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Whether `a > b` in any lane.
    fn any_greater(self, a: Self::V, b: Self::V) -> bool;
    /// `2^n` for whole `n` in `-126 ..= 127`.
    fn pow2(self, n: Self::V) -> Self::V;

    /// Sum of the lanes: halves first, the same tree on every instruction set.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        fold(self, v, |a, b| a + b)
    }
    /// Largest lane; NaN if the lanes hold one is not promised.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        fold(self, v, |a, b| if a > b { a } else { b })
    }
}

#[inline(always)]
fn fold<S: Simd>(s: S, v: S::V, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(v, &mut lanes);
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// A kernel, ready to run on any instruction set. `run` must be `#[inline(always)]`, and so must
/// everything it calls that touches a vector.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set that this CPU has.
#[derive(Clone, Copy)]
pub(crate) enum Isa {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Isa {
    /// The widest set of this CPU.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if let Some(proof) = Avx512::detect() {
                    return Isa::Avx512(proof);
                }
                if let Some(proof) = Avx2::detect() {
                    return Isa::Avx2(proof);
                }
            }
            Isa::Portable(Portable)
        })
    }

    /// Every set of this CPU, for tests that compare them.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Isa::Portable(Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Isa::Avx2));
            all.extend(Avx512::detect().map(Isa::Avx512));
        }
        all
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Isa::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => "avx512",
        }
    }

    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Isa::Portable(s) => kernel.run(s),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(s) => s.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(s) => s.enter(kernel),
        }
    }
}

/// The instruction set in use: `avx512`, `avx2` or `portable`.
pub fn instruction_set() -> &'static str {
    Isa::best().name()
}

#[cfg(test)]
mod tests;
