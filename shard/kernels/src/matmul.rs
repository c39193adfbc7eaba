//! Matrix products: activations by packed weights.
//!
//! Every output is one chain of fused multiply-adds over the inputs in order, started from zero, bias
//! added last. How many rows there are, how they are blocked, and which thread computes them decides
//! only which chains run side by side, so none of it changes a bit of a result.
//!
//! * One row: the weights stream through once; several panels run side by side to hide the latency of
//!   the chains.
//! * More rows: rows are cut into blocks of nearly equal height that fit the register tile and packed
//!   `[inputs][height]`; a slice of inputs and a group of blocks are chosen so that the packed rows
//!   stay in the L2 cache while the panels pass.

mod plan;
pub(crate) mod tile;

use std::ops::Range;

use crate::disjoint::Disjoint;
use crate::matrix::{Matrix, PANEL, Panels};
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::team::{Team, share};
use plan::Plan;
use tile::{Element, Tile, by_height};

/// Fewer packed values than this are packed by the caller alone: a fork would cost more.
const FORK_VALUES: usize = 16 * 1024;
/// The most rows of a tile on any instruction set.
const MOST_ROWS: usize = 12;
/// Panels side by side when there is one row.
const SINGLE_ROW_PANELS: usize = 4;

/// `out[rows, outputs] = x[rows, inputs] · wᵀ (+ bias)`.
///
/// # Panics
/// If a length does not fit.
pub fn matmul(
    team: &Team,
    x: &[f32],
    rows: usize,
    w: &Matrix,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    matmul_on(Isa::best(), team, (x, rows), w, bias, out);
}

fn matmul_on(
    isa: Isa,
    team: &Team,
    (x, rows): (&[f32], usize),
    w: &Matrix,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let (inputs, outputs) = (w.inputs(), w.outputs());
    assert!(x.len() == rows * inputs, "x has {} values, not {rows} rows of {inputs}", x.len());
    assert!(out.len() == rows * outputs, "out: {} values, not {rows} x {outputs}", out.len());
    if let Some(bias) = bias {
        assert!(bias.len() == outputs, "bias has {} values, outputs are {outputs}", bias.len());
    }
    if out.is_empty() {
        return;
    }
    match w.panels() {
        Panels::F32(panels) => {
            Product { isa, team, x, rows, inputs, panels, outputs, bias, out: Disjoint::new(out) }
                .run();
        }
        Panels::Bf16(panels) => {
            Product { isa, team, x, rows, inputs, panels, outputs, bias, out: Disjoint::new(out) }
                .run();
        }
    }
}

/// One call of [`matmul`], shapes checked.
struct Product<'a, E> {
    isa: Isa,
    team: &'a Team,
    x: &'a [f32],
    rows: usize,
    inputs: usize,
    panels: &'a [E],
    outputs: usize,
    bias: Option<&'a [f32]>,
    out: Disjoint<'a, f32>,
}

impl<E: Element> Product<'_, E> {
    fn run(&self) {
        let panels = self.outputs.div_ceil(PANEL);
        let threads = self.team.threads();
        if self.rows == 1 {
            return self.team.run(&|worker| {
                let panels = share(panels, 1, worker, threads);
                self.isa.run(SingleRow { product: self, panels });
            });
        }
        let plan = Plan::new(self.rows, self.inputs, self.isa.run(TileRows));
        let mut scratch = self.team.scratch();
        let packed = scratch.floats.take(self.x.len());
        self.pack(&plan, packed);
        let packed = &*packed;
        self.team.run(&|worker| {
            let panels = share(panels, 1, worker, threads);
            self.isa.run(Blocks { product: self, plan: &plan, packed, panels });
        });
    }

    /// `packed`: for each block of rows, `[inputs][height]`.
    fn pack(&self, plan: &Plan, packed: &mut [f32]) {
        let all = Disjoint::new(packed);
        let work = |blocks: Range<usize>| {
            for rows in blocks.map(|block| plan.rows_of(block)) {
                let values = rows.start * self.inputs..rows.end * self.inputs;
                // SAFETY: each block is written by the one worker whose share holds it.
                let block = unsafe { all.part(values.clone()) };
                let x = &self.x[values];
                let height = rows.len();
                for (row, x) in x.chunks_exact(self.inputs).enumerate() {
                    for (slot, &value) in block[row..].iter_mut().step_by(height).zip(x) {
                        *slot = value;
                    }
                }
            }
        };
        if self.inputs == 0 {
            return;
        }
        if self.x.len() < FORK_VALUES {
            work(0..plan.blocks());
        } else {
            let threads = self.team.threads();
            self.team.run(&|worker| work(share(plan.blocks(), 1, worker, threads)));
        }
    }

    /// Where panel `panel` starts, from input `input` (even for `bf16`).
    #[inline(always)]
    fn panel(&self, panel: usize, input: usize) -> *const E {
        let start = panel * PANEL * E::padded(self.inputs) + input * PANEL;
        debug_assert!(start <= self.panels.len());
        // SAFETY: within the matrix: `panel` and `input` are within its shape.
        unsafe { self.panels.as_ptr().add(start) }
    }

    /// Computes a tile: `tile(sums, stride, fresh)` for `rows` by `width` outputs from `output`.
    /// Where the last panel is not full, the sums go through `spare`.
    #[inline(always)]
    fn place<S: Simd>(
        &self,
        s: S,
        (rows, output, width): (Range<usize>, usize, usize),
        (first, last): (bool, bool),
        tile: impl Fn(*mut f32, usize, bool),
    ) {
        let valid = width.min(self.outputs.saturating_sub(output));
        let at = |row: usize| row * self.outputs + output;
        if valid == width {
            // Reaches across the rows, though only these columns of them are touched.
            let sums = self.out.reach(at(rows.start)..at(rows.end - 1) + width);
            tile(sums, self.outputs, first);
        } else if valid > 0 {
            let mut spare = [0.0; MOST_ROWS * PANEL];
            let part = |row: usize| {
                // SAFETY: these outputs belong to the panel of this worker alone.
                unsafe { self.out.part(at(row)..at(row) + valid) }
            };
            if !first {
                for (row, spare) in rows.clone().zip(spare.chunks_exact_mut(width)) {
                    spare[..valid].copy_from_slice(part(row));
                }
            }
            tile(spare.as_mut_ptr(), width, first);
            for (row, spare) in rows.clone().zip(spare.chunks_exact(width)) {
                part(row).copy_from_slice(&spare[..valid]);
            }
        }
        if let (Some(bias), true) = (self.bias, last && valid > 0) {
            for row in rows {
                // SAFETY: as above.
                let out = unsafe { self.out.part(at(row)..at(row) + valid) };
                add(s, out, &bias[output..output + valid]);
            }
        }
    }
}

#[inline(always)]
fn add<S: Simd>(_: S, to: &mut [f32], what: &[f32]) {
    for (to, what) in to.iter_mut().zip(what) {
        *to += what;
    }
}

struct TileRows;
impl Kernel for TileRows {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::TILE_ROWS
    }
}

/// One row by a range of panels.
struct SingleRow<'a, 'p, E> {
    product: &'a Product<'p, E>,
    panels: Range<usize>,
}

impl<E: Element> Kernel for SingleRow<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut panel = self.panels.start;
        let full = self.panels.end.min(self.product.outputs / PANEL);
        while panel + SINGLE_ROW_PANELS <= full {
            self.panels_at::<S, { 2 * SINGLE_ROW_PANELS }>(s, panel);
            panel += SINGLE_ROW_PANELS;
        }
        for panel in panel..self.panels.end {
            self.panels_at::<S, 2>(s, panel);
        }
    }
}

impl<E: Element> SingleRow<'_, '_, E> {
    #[inline(always)]
    fn panels_at<S: Simd, const VECTORS: usize>(&self, s: S, panel: usize) {
        let p = self.product;
        let w = std::array::from_fn(|v| {
            // SAFETY: half `v % 2` of panel `panel + v / 2`, which this share holds.
            unsafe { p.panel(panel + v / 2, 0).add(v % 2 * E::VECTOR) }
        });
        let (x, depth) = (p.x.as_ptr(), p.inputs);
        p.place(s, (0..1, panel * PANEL, VECTORS * LANES), (true, true), |sums, stride, fresh| {
            let tile: Tile<S, E, 1, VECTORS, PANEL> =
                Tile { s, x, w, depth, sums, sums_stride: stride, fresh };
            // SAFETY: `x` has `inputs` values, each panel `inputs` steps, and `place` gives the sums.
            unsafe { tile.run::<1, 1>() }
        });
    }
}

/// Packed rows by a range of panels.
struct Blocks<'a, 'p, E> {
    product: &'a Product<'p, E>,
    plan: &'a Plan,
    packed: &'a [f32],
    panels: Range<usize>,
}

impl<E: Element> Kernel for Blocks<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for group in self.plan.groups() {
            for slice in self.plan.slices() {
                for panel in self.panels.clone() {
                    for block in group.clone() {
                        self.block(s, block, panel, slice.clone());
                    }
                }
            }
        }
    }
}

impl<E: Element> Blocks<'_, '_, E> {
    #[inline(always)]
    fn block<S: Simd>(&self, s: S, block: usize, panel: usize, slice: Range<usize>) {
        let rows = self.plan.rows_of(block);
        by_height!(rows.len(), self.tile::<S>(s, rows.start, panel, slice));
    }

    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize>(
        &self,
        s: S,
        first_row: usize,
        panel: usize,
        slice: Range<usize>,
    ) {
        if S::TILE_IS_WIDE {
            self.vectors::<S, ROWS, 2>(s, first_row, (panel, 0), slice);
        } else {
            self.vectors::<S, ROWS, 1>(s, first_row, (panel, 0), slice.clone());
            self.vectors::<S, ROWS, 1>(s, first_row, (panel, 1), slice);
        }
    }

    /// `VECTORS` vectors of a panel, from vector `half`.
    #[inline(always)]
    fn vectors<S: Simd, const ROWS: usize, const VECTORS: usize>(
        &self,
        s: S,
        first_row: usize,
        (panel, half): (usize, usize),
        slice: Range<usize>,
    ) {
        let p = self.product;
        let ends = (slice.start == 0, slice.end == p.inputs);
        let x = self.packed[first_row * p.inputs + slice.start * ROWS..].as_ptr();
        let w = std::array::from_fn(|v| {
            // SAFETY: half `half + v` of `panel`, which this share holds.
            unsafe { p.panel(panel, slice.start).add((half + v) * E::VECTOR) }
        });
        let outputs = (first_row..first_row + ROWS, panel * PANEL + half * LANES, VECTORS * LANES);
        p.place(s, outputs, ends, |sums, stride, fresh| {
            let tile: Tile<S, E, ROWS, VECTORS, PANEL> =
                Tile { s, x, w, depth: slice.len(), sums, sums_stride: stride, fresh };
            // SAFETY: the block has `ROWS` values and the panel one step for each input of the slice;
            // `place` gives the sums.
            unsafe { tile.run::<ROWS, 1>() }
        });
    }
}

#[cfg(test)]
mod tests;
