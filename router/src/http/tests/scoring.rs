//! Scored prompts, in every shape that tells them.

use serde_json::{Value, json};

use super::{Server, fake::MISTY, undated};

const COMPLETIONS: &str = "/v1/completions";

async fn choices(server: &Server, body: Value) -> Vec<Value> {
    let answer = server.post(COMPLETIONS, &body).await;
    assert_eq!(answer.status, 200, "{body}: {answer:?}");
    answer.json()["choices"].as_array().expect("choices").clone()
}

/// A completion of "abc" whose fields are `fields`: its one choice's part named `part`.
async fn check(server: &Server, fields: Value, part: &str, expected: Value) {
    let mut body = json!({"prompt": "abc"});
    for (name, value) in fields.as_object().expect("fields") {
        body[name] = value.clone();
    }
    let choices = choices(server, body.clone()).await;
    assert_eq!(choices.len(), 1, "{body}");
    assert_eq!(choices[0][part], expected, "{part} of {body}");
}

#[tokio::test]
async fn an_echo_with_logprobs_scores_the_prompt() {
    let server = Server::start().await;
    let scoring = |max_tokens: u32, logprobs: u32| json!({"echo": true, "logprobs": logprobs, "max_tokens": max_tokens, "temperature": 0});
    // As lm_eval asks: one entry for each id, and one for the token that is generated.
    let arrays = json!({
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [null, -1.5, -2.5, -0.1],
        "tokens": ["a", "b", "c", "One"],
        "top_logprobs": [
            null, {"?": -0.25, "b": -1.5}, {"?": -0.25, "c": -2.5}, {"One": -0.1},
        ],
    });
    check(&server, scoring(1, 1), "logprobs", arrays).await;
    check(&server, scoring(1, 1), "text", json!("abcOne")).await;
    // Nothing generated: as many entries as ids.
    let arrays = json!({
        "text_offset": [0, 1, 2],
        "token_logprobs": [null, -1.5, -2.5],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [null, {"b": -1.5}, {"c": -2.5}],
    });
    check(&server, scoring(0, 0), "logprobs", arrays).await;
    check(&server, scoring(0, 0), "text", json!("abc")).await;
    check(&server, scoring(0, 0), "finish_reason", json!("length")).await;
    // From a start on.
    let mut late = scoring(0, 1);
    late["logprob_start_len"] = json!(2);
    let arrays = json!({
        "text_offset": [0, 1, 2],
        "token_logprobs": [null, null, -2.5],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [null, null, {"?": -0.25, "c": -2.5}],
    });
    check(&server, late, "logprobs", arrays).await;
    let asked = server.fake.take_requests();
    // The client counts its own tokens: none is put before them.
    assert!(asked.iter().all(|request| request.parameters.add_special_tokens == Some(false)));
}

#[tokio::test]
async fn prompts_are_scored_in_order_each_by_itself() {
    let server = Server::start().await;
    let body = json!({
        "prompt": [[97, 98, 99, 100], "x", [98, 97]], "echo": true, "logprobs": 1, "max_tokens": 1,
    });
    let choices = choices(&server, body).await;
    let indices: Vec<&Value> = choices.iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let logprobs: Vec<&Value> =
        choices.iter().map(|choice| &choice["logprobs"]["token_logprobs"]).collect();
    assert_eq!(*logprobs[0], json!([null, -1.5, -2.5, -3.5, -0.1]));
    assert_eq!(*logprobs[1], json!([null, -0.1]));
    assert_eq!(*logprobs[2], json!([null, -1.5, -0.1]));
}

/// The likeliest token keeps its place beside another of the same text, and what JSON cannot hold
/// is a finite number.
#[tokio::test]
async fn candidates_keep_apart_and_are_finite() {
    let server = Server::start().await;
    let body = json!({"prompt": MISTY, "echo": true, "logprobs": 1, "max_tokens": 0});
    let choice = choices(&server, body).await.remove(0);
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -9999.0]));
    let top = json!([null, {"?": -0.25, "token_id:63": -9999.0}]);
    assert_eq!(choice["logprobs"]["top_logprobs"], top);
}

#[tokio::test]
async fn prompt_logprobs_have_vllms_shape() {
    let server = Server::start().await;
    let candidate = |logprob: f32, rank: u32, text: &str| json!({"logprob": logprob, "rank": rank, "decoded_token": text});
    let fields = json!({"prompt_logprobs": 1, "max_tokens": 1});
    let expected = json!([
        null,
        {"98": candidate(-1.5, 3, "b"), "200": candidate(-0.25, 1, "?")},
        {"99": candidate(-2.5, 3, "c"), "200": candidate(-0.25, 1, "?")},
    ]);
    check(&server, fields.clone(), "prompt_logprobs", expected.clone()).await;
    check(&server, fields, "logprobs", Value::Null).await;
    // Each array has the number of candidates that was asked for it.
    let fields = json!({"prompt_logprobs": 0, "echo": true, "logprobs": 1, "max_tokens": 0});
    let own = json!([null, {"98": candidate(-1.5, 3, "b")}, {"99": candidate(-2.5, 3, "c")}]);
    check(&server, fields, "prompt_logprobs", own).await;
    let chat = json!({
        "messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 1, "max_tokens": 1,
    });
    let answer = server.post("/v1/chat/completions", &chat).await.json();
    assert_eq!(answer["prompt_logprobs"], expected);
}

#[tokio::test]
async fn a_stream_tells_the_prompts_scores_with_its_first_token() {
    let server = Server::start().await;
    let body = json!({
        "prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 2, "stream": true,
    });
    let events: Vec<Value> =
        server.post(COMPLETIONS, &body).await.events().into_iter().map(undated).collect();
    let logprobs = |index: usize| &events[index]["choices"][0]["logprobs"];
    assert_eq!(events[0]["choices"][0]["text"], "abOne");
    assert_eq!(logprobs(0)["token_logprobs"], json!([null, -1.5, -0.1]));
    assert_eq!(logprobs(0)["text_offset"], json!([0, 1, 2]));
    assert_eq!(logprobs(1)["token_logprobs"], json!([-0.1]));
    assert_eq!(logprobs(1)["text_offset"], json!([5]));
}

#[tokio::test]
async fn tgi_tells_the_prompts_tokens() {
    let server = Server::start().await;
    let body = json!({
        "inputs": "ab", "parameters": {"decoder_input_details": true, "max_new_tokens": 1},
    });
    let answer = server.post("/generate", &body).await.json();
    let prefill = json!([
        {"id": 97, "text": "a", "logprob": null}, {"id": 98, "text": "b", "logprob": -1.5},
    ]);
    assert_eq!(answer["details"]["prefill"], prefill);
    let refused = server.post("/generate_stream", &body).await;
    assert_eq!(refused.status, 422, "{refused:?}");
    assert!(refused.text().contains("decoder_input_details"), "{refused:?}");
}

#[tokio::test]
async fn what_cannot_be_scored_is_named() {
    let server = Server::start().await;
    for (fields, field) in [
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
        (json!({"echo": true, "logprobs": 1, "logprob_start_len": -1}), "logprob_start_len"),
        (json!({"echo": true, "logprobs": 1, "max_tokens": 0, "stream": true}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
    ] {
        let mut body = fields.clone();
        body["prompt"] = json!("hi");
        let answer = server.post(COMPLETIONS, &body).await;
        assert_eq!(answer.status, 400, "{fields}: {answer:?}");
        assert_eq!(answer.json()["error"]["param"], field, "{fields}");
    }
}
