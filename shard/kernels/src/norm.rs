//! Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467).

use crate::disjoint::Disjoint;
use crate::rotary::HeadLayout;
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::team::{Team, share};

/// Below this many values a fork costs more than it saves.
const FORK_VALUES: usize = 16 * 1024;

/// `out = x / rms(x) * weight`, a row at a time. `x`, `out`: `[rows, weight.len()]`.
///
/// # Panics
/// If a length does not fit.
pub fn rms_norm(team: &Team, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rms_norm_on(Isa::best(), team, x, weight, eps, out);
}

/// `residual += delta; out = rms_norm(residual)`. All but `weight`: `[rows, weight.len()]`.
///
/// # Panics
/// If a length does not fit.
pub fn add_rms_norm(
    team: &Team,
    residual: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    add_rms_norm_on(Isa::best(), team, (residual, delta), weight, eps, out);
}

/// Normalises each query and each key head of `qkv`, in place, by weights of `head_dim`.
///
/// # Panics
/// If a length does not fit.
pub fn rms_norm_heads(
    team: &Team,
    qkv: &mut [f32],
    layout: &HeadLayout,
    (query, key): (&[f32], &[f32]),
    eps: f32,
) {
    rms_norm_heads_on(Isa::best(), team, qkv, layout, (query, key), eps);
}

fn rms_norm_heads_on(
    isa: Isa,
    team: &Team,
    qkv: &mut [f32],
    layout: &HeadLayout,
    (query, key): (&[f32], &[f32]),
    eps: f32,
) {
    let (dim, width, len) = (layout.head_dim, layout.row_len(), qkv.len());
    check_shape(len, len, width);
    assert!(query.len() == dim && key.len() == dim, "norms of {} and {}", query.len(), key.len());
    let all = Disjoint::new(qkv);
    let work = |rows: std::ops::Range<usize>| {
        for row in rows {
            for head in 0..layout.heads + layout.kv_heads {
                let start = row * width + head * dim;
                // SAFETY: each row is written by the one worker whose share holds it.
                let x = unsafe { all.part(start..start + dim) };
                let weight = if head < layout.heads { query } else { key };
                isa.run(NormInPlace { x, weight, eps });
            }
        }
    };
    by_rows(team, len, width, &work);
}

fn rms_norm_on(isa: Isa, team: &Team, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    check_shape(x.len(), out.len(), width);
    let all = Disjoint::new(out);
    let work = |rows: std::ops::Range<usize>| {
        for row in rows {
            let values = row * width..(row + 1) * width;
            // SAFETY: each row is written by the one worker whose share holds it.
            let out = unsafe { all.part(values.clone()) };
            isa.run(RowNorm { x: &x[values], weight, eps, out });
        }
    };
    by_rows(team, x.len(), width, &work);
}

fn add_rms_norm_on(
    isa: Isa,
    team: &Team,
    (residual, delta): (&mut [f32], &[f32]),
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    check_shape(delta.len(), out.len(), width);
    check_shape(delta.len(), residual.len(), width);
    let (sums, all) = (Disjoint::new(residual), Disjoint::new(out));
    let work = |rows: std::ops::Range<usize>| {
        for row in rows {
            let values = row * width..(row + 1) * width;
            // SAFETY: each row is written by the one worker whose share holds it.
            let (x, out) = unsafe { (sums.part(values.clone()), all.part(values.clone())) };
            isa.run(Add { to: x, delta: &delta[values] });
            isa.run(RowNorm { x, weight, eps, out });
        }
    };
    by_rows(team, delta.len(), width, &work);
}

fn check_shape(x_len: usize, out_len: usize, width: usize) {
    assert!(x_len == out_len, "{x_len} values in, {out_len} out");
    assert!(
        if width == 0 { x_len == 0 } else { x_len.is_multiple_of(width) },
        "{x_len} values are not rows of {width}"
    );
}

fn by_rows(team: &Team, len: usize, width: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
    let rows = len.checked_div(width).unwrap_or(0);
    if len < FORK_VALUES || rows == 1 {
        work(0..rows);
    } else {
        team.run(&|worker| work(share(rows, 1, worker, team.threads())));
    }
}

struct Add<'a> {
    to: &'a mut [f32],
    delta: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (to, delta) in self.to.iter_mut().zip(self.delta) {
            *to += delta;
        }
    }
}

struct RowNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RowNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mean = sum_of_squares(s, self.x) / self.x.len() as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * weight;
        }
    }
}

struct NormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for NormInPlace<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mean = sum_of_squares(s, self.x) / self.x.len() as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = *x * scale * weight;
        }
    }
}

/// Four chains of sixteen lanes: long rows stay accurate and the adds overlap.
#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let (vectors, tail) = x.as_chunks::<LANES>();
    let (quads, rest) = vectors.as_chunks::<4>();
    for quad in quads {
        for (sum, v) in sums.iter_mut().zip(quad) {
            let v = s.load(v);
            *sum = s.fma(v, v, *sum);
        }
    }
    for (sum, v) in sums.iter_mut().zip(rest) {
        let v = s.load(v);
        *sum = s.fma(v, v, *sum);
    }
    let total = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    tail.iter().fold(total, |sum, x| sum + x * x)
}

#[cfg(test)]
mod tests;
