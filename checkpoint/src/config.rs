//! A typed model description, whatever the container said it in.

use std::path::Path;

use serde::Serialize;

use crate::{CheckpointError, ExpertConfig, Family, LayerConfig, Multipliers, RopeScaling};

/// What the engine needs to know of a model. Sizes are counts; `kv_heads` divides `heads`,
/// `head_dim` and `rotary_dim` are even, and every token id is below `vocab_size`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Inner width of a plain MLP; experts have their own.
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The first dimensions of a head, which are rotated; mostly all of them.
    pub rotary_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub layer: LayerConfig,
    pub experts: Option<ExpertConfig>,
    pub multipliers: Multipliers,
    /// The head is the embedding.
    pub tied_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// From config.json and generation_config.json together, ascending.
    pub eos_token_ids: Vec<u32>,
}

/// What a container calls its fields, for messages.
pub(crate) struct FieldNames {
    pub vocab_size: &'static str,
    pub hidden_size: &'static str,
    pub intermediate_size: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    pub kv_heads: &'static str,
    pub head_dim: &'static str,
    pub rotary_dim: &'static str,
    pub sliding_window: &'static str,
    pub experts: &'static str,
    pub experts_per_token: &'static str,
    pub expert_width: &'static str,
    pub max_position_embeddings: &'static str,
    pub rms_norm_eps: &'static str,
    pub rope_theta: &'static str,
    pub bos_token_id: &'static str,
    pub eos_token_ids: &'static str,
}

/// No known model comes near these; within them a dense model's bytes fit in 64 bits (2^10 layers of
/// nine matrices of 2^48 numbers of four bytes), and a hostile config cannot make us build an
/// endless tensor list.
const LARGEST_SIZE: usize = 1 << 24;
pub(crate) const MOST_LAYERS: usize = 1 << 10;
const MOST_EXPERTS: usize = 1 << 9;
const LARGEST_POSITION: usize = 1 << 31;

impl ModelConfig {
    /// Checks every rule that the rest of the crate relies on; `path` and `names` serve the message.
    pub(crate) fn validate(&self, path: &Path, names: &FieldNames) -> Result<(), CheckpointError> {
        let refuse = |field: &str, expected: String, found: String| {
            Err(CheckpointError::Field {
                path: path.to_owned(),
                field: field.to_owned(),
                expected,
                found,
            })
        };
        for (field, value, most) in [
            (names.vocab_size, self.vocab_size, LARGEST_SIZE),
            (names.hidden_size, self.hidden_size, LARGEST_SIZE),
            (names.intermediate_size, self.intermediate_size, LARGEST_SIZE),
            (names.layers, self.layers, MOST_LAYERS),
            (names.heads, self.heads, LARGEST_SIZE),
            (names.kv_heads, self.kv_heads, LARGEST_SIZE),
            (names.head_dim, self.head_dim, LARGEST_SIZE),
            (names.max_position_embeddings, self.max_position_embeddings, LARGEST_POSITION),
        ] {
            if value == 0 || value > most {
                return refuse(field, format!("1 to {most}"), value.to_string());
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of {} ({})", names.heads, self.heads);
            return refuse(names.kv_heads, expected, self.kv_heads.to_string());
        }
        if self.query_width() > LARGEST_SIZE {
            let expected = format!("at most {LARGEST_SIZE} with {} together", names.heads);
            return refuse(names.head_dim, expected, self.head_dim.to_string());
        }
        if !self.head_dim.is_multiple_of(2) {
            return refuse(names.head_dim, "an even number".to_owned(), self.head_dim.to_string());
        }
        let rotary = self.rotary_dim;
        if rotary == 0 || rotary > self.head_dim || !rotary.is_multiple_of(2) {
            let expected = format!("an even width up to the head's {}", self.head_dim);
            return refuse(names.rotary_dim, expected, rotary.to_string());
        }
        if let Some(sliding) = self.layer.sliding.as_ref().filter(|sliding| sliding.window == 0) {
            let expected = "at least 1".to_owned();
            return refuse(names.sliding_window, expected, sliding.window.to_string());
        }
        self.validate_experts(names, &refuse)?;
        for (field, value) in [
            (names.rms_norm_eps, f64::from(self.rms_norm_eps)),
            (names.rope_theta, self.rope_theta),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return refuse(field, "a positive number".to_owned(), value.to_string());
            }
        }
        let eos = self.eos_token_ids.iter().map(|&id| (names.eos_token_ids, id));
        for (field, id) in
            self.bos_token_id.map(|id| (names.bos_token_id, id)).into_iter().chain(eos)
        {
            if id as usize >= self.vocab_size {
                let expected = format!("an id below {} ({})", names.vocab_size, self.vocab_size);
                return refuse(field, expected, id.to_string());
            }
        }
        Ok(())
    }

    fn validate_experts(
        &self,
        names: &FieldNames,
        refuse: &dyn Fn(&str, String, String) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let Some(experts) = &self.experts else { return Ok(()) };
        for (field, value, most) in [
            (names.experts, experts.count, MOST_EXPERTS),
            (names.experts_per_token, experts.per_token, experts.count),
            (names.expert_width, experts.width, LARGEST_SIZE),
        ] {
            if value == 0 || value > most {
                refuse(field, format!("1 to {most}"), value.to_string())?;
            }
        }
        if experts.count * experts.width > LARGEST_SIZE {
            let expected = format!("at most {LARGEST_SIZE} with {} together", names.experts);
            refuse(names.expert_width, expected, experts.width.to_string())?;
        }
        Ok(())
    }

    /// The factor on the product of query and key.
    pub fn attention_scale(&self) -> f32 {
        self.multipliers.attention.unwrap_or_else(|| (self.head_dim as f32).sqrt().recip())
    }

    /// The window of `layer`; none where it sees all positions.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let sliding = self.layer.sliding.as_ref()?;
        sliding.layers[layer].then_some(sliding.window)
    }

    /// The experts of `layer`; none where it has a plain MLP.
    pub fn experts(&self, layer: usize) -> Option<&ExpertConfig> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// Whether any layer has a plain MLP.
    pub fn has_dense_layers(&self) -> bool {
        (0..self.layers).any(|layer| self.experts(layer).is_none())
    }

    /// Width of all query heads together: rows of `q_proj`, columns of `o_proj`.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all KV heads together: rows of `k_proj` and `v_proj`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// SmolLM2-135M's shape.
    pub(crate) fn model() -> ModelConfig {
        ModelConfig {
            family: Family::Llama,
            vocab_size: 49152,
            hidden_size: 576,
            intermediate_size: 1536,
            layers: 30,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            rotary_dim: 64,
            max_position_embeddings: 8192,
            rms_norm_eps: 1e-5,
            rope_theta: 100_000.0,
            rope_scaling: RopeScaling::None,
            layer: LayerConfig::default(),
            experts: None,
            multipliers: Multipliers::default(),
            tied_embeddings: true,
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
        }
    }
}
