//! Calls of tools and thought, whole and in pieces.

use serde_json::{Value, json};

use super::Server;

const PATH: &str = "/v1/chat/completions";

fn body(answer: &str, extra: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": format!("say {answer}")}]});
    let fields = extra.as_object().expect("an object");
    body.as_object_mut().expect("an object").extend(fields.clone());
    body
}

/// The message that a stream's deltas make, with its finish reason.
async fn streamed(server: &Server, mut body: Value) -> (Value, Value) {
    body["stream"] = true.into();
    let events = server.post(PATH, &body).await.events();
    let (mut message, mut reason) = (json!({"content": null, "refusal": null}), Value::Null);
    for event in events.iter().filter(|event| event.is_object()) {
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        for field in ["content", "reasoning_content"] {
            if let Some(text) = delta[field].as_str().filter(|text| !text.is_empty()) {
                let before = message[field].as_str().unwrap_or_default();
                message[field] = format!("{before}{text}").into();
            }
        }
        if delta["role"] == "assistant" {
            message["role"] = "assistant".into();
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("an index") as usize;
            if message["tool_calls"].is_null() {
                message["tool_calls"] = json!([]);
            }
            let calls = message["tool_calls"].as_array_mut().expect("a list");
            if index == calls.len() {
                let mut whole = call.clone();
                whole.as_object_mut().expect("an object").remove("index");
                calls.push(whole);
            } else {
                let before = calls[index]["function"]["arguments"].as_str().unwrap_or_default();
                let more = call["function"]["arguments"].as_str().unwrap_or_default();
                calls[index]["function"]["arguments"] = format!("{before}{more}").into();
            }
        }
        reason = choice["finish_reason"].clone();
    }
    (message, reason)
}

/// Ids are random; their form is not.
fn without_ids(mut message: Value) -> Value {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let id = call["id"].take();
        let id = id.as_str().unwrap_or_default();
        assert!(id.starts_with("call_") && id.len() == 29, "{id}");
    }
    message
}

/// `calls`: names and arguments.
async fn check(
    server: &Server,
    answer: &str,
    extra: Value,
    texts: (Option<&str>, Option<&str>),
    calls: &[(&str, &str)],
) {
    let (content, reasoning) = texts;
    let mut expected = json!({"role": "assistant", "content": content, "refusal": null});
    if let Some(reasoning) = reasoning {
        expected["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        let call = |(name, arguments): &(&str, &str)| {
            json!({
                "id": null, "type": "function",
                "function": {"name": name, "arguments": arguments},
            })
        };
        expected["tool_calls"] = calls.iter().map(call).collect();
    }
    let reason = if calls.is_empty() { "stop" } else { "tool_calls" };
    let body = body(answer, &extra);
    let whole = server.post(PATH, &body).await;
    assert_eq!(whole.status, 200, "{answer}: {whole:?}");
    let choice = whole.json()["choices"][0].clone();
    assert_eq!(without_ids(choice["message"].clone()), expected, "{answer}");
    assert_eq!(choice["finish_reason"], reason, "{answer}");
    let (message, told) = streamed(server, body).await;
    assert_eq!(without_ids(message), expected, "{answer}, streamed");
    assert_eq!(told, reason, "{answer}, streamed");
}

#[tokio::test]
async fn calls_and_thoughts_are_told_apart() {
    let server = Server::start().await;
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = json!({"tools": [tool("f"), tool("g")]});
    let answer = "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>\n\
                  <tool_call>{\"name\": \"g\"}</tool_call>";
    let both = [("f", "{\"a\": [1, 2]}"), ("g", "{}")];
    check(&server, answer, tools.clone(), (Some("Hm."), None), &both).await;
    check(&server, &answer[4..], tools.clone(), (None, None), &both).await;
    let mut one = tools.clone();
    one["parallel_tool_calls"] = false.into();
    check(&server, answer, one, (Some("Hm."), None), &both[..1]).await;
    let mut none = tools.clone();
    none["tool_choice"] = "none".into();
    check(&server, answer, none, (Some(answer), None), &[]).await;
    check(&server, answer, json!({}), (Some(answer), None), &[]).await;
    let thought = "<think>\nA call?\n</think>\n\n<tool_call>{\"name\": \"g\"}</tool_call>";
    check(&server, thought, tools.clone(), (None, Some("A call?")), &both[1..]).await;
    let spoken = "<think>Well.</think>Yes.";
    check(&server, spoken, json!({}), (Some("Yes."), Some("Well.")), &[]).await;
    // A grammar begins after the thought.
    let format = json!({"response_format": {"type": "json_object"}});
    check(&server, spoken, format, (Some("Yes."), Some("Well.")), &[]).await;
    let request = server.fake.take_requests().pop().expect("a request");
    let thought = request.parameters.constraint.and_then(|constraint| constraint.thought);
    assert!(thought.is_some(), "the front has to know of it");
}

#[tokio::test]
async fn a_call_that_has_to_come_gets_a_grammar() {
    let server = Server::start().await;
    let tools =
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for (choice, has_grammar) in [
        (json!("auto"), false),
        (json!("none"), false),
        (json!("required"), true),
        (json!({"type": "function", "function": {"name": "f"}}), true),
    ] {
        let extra = json!({"tools": tools, "tool_choice": choice});
        let answer = server.post(PATH, &body("ok", &extra)).await;
        assert_eq!(answer.status, 200, "{choice}: {answer:?}");
        let request = server.fake.take_requests().pop().expect("a request");
        let grammar =
            request.parameters.constraint.map(|constraint| constraint.grammar.text.clone());
        assert_eq!(grammar.is_some(), has_grammar, "{choice}: {grammar:?}");
        assert!(grammar.is_none_or(|text| text.contains("<tool_call>")), "{choice}");
    }
    let extra = json!({"tools": tools, "tool_choice": "required", "guided_regex": "a"});
    let answer = server.post(PATH, &body("ok", &extra)).await;
    assert_eq!(answer.status, 400, "{answer:?}");
}
