//! A message in the form that templates expect.

use serde_json::{Map, Value};

use super::source::KnownForms;

/// Without what is null; the arguments of a tool call as an object. What the template does not
/// know is put as what it does: text parts as one string, joined by newlines, no content as an
/// empty one, `developer` as `system`.
pub fn normal(message: &Value, known: KnownForms) -> Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let mut normal: Map<String, Value> = fields
        .iter()
        .filter(|(name, value)| !value.is_null() || *name == "content")
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    if !known.developer && normal.get("role").is_some_and(|role| role == "developer") {
        normal.insert("role".to_owned(), "system".into());
    }
    // OpenAI's clients leave out the content of a turn that only calls tools.
    if normal.contains_key("tool_calls") {
        normal.entry("content").or_insert(Value::Null);
    }
    if let Some(content) = normal.get_mut("content") {
        match content {
            Value::Array(parts) if !known.parts && parts.iter().all(is_text) => {
                let texts: Vec<&str> = parts.iter().filter_map(text_of).collect();
                *content = texts.join("\n").into();
            }
            Value::Null if !known.none => *content = "".into(),
            _ => {}
        }
    }
    for call in normal.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments") {
            read_arguments(arguments);
        }
    }
    Value::Object(normal)
}

fn is_text(part: &Value) -> bool {
    text_of(part).is_some()
}

fn text_of(part: &Value) -> Option<&str> {
    part.get("text").and_then(Value::as_str)
}

/// OpenAI's clients send JSON in a string, templates write JSON of a value.
fn read_arguments(arguments: &mut Value) {
    let Some(text) = arguments.as_str() else { return };
    if text.trim().is_empty() {
        *arguments = Value::Object(Map::new());
    } else if let Ok(value @ Value::Object(_)) = serde_json::from_str(text) {
        *arguments = value;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOTHING: KnownForms = KnownForms { parts: false, none: false, developer: false };

    fn check(message: Value, known: KnownForms, expected: Value) {
        assert_eq!(normal(&message, known), expected, "{message}");
    }

    #[test]
    fn messages_take_the_form_of_templates() {
        check(
            json!({"role": "user", "content": "a"}),
            NOTHING,
            json!({"role": "user", "content": "a"}),
        );
        check(json!({"role": "developer", "name": null}), NOTHING, json!({"role": "system"}));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        check(json!({"content": parts}), NOTHING, json!({"content": "a\nb"}));
        check(
            json!({"content": parts}),
            KnownForms { parts: true, ..NOTHING },
            json!({"content": parts}),
        );
        let call = |arguments: Value| json!({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
        let mut given = call(json!("{\"b\": 1, \"a\": [2]}"));
        given["content"] = Value::Null;
        check(given.clone(), NOTHING, call(json!({"b": 1, "a": [2]})));
        given.as_object_mut().unwrap().remove("content");
        check(given, NOTHING, call(json!({"b": 1, "a": [2]})));
        check(call(json!("")), NOTHING, call(json!({})));
        check(call(json!("[1")), NOTHING, call(json!("[1")));
        check(call(json!({"x": 1})), NOTHING, call(json!({"x": 1})));
    }

    #[test]
    fn a_template_gets_what_it_knows() {
        let message = json!({"role": "developer", "content": null});
        check(message.clone(), NOTHING, json!({"role": "system", "content": ""}));
        check(message.clone(), KnownForms { none: true, developer: true, ..NOTHING }, message);
    }
}
