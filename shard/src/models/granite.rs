//! Granite 3 (IBM 2024): Llama's layer, with multipliers after maximal update parametrisation (Yang et
//! al. 2022, arXiv:2203.03466): on embeddings, scores, what is added to the residual stream, and logits.

use trireme_checkpoint::CheckpointError;

use crate::{
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        decoder::{FeedForward, PreNormLayer},
        mlp::GatedMlp,
    },
};

pub fn layer<D: Device>(weights: &LayerWeights<'_, D>) -> Result<PreNormLayer<D>, CheckpointError> {
    let mlp = FeedForward::Gated(GatedMlp::load(weights)?);
    let residual_multiplier = weights.model().multipliers.residual;
    Ok(PreNormLayer { residual_multiplier, ..PreNormLayer::load(weights, mlp)? })
}
