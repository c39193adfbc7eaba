//! What of a body reaches the chat template.

use serde_json::{Value, json};

use super::Server;
use crate::api::Prompt;

const CHAT: &str = "/v1/chat/completions";

fn body(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The conversation that a request becomes, as an object of what is not usual.
async fn check(server: &Server, fields: Value, expect: Value) {
    let answer = server.post(CHAT, &body(fields.clone())).await;
    assert_eq!(answer.status, 200, "{fields}: {answer:?}");
    let request = server.fake.take_requests().pop().unwrap();
    let Prompt::Conversation(given) = request.prompt else { panic!("{:?}", request.prompt) };
    let found = json!({
        "messages": given.messages, "documents": given.documents, "variables": given.variables,
        "begins": given.add_generation_prompt, "continues": given.continue_final_message,
    });
    for (name, value) in expect.as_object().unwrap() {
        assert_eq!(&found[name], value, "{fields}: {name}");
    }
}

#[tokio::test]
async fn fields_for_the_template_reach_it() {
    let server = Server::start().await;
    let plain = json!({"documents": null, "variables": {}, "begins": true, "continues": false});
    check(&server, json!({}), plain.clone()).await;
    check(&server, json!({"documents": [], "chat_template_kwargs": {}, "tools": []}), plain).await;
    let documents = json!([{"title": "a", "text": "b"}]);
    check(&server, json!({"documents": documents}), json!({"documents": documents})).await;
    let variables = json!({"enable_thinking": false});
    check(&server, json!({"chat_template_kwargs": variables}), json!({"variables": variables}))
        .await;
    let goes_on = json!({"begins": false, "continues": true});
    check(&server, json!({"continue_final_message": true}), goes_on).await;
    check(&server, json!({"add_generation_prompt": false}), json!({"begins": false})).await;
    let messages = json!([
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
            "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
    ]);
    check(&server, json!({"messages": messages}), json!({"messages": messages})).await;
}

#[tokio::test]
async fn wrong_fields_for_the_template_are_named() {
    let server = Server::start().await;
    for (fields, field, words) in [
        (json!({"chat_template_kwargs": 3}), "chat_template_kwargs", "an object, got 3"),
        (json!({"chat_template_kwargs": {"bos_token": "x"}}), "chat_template_kwargs", "bos_token"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs", "messages"),
        (json!({"documents": {}}), "documents", "a list of objects"),
        (json!({"documents": [{}, "x"]}), "documents[1]", "an object"),
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
            "both",
        ),
    ] {
        let answer = server.post(CHAT, &body(fields.clone())).await;
        assert_eq!(answer.status, 400, "{fields}: {answer:?}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], field, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
}
