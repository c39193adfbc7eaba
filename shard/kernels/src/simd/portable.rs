//! Plain arrays: the reference path, and the one for CPUs without AVX2 (the compiler turns the loops
//! into SSE2 or NEON).

use half::{bf16, f16};

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// Fused only where the target always has the instruction; elsewhere it would be a library call.
#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

impl Simd for Portable {
    type V = [f32; LANES];
    const TILE_ROWS: usize = 2;
    const TILE_IS_WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    unsafe fn load_f32(self, from: *const f32) -> Self::V {
        // SAFETY: the caller vouches for 16 readable values.
        unsafe { from.cast::<[f32; LANES]>().read() }
    }
    #[inline(always)]
    unsafe fn store_f32(self, v: Self::V, to: *mut f32) {
        // SAFETY: the caller vouches for 16 writable values.
        unsafe { to.cast::<[f32; LANES]>().write(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const bf16) -> (Self::V, Self::V) {
        // SAFETY: the caller vouches for 32 readable values; `bf16` is two bytes without padding.
        let pairs = unsafe { from.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        let widen = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        (pairs.map(|pair| widen(pair[0])), pairs.map(|pair| widen(pair[1])))
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        // SAFETY: the caller vouches for 16 readable values.
        unsafe { from.cast::<[f16; LANES]>().read() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Self::V {
        // SAFETY: the caller vouches for 16 readable values.
        unsafe { from.cast::<[i8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> (Self::V, Self::V) {
        // SAFETY: the caller vouches for 16 readable values.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read() };
        (bytes.map(|byte| f32::from(byte & 0xF)), bytes.map(|byte| f32::from(byte >> 4)))
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| multiply_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn any_greater(self, a: Self::V, b: Self::V) -> bool {
        // Not short-circuiting: the loop vectorises.
        (0..LANES).fold(false, |any, i| any | (a[i] > b[i]))
    }
    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits((((n as i32) + 127) as u32) << 23))
    }
}
