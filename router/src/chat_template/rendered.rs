//! A rendered conversation that still knows which special tokens its template wrote.

use serde_json::Value;

use crate::api::Conversation;

/// Private use, so no text has a reason to hold them.
const MARKERS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{F00FF}';

/// A prompt in text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    /// `None`: the messages spelled no special token; the text can be encoded as a whole.
    segments: Option<Vec<Segment>>,
}

/// A stretch of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A special token that the template wrote.
    Special(String),
    /// Text, whatever it spells.
    Text(String),
}

impl Rendered {
    pub(super) fn new(marked: String, marker: Option<char>, special: &[String]) -> Self {
        match marker {
            Some(marker) if marked.contains(marker) => {
                let segments = Some(split(&marked, marker, special));
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

/// Cuts at every special token, the longest of those that start together. One that a marker breaks
/// is text of its own: like the reference, and like the tokenizer where it parses them.
fn split(marked: &str, marker: char, special: &[String]) -> Vec<Segment> {
    let broken: Vec<String> =
        special.iter().map(|token| mark_text(token, marker, special)).collect();
    let patterns: Vec<String> = special.iter().chain(&broken).cloned().collect();
    let mut segments = Vec::new();
    let mut rest = marked;
    while let Some((at, token)) = first_special(rest, &patterns) {
        push_text(&mut segments, &rest[..at], marker);
        if token.contains(marker) {
            push_text(&mut segments, token, marker);
        } else {
            segments.push(Segment::Special(token.to_owned()));
        }
        rest = &rest[at + token.len()..];
    }
    push_text(&mut segments, rest, marker);
    segments
}

fn push_text(segments: &mut Vec<Segment>, text: &str, marker: char) {
    if !text.is_empty() {
        segments.push(Segment::Text(text.replace(marker, "")));
    }
}

/// The leftmost special token in `text`, the longest of several there.
fn first_special<'a>(text: &str, special: &'a [String]) -> Option<(usize, &'a str)> {
    let found = special.iter().filter_map(|token| Some((text.find(token.as_str())?, token)));
    let (at, token) = found.min_by_key(|(at, token)| (*at, usize::MAX - token.len()))?;
    Some((at, token))
}

/// A character that the conversation does not hold, or `None` where it spells no special token
/// and none is needed.
pub(super) fn free_marker(conversation: &Conversation, special: &[String]) -> Option<char> {
    let parts = || {
        let more = conversation.tools.iter().chain(&conversation.documents);
        conversation.messages.iter().chain(more)
    };
    let spells = |text: &str| special.iter().any(|token| text.contains(token.as_str()));
    if !parts().any(|value| any_string(value, &spells)) {
        return None;
    }
    MARKERS.into_iter().find(|marker| {
        let holds = |text: &str| text.contains(*marker);
        !parts().any(|value| any_string(value, &holds))
    })
}

fn any_string(value: &Value, test: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => test(text),
        Value::Array(values) => values.iter().any(|value| any_string(value, test)),
        Value::Object(entries) => entries.values().any(|value| any_string(value, test)),
        _ => false,
    }
}

/// Breaks every special token that a string of `value` spells, after its first character.
pub(super) fn mark(value: &Value, marker: Option<char>, special: &[String]) -> Value {
    let Some(marker) = marker else { return value.clone() };
    match value {
        Value::String(text) => Value::String(mark_text(text, marker, special)),
        Value::Array(values) => {
            values.iter().map(|value| mark(value, Some(marker), special)).collect()
        }
        Value::Object(entries) => {
            let marked =
                |(key, value): (&String, &Value)| (key.clone(), mark(value, Some(marker), special));
            Value::Object(entries.iter().map(marked).collect())
        }
        other => other.clone(),
    }
}

fn mark_text(text: &str, marker: char, special: &[String]) -> String {
    let mut marked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, token)) = first_special(rest, special) {
        let first = token.chars().next().map_or(0, char::len_utf8);
        marked.push_str(&rest[..at + first]);
        marked.push(marker);
        // Only the first character is passed, so a token that overlaps is broken as well.
        rest = &rest[at + first..];
        if first == 0 {
            break;
        }
    }
    marked + rest
}
