//! Whole answers, compared field by field.

use serde_json::{Value, json};

use super::{
    Server,
    fake::{FINGERPRINT, TEXT},
    undated,
};

/// The whole answer to one request.
async fn check(server: &Server, path: &str, body: Value, expected: Value) {
    let answer = server.post(path, &body).await;
    assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
    assert_eq!(answer.headers["x-request-id"], "test");
    assert_eq!(undated(answer.json()), expected, "{path} {body}");
}

fn usage(prompt: u64, completion: u64, cached: u64) -> Value {
    json!({
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

fn completion(choices: Value, usage: Value) -> Value {
    json!({
        "id": "cmpl-test", "object": "text_completion", "created": 0, "model": "org/tiny",
        "system_fingerprint": FINGERPRINT,
        "choices": choices, "usage": usage,
    })
}

fn choice(index: usize, text: &str, reason: &str) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason, "stop_reason": null})
}

#[tokio::test]
async fn completions_have_openais_shape() {
    const PATH: &str = "/v1/completions";
    let server = Server::start().await;
    let one = |text: &str, reason: &str| json!([choice(0, text, reason)]);
    check(&server, PATH, json!({"prompt": "hi"}), completion(one(TEXT, "stop"), usage(2, 5, 1)))
        .await;
    check(
        &server,
        PATH,
        json!({"model": "org/tiny", "prompt": "hi", "max_tokens": 2, "unknown": {"a": 1}}),
        completion(one("One two", "length"), usage(2, 2, 1)),
    )
    .await;
    check(
        &server,
        PATH,
        json!({"prompt": ["ab", "cde"], "max_tokens": 1, "n": 2}),
        completion(
            json!([
                choice(0, "One", "length"),
                choice(1, "One", "length"),
                choice(2, "One", "length"),
                choice(3, "One", "length"),
            ]),
            usage(5, 4, 2),
        ),
    )
    .await;
    check(
        &server,
        PATH,
        json!({"prompt": [[97, 98], [99]], "max_tokens": 1, "echo": true}),
        completion(
            json!([choice(0, "abOne", "length"), choice(1, "cOne", "length")]),
            usage(3, 2, 2),
        ),
    )
    .await;
    check(
        &server,
        PATH,
        json!({"prompt": "hi", "max_tokens": 0, "echo": true}),
        completion(one("hi", "length"), usage(3, 0, 0)),
    )
    .await;
    check(
        &server,
        PATH,
        json!({"prompt": "held back"}),
        completion(one("One twoé?", "stop"), usage(9, 5, 1)),
    )
    .await;
}

#[tokio::test]
async fn completions_tell_logprobs_ids_and_stop_reasons() {
    const PATH: &str = "/v1/completions";
    let server = Server::start().await;
    let mut expected = choice(0, "One two", "length");
    expected["logprobs"] = json!({
        "text_offset": [0, 3],
        "token_logprobs": [-0.1, -0.1],
        "tokens": ["One", " two"],
        "top_logprobs": [{"One": -0.1, "x": -2.5}, {" two": -0.1, "x": -2.5}],
    });
    let body = json!({"prompt": "hi", "max_tokens": 2, "logprobs": 2});
    check(&server, PATH, body, completion(json!([expected]), usage(2, 2, 1))).await;

    let mut expected = choice(0, "One two", "length");
    expected["prompt_token_ids"] = json!([104, 105]);
    expected["token_ids"] = json!([10, 11]);
    let body = json!({"prompt": "hi", "max_tokens": 2, "return_token_ids": true, "logprobs": null});
    check(&server, PATH, body, completion(json!([expected]), usage(2, 2, 1))).await;

    for (prompt, reason) in [("stopped by text", json!("END")), ("stopped by id", json!(7))] {
        let mut expected = choice(0, TEXT, "stop");
        expected["stop_reason"] = reason;
        let usage = usage(prompt.len() as u64, 5, 1);
        check(&server, PATH, json!({"prompt": prompt}), completion(json!([expected]), usage)).await;
    }
}

#[tokio::test]
async fn chat_has_openais_shape() {
    const PATH: &str = "/v1/chat/completions";
    let server = Server::start().await;
    let message = json!([{"role": "user", "content": "hi", "name": "bob"}]);
    let choice = |index: usize, logprobs: Value| {
        json!({
            "index": index,
            "message": {"role": "assistant", "content": "One", "refusal": null},
            "logprobs": logprobs,
            "finish_reason": "length",
            "stop_reason": null,
        })
    };
    let chat = |choices: Value, usage: Value| {
        json!({
            "id": "chatcmpl-test", "object": "chat.completion", "created": 0, "model": "org/tiny",
        "system_fingerprint": FINGERPRINT,
            "choices": choices, "usage": usage,
        })
    };
    check(
        &server,
        PATH,
        json!({"messages": message, "max_completion_tokens": 1, "n": 2, "tools": [], "tool_choice": "none"}),
        chat(json!([choice(0, Value::Null), choice(1, Value::Null)]), usage(2, 2, 1)),
    )
    .await;
    let entry = |token: &str, logprob: f64| json!({"token": token, "logprob": logprob, "bytes": token.as_bytes()});
    let mut chosen = entry("One", -0.1);
    chosen["top_logprobs"] = json!([entry("One", -0.1), entry("x", -2.5)]);
    let mut expected = chat(json!([choice(0, json!({"content": [chosen]}))]), usage(2, 1, 1));
    expected["prompt_token_ids"] = json!([104, 105]);
    expected["choices"][0]["token_ids"] = json!([10]);
    let body = json!({
        "messages": message, "max_tokens": 1, "logprobs": true, "top_logprobs": 2,
        "return_token_ids": true,
    });
    check(&server, PATH, body, expected).await;
}

#[tokio::test]
async fn tgi_routes_have_tgis_shape() {
    let server = Server::start().await;
    check(&server, "/generate", json!({"inputs": "hi"}), json!({"generated_text": TEXT})).await;
    let parameters =
        json!({"max_new_tokens": 1, "details": true, "return_full_text": true, "top_n_tokens": 1});
    let token = json!({"id": 10, "text": "One", "logprob": -0.1, "special": false});
    let details = |seed: Value| {
        json!({
            "finish_reason": "length", "generated_tokens": 1, "seed": seed, "prefill": [],
            "tokens": [token], "top_tokens": [[token]],
        })
    };
    check(
        &server,
        "/generate",
        json!({"inputs": "hi", "parameters": parameters}),
        json!({"generated_text": "hiOne", "details": details(Value::Null)}),
    )
    .await;
    let mut sampled = parameters.clone();
    sampled["do_sample"] = json!(true);
    sampled["seed"] = json!(5);
    check(
        &server,
        "/",
        json!({"inputs": "hi", "parameters": sampled}),
        json!([{"generated_text": "hiOne", "details": details(json!(5))}]),
    )
    .await;
}

#[tokio::test]
async fn tokens_have_vllms_shape() {
    let server = Server::start().await;
    let tokens = |ids: &[u32], strings: Value| json!({"count": ids.len(), "max_model_len": 2048, "tokens": ids, "token_strs": strings});
    let path = "/tokenize";
    check(&server, path, json!({"prompt": "ab"}), tokens(&[1, 97, 98], Value::Null)).await;
    let body = json!({"prompt": "a", "add_special_tokens": false, "return_token_strs": true});
    check(&server, path, body, tokens(&[97], json!(["a"]))).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    for field in ["messages", "prompt"] {
        check(&server, path, json!({field: messages}), tokens(&[60, 97, 62], Value::Null)).await;
    }
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "return_token_strs": true});
    check(&server, path, body, tokens(&[60, 97, 62], json!(["<", "a", ">"]))).await;
    let body = json!({"model": "org/tiny", "tokens": [97, 98]});
    check(&server, "/detokenize", body, json!({"prompt": "ab"})).await;
}

#[tokio::test]
async fn tokens_have_tgis_shape_too() {
    let server = Server::start().await;
    let place = |id: u32, text: &str, start: usize, stop: usize| json!({"id": id, "text": text, "start": start, "stop": stop});
    let expected = json!([place(1, "", 0, 0), place(97, "a", 0, 1), place(98, "b", 1, 2)]);
    check(&server, "/tokenize", json!({"inputs": "ab"}), expected).await;
    let body = json!({"inputs": "b", "add_special_tokens": false, "parameters": {"truncate": 9}});
    check(&server, "/tokenize", body, json!([place(98, "b", 0, 1)])).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    let expected = json!({
        "tokenize_response": [place(60, "<", 0, 1), place(97, "a", 1, 2), place(62, ">", 2, 3)],
        "templated_text": "<a>",
    });
    check(&server, "/chat_tokenize", json!({"messages": messages}), expected).await;
    let both = json!({"inputs": "a", "prompt": "b"});
    assert_eq!(server.post("/tokenize", &both).await.status, 400);
}

/// What a GET shows, in the fields that are named.
async fn check_get(server: &Server, path: &str, status: u16, expected: Value) {
    let answer = server.get(path).await;
    assert_eq!(answer.status, status, "{path}: {answer:?}");
    let body = answer.json();
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&body[key], value, "{path} {key} in {body}");
    }
}

#[tokio::test]
async fn the_server_describes_itself() {
    let server = Server::start().await;
    let card = json!({
        "id": "org/tiny", "object": "model", "created": 1_700_000_001, "owned_by": "trireme",
        "root": "org/tiny", "parent": null, "max_model_len": 2048,
    });
    check_get(&server, "/v1/models", 200, json!({"object": "list", "data": [card]})).await;
    check_get(&server, "/v1/models/org/tiny", 200, card).await;
    let info = json!({
        "model_id": "org/tiny", "model_dtype": "f32", "max_total_tokens": 2048, "tp": 2, "pp": 1,
        "max_input_tokens": 2047, "kv_blocks": 1000, "version": env!("CARGO_PKG_VERSION"),
    });
    check_get(&server, "/info", 200, info).await;
    check_get(&server, "/version", 200, json!({"version": env!("CARGO_PKG_VERSION")})).await;
    check_get(&server, "/tokenizer_info", 200, json!({"eos_token": "</s>"})).await;
}
