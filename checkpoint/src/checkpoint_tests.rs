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
fn every_layout_of_a_model_gives_the_same_values() {
    let model = "models/llama3-like";
    for other in ["hf-single", "hf-bf16", "hf-sharded", "hf-sharded-noindex"] {
        let other = format!("formats/{other}");
        check_same(model, &other);
        assert_eq!(open(model).model(), open(&other).model());
    }
    check_same(model, "models/llama3-like/model.safetensors");
}

#[test]
fn slices_are_parts_of_the_whole() {
    let dummy = Checkpoint::dummy(&fixture("models/llama3-like"), 3).unwrap();
    for checkpoint in [open("models/llama3-like"), dummy] {
        let name = "model.layers.1.mlp.down_proj.weight";
        let all = whole(&checkpoint, name);
        let mut rows = 0;
        let (part, width) = (5..9, 176);
        checkpoint
            .for_each_row(name, part.clone(), 33..90, &mut |row, values| {
                assert!(part.contains(&row));
                assert_eq!(values, &all[row * width + 33..row * width + 90]);
                rows += 1;
            })
            .unwrap();
        assert_eq!(rows, 4);
        let norm = "model.norm.weight";
        assert_eq!(checkpoint.vector(norm, 3..5).unwrap(), whole(&checkpoint, norm)[3..5]);
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
