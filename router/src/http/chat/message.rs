//! A chat's answer as a message, whole or in pieces.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    answer_reader::{AnswerReader, Part},
    http::turns::Answer,
    tools::ToolUse,
};

/// How a request's answers are read.
#[derive(Clone, Default)]
pub struct Reading {
    /// Whether answers begin within a thought; `None`: the model does not think aloud.
    pub thinks: Option<bool>,
    pub tools: Option<ToolUse>,
}

impl Reading {
    pub fn reader(&self) -> AnswerReader {
        AnswerReader::new(self.thinks, self.tools.as_ref())
    }
}

/// The assistant's turn.
#[derive(Serialize, JsonSchema)]
pub struct Message {
    role: &'static str,
    /// Null where the answer is nothing but calls.
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
    refusal: Option<String>,
}

/// What one event of a stream adds to the assistant's turn.
#[derive(Default, Serialize, JsonSchema)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

/// A call, or a piece of one.
#[derive(Clone, Serialize, JsonSchema)]
pub struct Call {
    /// In streams: which call of the answer it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

#[derive(Clone, Serialize, JsonSchema)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// JSON.
    arguments: String,
}

/// Texts and calls of some parts, joined; the calls by their index.
#[derive(Default)]
struct Joined {
    content: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Call>,
}

impl Joined {
    fn of(parts: Vec<Part>) -> Self {
        let mut joined = Self::default();
        for part in parts {
            match part {
                Part::Text(text) => joined.content.get_or_insert_default().push_str(&text),
                Part::Reasoning(text) => joined.reasoning.get_or_insert_default().push_str(&text),
                Part::Call { index, id, name } => joined.calls.push(Call {
                    index: Some(index),
                    id: Some(id),
                    kind: Some("function"),
                    function: Function { name: Some(name), arguments: String::new() },
                }),
                Part::Arguments { index, text } => joined.argue(index, text),
            }
        }
        joined
    }

    fn argue(&mut self, index: usize, arguments: String) {
        match self.calls.last_mut().filter(|call| call.index == Some(index)) {
            Some(call) => call.function.arguments.push_str(&arguments),
            None => self.calls.push(Call {
                index: Some(index),
                id: None,
                kind: None,
                function: Function { name: None, arguments },
            }),
        }
    }
}

impl Message {
    /// The whole answer, and whether it calls.
    pub fn of(answer: &Answer, reading: &Reading) -> (Self, bool) {
        let mut reader = reading.reader();
        let mut parts: Vec<Part> =
            answer.tokens.iter().flat_map(|token| reader.push(token)).collect();
        parts.extend(reader.finish(&answer.finished.rest));
        let Joined { content, reasoning, mut calls } = Joined::of(parts);
        calls.iter_mut().for_each(|call| call.index = None);
        let has_calls = !calls.is_empty();
        let message = Self {
            role: "assistant",
            content: if has_calls { content } else { Some(content.unwrap_or_default()) },
            reasoning_content: reasoning,
            tool_calls: calls,
            refusal: None,
        };
        (message, has_calls)
    }
}

impl Delta {
    /// The first of a choice.
    pub fn opening() -> Self {
        Self { role: Some("assistant"), content: Some(String::new()), ..Self::default() }
    }

    /// A token's part of the turn; one that says nothing says so with empty content.
    pub fn of(parts: Vec<Part>) -> Self {
        let Joined { content, reasoning, calls } = Joined::of(parts);
        let is_silent = reasoning.is_none() && calls.is_empty();
        Self {
            role: None,
            content: content.or_else(|| is_silent.then(String::new)),
            reasoning_content: reasoning,
            tool_calls: calls,
        }
    }
}
