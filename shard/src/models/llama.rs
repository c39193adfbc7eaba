//! Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024): pre-norm layers of grouped-query
//! attention with rotary positions and a SwiGLU MLP.
//!
//! Other families have this layer too, and differ in what their config says of attention:
//! Mistral (Jiang et al. 2023, arXiv:2310.06825) sees a sliding window, Qwen2 (Yang et al. 2024,
//! arXiv:2407.10671) has biases on queries, keys and values, Qwen3 (Yang et al. 2025, arXiv:2505.09388)
//! normalises query and key heads, Phi-3 (Abdin et al. 2024, arXiv:2404.14219) stores projections as one
//! tensor and stretches positions by LongRoPE.

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
    PreNormLayer::load(weights, FeedForward::Gated(GatedMlp::load(weights)?))
}
