//! The bodies that benchmark and evaluation tools send, as they send them, and the answers that
//! their parsers can read.

use serde_json::{Value, json};

use super::{Server, fake::TEXT};
use crate::api::{Parameters, Prompt};

/// Sends a body and checks the stream by the strictest of the parsers: every chunk has a known
/// object and a first choice with text or a delta, except one last chunk with the usage.
async fn check(path: &str, body: Value) -> (Prompt, Parameters) {
    let server = Server::start().await;
    let asked_usage = body["stream_options"]["include_usage"] == true;
    let chat = path.contains("chat");
    let answer = server.post(path, &body).await;
    assert_eq!(answer.status, 200, "{body}: {answer:?}");
    let mut events = answer.events();
    assert_eq!(events.pop(), Some(json!("[DONE]")), "{body}");
    if asked_usage {
        let last = events.pop().unwrap();
        assert_eq!(last["choices"], json!([]), "{body}");
        assert_eq!(last["usage"]["completion_tokens"], 5, "{body}");
    }
    let object = if chat { "chat.completion.chunk" } else { "text_completion" };
    let mut text = String::new();
    for event in &events {
        assert_eq!(event["object"], object, "{body}");
        let choice = &event["choices"][0];
        let part = if chat { &choice["delta"]["content"] } else { &choice["text"] };
        text += part.as_str().unwrap_or_else(|| panic!("{body}: {event}"));
    }
    assert_eq!(text, TEXT, "{body}");
    let openings = usize::from(chat);
    assert_eq!(events.len(), 5 + openings, "{body}: one event for each token");
    let request = server.fake.take_requests().pop().unwrap();
    (request.prompt, request.parameters)
}

#[tokio::test]
async fn completions_of_benchmark_tools_stream() {
    const PATH: &str = "/v1/completions";
    // vllm bench serve
    let (_, parameters) = check(
        PATH,
        json!({
            "model": "org/tiny", "prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 128,
            "logprobs": null, "stream": true, "stream_options": {"include_usage": true},
            "ignore_eos": true,
        }),
    )
    .await;
    assert!(parameters.ignore_eos && !parameters.logprobs);
    assert_eq!(parameters.max_new_tokens, Some(128));
    // sglang.bench_serving --backend vllm
    let (_, parameters) = check(
        PATH,
        json!({
            "model": "org/tiny", "prompt": "hi", "best_of": 1, "max_tokens": 64, "stream": true,
            "temperature": 0.0, "ignore_eos": true,
        }),
    )
    .await;
    assert_eq!(parameters.temperature, Some(0.0));
    // guidellm
    check(
        PATH,
        json!({
            "prompt": "hi", "max_tokens": 64, "stop": null, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        }),
    )
    .await;
    // aiperf
    let body = json!({"model": "org/tiny", "prompt": ["hi"], "max_tokens": 64, "stream": true});
    let (prompt, _) = check(PATH, body).await;
    assert!(matches!(prompt, Prompt::Text(text) if text == "hi"));
}

#[tokio::test]
async fn chats_of_benchmark_tools_stream() {
    const PATH: &str = "/v1/chat/completions";
    // vllm bench serve --backend openai-chat, guidellm, aiperf (with a name)
    let (_, parameters) = check(
        PATH,
        json!({
            "model": "org/tiny", "messages": [{"role": "user", "content": "hi", "name": "aiperf"}],
            "max_completion_tokens": 128, "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        }),
    )
    .await;
    assert_eq!(parameters.max_new_tokens, Some(128));
    // sglang-oai-chat
    let (_, parameters) = check(
        PATH,
        json!({
            "model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], "stream": true,
            "max_completion_tokens": 128, "temperature": 0.0, "ignore_eos": true,
        }),
    )
    .await;
    assert!(parameters.ignore_eos);
    // Hugging Face inference-benchmarker
    check(
        PATH,
        json!({
            "model": "org/tiny", "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 128, "stream": true, "stop": null, "temperature": 0.0,
        }),
    )
    .await;
}

#[tokio::test]
async fn lm_eval_gets_its_texts_in_order() {
    let server = Server::start().await;
    let body = json!({
        "prompt": [[104, 105], [97]], "model": "org/tiny", "max_tokens": 256, "temperature": 0,
        "stop": ["\n\n", "</s>"], "seed": 1234, "num_beams": 1, "do_nothing": true,
    });
    let answer = server.post("/v1/completions", &body).await.json();
    let indices: Vec<_> =
        answer["choices"].as_array().unwrap().iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [0, 1]);
    let requests = server.fake.take_requests();
    for (request, ids) in requests.iter().zip([vec![104, 105], vec![97]]) {
        assert!(matches!(&request.prompt, Prompt::Ids(given) if *given == ids));
        assert_eq!(request.parameters.seed, Some(1234));
        assert_eq!(request.parameters.stop, ["\n\n", "</s>"]);
    }
    let conversation = json!({"prompt": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    assert_eq!(server.post("/v1/completions", &conversation).await.status, 200);
    let request = server.fake.take_requests().pop().unwrap();
    assert!(matches!(request.prompt, Prompt::Conversation(given) if given.messages.len() == 1));
}
