//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{
    App,
    fields::{Fields, must_be},
    prompts::conversation,
    refusal::Refusal,
};

/// `{prompt | messages, add_special_tokens, return_token_strs}` to `{count, max_model_len, tokens,
/// token_strs}`. A list of messages may also stand in `prompt`, as lm_eval sends it.
pub async fn tokenize(State(app): State<App>, mut fields: Fields) -> Result<Json<Value>, Refusal> {
    app.check_model(&fields)?;
    let special = fields.optional_flag("add_special_tokens")?;
    let with_strings = fields.flag("return_token_strs")?;
    let (text, special) = match (fields.take("prompt"), fields.take("messages")) {
        (Some(Value::String(text)), None) => (text, special.unwrap_or(true)),
        (Some(messages @ Value::Array(_)), None) | (None, Some(messages)) => {
            let text = app.generator.render(conversation(messages)?).await?;
            // The template has written the special tokens.
            (text, special.unwrap_or(false))
        }
        (Some(other), None) => return Err(must_be("prompt", "a string or messages", &other)),
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid("messages", "give prompt or messages, not both"));
        }
        (None, None) => return Err(Refusal::missing("prompt")),
    };
    let ids = app.generator.encode(text, special).await?;
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
