//! Qwen3's mixtures (Yang et al. 2025, arXiv:2505.09388): Qwen3's layer with many small experts in
//! place of the MLP, but for layers that the config lists.

use trireme_checkpoint::CheckpointError;

use crate::{
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        decoder::{FeedForward, PreNormLayer},
        mixture::{ExpertNames, Mixture},
        mlp::GatedMlp,
    },
};

const NAMES: ExpertNames =
    ExpertNames { mixture: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj" };

pub fn layer<D: Device>(weights: &LayerWeights<'_, D>) -> Result<PreNormLayer<D>, CheckpointError> {
    let mlp = match weights.is_mixture() {
        true => FeedForward::Mixture(Mixture::load(weights, NAMES)?),
        false => FeedForward::Gated(GatedMlp::load(weights)?),
    };
    PreNormLayer::load(weights, mlp)
}
