//! Conversations to prompts with a model's Jinja template, as Hugging Face transformers renders it.
//!
//! What a request says stays text: where a message, a tool, a document or a variable spells a
//! control token, a marker character is put into that spelling before rendering, so the template
//! sees (and trims, splits, joins) the content as ever, and the control tokens left in the result
//! are those the template wrote. transformers does so with `sanitize_control_tokens`.

mod conversation;
mod jinja;
mod python;
mod rendered;
mod source;

use std::collections::HashMap;

use chrono::NaiveDateTime;
use minijinja::{Environment, Value as JinjaValue, value::Serde};
use serde_json::Value;

use crate::api::Conversation;
use rendered::ControlTokens;
pub use rendered::Rendered;
use source::KnownForms;

/// Far more than real templates take for a full context, and a few hundred milliseconds at most.
const FUEL: u64 = 20_000_000;
const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";
const WITH_DOCUMENTS: &str = "rag";

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
    #[error("continue_final_message and add_generation_prompt are both true; a prompt has one end")]
    TwoEnds,
    #[error(
        "the conversation holds each of the 256 characters from U+F0000, none of which is left to mark special tokens"
    )]
    NoFreeMarker,
}

/// What a template may use besides the conversation.
#[derive(Clone, Debug, Default)]
pub struct TemplateTokens {
    /// By the names that templates call them by (`bos_token`).
    pub named: Vec<(String, String)>,
    /// Every control token, to keep it out of what messages say.
    pub control: Vec<String>,
}

/// A model's compiled templates.
pub struct ChatTemplate {
    environment: Environment<'static>,
    named: Vec<(String, String)>,
    control: ControlTokens,
    /// Those that are text in what the assistant said.
    control_in_answers: ControlTokens,
    /// By the names of templates.
    known: HashMap<String, KnownForms>,
}

impl ChatTemplate {
    /// `sources` are `(name, template)`; one is named "default".
    pub fn new(
        sources: &[(String, String)],
        tokens: TemplateTokens,
    ) -> Result<Self, TemplateError> {
        let mut environment = jinja::environment(FUEL);
        for (name, source) in sources {
            let source = jinja::as_jinja2_reads(source);
            environment
                .add_template_owned(name.clone(), source)
                .map_err(|error| TemplateError::Syntax(format!("{name}: {error}")))?;
        }
        if environment.get_template(DEFAULT).is_err() {
            return Err(TemplateError::Syntax(format!("there is none named {DEFAULT:?}")));
        }
        // The assistant's turns are the model's words: what a template looks for there is the
        // model's own (`</think>`), and stays the token that it is.
        let is_looked_for =
            |token: &&String| sources.iter().any(|(_, text)| source::looks_for(text, token));
        let in_answers = tokens.control.iter().filter(|token| !is_looked_for(token));
        Ok(Self {
            control: ControlTokens::new(tokens.control.iter())?,
            control_in_answers: ControlTokens::new(in_answers)?,
            known: sources
                .iter()
                .map(|(name, text)| (name.clone(), KnownForms::of(text)))
                .collect(),
            environment,
            named: tokens.named,
        })
    }

    /// The prompt of a conversation; `now` is what `strftime_now` tells.
    pub fn render(
        &self,
        conversation: &Conversation,
        now: NaiveDateTime,
    ) -> Result<Rendered, TemplateError> {
        if conversation.continue_final_message && conversation.add_generation_prompt {
            return Err(TemplateError::TwoEnds);
        }
        let name = self.template_for(conversation);
        let known = self.known.get(name).copied().unwrap_or_default();
        let given = conversation.messages.iter();
        let mut messages: Vec<Value> =
            given.map(|message| conversation::normal(message, known)).collect();
        let others = conversation.tools.iter().chain(&conversation.documents);
        let others = others.chain(conversation.variables.values());
        let marker = self.control.free_marker(messages.iter().chain(others))?;
        if let Some(marker) = marker {
            for message in &mut messages {
                *message = self.mark_message(message, marker);
            }
        }
        let context = self.context(conversation, &messages, marker, now);
        let template = self.environment.get_template(name).map_err(jinja::failure)?;
        let mut text = template.render(context).map_err(jinja::failure)?;
        if conversation.continue_final_message {
            cut_after_final_message(&mut text, &messages)?;
        }
        Ok(Rendered::new(text, marker, &self.control))
    }

    fn template_for(&self, conversation: &Conversation) -> &'static str {
        let has = |name: &str| self.environment.get_template(name).is_ok();
        match () {
            () if conversation.tools.is_some() && has(WITH_TOOLS) => WITH_TOOLS,
            () if conversation.documents.is_some() && has(WITH_DOCUMENTS) => WITH_DOCUMENTS,
            () => DEFAULT,
        }
    }

    fn mark_message(&self, message: &Value, marker: char) -> Value {
        match message.get("role").and_then(Value::as_str) {
            Some("assistant") => self.control_in_answers.mark(message, marker),
            _ => self.control.mark(message, marker),
        }
    }

    /// The variables that transformers passes; those it passes as `None` are `none`, not undefined.
    fn context(
        &self,
        conversation: &Conversation,
        messages: &[Value],
        marker: Option<char>,
        now: NaiveDateTime,
    ) -> JinjaValue {
        let marked = |value: &Value| match marker {
            Some(marker) => JinjaValue::from(Serde(self.control.mark(value, marker))),
            None => JinjaValue::from(Serde(value)),
        };
        let or_none = |value: &Option<Value>| value.as_ref().map_or(JinjaValue::from(()), marked);
        let mut entries = vec![
            ("messages".to_owned(), JinjaValue::from(Serde(messages))),
            ("tools".to_owned(), or_none(&conversation.tools)),
            ("documents".to_owned(), or_none(&conversation.documents)),
            ("add_generation_prompt".to_owned(), conversation.add_generation_prompt.into()),
            ("strftime_now".to_owned(), jinja::strftime_now(now)),
        ];
        for (name, token) in &self.named {
            entries.push((name.clone(), JinjaValue::from(token.as_str())));
        }
        for (name, value) in &conversation.variables {
            entries.push((name.clone(), marked(value)));
        }
        JinjaValue::from_pairs(entries)
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
