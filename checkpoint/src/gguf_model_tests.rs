use super::hugging_face_name;
use crate::{Family, gguf::tests::Writer, gguf_metadata::Value};

fn text(text: &str) -> Option<Value> {
    Some(Value::Text(text.to_owned()))
}

fn integer(value: i128) -> Option<Value> {
    Some(Value::Integer(value))
}

/// The message for a file of these keys and no tensor; none removes a key.
fn refused(changes: &[(&str, Option<Value>)]) -> String {
    let mut keys = vec![
        ("general.architecture", text("llama")),
        ("llama.vocab_size", integer(64)),
        ("llama.embedding_length", integer(32)),
        ("llama.feed_forward_length", integer(48)),
        ("llama.block_count", integer(2)),
        ("llama.attention.head_count", integer(4)),
        ("llama.attention.head_count_kv", integer(2)),
        ("llama.context_length", integer(128)),
        ("llama.attention.layer_norm_rms_epsilon", Some(Value::Float(1e-5))),
    ];
    for (key, value) in changes {
        keys.retain(|(other, _)| other != key);
        keys.push((key, value.clone()));
    }
    let keys: Vec<_> = keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    let header = Writer::new(0, keys.len() as u64);
    let header = keys.iter().fold(header, |writer, (key, value)| writer.key(key, value));
    header.open(0).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn good_keys_lead_to_the_tensors() {
    let per_layer = |value| Some(Value::Integers(vec![value; 2]));
    for changes in [
        vec![],
        vec![("llama.attention.head_count_kv", None)],
        vec![("llama.attention.head_count", per_layer(4))],
        vec![
            ("llama.attention.key_length", integer(8)),
            ("llama.rope.dimension_count", integer(8)),
        ],
        vec![("llama.rope.scaling.type", text("none"))],
        vec![
            ("llama.rope.scaling.type", text("linear")),
            ("llama.rope.scaling.factor", Some(Value::Float(2.0))),
        ],
        vec![("llama.expert_count", integer(0)), ("split.count", integer(1))],
    ] {
        let message = refused(&changes);
        let missing = "`model.embed_tokens.weight`: expected shape [64, 32], found nothing";
        assert!(message.contains(missing), "{changes:?}: {message}");
    }
}

#[test]
fn bad_keys_are_named_with_their_value() {
    for (key, value, parts) in [
        ("general.architecture", text("gpt2"), &["gpt2", "llama", "qwen3moe"][..]),
        ("split.count", integer(3), &["3", "not supported yet"]),
        ("llama.expert_count", Some(Value::Float(2.0)), &["2", "whole number"]),
        ("llama.embedding_length", None, &["nothing"]),
        ("llama.embedding_length", text("32"), &["\"32\"", "whole number"]),
        ("llama.embedding_length", integer(30), &["30"]),
        ("llama.vocab_size", None, &["nothing"]),
        ("llama.vocab_size", integer(0), &["0"]),
        ("llama.block_count", integer(4_000_000_000), &["4000000000"]),
        ("llama.attention.head_count_kv", integer(3), &["3"]),
        ("llama.attention.head_count", Some(Value::Integers(vec![4, 2])), &["all layers"]),
        ("llama.rope.dimension_count", integer(4), &["4", "(8)"]),
        ("llama.attention.value_length", integer(16), &["16", "(8)"]),
        ("llama.attention.layer_norm_rms_epsilon", Some(Value::Float(f64::NAN)), &["NaN"]),
        ("llama.rope.freq_base", Some(Value::Float(-1.0)), &["-1"]),
        ("llama.rope.scaling.type", text("yarn"), &["yarn", "not supported yet"]),
        ("tokenizer.ggml.eos_token_id", integer(64), &["64", "llama.vocab_size"]),
        ("tokenizer.ggml.bos_token_id", integer(64), &["64", "llama.vocab_size"]),
    ] {
        let message = refused(&[(key, value)]);
        // A size that does not divide is told of the other one.
        let named = message.contains(key) || key == "llama.embedding_length";
        assert!(named && message.contains("model.gguf"), "{key}: {message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{key} {parts:?}: {message}");
    }
}

#[test]
fn mixtures_need_their_keys() {
    let check = |changes: &[(&str, Option<Value>)], parts: &[&str]| {
        let message = refused(changes);
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    };
    let count = ("llama.expert_count", integer(4));
    let used = |experts| ("llama.expert_used_count", integer(experts));
    check(std::slice::from_ref(&count), &["llama.expert_used_count", "nothing"]);
    check(&[count.clone(), used(5)], &["llama.expert_used_count", "5", "1 to 4"]);
    let many = ("llama.expert_count", integer(100_000));
    check(&[many, used(2)], &["llama.expert_count", "100000"]);
    // The tensors are looked for next.
    check(&[count, used(2)], &["`model.embed_tokens.weight`"]);
}

/// Names of gguf-py's `tensor_mapping.py`, by architecture.
#[test]
fn names_are_those_of_the_family() {
    for (family, gguf, expected) in [
        (Family::Llama, "token_embd.weight", Some("model.embed_tokens.weight")),
        (Family::Llama, "blk.3.attn_q.bias", Some("model.layers.3.self_attn.q_proj.bias")),
        (
            Family::Llama,
            "blk.3.ffn_norm.weight",
            Some("model.layers.3.post_attention_layernorm.weight"),
        ),
        (Family::Llama, "blk.3.post_ffw_norm.weight", None),
        (Family::Llama, "blk.3.ffn_up.weight", Some("model.layers.3.mlp.up_proj.weight")),
        (Family::Phi3, "blk.3.ffn_up.weight", Some("model.layers.3.mlp.gate_up_proj.weight")),
        (Family::Phi3, "blk.3.attn_qkv.weight", Some("model.layers.3.self_attn.qkv_proj.weight")),
        (
            Family::Gemma3,
            "blk.0.ffn_norm.weight",
            Some("model.layers.0.pre_feedforward_layernorm.weight"),
        ),
        (
            Family::Gemma3,
            "blk.0.post_ffw_norm.weight",
            Some("model.layers.0.post_feedforward_layernorm.weight"),
        ),
        (Family::Qwen3, "blk.0.attn_k_norm.weight", Some("model.layers.0.self_attn.k_norm.weight")),
        (Family::Qwen3Moe, "blk.0.ffn_gate_inp.weight", Some("model.layers.0.mlp.gate.weight")),
        (Family::Qwen3Moe, "blk.0.ffn_up_exps.weight", Some("model.layers.0.mlp.experts.up_proj")),
        // Files of before the experts were stacked.
        (
            Family::Mixtral,
            "blk.0.ffn_down.7.weight",
            Some("model.layers.0.block_sparse_moe.experts.7.w2.weight"),
        ),
        (Family::Llama, "blk.x.attn_q.weight", None),
        (Family::Llama, "blk.0.attn_q.scale", None),
    ] {
        assert_eq!(hugging_face_name(gguf, family).as_deref(), expected, "{family:?} {gguf}");
    }
}
