//! What sampling needs over one row of logits.

use crate::exponential::exp;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// Largest value and its index (lowest index on a tie). NaN is never the largest; a row without
/// numbers gives `(0, -inf)`.
pub fn argmax(row: &[f32]) -> (usize, f32) {
    let (largest, _) = Isa::best().run(MaxAndSumExp { row, sum: false });
    // An equal value, so that -0 and 0 tie.
    let index = row.iter().position(|&x| x == largest).unwrap_or(0);
    (index, row.get(index).copied().filter(|x| !x.is_nan()).unwrap_or(f32::NEG_INFINITY))
}

/// `(max, Σ exp(x - max))` of one row: the local part of a log-sum-exp. A row that is empty or all
/// `-inf` gives `(-inf, 0)`; a NaN in the row makes the sum NaN.
pub fn max_and_sum_exp(row: &[f32]) -> (f32, f32) {
    Isa::best().run(MaxAndSumExp { row, sum: true })
}

/// How many values of a row are greater than `value`. A NaN is not.
pub fn count_greater(row: &[f32], value: f32) -> usize {
    Isa::best().run(CountGreater { row, value })
}

struct CountGreater<'a> {
    row: &'a [f32],
    value: f32,
}

impl Kernel for CountGreater<'_> {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        /// A lane's count stays exact.
        const PART: usize = LANES << 20;
        let (value, one, zero) = (s.splat(self.value), s.splat(1.0), s.splat(0.0));
        let mut count = 0;
        for part in self.row.chunks(PART) {
            let (vectors, tail) = part.as_chunks::<LANES>();
            let mut lanes = zero;
            for v in vectors {
                lanes = s.add(lanes, s.select_less(value, s.load(v), one, zero));
            }
            let mut counts = [0.0; LANES];
            s.store(lanes, &mut counts);
            count += counts.iter().map(|&count| count as usize).sum::<usize>();
            count += tail.iter().filter(|&&x| x > self.value).count();
        }
        count
    }
}

struct MaxAndSumExp<'a> {
    row: &'a [f32],
    sum: bool,
}

impl Kernel for MaxAndSumExp<'_> {
    type Output = (f32, f32);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let (vectors, tail) = self.row.as_chunks::<LANES>();
        let (quads, rest) = vectors.as_chunks::<4>();
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..tail.len()].copy_from_slice(tail);

        let mut max = [s.splat(f32::NEG_INFINITY); 4];
        for quad in quads {
            for (max, v) in max.iter_mut().zip(quad) {
                *max = s.max(s.load(v), *max);
            }
        }
        for v in rest.iter().chain([&padded]) {
            max[0] = s.max(s.load(v), max[0]);
        }
        let largest = s.largest(s.max(s.max(max[0], max[1]), s.max(max[2], max[3])));
        if !self.sum {
            return (largest, 0.0);
        }
        // With nothing but -inf, `x - max` would be NaN; -inf minus any number is -inf.
        let shift = s.splat(if largest == f32::NEG_INFINITY { 0.0 } else { largest });
        let mut sums = [s.splat(0.0); 4];
        for quad in quads {
            for (sum, v) in sums.iter_mut().zip(quad) {
                *sum = s.add(*sum, exp(s, s.sub(s.load(v), shift)));
            }
        }
        for v in rest.iter().chain([&padded]) {
            sums[0] = s.add(sums[0], exp(s, s.sub(s.load(v), shift)));
        }
        (largest, s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next() * 20.0).collect()
    }

    fn check(row: &[f32]) {
        let mut want = (0, f32::NEG_INFINITY);
        for (i, &x) in row.iter().enumerate() {
            if x > want.1 || (i == 0 && x == want.1) {
                want = (i, x);
            }
        }
        let sum: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(want.1)).exp()).sum();
        for isa in Isa::all() {
            let (max, got) = isa.run(MaxAndSumExp { row, sum: true });
            assert_eq!(max, want.1, "{}", isa.name());
            assert!((f64::from(got) - sum).abs() <= sum * 1e-5, "{}: {got} {sum}", isa.name());
        }
        assert_eq!(argmax(row), want);
    }

    #[test]
    fn agrees_with_plain_f64() {
        for (seed, len) in [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49_152].into_iter().enumerate() {
            check(&noise(len, seed as u32));
        }
        check(&[3.0; 70]);
        check(&[-1.0, 5.0, 5.0, 2.0]);
        check(&[f32::NEG_INFINITY, -3.0, f32::NEG_INFINITY]);
    }

    #[test]
    fn greater_values_are_counted() {
        for (seed, len) in [0, 1, 15, 16, 17, 1000, 49_152].into_iter().enumerate() {
            let row = noise(len, seed as u32);
            for value in [f32::NEG_INFINITY, -3.0, row.first().copied().unwrap_or(0.0), f32::NAN] {
                let want = row.iter().filter(|&&x| x > value).count();
                for isa in Isa::all() {
                    assert_eq!(isa.run(CountGreater { row: &row, value }), want, "{}", isa.name());
                }
            }
        }
        assert_eq!(count_greater(&[f32::NAN, 1.0, 2.0, f32::INFINITY], 1.0), 2);
    }

    #[test]
    fn rows_without_numbers() {
        for row in [&[][..], &[f32::NEG_INFINITY; 20]] {
            assert_eq!(max_and_sum_exp(row), (f32::NEG_INFINITY, 0.0));
            assert_eq!(argmax(row), (0, f32::NEG_INFINITY));
        }
        let row = [1.0, f32::NAN, 7.0, 2.0];
        assert_eq!(argmax(&row), (2, 7.0));
        assert!(max_and_sum_exp(&row).1.is_nan());
        assert_eq!(argmax(&[f32::NAN; 3]), (0, f32::NEG_INFINITY));
    }
}
