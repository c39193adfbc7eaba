//! A conversation in a body: its messages, and what else the chat template gets to see.

use serde_json::{Map, Value, json};

use super::{
    fields::{
        Fields,
        field::{Field, flag, object_shape, refused, shaped},
        must_be,
    },
    prompts::conversation,
    refusal::Refusal,
    tools,
};
use crate::api::Conversation;

/// Variables that have fields of their own, or that are the model's.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "chat_template",
];

/// What a route that takes a conversation takes beside its messages.
pub const FIELDS: &[Field] = &[
    shaped("tools", tools::tools_shape, "What a chat's answer may call; the template shows them."),
    shaped("documents", objects_shape, "For the chat template."),
    shaped("chat_template_kwargs", object_shape, "Further variables for the chat template."),
    flag("add_generation_prompt", "The assistant begins a turn; the default."),
    flag("continue_final_message", "The assistant goes on with the last message."),
    refused("chat_template"),
];

fn objects_shape() -> Value {
    json!({"type": "array", "items": {"type": "object"}})
}

/// `messages` is the field of that name, taken.
pub fn read(fields: &mut Fields, messages: Value) -> Result<Conversation, Refusal> {
    fields.refuse_unsupported(FIELDS)?;
    let continue_final_message = fields.flag("continue_final_message")?;
    let add_generation_prompt =
        fields.optional_flag("add_generation_prompt")?.unwrap_or(!continue_final_message);
    if continue_final_message && add_generation_prompt {
        let message = "continue_final_message and add_generation_prompt must not both be true";
        return Err(Refusal::invalid("continue_final_message", message));
    }
    Ok(Conversation {
        messages: conversation(messages)?,
        tools: objects(fields, "tools")?,
        documents: objects(fields, "documents")?,
        variables: variables(fields)?,
        add_generation_prompt,
        continue_final_message,
    })
}

/// A list of objects; an empty one is none.
fn objects(fields: &mut Fields, name: &'static str) -> Result<Option<Value>, Refusal> {
    match fields.take(name) {
        None => Ok(None),
        Some(Value::Array(items)) if items.is_empty() => Ok(None),
        Some(Value::Array(items)) => match items.iter().position(|item| !item.is_object()) {
            Some(index) => Err(must_be(&format!("{name}[{index}]"), "an object", &items[index])),
            None => Ok(Some(Value::Array(items))),
        },
        Some(other) => Err(must_be(name, "a list of objects", &other)),
    }
}

fn variables(fields: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    const FIELD: &str = "chat_template_kwargs";
    let variables = match fields.take(FIELD) {
        None => return Ok(Map::new()),
        Some(Value::Object(variables)) => variables,
        Some(other) => return Err(must_be(FIELD, "an object", &other)),
    };
    match RESERVED.iter().find(|name| variables.contains_key(**name)) {
        Some(name) => {
            let message = format!(
                "{FIELD} must not hold {name:?}; that has a field of its own, or is the model's"
            );
            Err(Refusal::invalid(FIELD, message))
        }
        None => Ok(variables),
    }
}
