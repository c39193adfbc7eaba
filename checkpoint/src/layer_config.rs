//! What sets the layers of one family apart from another's.

use serde::Serialize;

/// What a layer has beyond Llama's, or in its place. The default is Llama's layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerConfig {
    pub activation: Activation,
    /// `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// `o_proj` has a bias.
    pub output_bias: bool,
    /// `gate_proj`, `up_proj` and `down_proj` have biases.
    pub mlp_bias: bool,
    /// Each query and key head is normalised before it is rotated.
    pub qk_norm: bool,
    /// What attention and MLP add to the residual stream is normalised as well.
    pub post_norms: bool,
    /// Norm weights are stored as what is added to one.
    pub norms_add_one: bool,
    pub sliding: Option<SlidingWindow>,
}

/// Activation of the gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    #[default]
    Silu,
    /// GELU in its tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415).
    GeluTanh,
}

/// Attention that sees only the last positions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlidingWindow {
    /// Positions that a row sees, its own among them.
    pub window: usize,
    /// For each layer, whether it slides.
    pub layers: Vec<bool>,
    /// Base of the rotary frequencies of these layers, unscaled, where it is not the model's.
    pub rope_theta: Option<f64>,
}

/// Factors that are one in most families.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Multipliers {
    /// On the embedding of a token.
    pub embedding: f32,
    /// On the product of query and key; `1 / sqrt(head_dim)` where absent.
    pub attention: Option<f32>,
    /// On what attention and MLP add to the residual stream.
    pub residual: f32,
    pub logits: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, attention: None, residual: 1.0, logits: 1.0 }
    }
}

/// A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv 1701.06538).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertConfig {
    pub count: usize,
    /// Experts that a token is sent to.
    pub per_token: usize,
    /// Inner width of one expert.
    pub width: usize,
    /// The weights of the chosen experts are scaled to sum to one.
    pub renormalise: bool,
    /// Layers that have a plain MLP instead, ascending.
    pub dense_layers: Vec<usize>,
}
