//! The largest values of a row of logits.

use std::cmp::Ordering;

use crate::simd::{Isa, Kernel, LANES, Simd};

/// The `n` largest values with their indices, largest first, lowest index first on ties (-0 and 0 tie).
/// NaN is left out, so fewer than `n` come back where fewer are numbers.
pub fn top_n(row: &[f32], n: usize) -> Vec<(usize, f32)> {
    top_n_on(Isa::best(), row, n)
}

fn top_n_on(isa: Isa, row: &[f32], n: usize) -> Vec<(usize, f32)> {
    let n = n.min(row.len());
    if n == 0 {
        return Vec::new();
    }
    let mut best = isa.run(Scan { row, n });
    keep(&mut best, n);
    best.sort_unstable_by(order);
    best
}

/// Largest first, then lowest index. There is no NaN here.
fn order(a: &(usize, f32), b: &(usize, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Shortens `found` to its `n` first in order.
fn keep(found: &mut Vec<(usize, f32)>, n: usize) {
    if found.len() > n {
        found.select_nth_unstable_by(n - 1, order);
        found.truncate(n);
    }
}

/// Passes over the row once, sixteen values at a time; most are below the `n`-th best so far and cost
/// one comparison.
struct Scan<'a> {
    row: &'a [f32],
    n: usize,
}

impl Kernel for Scan<'_> {
    type Output = Vec<(usize, f32)>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<(usize, f32)> {
        let room = 2 * self.n + LANES;
        let mut found = Vec::with_capacity(room + LANES);
        // Values must exceed it: a later equal one loses to the lower index. `None`: all are taken.
        let mut least: Option<f32> = None;
        let (vectors, tail) = self.row.as_chunks::<LANES>();
        for (i, v) in vectors.iter().enumerate() {
            if least.is_some_and(|least| !s.any_greater(s.load(v), s.splat(least))) {
                continue;
            }
            take(&mut found, i * LANES, v, least);
            if found.len() > room {
                keep(&mut found, self.n);
                least = Some(found.iter().fold(f32::INFINITY, |least, x| least.min(x.1)));
            }
        }
        take(&mut found, vectors.len() * LANES, tail, least);
        found
    }
}

fn take(found: &mut Vec<(usize, f32)>, start: usize, values: &[f32], least: Option<f32>) {
    for (i, &x) in values.iter().enumerate() {
        if !x.is_nan() && least.is_none_or(|least| x > least) {
            found.push((start + i, x));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(row: &[f32], n: usize) {
        let mut want: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
        want.retain(|x| !x.1.is_nan());
        // A stable sort keeps the lowest index first.
        want.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap());
        want.truncate(n);
        for isa in Isa::all() {
            assert_eq!(top_n_on(isa, row, n), want, "{} n {n} of {}", isa.name(), row.len());
        }
    }

    #[test]
    fn agrees_with_a_full_sort() {
        for len in [0, 1, 16, 17, 100, 5000] {
            let spread: Vec<f32> =
                (0..len).map(|i| ((i * 7919 % 1009) as f32 - 500.0) / 8.0).collect();
            let rising: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let falling: Vec<f32> = (0..len).map(|i| -(i as f32)).collect();
            let equal = vec![1.5; len];
            let holes: Vec<f32> =
                (0..len).map(|i| [f32::NAN, f32::NEG_INFINITY, i as f32][i % 3]).collect();
            for row in [&spread, &rising, &falling, &equal, &holes] {
                for n in [0, 1, 2, 5, 20, 200, len, len + 3] {
                    check(row, n);
                }
            }
        }
    }
}
