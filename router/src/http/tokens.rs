//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{
    App, conversation,
    fields::{Fields, must_be},
    refusal::Refusal,
};

/// `{prompt, add_special_tokens, return_token_strs}` to `{count, max_model_len, tokens, token_strs}`,
/// or `messages` and what else a chat route takes for its template in place of `prompt`. A list of
/// messages may also stand in `prompt`, as lm_eval sends it.
pub async fn tokenize(State(app): State<App>, mut fields: Fields) -> Result<Json<Value>, Refusal> {
    app.check_model(&fields)?;
    let special = fields.optional_flag("add_special_tokens")?;
    let with_strings = fields.flag("return_token_strs")?;
    let ids = match (fields.take("prompt"), fields.take("messages")) {
        (Some(Value::String(text)), None) => {
            app.generator.encode(text, special.unwrap_or(true)).await?
        }
        (Some(messages @ Value::Array(_)), None) | (None, Some(messages)) => {
            // The template writes the special tokens.
            let conversation = conversation::read(&mut fields, messages)?;
            app.generator.encode_conversation(Arc::new(conversation)).await?
        }
        (Some(other), None) => return Err(must_be("prompt", "a string or messages", &other)),
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid("messages", "give prompt or messages, not both"));
        }
        (None, None) => return Err(Refusal::missing("prompt")),
    };
    let mut strings = with_strings.then(Vec::new);
    if let Some(strings) = &mut strings {
        for id in &ids {
            strings.push(app.generator.decode(vec![*id]).await?);
        }
    }
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": app.generator.model().max_model_len,
        "tokens": ids,
        "token_strs": strings,
    })))
}

/// `{tokens}` to `{prompt}`.
pub async fn detokenize(State(app): State<App>, fields: Fields) -> Result<Json<Value>, Refusal> {
    app.check_model(&fields)?;
    if fields.get("tokens").is_none() {
        return Err(Refusal::missing("tokens"));
    }
    let text = app.generator.decode(fields.ids("tokens")?).await?;
    Ok(Json(json!({"prompt": text})))
}
