use std::fs;

use serde_json::Map;

use super::*;
use crate::{RopeScaling, fixtures::fixture};

/// `config.json` of llama3-like with `change` merged in (null removes), then read.
fn changed(change: &str) -> Result<ModelConfig, CheckpointError> {
    let source = fixture("models/llama3-like/config.json");
    let mut object = read_object(&source).unwrap();
    object.extend(serde_json::from_str::<Map<String, Value>>(change).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, serde_json::to_string(&object).unwrap()).unwrap();
    read(&path)
}

fn check_refused(change: &str, message: &[&str]) {
    let error = changed(change).expect_err(change).to_string();
    for part in message {
        assert!(error.contains(part), "{change}: `{part}` is not in: {error}");
    }
}

#[test]
fn both_styles_give_the_same_model() {
    for name in [
        "gemma3-like",
        "granite-like",
        "llama3-like",
        "mistral-like",
        "mixtral-like",
        "phi3-like",
        "qwen2-like",
        "qwen3-like",
        "qwen3-moe-like",
        "smollm-like",
    ] {
        let folder = fixture(&format!("models/{name}"));
        let (v4, v5) = (folder.join("config.json"), folder.join("config-v5.json"));
        assert_eq!(read(&v4).unwrap(), read(&v5).unwrap(), "{name}");
    }
}

#[test]
fn fields_are_what_the_file_says() {
    let model = read(&fixture("models/llama3-like/config.json")).unwrap();
    assert_eq!(model.eos_token_ids, [501, 507], "generation_config.json adds 501");
    assert_eq!((model.heads, model.kv_heads, model.head_dim), (8, 2, 8));
    assert_eq!((model.layers, model.intermediate_size, model.vocab_size), (4, 176, 512));
    assert_eq!((model.rope_theta, model.bos_token_id), (500.0, Some(500)));
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    };
    assert_eq!(model.rope_scaling, scaling);
    let model = read(&fixture("models/smollm-like/config.json")).unwrap();
    assert_eq!((model.head_dim, model.tied_embeddings), (16, true), "head_dim is derived");
}

#[test]
fn variants_are_read() {
    let linear = changed(r#"{"rope_scaling": {"type": "linear", "factor": 2}}"#).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let none = changed(r#"{"rope_scaling": null, "rope_theta": null}"#).unwrap();
    assert_eq!((none.rope_scaling, none.rope_theta), (RopeScaling::None, 10_000.0));
    let theta = changed(r#"{"rope_parameters": {"rope_theta": 7}}"#).unwrap();
    assert_eq!((theta.rope_scaling, theta.rope_theta), (RopeScaling::None, 7.0));
    assert_eq!(changed(r#"{"num_key_value_heads": null}"#).unwrap().kv_heads, 8);
    assert_eq!(changed(r#"{"eos_token_id": [9, 8, 9]}"#).unwrap().eos_token_ids, [8, 9]);
    assert_eq!(changed(r#"{"bos_token_id": null}"#).unwrap().bos_token_id, None);
    assert_eq!(changed(r#"{"architectures": null}"#).unwrap().family, Family::Llama);
}

#[test]
fn bad_fields_are_named_with_their_value() {
    for (change, message) in [
        (r#"{"architectures": ["GPT2LMHeadModel"]}"#, &["architectures", "GPT2LMHeadModel"][..]),
        (r#"{"architectures": null, "model_type": "gpt2"}"#, &["model_type", "gpt2", "llama"]),
        (r#"{"hidden_act": "gelu"}"#, &["hidden_act", "gelu", "silu"]),
        (r#"{"quantization_config": {"quant_method": "gptq"}}"#, &["quantization_config", "gptq"]),
        (r#"{"rope_scaling": {"rope_type": "frob", "factor": 2}}"#, &["rope_type", "frob"]),
        (r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#, &["type", "dynamic"]),
        (r#"{"rope_scaling": {"factor": 2}}"#, &["rope_scaling.rope_type", "nothing"]),
        (r#"{"rope_scaling": {"type": "linear"}}"#, &["rope_scaling.factor", "nothing"]),
        (r#"{"rope_scaling": {"type": "linear", "factor": 0}}"#, &["rope_scaling.factor", "0"]),
        (r#"{"rope_scaling": "frob"}"#, &["rope_scaling", "frob"]),
        (r#"{"hidden_size": null}"#, &["hidden_size", "nothing"]),
        (r#"{"hidden_size": "64"}"#, &["hidden_size", "\"64\""]),
        (r#"{"hidden_size": -64}"#, &["hidden_size", "-64"]),
        (r#"{"head_dim": null, "num_attention_heads": 7}"#, &["num_attention_heads", "7"]),
        (r#"{"head_dim": 7}"#, &["head_dim", "7", "even"]),
        (r#"{"num_attention_heads": 10000000, "head_dim": 1000}"#, &["head_dim", "1000"]),
        (r#"{"num_attention_heads": 0}"#, &["num_attention_heads", "0"]),
        (r#"{"num_key_value_heads": 3}"#, &["num_key_value_heads", "3"]),
        (r#"{"num_hidden_layers": 1000000000000}"#, &["num_hidden_layers", "1000000000000"]),
        (r#"{"rms_norm_eps": 0}"#, &["rms_norm_eps", "0"]),
        (r#"{"eos_token_id": 512}"#, &["eos_token_id", "512", "vocab_size"]),
        (r#"{"eos_token_id": "</s>"}"#, &["eos_token_id", "</s>"]),
        (r#"{"partial_rotary_factor": 0.5}"#, &["partial_rotary_factor", "0.5"]),
    ] {
        check_refused(change, message);
    }
}
