//! `params.json` of Meta's checkpoints and of torchchat's, said in the terms of Hugging Face's
//! config; where a folder has none, torchchat's own table of models by name
//! (`torchchat/model_params`, in `torchchat_models.json`).

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::{
    CheckpointError, ModelConfig, config::FieldNames, config_json, json_file::read_object,
    layout::MetaTensors,
};

const TORCHCHAT_MODELS: &str = include_str!("torchchat_models.json");

const NAMES: FieldNames = FieldNames {
    vocab_size: "vocab_size",
    hidden_size: "dim",
    intermediate_size: "hidden_dim",
    layers: "n_layers",
    heads: "n_heads",
    kv_heads: "n_kv_heads",
    head_dim: "head_dim",
    rotary_dim: "partial_rotary_factor",
    sliding_window: "sliding_window",
    experts: "num_experts",
    experts_per_token: "num_experts_per_tok",
    expert_width: "moe_intermediate_size",
    max_position_embeddings: "max_seq_len",
    rms_norm_eps: "norm_eps",
    rope_theta: "rope_theta",
    bos_token_id: "bos_token_id",
    eos_token_ids: "eos_token_id",
};

/// `ModelArgs` of Meta's `llama/model.py`, `TransformerArgs` of torchchat.
const DEFAULT_MULTIPLE_OF: usize = 256;
const DEFAULT_NORM_EPS: f64 = 1e-5;
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
/// The context that Llama 3.1 was trained for.
const LLAMA31_CONTEXT: usize = 131_072;

/// Fields that change the computation in ways that this layout is not read with.
const UNSUPPORTED: [&str; 6] =
    ["moe", "quantization", "quantization_args", "lora_args", "vision_chunk_size", "encoder"];

/// The model of a folder in Meta's layout: `params.json`, else `config.json`, else torchchat's model
/// of that name.
pub(crate) fn read(
    folder: &Path,
    weights: &Path,
    tensors: &MetaTensors,
) -> Result<ModelConfig, CheckpointError> {
    let path = folder.join("params.json");
    if path.exists() {
        return parse(&path, &read_object(&path)?, tensors);
    }
    let config = folder.join("config.json");
    if config.exists() {
        return config_json::read(&config);
    }
    match torchchat_model(folder, weights) {
        Some(object) => parse(&path, &object, tensors),
        None => Err(CheckpointError::NotFound {
            path: folder.to_owned(),
            what: "model config",
            looked_for: "params.json, config.json, and a name that torchchat knows".to_owned(),
        }),
    }
}

/// The longest known name in the file's name or the folder's, as torchchat looks it up.
fn torchchat_model(folder: &Path, weights: &Path) -> Option<Map<String, Value>> {
    let plain = |name: &str| name.to_lowercase().replace(['-', '_'], "");
    let names: [PathBuf; 2] = [weights.with_extension(""), folder.to_owned()];
    let table: Map<String, Value> = serde_json::from_str(TORCHCHAT_MODELS).ok()?;
    names.iter().find_map(|name| {
        let name = plain(&name.file_name()?.to_string_lossy());
        let known = table.iter().filter(|(known, _)| name.contains(&plain(known)));
        let (_, model) = known.max_by_key(|(known, _)| known.len())?;
        model.as_object().cloned()
    })
}

fn parse(
    path: &Path,
    object: &Map<String, Value>,
    tensors: &MetaTensors,
) -> Result<ModelConfig, CheckpointError> {
    let params = Params { path, object };
    if let Some((field, value)) =
        UNSUPPORTED.iter().find_map(|&field| Some((field, params.get(field)?)))
    {
        return Err(params.refuse(field, "nothing (not supported in Meta's layout)", value));
    }
    let dim = params.size("dim")?;
    let heads = params.optional_size("n_heads")?.unwrap_or(32);
    let head_dim = match params.optional_size("head_dim")? {
        Some(width) => width,
        None if heads > 0 && dim.is_multiple_of(heads) => dim / heads,
        None => return Err(params.refuse("n_heads", "a divisor of dim", &json!(heads))),
    };
    let vocab_size = match params.size_of(&["vocab_size"])? {
        Some(size) => size,
        None => match tensors.vocabulary(dim) {
            Some(size) => size,
            None => return Err(params.refuse("vocab_size", "a size", &Value::Null)),
        },
    };
    let theta = params.number(&["rope_theta", "rope_base"])?.unwrap_or(DEFAULT_ROPE_THETA);
    let scaling = params.scaling()?;
    let norm_eps = params.number(&["norm_eps"])?.unwrap_or(DEFAULT_NORM_EPS);
    let context = params.context(theta, norm_eps, scaling.as_ref())?;
    let mut config = json!({
        "architectures": [if tensors.has_bias { "Qwen2ForCausalLM" } else { "LlamaForCausalLM" }],
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": params.hidden_dim(dim)?,
        "num_hidden_layers": params.size("n_layers")?,
        "num_attention_heads": heads,
        "num_key_value_heads": params.size_of(&["n_kv_heads", "n_local_heads"])?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": !tensors.has_head,
    });
    params.add_variant(&mut config);
    let config = config.as_object().cloned().unwrap_or_default();
    config_json::from_object(path, &config, &NAMES)
}

struct Params<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Params<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn refuse(&self, field: &str, expected: &str, found: &Value) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found: if found.is_null() { "nothing".to_owned() } else { found.to_string() },
        }
    }

    /// The first of `fields` that is there; -1 says that the default holds.
    fn size_of(&self, fields: &[&str]) -> Result<Option<usize>, CheckpointError> {
        for field in fields {
            match self.get(field) {
                None => {}
                Some(value) if value.as_i64() == Some(-1) => {}
                Some(_) => return self.optional_size(field),
            }
        }
        Ok(None)
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) => Ok(Some(size)),
            None => Err(self.refuse(field, "a whole number", value)),
        }
    }

    fn size(&self, field: &str) -> Result<usize, CheckpointError> {
        let size = self.optional_size(field)?;
        size.ok_or_else(|| self.refuse(field, "a whole number", &Value::Null))
    }

    fn number(&self, fields: &[&str]) -> Result<Option<f64>, CheckpointError> {
        let found = fields.iter().find_map(|field| Some((field, self.get(field)?)));
        let Some((field, value)) = found else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refuse(field, "a number", value))
    }

    /// `hidden_dim`, else two thirds of four times the width, stretched and rounded up.
    fn hidden_dim(&self, dim: usize) -> Result<usize, CheckpointError> {
        if let Some(width) = self.size_of(&["hidden_dim"])? {
            return Ok(width);
        }
        let multiple_of = self.optional_size("multiple_of")?.unwrap_or(DEFAULT_MULTIPLE_OF);
        let multiplier = self.number(&["ffn_dim_multiplier"])?.unwrap_or(1.0);
        let width = (dim as f64 * 8.0 / 3.0).floor() * multiplier;
        // A width beyond all bounds is refused with the others.
        let width = width.clamp(0.0, f64::from(u32::MAX)) as usize;
        match width.checked_next_multiple_of(multiple_of) {
            Some(width) if multiple_of > 0 => Ok(width),
            _ => Err(self.refuse("multiple_of", "a divisor of widths", &json!(multiple_of))),
        }
    }

    /// Llama 3.1's scaling of the rotary frequencies, in Hugging Face's words.
    fn scaling(&self) -> Result<Option<Value>, CheckpointError> {
        let used = match self.get("use_scaled_rope") {
            None => None,
            Some(value) => match value.as_bool() {
                Some(used) => Some(used),
                None => return Err(self.refuse("use_scaled_rope", "true or false", value)),
            },
        };
        let numbers = match self.get("rope_scaling") {
            None => None,
            Some(Value::Object(numbers)) => Some(numbers.clone()),
            Some(other) => return Err(self.refuse("rope_scaling", "an object", other)),
        };
        match (used, numbers) {
            (_, None) if used != Some(true) => Ok(None),
            (Some(false), Some(numbers)) => {
                let found = Value::Object(numbers);
                Err(self.refuse("rope_scaling", "nothing where use_scaled_rope is false", &found))
            }
            (_, Some(mut numbers)) => {
                numbers.entry("rope_type").or_insert_with(|| json!("llama3"));
                Ok(Some(Value::Object(numbers)))
            }
            // What Meta's code has in itself.
            (_, None) => Ok(Some(json!({
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }))),
        }
    }

    /// Tokens that the model was trained for. Meta's files do not say: the known models differ in
    /// what else they say.
    fn context(
        &self,
        theta: f64,
        norm_eps: f64,
        scaling: Option<&Value>,
    ) -> Result<usize, CheckpointError> {
        if let Some(size) = self.size_of(&["max_seq_len", "max_seq_length", "block_size"])? {
            return Ok(size);
        }
        let stretched =
            scaling.filter(|_| self.get("rope_scaling").is_some()).and_then(|scaling| {
                let factor = scaling.get("factor")?.as_f64()?;
                Some((scaling.get("original_max_position_embeddings")?.as_f64()? * factor) as usize)
            });
        Ok(match (stretched, scaling) {
            (Some(size), _) => size,
            (None, Some(_)) => LLAMA31_CONTEXT,
            // Code Llama, Llama 3, Llama 2, Llama 1.
            _ if theta >= 1e6 => 16_384,
            _ if theta >= 5e5 => 8192,
            _ if norm_eps > 1e-6 => 4096,
            _ => 2048,
        })
    }

    /// What torchchat's Granite and Mistral's own files add, under the same names as Hugging Face's.
    fn add_variant(&self, config: &mut Value) {
        for (name, architecture) in [
            ("sliding_window", "MistralForCausalLM"),
            ("embedding_multiplier", "GraniteForCausalLM"),
            ("attention_multiplier", "GraniteForCausalLM"),
            ("residual_multiplier", "GraniteForCausalLM"),
            ("logits_scaling", "GraniteForCausalLM"),
        ] {
            if let Some(value) = self.get(name) {
                config["architectures"] = json!([architecture]);
                config[name] = value.clone();
            }
        }
    }
}

#[cfg(test)]
#[path = "meta_params_tests.rs"]
mod tests;
