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
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
/// Panels of one task at most: enough to reuse the packed rows, few enough to share out evenly.
const MOST_BATCH_PANELS: usize = 8;
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

impl<'a, E: Element> Product<'a, E> {
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
        // Who is free takes the next: a core that other work slows down does not hold up the rest.
        let batch = (panels / (4 * threads)).clamp(1, MOST_BATCH_PANELS);
        let batches = panels.div_ceil(batch);
        let next = AtomicUsize::new(0);
        self.team.run(&|_| {
            self.isa.run(Blocks {
                product: self,
                plan: &plan,
                packed,
                batch,
                batches,
                next: &next,
            });
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

    /// Where the sums of a tile go: into `out` itself, or by way of `spare` where the last panel is not
    /// full. `None` if no output is left.
    fn begin(&self, target: &Target, spare: &mut [f32]) -> Option<(*mut f32, usize)> {
        let valid = self.valid(target);
        if valid == 0 {
            return None;
        }
        if valid == target.width {
            // Reaches across the rows, though only these columns of them are touched.
            let end = self.place(target, target.rows.end - 1) + valid;
            return Some((
                self.out.reach(self.place(target, target.rows.start)..end),
                self.outputs,
            ));
        }
        if !target.first {
            for (row, spare) in target.rows.clone().zip(spare.chunks_exact_mut(target.width)) {
                // SAFETY: a tile is begun by the worker that took its panel.
                spare[..valid].copy_from_slice(unsafe { self.part(target, row) });
            }
        }
        Some((spare.as_mut_ptr(), target.width))
    }

    /// Brings the sums of a tile from `spare` if they are there, and adds the bias at the end.
    fn end(&self, target: &Target, spare: &[f32]) {
        let valid = self.valid(target);
        if valid < target.width {
            for (row, spare) in target.rows.clone().zip(spare.chunks_exact(target.width)) {
                // SAFETY: a tile is ended by the worker that took its panel.
                unsafe { self.part(target, row) }.copy_from_slice(&spare[..valid]);
            }
        }
        if let (Some(bias), true) = (self.bias, target.last) {
            for row in target.rows.clone() {
                let bias = &bias[target.output..target.output + valid];
                // SAFETY: as above.
                let sums = unsafe { self.part(target, row) };
                for (sum, bias) in sums.iter_mut().zip(bias) {
                    *sum += bias;
                }
            }
        }
    }

    fn valid(&self, target: &Target) -> usize {
        target.width.min(self.outputs.saturating_sub(target.output))
    }

    fn place(&self, target: &Target, row: usize) -> usize {
        row * self.outputs + target.output
    }

    /// # Safety
    /// The caller has taken the target's panel (for these rows), and holds one part at a time.
    unsafe fn part(&self, target: &Target, row: usize) -> &'a mut [f32] {
        let start = self.place(target, row);
        // SAFETY: each panel is taken once for each row, so nobody else touches these outputs.
        unsafe { self.out.part(start..start + self.valid(target)) }
    }
}

/// The outputs of one tile, and whether its slice of the inputs is the first and the last.
struct Target {
    rows: Range<usize>,
    output: usize,
    width: usize,
    first: bool,
    last: bool,
}

/// Sums on their way to a panel that is not full.
type Spare = [f32; MOST_ROWS * PANEL];

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
        let mut spare: Spare = [0.0; MOST_ROWS * PANEL];
        let mut panel = self.panels.start;
        let full = self.panels.end.min(self.product.outputs / PANEL);
        while panel + SINGLE_ROW_PANELS <= full {
            self.panels_at::<S, { 2 * SINGLE_ROW_PANELS }>(s, panel, &mut spare);
            panel += SINGLE_ROW_PANELS;
        }
        for panel in panel..self.panels.end {
            self.panels_at::<S, 2>(s, panel, &mut spare);
        }
    }
}

impl<E: Element> SingleRow<'_, '_, E> {
    #[inline(always)]
    fn panels_at<S: Simd, const VECTORS: usize>(&self, s: S, panel: usize, spare: &mut Spare) {
        let p = self.product;
        let (output, width) = (panel * PANEL, VECTORS * LANES);
        let target = Target { rows: 0..1, output, width, first: true, last: true };
        let Some((sums, sums_stride)) = p.begin(&target, spare) else { return };
        let mut w = [p.panel(panel, 0); VECTORS];
        for (v, w) in w.iter_mut().enumerate() {
            // SAFETY: half `v % 2` of panel `panel + v / 2`, which this worker has taken.
            *w = unsafe { p.panel(panel + v / 2, 0).add(v % 2 * E::VECTOR) };
        }
        let (x, depth) = (p.x.as_ptr(), p.inputs);
        let tile: Tile<S, E, 1, VECTORS, PANEL> =
            Tile { s, x, w, depth, sums, sums_stride, fresh: true };
        // SAFETY: `x` has `inputs` values, each panel `inputs` steps, and `begin` gave the sums.
        unsafe { tile.run::<1, 1>() };
        p.end(&target, spare);
    }
}

/// Packed rows by panels. A task is one group of blocks by one batch of panels.
struct Blocks<'a, 'p, E> {
    product: &'a Product<'p, E>,
    plan: &'a Plan,
    packed: &'a [f32],
    /// Panels of a batch.
    batch: usize,
    batches: usize,
    /// The next task that nobody has taken.
    next: &'a AtomicUsize,
}

impl<E: Element> Kernel for Blocks<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut spare: Spare = [0.0; MOST_ROWS * PANEL];
        let panels = self.product.outputs.div_ceil(PANEL);
        loop {
            let task = self.next.fetch_add(1, Relaxed);
            if task >= self.plan.groups() * self.batches {
                return;
            }
            let group = self.plan.blocks_of(task / self.batches);
            let first = task % self.batches * self.batch;
            for slice in self.plan.slices() {
                for panel in first..panels.min(first + self.batch) {
                    for block in group.clone() {
                        self.block(s, block, panel, &slice, &mut spare);
                    }
                }
            }
        }
    }
}

impl<E: Element> Blocks<'_, '_, E> {
    /// One block of rows by one panel, over one slice of the inputs.
    #[inline(always)]
    fn block<S: Simd>(
        &self,
        s: S,
        block: usize,
        panel: usize,
        slice: &Range<usize>,
        spare: &mut Spare,
    ) {
        let p = self.product;
        let rows = self.plan.rows_of(block);
        let (first, last) = (slice.start == 0, slice.end == p.inputs);
        let x = self.packed[rows.start * p.inputs + slice.start * rows.len()..].as_ptr();
        let depth = slice.len();
        let halves = if S::TILE_IS_WIDE { 1 } else { 2 };
        for half in 0..halves {
            let width = PANEL / halves;
            let output = panel * PANEL + half * width;
            let target = Target { rows: rows.clone(), output, width, first, last };
            let Some((sums, sums_stride)) = p.begin(&target, spare) else { return };
            // SAFETY: half `half` of `panel`, which this worker has taken.
            let w = unsafe { p.panel(panel, slice.start).add(half * E::VECTOR) };
            let operands = Operands { x, w, depth, sums, sums_stride, fresh: first };
            by_height!(rows.len(), operands.tile::<S>(s));
            p.end(&target, spare);
        }
    }
}

/// Operands of the tile of one block, whatever its height.
struct Operands<E> {
    x: *const f32,
    w: *const E,
    depth: usize,
    sums: *mut f32,
    sums_stride: usize,
    fresh: bool,
}

impl<E: Element> Operands<E> {
    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize>(&self, s: S) {
        if S::TILE_IS_WIDE {
            // SAFETY: the second half of the panel follows the first.
            let second = unsafe { self.w.add(E::VECTOR) };
            self.vectors::<S, ROWS, 2>(s, [self.w, second]);
        } else {
            self.vectors::<S, ROWS, 1>(s, [self.w]);
        }
    }

    #[inline(always)]
    fn vectors<S: Simd, const ROWS: usize, const VECTORS: usize>(
        &self,
        s: S,
        w: [*const E; VECTORS],
    ) {
        let Self { x, depth, sums, sums_stride, fresh, .. } = *self;
        let tile: Tile<S, E, ROWS, VECTORS, PANEL> =
            Tile { s, x, w, depth, sums, sums_stride, fresh };
        // SAFETY: the block has `ROWS` values and the panel one step for each input of the slice;
        // `begin` gave the sums.
        unsafe { tile.run::<ROWS, 1>() }
    }
}

#[cfg(test)]
mod tests;
