//! `config.json` and `generation_config.json`, as transformers 4 and 5 write them.

mod families;
mod fields;
mod rope;

use std::path::Path;

use serde_json::{Map, Value};

use crate::{
    CheckpointError, Family, ModelConfig,
    config::{FieldNames, MOST_LAYERS},
    json_file::read_object,
};
use fields::Fields;

const NAMES: FieldNames = FieldNames {
    vocab_size: "vocab_size",
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    rotary_dim: "partial_rotary_factor",
    sliding_window: "sliding_window",
    experts: "num_experts",
    experts_per_token: "num_experts_per_tok",
    expert_width: "moe_intermediate_size",
    max_position_embeddings: "max_position_embeddings",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
    bos_token_id: "bos_token_id",
    eos_token_ids: "eos_token_id",
};

/// Reads `config.json` at `path` and, if there is one beside it, `generation_config.json`.
pub(crate) fn read(path: &Path) -> Result<ModelConfig, CheckpointError> {
    let object = read_object(path)?;
    let fields = Fields::of(path, &object);
    let mut model = parse(&fields)?;
    let generation = path.with_file_name("generation_config.json");
    if generation.exists() {
        let object = read_object(&generation)?;
        let fields = Fields::of(&generation, &object);
        model.eos_token_ids.extend(fields.ids("eos_token_id")?);
    }
    model.eos_token_ids.sort_unstable();
    model.eos_token_ids.dedup();
    model.validate(path, &NAMES)?;
    Ok(model)
}

/// The config that another file amounts to; `names` are that file's own words for the fields.
pub(crate) fn from_object(
    path: &Path,
    object: &Map<String, Value>,
    names: &FieldNames,
) -> Result<ModelConfig, CheckpointError> {
    let model = parse(&Fields::of(path, object))?;
    model.validate(path, names)?;
    Ok(model)
}

fn parse(fields: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let family = family(fields)?;
    refuse_quantised(fields)?;
    let hidden_size = fields.size("hidden_size")?;
    let heads = fields.size("num_attention_heads")?;
    let layers = fields.size("num_hidden_layers")?;
    if layers > MOST_LAYERS {
        return Err(fields.refuse("num_hidden_layers", format!("1 to {MOST_LAYERS}"), layers));
    }
    let head_dim = head_dim(fields, family, hidden_size, heads)?;
    let default_theta = if family == Family::Gemma3 { 1_000_000.0 } else { rope::DEFAULT_THETA };
    let rope = rope::read(fields, head_dim, default_theta, family == Family::Phi3)?;
    let mut variant = families::read(fields, family, layers)?;
    if let (Some(sliding), Some(theta)) = (&mut variant.layer.sliding, rope.sliding_theta) {
        sliding.rope_theta = Some(theta);
    }
    Ok(ModelConfig {
        family,
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.size("intermediate_size")?,
        layers,
        heads,
        kv_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        rotary_dim: rope.rotary_dim,
        max_position_embeddings: fields.size("max_position_embeddings")?,
        rms_norm_eps: fields.number("rms_norm_eps")? as f32,
        rope_theta: rope.theta,
        rope_scaling: rope.scaling,
        layer: variant.layer,
        experts: variant.experts,
        multipliers: variant.multipliers,
        tied_embeddings: variant.tied_embeddings,
        bos_token_id: fields.ids("bos_token_id")?.first().copied(),
        eos_token_ids: fields.ids("eos_token_id")?,
    })
}

fn head_dim(
    fields: &Fields<'_>,
    family: Family,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, CheckpointError> {
    match (fields.optional_size("head_dim")?, family) {
        (Some(width), _) => Ok(width),
        // transformers' defaults, whatever the hidden width.
        (None, Family::Gemma3) => Ok(256),
        (None, Family::Qwen3) => Ok(128),
        _ if heads > 0 && hidden_size.is_multiple_of(heads) => Ok(hidden_size / heads),
        _ => {
            let expected =
                format!("a divisor of hidden_size ({hidden_size}) where head_dim is absent");
            Err(fields.refuse("num_attention_heads", expected, heads))
        }
    }
}

fn family(fields: &Fields<'_>) -> Result<Family, CheckpointError> {
    let architectures = || format!("one of: {}", Family::list(Family::architecture));
    match fields.get("architectures") {
        Some(Value::Array(names)) => {
            let family = match names.as_slice() {
                [Value::String(name)] => Family::named(name, Family::architecture),
                _ => None,
            };
            family.ok_or_else(|| fields.refuse("architectures", architectures(), names))
        }
        Some(other) => Err(fields.refuse("architectures", architectures(), other)),
        None => match fields.get("model_type") {
            Some(kind) => {
                let family = kind.as_str().and_then(|it| Family::named(it, Family::model_type));
                let expected = || format!("one of: {}", Family::list(Family::model_type));
                family.ok_or_else(|| fields.refuse("model_type", expected(), kind))
            }
            None => Err(fields.absent("architectures", &architectures())),
        },
    }
}

fn refuse_quantised(fields: &Fields<'_>) -> Result<(), CheckpointError> {
    let Some(quantization) = fields.get("quantization_config") else { return Ok(()) };
    let method = quantization.get("quant_method").unwrap_or(quantization);
    Err(fields.refuse("quantization_config", "nothing (not supported yet)", method))
}

#[cfg(test)]
#[path = "config_json_tests.rs"]
mod tests;
