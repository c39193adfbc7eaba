//! Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral's layer with a mixture of experts in place of
//! the MLP; the weights of a token's experts sum to one.

use trireme_checkpoint::CheckpointError;

use crate::{
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        decoder::{FeedForward, PreNormLayer},
        mixture::{ExpertNames, Mixture},
    },
};

const NAMES: ExpertNames =
    ExpertNames { mixture: "block_sparse_moe", gate: "w1", up: "w3", down: "w2" };

pub fn layer<D: Device>(weights: &LayerWeights<'_, D>) -> Result<PreNormLayer<D>, CheckpointError> {
    PreNormLayer::load(weights, FeedForward::Mixture(Mixture::load(weights, NAMES)?))
}
