//! One unit of attention: some queries of one sequence that share a KV head.

use std::ops::Range;

use super::{Attention, MOST_QUERIES, SequenceRows};
use crate::disjoint::Disjoint;
use crate::exponential::exp2;
use crate::kv_pages::{KvPages, padded};
use crate::matmul::tile::{Element, Tile, by_height};
use crate::simd::{Kernel, LANES, Simd};

/// Blocks whose scores are taken together, and their tokens: one softmax update for four blocks.
const STEP_BLOCKS: usize = 4;
const STEP_TOKENS: usize = STEP_BLOCKS * KvPages::BLOCK_TOKENS;
/// Tokens of one stretch.
const STRETCH_TOKENS: usize = 256;

/// Queries of a sequence and KV head: query `q` is head `q % group` (of those that share the KV head)
/// of row `q / group`.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) stretches: Range<usize>,
    group: usize,
    queries: Range<usize>,
    /// Tokens that any of the queries sees.
    tokens: Range<usize>,
}

impl Unit {
    pub(super) fn new(
        index: usize,
        sequence: &SequenceRows<'_>,
        kv_head: usize,
        group: usize,
        queries: Range<usize>,
        window: Option<usize>,
    ) -> Self {
        let first = sequence.context_len - sequence.rows + queries.start / group;
        let last = sequence.context_len - sequence.rows + (queries.end - 1) / group;
        let tokens = seen_from(first, window).start..last + 1;
        let stretches = tokens.start / STRETCH_TOKENS..tokens.end.div_ceil(STRETCH_TOKENS);
        Self { sequence: index, kv_head, stretches, group, queries, tokens }
    }
}

/// Tokens that the row at `position` sees.
#[inline(always)]
fn seen_from(position: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
}

/// What to do with a unit.
pub(super) enum Task<'a> {
    Whole,
    /// Only the `.0`-th of its stretches, whose sums go to `.1`.
    Stretch(usize, &'a mut [f32]),
    /// The sums of all its stretches are there, one after the other.
    Merge(&'a mut [f32]),
}

/// Floats of the [`Sums`] of a unit.
pub(super) fn sums_len(head_dim: usize) -> usize {
    MOST_QUERIES * (2 + padded(head_dim))
}

/// Floats that a worker needs beside the sums of split stretches.
pub(super) fn room_len(head_dim: usize) -> usize {
    MOST_QUERIES * (padded(head_dim) + STEP_TOKENS + LANES) + 2 * sums_len(head_dim)
}

/// A softmax-weighted sum of values for each query, not yet divided by its weights. Exponents are of 2,
/// relative to `max`.
struct Sums<'a> {
    max: &'a mut [f32],
    weight: &'a mut [f32],
    values: &'a mut [f32],
}

impl<'a> Sums<'a> {
    fn new(floats: &'a mut [f32]) -> Self {
        let (max, rest) = floats.split_at_mut(MOST_QUERIES);
        let (weight, values) = rest.split_at_mut(MOST_QUERIES);
        Self { max, weight, values }
    }

    #[inline(always)]
    fn clear(&mut self, queries: usize, width: usize) {
        self.max[..queries].fill(f32::NEG_INFINITY);
        self.weight[..queries].fill(0.0);
        self.values[..queries * width].fill(0.0);
    }
}

/// Runs a task of a unit.
pub(super) struct Attend<'a, E> {
    pub(super) call: &'a Attention<'a>,
    pub(super) unit: &'a Unit,
    pub(super) sequence: &'a SequenceRows<'a>,
    /// The query heads that share the KV head.
    pub(super) heads: &'a [usize],
    pub(super) data: &'a [E],
    pub(super) room: &'a mut [f32],
    pub(super) task: Task<'a>,
    pub(super) out: &'a Disjoint<'a, f32>,
}

impl<E: Element> Kernel for Attend<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, unit, sequence, heads, data, room, task, out } = self;
        let head_dim = call.layout.head_dim;
        let width = padded(head_dim);
        let (queries, rest) = room.split_at_mut(MOST_QUERIES * width);
        let (scores, rest) = rest.split_at_mut(MOST_QUERIES * STEP_TOKENS);
        let (lanes, rest) = rest.split_at_mut(MOST_QUERIES * LANES);
        let (total, own) = rest.split_at_mut(sums_len(head_dim));
        let count = unit.queries.len();
        let blocks = count.div_ceil(S::TILE_ROWS);
        let mut total = Sums::new(total);
        let mut work = Work {
            call,
            unit,
            sequence,
            heads,
            data,
            width,
            count,
            blocks,
            queries,
            scores,
            lanes,
        };
        match task {
            Task::Whole => {
                work.pack::<S>();
                total.clear(count, width);
                let mut own = Sums::new(own);
                for stretch in unit.stretches.clone() {
                    work.stretch(s, stretch, &mut own);
                    work.merge(s, &mut total, &own);
                }
                work.finish(&total, out);
            }
            Task::Stretch(nth, sums) => {
                work.pack::<S>();
                work.stretch(s, unit.stretches.start + nth, &mut Sums::new(sums));
            }
            Task::Merge(stretches) => {
                total.clear(count, width);
                for sums in stretches.chunks_exact_mut(sums_len(head_dim)) {
                    work.merge(s, &mut total, &Sums::new(sums));
                }
                work.finish(&total, out);
            }
        }
    }
}

/// A unit at work, with its room cut up.
struct Work<'a, E> {
    call: &'a Attention<'a>,
    unit: &'a Unit,
    sequence: &'a SequenceRows<'a>,
    heads: &'a [usize],
    data: &'a [E],
    /// Values of a query, padded.
    width: usize,
    count: usize,
    /// Queries are cut into blocks as high as the register tile.
    blocks: usize,
    /// For each block of queries, `[head_dim][height]`, scaled.
    queries: &'a mut [f32],
    /// `[query][STEP_TOKENS]`: scores, then weights, of one step.
    scores: &'a mut [f32],
    /// `[query][LANES]`: the sum of weights of one stretch, by lane.
    lanes: &'a mut [f32],
}

impl<E: Element> Work<'_, E> {
    #[inline(always)]
    fn block(&self, block: usize) -> Range<usize> {
        block * self.count / self.blocks..(block + 1) * self.count / self.blocks
    }

    /// Row within the sequence, and head, of query `q` of the unit.
    #[inline(always)]
    fn row_and_head(&self, q: usize) -> (usize, usize) {
        let q = self.unit.queries.start + q;
        (q / self.unit.group, self.heads[q % self.unit.group])
    }

    /// Brings the queries into tile order, scaled so that weights are powers of two.
    #[inline(always)]
    fn pack<S: Simd>(&mut self) {
        let layout = self.call.layout;
        let (dim, row_len) = (layout.head_dim, layout.row_len());
        let scale = self.call.scale * std::f32::consts::LOG2_E;
        for block in 0..self.blocks {
            let block = self.block(block);
            let height = block.len();
            for q in block.clone() {
                let (row, head) = self.row_and_head(q);
                let from = (self.sequence.first_row + row) * row_len + head * dim;
                let x = &self.call.qkv[from..from + dim];
                let to = &mut self.queries[block.start * dim + q - block.start..];
                for (to, x) in to.iter_mut().step_by(height).zip(x) {
                    *to = x * scale;
                }
            }
        }
    }

    /// The sums over one stretch.
    #[inline(always)]
    fn stretch<S: Simd>(&mut self, s: S, stretch: usize, sums: &mut Sums<'_>) {
        sums.clear(self.count, self.width);
        self.lanes[..self.count * LANES].fill(0.0);
        let start = (stretch * STRETCH_TOKENS).max(self.unit.tokens.start);
        let end = ((stretch + 1) * STRETCH_TOKENS).min(self.unit.tokens.end);
        for step in start / STEP_TOKENS..end.div_ceil(STEP_TOKENS) {
            let first = step * STEP_TOKENS;
            for block in 0..self.blocks {
                let block = self.block(block);
                by_height!(block.len(), self.scores_of::<S>(s, block.start, first));
            }
            self.weigh(s, first, sums);
            for block in 0..self.blocks {
                let block = self.block(block);
                by_height!(block.len(), self.values_of::<S>(s, block.start, first, sums));
            }
        }
        let (lanes, _) = self.lanes.as_chunks::<LANES>();
        for (weight, lanes) in sums.weight[..self.count].iter_mut().zip(lanes) {
            *weight = s.sum(s.load(lanes));
        }
    }

    /// The block of memory that holds the page of tokens from `token`.
    #[inline(always)]
    fn page_block(&self, token: usize) -> usize {
        self.sequence.blocks[token / KvPages::BLOCK_TOKENS] as usize
    }

    /// Scores of `ROWS` queries from `query` with the tokens of one step. Pages that no query sees are
    /// stood in for by one that is seen: `weigh` masks them.
    #[inline(always)]
    fn scores_of<S: Simd, const ROWS: usize>(&mut self, s: S, query: usize, first: usize) {
        let tokens = &self.unit.tokens;
        let pages: [*const E; STEP_BLOCKS] = std::array::from_fn(|page| {
            let token = (first + page * LANES).clamp(tokens.start, tokens.end - 1);
            let geometry = self.call.pages.geometry();
            self.data[geometry.k_page(self.page_block(token), self.unit.kv_head)..].as_ptr()
        });
        if S::TILE_IS_WIDE {
            self.scores_tile::<S, ROWS, 2>(s, query, [pages[0], pages[1]], 0);
            self.scores_tile::<S, ROWS, 2>(s, query, [pages[2], pages[3]], 2);
        } else {
            for (page, start) in pages.into_iter().enumerate() {
                self.scores_tile::<S, ROWS, 1>(s, query, [start], page);
            }
        }
    }

    #[inline(always)]
    fn scores_tile<S: Simd, const ROWS: usize, const PAGES: usize>(
        &mut self,
        s: S,
        query: usize,
        w: [*const E; PAGES],
        first_page: usize,
    ) {
        let depth = self.call.layout.head_dim;
        let x = self.queries[query * depth..(query + ROWS) * depth].as_ptr();
        let scores = &mut self.scores[query * STEP_TOKENS..(query + ROWS) * STEP_TOKENS];
        let sums = scores[first_page * LANES..].as_mut_ptr();
        let tile: Tile<S, E, ROWS, PAGES, LANES> =
            Tile { s, x, w, depth, sums, sums_stride: STEP_TOKENS, fresh: true };
        // SAFETY: the block of queries has `depth * ROWS` values; a page of K holds `depth` dimensions;
        // the scores of `PAGES` pages from the first are within those of the step.
        unsafe { tile.run::<ROWS, 1>() };
    }

    /// Turns the scores of one step into weights, and rescales the sums where the maximum rose.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, s: S, first: usize, sums: &mut Sums<'_>) {
        let before = self.sequence.context_len - self.sequence.rows;
        for q in 0..self.count {
            let seen = seen_from(before + self.row_and_head(q).0, self.call.window);
            let (scores, _) =
                self.scores[q * STEP_TOKENS..][..STEP_TOKENS].as_chunks_mut::<LANES>();
            let mut v = [s.splat(0.0); STEP_BLOCKS];
            for (v, scores) in v.iter_mut().zip(&*scores) {
                *v = s.load(scores);
            }
            if seen.start > first || seen.end < first + STEP_TOKENS {
                mask(s, &mut v, first, &seen);
            }
            let largest = s.largest(s.max(s.max(v[0], v[1]), s.max(v[2], v[3])));
            let old = sums.max[q];
            let new = if largest > old { largest } else { old };
            if new == f32::NEG_INFINITY {
                // Nothing seen yet: -inf minus -inf would be NaN.
                scores.as_flattened_mut().fill(0.0);
                continue;
            }
            let (lanes, _) = self.lanes[q * LANES..].as_chunks_mut::<LANES>();
            let mut lanes_sum = s.load(&lanes[0]);
            if new > old {
                let shrink = exp2(s, s.splat(old - new));
                lanes_sum = s.mul(lanes_sum, shrink);
                let values = &mut sums.values[q * self.width..(q + 1) * self.width];
                for values in values.as_chunks_mut::<LANES>().0 {
                    s.store(s.mul(s.load(values), shrink), values);
                }
                sums.max[q] = new;
            }
            for (v, scores) in v.iter().zip(scores) {
                let weights = exp2(s, s.sub(*v, s.splat(new)));
                lanes_sum = s.add(lanes_sum, weights);
                s.store(weights, scores);
            }
            s.store(lanes_sum, &mut lanes[0]);
        }
    }

    /// Adds the weighted values of one step for `ROWS` queries from `query`.
    #[inline(always)]
    fn values_of<S: Simd, const ROWS: usize>(
        &mut self,
        s: S,
        query: usize,
        first: usize,
        sums: &mut Sums<'_>,
    ) {
        let panels = self.width / LANES;
        if S::TILE_IS_WIDE {
            for pair in 0..panels / 2 {
                self.values_tile::<S, ROWS, 2>(s, query, first, 2 * pair, sums);
            }
        } else {
            for panel in 0..panels {
                self.values_tile::<S, ROWS, 1>(s, query, first, panel, sums);
            }
        }
    }

    #[inline(always)]
    fn values_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
        &mut self,
        s: S,
        query: usize,
        first: usize,
        panel: usize,
        sums: &mut Sums<'_>,
    ) {
        const PANEL_LEN: usize = KvPages::BLOCK_TOKENS * LANES;
        let values = &mut sums.values[query * self.width..(query + ROWS) * self.width];
        let sums = values[panel * LANES..].as_mut_ptr();
        let geometry = self.call.pages.geometry();
        for page in 0..STEP_BLOCKS {
            let token = first + page * LANES;
            // Tokens after the last that any query sees may never have been written.
            let depth = self.unit.tokens.end.saturating_sub(token).min(LANES);
            if depth == 0 || token + LANES <= self.unit.tokens.start {
                continue;
            }
            let start = geometry.v_page(self.page_block(token), self.unit.kv_head);
            let start = start + panel * PANEL_LEN;
            let v_page = &self.data[start..start + PANELS * PANEL_LEN];
            let weights = &self.scores[query * STEP_TOKENS..(query + ROWS) * STEP_TOKENS];
            let x = weights[page * LANES..].as_ptr();
            let w = std::array::from_fn(|panel| v_page[panel * PANEL_LEN..].as_ptr());
            let tile: Tile<S, E, ROWS, PANELS, LANES> =
                Tile { s, x, w, depth, sums, sums_stride: self.width, fresh: false };
            // SAFETY: each query has `STEP_TOKENS` weights; a panel of V holds 16 tokens; the values of
            // `PANELS` panels from the first are within those of a query.
            unsafe { tile.run::<1, STEP_TOKENS>() };
        }
    }

    /// `total += part`, each brought to the larger of the two maxima.
    #[inline(always)]
    fn merge<S: Simd>(&self, s: S, total: &mut Sums<'_>, part: &Sums<'_>) {
        for q in 0..self.count {
            let (old, add) = (total.max[q], part.max[q]);
            if add == f32::NEG_INFINITY {
                continue;
            }
            let new = if old > add { old } else { add };
            let (shrink, grow) = (exp2(s, s.splat(old - new)), exp2(s, s.splat(add - new)));
            let mut weight = [0.0; LANES];
            let grown = s.mul(s.splat(part.weight[q]), grow);
            s.store(s.fma(s.splat(total.weight[q]), shrink, grown), &mut weight);
            total.weight[q] = weight[0];
            total.max[q] = new;
            let range = q * self.width..(q + 1) * self.width;
            let (to, _) = total.values[range.clone()].as_chunks_mut::<LANES>();
            let (from, _) = part.values[range].as_chunks::<LANES>();
            for (to, from) in to.iter_mut().zip(from) {
                let grown = s.mul(s.load(from), grow);
                s.store(s.fma(s.load(to), shrink, grown), to);
            }
        }
    }

    #[inline(always)]
    fn finish(&self, total: &Sums<'_>, out: &Disjoint<'_, f32>) {
        let dim = self.call.layout.head_dim;
        for q in 0..self.count {
            let (row, head) = self.row_and_head(q);
            let start = ((self.sequence.first_row + row) * self.call.layout.heads + head) * dim;
            // SAFETY: the rows of the sequences are disjoint, a query belongs to one unit, and a unit
            // is finished by one worker.
            let out = unsafe { out.part(start..start + dim) };
            let scale = 1.0 / total.weight[q];
            for (out, value) in out.iter_mut().zip(&total.values[q * self.width..]) {
                *out = value * scale;
            }
        }
    }
}

/// Hides the tokens outside `seen`; `v` starts at token `first`. What is hidden may be anything, even
/// NaN: a page holds leftovers after its last token.
#[inline(always)]
fn mask<S: Simd>(s: S, v: &mut [S::V; STEP_BLOCKS], first: usize, seen: &Range<usize>) {
    let mut index = [0.0; LANES];
    for (i, index) in index.iter_mut().enumerate() {
        *index = i as f32;
    }
    let index = s.load(&index);
    let hidden = s.splat(f32::NEG_INFINITY);
    for (page, v) in v.iter_mut().enumerate() {
        let token = first + page * LANES;
        let from = s.splat(seen.start.saturating_sub(token).min(LANES) as f32);
        let to = s.splat(seen.end.saturating_sub(token).min(LANES) as f32);
        *v = s.select_less(index, to, *v, hidden);
        *v = s.select_less(index, from, hidden, *v);
    }
}
