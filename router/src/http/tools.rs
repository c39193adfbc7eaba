//! The tools of a chat, in OpenAI's words.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{
    fields::{Fields, must_be},
    refusal::Refusal,
};
use crate::tools::{Tool, ToolChoice, ToolSyntax, ToolUse};

const TOOLS_MOST: usize = 128;
const NAME_CHARS_MOST: usize = 64;

pub fn choice_shape() -> Value {
    json!({"anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["function"],
        },
    ]})
}

/// The tools as JSON.
pub fn tools_shape() -> Value {
    let name = json!({"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"});
    json!({
        "type": "array",
        "maxItems": TOOLS_MOST,
        "items": {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": name, "parameters": {"type": ["object", "null"]}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    })
}

/// What the answer may call; `None` where it may call nothing.
///
/// # Errors
/// A field is malformed, or the model has no known way to call.
pub fn read(fields: &Fields, syntax: Option<ToolSyntax>) -> Result<Option<ToolUse>, Refusal> {
    let tools = tools(fields)?;
    let parallel = fields.optional_flag("parallel_tool_calls")?.unwrap_or(true);
    let Some(choice) = choice(fields, &tools)? else { return Ok(None) };
    let Some(syntax) = syntax else {
        let message = "tools: how this model writes calls is known neither from its chat template \
                       nor from its vocabulary; --tool-call-parser tells it";
        return Err(Refusal::unsupported("tools", message));
    };
    Ok(Some(ToolUse { syntax, tools: tools.into(), choice, parallel }))
}

fn tools(fields: &Fields) -> Result<Vec<Tool>, Refusal> {
    const FIELD: &str = "tools";
    let items = match fields.get(FIELD) {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(must_be(FIELD, "a list of tools", other)),
    };
    if items.len() > TOOLS_MOST {
        let message = format!("{FIELD} holds at most {TOOLS_MOST} tools, not {}", items.len());
        return Err(Refusal::invalid(FIELD, message));
    }
    let mut names = HashSet::new();
    let mut tools = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let tool = tool(&format!("{FIELD}[{index}]"), item)?;
        if !names.insert(tool.name.clone()) {
            let message = format!("{FIELD}[{index}].function.name {:?} is there twice", tool.name);
            return Err(Refusal::invalid(FIELD, message));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn tool(field: &str, item: &Value) -> Result<Tool, Refusal> {
    match item.get("type").and_then(Value::as_str) {
        Some("function") => {}
        Some(kind) => {
            let message = format!("{field} of type {kind:?} is not supported, only \"function\"");
            return Err(Refusal::unsupported("tools", message));
        }
        None => return Err(must_be(field, "a tool with type and function", item)),
    }
    let function = item.get("function").and_then(Value::as_object);
    let function =
        function.ok_or_else(|| must_be(&format!("{field}.function"), "an object", item))?;
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(other) => {
            return Err(must_be(&format!("{field}.function.parameters"), "an object", other));
        }
    };
    Ok(Tool { name: name(field, function)?, parameters })
}

fn name(field: &str, function: &Map<String, Value>) -> Result<String, Refusal> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let given = function.get("name").and_then(Value::as_str).unwrap_or_default();
    if (1..=NAME_CHARS_MOST).contains(&given.len()) && given.chars().all(is_plain) {
        return Ok(given.to_owned());
    }
    let shown = function.get("name").cloned().unwrap_or_default();
    let wanted = "1 to 64 letters, digits, '_', '-' or '.'";
    Err(must_be(&format!("{field}.function.name"), wanted, &shown))
}

/// `None`: nothing is to be called.
fn choice(fields: &Fields, tools: &[Tool]) -> Result<Option<ToolChoice>, Refusal> {
    const FIELD: &str = "tool_choice";
    let choice = match fields.get(FIELD) {
        None => return Ok((!tools.is_empty()).then_some(ToolChoice::Auto)),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(None),
            "auto" => return Ok((!tools.is_empty()).then_some(ToolChoice::Auto)),
            "required" => ToolChoice::Required,
            _ => {
                let wanted = "\"none\", \"auto\", \"required\" or a function";
                return Err(must_be(FIELD, wanted, &Value::from(word.as_str())));
            }
        },
        Some(given) => {
            let name = given.pointer("/function/name").and_then(Value::as_str);
            let name = name.ok_or_else(|| must_be(FIELD, "a word or a function's name", given))?;
            ToolChoice::Named(name.to_owned())
        }
    };
    match &choice {
        _ if tools.is_empty() => {
            let message = format!("{FIELD} needs tools, of which there are none");
            Err(Refusal::invalid(FIELD, message))
        }
        ToolChoice::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
            let message = format!("{FIELD} names {name:?}, which is none of the tools");
            Err(Refusal::invalid(FIELD, message))
        }
        _ => Ok(Some(choice)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected`: the choice, or a part of the refusal.
    fn check(body: Value, expected: Result<Option<ToolChoice>, &str>) {
        let fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
        match (read(&fields, Some(ToolSyntax::Hermes)), expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(found.map(|found| found.choice), expected, "{body}");
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
    fn tools_are_read_or_named() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let with = |choice: Value| json!({"tools": [tool("f"), tool("g")], "tool_choice": choice});
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        check(json!({}), Ok(None));
        check(json!({"tools": []}), Ok(None));
        check(json!({"tool_choice": "auto"}), Ok(None));
        check(json!({"tools": [tool("f")]}), Ok(Some(ToolChoice::Auto)));
        check(with(json!("auto")), Ok(Some(ToolChoice::Auto)));
        check(with(json!("none")), Ok(None));
        check(with(json!("required")), Ok(Some(ToolChoice::Required)));
        check(with(named("g")), Ok(Some(ToolChoice::Named("g".into()))));
        check(with(named("h")), Err("names \"h\", which is none"));
        check(with(json!("any")), Err("tool_choice must be"));
        check(with(json!(3)), Err("tool_choice must be"));
        check(json!({"tool_choice": "required"}), Err("tool_choice needs tools"));
        check(json!({"tools": {}}), Err("tools must be a list"));
        check(json!({"tools": [tool("f"), tool("f")]}), Err("\"f\" is there twice"));
        check(json!({"tools": [tool("f g")]}), Err("tools[0].function.name must be"));
        check(json!({"tools": [{"type": "code"}]}), Err("of type \"code\" is not supported"));
        check(json!({"tools": [{"function": {}}]}), Err("tools[0] must be"));
        check(json!({"tools": [{"type": "function"}]}), Err("tools[0].function must be"));
        let many: Vec<Value> = (0..129).map(|index| tool(&format!("f{index}"))).collect();
        check(json!({"tools": many}), Err("at most 128 tools, not 129"));
        let message = read(
            &Fields::parse(json!({"tools": [tool("f")]}).to_string().as_bytes())
                .expect("an object"),
            None,
        );
        assert!(message.is_err_and(|refusal| refusal.message.contains("--tool-call-parser")));
    }
}
