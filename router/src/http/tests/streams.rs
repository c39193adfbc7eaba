//! Streams, event by event.

use serde_json::{Value, json};

use super::{
    Server,
    fake::{ANSWER, FINGERPRINT, TEXT},
    undated,
};

/// All events of the stream that answers one request.
async fn events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let answer = server.post(path, body).await;
    assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
    answer.events().into_iter().map(undated).collect()
}

fn chunk(index: usize, text: &str, reason: Option<&str>) -> Value {
    json!({
        "id": "cmpl-test", "object": "text_completion", "created": 0, "model": "org/tiny",
        "system_fingerprint": FINGERPRINT,
        "choices": [{
            "index": index, "text": text, "logprobs": null, "finish_reason": reason,
            "stop_reason": null,
        }],
    })
}

fn usage(prompt: u64, completion: u64, cached: u64) -> Value {
    json!({
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

#[tokio::test]
async fn completions_stream_one_event_for_each_token() {
    let server = Server::start().await;
    let plain = json!({"prompt": "hi", "stream": true});
    let mut expected: Vec<Value> = ANSWER.iter().map(|(_, text, _)| chunk(0, text, None)).collect();
    expected[4]["choices"][0]["finish_reason"] = json!("stop");
    expected.push(json!("[DONE]"));
    assert_eq!(events(&server, "/v1/completions", &plain).await, expected);

    // The totals come once, in an event of their own.
    let mut body = plain.clone();
    body["stream_options"] = json!({"include_usage": true});
    let mut with_usage = expected.clone();
    let mut totals = chunk(0, "", None);
    totals["choices"] = json!([]);
    totals["usage"] = usage(2, 5, 1);
    with_usage.insert(5, totals);
    assert_eq!(events(&server, "/v1/completions", &body).await, with_usage);

    // Or on every event too.
    body["stream_options"]["continuous_usage_stats"] = json!(true);
    for (index, event) in with_usage.iter_mut().take(5).enumerate() {
        event["usage"] = usage(2, index as u64 + 1, u64::from(index == 4));
    }
    assert_eq!(events(&server, "/v1/completions", &body).await, with_usage);
}

#[tokio::test]
async fn an_end_that_comes_late_has_an_event_of_its_own() {
    let server = Server::start().await;
    let body = json!({"prompt": "late", "stream": true, "max_tokens": 1, "echo": true});
    let expected = vec![chunk(0, "lateOne", None), chunk(0, "", Some("length")), json!("[DONE]")];
    assert_eq!(events(&server, "/v1/completions", &body).await, expected);
}

#[tokio::test]
async fn streamed_ids_and_logprobs_are_those_of_the_whole_answer() {
    let server = Server::start().await;
    let mut body = json!({"prompt": "held back", "logprobs": 1, "return_token_ids": true});
    let whole = server.post("/v1/completions", &body).await.json()["choices"][0].clone();
    body["stream"] = json!(true);
    let streamed = events(&server, "/v1/completions", &body).await;
    let choices: Vec<&Value> =
        streamed.iter().filter_map(|event| event["choices"].get(0)).collect();
    assert_eq!(choices.len(), 5);
    let gathered = |pointer: &str| {
        let lists = choices.iter().map(|choice| choice.pointer(pointer).unwrap());
        Value::from(lists.flat_map(|list| list.as_array().unwrap().clone()).collect::<Vec<_>>())
    };
    for pointer in
        ["/token_ids", "/logprobs/tokens", "/logprobs/text_offset", "/logprobs/top_logprobs"]
    {
        assert_eq!(&gathered(pointer), whole.pointer(pointer).unwrap(), "{pointer}");
    }
    assert_eq!(choices[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    assert!(choices[1..].iter().all(|choice| choice.get("prompt_token_ids").is_none()));
    let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["text"].as_str().unwrap());
}

#[tokio::test]
async fn choices_of_several_prompts_stream_side_by_side() {
    let server = Server::start().await;
    let body = json!({
        "prompt": ["ab", "c"], "n": 2, "stream": true, "stream_options": {"include_usage": true},
    });
    let events = events(&server, "/v1/completions", &body).await;
    for index in 0..4 {
        let of_choice = events.iter().filter_map(|event| event["choices"].get(0));
        let of_choice = of_choice.filter(|choice| choice["index"] == index);
        let text: String = of_choice.map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, TEXT, "choice {index}");
    }
    assert_eq!(events[events.len() - 2]["usage"], usage(3, 20, 2));
    assert_eq!(events[events.len() - 1], "[DONE]");
    let ids: Vec<_> = server.fake.take_requests().into_iter().map(|r| r.request_id).collect();
    assert_eq!(ids, ["test", "test-1", "test-2", "test-3"]);
}

#[tokio::test]
async fn chat_streams_the_role_and_then_each_token() {
    let server = Server::start().await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "stream": true, "return_token_ids": true,
        "stream_options": {"include_usage": true}, "max_tokens": 2,
    });
    let chunk = |delta: Value, reason: Option<&str>, ids: Value| {
        let mut choice = json!({
            "index": 0, "delta": delta, "logprobs": null, "finish_reason": reason,
            "stop_reason": null,
        });
        if !ids.is_null() {
            choice["token_ids"] = ids;
        }
        json!({
            "id": "chatcmpl-test", "object": "chat.completion.chunk", "created": 0,
            "model": "org/tiny", "system_fingerprint": FINGERPRINT, "choices": [choice],
        })
    };
    let mut opening = chunk(json!({"role": "assistant", "content": ""}), None, Value::Null);
    opening["prompt_token_ids"] = json!([104, 105]);
    let mut totals = chunk(json!({}), None, Value::Null);
    totals["choices"] = json!([]);
    totals["usage"] = usage(2, 2, 1);
    let expected = vec![
        opening,
        chunk(json!({"content": "One"}), None, json!([10])),
        chunk(json!({"content": " two"}), Some("length"), json!([11])),
        totals,
        json!("[DONE]"),
    ];
    assert_eq!(events(&server, "/v1/chat/completions", &body).await, expected);
}

#[tokio::test]
async fn tgi_streams_a_token_for_each_event_and_the_text_with_the_last() {
    let server = Server::start().await;
    let event = |index: u32, id: u32, text: &str, generated: Value, details: Value| {
        json!({
            "index": index,
            "token": {"id": id, "text": text, "logprob": -0.1, "special": id == 2},
            "generated_text": generated,
            "details": details,
        })
    };
    let details = |tokens: u32, reason: &str| json!({"finish_reason": reason, "generated_tokens": tokens, "seed": null, "input_length": 2});
    let mut expected: Vec<Value> = ANSWER
        .iter()
        .zip(1..)
        .map(|((id, text, _), index)| event(index, *id, text, Value::Null, Value::Null))
        .collect();
    expected[4]["generated_text"] = json!(TEXT);
    expected[4]["details"] = details(5, "eos_token");
    let body = json!({"inputs": "hi"});
    assert_eq!(events(&server, "/generate_stream", &body).await, expected);

    let body = json!({"inputs": "hi", "stream": true, "parameters": {"max_new_tokens": 1}});
    let expected = [event(1, 10, "One", json!("One"), details(1, "length"))];
    assert_eq!(events(&server, "/", &body).await, expected);
}

#[tokio::test]
async fn a_failure_after_the_head_is_an_event_that_begins_with_error() {
    let server = Server::start().await;
    let shard_lost = json!({"error": {
        "message": "the shards running this request were lost",
        "type": "service_unavailable_error", "param": null, "code": "shard_lost",
    }});
    let body = json!({"prompt": "lost", "stream": true});
    let answer = server.post("/v1/completions", &body).await;
    assert!(answer.text().contains("\ndata: {\"error\":{\"message\":"), "{answer:?}");
    let events = answer.events();
    assert_eq!(events[2..], [shard_lost, json!("[DONE]")]);

    let body = json!({"inputs": "lost"});
    let events = server.post("/generate_stream", &body).await.events();
    let message = "the shards running this request were lost";
    assert_eq!(events[2..], [json!({"error": message, "error_type": "shard_lost"})]);

    // A generation that stops without a word is told, too.
    let body = json!({"prompt": "unended", "stream": true});
    let events = server.post("/v1/completions", &body).await.events();
    assert_eq!(events[2]["error"]["code"], "internal_error");
}
