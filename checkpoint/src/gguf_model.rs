//! A GGUF file as a model: metadata to config, tensors to Hugging Face names and row order.

use std::path::Path;

use crate::{
    CheckpointError, Family, ModelConfig, fused,
    gguf::{Header, read_header},
    gguf_config::{self, is_config},
    gguf_metadata::Metadata,
    manifest::{EMBEDDING, HEAD, expert_parts, mixture_name},
    mapping::MappedFile,
    rows::RowOrder,
    tensor_index::TensorIndex,
};

/// Maps the file, reads its model and indexes its tensors.
pub(crate) fn open(path: &Path) -> Result<(ModelConfig, TensorIndex), CheckpointError> {
    let file = MappedFile::open(path)?;
    let Header { metadata, tensors } = read_header(&file)?;
    refuse_split(&metadata)?;
    let model = gguf_config::model(&file, &metadata, &tensors)?;
    let mut named = Vec::with_capacity(tensors.len());
    for tensor in tensors.into_iter().filter(|tensor| !is_config(&tensor.name)) {
        // A name that the family does not have stays, for the strict check to name it.
        let name = hugging_face_name(&tensor.name, model.family);
        let name = name.unwrap_or_else(|| tensor.name.clone());
        for (name, view) in fused::take_apart(path, name, tensor, &model)? {
            let order = row_order(&name, &model);
            named.push((name, order, view));
        }
    }
    let mut index = TensorIndex::new(path, str::to_owned);
    index.add(file, named)?;
    Ok((model, index))
}

/// llama.cpp rotates neighbours in the architectures `llama` and `granite`, and its converter has
/// ordered the rows of Q and K so.
fn row_order(name: &str, model: &ModelConfig) -> RowOrder {
    let neighbours =
        matches!(model.family, Family::Llama | Family::Mistral | Family::Mixtral | Family::Granite);
    let rotary = [".self_attn.q_proj.", ".self_attn.k_proj."];
    if neighbours && rotary.iter().any(|part| name.contains(part)) {
        return RowOrder::MetaHeads { head_dim: model.head_dim };
    }
    RowOrder::HuggingFace
}

fn refuse_split(metadata: &Metadata) -> Result<(), CheckpointError> {
    let key = "split.count";
    match metadata.size(key)?.filter(|&count| count > 1) {
        None => Ok(()),
        Some(count) => {
            let expected = "1 (split files are not supported yet; merge them)";
            Err(metadata.refuse(key, expected, count.to_string()))
        }
    }
}

/// The Hugging Face name of a GGUF tensor (gguf-py `tensor_mapping.py`); none if the family does not
/// have it.
fn hugging_face_name(name: &str, family: Family) -> Option<String> {
    let fixed = match name {
        "token_embd.weight" => Some(EMBEDDING),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some(HEAD),
        _ => None,
    };
    if let Some(name) = fixed {
        return Some(name.to_owned());
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (part, kind) = rest.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let part = match expert_name(part, family) {
        // Stacked experts have no `weight` behind their name.
        Some((part, true)) => part,
        Some((part, false)) => format!("{part}.{kind}"),
        None => format!("{}.{kind}", layer_name(part, family)?),
    };
    Some(format!("model.layers.{layer}.{part}"))
}

/// Name of a router or of experts in a layer, and whether it is all experts in one tensor.
fn expert_name(part: &str, family: Family) -> Option<(String, bool)> {
    let mixture = mixture_name(family);
    if part == "ffn_gate_inp" {
        return Some((format!("{mixture}.gate"), false));
    }
    let stacked = [("ffn_gate_exps", "gate"), ("ffn_up_exps", "up"), ("ffn_down_exps", "down")];
    if let Some((_, projection)) = stacked.iter().find(|(name, _)| *name == part) {
        return Some((format!("{mixture}.experts.{projection}_proj"), true));
    }
    // Files of before the experts were stacked.
    let (part, expert) = part.split_once('.')?;
    let expert: usize = expert.parse().ok()?;
    let [gate, up, down] = expert_parts(family);
    let projection = match part {
        "ffn_gate" => gate,
        "ffn_up" => up,
        "ffn_down" => down,
        _ => return None,
    };
    Some((format!("{mixture}.experts.{expert}.{projection}"), false))
}

fn layer_name(part: &str, family: Family) -> Option<&'static str> {
    let gemma = family == Family::Gemma3;
    Some(match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_norm" if gemma => "pre_feedforward_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "post_attention_norm" if gemma => "post_attention_layernorm",
        "post_ffw_norm" if gemma => "post_feedforward_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" if family == Family::Phi3 => "mlp.gate_up_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    })
}

#[cfg(test)]
#[path = "gguf_model_tests.rs"]
mod tests;
