//! The part of an answer in which a model thinks, `<think>…</think>`, apart from the rest.

use std::{fmt, str::FromStr};

use trireme_grammar::Marker;

pub const OPEN: &str = "<think>";
pub const CLOSE: &str = "</think>";

/// Where a model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// Where its prompt or its answer opens with `<think>` (Qwen 3, and templates that write the
    /// tag themselves).
    WhereOpened,
    /// From the start of each answer, with or without an opening tag (DeepSeek R1).
    Always,
}

impl Thinking {
    /// As much of a prompt's end as [`Self::is_open_after`] has to see.
    pub fn end_of(self, prompt: &[u32]) -> &[u32] {
        /// More ids than the tag and the blanks after it take.
        const TAIL_IDS: usize = 16;
        &prompt[prompt.len().saturating_sub(TAIL_IDS)..]
    }

    /// Whether an answer to a prompt with this end begins within a thought.
    pub fn is_open_after(self, end: &str) -> bool {
        self == Self::Always || end.trim_end().ends_with(OPEN)
    }
}

/// How a model thinks before an answer under a grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thought {
    pub thinking: Thinking,
    pub open: Marker,
    pub close: Marker,
}

impl FromStr for Thinking {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "think" | "qwen3" => Ok(Self::WhereOpened),
            "deepseek_r1" => Ok(Self::Always),
            other => Err(format!("{other:?} is not think, qwen3 or deepseek_r1")),
        }
    }
}

impl fmt::Display for Thinking {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::WhereOpened => "think",
            Self::Always => "deepseek_r1",
        })
    }
}

/// A stretch of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stretch {
    Reasoning(String),
    Answer(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing but blanks so far. `thinks`: without a tag, this is thought.
    Start {
        thinks: bool,
    },
    Thought,
    /// Blanks between the thought and the answer.
    Between,
    Answer,
}

/// Reads one answer as it comes.
#[derive(Debug)]
pub struct ReasoningReader {
    place: Place,
    /// A tag's beginning, perhaps.
    held: String,
    /// Blanks that count only if more follows.
    blanks: String,
    /// Something was thought already.
    has_thought: bool,
    stretches: Vec<Stretch>,
}

impl ReasoningReader {
    /// `is_open`: the answer begins within a thought.
    pub fn new(is_open: bool) -> Self {
        let place = Place::Start { thinks: is_open };
        let (held, blanks) = (String::new(), String::new());
        Self { place, held, blanks, has_thought: false, stretches: Vec::new() }
    }

    pub fn push(&mut self, text: &str) -> Vec<Stretch> {
        text.chars().for_each(|character| self.step(character));
        std::mem::take(&mut self.stretches)
    }

    pub fn finish(&mut self) -> Vec<Stretch> {
        let held = std::mem::take(&mut self.held);
        match self.place {
            Place::Start { thinks: true } | Place::Thought => self.think(&held),
            Place::Start { thinks: false } => {
                let blanks = std::mem::take(&mut self.blanks);
                self.answer(&format!("{blanks}{held}"));
            }
            Place::Between | Place::Answer => {}
        }
        std::mem::take(&mut self.stretches)
    }

    fn step(&mut self, character: char) {
        match self.place {
            Place::Start { thinks } => {
                if self.held.is_empty() && character.is_whitespace() {
                    return self.blanks.push(character);
                }
                self.held.push(character);
                if self.held == OPEN {
                    self.held.clear();
                    self.blanks.clear();
                    self.place = Place::Thought;
                } else if !OPEN.starts_with(&self.held) {
                    let held = std::mem::take(&mut self.held);
                    let blanks = std::mem::take(&mut self.blanks);
                    if thinks {
                        self.place = Place::Thought;
                        held.chars().for_each(|character| self.step(character));
                    } else {
                        self.place = Place::Answer;
                        self.answer(&format!("{blanks}{held}"));
                    }
                }
            }
            Place::Thought => {
                self.held.push(character);
                if self.held == CLOSE {
                    self.held.clear();
                    self.blanks.clear();
                    self.place = Place::Between;
                }
                while !CLOSE.starts_with(&self.held) {
                    let first = self.held.remove(0);
                    self.think(first.encode_utf8(&mut [0; 4]));
                }
            }
            Place::Between if character.is_whitespace() => {}
            Place::Between | Place::Answer => {
                self.place = Place::Answer;
                self.answer(character.encode_utf8(&mut [0; 4]));
            }
        }
    }

    /// Blanks around a thought are not part of it.
    fn think(&mut self, text: &str) {
        let begun = text.trim_end();
        if !begun.is_empty() {
            let blanks = std::mem::take(&mut self.blanks);
            match self.stretches.last_mut() {
                Some(Stretch::Reasoning(last)) => *last += &format!("{blanks}{begun}"),
                _ => self.stretches.push(Stretch::Reasoning(format!("{blanks}{begun}"))),
            }
            self.has_thought = true;
            self.blanks = text[begun.len()..].to_owned();
        } else if self.has_thought {
            self.blanks.push_str(text);
        }
    }

    fn answer(&mut self, text: &str) {
        match self.stretches.last_mut() {
            _ if text.is_empty() => {}
            Some(Stretch::Answer(last)) => last.push_str(text),
            _ => self.stretches.push(Stretch::Answer(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(is_open: bool, answer: &str, reasoning: &str, text: &str) {
        let characters: Vec<char> = answer.chars().collect();
        for size in [1, 3, characters.len().max(1)] {
            let mut reader = ReasoningReader::new(is_open);
            let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
            let mut stretches: Vec<Stretch> =
                pieces.flat_map(|piece| reader.push(&piece)).collect();
            stretches.extend(reader.finish());
            let (mut thought, mut said) = (String::new(), String::new());
            for stretch in stretches {
                match stretch {
                    Stretch::Reasoning(text) => thought.push_str(&text),
                    Stretch::Answer(text) => said.push_str(&text),
                }
            }
            assert_eq!((thought.as_str(), said.as_str()), (reasoning, text), "{answer} by {size}");
        }
    }

    #[test]
    fn thoughts_stand_apart() {
        check(false, "Hello", "", "Hello");
        check(false, "  Hello <think>", "", "  Hello <think>");
        check(
            false,
            "\n<think>\nWell, a < b.\n\nSo.\n</think>\n\nYes.\n",
            "Well, a < b.\n\nSo.",
            "Yes.\n",
        );
        check(false, "<think>\n\n</think>\n\nYes", "", "Yes");
        check(false, "<think>cut </thi", "cut </thi", "");
        check(false, "<thi", "", "<thi");
        check(true, "\nWell.\n</think>\nYes", "Well.", "Yes");
        check(true, "<think>Well.</think>Yes", "Well.", "Yes");
        check(true, "</think>Yes", "", "Yes");
        check(true, "never closed", "never closed", "");
        check(true, "", "", "");
    }
}
