//! What the config of each family says of its layers, with transformers' defaults for what is absent.

use serde_json::Value;

use super::fields::Fields;
use crate::{
    Activation, CheckpointError, ExpertConfig, Family, LayerConfig, Multipliers, SlidingWindow,
};

/// What a family's fields say.
pub(super) struct Variant {
    pub layer: LayerConfig,
    pub experts: Option<ExpertConfig>,
    pub multipliers: Multipliers,
    pub tied_embeddings: bool,
}

/// Reads the fields of `family`, and refuses switches that its layers here do not have.
pub(super) fn read(
    fields: &Fields<'_>,
    family: Family,
    layers: usize,
) -> Result<Variant, CheckpointError> {
    let switch = |name| Ok(fields.optional_bool(name)?.unwrap_or(false));
    let mut layer = LayerConfig { activation: activation(fields)?, ..LayerConfig::default() };
    let mut multipliers = Multipliers::default();
    let mut tied_by_default = false;
    let biases = switch("attention_bias")?;
    (layer.qkv_bias, layer.output_bias) = (biases, biases);
    let mlp_bias = switch("mlp_bias")?;
    match family {
        Family::Llama => layer.mlp_bias = mlp_bias,
        Family::Granite => {
            layer.mlp_bias = mlp_bias;
            multipliers = granite_multipliers(fields)?;
        }
        Family::Mistral | Family::Mixtral | Family::Phi3 => {
            // Only the first release of Mistral leaves the field out.
            let default = if family == Family::Mistral { Some(4096) } else { None };
            layer.sliding = sliding_everywhere(fields, default, layers)?;
        }
        Family::Qwen2 => {
            (layer.qkv_bias, layer.output_bias) = (true, false);
            layer.sliding = qwen_sliding(fields, layers)?;
        }
        Family::Qwen3 | Family::Qwen3Moe => {
            layer.qk_norm = true;
            layer.sliding = qwen_sliding(fields, layers)?;
        }
        Family::Gemma3 => {
            layer = gemma_layer(fields, layer, layers)?;
            multipliers = gemma_multipliers(fields)?;
            tied_by_default = true;
        }
    }
    if mlp_bias && !layer.mlp_bias {
        return Err(fields.refuse("mlp_bias", "false in this family", true));
    }
    Ok(Variant {
        layer,
        experts: experts(fields, family, layers)?,
        multipliers,
        tied_embeddings: fields.optional_bool("tie_word_embeddings")?.unwrap_or(tied_by_default),
    })
}

fn activation(fields: &Fields<'_>) -> Result<Activation, CheckpointError> {
    let key =
        if fields.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    match fields.get(key) {
        None => Ok(Activation::Silu),
        Some(Value::String(name)) => match name.as_str() {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            _ => Err(fields.refuse(key, "silu or gelu_pytorch_tanh", name)),
        },
        Some(other) => Err(fields.refuse(key, "silu or gelu_pytorch_tanh", other)),
    }
}

/// `sliding_window` on every layer, unless it is null.
fn sliding_everywhere(
    fields: &Fields<'_>,
    default: Option<usize>,
    layers: usize,
) -> Result<Option<SlidingWindow>, CheckpointError> {
    let window = match fields.object.contains_key("sliding_window") {
        true => fields.optional_size("sliding_window")?,
        false => default,
    };
    Ok(window.map(|window| SlidingWindow { window, layers: vec![true; layers], rope_theta: None }))
}

/// Only with `use_sliding_window`, and then from layer `max_window_layers` on.
fn qwen_sliding(
    fields: &Fields<'_>,
    layers: usize,
) -> Result<Option<SlidingWindow>, CheckpointError> {
    if fields.optional_bool("use_sliding_window")? != Some(true) {
        return Ok(None);
    }
    let Some(window) = fields.optional_size("sliding_window")? else { return Ok(None) };
    let layers = match layer_types(fields, layers)? {
        Some(sliding) => sliding,
        None => {
            let first = fields.optional_size("max_window_layers")?.unwrap_or(28);
            (0..layers).map(|layer| layer >= first).collect()
        }
    };
    Ok(Some(SlidingWindow { window, layers, rope_theta: None }))
}

/// For each layer, whether it slides, if `layer_types` says so.
fn layer_types(fields: &Fields<'_>, layers: usize) -> Result<Option<Vec<bool>>, CheckpointError> {
    let key = "layer_types";
    let Some(value) = fields.get(key) else { return Ok(None) };
    let Some(types) = value.as_array().filter(|types| types.len() == layers) else {
        return Err(fields.refuse(key, format!("a list of {layers} kinds of layer"), value));
    };
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(fields.refuse(key, "full_attention or sliding_attention", kind)),
    };
    types.iter().map(kind).collect::<Result<_, _>>().map(Some)
}

fn granite_multipliers(fields: &Fields<'_>) -> Result<Multipliers, CheckpointError> {
    let factor = |name| match fields.get(name) {
        None => Ok(1.0),
        Some(_) => fields.factor(name),
    };
    Ok(Multipliers {
        embedding: factor("embedding_multiplier")? as f32,
        attention: Some(factor("attention_multiplier")? as f32),
        residual: factor("residual_multiplier")? as f32,
        logits: factor("logits_scaling")?.recip() as f32,
    })
}

fn gemma_multipliers(fields: &Fields<'_>) -> Result<Multipliers, CheckpointError> {
    let scalar = match fields.get("query_pre_attn_scalar") {
        None => 256.0,
        Some(_) => fields.factor("query_pre_attn_scalar")?,
    };
    Ok(Multipliers {
        embedding: (fields.size("hidden_size")? as f64).sqrt() as f32,
        attention: Some(scalar.sqrt().recip() as f32),
        ..Multipliers::default()
    })
}

fn gemma_layer(
    fields: &Fields<'_>,
    layer: LayerConfig,
    layers: usize,
) -> Result<LayerConfig, CheckpointError> {
    for capping in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = fields.get(capping) {
            return Err(fields.refuse(capping, "null (not supported yet)", cap));
        }
    }
    if fields.optional_bool("use_bidirectional_attention")? == Some(true) {
        return Err(fields.refuse("use_bidirectional_attention", "false", true));
    }
    let sliding = match layer_types(fields, layers)? {
        Some(sliding) => sliding,
        None => {
            let key = "sliding_window_pattern";
            let pattern = match fields.optional_size(key)? {
                Some(0) => return Err(fields.refuse(key, "at least 1", 0)),
                Some(pattern) => pattern,
                None => 6,
            };
            (1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect()
        }
    };
    let theta = match fields.get("rope_local_base_freq") {
        None => super::rope::DEFAULT_THETA,
        Some(_) => fields.factor("rope_local_base_freq")?,
    };
    Ok(LayerConfig {
        activation: match fields.get("hidden_activation").or(fields.get("hidden_act")) {
            None => Activation::GeluTanh,
            Some(_) => layer.activation,
        },
        qk_norm: true,
        post_norms: true,
        norms_add_one: true,
        sliding: Some(SlidingWindow {
            window: fields.optional_size("sliding_window")?.unwrap_or(4096),
            layers: sliding,
            rope_theta: Some(theta),
        }),
        ..layer
    })
}

fn experts(
    fields: &Fields<'_>,
    family: Family,
    layers: usize,
) -> Result<Option<ExpertConfig>, CheckpointError> {
    let per_token = "num_experts_per_tok";
    match family {
        Family::Mixtral => Ok(Some(ExpertConfig {
            count: fields.size("num_local_experts")?,
            per_token: fields.size(per_token)?,
            width: fields.size("intermediate_size")?,
            renormalise: true,
            dense_layers: Vec::new(),
        })),
        Family::Qwen3Moe => {
            // transformers 5 writes the name that Mixtral has.
            let count = match fields.optional_size("num_experts")? {
                Some(count) => count,
                None => fields.size("num_local_experts")?,
            };
            Ok(Some(ExpertConfig {
                count,
                per_token: fields.size(per_token)?,
                width: fields.size("moe_intermediate_size")?,
                renormalise: fields.optional_bool("norm_topk_prob")?.unwrap_or(false),
                dense_layers: dense_layers(fields, layers)?,
            }))
        }
        _ => Ok(None),
    }
}

/// Those that `mlp_only_layers` lists, and those that `decoder_sparse_step` passes over.
fn dense_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<usize>, CheckpointError> {
    let step = match fields.optional_size("decoder_sparse_step")? {
        Some(0) => return Err(fields.refuse("decoder_sparse_step", "at least 1", 0)),
        Some(step) => step,
        None => 1,
    };
    let listed = fields.ids("mlp_only_layers")?;
    let is_dense = |&layer: &usize| {
        !(layer + 1).is_multiple_of(step) || listed.iter().any(|&it| it as usize == layer)
    };
    Ok((0..layers).filter(is_dense).collect())
}

#[cfg(test)]
#[path = "families_tests.rs"]
mod tests;
