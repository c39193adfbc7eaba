//! Conversations to prompts with a model's Jinja template, as Hugging Face transformers renders it.
//!
//! What a message says stays text: where its content spells a special token, a marker character
//! is put into that spelling before rendering, so the template sees (and trims, splits, joins) the
//! content as ever, and the special tokens left in the result are those the template wrote.

mod jinja;
mod python;
mod rendered;

use chrono::NaiveDateTime;
use minijinja::{Environment, Value as JinjaValue, value::Serde};
use serde_json::Value;

use crate::api::Conversation;
pub use rendered::{Rendered, Segment};

/// Far more than real templates take for a full context, and a few hundred milliseconds at most.
const FUEL: u64 = 20_000_000;
const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    /// The template's own words to its user (`raise_exception`).
    #[error("{0}")]
    Raised(String),
    #[error("the chat template failed: {0}")]
    Engine(String),
    #[error("the model's chat template is broken: {0}")]
    Syntax(String),
    #[error("the last message's text is not in the rendered conversation; it cannot be continued")]
    NoFinalMessage,
}

/// What a template may use besides the conversation.
#[derive(Clone, Debug, Default)]
pub struct TemplateTokens {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    /// Every special token, to keep it out of what messages say.
    pub special: Vec<String>,
}

/// A model's compiled templates.
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: TemplateTokens,
    has_tools_template: bool,
}

impl ChatTemplate {
    /// `sources` are `(name, template)`; one is named "default".
    pub fn new(
        sources: &[(String, String)],
        tokens: TemplateTokens,
    ) -> Result<Self, TemplateError> {
        let mut environment = jinja::environment(FUEL);
        for (name, source) in sources {
            let source = jinja::without_generation_tags(source);
            environment
                .add_template_owned(name.clone(), source)
                .map_err(|error| TemplateError::Syntax(format!("{name}: {error}")))?;
        }
        if environment.get_template(DEFAULT).is_err() {
            return Err(TemplateError::Syntax(format!("there is none named {DEFAULT:?}")));
        }
        let has_tools_template = environment.get_template(WITH_TOOLS).is_ok();
        Ok(Self { environment, tokens, has_tools_template })
    }

    /// The prompt of a conversation; `now` is what `strftime_now` tells.
    pub fn render(
        &self,
        conversation: &Conversation,
        now: NaiveDateTime,
    ) -> Result<Rendered, TemplateError> {
        let marker = rendered::free_marker(conversation, &self.tokens.special);
        let marked = |value: &Value| rendered::mark(value, marker, &self.tokens.special);
        let messages: Vec<Value> =
            conversation.messages.iter().map(|message| mark_message(message, &marked)).collect();
        let context = self.context(conversation, &messages, &marked, now);
        let name = match conversation.tools.is_some() && self.has_tools_template {
            true => WITH_TOOLS,
            false => DEFAULT,
        };
        let template = self.environment.get_template(name).map_err(jinja::failure)?;
        let mut text = template.render(context).map_err(jinja::failure)?;
        if conversation.continue_final_message {
            cut_after_final_message(&mut text, &messages)?;
        }
        Ok(Rendered::new(text, marker, &self.tokens.special))
    }

    /// The variables that transformers passes; those it passes as `None` are `none`, not undefined.
    fn context(
        &self,
        conversation: &Conversation,
        messages: &[Value],
        marked: &impl Fn(&Value) -> Value,
        now: NaiveDateTime,
    ) -> JinjaValue {
        let or_none = |value: &Option<Value>| {
            value
                .as_ref()
                .map_or(JinjaValue::from(()), |value| JinjaValue::from(Serde(marked(value))))
        };
        let mut entries = vec![
            ("messages".to_owned(), JinjaValue::from(Serde(messages))),
            ("tools".to_owned(), or_none(&conversation.tools)),
            ("documents".to_owned(), or_none(&conversation.documents)),
            ("add_generation_prompt".to_owned(), conversation.add_generation_prompt.into()),
            ("strftime_now".to_owned(), jinja::strftime_now(now)),
        ];
        let tokens = [("bos_token", &self.tokens.bos_token), ("eos_token", &self.tokens.eos_token)];
        for (name, token) in tokens {
            if let Some(token) = token {
                entries.push((name.to_owned(), JinjaValue::from(token.as_str())));
            }
        }
        for (name, value) in &conversation.variables {
            entries.push((name.clone(), JinjaValue::from(Serde(value))));
        }
        JinjaValue::from_pairs(entries)
    }
}

/// Marks all that a message says. Assistant turns are left as they are: templates look into them
/// for the model's own special tokens (`</think>`), and they are the model's words.
fn mark_message(message: &Value, marked: &impl Fn(&Value) -> Value) -> Value {
    match message.get("role").and_then(Value::as_str) {
        Some("assistant") => message.clone(),
        _ => marked(message),
    }
}

/// As transformers does for `continue_final_message`.
fn cut_after_final_message(text: &mut String, messages: &[Value]) -> Result<(), TemplateError> {
    let content = messages.last().and_then(|message| message.get("content"));
    let last_part = |parts: &Vec<Value>| parts.last().and_then(|part| part.get("text")).cloned();
    let content = match content {
        Some(Value::Array(parts)) => last_part(parts),
        other => other.cloned(),
    };
    let Some(Value::String(content)) = content else { return Err(TemplateError::NoFinalMessage) };
    let at = text.rfind(content.trim()).ok_or(TemplateError::NoFinalMessage)?;
    let with_end = content.trim_start();
    let end = match text[at..].starts_with(with_end) {
        true => at + with_end.len(),
        false => at + content.trim().len(),
    };
    text.truncate(end);
    Ok(())
}

#[cfg(test)]
mod tests;
