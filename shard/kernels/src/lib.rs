//! CPU kernels: AVX-512, AVX2 and portable, chosen at run time.
//!
//! Activations are `f32`; weights and KV pages are `f32` or `bf16`. A row's result does not depend
//! on the other rows of the batch, nor on the number of threads: accumulation order is fixed.

use std::ops::Range;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    F32,
    Bf16,
}

/// The threads of one rank: `threads - 1` workers and the caller.
pub struct Team {}
impl Team {
    pub fn new(_threads: usize) -> Self {
        unimplemented!("seam")
    }
    pub fn threads(&self) -> usize {
        unimplemented!("seam")
    }
    /// Runs `work(worker)` once on every thread, `0 .. threads`, and returns when all are done.
    pub fn run(&self, _work: &(dyn Fn(usize) + Sync)) {
        unimplemented!("seam")
    }
}

/// A weight `[outputs, inputs]`, packed for streaming (panels of 32 outputs).
pub struct Matrix {}
impl Matrix {
    pub fn new(_outputs: usize, _inputs: usize, _storage: Storage) -> Self {
        unimplemented!("seam")
    }
    /// Stores output row `output` (`inputs` long). Loading calls this once for each row.
    pub fn set_row(&mut self, _output: usize, _row: &[f32]) {
        unimplemented!("seam")
    }
    /// Reads output row `output` back, as an embedding look-up does.
    pub fn row(&self, _output: usize, _row: &mut [f32]) {
        unimplemented!("seam")
    }
    pub fn outputs(&self) -> usize {
        unimplemented!("seam")
    }
    pub fn inputs(&self) -> usize {
        unimplemented!("seam")
    }
    pub fn bytes(&self) -> usize {
        unimplemented!("seam")
    }
}

/// `out[rows, outputs] = x[rows, inputs] · wᵀ (+ bias)`.
pub fn matmul(
    _team: &Team,
    _x: &[f32],
    _rows: usize,
    _w: &Matrix,
    _bias: Option<&[f32]>,
    _out: &mut [f32],
) {
    unimplemented!("seam")
}

/// `out = x / rms(x) * weight`, a row at a time (Zhang & Sennrich 2019). `x`, `out`: `[rows, weight.len()]`.
pub fn rms_norm(_team: &Team, _x: &[f32], _weight: &[f32], _eps: f32, _out: &mut [f32]) {
    unimplemented!("seam")
}

/// `residual += delta; out = rms_norm(residual)`.
pub fn add_rms_norm(
    _team: &Team,
    _residual: &mut [f32],
    _delta: &[f32],
    _weight: &[f32],
    _eps: f32,
    _out: &mut [f32],
) {
    unimplemented!("seam")
}

/// `out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i]`; `gate_up`: `[rows, 2 * width]`.
pub fn silu_mul(_team: &Team, _gate_up: &[f32], _width: usize, _out: &mut [f32]) {
    unimplemented!("seam")
}

/// The KV pages of one layer: `num_blocks` blocks of [`KvPages::BLOCK_TOKENS`] tokens.
pub struct KvPages {}
impl KvPages {
    pub const BLOCK_TOKENS: usize = 16;
    pub fn new(_num_blocks: usize, _kv_heads: usize, _head_dim: usize, _storage: Storage) -> Self {
        unimplemented!("seam")
    }
    pub fn bytes_per_block(_kv_heads: usize, _head_dim: usize, _storage: Storage) -> usize {
        unimplemented!("seam")
    }
}

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

/// Head layout of the fused projection: each row of `qkv` is `[heads | kv_heads | kv_heads] * head_dim`.
#[derive(Clone, Debug)]
pub struct HeadLayout {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// For each local query head, its local KV head.
    pub kv_of_head: Vec<usize>,
}

/// Cosines and sines by position: `[positions, head_dim / 2]` each.
pub struct RotaryTable {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub half_dim: usize,
}

/// Rotates q and k in place (half-split pairs: `i` with `i + head_dim / 2`; Su et al. 2021) and writes k and v to the pages.
pub fn rotate_and_append(
    _team: &Team,
    _qkv: &mut [f32],
    _layout: &HeadLayout,
    _rotary: &RotaryTable,
    _sequences: &[SequenceRows<'_>],
    _pages: &mut KvPages,
) {
    unimplemented!("seam")
}

/// Causal attention of each row over its own sequence's pages, softmax in f32. Reads the q part of
/// `qkv`; `out`: `[rows, heads * head_dim]`. `window`: a row sees only that many last positions.
pub fn paged_attention(
    _team: &Team,
    _qkv: &[f32],
    _layout: &HeadLayout,
    _scale: f32,
    _window: Option<usize>,
    _sequences: &[SequenceRows<'_>],
    _pages: &KvPages,
    _out: &mut [f32],
) {
    unimplemented!("seam")
}

/// Largest value and its index (lowest index on a tie).
pub fn argmax(_row: &[f32]) -> (usize, f32) {
    unimplemented!("seam")
}

/// `(max, Σ exp(x - max))` of one row: the local part of a log-sum-exp.
pub fn max_and_sum_exp(_row: &[f32]) -> (f32, f32) {
    unimplemented!("seam")
}

/// The part of `0 .. items` that worker `worker` of `workers` takes, in multiples of `grain`.
pub fn share(_items: usize, _grain: usize, _worker: usize, _workers: usize) -> Range<usize> {
    unimplemented!("seam")
}
