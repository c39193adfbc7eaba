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
mod quantised;
mod split;
#[cfg(target_arch = "x86_64")]
mod split_tile;
pub(crate) mod tile;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::disjoint::Disjoint;
use crate::matrix::{Matrix, PANEL, Panels};
use crate::quantised::BlockType;
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::team::{Team, share};
use plan::Plan;
use quantised::Quantised;
pub use split::matmul_split;
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

pub(crate) fn matmul_on(
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
    let columns = Columns { stride: outputs, first: 0 };
    columns_on(isa, team, (x, rows), w, bias, &Disjoint::new(out), columns);
}

/// Where the outputs of a matrix lie in the rows of the result.
#[derive(Clone, Copy)]
struct Columns {
    /// Values of one row of the result.
    stride: usize,
    first: usize,
}

/// The products of one matrix, or of those that are stacked in it, shapes checked.
fn columns_on(
    isa: Isa,
    team: &Team,
    (x, rows): (&[f32], usize),
    w: &Matrix,
    bias: Option<&[f32]>,
    out: &Disjoint<'_, f32>,
    columns: Columns,
) {
    let (inputs, outputs) = (w.inputs(), w.outputs());
    macro_rules! product {
        ($source:expr) => {
            Product { isa, team, x, rows, inputs, w: $source, outputs, bias, out, columns }.run()
        };
    }
    match w.panels() {
        Panels::F32(panels) => product!(Dense { panels, inputs }),
        Panels::Bf16(panels) => product!(Dense { panels, inputs }),
        Panels::Quantised(panels) => match panels.block {
            BlockType::Q4_0 => product!(Quantised::<quantised::Q4_0>::new(panels)),
            BlockType::Q4_1 => product!(Quantised::<quantised::Q4_1>::new(panels)),
            BlockType::Q8_0 => product!(Quantised::<quantised::Q8_0>::new(panels)),
            BlockType::Q4K => product!(Quantised::<quantised::Q4K>::new(panels)),
            BlockType::Q6K => product!(Quantised::<quantised::Q6K>::new(panels)),
        },
        Panels::Stacked(parts) => {
            let mut first = 0;
            for part in parts {
                let bias = bias.map(|bias| &bias[first..first + part.outputs()]);
                let columns = Columns { first: columns.first + first, ..columns };
                columns_on(isa, team, (x, rows), part, bias, out, columns);
                first += part.outputs();
            }
        }
    }
}

/// Packed weights that a product reads panel by panel.
trait Source: Send + Sync {
    /// Half a panel, from some input on.
    type Place: Copy;
    /// Inputs that a slice does not tear apart.
    const UNIT: usize;

    /// `panel` and `input` (at a whole unit) are within the matrix; `half` is 0 or 1.
    fn place(&self, panel: usize, input: usize, half: usize) -> Self::Place;

    /// Sums of `ROWS` rows by `VECTORS` half panels, as in [`Tile`]; rows are packed `[depth][ROWS]`.
    ///
    /// # Safety
    /// `x` and `w` are readable for `depth` inputs, and the sums, `16 * VECTORS` values every stride, are
    /// ours alone to read and write.
    unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
        s: S,
        x: *const f32,
        w: [Self::Place; VECTORS],
        depth: usize,
        sums: (*mut f32, usize),
        fresh: bool,
    );
}

/// Numbers as they are.
struct Dense<'a, E> {
    panels: &'a [E],
    inputs: usize,
}

impl<E: Element> Source for Dense<'_, E> {
    type Place = *const E;
    const UNIT: usize = 2;

    #[inline(always)]
    fn place(&self, panel: usize, input: usize, half: usize) -> *const E {
        let start = panel * PANEL * E::padded(self.inputs) + input * PANEL + half * E::VECTOR;
        debug_assert!(start <= self.panels.len() || self.inputs == 0);
        // Without inputs there is nothing to point to, and nothing is read.
        self.panels.as_ptr().wrapping_add(start)
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
        s: S,
        x: *const f32,
        w: [*const E; VECTORS],
        depth: usize,
        (sums, sums_stride): (*mut f32, usize),
        fresh: bool,
    ) {
        let tile: Tile<S, E, ROWS, VECTORS, PANEL> =
            Tile { s, x, w, depth, sums, sums_stride, fresh };
        // SAFETY: by the caller's word.
        unsafe { tile.run::<ROWS, 1>() }
    }
}

/// One call of [`matmul`] by one matrix, shapes checked.
struct Product<'a, 'o, W> {
    isa: Isa,
    team: &'a Team,
    x: &'a [f32],
    rows: usize,
    inputs: usize,
    w: W,
    outputs: usize,
    bias: Option<&'a [f32]>,
    out: &'a Disjoint<'o, f32>,
    columns: Columns,
}

impl<'o, W: Source> Product<'_, 'o, W> {
    fn run(&self) {
        if self.rows == 0 || self.outputs == 0 {
            return;
        }
        let panels = self.outputs.div_ceil(PANEL);
        let threads = self.team.threads();
        if self.rows == 1 {
            return self.team.run(&|worker| {
                let panels = share(panels, 1, worker, threads);
                self.isa.run(SingleRow { product: self, panels });
            });
        }
        let plan = Plan::new(self.rows, self.inputs, self.isa.run(TileRows), W::UNIT);
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
                self.columns.stride,
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
        row * self.columns.stride + self.columns.first + target.output
    }

    /// # Safety
    /// The caller has taken the target's panel (for these rows), and holds one part at a time.
    unsafe fn part(&self, target: &Target, row: usize) -> &'o mut [f32] {
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
struct SingleRow<'a, 'p, 'o, W> {
    product: &'a Product<'p, 'o, W>,
    panels: Range<usize>,
}

impl<W: Source> Kernel for SingleRow<'_, '_, '_, W> {
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

impl<W: Source> SingleRow<'_, '_, '_, W> {
    #[inline(always)]
    fn panels_at<S: Simd, const VECTORS: usize>(&self, s: S, panel: usize, spare: &mut Spare) {
        let p = self.product;
        let (output, width) = (panel * PANEL, VECTORS * LANES);
        let target = Target { rows: 0..1, output, width, first: true, last: true };
        let Some(sums) = p.begin(&target, spare) else { return };
        // Half `v % 2` of panel `panel + v / 2`, which this worker has taken.
        let w = std::array::from_fn(|v| p.w.place(panel + v / 2, 0, v % 2));
        // SAFETY: `x` has `inputs` values, each panel `inputs` steps, and `begin` gave the sums.
        unsafe { W::tile::<S, 1, VECTORS>(s, p.x.as_ptr(), w, p.inputs, sums, true) };
        p.end(&target, spare);
    }
}

/// Packed rows by panels. A task is one group of blocks by one batch of panels.
struct Blocks<'a, 'p, 'o, W> {
    product: &'a Product<'p, 'o, W>,
    plan: &'a Plan,
    packed: &'a [f32],
    /// Panels of a batch.
    batch: usize,
    batches: usize,
    /// The next task that nobody has taken.
    next: &'a AtomicUsize,
}

impl<W: Source> Kernel for Blocks<'_, '_, '_, W> {
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

impl<W: Source> Blocks<'_, '_, '_, W> {
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
            let Some(sums) = p.begin(&target, spare) else { return };
            // The halves that this worker has taken; a narrow tile reads the first alone.
            let w = [half, 1].map(|half| p.w.place(panel, slice.start, half));
            let operands = Operands::<W> { x, w, depth, sums, fresh: first };
            by_height!(rows.len(), operands.tile::<S>(s));
            p.end(&target, spare);
        }
    }
}

/// Operands of the tile of one block, whatever its height.
struct Operands<W: Source> {
    x: *const f32,
    w: [W::Place; 2],
    depth: usize,
    sums: (*mut f32, usize),
    fresh: bool,
}

impl<W: Source> Operands<W> {
    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize>(&self, s: S) {
        let Self { x, w, depth, sums, fresh } = *self;
        // SAFETY: the block has `ROWS` values and the panel one step for each input of the slice;
        // `begin` gave the sums.
        unsafe {
            if S::TILE_IS_WIDE {
                W::tile::<S, ROWS, 2>(s, x, w, depth, sums, fresh);
            } else {
                W::tile::<S, ROWS, 1>(s, x, [w[0]], depth, sums, fresh);
            }
        }
    }
}

#[cfg(test)]
mod tests;
