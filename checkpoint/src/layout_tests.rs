use super::*;
use crate::{config::tests::model, dtype::DType};

#[test]
fn names_go_both_ways() {
    for (meta, other) in [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.12.attention.wq.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("layers.0.feed_forward.w3.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ] {
        assert_eq!(hugging_face_name(meta), other);
        assert_eq!(meta_name(other), meta);
    }
    // What the layout does not have is nobody's name.
    for name in ["layers.x.attention.wq.weight", "layers.0.attention.wz.weight", "lm_head.weight"] {
        assert_eq!(hugging_face_name(name), format!("meta:{name}"));
    }
    assert_eq!(bare("_orig_mod.model.norm.weight"), "norm.weight");
}

fn fused(shape: &[usize], strides: Option<[usize; 2]>) -> StoredTensor {
    let (name, dtype) = ("layers.0.attention.wqkv.weight".to_owned(), DType::F16);
    let bytes = 2 * shape.iter().product::<usize>();
    StoredTensor { name, dtype, shape: shape.to_vec(), offset: 1000, bytes, strides }
}

#[test]
fn fused_rows_are_cut_by_heads() {
    // 9 heads and 3 of keys and values: 15 parts.
    let check = |tensor: StoredTensor, expected: [(usize, usize); 3]| {
        let slices = unfuse(&tensor, &model()).unwrap();
        let found = slices.map(|slice| (slice.shape[0], slice.offset));
        assert_eq!(found, expected, "{tensor:?}");
    };
    check(fused(&[960, 576], None), [(576, 1000), (192, 664_552), (192, 885_736)]);
    // Half of it, as one of two shards has; a bias; a transposed view.
    check(fused(&[480, 576], None), [(288, 1000), (96, 332_776), (96, 443_368)]);
    check(fused(&[960], None), [(576, 1000), (192, 2152), (192, 2536)]);
    check(fused(&[960, 576], Some([1, 960])), [(576, 1000), (192, 2152), (192, 2536)]);
    assert!(unfuse(&fused(&[961, 576], None), &model()).is_none());
}
