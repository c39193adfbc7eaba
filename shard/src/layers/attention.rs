//! Grouped-query attention (Ainslie et al. 2023) over paged KV (Kwon et al. 2023), split by heads.

use trireme_checkpoint::{ModelConfig, RankSlice};
use trireme_collectives::CollectiveError;
use trireme_kernels::HeadLayout;

use super::{
    linear::{ColumnParallel, RowParallel},
    workspace::Workspace,
};
use crate::device::Device;

pub struct Attention<D: Device> {
    /// Query, key and value rows of this rank's heads: one pass over the input.
    pub qkv: ColumnParallel<D>,
    pub output: RowParallel<D>,
    pub layout: HeadLayout,
}

/// What attention needs to know of a step.
pub struct AttentionStep<'a, D: Device> {
    pub rows: D::Rows<'a>,
    pub row_count: usize,
    pub rotary: &'a D::Rotary,
}

impl<D: Device> Attention<D> {
    /// From `work.normed` to `work.delta`; appends this step's keys and values to `pages`.
    pub fn forward(
        &self,
        device: &mut D,
        step: &AttentionStep<'_, D>,
        pages: &mut D::Pages,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        self.qkv.forward(device, &work.normed, step.row_count, &mut work.qkv);
        device.rotate_and_append(&mut work.qkv, &self.layout, step.rotary, &step.rows, pages);
        device.paged_attention(&work.qkv, &self.layout, &step.rows, pages, &mut work.attended);
        self.output.forward(device, &work.attended, step.row_count, &mut work.delta)
    }
}

/// This rank's heads, and for each the local KV head it reads.
pub fn head_layout(model: &ModelConfig, slice: &RankSlice) -> HeadLayout {
    let group = model.heads / model.kv_heads;
    HeadLayout {
        heads: slice.heads.len(),
        kv_heads: slice.kv_heads.len(),
        head_dim: model.head_dim,
        kv_of_head: slice.heads.clone().map(|head| head / group - slice.kv_heads.start).collect(),
    }
}
