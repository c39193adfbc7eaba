//! Text to ids and back: `POST /tokenize`, `/detokenize` and `/chat_tokenize`.

use std::sync::Arc;

use axum::{Json, extract::State};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::{
    App, conversation,
    fields::{
        Fields,
        field::{Field, flag, ids, object, shaped, text},
        must_be,
    },
    prompts::messages_shape,
    refusal::Refusal,
    tgi,
};
use crate::api::{Piece, Prompt, Tokenized};

/// What `/tokenize` takes: vLLM's form with `prompt` or `messages`, TGI's with `inputs`.
pub const TOKENIZE: &[Field] = &[
    text("model", "The served model's name, or absent."),
    shaped("prompt", prompt_shape, "A text, or a conversation as lm_eval sends it."),
    shaped("messages", messages_shape, "A conversation."),
    text("inputs", "A text; the answer then has TGI's shape."),
    object("parameters", tgi::PARAMETERS, "Taken with inputs, and without effect."),
    flag("add_special_tokens", "True when absent; for a conversation false."),
    flag("return_token_strs", "Tell the tokens as the vocabulary spells them."),
];

pub const DETOKENIZE: &[Field] = &[
    text("model", "The served model's name, or absent."),
    ids("tokens", "The ids of a text, special ones included.").required(),
];

pub const CHAT_TOKENIZE: &[Field] = &[
    text("model", "The served model's name, or absent."),
    shaped("messages", messages_shape, "A conversation.").required(),
];

fn prompt_shape() -> Value {
    serde_json::json!({"anyOf": [{"type": "string"}, messages_shape()]})
}

/// The answer, in the shape of the request.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Tokens {
    Ids(IdList),
    Places(Vec<PlacedToken>),
}

/// vLLM's shape.
#[derive(Serialize, JsonSchema)]
pub struct IdList {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// TGI's shape: a token and where its text stands, in characters.
#[derive(Serialize, JsonSchema)]
pub struct PlacedToken {
    id: u32,
    text: String,
    start: usize,
    stop: usize,
}

#[derive(Serialize, JsonSchema)]
pub struct Text {
    prompt: String,
}

#[derive(Serialize, JsonSchema)]
pub struct ChatTokens {
    tokenize_response: Vec<PlacedToken>,
    templated_text: String,
}

/// `POST /tokenize`.
pub async fn tokenize(State(app): State<App>, mut fields: Fields) -> Result<Json<Tokens>, Refusal> {
    app.check_model(&fields)?;
    let special = fields.optional_flag("add_special_tokens")?;
    let with_strings = fields.flag("return_token_strs")?;
    let prompt = match (fields.take("prompt"), fields.take("messages"), fields.take("inputs")) {
        (None, None, Some(Value::String(text))) => {
            fields.nested("parameters")?;
            let special = Some(special.unwrap_or(true));
            let tokenized = app.generator.tokenize(Prompt::Text(text), special).await;
            let tokenized =
                tokenized.map_err(|error| Refusal::from(error).renamed("prompt", "inputs"))?;
            return Ok(Json(Tokens::Places(places(&tokenized))));
        }
        (None, None, Some(other)) => return Err(must_be("inputs", "a string", &other)),
        (Some(Value::String(text)), None, None) => Prompt::Text(text),
        (Some(messages @ Value::Array(_)), None, None) | (None, Some(messages), None) => {
            Prompt::Conversation(Arc::new(conversation::read(&mut fields, messages)?))
        }
        (Some(other), None, None) => {
            return Err(must_be("prompt", "a string or messages", &other));
        }
        (None, None, None) => return Err(Refusal::missing("prompt")),
        _ => {
            let message = "messages: give one of prompt, messages and inputs";
            return Err(Refusal::invalid("messages", message));
        }
    };
    let (tokens, token_strs) = match (prompt, with_strings) {
        // Where no token is looked at closely, there is a faster way.
        (Prompt::Text(text), false) => {
            (app.generator.encode(text, special.unwrap_or(true)).await?, None)
        }
        (prompt, _) => {
            let pieces = app.generator.tokenize(prompt, special).await?.pieces;
            let ids = pieces.iter().map(|piece| piece.id).collect();
            let strings = pieces.into_iter().map(|piece| piece.token);
            (ids, with_strings.then(|| strings.collect()))
        }
    };
    let max_model_len = app.generator.model().max_model_len;
    let count = tokens.len();
    Ok(Json(Tokens::Ids(IdList { count, max_model_len, tokens, token_strs })))
}

/// `POST /detokenize`.
pub async fn detokenize(State(app): State<App>, fields: Fields) -> Result<Json<Text>, Refusal> {
    app.check_model(&fields)?;
    if fields.get("tokens").is_none() {
        return Err(Refusal::missing("tokens"));
    }
    let prompt = app.generator.decode(fields.ids("tokens")?).await?;
    Ok(Json(Text { prompt }))
}

/// `POST /chat_tokenize`, TGI's.
pub async fn chat_tokenize(
    State(app): State<App>,
    mut fields: Fields,
) -> Result<Json<ChatTokens>, Refusal> {
    app.check_model(&fields)?;
    let messages = fields.take("messages").ok_or_else(|| Refusal::missing("messages"))?;
    let prompt = Prompt::Conversation(Arc::new(conversation::read(&mut fields, messages)?));
    let tokenized = app.generator.tokenize(prompt, None).await?;
    let tokenize_response = places(&tokenized);
    Ok(Json(ChatTokens { tokenize_response, templated_text: tokenized.text }))
}

/// Each token with the characters of the text that it stands for.
fn places(tokenized: &Tokenized) -> Vec<PlacedToken> {
    let starts: Vec<usize> = tokenized.text.char_indices().map(|(at, _)| at).collect();
    let byte = |char: usize| starts.get(char).copied().unwrap_or(tokenized.text.len());
    let text = |piece: &Piece| {
        let bytes = byte(piece.chars.start)..byte(piece.chars.end);
        tokenized.text.get(bytes).unwrap_or_default()
    };
    let place = |piece: &Piece| PlacedToken {
        id: piece.id,
        text: text(piece).to_owned(),
        start: piece.chars.start,
        stop: piece.chars.end,
    };
    tokenized.pieces.iter().map(place).collect()
}
