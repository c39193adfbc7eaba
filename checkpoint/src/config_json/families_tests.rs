use std::fs;

use serde_json::{Map, Value};

use crate::{
    Activation, Checkpoint, CheckpointError, Family, ModelConfig, RopeScaling, config_json::read,
    fixtures::fixture, json_file::read_object,
};

/// `config.json` of a fixture with `change` merged in (null removes), then read.
fn changed(model: &str, change: &str) -> Result<ModelConfig, CheckpointError> {
    let mut object = read_object(&fixture(&format!("models/{model}/config.json"))).unwrap();
    let change = serde_json::from_str::<Map<String, Value>>(change).unwrap();
    for (field, value) in change {
        match value {
            Value::String(word) if word == "absent" => object.remove(&field),
            value => object.insert(field, value),
        };
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, serde_json::to_string(&object).unwrap()).unwrap();
    read(&path)
}

fn check_refused(model: &str, change: &str, message: &[&str]) {
    let error = changed(model, change).expect_err(change).to_string();
    for part in message {
        assert!(error.contains(part), "{change}: `{part}` is not in: {error}");
    }
}

/// Configs as the hub has them, shortened to what is read.
const LLAMA_LIKE: [(&str, &str); 6] = [
    (
        "Llama 2 7B",
        r#"{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
            "vocab_size": 32000}"#,
    ),
    (
        "CodeLlama 34B",
        r#"{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22016,
            "max_position_embeddings": 16384, "model_type": "llama", "num_attention_heads": 64,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000, "vocab_size": 32000}"#,
    ),
    (
        "Llama 1 7B",
        r#"{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 32, "rms_norm_eps": 1e-06, "vocab_size": 32000}"#,
    ),
    (
        "TinyLlama 1.1B",
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
            "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 22, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "rope_theta": 10000.0, "vocab_size": 32000}"#,
    ),
    (
        "DeepSeek-R1-Distill-Llama-8B",
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
            "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
            "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
            "vocab_size": 128256}"#,
    ),
    (
        "DeepSeek-R1-Distill-Qwen-7B",
        r#"{"architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
            "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
            "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window": 4096,
            "tie_word_embeddings": false, "use_mrope": false, "use_sliding_window": false,
            "vocab_size": 152064}"#,
    ),
];

/// Parameters as the model cards count them.
#[test]
fn configs_of_the_hub_are_read() {
    for ((name, config), (parameters, kv_heads, head_dim, theta)) in LLAMA_LIKE.into_iter().zip([
        (6_738_415_616, 32, 128, 1e4),
        (33_743_970_304, 8, 128, 1e6),
        (6_738_415_616, 32, 128, 1e4),
        (1_100_048_384, 4, 64, 1e4),
        (8_030_261_248, 8, 128, 5e5),
        (7_615_616_512, 4, 128, 1e4),
    ]) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config).unwrap();
        let checkpoint = Checkpoint::dummy(folder.path(), 0).unwrap();
        assert_eq!(checkpoint.parameters(), parameters, "{name}");
        let model = checkpoint.model();
        let found = (model.kv_heads, model.head_dim, model.rope_theta);
        assert_eq!(found, (kv_heads, head_dim, theta), "{name}");
        assert_eq!(model.layer.qkv_bias, name.contains("Qwen"), "{name}");
        assert_eq!(model.layer.sliding, None, "{name}");
    }
}

#[test]
fn families_are_told_apart() {
    for (name, family) in [
        ("llama3-like", Family::Llama),
        ("mistral-like", Family::Mistral),
        ("mixtral-like", Family::Mixtral),
        ("qwen2-like", Family::Qwen2),
        ("qwen3-like", Family::Qwen3),
        ("qwen3-moe-like", Family::Qwen3Moe),
        ("granite-like", Family::Granite),
        ("gemma3-like", Family::Gemma3),
        ("phi3-like", Family::Phi3),
    ] {
        assert_eq!(changed(name, "{}").unwrap().family, family, "{name}");
        // The model's type serves where no class is named.
        let found = changed(name, r#"{"architectures": "absent"}"#).unwrap().family;
        assert_eq!(found, family, "{name}");
    }
}

#[test]
fn layers_are_what_the_config_says() {
    let windows = |model: &ModelConfig| -> Vec<_> {
        (0..model.layers).map(|layer| model.window(layer).unwrap_or(0)).collect()
    };
    let mistral = |change| windows(&changed("mistral-like", change).unwrap());
    assert_eq!(mistral("{}"), [8; 4]);
    assert_eq!(mistral(r#"{"sliding_window": null}"#), [0; 4]);
    assert_eq!(mistral(r#"{"sliding_window": "absent"}"#), [4096; 4], "transformers' default");
    let qwen2 = |change| windows(&changed("qwen2-like", change).unwrap());
    assert_eq!(qwen2("{}"), [0; 3]);
    assert_eq!(qwen2(r#"{"use_sliding_window": true}"#), [0, 0, 16]);
    let gemma = |change| changed("gemma3-like", change).unwrap();
    let model = gemma("{}");
    assert_eq!(windows(&model), [8, 8, 0, 8, 8, 0]);
    assert_eq!(windows(&gemma(r#"{"layer_types": "absent"}"#)), [8, 8, 8, 8, 8, 0]);
    let pattern = r#"{"layer_types": "absent", "sliding_window_pattern": 2}"#;
    assert_eq!(windows(&gemma(pattern)), [8, 0, 8, 0, 8, 0]);
    assert_eq!(model.layer.activation, Activation::GeluTanh);
    assert!((f64::from(model.attention_scale()) - 24f64.sqrt().recip()).abs() < 1e-7);
    assert!((f64::from(model.multipliers.embedding) - 80f64.sqrt()).abs() < 1e-6);
    assert!(model.tied_embeddings, "without saying so");

    let granite = changed("granite-like", "{}").unwrap();
    assert_eq!(granite.attention_scale(), 0.40625);
    let multipliers = (granite.multipliers.embedding, granite.multipliers.residual);
    assert_eq!((multipliers, granite.multipliers.logits), ((12.0, 2.5), 2.0));
    let biased = changed("granite-like", r#"{"attention_bias": true, "mlp_bias": true}"#).unwrap();
    assert!(biased.layer.qkv_bias && biased.layer.output_bias && biased.layer.mlp_bias);

    let qwen3 = changed("qwen3-like", r#"{"head_dim": "absent"}"#).unwrap();
    assert_eq!(qwen3.head_dim, 128, "transformers' default");
    let phi3 = changed("phi3-like", "{}").unwrap();
    assert_eq!((phi3.head_dim, phi3.rotary_dim), (16, 12));
    assert!(matches!(phi3.rope_scaling, RopeScaling::LongRope { attention_factor, .. }
        if (attention_factor - 1.118_033_988_749_895).abs() < 1e-12));
}

#[test]
fn mixtures_are_what_the_config_says() {
    let mixtral = changed("mixtral-like", "{}").unwrap().experts.unwrap();
    assert_eq!((mixtral.count, mixtral.per_token, mixtral.width), (4, 2, 96));
    assert!(mixtral.renormalise && mixtral.dense_layers.is_empty());
    let qwen3 = |change| changed("qwen3-moe-like", change).unwrap().experts.unwrap();
    let experts = qwen3("{}");
    assert_eq!((experts.count, experts.per_token, experts.width), (8, 2, 48));
    assert!(!qwen3(r#"{"norm_topk_prob": "absent"}"#).renormalise, "transformers' default");
    assert_eq!(qwen3(r#"{"mlp_only_layers": [1]}"#).dense_layers, [1]);
    assert_eq!(qwen3(r#"{"decoder_sparse_step": 2}"#).dense_layers, [0, 2]);
}

#[test]
fn yarn_is_read_with_its_defaults() {
    let yarn = |fields: &str| {
        let change = format!(r#"{{"rope_scaling": {{"type": "yarn", "factor": 4.0{fields}}}}}"#);
        changed("qwen3-like", &change).unwrap().rope_scaling
    };
    let RopeScaling::Yarn { original_max_position_embeddings, attention_factor, .. } = yarn("")
    else {
        panic!("yarn")
    };
    assert_eq!(original_max_position_embeddings, 512, "the model's own context");
    assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    let scaling = yarn(r#", "original_max_position_embeddings": 64, "attention_factor": 1.5"#);
    let RopeScaling::Yarn { original_max_position_embeddings, attention_factor, .. } = scaling
    else {
        panic!("yarn")
    };
    assert_eq!((original_max_position_embeddings, attention_factor), (64, 1.5));
}

#[test]
fn what_a_family_does_not_have_is_refused() {
    for (model, change, message) in [
        ("mistral-like", r#"{"mlp_bias": true}"#, &["mlp_bias", "false", "true"][..]),
        ("mistral-like", r#"{"sliding_window": 0}"#, &["sliding_window", "0", "at least 1"]),
        ("mistral-like", r#"{"hidden_act": "gelu"}"#, &["hidden_act", "gelu", "silu"]),
        ("mistral-like", r#"{"partial_rotary_factor": 0.5}"#, &["partial_rotary_factor", "0.5"]),
        ("gemma3-like", r#"{"attn_logit_softcapping": 50.0}"#, &["attn_logit_softcapping", "50"]),
        ("gemma3-like", r#"{"final_logit_softcapping": 30.0}"#, &["final_logit_softcapping"]),
        ("gemma3-like", r#"{"use_bidirectional_attention": true}"#, &["use_bidirectional"]),
        ("gemma3-like", r#"{"query_pre_attn_scalar": 0}"#, &["query_pre_attn_scalar", "0"]),
        ("gemma3-like", r#"{"layer_types": ["full_attention"]}"#, &["layer_types", "6"]),
        ("gemma3-like", r#"{"layer_types": "absent", "sliding_window_pattern": 0}"#, &["pattern"]),
        (
            "qwen2-like",
            r#"{"use_sliding_window": true, "layer_types": [1, 2, 3]}"#,
            &["layer_types"],
        ),
        ("granite-like", r#"{"logits_scaling": 0}"#, &["logits_scaling", "0"]),
        ("granite-like", r#"{"residual_multiplier": "x"}"#, &["residual_multiplier", "x"]),
        ("mixtral-like", r#"{"num_local_experts": "absent"}"#, &["num_local_experts", "nothing"]),
        ("mixtral-like", r#"{"num_local_experts": 100000}"#, &["100000"]),
        ("mixtral-like", r#"{"num_experts_per_tok": 5}"#, &["num_experts_per_tok", "5", "1 to 4"]),
        ("qwen3-moe-like", r#"{"decoder_sparse_step": 0}"#, &["decoder_sparse_step", "0"]),
        ("qwen3-moe-like", r#"{"moe_intermediate_size": 0}"#, &["moe_intermediate_size", "0"]),
        ("phi3-like", r#"{"partial_rotary_factor": 1.5}"#, &["partial_rotary_factor", "1.5"]),
        (
            "phi3-like",
            r#"{"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}"#,
            &["rope_scaling.short_factor", "6 positive numbers", "1 numbers"],
        ),
        ("qwen3-like", r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#, &["dynamic"]),
    ] {
        check_refused(model, change, message);
    }
}
