//! Bad input gets a clear error, at start before any process where possible, and serving goes on.

use std::{fs, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::TempDir;
use trireme_integration_tests::{
    fixture,
    server::{Server, ServerOptions},
};

/// A start that must be refused, naming every one of `words`.
fn check_refused(options: &ServerOptions, words: &[&str]) -> Result<()> {
    let (status, said) = options.refused(Duration::from_secs(10))?;
    assert!(!status.success(), "{options:?} was accepted: {said}");
    for word in words {
        assert!(said.contains(word), "{options:?}: {word:?} is not in the error: {said}");
    }
    assert!(!said.contains("panicked"), "{options:?} panicked: {said}");
    Ok(())
}

#[test]
fn impossible_starts_are_refused_with_the_reason() -> Result<()> {
    let model = fixture::path("models/smollm-like");
    let copy = TempDir::new()?;
    let truncated = copy.path().join("truncated");
    fs::create_dir(&truncated)?;
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model.join(file), truncated.join(file))?;
    }
    let weights = fs::read(model.join("model.safetensors"))?;
    fs::write(truncated.join("model.safetensors"), &weights[..weights.len() / 2])?;
    let empty = copy.path().join("empty");
    fs::create_dir(&empty)?;

    check_refused(&ServerOptions::new("/no/such/model"), &["/no/such/model"])?;
    check_refused(&ServerOptions::new(&empty), &["empty"])?;
    check_refused(&ServerOptions::new(&truncated), &["model.safetensors"])?;
    let broken = |name: &str| ServerOptions::new(fixture::path(&format!("broken/{name}")));
    check_refused(&broken("missing-tensor"), &["missing"])?;
    check_refused(&broken("unknown-architecture"), &["config.json", "architecture"])?;
    check_refused(&broken("no-weights"), &["no-weights"])?;
    // Nine heads do not split over ten ranks; five layers not over six stages.
    check_refused(&ServerOptions::new(&model).split(10, 1), &["tp 10", "legal"])?;
    check_refused(&ServerOptions::new(&model).split(1, 6), &["pp 6", "legal"])?;
    check_refused(&ServerOptions::new(&model).split(0, 1), &["tp"])?;
    Ok(())
}

/// One request, the status it must get, and the words its error must name.
struct Case {
    path: &'static str,
    body: Vec<u8>,
    status: u16,
    words: &'static [&'static str],
}

fn case(path: &'static str, body: Value, status: u16, words: &'static [&'static str]) -> Case {
    Case { path, body: body.to_string().into_bytes(), status, words }
}

fn cases() -> Vec<Case> {
    const COMPLETIONS: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let raw = |body: &[u8]| Case {
        path: COMPLETIONS,
        body: body.to_vec(),
        status: 400,
        words: &["message"],
    };
    let with = |field: &str, value: Value| {
        let mut body = json!({"prompt": "hi", "max_tokens": 2});
        body[field] = value;
        body
    };
    let message = json!([{"role": "user", "content": "hi"}]);
    vec![
        raw(b"{\"prompt\": \"hi\""),
        raw(b""),
        raw(b"[1, 2"),
        raw(b"{\"prompt\": \"\xff\xfe\"}"),
        Case { path: COMPLETIONS, body: vec![b' '; 50 << 20], status: 413, words: &["bytes"] },
        case(COMPLETIONS, with("max_tokens", json!(0)), 400, &["max_tokens", "0"]),
        case(COMPLETIONS, with("max_tokens", json!(-5)), 400, &["max_tokens"]),
        case(COMPLETIONS, with("max_tokens", json!("many")), 400, &["max_tokens"]),
        case(COMPLETIONS, with("temperature", json!(-1)), 400, &["temperature", "-1"]),
        case(COMPLETIONS, with("temperature", json!(1e30)), 400, &["temperature"]),
        case(COMPLETIONS, with("top_p", json!(0)), 400, &["top_p"]),
        case(COMPLETIONS, with("top_p", json!(1.5)), 400, &["top_p", "1.5"]),
        case(COMPLETIONS, with("top_k", json!(-7)), 400, &["top_k"]),
        case(COMPLETIONS, with("logprobs", json!(100_000)), 400, &["logprobs"]),
        case(COMPLETIONS, with("presence_penalty", json!(9)), 400, &["presence_penalty", "9"]),
        case(COMPLETIONS, with("logit_bias", json!({"99999999": 1})), 400, &["logit_bias"]),
        case(COMPLETIONS, with("stop", json!([""])), 400, &["stop"]),
        case(COMPLETIONS, with("prompt", json!([1, 999_999_999])), 400, &["prompt", "999999999"]),
        case(COMPLETIONS, with("prompt", json!([])), 400, &["prompt"]),
        case(COMPLETIONS, with("prompt", json!(vec![7; 9_000])), 400, &["prompt", "9000"]),
        case(COMPLETIONS, with("model", json!("gpt-7")), 404, &["gpt-7"]),
        case(COMPLETIONS, with("suffix", json!("tail")), 422, &["suffix"]),
        case(COMPLETIONS, json!({"max_tokens": 3}), 400, &["prompt"]),
        case(CHAT, json!({"messages": []}), 400, &["messages"]),
        case(CHAT, json!({"messages": "hello"}), 400, &["messages"]),
        case(CHAT, json!({"messages": message.clone(), "tools": [{}]}), 400, &["tools[0]"]),
        case(CHAT, json!({"messages": message, "max_completion_tokens": 0}), 400, &["max_"]),
        case("/v1/nothing", json!({}), 404, &["/v1/nothing"]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_an_error_that_names_what_is_wrong() -> Result<()> {
    let options =
        ServerOptions::new(fixture::smollm2()).split(2, 1).args(&["--max-model-len", "2048"]);
    let server = Server::start(&options)?;
    let client = server.client();
    for Case { path, body, status, words } in cases() {
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        let answer = client.post_bytes(path, body.into()).await?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, status, "{path} {shown}: {text}");
        let error = &answer.json()["error"];
        assert!(error["message"].is_string(), "{path} {shown}: not OpenAI's shape: {text}");
        for word in words {
            assert!(text.contains(word), "{path} {shown}: {word:?} is not in {text}");
        }
        // A stream with the same fault gets the same status, not a 200 with an error in it.
    }
    let good = client.post("/v1/completions", &json!({"prompt": "hi", "max_tokens": 3})).await?;
    assert_eq!(good.ok()["usage"]["completion_tokens"], 3, "the server goes on serving");
    let log = server.log();
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}
