//! Grouped-query attention (Ainslie et al. 2023) over paged KV (Kwon et al. 2023), split by heads.

use trireme_checkpoint::{CheckpointError, ModelConfig, RankSlice};
use trireme_collectives::CollectiveError;
use trireme_kernels::HeadLayout;

use super::{
    linear::{ColumnParallel, RowParallel},
    rotary::RotaryTables,
    workspace::Workspace,
};
use crate::{
    device::{AttentionRule, Device},
    layer_weights::LayerWeights,
};

pub struct Attention<D: Device> {
    /// Query, key and value rows of this rank's heads: one pass over the input.
    qkv: ColumnParallel<D>,
    head_norms: Option<HeadNorms<D>>,
    output: RowParallel<D>,
    layout: HeadLayout,
    rule: AttentionRule,
}

/// Norms of each query and key head (Henry et al. 2020; Dehghani et al. 2023), the same for all heads.
struct HeadNorms<D: Device> {
    query: D::Vector,
    key: D::Vector,
    eps: f32,
}

/// What layers need to know of a step.
pub struct LayerStep<'a, D: Device> {
    pub rows: D::Rows<'a>,
    pub row_count: usize,
    pub rotary: &'a RotaryTables<D>,
    /// Whether `work.delta` has still to be added to the residual stream: in all layers of a stage but
    /// the first.
    pub delta_waits: bool,
}

impl<D: Device> Attention<D> {
    /// With biases, norms of heads, window and scale where the model has them.
    pub fn load(weights: &LayerWeights<'_, D>) -> Result<Self, CheckpointError> {
        let model = weights.model();
        let head_norms = match model.layer.qk_norm {
            true => Some(HeadNorms {
                query: weights.norm_vector("self_attn.q_norm")?,
                key: weights.norm_vector("self_attn.k_norm")?,
                eps: model.rms_norm_eps,
            }),
            false => None,
        };
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        Ok(Self {
            qkv: weights.column_parallel(&qkv)?,
            head_norms,
            output: weights.row_parallel("self_attn.o_proj")?,
            layout: head_layout(model, weights.slice()),
            rule: AttentionRule {
                scale: model.attention_scale(),
                window: model.window(weights.layer()),
            },
        })
    }

    /// From `work.normed` to `work.delta`; appends this step's keys and values to `pages`.
    pub fn forward(
        &self,
        device: &mut D,
        step: &LayerStep<'_, D>,
        pages: &mut D::Pages,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let Self { layout, rule, .. } = self;
        self.qkv.forward(device, &work.normed, step.row_count, &mut work.qkv);
        if let Some(HeadNorms { query, key, eps }) = &self.head_norms {
            device.rms_norm_heads(&mut work.qkv, layout, step.row_count, (query, key, *eps));
        }
        let rotary = step.rotary.of(rule.window);
        device.rotate_and_append(&mut work.qkv, layout, rotary, &step.rows, pages);
        device.paged_attention(&work.qkv, layout, *rule, &step.rows, pages, &mut work.attended);
        self.output.forward(device, &work.attended, step.row_count, &mut work.delta)
    }
}

/// This rank's heads, and for each the local KV head it reads.
fn head_layout(model: &ModelConfig, slice: &RankSlice) -> HeadLayout {
    let group = model.heads / model.kv_heads;
    HeadLayout {
        heads: slice.heads.len(),
        kv_heads: slice.kv_heads.len(),
        head_dim: model.head_dim,
        kv_of_head: slice.heads.clone().map(|head| head / group - slice.kv_heads.start).collect(),
    }
}
