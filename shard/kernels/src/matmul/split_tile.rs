//! The tile under products in two parts, of the instructions that sum pairs of `bf16` and quads of bytes.

use std::arch::x86_64::*;

use half::bf16;

use super::MOST_ROWS;
use super::split::{EXACT_PARTS, Exact, LOW_LARGEST, LOW_ZERO};
use crate::matrix::PANEL;
use crate::simd::{Avx512, LANES};

/// Proof of AVX-512 with VBMI, `bf16` pairs and VNNI.
#[derive(Clone, Copy)]
pub(super) struct Dots(());

const VECTORS: usize = PANEL / LANES;
/// `bf16` of one vector.
const PAIRS: usize = 2 * LANES;

/// The weights of a panel in eight bits.
pub(super) struct LowPanel<'a> {
    /// `[inputs / 4][32]` quads of signed bytes.
    quads: &'a [u32],
    /// What one stands for.
    scales: [__m512; VECTORS],
    /// What the sums start from, so that `LOW_ZERO` counts as zero.
    starts: [__m512i; VECTORS],
}

/// Rows of one block in two parts.
pub(super) struct Rows<'a> {
    /// `[inputs / 2][height]` pairs of `bf16`.
    pub(super) high: &'a [u32],
    /// `[inputs / 4][height]` quads of bytes.
    pub(super) low: &'a [u32],
    /// What one of a row's low parts stands for.
    pub(super) scales: &'a [f32],
    pub(super) exact: &'a [[Exact; EXACT_PARTS]],
    /// Which part of the next panel to ask the memory for meanwhile: one of so many.
    pub(super) ahead: (usize, usize),
}

/// A panel in two parts.
type Panel<'a> = (&'a [bf16], &'a LowPanel<'a>);

macro_rules! by_height {
    ($height:expr, $($n:literal)+, $call:expr) => {
        match $height {
            $($n => { const ROWS: usize = $n; $call })+
            height => unreachable!("a block of {height} rows"),
        }
    };
}

impl Dots {
    pub(super) fn detect() -> Option<Self> {
        let found = Avx512::detect().is_some()
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vnni");
        found.then_some(Self(()))
    }

    /// `panel` (`[inputs / 2][32][2]`) in eight bits, its quads in `quads`.
    pub(super) fn narrow<'a>(self, panel: &[bf16], quads: &'a mut [u32]) -> LowPanel<'a> {
        // SAFETY: `self` proves the features.
        unsafe { narrow(panel, quads) }
    }

    /// Products of a block of rows by a panel, its first `valid` outputs, to `sums`: a place and the
    /// distance of rows.
    ///
    /// # Safety
    /// `valid` values every stride are ours alone to write.
    pub(super) unsafe fn tile(
        self,
        rows: &Rows<'_>,
        panel: Panel<'_>,
        sums: (*mut f32, usize),
        valid: usize,
    ) {
        const { assert!(MOST_ROWS == 12) };
        // SAFETY: `self` proves the features; the caller vouches for the sums.
        by_height!(rows.scales.len(), 1 2 3 4 5 6 7 8 9 10 11 12, unsafe {
            tile::<ROWS>(rows, panel, sums, valid)
        });
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn narrow<'a>(panel: &[bf16], quads: &'a mut [u32]) -> LowPanel<'a> {
    let magnitude = _mm512_set1_epi32(0x7fff_7fff);
    let mut largest = [_mm512_setzero_si512(); VECTORS];
    for pair in panel.as_chunks::<PAIRS>().0.chunks_exact(VECTORS) {
        for (largest, vector) in largest.iter_mut().zip(pair) {
            // The bits of numbers without a sign order as the numbers do.
            *largest = _mm512_max_epu16(*largest, _mm512_and_si512(load(vector), magnitude));
        }
    }
    let mut scales = [_mm512_setzero_ps(); VECTORS];
    let mut inverses = scales;
    for v in 0..VECTORS {
        let [first, second] = widen(largest[v]);
        let most = _mm512_max_ps(first, second);
        // The least weights have products that no sum would feel; a reciprocal could be infinite.
        let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, _mm512_set1_ps(1e-30));
        let whole = _mm512_set1_ps(LOW_LARGEST);
        scales[v] = _mm512_maskz_div_ps(some, most, whole);
        inverses[v] = _mm512_maskz_div_ps(some, whole, most);
    }
    let zero = _mm512_set1_epi8(LOW_ZERO as i8);
    let lowest = load(&LOWEST_BYTES);
    let mut starts = [_mm512_setzero_si512(); VECTORS];
    let pairs = panel.as_chunks::<PAIRS>().0.chunks_exact(2 * VECTORS);
    for (quads, pairs) in quads.as_chunks_mut::<PANEL>().0.iter_mut().zip(pairs) {
        for v in 0..VECTORS {
            let [a, b] = whole(load(&pairs[v]), inverses[v]);
            let [c, d] = whole(load(&pairs[VECTORS + v]), inverses[v]);
            let low = _mm512_permutex2var_epi8(a, lowest, b);
            let high = _mm512_permutex2var_epi8(c, lowest, d);
            let quad = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
            starts[v] = _mm512_dpbusd_epi32(starts[v], zero, quad);
            let to = &mut quads[v * LANES..(v + 1) * LANES];
            // SAFETY: sixteen lanes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), quad) };
        }
    }
    let starts = starts.map(|sum| _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    LowPanel { quads, scales, starts }
}

/// For each lane of 32 bits the lowest byte of one vector and of another, twice.
const LOWEST_BYTES: [u8; 64] = {
    let mut bytes = [0; 64];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = (at / 4 * 4 + at % 2 * 64) as u8;
        at += 1;
    }
    bytes
};

/// The first and the second of each pair times `inverse`, as whole numbers in the lowest byte of a lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn whole(pairs: __m512i, inverse: __m512) -> [__m512i; 2] {
    // Floats of this size are whole numbers, and their lowest bits those of the number.
    let round = _mm512_set1_ps(12_582_912.0);
    let [first, second] = widen(pairs);
    [
        _mm512_castps_si512(_mm512_fmadd_ps(first, inverse, round)),
        _mm512_castps_si512(_mm512_fmadd_ps(second, inverse, round)),
    ]
}

/// The first and the second of each pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn widen(pairs: __m512i) -> [__m512; 2] {
    let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn load<T>(from: &[T]) -> __m512i {
    assert!(size_of_val(from) == 64);
    // SAFETY: 64 bytes, by the assertion.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// Of one block of `ROWS` rows.
///
/// # Safety
/// As [`Dots::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
unsafe fn tile<const ROWS: usize>(
    rows: &Rows<'_>,
    (weights, low_weights): Panel<'_>,
    (sums, stride): (*mut f32, usize),
    valid: usize,
) {
    let mut starts = low_sums::<ROWS>(rows, low_weights);
    add_exact(rows.exact, weights, &mut starts);
    let sums_of_high = high_sums(rows, weights, &starts);
    for (row, row_sums) in sums_of_high.iter().enumerate() {
        for (v, &sum) in row_sums.iter().enumerate() {
            let lanes = valid.saturating_sub(v * LANES).min(LANES);
            let mask = ((1u32 << lanes) - 1) as __mmask16;
            let to = sums.wrapping_add(row * stride + v * LANES);
            // SAFETY: the caller vouches for the valid outputs of each row, and no other is touched.
            unsafe { _mm512_mask_storeu_ps(to, mask, sum) };
        }
    }
}

// Functions of their own, so that each keeps its sums in registers.

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn low_sums<const ROWS: usize>(rows: &Rows<'_>, panel: &LowPanel<'_>) -> [[__m512; VECTORS]; ROWS] {
    let mut sums = [panel.starts; ROWS];
    let quads = panel.quads.as_chunks::<PANEL>().0;
    for (w, x) in quads.iter().zip(rows.low.as_chunks::<ROWS>().0) {
        let w = [load(&w[..LANES]), load(&w[LANES..])];
        for (sums, &x) in sums.iter_mut().zip(x) {
            let x = _mm512_set1_epi32(x as i32);
            sums[0] = _mm512_dpbusd_epi32(sums[0], x, w[0]);
            sums[1] = _mm512_dpbusd_epi32(sums[1], x, w[1]);
        }
    }
    std::array::from_fn(|row| {
        std::array::from_fn(|v| {
            let scale = _mm512_mul_ps(_mm512_set1_ps(rows.scales[row]), panel.scales[v]);
            _mm512_mul_ps(_mm512_cvtepi32_ps(sums[row][v]), scale)
        })
    })
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn add_exact(exact: &[[Exact; EXACT_PARTS]], weights: &[bf16], sums: &mut [[__m512; VECTORS]]) {
    for (exact, sums) in exact.iter().zip(sums) {
        for &Exact { input, rest } in exact {
            let pair = &weights[input as usize / 2 * VECTORS * PAIRS..][..VECTORS * PAIRS];
            // The second of a pair lies in the upper half of its lane already.
            let shift = if input % 2 == 0 { 16 } else { 0 };
            for (sum, w) in sums.iter_mut().zip(pair.as_chunks::<PAIRS>().0) {
                let w = _mm512_sllv_epi32(load(w), _mm512_set1_epi32(shift));
                let w = _mm512_and_si512(w, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                *sum = _mm512_fmadd_ps(_mm512_set1_ps(rest), _mm512_castsi512_ps(w), *sum);
            }
        }
    }
}

/// On top of `starts`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn high_sums<const ROWS: usize>(
    rows: &Rows<'_>,
    weights: &[bf16],
    starts: &[[__m512; VECTORS]; ROWS],
) -> [[__m512; VECTORS]; ROWS] {
    let mut sums = *starts;
    let (part, parts) = rows.ahead;
    let step = VECTORS * PAIRS / parts;
    let mut ahead = weights.as_ptr_range().end.wrapping_add(part * weights.len() / parts);
    let pairs = weights.as_chunks::<{ VECTORS * PAIRS }>().0;
    for (w, x) in pairs.iter().zip(rows.high.as_chunks::<ROWS>().0) {
        // A hint, which may name any address.
        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
        ahead = ahead.wrapping_add(step);
        let w = [load(&w[..PAIRS]), load(&w[PAIRS..])];
        for (sums, &x) in sums.iter_mut().zip(x) {
            let x = _mm512_set1_epi32(x as i32);
            sums[0] = dot_pairs(sums[0], x, w[0]);
            sums[1] = dot_pairs(sums[1], x, w[1]);
        }
    }
    sums
}

/// `sums[lane] += x[2 lane] w[2 lane] + x[2 lane + 1] w[2 lane + 1]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx512vnni")]
fn dot_pairs(sums: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: all three are sixteen lanes of 32 bits, of any value.
    let (x, w) = unsafe {
        (std::mem::transmute::<__m512i, __m512bh>(x), std::mem::transmute::<__m512i, __m512bh>(w))
    };
    _mm512_dpbf16_ps(sums, x, w)
}
