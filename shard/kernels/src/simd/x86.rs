//! AVX-512 and AVX2 with FMA.
//!
//! The intrinsics are called from functions without the feature, but every caller is inlined into
//! `enter`, which has it: that is what turns them into single instructions.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};

/// An intrinsic of a set that `$self` proves.
macro_rules! proved {
    ($self:ident, $intrinsic:expr) => {{
        let _proof = $self;
        // SAFETY: a value of this type exists only where `detect` found the features; the intrinsics
        // passed here work on registers alone, or on pointers the caller vouches for.
        unsafe { $intrinsic }
    }};
}

/// Proof of AVX-512 F, BW and VL. 32 registers: 24 accumulators (12 rows by 2 vectors).
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    #[inline(always)]
    pub(crate) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c,bmi2")]
        fn inside<K: Kernel>(s: Avx512, kernel: K) -> K::Output {
            kernel.run(s)
        }
        proved!(self, inside(self, kernel))
    }
}

impl Simd for Avx512 {
    type V = __m512;
    const TILE_ROWS: usize = 12;
    const TILE_IS_WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proved!(self, _mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        proved!(self, _mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; LANES]) {
        proved!(self, _mm512_storeu_ps(to.as_mut_ptr(), v))
    }
    #[inline(always)]
    unsafe fn load_f32(self, from: *const f32) -> __m512 {
        proved!(self, _mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn store_f32(self, v: __m512, to: *mut f32) {
        proved!(self, _mm512_storeu_ps(to, v))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const bf16) -> (__m512, __m512) {
        let pairs = proved!(self, _mm512_loadu_si512(from.cast()));
        let first = proved!(self, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)));
        let mask = proved!(self, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        (first, proved!(self, _mm512_castsi512_ps(_mm512_and_si512(pairs, mask))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        proved!(self, _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        proved!(self, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> (__m512, __m512) {
        proved!(self, {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(0xF));
            (_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes)))
        })
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proved!(self, _mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proved!(self, _mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        let less = proved!(self, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b));
        proved!(self, _mm512_mask_blend_ps(less, no, yes))
    }
    #[inline(always)]
    fn any_greater(self, a: __m512, b: __m512) -> bool {
        proved!(self, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b)) != 0
    }
    #[inline(always)]
    fn pow2(self, n: __m512) -> __m512 {
        let biased = proved!(self, _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)));
        proved!(self, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        proved!(self, {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            sum_256(_mm256_add_ps(_mm512_castps512_ps256(v), high))
        })
    }
    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        proved!(self, {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            largest_256(_mm256_max_ps(_mm512_castps512_ps256(v), high))
        })
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sum_256(v: __m256) -> f32 {
    // SAFETY: registers only; the caller vouches for AVX2.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn largest_256(v: __m256) -> f32 {
    // SAFETY: registers only; the caller vouches for AVX2.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

/// Proof of AVX2, FMA and F16C. 16 registers: 12 accumulators (6 rows by 1 vector of two halves).
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    #[inline(always)]
    pub(crate) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inside<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
            kernel.run(s)
        }
        proved!(self, inside(self, kernel))
    }
}

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Halves(__m256, __m256);

/// The same intrinsic on both halves.
macro_rules! both {
    ($self:ident, $f:ident $(::<$c:ident>)?, $($v:ident),+) => {
        Halves(
            proved!($self, $f $(::<$c>)? ($($v.0),+)),
            proved!($self, $f $(::<$c>)? ($($v.1),+)),
        )
    };
}

impl Simd for Avx2 {
    type V = Halves;
    const TILE_ROWS: usize = 6;
    const TILE_IS_WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Halves {
        let v = proved!(self, _mm256_set1_ps(x));
        Halves(v, v)
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Halves {
        let from = from.as_ptr();
        proved!(self, Halves(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))))
    }
    #[inline(always)]
    fn store(self, v: Halves, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        proved!(self, {
            _mm256_storeu_ps(to, v.0);
            _mm256_storeu_ps(to.add(8), v.1);
        })
    }
    #[inline(always)]
    unsafe fn load_f32(self, from: *const f32) -> Halves {
        proved!(self, Halves(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))))
    }
    #[inline(always)]
    unsafe fn store_f32(self, v: Halves, to: *mut f32) {
        proved!(self, {
            _mm256_storeu_ps(to, v.0);
            _mm256_storeu_ps(to.add(8), v.1);
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const bf16) -> (Halves, Halves) {
        proved!(self, {
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(LANES).cast());
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let first = Halves(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            );
            let second = Halves(
                _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
            );
            (first, second)
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Halves {
        let from = from.cast::<__m128i>();
        proved!(self, {
            let (low, high) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
            Halves(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Halves {
        proved!(self, {
            let bytes = _mm_loadu_si128(from.cast());
            let high = _mm_srli_si128::<8>(bytes);
            Halves(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> (Halves, Halves) {
        proved!(self, {
            let bytes = _mm_loadu_si128(from.cast());
            let mask = _mm_set1_epi8(0xF);
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            (
                Halves(
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(low))),
                ),
                Halves(
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(high))),
                ),
            )
        })
    }
    #[inline(always)]
    fn add(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Halves, b: Halves, c: Halves) -> Halves {
        both!(self, _mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Halves, b: Halves) -> Halves {
        both!(self, _mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn select_less(self, a: Halves, b: Halves, yes: Halves, no: Halves) -> Halves {
        let less = both!(self, _mm256_cmp_ps::<_CMP_LT_OQ>, a, b);
        both!(self, _mm256_blendv_ps, no, yes, less)
    }
    #[inline(always)]
    fn any_greater(self, a: Halves, b: Halves) -> bool {
        let greater = both!(self, _mm256_cmp_ps::<_CMP_GT_OQ>, a, b);
        proved!(self, _mm256_movemask_ps(_mm256_or_ps(greater.0, greater.1))) != 0
    }
    #[inline(always)]
    fn pow2(self, n: Halves) -> Halves {
        proved!(self, {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias);
            Halves(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        })
    }
    #[inline(always)]
    fn sum(self, v: Halves) -> f32 {
        proved!(self, sum_256(_mm256_add_ps(v.0, v.1)))
    }
    #[inline(always)]
    fn largest(self, v: Halves) -> f32 {
        proved!(self, largest_256(_mm256_max_ps(v.0, v.1)))
    }
}
