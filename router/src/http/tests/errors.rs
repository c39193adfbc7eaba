//! What a client is told when it is wrong, or when the server cannot.

use http::{Method, header};
use http_body_util::Full;
use serde_json::{Value, json};

use super::{Answer, HttpConfig, Server, fake::TEXT};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The status, the code, the field, and a part of the message.
type Expected<'a> = (u16, &'a str, Option<&'a str>, &'a str);

fn check_answer(what: &str, answer: &Answer, (status, code, param, words): Expected) {
    assert_eq!(answer.status, status, "{what}: {answer:?}");
    assert_eq!(answer.headers["content-type"], "application/json", "{what}");
    let body = answer.json();
    let error = &body["error"];
    assert_eq!(body.as_object().unwrap().len(), 1, "{what}: {body}");
    let keys: Vec<_> = error.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"], "{what}");
    assert_eq!(error["code"], code, "{what}: {body}");
    assert_eq!(error["param"].as_str(), param, "{what}: {body}");
    assert!(error["message"].as_str().unwrap().contains(words), "{what}: {body}");
}

/// A body gets its error, whole and streamed: the status of a stream is true.
async fn check(server: &Server, path: &str, body: Value, expected: Expected<'_>) {
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = stream.into();
        let answer = server.post(path, &body).await;
        check_answer(&format!("{path} {body}"), &answer, expected);
    }
}

async fn check_bytes(server: &Server, body: &[u8], words: &str) {
    let answer = server.post_bytes(COMPLETIONS, body.to_vec()).await;
    let shown = String::from_utf8_lossy(body);
    check_answer(&shown, &answer, (400, "malformed_body", None, words));
}

#[tokio::test]
async fn bodies_that_are_not_json_are_told_where() {
    let server = Server::start().await;
    check_bytes(&server, b"", "line 1 column 0").await;
    check_bytes(&server, b"{\"prompt\": \"hi\"", "line 1 column 15").await;
    check_bytes(&server, b"{\"prompt\": \"\xff\xfe\"}", "invalid at byte 12").await;
    check_bytes(&server, b"[1, 2]", "must be a JSON object, this one is [1,2]").await;
    check_bytes(&server, b"{\"max_tokens\": 1e999}", "number out of range").await;
    let deep = [b"{\"prompt\":".to_vec(), vec![b'['; 5000]].concat();
    check_bytes(&server, &deep, "recursion limit").await;
}

#[tokio::test]
async fn wrong_fields_are_named_with_their_limit_and_value() {
    let server = Server::start().await;
    let with = |field: &str, value: Value| {
        let mut body = json!({"prompt": "hi"});
        body[field] = value;
        body
    };
    let invalid = |field, words| (400, "invalid_value", Some(field), words);
    for (field, value, words) in [
        ("max_tokens", json!(0), "max_tokens must be a whole number from 1 to 4294967295, got 0"),
        (
            "max_completion_tokens",
            json!(0),
            "max_completion_tokens must be a whole number from 1 to 4294967295, got 0",
        ),
        ("max_tokens", json!(-5), "from 1 to 4294967295, got -5"),
        ("max_tokens", json!(1.5), "got 1.5"),
        ("max_tokens", json!("many"), "got \"many\""),
        ("max_tokens", json!(99_999_999_999_999_999_999_999.0), "got 1e+23"),
        ("best_of", json!(129), "best_of must be at most 128, got 129"),
        ("temperature", json!("hot"), "temperature must be a finite number, got \"hot\""),
        ("top_k", json!(-7), "top_k must be -1, 0 or a positive number, got -7"),
        ("n", json!(0), "n must be a whole number from 1"),
        ("n", json!(1000), "n must be at most 128, got 1000"),
        ("stream_options", json!(true), "stream_options must be an object, got true"),
        ("logprobs", json!("all"), "logprobs must be"),
        ("logprobs", json!(21), "logprobs must be from 0 to 20, not 21"),
        ("prompt", json!("empty"), "prompt must have at least 1 token, not 0"),
        ("echo", json!("yes"), "echo must be true or false, got \"yes\""),
        ("prompt", json!([]), "prompt must not be an empty list"),
        ("prompt", json!({}), "prompt must be a string"),
        ("model", json!(7), "model must be a string, got 7"),
    ] {
        check(&server, COMPLETIONS, with(field, value), invalid(field, words)).await;
    }
    let missing = |field| (400, "missing_field", Some(field), "required");
    check(&server, COMPLETIONS, json!({"max_tokens": 3}), missing("prompt")).await;
    check(&server, CHAT, json!({"prompt": "hi"}), missing("messages")).await;
    check(&server, CHAT, json!({"messages": []}), invalid("messages", "empty list")).await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2});
    check(&server, CHAT, chat, invalid("top_logprobs", "needs logprobs")).await;
    let both = json!({"prompt": "hi", "max_tokens": 5, "max_completion_tokens": 6});
    let words = "max_completion_tokens is 6, but max_tokens, its older name, is 5";
    check(&server, COMPLETIONS, both, invalid("max_completion_tokens", words)).await;
    let alike = json!({"prompt": "hi", "max_tokens": 5, "max_completion_tokens": 5});
    assert_eq!(server.post(COMPLETIONS, &alike).await.status, 200);
    let fewer = json!({"prompt": "hi", "n": 3, "best_of": 2});
    check(&server, COMPLETIONS, fewer, invalid("best_of", "at least n, 3, got 2")).await;
    let unknown = json!({"prompt": [5, 99_999], "echo": true});
    let words = "prompt holds id 99999; the vocabulary has 256 ids";
    check(&server, COMPLETIONS, unknown, invalid("prompt", words)).await;
    let answer = server.post("/detokenize", &json!({"tokens": [5, 99_999]})).await;
    let words = "tokens holds id 99999; the vocabulary has 256 ids";
    check_answer("detokenize", &answer, invalid("tokens", words));
    let empty = json!({"prompt": ["a", "b", "empty"], "n": 2});
    let words = "prompt[2] must have at least 1 token, not 0";
    check(&server, COMPLETIONS, empty, invalid("prompt[2]", words)).await;
    let many = json!({"prompt": vec!["a"; 300], "n": 2});
    check(
        &server,
        COMPLETIONS,
        many,
        invalid("prompt", "600 answers, one request may ask for 512"),
    )
    .await;
}

#[tokio::test]
async fn more_answers_than_can_wait_are_refused_as_wrong() {
    let config = HttpConfig { max_choices: 3, ..HttpConfig::default() };
    let server = Server::with(config).await;
    let refused = |field, words| (400, "invalid_value", Some(field), words);
    let words = "n asks for 6 answers, one request may ask for 3";
    check(&server, COMPLETIONS, json!({"prompt": "hi", "n": 6}), refused("n", words)).await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "n": 6});
    check(&server, CHAT, chat, refused("n", words)).await;
    let words = "prompt asks for 4 answers, one request may ask for 3";
    let several = json!({"prompt": ["a", "b"], "n": 2});
    check(&server, COMPLETIONS, several, refused("prompt", words)).await;
    let words = "best_of asks for 4 answers, one request may ask for 3";
    let candidates = json!({"prompt": "hi", "best_of": 4});
    let answer = server.post(COMPLETIONS, &candidates).await;
    check_answer("best_of", &answer, refused("best_of", words));
    let most = json!({"prompt": "hi", "n": 3});
    assert_eq!(server.post(COMPLETIONS, &most).await.status, 200);
}

#[tokio::test]
async fn known_fields_that_are_not_built_are_refused_not_ignored() {
    let server = Server::start().await;
    for (path, field, value) in [
        (COMPLETIONS, "suffix", json!("tail")),
        (COMPLETIONS, "length_penalty", json!(2.0)),
        (COMPLETIONS, "detokenize", json!(false)),
        (COMPLETIONS, "chat_template", json!("{{ messages }}")),
        (COMPLETIONS, "store", json!(true)),
        (CHAT, "best_of", json!(2)),
        (COMPLETIONS, "use_beam_search", json!(true)),
        (COMPLETIONS, "response_format", json!({"type": "structural_tag"})),
        (CHAT, "tools", json!([{"type": "code"}])),
        (CHAT, "chat_template", json!("{{ messages }}")),
        (COMPLETIONS, "chat_template", json!("{{ messages }}")),
        (CHAT, "modalities", json!(["text", "audio"])),
    ] {
        let mut body = json!({"prompt": "hi", "messages": [{"role": "user", "content": "a"}]});
        body[field] = value;
        check(&server, path, body, (422, "unsupported_field", Some(field), field)).await;
    }
}

#[tokio::test]
async fn errors_of_the_core_keep_their_status_and_tell_no_secrets() {
    let server = Server::start().await;
    let prompt = |text: &str| json!({"prompt": text});
    let full = (429, "queue_full", None, "8 requests are waiting, the limit");
    check(&server, COMPLETIONS, prompt("full"), full).await;
    let answer = server.post(COMPLETIONS, &prompt("full")).await;
    assert_eq!(answer.headers["retry-after"], "3");
    let not_ready = (503, "not_ready", None, "the server is not ready: loading");
    check(&server, COMPLETIONS, prompt("not ready"), not_ready).await;
    assert_eq!(server.post(COMPLETIONS, &prompt("not ready")).await.headers["retry-after"], "1");
    let too_hot = (400, "invalid_value", Some("max_tokens"), "at most 9, got 10");
    check(&server, COMPLETIONS, prompt("too hot"), too_hot).await;
    check(&server, COMPLETIONS, prompt("broken"), (500, "internal_error", None, "internal error"))
        .await;
    let answer = server.post(COMPLETIONS, &prompt("broken")).await;
    assert!(!answer.text().contains("secret"), "{answer:?}");
    check(&server, COMPLETIONS, prompt("panic"), (500, "internal_error", None, "internal error"))
        .await;
    let model = json!({"prompt": "hi", "model": "gpt-7"});
    check(&server, COMPLETIONS, model, (404, "model_not_found", Some("model"), "\"gpt-7\"")).await;
    for name in ["tgi", "dummy"] {
        let model = json!({"prompt": "hi", "model": name});
        assert_eq!(server.post(COMPLETIONS, &model).await.status, 200, "as TGI's clients say");
    }
    // A failure before the end of an answer that is not streamed has a status, too.
    let answer = server.post(COMPLETIONS, &prompt("lost")).await;
    check_answer("lost", &answer, (503, "shard_lost", None, "lost"));
    // And the server goes on.
    assert_eq!(server.post(COMPLETIONS, &prompt("hi")).await.json()["choices"][0]["text"], TEXT);
}

#[tokio::test]
async fn routes_methods_and_media_are_checked() {
    let server = Server::start().await;
    let answer = server.post("/v1/nothing", &json!({})).await;
    check_answer("no route", &answer, (404, "unknown_route", None, "POST /v1/nothing"));
    let answer = server.get("/v1/models/org/other").await;
    check_answer("no model", &answer, (404, "model_not_found", Some("model"), "org/other"));
    let answer = server.get(COMPLETIONS).await;
    check_answer("method", &answer, (405, "wrong_method", None, "GET /v1/completions"));
    assert_eq!(answer.headers["allow"], "POST");
    for (given, status) in [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ] {
        let mut request = server.request(Method::POST, COMPLETIONS);
        request.headers_mut().unwrap().insert(header::CONTENT_TYPE, given.parse().unwrap());
        let body = Full::from(json!({"prompt": "hi"}).to_string());
        let answer = server.send(request.body(body).unwrap()).await;
        assert_eq!(answer.status, status, "{given}: {answer:?}");
    }
    for (given, status) in [("identity", 200), ("gzip", 415), ("br", 415)] {
        let request = server.request(Method::POST, COMPLETIONS).header("content-encoding", given);
        let body = Full::from(json!({"prompt": "hi"}).to_string());
        let answer = server.send(request.body(body).unwrap()).await;
        assert_eq!(answer.status, status, "{given}: {answer:?}");
    }
}

#[tokio::test]
async fn huge_bodies_are_refused_and_their_senders_told() {
    let server = Server::start().await;
    let answer = server.post_bytes(COMPLETIONS, vec![b' '; 50 << 20]).await;
    let words = "2097152 bytes, this one has 52428800 bytes";
    check_answer("announced", &answer, (413, "body_too_large", None, words));
    // The limit of a long context is what its ids take.
    let long = Server::with_model_len(200_000).await;
    let ids =
        json!({"prompt": vec![199_999; 199_000], "max_tokens": 3, "user": "x".repeat(1 << 20)});
    assert!(ids.to_string().len() > 2 << 20);
    assert_eq!(long.post(COMPLETIONS, &ids).await.status, 200);
    let answer = long.post_bytes(COMPLETIONS, vec![b' '; 3_200_001]).await;
    check_answer("long", &answer, (413, "body_too_large", None, "3200000 bytes"));
    let small =
        Server::with(HttpConfig { body_limit_bytes: Some(30), ..HttpConfig::default() }).await;
    let fits = br#"{"prompt": "123456789012345"} "#;
    assert_eq!(fits.len(), 30);
    assert_eq!(small.post_bytes(COMPLETIONS, fits.to_vec()).await.status, 200);
    let answer = small.post_bytes(COMPLETIONS, [&fits[..], b" "].concat()).await;
    check_answer("one more", &answer, (413, "body_too_large", None, "30 bytes"));
}

#[tokio::test]
async fn tgi_routes_speak_tgis_errors() {
    let server = Server::start().await;
    let with = |field: &str, value: Value| json!({"inputs": "hi", "parameters": {field: value}});
    for (body, status, kind, words) in [
        (json!({}), 422, "validation", "inputs"),
        (with("max_new_tokens", json!(0)), 422, "validation", "max_new_tokens"),
        (with("grammar", json!({"type": "json"})), 422, "validation", "grammar"),
        (with("best_of", json!(3)), 422, "validation", "best_of 3 needs sampling"),
        (with("typical_p", json!("1")), 422, "validation", "typical_p must be a finite number"),
        (with("top_n_tokens", json!(21)), 422, "validation", "top_n_tokens must be from 0 to 20"),
        (json!({"inputs": "full"}), 429, "overloaded", "8 requests"),
        (json!({"inputs": "not ready"}), 503, "healthcheck", "loading"),
        (json!({"inputs": "lost"}), 503, "shard_lost", "lost"),
    ] {
        let answer = server.post("/generate", &body).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        let said = answer.json();
        assert_eq!(said["error_type"], kind, "{body}: {said}");
        assert!(said["error"].as_str().unwrap().contains(words), "{body}: {said}");
    }
}
