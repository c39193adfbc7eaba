//! The CPU device: trireme's own kernels on a team of threads, host collectives.

use std::{ops::Range, time::Duration};

use trireme_checkpoint::DType;
use trireme_collectives::{AbortHandle, CollectiveError, World};
use trireme_kernels::{
    self as kernels, Activation, BlockType, HeadLayout, KvPages, Matrix, RotaryTable, Routing,
    SequenceRows, Storage, Team,
};

use super::{AttentionRule, Device, Samples, Scores, host_groups::HostGroups};
use crate::{
    batch::Batch,
    layers::mixture::{ExpertBuffers, Experts},
    sampler::{self, SampleRow, ScoreRow},
};

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightStore {
    /// Numbers, and blocks that are decoded.
    pub numbers: Storage,
    /// Blocks that a kernel multiplies stay as they are in the file.
    pub keep_blocks: bool,
}

/// The kernels' name of a stored type; none: no kernel multiplies it.
pub fn block_type(dtype: DType) -> Option<BlockType> {
    Some(match dtype {
        DType::Q4_0 => BlockType::Q4_0,
        DType::Q4_1 => BlockType::Q4_1,
        DType::Q8_0 => BlockType::Q8_0,
        DType::Q4K => BlockType::Q4K,
        DType::Q6K => BlockType::Q6K,
        _ => return None,
    })
}

/// Row-major activations, resident as far as steps have filled them.
pub struct Buffer {
    values: kernels::Buffer<f32>,
    width: usize,
}

impl Buffer {
    fn first(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.width]
    }
    fn first_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.width]
    }
}

/// The threads, and the groups of the current epoch.
pub struct Cpu {
    team: Team,
    kv_storage: Storage,
    groups: HostGroups,
    routing: Routing,
}

impl Cpu {
    pub fn new(threads: usize, kv_storage: Storage) -> Self {
        Self {
            team: Team::new(threads),
            kv_storage,
            groups: HostGroups::default(),
            routing: Routing::default(),
        }
    }
}

impl Device for Cpu {
    type Store = WeightStore;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Buffer = Buffer;
    type Rotary = RotaryTable;
    type Pages = KvPages;
    type World = World;
    type Rows<'a> = Vec<SequenceRows<'a>>;

    fn matrix(store: &WeightStore, outputs: usize, inputs: usize) -> Matrix {
        Matrix::new(outputs, inputs, store.numbers)
    }
    fn set_row(matrix: &mut Matrix, output: usize, row: &[f32]) {
        matrix.set_row(output, row);
    }
    fn block_matrix(
        store: &WeightStore,
        outputs: usize,
        inputs: usize,
        dtype: DType,
    ) -> Option<Matrix> {
        let block = block_type(dtype).filter(|_| store.keep_blocks)?;
        Some(Matrix::quantised(outputs, inputs, block))
    }
    fn set_blocks(matrix: &mut Matrix, output: usize, blocks: &[u8]) {
        matrix.set_blocks(output, blocks);
    }
    fn stacked(parts: Vec<Matrix>) -> Matrix {
        Matrix::stacked(parts)
    }
    fn matrix_bytes(matrix: &Matrix) -> usize {
        matrix.bytes()
    }
    fn vector(_store: &WeightStore, values: Vec<f32>) -> Vec<f32> {
        values
    }
    fn weight_size(store: &WeightStore) -> usize {
        store.numbers.bytes()
    }

    fn buffer(&self, rows: usize, width: usize) -> Buffer {
        Buffer { values: kernels::Buffer::sparse(rows * width), width }
    }
    const SPARSE_BUFFERS: bool = true;
    fn available_bytes(&self) -> u64 {
        crate::memory::available_bytes()
    }
    /// Pages become resident as tokens are written, so a large cache costs nothing at the start.
    fn default_kv_share(&self) -> f64 {
        0.25
    }
    fn sharers(&self, ranks: usize) -> usize {
        ranks
    }
    fn read(&self, buffer: &Buffer, rows: usize) -> Vec<f32> {
        buffer.first(rows).to_vec()
    }
    fn write(&self, buffer: &mut Buffer, values: &[f32]) {
        buffer.values[..values.len()].copy_from_slice(values);
    }
    fn rotary(&self, cos: Vec<f32>, sin: Vec<f32>, half_dim: usize) -> RotaryTable {
        RotaryTable { cos, sin, half_dim }
    }
    fn pages(&self, num_blocks: usize, kv_heads: usize, head_dim: usize) -> KvPages {
        KvPages::new(num_blocks, kv_heads, head_dim, self.kv_storage)
    }
    fn page_bytes_per_block(&self, kv_heads: usize, head_dim: usize) -> usize {
        KvPages::bytes_per_block(kv_heads, head_dim, self.kv_storage)
    }
    fn rows<'a>(&mut self, batch: &'a Batch) -> Vec<SequenceRows<'a>> {
        batch.sequences().collect()
    }

    fn embed(&mut self, table: &Matrix, tokens: &[u32], vocab: &Range<u32>, out: &mut Buffer) {
        let width = out.width;
        for (row, token) in out.first_mut(tokens.len()).chunks_exact_mut(width).zip(tokens) {
            if vocab.contains(token) {
                table.row((token - vocab.start) as usize, row);
            } else {
                row.fill(0.0);
            }
        }
    }
    fn linear(
        &mut self,
        x: &Buffer,
        rows: usize,
        (w, bias): (&Matrix, Option<&Vec<f32>>),
        out: &mut Buffer,
    ) {
        let bias = bias.map(Vec::as_slice);
        kernels::matmul(&self.team, x.first(rows), rows, w, bias, out.first_mut(rows));
    }
    fn linear_for_scores(&mut self, x: &Buffer, rows: usize, w: &Matrix, out: &mut Buffer) {
        kernels::matmul_split(&self.team, x.first(rows), rows, w, out.first_mut(rows));
    }
    fn rms_norm(&mut self, x: &Buffer, rows: usize, norm: (&Vec<f32>, f32), out: &mut Buffer) {
        kernels::rms_norm(&self.team, x.first(rows), norm.0, norm.1, out.first_mut(rows));
    }
    fn add_rms_norm(
        &mut self,
        residual: &mut Buffer,
        delta: &Buffer,
        rows: usize,
        norm: (&Vec<f32>, f32),
        out: &mut Buffer,
    ) {
        let (residual, delta) = (residual.first_mut(rows), delta.first(rows));
        kernels::add_rms_norm(&self.team, residual, delta, norm.0, norm.1, out.first_mut(rows));
    }
    fn rms_norm_heads(
        &mut self,
        qkv: &mut Buffer,
        layout: &HeadLayout,
        rows: usize,
        (query, key, eps): (&Vec<f32>, &Vec<f32>, f32),
    ) {
        kernels::rms_norm_heads(&self.team, qkv.first_mut(rows), layout, (query, key), eps);
    }
    fn scale(&mut self, x: &mut Buffer, rows: usize, factor: f32) {
        for x in x.first_mut(rows) {
            *x *= factor;
        }
    }
    fn add(&mut self, x: &mut Buffer, delta: &Buffer, rows: usize) {
        for (x, delta) in x.first_mut(rows).iter_mut().zip(delta.first(rows)) {
            *x += delta;
        }
    }
    fn gather(&mut self, x: &Buffer, indices: &[usize], out: &mut Buffer) {
        let width = x.width;
        for (row, &index) in out.first_mut(indices.len()).chunks_exact_mut(width).zip(indices) {
            row.copy_from_slice(&x.values[index * width..][..width]);
        }
    }
    fn gate_mul(
        &mut self,
        activation: Activation,
        gate_up: &Buffer,
        rows: usize,
        width: usize,
        out: &mut Buffer,
    ) {
        let (gate_up, out) = (gate_up.first(rows), out.first_mut(rows));
        kernels::gate_mul(&self.team, activation, gate_up, width, out);
    }
    fn mixture(
        &mut self,
        x: &Buffer,
        rows: usize,
        experts: &Experts<Self>,
        buffers: &mut ExpertBuffers<Self>,
        out: &mut Buffer,
    ) -> Result<(), CollectiveError> {
        let (team, routing) = (&self.team, &mut self.routing);
        let ExpertBuffers { logits, input, gate_up, inner, output, .. } = buffers;
        let count = experts.gate_up.len();
        routing.choose(logits.first(rows), count, experts.per_token, experts.renormalise);
        let hidden = x.width;
        let (x, out) = (x.first(rows), out.first_mut(rows));
        out.fill(0.0);
        for (expert, (gate_up_w, down)) in experts.gate_up.iter().zip(&experts.down).enumerate() {
            let rows = routing.rows_of(expert).len();
            if rows == 0 {
                continue;
            }
            let input = input.first_mut(rows);
            routing.gather(expert, x, hidden, input);
            let gate_up = gate_up.first_mut(rows);
            kernels::matmul(team, input, rows, gate_up_w, None, gate_up);
            let inner = inner.first_mut(rows);
            kernels::gate_mul(team, experts.activation, gate_up, experts.width, inner);
            let output = output.first_mut(rows);
            kernels::matmul(team, inner, rows, down, None, output);
            routing.scatter(expert, output, hidden, out);
        }
        Ok(())
    }
    fn rotate_and_append(
        &mut self,
        qkv: &mut Buffer,
        layout: &HeadLayout,
        rotary: &RotaryTable,
        rows: &Vec<SequenceRows<'_>>,
        pages: &mut KvPages,
    ) {
        let qkv = qkv.first_mut(row_count(rows));
        kernels::rotate_and_append(&self.team, qkv, layout, rotary, rows, pages);
    }
    fn paged_attention(
        &mut self,
        qkv: &Buffer,
        layout: &HeadLayout,
        AttentionRule { scale, window }: AttentionRule,
        rows: &Vec<SequenceRows<'_>>,
        pages: &KvPages,
        out: &mut Buffer,
    ) {
        let count = row_count(rows);
        let (qkv, out) = (qkv.first(count), out.first_mut(count));
        kernels::paged_attention(&self.team, qkv, layout, scale, window, rows, pages, out);
    }

    fn abort_handle(world: &World) -> AbortHandle {
        world.abort.clone()
    }
    fn join(&mut self, world: World) -> Result<(), CollectiveError> {
        self.groups.join(world);
        Ok(())
    }
    fn leave(&mut self) {
        self.groups.leave();
    }
    fn set_deadline(&mut self, deadline: Duration) -> Result<(), CollectiveError> {
        self.groups.set_deadline(deadline)
    }
    fn all_reduce(&mut self, x: &mut Buffer, rows: usize) -> Result<(), CollectiveError> {
        self.groups.run(|world| world.tensor.all_reduce_sum(x.first_mut(rows)))
    }
    fn send(&mut self, to: usize, x: &Buffer, rows: usize) -> Result<(), CollectiveError> {
        self.groups.run(|world| world.global.send(to, x.first(rows)))
    }
    fn recv(&mut self, from: usize, x: &mut Buffer, rows: usize) -> Result<(), CollectiveError> {
        self.groups.run(|world| world.global.recv(from, x.first_mut(rows)))
    }
    fn send_tokens(&mut self, to: usize, tokens: &[u32]) -> Result<(), CollectiveError> {
        self.groups.run(|world| world.global.send_bytes(to, bytemuck::cast_slice(tokens)))
    }
    fn recv_tokens(&mut self, from: usize, tokens: &mut [u32]) -> Result<(), CollectiveError> {
        let bytes = bytemuck::cast_slice_mut(tokens);
        self.groups.run(|world| world.global.recv_bytes(from, bytes))
    }
    fn sample(
        &mut self,
        rows: &[SampleRow<'_>],
        logits: &mut Buffer,
        vocab: Range<u32>,
    ) -> Result<Samples, CollectiveError> {
        let logits = logits.first_mut(rows.len());
        self.groups
            .run(|world| sampler::sample(rows, logits, vocab, &mut *world.tensor, &self.team))
    }
    fn score(
        &mut self,
        rows: &[ScoreRow],
        logits: &Buffer,
        vocab: Range<u32>,
    ) -> Result<Scores, CollectiveError> {
        let logits = logits.first(rows.len());
        self.groups.run(|world| sampler::score(rows, logits, vocab, &mut *world.tensor, &self.team))
    }
    fn take_collective_time(&mut self) -> Duration {
        self.groups.take_time()
    }
}

fn row_count(rows: &[SequenceRows<'_>]) -> usize {
    rows.last().map_or(0, |last| last.first_row + last.rows)
}
