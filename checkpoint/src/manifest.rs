//! The tensors that a family has, with their shapes: Hugging Face names and row order.

use crate::ModelConfig;

/// Name of the embedding, which a tied head is read from.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// Every tensor that `model` needs, with its shape `[rows, columns]` or `[width]`.
pub(crate) fn tensors(model: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, mlp) = (model.hidden_size, model.intermediate_size);
    let (query, kv) = (model.query_width(), model.kv_width());
    let table = vec![model.vocab_size, hidden];
    let mut tensors = vec![(EMBEDDING.to_owned(), table.clone())];
    for layer in 0..model.layers {
        for (part, shape) in [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![query, hidden]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, query]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![mlp, hidden]),
            ("mlp.up_proj", vec![mlp, hidden]),
            ("mlp.down_proj", vec![hidden, mlp]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    if !model.tied_embeddings {
        tensors.push((HEAD.to_owned(), table));
    }
    tensors
}

/// A buffer that old exporters wrote out though it follows from the config.
pub(crate) fn is_droppable(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn_rot_embd.weight")
}

/// The Hugging Face name of a GGUF tensor of architecture `llama`
/// (gguf-py `tensor_mapping.py`); none if the family does not have it.
pub(crate) fn from_gguf(name: &str) -> Option<String> {
    let fixed = match name {
        "token_embd.weight" => Some(EMBEDDING),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some(HEAD),
        _ => None,
    };
    if let Some(name) = fixed {
        return Some(name.to_owned());
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let part = match part.strip_suffix(".weight")? {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.weight"))
}
