//! Causal attention over pages, with the running softmax of Milakov & Gimelshein (2018,
//! arXiv:1805.02867) and FlashAttention (Dao et al. 2022, arXiv:2205.14135).
//!
//! Work is cut into units: one sequence, one KV head, and a run of its queries (rows and the query
//! heads that share the KV head). A unit reads each page once for all its queries.
//!
//! The order of a row's sum is fixed by positions alone: scores are taken 64 tokens at a time, a
//! softmax runs over each stretch of 256 tokens, and the stretches are merged from the first to the
//! last. So a long context can be split between threads at stretches without changing a bit.

mod unit;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::disjoint::Disjoint;
use crate::kv_pages::{KvPages, PageData};
use crate::matmul::tile::Element;
use crate::rotary::HeadLayout;
use crate::simd::Isa;
use crate::team::{Scratch, Team};
use unit::{Attend, Task, Unit};

/// Queries of one unit: at most so many that their sums stay in the L1 cache beside a few pages; at
/// least a register tile, where the batch has so many.
const MOST_QUERIES: usize = 48;
const LEAST_QUERIES: usize = 12;
/// Below this many multiply-adds (some 5 µs of one core) a fork costs more than it saves.
const FORK_MULTIPLY_ADDS: usize = 200_000;

/// One sequence's rows in a batch. Row `first_row + i` is at position `context_len - rows + i`.
#[derive(Clone, Debug)]
pub struct SequenceRows<'a> {
    pub first_row: usize,
    pub rows: usize,
    /// Tokens in the cache once these rows are appended.
    pub context_len: usize,
    /// Block table: token `t` is in block `blocks[t / 16]` at `t % 16`.
    pub blocks: &'a [u32],
}

/// Causal attention of each row over its own sequence's pages, softmax in f32. Reads the q part of
/// `qkv`; `out`: `[rows, heads * head_dim]`. `window`: a row sees only that many last positions.
/// Sequences come in the order of their rows; a row that no sequence names is left alone.
///
/// # Panics
/// If a shape, a block or a position does not fit.
pub fn paged_attention(
    team: &Team,
    qkv: &[f32],
    layout: &HeadLayout,
    scale: f32,
    window: Option<usize>,
    sequences: &[SequenceRows<'_>],
    pages: &KvPages,
    out: &mut [f32],
) {
    let isa = Isa::best();
    Attention { isa, team, qkv, layout, scale, window, sequences, pages }.run(out);
}

/// # Panics
/// If the rows, heads, tables or positions do not fit each other.
pub(crate) fn check_sequences(
    qkv_len: usize,
    layout: &HeadLayout,
    sequences: &[SequenceRows<'_>],
    pages: &KvPages,
) {
    let geometry = pages.geometry();
    assert!(
        (layout.kv_heads, layout.head_dim) == (geometry.kv_heads, geometry.head_dim),
        "layout {layout:?}, pages {geometry:?}"
    );
    assert!(layout.kv_of_head.len() == layout.heads, "a KV head for each of {}", layout.heads);
    assert!(layout.kv_of_head.iter().all(|&kv| kv < layout.kv_heads), "{layout:?}");
    let len = layout.row_len();
    assert!(len > 0 && qkv_len.is_multiple_of(len), "{qkv_len} values, rows of {len}");
    let mut next_row = 0;
    for s in sequences {
        assert!(s.first_row >= next_row, "row {} comes after {next_row}", s.first_row);
        assert!(s.rows <= s.context_len, "{} rows in a context of {}", s.rows, s.context_len);
        next_row = s.first_row + s.rows;
        assert!(next_row * len <= qkv_len, "row {next_row} of {}", qkv_len / len);
        pages.check_table(s.context_len, s.blocks);
    }
}

/// Lists that one call needs, kept between calls.
#[derive(Default)]
pub(crate) struct Lists {
    /// Query heads, grouped by KV head, and where each group starts.
    heads: Vec<usize>,
    starts: Vec<usize>,
    units: Vec<Unit>,
    /// Where the stretches of a unit begin in the list of all stretches, if units are split.
    slots: Vec<usize>,
}

impl Lists {
    fn heads_of(&self, kv_head: usize) -> &[usize] {
        &self.heads[self.starts[kv_head]..self.starts[kv_head + 1]]
    }
}

/// One call of [`paged_attention`].
struct Attention<'a> {
    isa: Isa,
    team: &'a Team,
    qkv: &'a [f32],
    layout: &'a HeadLayout,
    scale: f32,
    window: Option<usize>,
    sequences: &'a [SequenceRows<'a>],
    pages: &'a KvPages,
}

impl Attention<'_> {
    fn run(&self, out: &mut [f32]) {
        check_sequences(self.qkv.len(), self.layout, self.sequences, self.pages);
        assert!(self.window != Some(0), "a window of 0 shows nothing");
        let rows = self.qkv.len() / self.layout.row_len();
        let width = self.layout.heads * self.layout.head_dim;
        assert!(out.len() == rows * width, "out has {} values, not {rows} x {width}", out.len());
        let out = Disjoint::new(out);
        match self.pages.data() {
            PageData::F32(data) => self.over(data, &out),
            PageData::Bf16(data) => self.over(data, &out),
        }
    }

    fn over<E: Element>(&self, data: &[E], out: &Disjoint<'_, f32>) {
        let mut scratch = self.team.scratch();
        let Scratch { floats, lists } = &mut *scratch;
        self.list_heads(lists);
        self.list_units(lists);
        let stretches = self.list_slots(lists);
        let lists = &*lists;

        let threads = self.team.threads();
        let dim = self.layout.head_dim;
        let (room_len, slot_len) = (unit::room_len(dim), unit::sums_len(dim));
        let floats = floats.take(threads * room_len + stretches * slot_len);
        let (rooms, slots) = floats.split_at_mut(threads * room_len);
        let (rooms, slots) = (Disjoint::new(rooms), Disjoint::new(slots));
        let attend = |worker: usize, index: usize, task: Task<'_>| {
            let unit = &lists.units[index];
            let sequence = &self.sequences[unit.sequence];
            // SAFETY: each worker has its own room, for one task at a time.
            let room = unsafe { rooms.part(worker * room_len..(worker + 1) * room_len) };
            let heads = lists.heads_of(unit.kv_head);
            self.isa.run(Attend { call: self, unit, sequence, heads, data, room, task, out });
        };
        if stretches == 0 {
            // From the end, where the contexts of a prompt are longest.
            let last = lists.units.len();
            self.each(last, &|worker, i| attend(worker, last - 1 - i, Task::Whole));
            return;
        }
        self.each(stretches, &|worker, slot| {
            let index = lists.slots.partition_point(|&first| first <= slot) - 1;
            // SAFETY: each stretch has its own slot.
            let sums = unsafe { slots.part(slot * slot_len..(slot + 1) * slot_len) };
            attend(worker, index, Task::Stretch(slot - lists.slots[index], sums));
        });
        self.each(lists.units.len(), &|worker, index| {
            let unit = &lists.units[index];
            let first = lists.slots[index] * slot_len;
            // SAFETY: the stretches of a unit are read by the one worker that merges it.
            let sums = unsafe { slots.part(first..first + unit.stretches.len() * slot_len) };
            attend(worker, index, Task::Merge(sums));
        });
    }

    /// Calls `work(worker, item)` once for each item; who is free takes the next.
    fn each(&self, items: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        if self.is_small() {
            return (0..items).for_each(|item| work(0, item));
        }
        let next = AtomicUsize::new(0);
        self.team.run(&|worker| {
            loop {
                let item = next.fetch_add(1, Relaxed);
                if item >= items {
                    return;
                }
                work(worker, item);
            }
        });
    }

    fn is_small(&self) -> bool {
        let tokens: usize = self.sequences.iter().map(|s| s.rows * s.context_len).sum();
        tokens * self.layout.heads * self.layout.head_dim * 2 < FORK_MULTIPLY_ADDS
    }

    fn list_heads(&self, lists: &mut Lists) {
        lists.heads.clear();
        lists.starts.clear();
        for kv_head in 0..self.layout.kv_heads {
            lists.starts.push(lists.heads.len());
            let heads = self.layout.kv_of_head.iter().enumerate();
            lists.heads.extend(heads.filter(|(_, kv)| **kv == kv_head).map(|(head, _)| head));
        }
        lists.starts.push(lists.heads.len());
    }

    fn list_units(&self, lists: &mut Lists) {
        let rows: usize = self.sequences.iter().map(|s| s.rows).sum();
        let most = rows * self.layout.heads / (4 * self.team.threads());
        let most = most.clamp(LEAST_QUERIES, MOST_QUERIES);
        lists.units.clear();
        for (index, sequence) in self.sequences.iter().enumerate() {
            for kv_head in 0..self.layout.kv_heads {
                let group = lists.heads_of(kv_head).len();
                let queries = sequence.rows * group;
                let units = queries.div_ceil(most);
                for unit in 0..units {
                    let queries = unit * queries / units..(unit + 1) * queries / units;
                    let unit = Unit::new(index, sequence, kv_head, group, queries, self.window);
                    lists.units.push(unit);
                }
            }
        }
    }

    /// Where there are too few units to keep the threads busy evenly, each stretch is a task of its own
    /// with a slot for its sums. Returns the number of slots: 0 if units stay whole.
    fn list_slots(&self, lists: &mut Lists) -> usize {
        let threads = self.team.threads();
        lists.slots.clear();
        if threads == 1 || self.is_small() || lists.units.len() >= 4 * threads {
            return 0;
        }
        let mut slots = 0;
        for unit in &lists.units {
            lists.slots.push(slots);
            slots += unit.stretches.len();
        }
        if slots == lists.units.len() { 0 } else { slots }
    }
}

#[cfg(test)]
mod tests;
