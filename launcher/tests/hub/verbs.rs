//! The verbs that know a Hub, run as a user runs them.

use std::process::{Command, Output};

use tempfile::TempDir;

use super::{
    noise,
    server::{COMMIT, HubServer},
};

struct User {
    folder: TempDir,
    endpoint: String,
}

impl User {
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_trireme"))
            .args(arguments)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.folder.path().join("hf"))
            .env("TRIREME_CACHE", self.folder.path().join("trireme"))
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_TOKEN")
            .output()
            .unwrap()
    }

    /// What it said, where it ended with this code.
    fn says(&self, arguments: &[&str], code: i32) -> (String, String) {
        let output = self.run(arguments);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (out, error) = (text(output.stdout), text(output.stderr));
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {out}{error}");
        (out, error)
    }
}

/// A repository with the shape of a model and no weights worth the name.
fn server() -> HubServer {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}"#;
    HubServer::start(&[
        ("config.json", config.into()),
        ("model.safetensors", noise(120_000, 5)),
        ("tokenizer.json", b"{}".to_vec()),
    ])
}

#[test]
fn a_model_is_downloaded_listed_found_and_removed() {
    let server = server();
    let user = User { folder: tempfile::tempdir().unwrap(), endpoint: server.endpoint() };
    let (_, error) = user.says(&["where", "org/model"], 3);
    assert!(error.contains("`trireme download org/model` fetches it"), "{error}");
    let (_, error) = user.says(&["inspect", "org/model"], 3);
    assert!(error.contains("`trireme download org/model` fetches it"), "{error}");
    assert!(server.state().seen.is_empty(), "where and inspect ask nobody");
    let (path, error) = user.says(&["download", "org/model"], 0);
    assert!(path.trim_end().ends_with(COMMIT), "{path}");
    for part in ["asking http://127.0.0.1", "fetching model.safetensors: 117.2 KiB", "is here, at"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(user.says(&["where", "org/model"], 0).0, path);
    assert_eq!(user.says(&["where", &format!("org/model@{COMMIT}")], 0).0, path);
    let (listed, _) = user.says(&["list"], 0);
    assert!(listed.starts_with("org/model\t117.5 KiB\t"), "{listed}");
    let (listed, _) = user.says(&["list", "--json"], 0);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["commit"], COMMIT);
    assert_eq!(listed[0]["missing"], serde_json::Value::Null);
    let (shape, _) = user.says(&["inspect", "org/model", "--load-format", "dummy"], 0);
    assert!(shape.contains("layers      2"), "{shape}");
    let (removed, _) = user.says(&["remove", "org/model"], 0);
    assert!(removed.contains("removed") && removed.contains("models--org--model"), "{removed}");
    user.says(&["where", "org/model"], 3);
    assert!(!user.says(&["list"], 0).0.contains("org/model"));
}

/// Verbs that serve fetch what is absent. The split is impossible: nothing is started.
#[test]
fn what_is_to_be_served_is_fetched_first() {
    let server = server();
    let user = User { folder: tempfile::tempdir().unwrap(), endpoint: server.endpoint() };
    let serve = |code| {
        let arguments = ["serve", "org/model", "--port", "0", "--grpc-port", "0", "--pp", "3"];
        user.says(&[&arguments[..], &["--load-format", "dummy"]].concat(), code)
    };
    let (_, error) = serve(4);
    assert!(error.contains("fetching model.safetensors"), "{error}");
    server.state().seen.clear();
    let (_, error) = serve(4);
    assert!(!error.contains("fetching"), "{error}");
    assert!(server.state().seen.is_empty());
}
