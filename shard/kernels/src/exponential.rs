//! `exp` and `2^x` of sixteen lanes, within 2 ulp; the polynomial is that of Cephes `expf` (Moshier).

use crate::simd::{Isa, Kernel, LANES, Simd};

/// `x + ROUND - ROUND` is `x` to the nearest whole number, for `|x| < 2^22`.
const ROUND: f32 = 12_582_912.0;
const LN2: f32 = std::f32::consts::LN_2;
/// ln 2 in two parts; the first has so few bits that `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `e^x`. Saturates near 2^127 above, is exactly 0 below -87.3, exactly 1 at 0; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let low = s.splat(-87.3);
    let inside = s.min(s.splat(88.0), s.max(low, x));
    let shifted = s.fma(inside, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let t = s.fma(n, s.splat(-LN2_HIGH), inside);
    let t = s.fma(n, s.splat(-LN2_LOW), t);
    s.select_less(x, low, s.splat(0.0), s.mul(expm(s, t), s.pow2(n)))
}

/// `2^x`. Saturates near 2^127 above, is exactly 0 below -126, exactly 1 at 0; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let low = s.splat(-126.0);
    let inside = s.min(s.splat(127.0), s.max(low, x));
    let n = s.sub(s.add(inside, s.splat(ROUND)), s.splat(ROUND));
    let t = s.mul(s.sub(inside, n), s.splat(LN2));
    s.select_less(x, low, s.splat(0.0), s.mul(expm(s, t), s.pow2(n)))
}

/// `e^t` for `|t| <= ln 2 / 2`.
#[inline(always)]
fn expm<S: Simd>(s: S, t: S::V) -> S::V {
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, t, s.splat(c));
    }
    s.add(s.fma(p, s.mul(t, t), t), s.splat(1.0))
}

/// `weights[i] = e^-distances[i]`, by the same instructions wherever a value stands in the slice.
///
/// # Panics
/// If the lengths differ.
pub fn decay(distances: &[f32], weights: &mut [f32]) {
    assert!(distances.len() == weights.len(), "{} for {}", weights.len(), distances.len());
    Isa::best().run(Decay { distances, weights });
}

struct Decay<'a> {
    distances: &'a [f32],
    weights: &'a mut [f32],
}

impl Kernel for Decay<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let zero = s.splat(0.0);
        let (distances, tail) = self.distances.as_chunks::<LANES>();
        let (weights, tail_weights) = self.weights.as_chunks_mut::<LANES>();
        for (from, to) in distances.iter().zip(weights) {
            s.store(exp(s, s.sub(zero, s.load(from))), to);
        }
        if !tail.is_empty() {
            let mut padded = [0.0; LANES];
            padded[..tail.len()].copy_from_slice(tail);
            let v = exp(s, s.sub(zero, s.load(&padded)));
            s.store(v, &mut padded);
            tail_weights.copy_from_slice(&padded[..tail.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Both([f32; LANES]);
    impl Kernel for Both {
        type Output = [[f32; LANES]; 2];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut out = [[f32::NAN; LANES]; 2];
            let x = s.load(&self.0);
            s.store(exp(s, x), &mut out[0]);
            s.store(exp2(s, x), &mut out[1]);
            out
        }
    }

    fn check(isa: Isa, x: f32) {
        let [e, two] = isa.run(Both([x; LANES]));
        for (got, want, low) in
            [(e[3], f64::from(x).exp(), -87.3), (two[7], f64::from(x).exp2(), -126.0)]
        {
            let want = if x < low { 0.0 } else { want };
            let error = (f64::from(got) - want).abs();
            assert!(error <= want * 2.4e-7, "{} {x}: {got} for {want}", isa.name());
        }
    }

    #[test]
    fn within_two_ulp_of_f64() {
        for isa in Isa::all() {
            for i in -12_800..=8_700 {
                check(isa, i as f32 * 0.009_97);
            }
            for x in [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, -1e30, f32::NEG_INFINITY] {
                check(isa, x);
            }
        }
    }

    #[test]
    fn a_weight_is_the_same_wherever_it_stands() {
        let distances: Vec<f32> = (0..997).map(|i| (i * i % 997) as f32 * 0.09).collect();
        let mut whole = vec![f32::NAN; distances.len()];
        decay(&distances, &mut whole);
        for (&weight, &distance) in whole.iter().zip(&distances) {
            let want = (-f64::from(distance)).exp();
            let error = (f64::from(weight) - want).abs();
            assert!(error <= want * 2.4e-7 || distance > 87.3, "{distance}: {weight} for {want}");
        }
        for len in [1, 2, 15, 16, 17, 40] {
            let mut parts = vec![f32::NAN; distances.len()];
            for (from, to) in distances.chunks(len).zip(parts.chunks_mut(len)) {
                decay(from, to);
            }
            assert_eq!(parts, whole, "in chunks of {len}");
        }
        decay(&[], &mut []);
        let mut edges = [f32::NAN; 3];
        decay(&[0.0, f32::INFINITY, 88.0], &mut edges);
        assert_eq!(edges, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn edges() {
        for isa in Isa::all() {
            let [e, two] = isa.run(Both([0.0; LANES]));
            assert_eq!((e[0], two[0]), (1.0, 1.0));
            let [e, two] = isa.run(Both([f32::NAN; LANES]));
            assert!(e[0].is_nan() && two[0].is_nan());
            let [e, two] = isa.run(Both([f32::INFINITY; LANES]));
            assert!(e[0] > 1e38 && two[0] > 1e38);
        }
    }
}
