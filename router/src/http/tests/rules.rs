//! What a server must do for benchmark tools to run on it unmodified: the rules of
//! docs/benchmarks.md, by their numbers, as the parsers of vllm bench, sglang.bench_serving,
//! guidellm, aiperf and inference-benchmarker have them.

use std::time::Duration;

use axum::body::Bytes;
use http::Method;
use http_body_util::Full;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::{
    Answer, Server,
    fake::{ANSWER, TEXT},
    lifecycle::open,
};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn body(path: &str, more: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "hi"}]}),
        _ => json!({"prompt": "hi"}),
    };
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The stream that answers this on either route, without its end.
async fn events(path: &str, more: &Value) -> (Answer, Vec<Value>) {
    let server = Server::start().await;
    let mut body = body(path, more);
    body["stream"] = json!(true);
    let answer = server.post(path, &body).await;
    let mut events = answer.events();
    assert_eq!(events.pop(), Some(json!("[DONE]")), "{path}");
    (answer, events)
}

#[tokio::test]
async fn rule_1_no_comments_and_no_names_in_a_stream() {
    for path in [COMPLETIONS, CHAT] {
        let (answer, _) = events(path, &json!({})).await;
        for line in answer.text().lines() {
            assert!(line.is_empty() || line.starts_with("data: "), "{path}: {line}");
        }
    }
}

#[tokio::test]
async fn rule_2_an_event_without_choices_comes_once_and_only_when_asked_for() {
    let empty = |events: &[Value]| events.iter().filter(|e| e["choices"] == json!([])).count();
    for path in [COMPLETIONS, CHAT] {
        let (_, plain) = events(path, &json!({})).await;
        assert_eq!(empty(&plain), 0, "{path}");
        let (_, told) = events(path, &json!({"stream_options": {"include_usage": true}})).await;
        assert_eq!(empty(&told), 1, "{path}");
        let last = told.last().unwrap();
        assert_eq!((&last["choices"], last["usage"].is_object()), (&json!([]), true), "{path}");
    }
}

#[tokio::test]
async fn rule_3_every_event_has_its_text_or_its_delta() {
    let (_, completions) = events(COMPLETIONS, &json!({})).await;
    assert!(completions.iter().all(|event| event["choices"][0]["text"].is_string()));
    let (_, chat) = events(CHAT, &json!({})).await;
    assert!(chat.iter().all(|event| event["choices"][0]["delta"].is_object()));
}

#[tokio::test]
async fn rule_4_nothing_comes_before_the_first_token() {
    let server = Server::start().await;
    let body = r#"{"prompt": "hang at once", "stream": true}"#;
    let mut stream = open(&server, COMPLETIONS, body).await;
    let mut seen = Vec::new();
    // The head comes at once; nothing follows for as long as one would wait.
    while let Ok(read) = tokio::time::timeout(Duration::from_millis(300), async {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await.unwrap();
        buffer[..count].to_vec()
    })
    .await
    {
        assert!(!read.is_empty(), "the stream is open");
        seen.extend(read);
    }
    let seen = String::from_utf8(seen).unwrap();
    assert!(seen.starts_with("HTTP/1.1 200"), "{seen}");
    assert!(!seen.contains("data:"), "{seen}");
    let (_, chat) = events(CHAT, &json!({})).await;
    assert_eq!(chat[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
}

#[tokio::test]
async fn rule_5_one_event_for_each_token_even_without_text() {
    assert!(ANSWER.iter().any(|(_, text, _)| text.is_empty()));
    let (_, completions) = events(COMPLETIONS, &json!({})).await;
    assert_eq!(completions.len(), ANSWER.len());
    let (_, chat) = events(CHAT, &json!({})).await;
    assert_eq!(chat.len(), 1 + ANSWER.len());
    assert_eq!(chat[3]["choices"][0]["delta"], json!({"content": ""}), "no role again");
}

#[tokio::test]
async fn rule_6_usage_counts_ids_not_text() {
    for path in [COMPLETIONS, CHAT] {
        let server = Server::start().await;
        let usage = server.post(path, &body(path, &json!({}))).await.json()["usage"].clone();
        assert_eq!(usage["prompt_tokens"], 2, "{path}");
        // Two of the tokens have no text of their own.
        assert_eq!(usage["completion_tokens"], ANSWER.len(), "{path}");
        assert_eq!(usage["total_tokens"], 2 + ANSWER.len(), "{path}");
    }
}

#[tokio::test]
async fn rule_7_lengths_and_the_end_of_sequence_are_as_asked() {
    for path in [COMPLETIONS, CHAT] {
        for limit in ["max_tokens", "max_completion_tokens"] {
            let server = Server::start().await;
            let more = json!({limit: 2, "min_tokens": 2, "ignore_eos": true});
            let answer = server.post(path, &body(path, &more)).await.json();
            assert_eq!(answer["choices"][0]["finish_reason"], "length", "{path}");
            let parameters = server.fake.take_requests().remove(0).parameters;
            assert_eq!(parameters.max_new_tokens, Some(2), "{path} {limit}");
            assert!(parameters.ignore_eos && parameters.min_new_tokens == 2, "{path}");
        }
    }
}

#[tokio::test]
async fn rule_8_what_changes_nothing_is_taken() {
    let idle = json!({
        "best_of": 1, "stop": null, "user": "somebody", "repetition_penalty": 1.0,
        "lora_path": null, "unknown": {"to": ["all"]},
    });
    for (path, more) in
        [(COMPLETIONS, json!({"logprobs": null, "suffix": null})), (CHAT, json!({}))]
    {
        let server = Server::start().await;
        let mut given = body(path, &idle);
        for (name, value) in more.as_object().unwrap() {
            given[name] = value.clone();
        }
        if path == CHAT {
            given["messages"][0]["name"] = json!("aiperf");
        }
        let answer = server.post(path, &given).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        let plain = server.post(path, &body(path, &json!({}))).await.json();
        assert_eq!(answer.json()["choices"], plain["choices"], "{path}");
    }
}

#[tokio::test]
async fn rule_9_prompts_take_all_four_forms() {
    for (prompt, texts) in [
        (json!("hi"), vec!["hi"]),
        (json!(["a", "b"]), vec!["a", "b"]),
        (json!([104, 105]), vec!["hi"]),
        (json!([[97], [98]]), vec!["a", "b"]),
    ] {
        let server = Server::start().await;
        let answer =
            server.post(COMPLETIONS, &json!({"prompt": prompt, "echo": true, "n": 2})).await.json();
        for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["index"], index, "{prompt}");
            assert_eq!(choice["text"], format!("{}{TEXT}", texts[index / 2]), "{prompt}");
        }
    }
}

#[tokio::test]
async fn rule_10_objects_and_ids_have_their_names() {
    for (path, id, whole, part) in [
        (COMPLETIONS, "cmpl-", "text_completion", "text_completion"),
        (CHAT, "chatcmpl-", "chat.completion", "chat.completion.chunk"),
    ] {
        let server = Server::start().await;
        let answer = server.post(path, &body(path, &json!({}))).await.json();
        assert_eq!(answer["object"], whole);
        assert!(answer["id"].as_str().unwrap().starts_with(id));
        let (_, events) = events(path, &json!({})).await;
        for event in events {
            assert_eq!(event["object"], part);
            assert_eq!(event["id"], answer["id"]);
        }
        let models = server.get("/v1/models").await.json();
        assert_eq!(
            (&models["object"], &models["data"][0]["object"]),
            (&json!("list"), &json!("model"))
        );
    }
}

#[tokio::test]
async fn rule_11_a_failure_on_the_way_is_told_before_the_end() {
    let (answer, events) = events(COMPLETIONS, &json!({"prompt": "lost"})).await;
    assert!(answer.text().contains("\ndata: {\"error\":"), "the first key: {answer:?}");
    assert!(events.last().unwrap()["error"]["message"].is_string());
}

#[tokio::test]
async fn rule_12_what_tools_ask_before_and_after_a_run_is_there() {
    let server = Server::start().await;
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.get("/v1/models").await.json()["data"][0]["max_model_len"], 2048);
    let ids = json!({"model": "org/tiny", "prompt": "ab", "add_special_tokens": false});
    assert_eq!(server.post("/tokenize", &ids).await.json()["tokens"], json!([97, 98]));
    let text = json!({"model": "org/tiny", "tokens": [97, 98]});
    assert_eq!(server.post("/detokenize", &text).await.json()["prompt"], "ab");
    // Not known, and said so: tools go on without.
    for path in ["/start_profile", "/server_info", "/model_info"] {
        assert_eq!(server.post(path, &json!({})).await.status, 404);
    }
}

#[tokio::test]
async fn rule_13_usage_on_every_event_leaves_the_choices_in() {
    for path in [COMPLETIONS, CHAT] {
        let options = json!({"include_usage": true, "continuous_usage_stats": true});
        let (_, events) = events(path, &json!({"stream_options": options})).await;
        assert!(events.iter().all(|event| event["usage"]["prompt_tokens"] == 2), "{path}");
        let (last, others) = events.split_last().unwrap();
        assert!(others.iter().all(|event| event["choices"].as_array().unwrap().len() == 1));
        assert_eq!(last["choices"], json!([]), "{path}");
        let counts: Vec<_> =
            events.iter().map(|e| e["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted(), "{counts:?}");
    }
}

#[tokio::test]
async fn rule_14_nothing_is_compressed_and_both_versions_of_http_are_spoken() {
    let server = Server::start().await;
    let given = json!({"prompt": "hi", "stream": true}).to_string();
    let request = server.request(Method::POST, COMPLETIONS).header("accept-encoding", "gzip, br");
    let answer = server.send(request.body(Full::from(given.clone())).unwrap()).await;
    assert!(!answer.headers.contains_key("content-encoding"), "{answer:?}");
    assert!(!answer.headers.contains_key("connection"), "kept alive: {answer:?}");
    let second: Client<_, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let request = server.request(Method::POST, COMPLETIONS).body(Full::from(given)).unwrap();
    let answer = second.request(request).await.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (http::Version::HTTP_2, 200));
}

#[tokio::test]
async fn rule_15_the_prefix_cache_can_be_emptied_between_runs() {
    let server = Server::start().await;
    for (path, resets) in [("/reset_prefix_cache", 1), ("/flush_cache", 2)] {
        assert_eq!(server.post_bytes(path, "").await.status, 200);
        assert_eq!(server.fake.resets.load(std::sync::atomic::Ordering::Relaxed), resets);
    }
}
