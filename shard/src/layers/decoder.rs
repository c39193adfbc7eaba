//! The pre-norm decoder layer that most families share.

use trireme_checkpoint::CheckpointError;
use trireme_collectives::CollectiveError;

use super::{
    attention::{Attention, LayerStep},
    mixture::Mixture,
    mlp::GatedMlp,
    norm::RmsNorm,
    workspace::Workspace,
};
use crate::{device::Device, layer_weights::LayerWeights, models::Layer};

/// `x += m attention(norm(x)); x += m mlp(norm(x))`.
pub struct PreNormLayer<D: Device> {
    pub attention_norm: RmsNorm<D>,
    pub attention: Attention<D>,
    pub mlp_norm: RmsNorm<D>,
    pub mlp: FeedForward<D>,
    /// `m`, mostly 1.
    pub residual_multiplier: f32,
}

/// What follows attention.
pub enum FeedForward<D: Device> {
    Gated(GatedMlp<D>),
    Mixture(Mixture<D>),
}

impl<D: Device> PreNormLayer<D> {
    /// Norms under the names that Llama gave them, attention, and `mlp`.
    pub fn load(
        weights: &LayerWeights<'_, D>,
        mlp: FeedForward<D>,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            attention_norm: weights.norm("input_layernorm")?,
            attention: Attention::load(weights)?,
            mlp_norm: weights.norm("post_attention_layernorm")?,
            mlp,
            residual_multiplier: 1.0,
        })
    }

    fn scale_delta(&self, device: &mut D, rows: usize, work: &mut Workspace<D>) {
        if self.residual_multiplier != 1.0 {
            device.scale(&mut work.delta, rows, self.residual_multiplier);
        }
    }
}

impl<D: Device> Layer<D> for PreNormLayer<D> {
    /// Each addition to the residual stream is done by the norm that follows it.
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
        self.scale_delta(device, rows, work);
        self.mlp_norm.forward_residual(device, rows, work);
        self.mlp.forward(device, rows, work)?;
        self.scale_delta(device, rows, work);
        Ok(())
    }
}

impl<D: Device> FeedForward<D> {
    /// From `work.normed` to `work.delta`.
    pub fn forward(
        &self,
        device: &mut D,
        rows: usize,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        match self {
            Self::Gated(mlp) => mlp.forward(device, rows, work),
            Self::Mixture(mixture) => mixture.forward(device, rows, work),
        }
    }
}
