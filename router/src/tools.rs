//! Tools that an answer may call: how models write their calls, and how to make them write some.
//!
//! A model writes calls as text, in a syntax of its family. [`CallReader`] finds them in an answer
//! while it comes; [`grammar`] makes an answer that has to call write nothing else.

mod call_json;
mod grammar;
mod python_call;
mod reader;

use std::{fmt, str::FromStr, sync::Arc};

use serde_json::Value;

pub use grammar::grammar;
pub use reader::{CallEvent, CallReader};

/// How a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, each call in its own tags (Hermes,
    /// Qwen).
    Hermes,
    /// The answer is `{"name": …, "parameters": …}`, several with `;` between (Llama 3).
    LlamaJson,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, in newer models `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
    /// The answer is `[name(key=value, …), …]` (Llama 3.2 and 4).
    Pythonic,
}

impl ToolSyntax {
    const NAMES: [(&str, Self); 4] = [
        ("hermes", Self::Hermes),
        ("llama3_json", Self::LlamaJson),
        ("mistral", Self::Mistral),
        ("pythonic", Self::Pythonic),
    ];

    /// The syntax that a chat template teaches, or else one whose marker the vocabulary has.
    pub fn detect(templates: &str, has_token: impl Fn(&str) -> bool) -> Option<Self> {
        let in_template = [
            ("<tool_call>", Self::Hermes),
            ("[TOOL_CALLS]", Self::Mistral),
            ("<|python_start|>", Self::Pythonic),
            ("[func_name1(", Self::Pythonic),
            ("<|python_tag|>", Self::LlamaJson),
            ("\"parameters\": dictionary", Self::LlamaJson),
        ];
        let taught = in_template.iter().find(|(mark, _)| templates.contains(mark));
        let in_vocabulary = [
            ("[TOOL_CALLS]", Self::Mistral),
            ("<tool_call>", Self::Hermes),
            ("<|python_tag|>", Self::LlamaJson),
        ];
        let known = || in_vocabulary.iter().find(|(token, _)| has_token(token));
        taught.or_else(known).map(|(_, syntax)| *syntax)
    }

    /// Special tokens whose text belongs to the syntax.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::LlamaJson => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::Pythonic => &["<|python_start|>", "<|python_end|>"],
        }
    }

    /// A new call's id. Templates of Mistral's models want exactly nine letters and digits.
    pub fn call_id(self) -> String {
        let id = uuid::Uuid::new_v4().simple().to_string();
        match self {
            Self::Mistral => id[..9].to_owned(),
            _ => format!("call_{}", &id[..24]),
        }
    }
}

impl FromStr for ToolSyntax {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, syntax)| *syntax)
            .ok_or_else(|| format!("{name:?} is not hermes, llama3_json, mistral or pythonic"))
    }
}

impl fmt::Display for ToolSyntax {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, syntax)| syntax == self);
        out.write_str(name.map_or("", |(name, _)| name))
    }
}

/// A function that an answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON schema of its arguments, an object.
    pub parameters: Value,
}

/// What an answer has to do with its tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    Auto,
    /// At least one call of any.
    Required,
    /// One call of this one.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub struct ToolUse {
    pub syntax: ToolSyntax,
    pub tools: Arc<[Tool]>,
    pub choice: ToolChoice,
    /// More than one call may come.
    pub parallel: bool,
}
