//! Activations of one step, allocated once for the largest step.

use trireme_checkpoint::{ModelConfig, RankSlice};

use super::mixture::ExpertBuffers;
use crate::device::Device;

/// Largest step: tokens computed and tokens sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub rows: usize,
    pub sampled: usize,
}

/// Buffers of `[rows, width]`; `sampled_*` and `logits` of `[sampled, width]`.
pub struct Workspace<D: Device> {
    /// The residual stream.
    pub residual: D::Buffer,
    pub normed: D::Buffer,
    pub qkv: D::Buffer,
    pub attended: D::Buffer,
    pub gate_up: D::Buffer,
    pub inner: D::Buffer,
    pub experts: ExpertBuffers<D>,
    /// What the last sublayer adds to the residual stream.
    pub delta: D::Buffer,
    pub sampled_residual: D::Buffer,
    pub sampled_delta: D::Buffer,
    pub sampled_normed: D::Buffer,
    /// This rank's slice of the vocabulary.
    pub logits: D::Buffer,
}

/// Widths of the buffers, in the order of [`Workspace`]'s fields.
struct Widths {
    hidden: usize,
    qkv: usize,
    attended: usize,
    mlp: usize,
    vocab: usize,
}

impl Widths {
    fn of(model: &ModelConfig, slice: &RankSlice) -> Self {
        Self {
            hidden: model.hidden_size,
            qkv: (slice.heads.len() + 2 * slice.kv_heads.len()) * model.head_dim,
            attended: slice.heads.len() * model.head_dim,
            mlp: if model.has_dense_layers() { slice.mlp.len() } else { 0 },
            vocab: if slice.last_stage { slice.vocab.len() } else { 0 },
        }
    }
}

impl<D: Device> Workspace<D> {
    pub fn new(device: &D, model: &ModelConfig, slice: &RankSlice, size: StepSize) -> Self {
        let widths = Widths::of(model, slice);
        let sampled = if slice.last_stage { size.sampled } else { 0 };
        Self {
            residual: device.buffer(size.rows, widths.hidden),
            normed: device.activations(size.rows, widths.hidden),
            qkv: device.activations(size.rows, widths.qkv),
            attended: device.activations(size.rows, widths.attended),
            gate_up: device.activations(size.rows, 2 * widths.mlp),
            inner: device.activations(size.rows, widths.mlp),
            experts: ExpertBuffers::new(
                device,
                size.rows,
                model.experts.as_ref(),
                widths.hidden,
                slice,
            ),
            delta: device.activations(size.rows, widths.hidden),
            sampled_residual: device.buffer(sampled, widths.hidden),
            sampled_delta: device.activations(sampled, widths.hidden),
            sampled_normed: device.activations(sampled, widths.hidden),
            logits: device.buffer(sampled, widths.vocab),
        }
    }

    /// What [`Workspace::new`] takes, in bytes.
    pub fn bytes(model: &ModelConfig, slice: &RankSlice, size: StepSize) -> u64 {
        let widths = Widths::of(model, slice);
        let experts = ExpertBuffers::<D>::row_len(model.experts.as_ref(), widths.hidden, slice);
        let row = 3 * widths.hidden + widths.qkv + widths.attended + 3 * widths.mlp + experts;
        let sampled = if slice.last_stage { size.sampled } else { 0 };
        (4 * (size.rows * row + sampled * (3 * widths.hidden + widths.vocab))) as u64
    }
}
