//! The OpenAPI document against the server that it describes.

use http::Method;
use serde_json::{Map, Value, json};

use super::{Answer, Server};
use crate::http::{
    conversation,
    fields::field::{Field, Form},
    refusal::Dialect,
    routes::{Operation, table},
};

fn operations() -> Vec<Operation> {
    table().into_iter().map(|(operation, _)| operation).collect()
}

/// A body that the route takes.
fn least(path: &str) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    match path {
        "/v1/completions" => json!({"prompt": "hi"}),
        "/tokenize" => json!({"inputs": "hi"}),
        "/detokenize" => json!({"tokens": [104]}),
        "/v1/chat/completions" | "/chat_tokenize" => json!({"messages": messages}),
        _ => json!({"inputs": "hi"}),
    }
}

/// A value that the field does not take.
fn wrong(form: Form) -> Option<Value> {
    match form {
        Form::Flag | Form::Object(_) | Form::Ids => Some(json!("no")),
        Form::Whole { .. } | Form::Real { .. } => Some(json!("many")),
        Form::Text | Form::Texts => Some(json!(7)),
        Form::Shaped(_) | Form::Refused => Some(json!(true)),
        Form::Fixed(_) => Some(json!("another")),
        Form::Ignored => None,
    }
}

/// Values that the field takes: for numbers both ends.
fn right(form: Form) -> Vec<Value> {
    match form {
        Form::Flag => vec![json!(false), Value::Null],
        // A stop string; where it would be a model, it is the served one.
        Form::Text | Form::Texts => vec![json!("org/tiny"), Value::Null],
        Form::Ids => vec![json!([]), Value::Null],
        Form::Whole { least, most } => vec![json!(least.max(1)), json!(most), Value::Null],
        Form::Real { least, most } => vec![json!(least.max(0.01)), json!(most), Value::Null],
        Form::Object(_) => vec![json!({}), Value::Null],
        Form::Shaped(_) => vec![Value::Null],
        Form::Fixed(value) => vec![value(), Value::Null],
        Form::Refused => vec![json!(false), json!(""), json!([]), json!({}), Value::Null],
        Form::Ignored => vec![json!({"any": ["thing"]}), json!(true), Value::Null],
    }
}

fn named(dialect: Dialect, answer: &Answer) -> String {
    let body = answer.json();
    match dialect {
        Dialect::OpenAi => body["error"]["param"].as_str().unwrap_or_default().to_owned(),
        Dialect::Tgi => body["error"].as_str().unwrap_or_default().to_owned(),
    }
}

/// One field of a body, alone or in an object of the body.
async fn check(server: &Server, operation: &Operation, outer: Option<&str>, field: &Field) {
    let with = |value: Value| {
        let mut body = least(operation.path);
        // Without messages nothing of a conversation is looked at.
        let of_talk = conversation::FIELDS.iter().any(|known| known.name == field.name);
        if operation.path == "/tokenize" && of_talk {
            body = json!({"messages": [{"role": "user", "content": "hi"}]});
        }
        match outer {
            None => body[field.name] = value,
            Some(outer) => body[outer] = json!({field.name: value}),
        }
        body
    };
    // Tokenize takes TGI's parameters without a look; a stream's options matter in streams alone.
    let looked_at = operation.path != "/tokenize" || outer.is_none();
    if let Some(wrong) = wrong(field.form).filter(|_| looked_at) {
        let mut body = with(wrong);
        if operation.path == "/tokenize" && field.name == "prompt" {
            body = json!({"prompt": true});
        }
        let answer = server.post(operation.path, &body).await;
        let status = answer.status.as_u16();
        assert!(matches!(status, 400 | 422), "{} {body}: {answer:?}", operation.path);
        let said = named(operation.dialect(), &answer);
        let expected = [Some(field.name), outer];
        let is_named = expected.into_iter().flatten().any(|name| said.contains(name));
        assert!(is_named, "{} {body}: {said}", operation.path);
    }
    for value in right(field.form) {
        // Some fields need another one beside, and a required one must not be null.
        let needs_more = ["top_logprobs", "best_of", "min_tokens"].contains(&field.name);
        // Of these one must be given.
        let is_text = operation.path == "/tokenize" && field.name == "inputs";
        let needed = (field.required || is_text) && value.is_null();
        if !looked_at || needed || (needs_more && !value.is_null()) {
            continue;
        }
        let body = with(value);
        let answer = server.post(operation.path, &body).await;
        assert_eq!(answer.status, 200, "{} {body}: {answer:?}", operation.path);
    }
}

#[tokio::test]
async fn every_documented_field_is_read_or_refused_as_documented() {
    let server = Server::start().await;
    for operation in operations().iter().filter(|operation| !operation.fields.is_empty()) {
        for field in operation.fields.iter().copied().flatten() {
            check(&server, operation, None, field).await;
            for inner in field.inner() {
                check(&server, operation, Some(field.name), inner).await;
            }
        }
    }
}

#[tokio::test]
async fn every_documented_route_is_there() {
    let server = Server::start().await;
    let document = server.get("/openapi.json").await.json();
    let paths = document["paths"].as_object().unwrap();
    assert_eq!(paths.len(), operations().len(), "one method for each path");
    for (path, methods) in paths {
        for (method, entry) in methods.as_object().unwrap() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let path = path.replace("{id}", "org/tiny");
            let answer = match method {
                Method::POST => server.post(&path, &least(&path)).await,
                _ => server.get(&path).await,
            };
            let status = answer.status.as_u16();
            // No recorder is installed.
            let done = status == 200 || path == "/metrics";
            assert!(done, "{method} {path}: {answer:?}");
            let kind = answer.headers["content-type"].to_str().unwrap();
            let known = match status {
                200 => &entry["responses"]["200"]["content"],
                _ => &entry["responses"]["4XX"]["content"],
            };
            assert!(known.get(kind).is_some(), "{method} {path} answers {kind}: {known}");
        }
    }
}

/// Every `$ref` leads somewhere, and every schema of an answer is of this server's making.
#[tokio::test]
async fn references_of_the_document_lead_somewhere() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let server = Server::start().await;
    let document = server.get("/openapi.json").await.json();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').expect("a reference into the document");
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

/// An event is an object whose data is a string: a fuzzer takes the schema for that of the object.
#[tokio::test]
async fn events_are_described_as_objects_with_data() {
    let server = Server::start().await;
    let document = server.get("/openapi.json").await.json();
    for path in ["/v1/completions", "/v1/chat/completions", "/generate_stream", "/"] {
        let pointer = format!("/paths/{}/post/responses/200/content", path.replace('/', "~1"));
        let event = &document.pointer(&pointer).unwrap()["text/event-stream"]["schema"];
        assert_eq!(event["properties"]["data"]["type"], "string", "{path}: {event}");
        assert_eq!(event["required"], json!(["data"]), "{path}");
        let forms = event["properties"]["data"]["anyOf"].as_array().expect("forms");
        let is_ended = forms.contains(&json!({"const": "[DONE]"}));
        assert_eq!(is_ended, path.starts_with("/v1"), "{path}: {event}");
    }
}

/// Shows that an answer has the fields that the document promises.
async fn check_answer(server: &Server, document: &Value, path: &str, body: &Value) {
    let answer = server.post(path, body).await.json();
    let pointer = format!("/paths/{}/post/responses/200/content", path.replace('/', "~1"));
    let schema = &document.pointer(&pointer).unwrap()["application/json"]["schema"];
    let reference = schema["$ref"].as_str().expect("a named schema").trim_start_matches('#');
    let schema = document.pointer(reference).unwrap();
    let known: &Map<String, Value> = schema["properties"].as_object().unwrap();
    for key in answer.as_object().unwrap().keys() {
        assert!(known.contains_key(key), "{path} answers {key}: {schema}");
    }
    for required in schema["required"].as_array().unwrap() {
        assert!(answer.get(required.as_str().unwrap()).is_some(), "{path}: no {required}");
    }
}

#[tokio::test]
async fn answers_are_as_documented() {
    let server = Server::start().await;
    let document = server.get("/openapi.json").await.json();
    for path in ["/v1/completions", "/v1/chat/completions", "/generate", "/detokenize"] {
        check_answer(&server, &document, path, &least(path)).await;
    }
    let ids = json!({"prompt": "hi", "return_token_ids": true});
    check_answer(&server, &document, "/v1/completions", &ids).await;
}

#[tokio::test]
async fn the_page_is_served_whole_and_nothing_else() {
    let server = Server::start().await;
    let page = server.get("/docs").await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    assert!(!page.text().contains("://"), "nothing comes from elsewhere");
    for part in page.text().split('"').filter(|part| part.starts_with("/")) {
        let answer = server.get(part).await;
        assert_eq!(answer.status, 200, "{part}");
        assert!(!answer.body.is_empty(), "{part}");
    }
    for path in ["/docs/index.html", "/docs/openapi.yaml", "/docs/..%2Finfo"] {
        assert_eq!(server.get(path).await.status, 404, "{path}");
    }
}

/// The page of the API names every field and route.
#[test]
fn the_written_page_names_all() {
    let page = include_str!("../../../../docs/api.md");
    for operation in operations() {
        let path = operation.path.replace("{*", "{");
        assert!(page.contains(&path), "docs/api.md does not name {path}");
        for field in operation.fields.iter().copied().flatten() {
            let name = format!("`{}`", field.name);
            let guided = field.name.starts_with("guided_");
            assert!(guided || page.contains(&name), "docs/api.md does not name {}", field.name);
        }
    }
}
