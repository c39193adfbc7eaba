//! The seam between layers and hardware: what a device stores, and the operations layers are made of.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod host_groups;

use std::{ops::Range, time::Duration};

use trireme_checkpoint::DType;
use trireme_collectives::{AbortHandle, CollectiveError};
use trireme_kernels::{Activation, HeadLayout};

use crate::{
    batch::Batch,
    layers::mixture::{ExpertBuffers, Experts},
    sampler::{SampleError, SampleRow, Sampled, Sampling, Score, ScoreRow},
    sequences::Limits,
};

/// The outcome of one sampled row: one bad row does not fail the others.
pub type Samples = Vec<Result<Sampled, SampleError>>;

/// The outcome of one scored row.
pub type Scores = Vec<Result<Score, SampleError>>;

/// What attention does with queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionRule {
    /// Factor on their product.
    pub scale: f32,
    /// A row sees only so many last positions, its own among them.
    pub window: Option<usize>,
}

/// A device of one rank, with its links to the other ranks.
///
/// Buffers are `[capacity_rows, width]`, row major; every operation names how many rows it works on.
/// Operations that talk to other ranks end by completion, deadline or abort.
pub trait Device: Sized + 'static {
    /// Where weights go and how they are stored; shared by the threads that load.
    type Store: Sync;
    type Matrix: Send + Sync;
    type Vector: Send + Sync;
    /// Activations.
    type Buffer;
    /// Cosines and sines by position.
    type Rotary;
    /// KV pages of one layer.
    type Pages;
    /// Membership of the tensor-parallel group and of the group of all ranks.
    type World;
    /// The sequences of a batch in the form that attention reads.
    type Rows<'a>;

    /// An empty matrix `[outputs, inputs]`, filled by [`Device::set_row`].
    fn matrix(store: &Self::Store, outputs: usize, inputs: usize) -> Self::Matrix;
    fn set_row(matrix: &mut Self::Matrix, output: usize, row: &[f32]);
    /// A matrix that keeps the stored blocks of `dtype`, filled by [`Device::set_blocks`]; none where
    /// the device has no product for them, or the store wants numbers.
    fn block_matrix(
        store: &Self::Store,
        outputs: usize,
        inputs: usize,
        dtype: DType,
    ) -> Option<Self::Matrix>;
    fn set_blocks(matrix: &mut Self::Matrix, output: usize, blocks: &[u8]);
    /// Matrices of the same inputs as one, outputs one after the other.
    fn stacked(parts: Vec<Self::Matrix>) -> Self::Matrix;
    /// All rows of a matrix are set.
    fn finish(_matrix: &mut Self::Matrix) {}
    fn matrix_bytes(matrix: &Self::Matrix) -> usize;
    fn vector(store: &Self::Store, values: Vec<f32>) -> Self::Vector;
    /// Bytes of one weight.
    fn weight_size(store: &Self::Store) -> usize;

    /// Of f32.
    fn buffer(&self, rows: usize, width: usize) -> Self::Buffer;
    /// Of the type that layers compute in: what norms, projections and attention write.
    fn activations(&self, rows: usize, width: usize) -> Self::Buffer {
        self.buffer(rows, width)
    }
    /// Bytes that pages and workspaces of this rank may take.
    fn available_bytes(&self) -> u64;
    /// The part of them that the KV cache takes unless told otherwise.
    fn default_kv_share(&self) -> f64;
    /// Ranks of this model, of `ranks`, that share these bytes.
    fn sharers(&self, ranks: usize) -> usize;
    /// Whether a buffer takes memory only where it was written, and gives it back when it is made anew.
    const SPARSE_BUFFERS: bool;
    /// Gets ready for steps within `limits`.
    fn reserve(&mut self, _limits: &Limits) {}
    /// Numbers of sequences whose decode steps are worth running once before serving.
    fn decode_warmups(&self, _max_sequences: usize) -> Vec<usize> {
        Vec::new()
    }
    /// Numbers of rows, from `least` to `most`, whose steps are worth running once before serving.
    fn prefill_warmups(&self, _least: usize, _most: usize) -> Vec<usize> {
        Vec::new()
    }
    /// All steps of the warm-up have run.
    fn warmed_up(&mut self) {}
    /// Runs `work`, the whole of a step. It queues the same operations for every batch of the same
    /// shape, so a device may record them once and replay them.
    fn run_step(
        &mut self,
        _batch: &Batch,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        work(self)
    }
    fn read(&self, buffer: &Self::Buffer, rows: usize) -> Vec<f32>;
    fn write(&self, buffer: &mut Self::Buffer, values: &[f32]);
    /// `cos`, `sin`: `[positions, half_dim]`.
    fn rotary(&self, cos: Vec<f32>, sin: Vec<f32>, half_dim: usize) -> Self::Rotary;
    fn pages(&self, num_blocks: usize, kv_heads: usize, head_dim: usize) -> Self::Pages;
    /// Bytes that one block takes in one layer.
    fn page_bytes_per_block(&self, kv_heads: usize, head_dim: usize) -> usize;
    fn rows<'a>(&mut self, batch: &'a Batch) -> Self::Rows<'a>;

    /// `out[r] = table[tokens[r] - vocab.start]`, or zeros where `vocab` does not hold the token.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        tokens: &[u32],
        vocab: &Range<u32>,
        out: &mut Self::Buffer,
    );
    /// `out = x · wᵀ + bias`.
    fn linear(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        w: (&Self::Matrix, Option<&Self::Vector>),
        out: &mut Self::Buffer,
    );
    /// `out = x · wᵀ` for scores: may keep fewer bits of `x`, sixteen at least, where that is faster. A
    /// row's result does not depend on the other rows either.
    fn linear_for_scores(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
    ) {
        self.linear(x, rows, (w, None), out);
    }
    fn rms_norm(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        norm: (&Self::Vector, f32),
        out: &mut Self::Buffer,
    );
    /// `residual += delta; out = rms_norm(residual)`.
    fn add_rms_norm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        rows: usize,
        norm: (&Self::Vector, f32),
        out: &mut Self::Buffer,
    );
    /// Normalises each query and key head in place, by weights of `head_dim`.
    fn rms_norm_heads(
        &mut self,
        qkv: &mut Self::Buffer,
        layout: &HeadLayout,
        rows: usize,
        norms: (&Self::Vector, &Self::Vector, f32),
    );
    /// `x *= factor`.
    fn scale(&mut self, x: &mut Self::Buffer, rows: usize, factor: f32);
    /// `x += delta`.
    fn add(&mut self, x: &mut Self::Buffer, delta: &Self::Buffer, rows: usize);
    /// `out[i] = x[indices[i]]`.
    fn gather(&mut self, x: &Self::Buffer, indices: &[usize], out: &mut Self::Buffer);
    /// `out = activation(gate) * up` of rows `[gate | up]`, each half `width` wide.
    fn gate_mul(
        &mut self,
        activation: Activation,
        gate_up: &Self::Buffer,
        rows: usize,
        width: usize,
        out: &mut Self::Buffer,
    );
    /// Sends each row to the experts that `buffers.logits` prefers, and adds up what they answer. Only
    /// the chosen experts' products are computed.
    fn mixture(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        experts: &Experts<Self>,
        buffers: &mut ExpertBuffers<Self>,
        out: &mut Self::Buffer,
    ) -> Result<(), CollectiveError>;
    /// `out = activation(x · gateᵀ) * (x · upᵀ)`; `w`: gate rows, then up rows, each `gate_up.1`, whose
    /// first part is scratch.
    fn gated_linear(
        &mut self,
        activation: Activation,
        x: &Self::Buffer,
        rows: usize,
        w: (&Self::Matrix, Option<&Self::Vector>),
        (gate_up, width): (&mut Self::Buffer, usize),
        out: &mut Self::Buffer,
    ) {
        self.linear(x, rows, w, gate_up);
        self.gate_mul(activation, gate_up, rows, width, out);
    }
    /// Rotates q and k in place and writes k and v to the pages.
    fn rotate_and_append(
        &mut self,
        qkv: &mut Self::Buffer,
        layout: &HeadLayout,
        rotary: &Self::Rotary,
        rows: &Self::Rows<'_>,
        pages: &mut Self::Pages,
    );
    /// Causal attention of every row over its own sequence's pages.
    fn paged_attention(
        &mut self,
        qkv: &Self::Buffer,
        layout: &HeadLayout,
        rule: AttentionRule,
        rows: &Self::Rows<'_>,
        pages: &Self::Pages,
        out: &mut Self::Buffer,
    );

    /// Ends every wait of the world's groups, from any thread.
    fn abort_handle(world: &Self::World) -> AbortHandle;
    /// Enters the groups of an epoch.
    fn join(&mut self, world: Self::World) -> Result<(), CollectiveError>;
    /// Leaves them. Operations on groups fail until the next [`Device::join`].
    fn leave(&mut self);
    /// The longest any later single wait for another rank may take.
    fn set_deadline(&mut self, deadline: Duration) -> Result<(), CollectiveError>;
    /// Sums over the tensor-parallel ranks.
    fn all_reduce(&mut self, x: &mut Self::Buffer, rows: usize) -> Result<(), CollectiveError>;
    fn send(&mut self, to: usize, x: &Self::Buffer, rows: usize) -> Result<(), CollectiveError>;
    fn recv(
        &mut self,
        from: usize,
        x: &mut Self::Buffer,
        rows: usize,
    ) -> Result<(), CollectiveError>;
    fn send_tokens(&mut self, to: usize, tokens: &[u32]) -> Result<(), CollectiveError>;
    fn recv_tokens(&mut self, from: usize, tokens: &mut [u32]) -> Result<(), CollectiveError>;
    /// Chooses a token for each row; `logits`: `[rows.len(), vocab.len()]`, this rank's slice, overwritten.
    fn sample(
        &mut self,
        rows: &[SampleRow<'_>],
        logits: &mut Self::Buffer,
        vocab: Range<u32>,
    ) -> Result<Samples, CollectiveError>;
    /// Queues the choice of a token for each of the first rows of `logits`: how, and at which position.
    /// The next step may be queued before they are known, with [`CHOSEN`](crate::batch::CHOSEN) in
    /// their place. False: nothing was queued, it takes [`Device::sample`].
    fn queue_choices(
        &mut self,
        _rows: &[(&Sampling, usize)],
        _logits: &Self::Buffer,
        _vocab: &Range<u32>,
    ) -> bool {
        false
    }
    /// Whether the oldest choices that were queued are known.
    fn choices_known(&self) -> bool {
        true
    }
    /// Waits for the oldest choices that were queued.
    fn take_choices(&mut self) -> Samples {
        Samples::new()
    }
    /// The logprob of a given token for each row; `logits`: `[rows.len(), vocab.len()]`, raw.
    fn score(
        &mut self,
        rows: &[ScoreRow],
        logits: &Self::Buffer,
        vocab: Range<u32>,
    ) -> Result<Scores, CollectiveError>;
    /// Time spent in collectives since the last call.
    fn take_collective_time(&mut self) -> Duration;
}
