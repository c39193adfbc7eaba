//! Gemma 3 (Gemma Team 2025, arXiv:2503.19786), text: what attention and a GEGLU MLP add to the residual
//! stream is normalised before as well as after; most layers see a sliding window and rotate by a base of
//! their own; heads of queries and keys are normalised; embeddings are scaled.

use trireme_checkpoint::CheckpointError;
use trireme_collectives::CollectiveError;

use super::Layer;
use crate::{
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        attention::{Attention, LayerStep},
        mlp::GatedMlp,
        norm::RmsNorm,
        workspace::Workspace,
    },
};

/// `x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`.
pub struct Gemma3Layer<D: Device> {
    attention_norm: RmsNorm<D>,
    attention: Attention<D>,
    post_attention_norm: RmsNorm<D>,
    mlp_norm: RmsNorm<D>,
    mlp: GatedMlp<D>,
    post_mlp_norm: RmsNorm<D>,
}

impl<D: Device> Gemma3Layer<D> {
    pub fn load(weights: &LayerWeights<'_, D>) -> Result<Self, CheckpointError> {
        Ok(Self {
            attention_norm: weights.norm("input_layernorm")?,
            attention: Attention::load(weights)?,
            post_attention_norm: weights.norm("post_attention_layernorm")?,
            mlp_norm: weights.norm("pre_feedforward_layernorm")?,
            mlp: GatedMlp::load(weights)?,
            post_mlp_norm: weights.norm("post_feedforward_layernorm")?,
        })
    }
}

impl<D: Device> Layer<D> for Gemma3Layer<D> {
    fn forward(
        &self,
        device: &mut D,
        step: &LayerStep<'_, D>,
        pages: &mut D::Pages,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let rows = step.row_count;
        self.attention_norm.forward_step(device, step, work);
        self.attention.forward(device, step, pages, work)?;
        self.post_attention_norm.forward_delta(device, rows, work);
        self.mlp_norm.forward_residual(device, rows, work);
        self.mlp.forward(device, rows, work)?;
        self.post_mlp_norm.forward_delta(device, rows, work);
        Ok(())
    }
}
