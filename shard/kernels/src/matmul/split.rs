//! Products of `bf16` weights by activations in two parts: sixteen bits of the activations, three
//! quarters of the instructions.
//!
//! `x = high + low`. `high` is `x` rounded to `bf16`: its products with the weights are exact, and one
//! instruction sums two of them to a lane. `low`, at most 2^-9 of `x`, is rounded to eight bits of the
//! row's largest but a few, which are multiplied as they are; and so are the weights that it meets, to
//! eight bits of the output's largest: one instruction sums four whole products. An output is off by some
//! 2^-16 of its terms.
//!
//! As in [`matmul`], a row's result depends on its own values and the weights alone: the scale of `low` is
//! the row's, whole numbers are summed exactly, and the chain of `high` runs over the inputs in order.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::split_tile::{Dots, Rows};
use super::{MOST_BATCH_PANELS, MOST_ROWS, matmul, plan::Plan};
use crate::disjoint::Disjoint;
use crate::matrix::{Matrix, PANEL, Panels};
use crate::team::{Team, share};

/// Inputs of one lane of the low parts: others are multiplied by [`matmul`].
pub(super) const QUAD: usize = 4;
/// More inputs could overflow the sums of the low parts: 255 · 127 · 2^16 < 2^31.
const MOST_INPUTS: usize = 1 << 16;
/// `low` is kept as a byte, this much more than its value.
pub(super) const LOW_ZERO: u8 = 128;
/// The largest whole number that stands for a low part or a weight.
pub(super) const LOW_LARGEST: f32 = 127.0;

/// `out[rows, outputs] = x[rows, inputs] · wᵀ` as [`matmul`], with sixteen bits of `x` where that is
/// faster: `bf16` weights on a CPU that multiplies pairs of `bf16` and quads of bytes.
///
/// # Panics
/// If a length does not fit.
pub fn matmul_split(team: &Team, x: &[f32], rows: usize, w: &Matrix, out: &mut [f32]) {
    let inputs = w.inputs();
    #[cfg(target_arch = "x86_64")]
    if let (Panels::Bf16(panels), Some(dots)) = (w.panels(), Dots::detect())
        && inputs.is_multiple_of(QUAD)
        && (QUAD..=MOST_INPUTS).contains(&inputs)
        && rows > 0
    {
        assert!(x.len() == rows * inputs, "{} values, not {rows} rows of {inputs}", x.len());
        let outputs = w.outputs();
        assert!(out.len() == rows * outputs, "out: {}, not {rows} x {outputs}", out.len());
        let out = &Disjoint::new(out);
        return Split { dots, team, x, rows, inputs, panels, outputs, out }.run();
    }
    matmul(team, x, rows, w, None, out);
}

/// Low parts of a row, the largest, that are multiplied in f32.
pub(super) const EXACT_PARTS: usize = 4;

/// One of them.
#[derive(Clone, Copy, Default)]
pub(super) struct Exact {
    pub(super) input: u32,
    pub(super) rest: f32,
}

/// One call of [`matmul_split`], shapes checked.
#[cfg(target_arch = "x86_64")]
struct Split<'a, 'o> {
    dots: Dots,
    team: &'a Team,
    x: &'a [f32],
    rows: usize,
    inputs: usize,
    panels: &'a [bf16],
    outputs: usize,
    out: &'a Disjoint<'o, f32>,
}

/// Rows in two parts. A block's values are `[inputs / 2][height]` pairs and `[inputs / 4][height]` quads.
struct Parts<'a> {
    high: &'a [u32],
    low: &'a [u32],
    /// What one of a row's low parts stands for.
    scales: &'a [f32],
    exact: &'a [[Exact; EXACT_PARTS]],
}

#[cfg(target_arch = "x86_64")]
impl Split<'_, '_> {
    fn run(&self) {
        let plan = Plan::new(self.rows, self.inputs, MOST_ROWS, QUAD);
        let threads = self.team.threads();
        let (pairs, quads) = (self.x.len() / 2, self.x.len() / QUAD);
        let low_panel = self.inputs / QUAD * PANEL;
        let mut scratch = self.team.scratch();
        let scratch = scratch.floats.take(pairs + quads + self.rows + threads * low_panel);
        let (high, scratch) = scratch.split_at_mut(pairs);
        let (low, scratch) = scratch.split_at_mut(quads);
        let (scales, low_panels) = scratch.split_at_mut(self.rows);
        let high = bytemuck::cast_slice_mut(high);
        let low = bytemuck::cast_slice_mut(low);
        let mut exact = vec![[Exact::default(); EXACT_PARTS]; self.rows];
        self.pack(&plan, (high, low), (scales, &mut exact), low_panels);
        let parts = Parts { high, low, scales, exact: &exact };
        let low_panels = Disjoint::new(bytemuck::cast_slice_mut(low_panels));
        let panels = self.outputs.div_ceil(PANEL);
        // Who is free takes the next, as in a product of numbers as they are.
        let batch = (panels / (4 * threads)).clamp(1, MOST_BATCH_PANELS);
        let next = AtomicUsize::new(0);
        self.team.run(&|worker| {
            // SAFETY: each worker has a part of its own.
            let low_panel =
                unsafe { low_panels.part(worker * low_panel..(worker + 1) * low_panel) };
            loop {
                let first = next.fetch_add(1, Relaxed) * batch;
                if first >= panels {
                    return;
                }
                for panel in first..panels.min(first + batch) {
                    self.panel(&plan, &parts, panel, low_panel);
                }
            }
        });
    }

    /// `rests`: room for as many values as a row has, for each thread.
    fn pack(
        &self,
        plan: &Plan,
        (high, low): (&mut [u32], &mut [u32]),
        (scales, exact): (&mut [f32], &mut [[Exact; EXACT_PARTS]]),
        rests: &mut [f32],
    ) {
        let inputs = self.inputs;
        let (high, low, rests) = (Disjoint::new(high), Disjoint::new(low), Disjoint::new(rests));
        let (scales, exact) = (Disjoint::new(scales), Disjoint::new(exact));
        let threads = self.team.threads();
        self.team.run(&|worker| {
            // SAFETY: each worker has a part of its own.
            let rests = unsafe { rests.part(worker * inputs..(worker + 1) * inputs) };
            for rows in share(plan.blocks(), 1, worker, threads).map(|block| plan.rows_of(block)) {
                let (height, values) = (rows.len(), rows.start * inputs..rows.end * inputs);
                // SAFETY: each block is written by the one worker whose share holds it.
                let (high, low, scales, exact) = unsafe {
                    (
                        high.part(values.start / 2..values.end / 2),
                        low.part(values.start / QUAD..values.end / QUAD),
                        scales.part(rows.clone()),
                        exact.part(rows),
                    )
                };
                let x = self.x[values].chunks_exact(inputs);
                for (row, ((x, scale), exact)) in x.zip(scales).zip(exact).enumerate() {
                    let high = high[row..].iter_mut().step_by(height);
                    let low = low[row..].iter_mut().step_by(height);
                    *scale = split_row(x, high, low, exact, rests);
                }
            }
        });
    }

    /// All rows by one panel.
    fn panel(&self, plan: &Plan, parts: &Parts<'_>, panel: usize, low_panel: &mut [u32]) {
        let len = PANEL * self.inputs;
        let high = &self.panels[panel * len..(panel + 1) * len];
        let low = self.dots.narrow(high, low_panel);
        let valid = PANEL.min(self.outputs - panel * PANEL);
        for block in 0..plan.blocks() {
            let rows = plan.rows_of(block);
            let values = rows.start * self.inputs..rows.end * self.inputs;
            let high_rows = &parts.high[values.start / 2..values.end / 2];
            let low_rows = &parts.low[values.start / QUAD..values.end / QUAD];
            let start = rows.start * self.outputs + panel * PANEL;
            let end = (rows.end - 1) * self.outputs + panel * PANEL + valid;
            // Reaches across the rows, though only these columns of them are touched.
            let sums = (self.out.reach(start..end), self.outputs);
            let rows = Rows {
                high: high_rows,
                low: low_rows,
                scales: &parts.scales[rows.clone()],
                exact: &parts.exact[rows],
                ahead: (block, plan.blocks()),
            };
            // SAFETY: this worker has taken the panel, so that these columns are its own.
            unsafe { self.dots.tile(&rows, (high, &low), sums, valid) };
        }
    }
}

/// What is left of `x` beside its `bf16`, and the bits of that.
fn split(x: f32) -> (u32, f32) {
    let bits = x.to_bits();
    let high = match x.is_nan() {
        true => bits | 1 << 22,
        // To nearest, ties to even.
        false => bits + 0x7fff + (bits >> 16 & 1),
    };
    (high >> 16, x - f32::from_bits(high & 0xffff_0000))
}

/// Fills the pairs and quads of a row and its exact parts; what one of its low parts stands for.
/// `rests`: room for as many values as the row has.
fn split_row<'a>(
    x: &[f32],
    high: impl Iterator<Item = &'a mut u32>,
    low: impl Iterator<Item = &'a mut u32>,
    exact: &mut [Exact; EXACT_PARTS],
    rests: &mut [f32],
) -> f32 {
    let (rests, _) = rests.as_chunks_mut::<2>();
    for ((pair, x), rests) in high.zip(x.as_chunks::<2>().0).zip(&mut *rests) {
        let [(first, first_rest), (second, second_rest)] = x.map(split);
        *pair = first | second << 16;
        *rests = [first_rest, second_rest];
    }
    let rests = rests.as_flattened_mut();
    take_largest(rests, exact);
    let most = rests.iter().fold(0.0f32, |most, &rest| most.max(rest.abs()));
    // The least rows have low parts that no sum would feel; a reciprocal of theirs could be infinite.
    let (scale, inverse) = match most > 1e-30 && most.is_finite() {
        true => (most / LOW_LARGEST, LOW_LARGEST / most),
        false => (0.0, 0.0),
    };
    for (quad, rests) in low.zip(rests.as_chunks::<QUAD>().0) {
        let byte = |rest: f32| {
            let whole = rest * inverse;
            // A NaN becomes 0, and its high part tells of it.
            (whole + 0.5f32.copysign(whole)) as i8 as u8 ^ LOW_ZERO
        };
        *quad = u32::from_le_bytes(rests.map(byte));
    }
    scale
}

/// Moves the largest of `rests` to `exact`: a few of a row's values may be far larger than the others,
/// whose low parts would have few bits on the same scale.
fn take_largest(rests: &mut [f32], exact: &mut [Exact; EXACT_PARTS]) {
    *exact = [Exact::default(); EXACT_PARTS];
    for (input, &rest) in rests.iter().enumerate() {
        // They stand in falling order; of equal ones the first stay.
        let is_larger = |other: &Exact| rest.abs() > other.rest.abs();
        if is_larger(&exact[EXACT_PARTS - 1]) {
            let at = exact.iter().position(is_larger).unwrap_or(EXACT_PARTS - 1);
            exact[at..].rotate_right(1);
            exact[at] = Exact { input: input as u32, rest };
        }
    }
    for exact in exact.iter().filter(|exact| exact.rest != 0.0) {
        rests[exact.input as usize] = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Storage;
    use crate::samples::{assert_same_bits, dense, matrix, noise};

    fn product(threads: usize, x: &[f32], w: &Matrix) -> Vec<f32> {
        let rows = x.len() / w.inputs();
        let mut out = vec![f32::NAN; rows * w.outputs()];
        matmul_split(&Team::new(threads), x, rows, w, &mut out);
        out
    }

    /// Against sums in f64. Tolerance: of each term 2^-17 of the row's largest value and of the output's
    /// largest weight, as a random walk of four deviations.
    fn check(rows: usize, outputs: usize, inputs: usize) {
        let w = matrix(outputs, inputs, Storage::Bf16, 3);
        let mut x = noise(rows * inputs, 77);
        x.iter_mut().step_by(7).for_each(|x| *x *= 30.0);
        let weights = dense(&w);
        for (i, got) in product(2, &x, &w).iter().enumerate() {
            let x = &x[i / outputs * inputs..][..inputs];
            let w = &weights[i % outputs * inputs..][..inputs];
            let want: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let largest = |of: &[f32]| of.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let term = f64::from(largest(x)) * f64::from(largest(w)) * 2f64.powi(-17);
            let tolerance = 4.0 * term * (inputs as f64).sqrt();
            let error = (f64::from(*got) - want).abs();
            assert!(error <= tolerance, "{rows}x{inputs}x{outputs} at {i}: {error} > {tolerance}");
        }
    }

    #[test]
    fn agrees_with_f64() {
        for (outputs, inputs) in [(1, 4), (31, 8), (32, 64), (33, 68), (200, 1600), (9, 6)] {
            for rows in (1..=13).chain([64]) {
                check(rows, outputs, inputs);
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch_the_threads_or_other_outputs() {
        let (outputs, inputs) = (301, 576);
        let w = matrix(outputs, inputs, Storage::Bf16, 21);
        let x = noise(70 * inputs, 23);
        let alone: Vec<f32> = x.chunks_exact(inputs).flat_map(|x| product(1, x, &w)).collect();
        for threads in [1, 2, 3] {
            for rows in [2, 5, 13, 70] {
                let got = product(threads, &x[..rows * inputs], &w);
                assert_same_bits(&got, &alone[..rows * outputs], "rows");
            }
        }
        // A slice of the outputs, as a rank holds it, wherever it starts.
        let mut slice = Matrix::new(100, inputs, Storage::Bf16);
        let weights = dense(&w);
        for output in 0..100 {
            slice.set_row(output, &weights[(output + 77) * inputs..][..inputs]);
        }
        for (got, want) in product(2, &x, &slice).chunks(100).zip(alone.chunks(outputs)) {
            assert_same_bits(got, &want[77..177], "a slice");
        }
    }

    #[test]
    fn edges() {
        let w = matrix(40, 8, Storage::Bf16, 3);
        assert!(product(1, &[f32::NAN; 8], &w).iter().all(|sum| sum.is_nan()));
        assert!(product(1, &[f32::INFINITY; 8], &w).iter().all(|sum| !sum.is_finite()));
        let zeros = Matrix::new(40, 8, Storage::Bf16);
        for x in [0.0, 1e-38, -3e-33, 0.1, 1e30] {
            assert_eq!(product(1, &[x; 8], &zeros), [0.0; 40], "{x}");
            assert!(product(1, &[x; 8], &w).iter().all(|sum| sum.is_finite()), "{x}");
        }
        matmul_split(&Team::new(2), &[], 0, &w, &mut []);
    }
}
