use super::*;
use crate::fixtures::fixture;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&fixture(name)).unwrap()
}

/// Every value of a tensor.
pub(crate) fn whole(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let shape = checkpoint.shape(name).unwrap();
    let &[rows, columns] = shape.as_slice() else {
        return checkpoint.vector(name, 0..shape[0]).unwrap();
    };
    let mut values = Vec::new();
    let mut next = 0;
    checkpoint
        .for_each_row(name, 0..rows, 0..columns, &mut |row, part| {
            assert_eq!(row, next);
            next += 1;
            values.extend_from_slice(part);
        })
        .unwrap();
    assert_eq!(values.len(), rows * columns);
    values
}

/// Two checkpoints of the same weights hold the same bits.
fn check_same(name: &str, other: &str) {
    let (one, two) = (open(name), open(other));
    for TensorSpec { name: tensor, .. } in manifest::tensors(one.model()) {
        assert_eq!(whole(&one, &tensor), whole(&two, &tensor), "{tensor} of {name} and {other}");
    }
}

#[test]
fn every_format_of_a_model_gives_the_same_values() {
    use Format::{Gguf, Meta, Safetensors, Torch};
    for (other, format) in [
        ("hf-single", Safetensors),
        ("hf-bf16", Safetensors),
        ("hf-sharded", Safetensors),
        ("hf-sharded-noindex", Safetensors),
        ("torch-bin", Torch),
        ("torch-bin-sharded", Torch),
        ("torch-bin-views", Torch),
        ("torchchat-single", Meta),
        ("torchchat-fused", Meta),
        ("stories-wrapped", Meta),
        ("meta-consolidated-1", Meta),
        ("meta-consolidated-2", Meta),
        ("meta-consolidated-4", Meta),
        // Of other rotary frequencies, which are no stored values.
        ("meta-consolidated-1-scaledrope", Meta),
        ("meta-consolidated-2-llama2style", Meta),
        ("gguf-f32", Gguf),
        ("gguf-f16", Gguf),
    ] {
        check_same("models/llama3-like", &format!("formats/{other}"));
        assert_eq!(open(&format!("formats/{other}")).format(), format, "{other}");
    }
    check_same("models/llama3-like", "models/llama3-like/model.safetensors");
    check_same("models/smollm-like", "formats/torch-bin-tied");
    check_same("models/smollm-like", "formats/gguf-f16-smollm");
    check_same("models/qwen2-like", "formats/torchchat-single-bias");
    check_same("models/qwen2-like", "formats/torchchat-fused-bias");
}

/// Meta's and torchchat's params say what the config says, but for the tokens that end a text.
#[test]
fn every_config_of_a_model_says_the_same() {
    let llama = "models/llama3-like";
    let source = open(llama);
    for other in ["hf-single", "hf-bf16", "hf-sharded", "torch-bin", "torch-bin-sharded"] {
        assert_eq!(source.model(), open(&format!("formats/{other}")).model(), "{other}");
    }
    for (source, other) in [
        (llama, "torchchat-single"),
        (llama, "torchchat-fused"),
        (llama, "stories-wrapped"),
        (llama, "meta-consolidated-1"),
        (llama, "meta-consolidated-2"),
        (llama, "meta-consolidated-4"),
        ("models/qwen2-like", "torchchat-single-bias"),
        ("models/qwen2-like", "torchchat-fused-bias"),
    ] {
        let source = open(source);
        let model = open(&format!("formats/{other}")).model().clone();
        let (bos_token_id, eos_token_ids) = (model.bos_token_id, model.eos_token_ids.clone());
        let same = ModelConfig { bos_token_id, eos_token_ids, ..source.model().clone() };
        assert_eq!(model, same, "{other}");
    }
}

/// Every part of every tensor, by rows and columns that cut heads, shards and blocks.
#[test]
fn slices_are_parts_of_the_whole() {
    let mut checkpoints = vec![Checkpoint::dummy(&fixture("models/llama3-like"), 3).unwrap()];
    checkpoints.extend(
        [
            "models/llama3-like",
            "formats/torch-bin-views",
            "formats/torchchat-fused",
            "formats/torchchat-fused-bias",
            "formats/meta-consolidated-4",
            "formats/meta-consolidated-2-llama2style",
            "formats/gguf-mixed",
        ]
        .map(open),
    );
    for checkpoint in checkpoints {
        for TensorSpec { name, shape, .. } in manifest::tensors(checkpoint.model()) {
            let all = whole(&checkpoint, &name);
            let &[height, width] = shape.as_slice() else {
                let part = checkpoint.vector(&name, 3..5).unwrap();
                assert_eq!(part, all[3..5], "{name} of {:?}", checkpoint.path());
                continue;
            };
            let (part, columns) = (height / 3..height - 1, width / 3..width / 2 + 5);
            let mut next = part.start;
            let check = &mut |row: usize, values: &[f32]| {
                assert_eq!(row, next);
                next += 1;
                let expected = &all[row * width + columns.start..row * width + columns.end];
                assert_eq!(values, expected, "{name} of {:?}", checkpoint.path());
            };
            checkpoint.for_each_row(&name, part.clone(), columns.clone(), check).unwrap();
            assert_eq!(next, part.end);
        }
    }
}

#[test]
fn stored_rows_are_the_values() {
    let name = "model.layers.0.mlp.up_proj.weight";
    for (folder, dtype) in [("hf-bf16", DType::BF16), ("hf-single", DType::F32)] {
        let checkpoint = open(&format!("formats/{folder}"));
        assert_eq!(checkpoint.dtype(name).unwrap(), dtype);
        let all = whole(&checkpoint, name);
        let mut values = [0f32; 40];
        checkpoint
            .for_each_stored_row(name, 3..7, 8..48, &mut |row, bytes| {
                dtype.dequantise(bytes, &mut values);
                assert_eq!(values, all[row * 64 + 8..row * 64 + 48]);
            })
            .unwrap();
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let checkpoint = open("models/smollm-like");
    assert!(checkpoint.model().tied_embeddings);
    assert_eq!(whole(&checkpoint, manifest::HEAD), whole(&checkpoint, manifest::EMBEDDING));
}

#[test]
fn bad_requests_name_tensor_and_range() {
    let dummy = Checkpoint::dummy(&fixture("models/llama3-like/config.json"), 0).unwrap();
    assert_eq!(dummy.format(), Format::Dummy);
    for checkpoint in [open("models/llama3-like"), dummy] {
        let rows = |name: &str, rows, cols| {
            let result = checkpoint.for_each_row(name, rows, cols, &mut |_, _| {});
            result.unwrap_err().to_string()
        };
        let name = "model.layers.0.self_attn.k_proj.weight";
        for (message, parts) in [
            (rows("lm_tail.weight", 0..1, 0..1), ["lm_tail.weight", "no such tensor"]),
            (rows(name, 0..17, 0..1), [name, "0..17"]),
            (rows(name, 0..1, 0..65), ["[16, 64]", "0..65"]),
            (rows(name, 0..usize::MAX, 0..1), [name, "[16, 64]"]),
            (rows("model.norm.weight", 0..1, 0..1), ["model.norm.weight", "[64]"]),
            (checkpoint.vector(name, 0..1).unwrap_err().to_string(), [name, "[16, 64]"]),
            (
                checkpoint.vector("model.norm.weight", 0..65).unwrap_err().to_string(),
                ["model.norm.weight", "0..65"],
            ),
        ] {
            assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
        }
    }
}
