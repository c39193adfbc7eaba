//! What an answer must look like, in the words of OpenAI (`response_format`), of vLLM
//! (`structured_outputs`, `guided_*`) and of TGI (`grammar`).

use std::sync::Arc;

use serde_json::{Map, Value, json};
use trireme_grammar::{Grammar, GrammarError, Whitespace};

use super::{
    fields::{
        Fields,
        field::{Field, object_shape, refused, shaped, text},
        must_be,
    },
    refusal::Refusal,
};
use crate::api::Constraint;

const CHOICES_MOST: usize = 10_000;

/// What both OpenAI routes take of it.
pub const FIELDS: &[Field] = &[
    shaped("response_format", typed_shape, "Text, JSON, or what a schema or pattern says."),
    shaped("structured_outputs", object_shape, "One of json, regex, choice and grammar."),
    shaped("guided_json", schema_shape, "A JSON schema that the answer fits."),
    text("guided_regex", "A regular expression that the answer matches."),
    shaped("guided_choice", choices_shape, "The answers that are possible."),
    text("guided_grammar", "A Lark grammar that the answer follows."),
    text("guided_whitespace_pattern", "Whitespace inside JSON, as a regular expression."),
    refused("guided_decoding_backend"),
];

/// A schema, or one as text.
fn schema_shape() -> Value {
    json!({"type": ["object", "string"]})
}

fn choices_shape() -> Value {
    json!({
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": CHOICES_MOST,
    })
}

/// An object with a type, and by it a schema or value.
pub fn typed_shape() -> Value {
    json!({
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema", "json", "regex"]},
            "json_schema": {"type": ["object", "null"]},
            "value": {},
        },
        "required": ["type"],
    })
}

/// The one constraint of a request on an OpenAI route.
///
/// # Errors
/// It is malformed, or there are two.
pub fn openai(fields: &Fields) -> Result<Option<Constraint>, Refusal> {
    fields.refuse_unsupported(FIELDS)?;
    let pattern = fields.text("guided_whitespace_pattern")?;
    let whitespace = pattern.map_or(Whitespace::Some, Whitespace::Pattern);
    let mut found: Vec<Constraint> = Vec::new();
    found.extend(response_format(fields, whitespace)?);
    found.extend(structured_outputs(fields)?);
    for (field, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ] {
        if let Some(value) = fields.get(field) {
            found.push(of_kind(field, kind, value, whitespace)?);
        }
    }
    one_of(found)
}

/// TGI's `grammar`: `{"type": "json" | "json_schema" | "regex", "value": …}`.
pub fn tgi(parameters: &Fields) -> Result<Option<Constraint>, Refusal> {
    const FIELD: &str = "grammar";
    let given = match parameters.get(FIELD) {
        None => return Ok(None),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(must_be(FIELD, "an object with type and value", other)),
    };
    typed(FIELD, given, given.get("value"), Whitespace::Some)
}

fn one_of(mut found: Vec<Constraint>) -> Result<Option<Constraint>, Refusal> {
    match found.as_slice() {
        [first, second, ..] => {
            let (first, second) = (first.field, second.field);
            let message = format!("{second} beside {first}: an answer can have one constraint");
            Err(Refusal::invalid(second, message))
        }
        _ => Ok(found.pop()),
    }
}

/// `{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}`, with TGI's
/// types beside them.
fn response_format(
    fields: &Fields,
    whitespace: Whitespace<'_>,
) -> Result<Option<Constraint>, Refusal> {
    const FIELD: &str = "response_format";
    match fields.get(FIELD) {
        None => Ok(None),
        Some(Value::Object(given)) => {
            let value = given.get("json_schema").or_else(|| given.get("value"));
            typed(FIELD, given, value, whitespace)
        }
        Some(other) => Err(must_be(FIELD, "an object with a type", other)),
    }
}

fn typed(
    field: &'static str,
    given: &Map<String, Value>,
    value: Option<&Value>,
    whitespace: Whitespace<'_>,
) -> Result<Option<Constraint>, Refusal> {
    let value = || {
        let needed = || Refusal::invalid(field, format!("{field} needs its schema or value"));
        value.filter(|value| !value.is_null()).ok_or_else(needed)
    };
    let constraint = match given.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        Some("json_object") => constraint(field, Grammar::json_object(whitespace))?,
        Some("json_schema") => {
            let wrapped = value()?;
            let is_wrapper = wrapped.get("name").is_some() || wrapped.get("strict").is_some();
            match wrapped.get("schema") {
                Some(schema) => of_kind(field, "json", schema, whitespace)?,
                None if is_wrapper => {
                    let message = format!("{field}.json_schema.schema is required");
                    return Err(Refusal::invalid(field, message));
                }
                // TGI's form is the schema itself.
                None => of_kind(field, "json", wrapped, whitespace)?,
            }
        }
        Some("json") => of_kind(field, "json", value()?, whitespace)?,
        Some("regex") => of_kind(field, "regex", value()?, whitespace)?,
        Some(other) => {
            let known = "text, json_object, json_schema, json or regex";
            let message = format!("{field} of type {other:?} is not supported; {known} are");
            return Err(Refusal::unsupported(field, message));
        }
        None => {
            let given = Value::Object(given.clone());
            return Err(must_be(&format!("{field}.type"), "a string", &given));
        }
    };
    Ok(Some(constraint))
}

/// vLLM's newer name for `guided_*`, in one object.
fn structured_outputs(fields: &Fields) -> Result<Option<Constraint>, Refusal> {
    const FIELD: &str = "structured_outputs";
    let given = match fields.get(FIELD) {
        None => return Ok(None),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(must_be(FIELD, "an object", other)),
    };
    let pattern = match given.get("whitespace_pattern") {
        None | Some(Value::Null) => None,
        Some(Value::String(pattern)) => Some(pattern.as_str()),
        Some(other) => {
            return Err(must_be("structured_outputs.whitespace_pattern", "a string", other));
        }
    };
    let whitespace = pattern.map_or(Whitespace::Some, Whitespace::Pattern);
    let mut found = Vec::new();
    for (kind, value) in given.iter().filter(|(_, value)| !value.is_null()) {
        match kind.as_str() {
            "json" | "regex" | "choice" | "grammar" => {
                found.push(of_kind(FIELD, kind, value, whitespace)?);
            }
            "json_object" if *value == Value::Bool(true) => {
                found.push(constraint(FIELD, Grammar::json_object(whitespace))?);
            }
            "json_object" if *value == Value::Bool(false) => {}
            "whitespace_pattern" => {}
            _ => {
                let message = format!("{FIELD}.{kind} is not supported");
                return Err(Refusal::unsupported(FIELD, message));
            }
        }
    }
    one_of(found)
}

fn of_kind(
    field: &'static str,
    kind: &str,
    value: &Value,
    whitespace: Whitespace<'_>,
) -> Result<Constraint, Refusal> {
    let text = || value.as_str().ok_or_else(|| must_be(field, "a string", value));
    let grammar = match kind {
        "regex" => Ok(Grammar::regex(text()?)),
        "grammar" => Ok(Grammar::lark(text()?)),
        "choice" => Ok(Grammar::choice(&choices(field, value)?)),
        _ => match value {
            // A schema may come as text of its own.
            Value::String(text) => {
                let schema: Value = serde_json::from_str(text).map_err(|error| {
                    Refusal::invalid(field, format!("{field} is not valid JSON: {error}"))
                })?;
                Grammar::json_schema(&schema, whitespace)
            }
            Value::Bool(_) => return Err(must_be(field, "a JSON schema, or one as text", value)),
            schema => Grammar::json_schema(schema, whitespace),
        },
    };
    constraint(field, grammar)
}

fn constraint(
    field: &'static str,
    grammar: Result<Grammar, GrammarError>,
) -> Result<Constraint, Refusal> {
    let refuse = |error| Refusal::invalid(field, format!("{field}: {error}"));
    Ok(Constraint { field, grammar: Arc::new(grammar.map_err(refuse)?), thought: None })
}

fn choices(field: &'static str, value: &Value) -> Result<Vec<String>, Refusal> {
    let wanted = "a list of strings";
    let items = value.as_array().ok_or_else(|| must_be(field, wanted, value))?;
    if items.is_empty() || items.len() > CHOICES_MOST {
        let message = format!("{field} holds 1 to {CHOICES_MOST} choices, not {}", items.len());
        return Err(Refusal::invalid(field, message));
    }
    let texts = items.iter().map(|item| item.as_str().map(str::to_owned));
    texts.collect::<Option<_>>().ok_or_else(|| must_be(field, wanted, value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `expected`: the grammar's text without its options, or a part of the refusal.
    fn check(body: Value, expected: Result<&str, &str>) {
        let fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
        match (openai(&fields), expected) {
            (Ok(found), Ok(expected)) => {
                let text = found.map(|found| found.grammar.text.clone()).unwrap_or_default();
                let text = match serde_json::from_str::<Value>(&text) {
                    Ok(Value::Object(mut schema)) => {
                        assert!(schema.remove("x-guidance").is_some(), "{body}");
                        Value::Object(schema).to_string()
                    }
                    _ => text,
                };
                assert_eq!(text, expected, "{body}");
            }
            (Err(refusal), Err(expected)) => {
                assert!(refusal.message.contains(expected), "{body}: {}", refusal.message);
            }
            (given, expected) => {
                let given = given.map_err(|refusal| refusal.message);
                panic!("{body}: {given:?}, expected {expected:?}");
            }
        }
    }

    #[test]
    fn constraints_are_read_in_every_form() {
        let integer = json!({"type": "integer"});
        let object = Ok(r#"{"type":"object"}"#);
        check(json!({}), Ok(""));
        check(json!({"response_format": {"type": "text"}}), Ok(""));
        check(json!({"response_format": {"type": "json_object"}}), object);
        let schema =
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": integer}});
        check(json!({"response_format": schema}), Ok(r#"{"type":"integer"}"#));
        let bare = json!({"type": "json_schema", "json_schema": integer});
        check(json!({"response_format": bare}), Ok(r#"{"type":"integer"}"#));
        let misspelt = json!({"type": "json_schema", "json_schema": {"name": "n", "schemas": {}}});
        check(json!({"response_format": misspelt}), Err("json_schema.schema is required"));
        let value = json!({"type": "regex", "value": "a+"});
        check(json!({"response_format": value}), Ok("a+"));
        check(json!({"response_format": {"type": "json_schema"}}), Err("needs its schema"));
        check(json!({"response_format": {"type": "xml"}}), Err("type \"xml\" is not supported"));
        check(json!({"response_format": {}}), Err("response_format.type must be"));
        check(json!({"response_format": 3}), Err("response_format must be"));
        check(json!({"guided_json": integer}), Ok(r#"{"type":"integer"}"#));
        check(json!({"guided_json": "{\"type\": \"integer\"}"}), Ok(r#"{"type":"integer"}"#));
        check(json!({"guided_json": "{"}), Err("guided_json is not valid JSON"));
        check(json!({"guided_json": [1]}), Err("guided_json: a schema is an object, not a list"));
        check(json!({"guided_regex": "^a|b$"}), Ok("a|b"));
        check(json!({"guided_regex": 3}), Err("guided_regex must be a string"));
        check(json!({"guided_choice": ["a.b", "c"]}), Ok(r"(?:a\.b|c)"));
        check(json!({"guided_choice": []}), Err("holds 1 to 10000 choices, not 0"));
        check(json!({"guided_choice": ["a", 1]}), Err("guided_choice must be a list of strings"));
        check(json!({"guided_grammar": "start: \"a\""}), Ok("start: \"a\""));
        check(json!({"structured_outputs": {"regex": "a", "json": null}}), Ok("a"));
        check(json!({"structured_outputs": {"json_object": true}}), object);
        check(json!({"structured_outputs": {"structural_tag": "x"}}), Err("structural_tag"));
        check(
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
            Err("one constraint"),
        );
        check(
            json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
            Err("guided_regex beside response_format"),
        );
    }
}
