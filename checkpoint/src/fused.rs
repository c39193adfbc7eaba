//! Tensors that some files store as one where the model has several: projections of the same input
//! one under the other, and experts one after the other. They are taken apart as views, since rows
//! follow each other in a file.

use std::path::Path;

use crate::{
    CheckpointError, ModelConfig,
    manifest::{expert_parts, mixture_name},
    tensor_index::{StoredTensor, describe_shape},
};

/// The parts of `stored`, whose Hugging Face name is `name`, under their own names; itself if it is
/// one of the model's.
pub(crate) fn take_apart(
    path: &Path,
    name: String,
    stored: StoredTensor,
    model: &ModelConfig,
) -> Result<Vec<(String, StoredTensor)>, CheckpointError> {
    let parts = match name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => parts_of(part, model).map(|parts| (layer, parts)),
        None => None,
    };
    let Some((layer, parts)) = parts else { return Ok(vec![(name, stored)]) };
    let columns = stored.shape.last().copied().unwrap_or(0);
    let is_vector = stored.shape.len() == 1;
    let stored_rows =
        if is_vector { columns } else { stored.shape[..stored.shape.len() - 1].iter().product() };
    let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
    if stored_rows != rows || rows == 0 {
        return Err(CheckpointError::Tensor {
            path: path.to_owned(),
            tensor: stored.name.clone(),
            expected: format!("{rows} rows of {} parts under each other", parts.len()),
            found: describe_shape(&stored.shape),
        });
    }
    let row_bytes = stored.bytes / rows;
    let number_bytes = stored.dtype.block_bytes();
    let row_step = match stored.strides {
        None => row_bytes,
        Some([_, step]) if is_vector => step * number_bytes,
        Some([step, _]) => step * number_bytes,
    };
    let mut start = 0;
    let views = parts.into_iter().map(|(part, rows)| {
        let view = StoredTensor {
            shape: if is_vector { vec![rows] } else { vec![rows, columns] },
            offset: stored.offset + start * row_step,
            bytes: rows * row_bytes,
            ..stored.clone()
        };
        start += rows;
        (format!("model.layers.{layer}.{part}"), view)
    });
    Ok(views.collect())
}

/// Names and rows of the parts of a layer's tensor, if it is fused.
fn parts_of(part: &str, model: &ModelConfig) -> Option<Vec<(String, usize)>> {
    let (query, kv, mlp) = (model.query_width(), model.kv_width(), model.intermediate_size);
    for kind in ["weight", "bias"] {
        let named = |parts: &[(&str, usize)]| {
            parts.iter().map(|(part, rows)| (format!("{part}.{kind}"), *rows)).collect()
        };
        let Some(part) = part.strip_suffix(kind).and_then(|part| part.strip_suffix('.')) else {
            continue;
        };
        match part {
            "self_attn.qkv_proj" => {
                return Some(named(&[
                    ("self_attn.q_proj", query),
                    ("self_attn.k_proj", kv),
                    ("self_attn.v_proj", kv),
                ]));
            }
            "mlp.gate_up_proj" => {
                return Some(named(&[("mlp.gate_proj", mlp), ("mlp.up_proj", mlp)]));
            }
            _ => {}
        }
    }
    expert_parts_of(part, model)
}

/// Of all experts of a layer: gate and up together (transformers 5), or one projection (GGUF).
fn expert_parts_of(part: &str, model: &ModelConfig) -> Option<Vec<(String, usize)>> {
    let experts = model.experts.as_ref()?;
    let mixture = mixture_name(model.family);
    // transformers 5 calls every mixture `mlp`.
    if part == "mlp.gate.weight" {
        return Some(vec![(format!("{mixture}.gate.weight"), experts.count)]);
    }
    let (_, part) = part.split_once(".experts.")?;
    let [gate, up, down] = expert_parts(model.family);
    let projections: &[(&str, usize)] = match part {
        "gate_up_proj" => &[(gate, experts.width), (up, experts.width)],
        "gate_proj" => &[(gate, experts.width)],
        "up_proj" => &[(up, experts.width)],
        "down_proj" => &[(down, model.hidden_size)],
        _ => return None,
    };
    let of_expert = |expert: usize| {
        projections.iter().map(move |(projection, rows)| {
            (format!("{mixture}.experts.{expert}.{projection}.weight"), *rows)
        })
    };
    Some((0..experts.count).flat_map(of_expert).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ExpertConfig, Family, config::tests::model};

    fn stored(shape: &[usize]) -> StoredTensor {
        let bytes = 4 * shape.iter().product::<usize>();
        let name = "stored".to_owned();
        StoredTensor {
            name,
            dtype: DType::F32,
            shape: shape.to_vec(),
            offset: 100,
            bytes,
            strides: None,
        }
    }

    fn small() -> ModelConfig {
        let experts = ExpertConfig {
            count: 2,
            per_token: 1,
            width: 3,
            renormalise: true,
            dense_layers: Vec::new(),
        };
        ModelConfig {
            family: Family::Mixtral,
            hidden_size: 5,
            intermediate_size: 7,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            experts: Some(experts),
            ..model()
        }
    }

    /// Name after `model.layers.3.`, shape and offset of each part.
    fn check(name: &str, shape: &[usize], expected: &[(&str, &[usize], usize)]) {
        let name = format!("model.layers.3.{name}");
        let parts = take_apart(Path::new("f"), name, stored(shape), &small()).unwrap();
        let found: Vec<_> = parts
            .iter()
            .map(|(name, view)| (name["model.layers.3.".len()..].to_owned(), view))
            .collect();
        assert_eq!(found.len(), expected.len());
        for ((name, view), &(expected, shape, offset)) in found.iter().zip(expected) {
            assert_eq!((name.as_str(), view.shape.as_slice()), (expected, shape));
            assert_eq!(view.offset, 100 + 4 * offset, "{name}");
            assert_eq!(view.bytes, 4 * shape.iter().product::<usize>(), "{name}");
        }
    }

    #[test]
    fn parts_lie_one_after_the_other() {
        check(
            "self_attn.qkv_proj.weight",
            &[16, 5],
            &[
                ("self_attn.q_proj.weight", &[8, 5], 0),
                ("self_attn.k_proj.weight", &[4, 5], 40),
                ("self_attn.v_proj.weight", &[4, 5], 60),
            ],
        );
        check(
            "self_attn.qkv_proj.bias",
            &[16],
            &[
                ("self_attn.q_proj.bias", &[8], 0),
                ("self_attn.k_proj.bias", &[4], 8),
                ("self_attn.v_proj.bias", &[4], 12),
            ],
        );
        check(
            "mlp.gate_up_proj.weight",
            &[14, 5],
            &[("mlp.gate_proj.weight", &[7, 5], 0), ("mlp.up_proj.weight", &[7, 5], 35)],
        );
        let expert =
            |expert: usize, part: &str| format!("block_sparse_moe.experts.{expert}.{part}");
        check(
            "mlp.experts.gate_up_proj",
            &[2, 6, 5],
            &[
                (&expert(0, "w1.weight"), &[3, 5], 0),
                (&expert(0, "w3.weight"), &[3, 5], 15),
                (&expert(1, "w1.weight"), &[3, 5], 30),
                (&expert(1, "w3.weight"), &[3, 5], 45),
            ],
        );
        check(
            "mlp.experts.down_proj",
            &[2, 5, 3],
            &[(&expert(0, "w2.weight"), &[5, 3], 0), (&expert(1, "w2.weight"), &[5, 3], 15)],
        );
        check("mlp.down_proj.weight", &[5, 7], &[("mlp.down_proj.weight", &[5, 7], 0)]);
    }

    #[test]
    fn a_wrong_number_of_rows_is_refused() {
        let name = "model.layers.0.self_attn.qkv_proj.weight".to_owned();
        let error = take_apart(Path::new("f"), name, stored(&[15, 5]), &small()).unwrap_err();
        let message = error.to_string();
        let parts = ["`stored`", "16 rows of 3 parts", "[15, 5]"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}
