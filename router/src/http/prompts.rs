//! The forms a prompt can take: on `/v1/completions` a string, a list of strings, a list of ids,
//! a list of lists of ids, or a conversation; on chat routes a conversation.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    fields::{must_be, shown, token_id},
    refusal::Refusal,
};
use crate::api::{Conversation, Prompt};

const FORMS: &str = "a string, a list of strings, a list of token ids, or a list of lists of them";

/// A conversation's JSON schema.
pub fn messages_shape() -> Value {
    let part = json!({
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    });
    let content = json!({"anyOf": [
        {"type": ["string", "null"]},
        {"type": "array", "items": part},
    ]});
    let message = json!({
        "type": "object",
        "properties": {"role": {"type": "string", "minLength": 1}, "content": content},
        "required": ["role"],
    });
    json!({"type": "array", "minItems": 1, "items": message})
}

/// One prompt for each entry, in order.
pub fn completion_prompts(value: Value) -> Result<Vec<Prompt>, Refusal> {
    const FIELD: &str = "prompt";
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => return Err(must_be(FIELD, FORMS, &other)),
    };
    match items.first() {
        None => Err(Refusal::invalid(FIELD, "prompt must not be an empty list")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Ids(ids(FIELD, &items)?)]),
        // lm_eval sends conversations this way when it leaves the template to the server.
        Some(Value::Object(_)) => {
            let conversation = Conversation::to_answer(messages(FIELD, items)?);
            Ok(vec![Prompt::Conversation(Arc::new(conversation))])
        }
        Some(_) => items
            .into_iter()
            .enumerate()
            .map(|(index, item)| {
                let field = format!("{FIELD}[{index}]");
                match item {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(list) if list.is_empty() => {
                        Err(Refusal::invalid(&field, format!("{field} must not be an empty list")))
                    }
                    Value::Array(list) => Ok(Prompt::Ids(ids(&field, &list)?)),
                    other => Err(must_be(&field, "a string or a list of token ids", &other)),
                }
            })
            .collect(),
    }
}

/// The messages of a conversation, checked in form.
pub fn conversation(value: Value) -> Result<Vec<Value>, Refusal> {
    match value {
        Value::Array(items) if items.is_empty() => {
            Err(Refusal::invalid("messages", "messages must not be an empty list"))
        }
        Value::Array(items) => messages("messages", items),
        other => Err(must_be("messages", "a list of messages", &other)),
    }
}

fn ids(field: &str, items: &[Value]) -> Result<Vec<u32>, Refusal> {
    items.iter().map(|item| token_id(field, item)).collect()
}

fn messages(field: &str, items: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| message(&format!("{field}[{index}]"), item))
        .collect()
}

fn message(field: &str, mut item: Value) -> Result<Value, Refusal> {
    let Some(map) = item.as_object_mut() else {
        return Err(must_be(field, "a message with role and content", &item));
    };
    match map.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        None => return Err(Refusal::invalid(field, format!("{field}.role is required"))),
        Some(other) => return Err(must_be(&format!("{field}.role"), "a string", other)),
    }
    match map.get_mut("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(content @ Value::Array(_)) => {
            let parts = content.take();
            *content = text_parts(&format!("{field}.content"), &parts)?;
        }
        Some(other) => {
            return Err(must_be(&format!("{field}.content"), "a string or a list of parts", other));
        }
    }
    Ok(item)
}

/// The parts of a message, all of them text, in OpenAI's shape.
fn text_parts(field: &str, parts: &Value) -> Result<Value, Refusal> {
    let mut texts = Vec::new();
    for (index, part) in parts.as_array().into_iter().flatten().enumerate() {
        let field = format!("{field}[{index}]");
        match (part.get("type").and_then(Value::as_str), part.get("text"), part) {
            (_, _, Value::String(text)) | (Some("text") | None, Some(Value::String(text)), _) => {
                texts.push(json!({"type": "text", "text": text}));
            }
            (Some("text") | None, _, _) => {
                return Err(Refusal::invalid(
                    &field,
                    format!("{field}.text must be a string, got {}", shown(part)),
                ));
            }
            (Some(kind), _, _) => {
                let message = format!("{field} of type {kind:?} is not supported, only \"text\"");
                return Err(Refusal::unsupported(&field, message));
            }
        }
    }
    Ok(Value::Array(texts))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check_prompts(value: Value, expected: Result<&str, &str>) {
        match (completion_prompts(value.clone()), expected) {
            (Ok(prompts), Ok(expected)) => assert_eq!(format!("{prompts:?}"), expected, "{value}"),
            (Err(refusal), Err(expected)) => {
                assert!(refusal.message.contains(expected), "{value}: {}", refusal.message);
            }
            (given, expected) => panic!("{value}: {given:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn prompts_take_every_form_or_are_named() {
        check_prompts(json!("hi"), Ok(r#"[Text("hi")]"#));
        check_prompts(json!(["a", "b"]), Ok(r#"[Text("a"), Text("b")]"#));
        check_prompts(json!([1, 2]), Ok("[Ids([1, 2])]"));
        check_prompts(json!([[1], [2, 3]]), Ok("[Ids([1]), Ids([2, 3])]"));
        check_prompts(json!(["a", [2]]), Ok(r#"[Text("a"), Ids([2])]"#));
        check_prompts(json!([]), Err("prompt must not be an empty list"));
        check_prompts(json!([[1], []]), Err("prompt[1] must not be an empty list"));
        check_prompts(json!([1, "a"]), Err("prompt must be token ids"));
        check_prompts(json!([1, -2]), Err("got -2"));
        check_prompts(json!([[1], [4294967296u64]]), Err("prompt[1] must be token ids"));
        check_prompts(json!(["a", true]), Err("prompt[1] must be"));
        check_prompts(json!(7), Err("got 7"));
        check_prompts(
            json!([{"role": "user", "content": "a"}, {"content": "b"}]),
            Err("prompt[1].role"),
        );
    }

    fn check_conversation(value: Value, expected: Result<Value, &str>) {
        match (conversation(value.clone()), expected) {
            (Ok(messages), Ok(expected)) => assert_eq!(json!(messages), expected, "{value}"),
            (Err(refusal), Err(expected)) => {
                assert!(refusal.message.contains(expected), "{value}: {}", refusal.message);
            }
            (given, expected) => panic!("{value}: {given:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn conversations_are_checked() {
        let named = json!([{"role": "user", "content": "a", "name": "bob"}]);
        check_conversation(named.clone(), Ok(named));
        check_conversation(
            json!([{"role": "user", "content": ["a", {"text": "b"}]}]),
            Ok(
                json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            ),
        );
        check_conversation(
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            Err("messages[0].content[0] of type \"image_url\" is not supported"),
        );
        check_conversation(
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            Err("content[0].text"),
        );
        check_conversation(json!([]), Err("messages must not be"));
        check_conversation(json!("hello"), Err("messages must be"));
        check_conversation(json!([{"role": 3}]), Err("messages[0].role must be a string"));
        check_conversation(
            json!([{"role": "user", "content": 3}]),
            Err("messages[0].content must be"),
        );
        check_conversation(json!(["a"]), Err("messages[0] must be"));
    }
}
