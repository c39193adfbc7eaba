use crate::{gguf::tests::Writer, gguf_metadata::Value};

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
        ("general.architecture", text("qwen2"), &["qwen2", "llama"][..]),
        ("split.count", integer(3), &["3", "not supported yet"]),
        ("llama.expert_count", integer(8), &["8", "not supported yet"]),
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
