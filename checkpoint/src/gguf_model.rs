//! A GGUF file as a model: metadata to config, tensors to Hugging Face names and row order.

use std::path::Path;

use crate::{
    CheckpointError, Family, LayerConfig, ModelConfig, Multipliers, RopeScaling,
    config::FieldNames,
    gguf::{Header, read_header},
    gguf_metadata::Metadata,
    manifest,
    mapping::MappedFile,
    rows::RowOrder,
    tensor_index::{StoredTensor, TensorIndex},
};

/// Divisors of the rotary frequencies: Llama 3.1's scaling, as llama.cpp writes it.
const ROPE_DIVISORS: &str = "rope_freqs.weight";
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

const NAMES: FieldNames = FieldNames {
    vocab_size: "llama.vocab_size",
    hidden_size: "llama.embedding_length",
    intermediate_size: "llama.feed_forward_length",
    layers: "llama.block_count",
    heads: "llama.attention.head_count",
    kv_heads: "llama.attention.head_count_kv",
    head_dim: "llama.attention.key_length",
    rotary_dim: "llama.rope.dimension_count",
    sliding_window: "llama.attention.sliding_window",
    experts: "llama.expert_count",
    experts_per_token: "llama.expert_used_count",
    expert_width: "llama.expert_feed_forward_length",
    max_position_embeddings: "llama.context_length",
    rms_norm_eps: "llama.attention.layer_norm_rms_epsilon",
    rope_theta: "llama.rope.freq_base",
    bos_token_id: "tokenizer.ggml.bos_token_id",
    eos_token_ids: "tokenizer.ggml.eos_token_id",
};

/// Tokens that end a turn, for files that name only the token that ends a document.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

/// Maps the file, reads its model and indexes its tensors.
pub(crate) fn open(path: &Path) -> Result<(ModelConfig, TensorIndex), CheckpointError> {
    let file = MappedFile::open(path)?;
    let Header { metadata, tensors } = read_header(&file)?;
    refuse_unsupported(&metadata)?;
    let model = model(&file, &metadata, &tensors)?;
    let head_dim = model.head_dim;
    let mut index = TensorIndex::new(path, str::to_owned);
    let read = tensors.into_iter().filter(|tensor| tensor.name != ROPE_DIVISORS);
    index.add(file, read.map(|tensor| in_hugging_face_terms(tensor, head_dim)))?;
    Ok((model, index))
}

fn in_hugging_face_terms(
    tensor: StoredTensor,
    head_dim: usize,
) -> (String, RowOrder, StoredTensor) {
    // A name that the family does not have stays, for the strict check to name it.
    let name = manifest::from_gguf(&tensor.name).unwrap_or_else(|| tensor.name.clone());
    let rotary = [".self_attn.q_proj.weight", ".self_attn.k_proj.weight"];
    let rotary = rotary.iter().any(|ending| name.ends_with(ending));
    let order = if rotary { RowOrder::MetaHeads { head_dim } } else { RowOrder::HuggingFace };
    (name, order, tensor)
}

fn refuse_unsupported(metadata: &Metadata) -> Result<(), CheckpointError> {
    let key = "general.architecture";
    let architecture = metadata.text(key)?;
    let architecture = metadata.needed(key, architecture)?;
    if architecture != "llama" {
        return Err(metadata.refuse(key, "one of: llama", format!("{architecture:?}")));
    }
    for (key, most, what) in [
        ("split.count", 1, "1 (split files are not supported yet; merge them)"),
        ("llama.expert_count", 0, "0 (mixtures of experts are not supported yet)"),
    ] {
        if let Some(count) = metadata.size(key)?.filter(|&count| count > most) {
            return Err(metadata.refuse(key, what, count.to_string()));
        }
    }
    Ok(())
}

fn model(
    file: &MappedFile,
    metadata: &Metadata,
    tensors: &[StoredTensor],
) -> Result<ModelConfig, CheckpointError> {
    let size = |key: &str| metadata.needed(key, metadata.size(key)?);
    let shape_of = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    let (hidden_size, heads) = (size(NAMES.hidden_size)?, size(NAMES.heads)?);
    let head_dim = head_dim(metadata, hidden_size, heads)?;
    let vocab_size = match metadata.size(NAMES.vocab_size)? {
        Some(size) => size,
        None => {
            let rows = shape_of("token_embd.weight").map(|tensor| tensor.shape[0]);
            metadata.needed(NAMES.vocab_size, rows)?
        }
    };
    let eps = metadata.needed(NAMES.rms_norm_eps, metadata.number(NAMES.rms_norm_eps)?)?;
    let model = ModelConfig {
        family: Family::Llama,
        vocab_size,
        hidden_size,
        intermediate_size: size(NAMES.intermediate_size)?,
        layers: size(NAMES.layers)?,
        heads,
        kv_heads: metadata.size(NAMES.kv_heads)?.unwrap_or(heads),
        head_dim,
        rotary_dim: head_dim,
        max_position_embeddings: size(NAMES.max_position_embeddings)?,
        rms_norm_eps: eps as f32,
        rope_theta: metadata.number(NAMES.rope_theta)?.unwrap_or(DEFAULT_ROPE_THETA),
        rope_scaling: rope_scaling(file, metadata, shape_of(ROPE_DIVISORS), head_dim)?,
        layer: LayerConfig::default(),
        experts: None,
        multipliers: Multipliers::default(),
        tied_embeddings: shape_of("output.weight").is_none(),
        bos_token_id: metadata.id(NAMES.bos_token_id)?,
        eos_token_ids: eos_token_ids(metadata)?,
    };
    model.validate(file.path(), &NAMES)?;
    Ok(model)
}

fn head_dim(
    metadata: &Metadata,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, CheckpointError> {
    let head_dim = match metadata.size(NAMES.head_dim)? {
        Some(width) => width,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let expected = format!("a divisor of {} ({hidden_size})", NAMES.hidden_size);
            return Err(metadata.refuse(NAMES.heads, &expected, heads.to_string()));
        }
    };
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(width) = metadata.size(key)?.filter(|&width| width != head_dim) {
            let expected = format!("the head's width ({head_dim})");
            return Err(metadata.refuse(key, &expected, width.to_string()));
        }
    }
    Ok(head_dim)
}

fn rope_scaling(
    file: &MappedFile,
    metadata: &Metadata,
    divisors: Option<&StoredTensor>,
    head_dim: usize,
) -> Result<RopeScaling, CheckpointError> {
    let key = "llama.rope.scaling.type";
    let factor_key = "llama.rope.scaling.factor";
    let scaling = match metadata.text(key)? {
        None | Some("none") => RopeScaling::None,
        Some("linear") => {
            let factor = metadata.needed(factor_key, metadata.number(factor_key)?)?;
            if !(factor.is_finite() && factor > 0.0) {
                return Err(metadata.refuse(factor_key, "a positive number", factor.to_string()));
            }
            RopeScaling::Linear { factor }
        }
        Some(other) => {
            let expected = "one of: none, linear (others are not supported yet)";
            return Err(metadata.refuse(key, expected, format!("{other:?}")));
        }
    };
    let Some(tensor) = divisors else { return Ok(scaling) };
    let refuse = |expected: String, found: String| CheckpointError::Tensor {
        path: file.path().to_owned(),
        tensor: tensor.name.clone(),
        expected,
        found,
    };
    if scaling != RopeScaling::None {
        let expected = format!("no frequency divisors beside {key}");
        return Err(refuse(expected, "both".to_owned()));
    }
    if tensor.shape != [head_dim / 2] {
        return Err(refuse(
            format!("shape [{}]", head_dim / 2),
            format!("shape {:?}", tensor.shape),
        ));
    }
    let mut values = vec![0f32; head_dim / 2];
    let bytes = &file.bytes()[tensor.offset..tensor.offset + tensor.bytes];
    tensor.dtype.dequantise(bytes, &mut values);
    match values.iter().find(|value| !(value.is_finite() && **value > 0.0)) {
        Some(value) => Err(refuse("positive divisors".to_owned(), value.to_string())),
        None => Ok(RopeScaling::PerFrequency { divisors: values }),
    }
}

/// Ends of a document, a turn and a message (a tool call).
fn eos_token_ids(metadata: &Metadata) -> Result<Vec<u32>, CheckpointError> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(metadata.id(&format!("tokenizer.ggml.{key}"))?);
    }
    if metadata.id("tokenizer.ggml.eot_token_id")?.is_none() {
        let tokens = metadata.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let ends = tokens.iter().enumerate();
        let ends = ends.filter(|(_, token)| TURN_ENDS.contains(&token.as_str()));
        ids.extend(ends.filter_map(|(id, _)| u32::try_from(id).ok()));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

#[cfg(test)]
#[path = "gguf_model_tests.rs"]
mod tests;
