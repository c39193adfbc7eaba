use super::*;
use crate::{Family, RopeScaling};

const HEAD: MetaTensors = MetaTensors {
    embedding: Some(([32_000, 2048], [16_000, 2048])),
    has_bias: false,
    has_head: true,
};

fn read_params(params: Value) -> Result<ModelConfig, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("params.json"), params.to_string()).unwrap();
    read(folder.path(), Path::new("consolidated.00.pth"), &HEAD).map_err(|error| error.to_string())
}

fn with(field: &str, value: Value) -> Value {
    let mut params = json!({"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000});
    params[field] = value;
    params
}

/// Widths of the MLP as the published models have them.
#[test]
fn widths_follow_from_the_params() {
    for (dim, multiple_of, multiplier, expected) in [
        (4096, Some(256), None, 11_008),
        (5120, Some(256), None, 13_824),
        (8192, Some(4096), Some(1.3), 28_672),
        (4096, Some(1024), Some(1.3), 14_336),
        (2048, Some(256), Some(1.5), 8192),
        (3072, Some(256), Some(1.0), 8192),
        (288, None, None, 768),
    ] {
        let mut params = json!({"dim": dim, "n_layers": 2, "n_heads": 16, "vocab_size": 100});
        params["multiple_of"] = json!(multiple_of);
        params["ffn_dim_multiplier"] = json!(multiplier);
        assert_eq!(read_params(params).unwrap().intermediate_size, expected, "{dim}");
    }
    assert_eq!(read_params(with("hidden_dim", json!(22))).unwrap().intermediate_size, 22);
}

#[test]
fn both_ways_to_say_a_thing_are_read() {
    for (field, value) in [("n_kv_heads", 8), ("n_local_heads", 8)] {
        assert_eq!(read_params(with(field, json!(value))).unwrap().kv_heads, 8);
    }
    assert_eq!(read_params(with("n_local_heads", json!(-1))).unwrap().kv_heads, 32);
    for field in ["rope_theta", "rope_base"] {
        assert_eq!(read_params(with(field, json!(7e5))).unwrap().rope_theta, 7e5);
    }
    // The vocabulary of a table that is split by columns is that of each part.
    assert_eq!(HEAD.vocabulary(2048), Some(32_000));
    assert_eq!(HEAD.vocabulary(4096), Some(16_000));
    assert_eq!(read_params(with("vocab_size", json!(-1))).unwrap().vocab_size, 16_000);
}

#[test]
fn contexts_are_those_the_models_were_trained_for() {
    let context = |params| read_params(params).unwrap().max_position_embeddings;
    assert_eq!(context(with("norm_eps", json!(1e-6))), 2048);
    assert_eq!(context(with("norm_eps", json!(1e-5))), 4096);
    assert_eq!(context(with("rope_theta", json!(500_000.0))), 8192);
    assert_eq!(context(with("rope_theta", json!(1e6))), 16_384);
    assert_eq!(context(with("use_scaled_rope", json!(true))), 131_072);
    assert_eq!(context(with("block_size", json!(300))), 300);
}

#[test]
fn scaled_rope_without_numbers_is_that_of_llama_31() {
    let model = read_params(with("use_scaled_rope", json!(true))).unwrap();
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(model.rope_scaling, expected);
    assert_eq!(
        read_params(with("use_scaled_rope", json!(false))).unwrap().rope_scaling,
        RopeScaling::None
    );
}

#[test]
fn variants_are_families_of_their_own() {
    let mistral = read_params(with("sliding_window", json!(4096))).unwrap();
    assert_eq!(mistral.family, Family::Mistral);
    assert_eq!(mistral.layer.sliding.map(|sliding| sliding.window), Some(4096));
    let mut params = with("embedding_multiplier", json!(12.0));
    params["logits_scaling"] = json!(8.0);
    let granite = read_params(params).unwrap();
    assert_eq!(granite.family, Family::Granite);
    assert_eq!(granite.multipliers.embedding, 12.0);
    let folder = Path::new("models/x");
    let biased = MetaTensors { has_bias: true, ..HEAD };
    let params = with("n_kv_heads", json!(8));
    let qwen = parse(folder, params.as_object().unwrap(), &biased).unwrap();
    assert!(qwen.family == Family::Qwen2 && qwen.layer.qkv_bias);
}

#[test]
fn bad_params_are_refused_in_their_own_words() {
    let mut contradiction = with("use_scaled_rope", json!(false));
    contradiction["rope_scaling"] = json!({"factor": 8.0});
    for (params, parts) in [
        (with("dim", json!("wide")), ["`dim`", "wide"]),
        (with("dim", Value::Null), ["`dim`", "nothing"]),
        (with("n_layers", json!(0)), ["`n_layers`", "found 0"]),
        (with("n_heads", json!(31)), ["`n_heads`", "divisor of dim"]),
        (with("n_kv_heads", json!(5)), ["`n_kv_heads`", "divisor of n_heads"]),
        (with("norm_eps", json!(-1)), ["`norm_eps`", "positive"]),
        (with("multiple_of", json!(0)), ["`multiple_of`", "found 0"]),
        (with("moe", json!({"num_experts": 8})), ["`moe`", "num_experts"]),
        (with("rope_scaling", json!(8)), ["`rope_scaling`", "object"]),
        (contradiction, ["`rope_scaling`", "use_scaled_rope"]),
    ] {
        let message = read_params(params).unwrap_err();
        let parts = parts.iter().chain(&["params.json"]);
        for part in parts {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
}

#[test]
fn models_without_params_are_known_by_name() {
    for (folder, file, dim, layers) in [
        ("models/x", "stories15M.pt", 288, 6),
        ("models/stories110M", "model.pth", 768, 12),
        ("hub/Meta-Llama-3.1-8B-Instruct", "model.pth", 4096, 32),
        ("hub/meta_llama_3.2_1b", "model.pth", 2048, 16),
        ("hub/Llama-2-13B-chat", "consolidated.00.pth", 5120, 40),
    ] {
        let model = read(Path::new(folder), Path::new(file), &HEAD).unwrap();
        assert_eq!((model.hidden_size, model.layers), (dim, layers), "{folder}/{file}");
    }
    let unknown = read(Path::new("models/x"), Path::new("model.pth"), &HEAD).unwrap_err();
    assert!(unknown.to_string().contains("params.json"), "{unknown}");
    let table: Map<String, Value> = serde_json::from_str(TORCHCHAT_MODELS).unwrap();
    for (name, object) in table {
        let object = object.as_object().unwrap();
        parse(Path::new(&name), object, &HEAD).unwrap_or_else(|error| panic!("{error}"));
    }
}
