//! The two ways to name a Llama's tensors and to order the rows of its rotary heads: Hugging Face's,
//! and Meta's, which torchchat and llama2.c follow. Files of Meta's layout are read under Hugging
//! Face's names and in its order, so that nothing else needs to know.

use crate::{
    CheckpointError, ModelConfig,
    buffers::is_buffer,
    fused,
    rows::RowOrder,
    tensor_index::{NamedTensor, StoredTensor, describe_shape},
    weight_files::WeightFile,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    HuggingFace,
    Meta,
}

/// Meta's and Hugging Face's names of what a model has once.
const TOP: [(&str, &str); 3] = [
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Meta's and Hugging Face's names of a layer's parts.
const PARTS: [(&str, &str); 9] = [
    ("attention_norm", "input_layernorm"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
];

/// Q, K and V under each other, as torchchat has them.
const FUSED: &str = "attention.wqkv";
const EMBEDDING: &str = TOP[0].0;

impl Layout {
    /// Told from the tensors' names alone.
    pub(crate) fn of(files: &[WeightFile]) -> Self {
        let names = files.iter().flat_map(|(_, tensors)| tensors);
        let meta = names
            .map(|tensor| bare(&tensor.name))
            .any(|name| name == EMBEDDING || name.contains(".attention.wq"));
        if meta { Self::Meta } else { Self::HuggingFace }
    }

    /// What files of this layout call the tensor of a Hugging Face name.
    pub(crate) fn stored_name(self) -> fn(&str) -> String {
        match self {
            Self::HuggingFace => str::to_owned,
            Self::Meta => meta_name,
        }
    }

    /// A file's tensors under their Hugging Face names. A name that the layout does not have stays,
    /// for the strict check to name it.
    pub(crate) fn name(
        self,
        (file, tensors): &mut WeightFile,
        model: &ModelConfig,
    ) -> Result<Vec<NamedTensor>, CheckpointError> {
        let mut named = Vec::with_capacity(tensors.len());
        for tensor in tensors.drain(..).filter(|tensor| !is_buffer(&tensor.name)) {
            if self == Self::HuggingFace {
                let parts = fused::take_apart(file.path(), tensor.name.clone(), tensor, model)?;
                let parts = parts.into_iter();
                named.extend(parts.map(|(name, view)| (name, RowOrder::HuggingFace, view)));
                continue;
            }
            let (layer, part, kind) = match split_layer(bare(&tensor.name)) {
                Some(parts) => parts,
                None => {
                    let name = hugging_face_name(bare(&tensor.name));
                    named.push((name, RowOrder::HuggingFace, tensor));
                    continue;
                }
            };
            if part != FUSED {
                let order = order_of(part, model);
                named.push((hugging_face_name(bare(&tensor.name)), order, tensor));
                continue;
            }
            let Some(slices) = unfuse(&tensor, model) else {
                let heads = model.heads + 2 * model.kv_heads;
                return Err(CheckpointError::Tensor {
                    path: file.path().to_owned(),
                    tensor: tensor.name.clone(),
                    expected: format!("rows of {heads} heads (Q, K and V) under each other"),
                    found: describe_shape(&tensor.shape),
                });
            };
            for (part, slice) in ["attention.wq", "attention.wk", "attention.wv"].iter().zip(slices)
            {
                let name = hugging_face_name(&format!("layers.{layer}.{part}.{kind}"));
                named.push((name, order_of(part, model), slice));
            }
        }
        Ok(named)
    }
}

/// Width and height of the embedding, whether a file has biases of Q, and whether it has a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MetaTensors {
    /// `[rows, columns]` of all shards together, were they under each other, and of the first.
    pub embedding: Option<([usize; 2], [usize; 2])>,
    pub has_bias: bool,
    pub has_head: bool,
}

impl MetaTensors {
    pub(crate) fn of(files: &[WeightFile]) -> Self {
        let mut seen = Self::default();
        for tensor in files.iter().flat_map(|(_, tensors)| tensors) {
            let name = bare(&tensor.name);
            seen.has_head |= name == TOP[2].0;
            seen.has_bias |=
                name.ends_with(".attention.wq.bias") || name.ends_with(".attention.wqkv.bias");
            if let (EMBEDDING, &[rows, columns]) = (name, tensor.shape.as_slice()) {
                let (all, _) = seen.embedding.get_or_insert(([0, columns], [rows, columns]));
                all[0] = all[0].saturating_add(rows);
            }
        }
        seen
    }

    /// Rows of the embedding whose width is `hidden`, however it is split.
    pub(crate) fn vocabulary(&self, hidden: usize) -> Option<usize> {
        let (all, first) = self.embedding?;
        Some(if first[1] == hidden { all[0] } else { first[0] })
    }
}

/// The name without what `torch.compile` and torchchat's wrapper put before it.
fn bare(name: &str) -> &str {
    let name = name.strip_prefix("_orig_mod.").unwrap_or(name);
    name.strip_prefix("model.").unwrap_or(name)
}

/// Number, part and `weight` or `bias` of a layer's tensor.
fn split_layer(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    matches!(kind, "weight" | "bias").then_some((layer.parse().ok()?, part, kind))
}

fn hugging_face_name(name: &str) -> String {
    let top = TOP.iter().find(|(meta, _)| *meta == name).map(|(_, name)| (*name).to_owned());
    let layered = || {
        let (layer, part, kind) = split_layer(name)?;
        let (_, part) = PARTS.iter().find(|(meta, _)| *meta == part)?;
        Some(format!("model.layers.{layer}.{part}.{kind}"))
    };
    // A name of neither layout must not become one of Hugging Face's by chance.
    top.or_else(layered).unwrap_or_else(|| format!("meta:{name}"))
}

fn meta_name(name: &str) -> String {
    let top = TOP.iter().find(|(_, other)| *other == name).map(|(meta, _)| (*meta).to_owned());
    let layered = || {
        let (layer, part, kind) = split_layer(name.strip_prefix("model.")?)?;
        let (part, _) = PARTS.iter().find(|(_, other)| *other == part)?;
        Some(format!("layers.{layer}.{part}.{kind}"))
    };
    top.or_else(layered).unwrap_or_else(|| name.to_owned())
}

fn order_of(part: &str, model: &ModelConfig) -> RowOrder {
    match part {
        "attention.wq" | "attention.wk" => RowOrder::MetaHeads { head_dim: model.head_dim },
        _ => RowOrder::HuggingFace,
    }
}

/// Q, K and V of a fused tensor: rows in proportion to their heads, which is true of a shard too.
fn unfuse(tensor: &StoredTensor, model: &ModelConfig) -> Option<[StoredTensor; 3]> {
    let heads = [model.heads, model.kv_heads, model.kv_heads];
    let rows = *tensor.shape.first()?;
    let all: usize = heads.iter().sum();
    if !rows.is_multiple_of(all) {
        return None;
    }
    let row: usize = tensor.shape[1..].iter().product();
    // Numbers from a row to the next.
    let stride = match (tensor.strides, tensor.shape.len()) {
        (Some([_, step]), 1) => step,
        (Some([step, _]), _) => step,
        (None, _) => row,
    };
    let mut start = 0;
    Some(heads.map(|heads| {
        let mut slice = tensor.clone();
        slice.shape[0] = rows / all * heads;
        slice.offset += start * stride * tensor.dtype.block_bytes();
        slice.bytes = slice.shape[0] * row * tensor.dtype.block_bytes();
        start += slice.shape[0];
        slice
    }))
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
