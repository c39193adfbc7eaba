//! `config.json` and `generation_config.json`, as transformers 4 and 5 write them.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{
    CheckpointError, Family, ModelConfig, RopeScaling, config::FieldNames, json_file::read_object,
};

const ARCHITECTURES: &str = "LlamaForCausalLM";
/// Meta's and transformers' default where a Llama config does not say.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

const NAMES: FieldNames = FieldNames {
    vocab_size: "vocab_size",
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    max_position_embeddings: "max_position_embeddings",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
    bos_token_id: "bos_token_id",
    eos_token_ids: "eos_token_id",
};

/// Reads `config.json` at `path` and, if there is one beside it, `generation_config.json`.
pub(crate) fn read(path: &Path) -> Result<ModelConfig, CheckpointError> {
    let object = read_object(path)?;
    let fields = Fields { path, object: &object, prefix: "" };
    let mut model = parse(&fields)?;
    let generation = path.with_file_name("generation_config.json");
    if generation.exists() {
        let object = read_object(&generation)?;
        let fields = Fields { path: &generation, object: &object, prefix: "" };
        model.eos_token_ids.extend(fields.ids("eos_token_id")?);
    }
    model.eos_token_ids.sort_unstable();
    model.eos_token_ids.dedup();
    model.validate(path, &NAMES)?;
    Ok(model)
}

fn parse(fields: &Fields) -> Result<ModelConfig, CheckpointError> {
    let family = family(fields)?;
    refuse_unsupported(fields)?;
    let hidden_size = fields.size("hidden_size")?;
    let heads = fields.size("num_attention_heads")?;
    let head_dim = match fields.optional_size("head_dim")? {
        Some(width) => width,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let expected =
                format!("a divisor of hidden_size ({hidden_size}) where head_dim is absent");
            return Err(fields.refuse("num_attention_heads", expected, heads));
        }
    };
    let (rope_theta, rope_scaling) = rope(fields)?;
    Ok(ModelConfig {
        family,
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.size("intermediate_size")?,
        layers: fields.size("num_hidden_layers")?,
        heads,
        kv_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        max_position_embeddings: fields.size("max_position_embeddings")?,
        rms_norm_eps: fields.number("rms_norm_eps")? as f32,
        rope_theta,
        rope_scaling,
        tied_embeddings: fields.optional_bool("tie_word_embeddings")?.unwrap_or(false),
        bos_token_id: fields.ids("bos_token_id")?.first().copied(),
        eos_token_ids: fields.ids("eos_token_id")?,
    })
}

fn family(fields: &Fields) -> Result<Family, CheckpointError> {
    let expected = || format!("one of: {ARCHITECTURES}");
    match fields.get("architectures") {
        Some(Value::Array(names)) => match names.as_slice() {
            [Value::String(name)] if name == ARCHITECTURES => Ok(Family::Llama),
            _ => Err(fields.refuse("architectures", expected(), Value::from(names.clone()))),
        },
        Some(other) => Err(fields.refuse("architectures", expected(), other)),
        None => match fields.get("model_type") {
            Some(Value::String(kind)) if kind == "llama" => Ok(Family::Llama),
            Some(other) => Err(fields.refuse("model_type", "llama", other)),
            None => Err(fields.absent("architectures", &expected())),
        },
    }
}

/// Switches that change the computation and that the llama family here does not have.
fn refuse_unsupported(fields: &Fields) -> Result<(), CheckpointError> {
    match fields.get("hidden_act") {
        None => {}
        Some(Value::String(name)) if matches!(name.as_str(), "silu" | "swish") => {}
        Some(other) => return Err(fields.refuse("hidden_act", "silu", other)),
    }
    for switch in ["attention_bias", "mlp_bias"] {
        if fields.optional_bool(switch)? == Some(true) {
            return Err(fields.refuse(switch, "false (biases are not supported yet)", true));
        }
    }
    if let Some(quantization) = fields.get("quantization_config") {
        let method = quantization.get("quant_method").unwrap_or(quantization);
        return Err(fields.refuse("quantization_config", "nothing (not supported yet)", method));
    }
    Ok(())
}

/// `rope_theta` and the scaling: `rope_parameters` (transformers 5), else `rope_scaling` and a
/// `rope_theta` beside it (transformers 4).
fn rope(fields: &Fields) -> Result<(f64, RopeScaling), CheckpointError> {
    let (prefix, key) = match fields.get("rope_parameters") {
        Some(_) => ("rope_parameters.", "rope_parameters"),
        None => ("rope_scaling.", "rope_scaling"),
    };
    let nested = match fields.get(key) {
        None => None,
        Some(Value::Object(object)) => Some(Fields { path: fields.path, object, prefix }),
        Some(other) => return Err(fields.refuse(key, "an object or null", other)),
    };
    let theta = match nested.as_ref().map(|nested| nested.optional_number("rope_theta")) {
        Some(theta) => theta?,
        None => None,
    };
    let theta = match theta {
        Some(theta) => theta,
        None => fields.optional_number("rope_theta")?.unwrap_or(DEFAULT_ROPE_THETA),
    };
    let scaling = match &nested {
        None => RopeScaling::None,
        Some(nested) => scaling(nested)?,
    };
    for fields in nested.iter().chain([fields]) {
        match fields.optional_number("partial_rotary_factor")? {
            None => {}
            Some(1.0) => {}
            Some(part) => return Err(fields.refuse("partial_rotary_factor", "1", part)),
        }
    }
    Ok((theta, scaling))
}

fn scaling(fields: &Fields) -> Result<RopeScaling, CheckpointError> {
    let key = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    match fields.get(key) {
        // transformers 5 keeps rope_theta here too, and takes no type for no scaling.
        None if fields.get("factor").is_none() => Ok(RopeScaling::None),
        None => Err(fields.absent("rope_type", "the kind of scaling")),
        Some(Value::String(kind)) => match kind.as_str() {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: fields.factor("factor")? }),
            "llama3" => {
                let scaling = RopeScaling::Llama3 {
                    factor: fields.factor("factor")?,
                    low_freq_factor: fields.factor("low_freq_factor")?,
                    high_freq_factor: fields.factor("high_freq_factor")?,
                    original_max_position_embeddings: fields
                        .size("original_max_position_embeddings")?,
                };
                let low = fields.factor("low_freq_factor")?;
                if fields.factor("high_freq_factor")? <= low {
                    let expected = format!("more than low_freq_factor ({low})");
                    let found = fields.factor("high_freq_factor")?;
                    return Err(fields.refuse("high_freq_factor", expected, found));
                }
                Ok(scaling)
            }
            _ => Err(fields.refuse(
                key,
                "one of: default, linear, llama3 (others are not supported yet)",
                kind,
            )),
        },
        Some(other) => Err(fields.refuse(key, "a string", other)),
    }
}

/// Typed access to a JSON object's fields; null counts as absent.
struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
    /// Where the object is nested, for messages.
    prefix: &'static str,
}

impl Fields<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn refuse(
        &self,
        field: &str,
        expected: impl ToString,
        found: impl serde::Serialize,
    ) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: format!("{}{field}", self.prefix),
            expected: expected.to_string(),
            found: serde_json::to_string(&found).unwrap_or_else(|_| "a value".to_owned()),
        }
    }

    fn absent(&self, field: &str, expected: &str) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: format!("{}{field}", self.prefix),
            expected: expected.to_owned(),
            found: "nothing".to_owned(),
        }
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) => Ok(Some(size)),
            None => Err(self.refuse(field, "a whole number", value)),
        }
    }

    fn size(&self, field: &str) -> Result<usize, CheckpointError> {
        self.optional_size(field)?.ok_or_else(|| self.absent(field, "a whole number"))
    }

    fn optional_number(&self, field: &str) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refuse(field, "a number", value))
    }

    fn number(&self, field: &str) -> Result<f64, CheckpointError> {
        self.optional_number(field)?.ok_or_else(|| self.absent(field, "a number"))
    }

    fn factor(&self, field: &str) -> Result<f64, CheckpointError> {
        let value = self.number(field)?;
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.refuse(field, "a positive number", value))
        }
    }

    fn optional_bool(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.refuse(field, "true or false", value))
    }

    /// A token id or a list of them.
    fn ids(&self, field: &str) -> Result<Vec<u32>, CheckpointError> {
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.refuse(field, "a token id or a list of token ids", value))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }
}

#[cfg(test)]
#[path = "config_json_tests.rs"]
mod tests;
