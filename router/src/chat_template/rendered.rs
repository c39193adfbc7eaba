//! A rendered conversation that still knows which control tokens its template wrote.

use std::collections::HashSet;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use trireme_checkpoint::Segment;

use super::TemplateError;

/// Private use, so no text has a reason to hold them.
pub(super) const MARKERS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{F00FF}';

/// A prompt in text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    /// `None`: the messages spelled no control token; the text can be encoded as it is.
    segments: Option<Vec<Segment>>,
}

impl Rendered {
    /// `marked` is what the template made of marked messages.
    pub(super) fn new(marked: String, marker: Option<char>, control: &ControlTokens) -> Self {
        match marker {
            Some(marker) if marked.contains(marker) => {
                let segments = Some(control.split(&marked, marker));
                Self { text: marked.replace(marker, ""), segments }
            }
            _ => Self { text: marked, segments: None },
        }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn into_text(self) -> String {
        self.text
    }

    pub fn segments(&self) -> Option<&[Segment]> {
        self.segments.as_deref()
    }
}

/// Tokens that structure a conversation, to be found in a text in one pass.
#[derive(Clone)]
pub(super) struct ControlTokens {
    /// As a tokenizer finds them: the longest of those that start together, none inside another.
    leftmost: AhoCorasick,
    every: AhoCorasick,
    sorted: Vec<String>,
    longest_bytes: usize,
}

impl ControlTokens {
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = &'a String> + Clone,
    ) -> Result<Self, TemplateError> {
        let find = |kind| {
            let automaton = AhoCorasick::builder().match_kind(kind).build(tokens.clone());
            automaton.map_err(|error| TemplateError::Syntax(format!("control tokens: {error}")))
        };
        let mut sorted: Vec<String> = tokens.clone().cloned().collect();
        sorted.sort_unstable();
        Ok(Self {
            leftmost: find(MatchKind::LeftmostLongest)?,
            every: find(MatchKind::Standard)?,
            longest_bytes: sorted.iter().map(String::len).max().unwrap_or(0),
            sorted,
        })
    }

    fn are_in(&self, text: &str) -> bool {
        self.every.is_match(text) || self.begun_at_end(text).is_some()
    }

    /// Where a token begins that the text's end leaves unfinished: what is written next, the next
    /// part of a message, say, could finish it. Spaces after it may be trimmed away.
    fn begun_at_end(&self, text: &str) -> Option<usize> {
        let text = text.trim_end();
        let first = text.len().saturating_sub(self.longest_bytes.saturating_sub(1));
        (first..text.len()).filter(|at| text.is_char_boundary(*at)).find(|at| {
            let begun = &text[*at..];
            let place = self.sorted.partition_point(|token| token.as_str() < begun);
            self.sorted.get(place).is_some_and(|token| token.starts_with(begun))
        })
    }

    /// Breaks every control token that a string of `value` spells, after its first character.
    pub(super) fn mark(&self, value: &Value, marker: char) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark_text(text, marker)),
            Value::Array(values) => values.iter().map(|value| self.mark(value, marker)).collect(),
            Value::Object(entries) => {
                let marked = |(key, value): (&String, &Value)| {
                    (self.mark_text(key, marker), self.mark(value, marker))
                };
                Value::Object(entries.iter().map(marked).collect())
            }
            other => other.clone(),
        }
    }

    fn mark_text(&self, text: &str, marker: char) -> String {
        let first = |at: usize| at + text[at..].chars().next().map_or(0, char::len_utf8);
        let found = self.every.find_overlapping_iter(text);
        let starts = found.map(|found| found.start()).chain(self.begun_at_end(text));
        let mut cuts: Vec<usize> = starts.map(first).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut marked = String::with_capacity(text.len() + 4 * cuts.len());
        let mut from = 0;
        for cut in cuts {
            marked.push_str(&text[from..cut]);
            marked.push(marker);
            from = cut;
        }
        marked + &text[from..]
    }

    /// Cuts at every control token that no marker breaks.
    fn split(&self, marked: &str, marker: char) -> Vec<Segment> {
        let mut segments = Vec::new();
        let push_text = |segments: &mut Vec<Segment>, text: &str| {
            if !text.is_empty() {
                segments.push(Segment::Text(text.replace(marker, "")));
            }
        };
        let mut from = 0;
        for found in self.leftmost.find_iter(marked) {
            push_text(&mut segments, &marked[from..found.start()]);
            segments.push(Segment::Special(marked[found.range()].to_owned()));
            from = found.end();
        }
        push_text(&mut segments, &marked[from..]);
        segments
    }

    /// A character that no string of `values` holds, or `None` where they spell no control token
    /// and none is needed.
    pub(super) fn free_marker<'a>(
        &self,
        values: impl Iterator<Item = &'a Value>,
    ) -> Result<Option<char>, TemplateError> {
        let mut strings = Vec::new();
        values.for_each(|value| collect(value, &mut strings));
        if !strings.iter().any(|text| self.are_in(text)) {
            return Ok(None);
        }
        let characters = strings.iter().flat_map(|text| text.chars());
        let held: HashSet<char> = characters.filter(|held| MARKERS.contains(held)).collect();
        let free = MARKERS.into_iter().find(|marker| !held.contains(marker));
        free.map(Some).ok_or(TemplateError::NoFreeMarker)
    }
}

/// Every string in `value`, keys included.
fn collect<'a>(value: &'a Value, strings: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => strings.push(text),
        Value::Array(values) => values.iter().for_each(|value| collect(value, strings)),
        Value::Object(entries) => {
            for (key, value) in entries {
                strings.push(key);
                collect(value, strings);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
