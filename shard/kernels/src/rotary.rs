//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864), fused with the append to the pages.

use crate::attention::{SequenceRows, check_sequences};
use crate::disjoint::Disjoint;
use crate::kv_pages::{Geometry, KvPages, PageData};
use crate::matmul::tile::Element;
use crate::simd::{Isa, Kernel, Simd};
use crate::team::{Team, share};

/// Below this many values a fork costs more than it saves.
const FORK_VALUES: usize = 8 * 1024;

/// Head layout of the fused projection: each row of `qkv` is `[heads | kv_heads | kv_heads] * head_dim`.
#[derive(Clone, Debug)]
pub struct HeadLayout {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// For each local query head, its local KV head.
    pub kv_of_head: Vec<usize>,
}

impl HeadLayout {
    /// Values of one row of `qkv`.
    pub fn row_len(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Cosines and sines by position: `[positions, half_dim]` each. Where `2 * half_dim` is less than the
/// head, the rest of the head is not rotated.
pub struct RotaryTable {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub half_dim: usize,
}

/// Rotates q and k in place (half-split pairs: `i` with `i + half_dim`) and writes k and v to the pages.
/// Sequences come in the order of their rows; a row that no sequence names is left alone.
///
/// # Panics
/// If a shape, a block or a position does not fit.
pub fn rotate_and_append(
    team: &Team,
    qkv: &mut [f32],
    layout: &HeadLayout,
    rotary: &RotaryTable,
    sequences: &[SequenceRows<'_>],
    pages: &mut KvPages,
) {
    let append = Append { isa: Isa::best(), layout, rotary, sequences };
    append.run(team, qkv, pages);
}

/// One call of [`rotate_and_append`].
struct Append<'a> {
    isa: Isa,
    layout: &'a HeadLayout,
    rotary: &'a RotaryTable,
    sequences: &'a [SequenceRows<'a>],
}

impl Append<'_> {
    fn run(&self, team: &Team, qkv: &mut [f32], pages: &mut KvPages) {
        check_sequences(qkv.len(), self.layout, self.sequences, pages);
        let (head_dim, half_dim) = (self.layout.head_dim, self.rotary.half_dim);
        assert!(2 * half_dim <= head_dim, "rotary {half_dim} pairs in heads of {head_dim}");
        let positions = self.sequences.iter().map(|s| s.context_len).max().unwrap_or(0);
        let have = self.rotary.cos.len().min(self.rotary.sin.len());
        assert!(have >= positions * half_dim, "rotary table too short for {positions} positions");
        let geometry = pages.geometry();
        let values = qkv.len();
        let qkv = Disjoint::new(qkv);
        let work: &(dyn Fn(usize, usize) + Sync) = match pages.data_mut() {
            PageData::F32(data) => {
                let data = Disjoint::new(data);
                &move |worker, workers| self.rows(&qkv, geometry, &data, worker, workers)
            }
            PageData::Bf16(data) => {
                let data = Disjoint::new(data);
                &move |worker, workers| self.rows(&qkv, geometry, &data, worker, workers)
            }
        };
        if values < FORK_VALUES {
            work(0, 1);
        } else {
            team.run(&|worker| work(worker, team.threads()));
        }
    }

    /// One worker's share of the rows.
    fn rows<E: Element>(
        &self,
        qkv: &Disjoint<'_, f32>,
        geometry: Geometry,
        data: &Disjoint<'_, E>,
        worker: usize,
        workers: usize,
    ) {
        let total = self.sequences.iter().map(|s| s.rows).sum();
        let mine = share(total, 1, worker, workers);
        let mut before = 0;
        for sequence in self.sequences {
            let (low, high) = (mine.start.max(before), mine.end.min(before + sequence.rows));
            for row in low..high {
                self.row(qkv, geometry, data, sequence, row - before);
            }
            before += sequence.rows;
        }
    }

    fn row<E: Element>(
        &self,
        qkv: &Disjoint<'_, f32>,
        geometry: Geometry,
        data: &Disjoint<'_, E>,
        sequence: &SequenceRows<'_>,
        row: usize,
    ) {
        let len = self.layout.row_len();
        let start = (sequence.first_row + row) * len;
        // SAFETY: `check_sequences` found the rows of the sequences disjoint, and each row is in the
        // share of one worker.
        let values = unsafe { qkv.part(start..start + len) };
        let position = sequence.context_len - sequence.rows + row;
        let half = self.rotary.half_dim;
        let angles = position * half..(position + 1) * half;
        let (heads, kv_heads, head_dim) =
            (self.layout.heads, self.layout.kv_heads, self.layout.head_dim);
        self.isa.run(RotateHeads {
            heads: &mut values[..(heads + kv_heads) * head_dim],
            head_dim,
            cos: &self.rotary.cos[angles.clone()],
            sin: &self.rotary.sin[angles],
        });
        let block = sequence.blocks[position / KvPages::BLOCK_TOKENS] as usize;
        let token = position % KvPages::BLOCK_TOKENS;
        let (k, v) = values[heads * head_dim..].split_at(kv_heads * head_dim);
        for head in 0..kv_heads {
            let (k_page, v_page) = (geometry.k_page(block, head), geometry.v_page(block, head));
            let own = head * head_dim..(head + 1) * head_dim;
            for (dim, (&k, &v)) in k[own.clone()].iter().zip(&v[own]).enumerate() {
                data.publish(k_page + Geometry::k_offset::<E>(token, dim), k);
                data.publish(v_page + Geometry::v_offset::<E>(token, dim), v);
            }
        }
    }
}

struct RotateHeads<'a> {
    heads: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for RotateHeads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let half = self.cos.len();
        if half == 0 {
            return;
        }
        for head in self.heads.chunks_exact_mut(self.head_dim) {
            let (low, high) = head[..2 * half].split_at_mut(half);
            for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests;
