//! What a chat's answer consists of: thought, text, and calls of tools.

use crate::{
    api::Token,
    reasoning::{self, ReasoningReader, Stretch},
    tools::{CallEvent, CallReader, ToolSyntax, ToolUse},
};

/// The next piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Reasoning(String),
    Text(String),
    /// A call begins; its arguments follow.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// The next piece of the JSON of a call's arguments.
    Arguments {
        index: usize,
        text: String,
    },
}

/// Reads the answer of one choice as it comes.
#[derive(Default)]
pub struct AnswerReader {
    reasoning: Option<ReasoningReader>,
    calls: Option<(ToolSyntax, CallReader)>,
}

impl AnswerReader {
    /// `thinks`: whether the answer begins within a thought; `None` for a model that does not think.
    pub fn new(thinks: Option<bool>, tools: Option<&ToolUse>) -> Self {
        Self {
            reasoning: thinks.map(ReasoningReader::new),
            calls: tools.map(|tools| (tools.syntax, CallReader::new(tools))),
        }
    }

    /// Whether a call has begun.
    pub fn has_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(|(_, reader)| reader.calls() > 0)
    }

    pub fn push(&mut self, token: &Token) -> Vec<Part> {
        match self.is_marker(token) {
            true => self.read(&format!("{}{}", token.text, token.piece)),
            false => self.read(&token.text),
        }
    }

    /// A special token is no text, but it may open or close something.
    fn is_marker(&self, token: &Token) -> bool {
        let piece = token.piece.as_str();
        let of_calls = |(syntax, _): &(ToolSyntax, CallReader)| syntax.markers().contains(&piece);
        let is_marker = self.calls.as_ref().is_some_and(of_calls)
            || self.reasoning.is_some() && [reasoning::OPEN, reasoning::CLOSE].contains(&piece);
        token.special && is_marker && !token.text.ends_with(piece)
    }

    /// The answer is over; `rest` belongs to no token.
    pub fn finish(&mut self, rest: &str) -> Vec<Part> {
        let mut parts = self.read(rest);
        let left = self.reasoning.as_mut().map(ReasoningReader::finish).unwrap_or_default();
        self.sort(left, &mut parts);
        if let Some((syntax, reader)) = &mut self.calls {
            told(reader.finish(), *syntax, &mut parts);
        }
        parts
    }

    fn read(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        let stretches = match &mut self.reasoning {
            Some(reader) => reader.push(text),
            None => vec![Stretch::Answer(text.to_owned())],
        };
        self.sort(stretches, &mut parts);
        parts
    }

    fn sort(&mut self, stretches: Vec<Stretch>, parts: &mut Vec<Part>) {
        for stretch in stretches {
            match (stretch, &mut self.calls) {
                (Stretch::Reasoning(text), _) => parts.push(Part::Reasoning(text)),
                (Stretch::Answer(text), None) if text.is_empty() => {}
                (Stretch::Answer(text), None) => parts.push(Part::Text(text)),
                (Stretch::Answer(text), Some((syntax, reader))) => {
                    told(reader.push(&text), *syntax, parts);
                }
            }
        }
    }
}

fn told(events: Vec<CallEvent>, syntax: ToolSyntax, parts: &mut Vec<Part>) {
    parts.extend(events.into_iter().map(|event| match event {
        CallEvent::Text(text) => Part::Text(text),
        CallEvent::Begin { index, name } => Part::Call { index, id: syntax.call_id(), name },
        CallEvent::Arguments { index, text } => Part::Arguments { index, text },
    }));
}
