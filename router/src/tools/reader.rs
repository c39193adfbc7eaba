//! Finds the calls in an answer while it comes.

use super::{
    Tool, ToolSyntax, ToolUse,
    call_json::{CallJson, Part, State},
    python_call,
};

/// What an answer says next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallEvent {
    Text(String),
    /// The call of this index begins.
    Begin {
        index: usize,
        name: String,
    },
    /// The next piece of the JSON of its arguments.
    Arguments {
        index: usize,
        text: String,
    },
}

/// Where in the answer the reader is.
#[derive(Debug)]
enum Place {
    /// Before anything but blanks; an answer that does not begin with a call has none.
    Start,
    /// Text in which a marker may open a call.
    Text,
    /// Text to the end.
    Plain,
    /// After `[TOOL_CALLS]`: a list, an object, or a name.
    Head(String),
    Call(CallJson),
    /// A name was told before; only arguments follow.
    Bare(CallJson),
    /// A call is over; what follows up to here is passed over.
    Until(&'static str),
    /// Between the calls of a JSON list.
    List,
    /// Between calls that stand in a row.
    Row,
    /// From `[` on, and how much of it is read.
    Python {
        read: usize,
    },
    /// Nothing more counts.
    Over,
}

/// Reads the answer of one choice.
pub struct CallReader {
    syntax: ToolSyntax,
    tools: std::sync::Arc<[Tool]>,
    parallel: bool,
    place: Place,
    in_list: bool,
    /// A marker's beginning, perhaps.
    held: String,
    /// Blanks that are text only if text follows.
    blanks: String,
    /// What would be text if it turned out to be no call.
    raw: String,
    begun: bool,
    calls: usize,
    events: Vec<CallEvent>,
}

impl CallReader {
    pub fn new(of: &ToolUse) -> Self {
        let place = match of.syntax {
            ToolSyntax::Hermes | ToolSyntax::Mistral => Place::Text,
            ToolSyntax::LlamaJson | ToolSyntax::Pythonic => Place::Start,
        };
        Self {
            syntax: of.syntax,
            tools: of.tools.clone(),
            parallel: of.parallel,
            place,
            in_list: false,
            held: String::new(),
            blanks: String::new(),
            raw: String::new(),
            begun: false,
            calls: 0,
            events: Vec::new(),
        }
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    pub fn push(&mut self, text: &str) -> Vec<CallEvent> {
        text.chars().for_each(|character| self.step(character));
        std::mem::take(&mut self.events)
    }

    /// The answer is over: what was no call after all is text.
    pub fn finish(&mut self) -> Vec<CallEvent> {
        let is_call = self.calls > 0 && matches!(self.place, Place::Python { .. } | Place::Over);
        if !self.begun && !is_call {
            let raw = std::mem::take(&mut self.raw);
            let held = std::mem::take(&mut self.held);
            if self.calls == 0 || !(raw.is_empty() && held.is_empty()) {
                self.say(&format!("{raw}{held}"));
            }
        }
        if self.calls == 0 {
            let blanks = std::mem::take(&mut self.blanks);
            self.push_text(&blanks);
        }
        self.place = Place::Over;
        std::mem::take(&mut self.events)
    }

    fn step(&mut self, character: char) {
        match &mut self.place {
            Place::Plain => self.push_text(character.encode_utf8(&mut [0; 4])),
            Place::Over => {}
            Place::Start => self.start(character),
            Place::Text => self.text(character),
            Place::Until(marker) => {
                let marker = *marker;
                if self.hold(character, marker, false) {
                    self.place = Place::Text;
                }
            }
            Place::Head(_) => self.head(character),
            Place::Call(_) | Place::Bare(_) => self.call(character),
            Place::List => match character {
                '{' => self.open(character),
                ']' => self.place = Place::Text,
                _ => {}
            },
            Place::Row => match character {
                '{' => self.open(character),
                ';' | ',' => {}
                _ if character.is_whitespace() => {}
                // A marker between two calls.
                _ if self.held.is_empty() && character != '<' => self.leave_row(character),
                _ => {
                    self.held.push(character);
                    let marker = self.syntax.markers()[0];
                    if self.held == marker {
                        self.held.clear();
                    } else if !marker.starts_with(&self.held) {
                        let held = std::mem::take(&mut self.held);
                        self.place = Place::Plain;
                        self.push_text(&held);
                    }
                }
            },
            Place::Python { .. } => self.python(character),
        }
    }

    fn leave_row(&mut self, character: char) {
        self.place = Place::Plain;
        self.step(character);
    }

    /// Takes a character of what may be `marker`; true once it is whole. What is none is text,
    /// where `tells`.
    fn hold(&mut self, character: char, marker: &str, tells: bool) -> bool {
        self.held.push(character);
        if self.held == marker {
            self.held.clear();
            return true;
        }
        while !self.held.is_empty() && !marker.starts_with(&self.held) {
            let first = self.held.remove(0);
            if tells {
                self.say(first.encode_utf8(&mut [0; 4]));
            }
        }
        false
    }

    fn text(&mut self, character: char) {
        let marker = self.syntax.markers()[0];
        if self.hold(character, marker, true) {
            self.begun = false;
            match self.syntax {
                ToolSyntax::Mistral => self.place = Place::Head(String::new()),
                _ => {
                    self.place = Place::Call(CallJson::default());
                    self.raw = marker.to_owned();
                }
            }
        }
    }

    fn start(&mut self, character: char) {
        let marker = self.syntax.markers()[0];
        if self.held.is_empty() {
            match (self.syntax, character) {
                _ if character.is_whitespace() => return self.blanks.push(character),
                (ToolSyntax::LlamaJson, '{') => return self.open(character),
                (ToolSyntax::Pythonic, '[') => {
                    self.raw.push(character);
                    self.place = Place::Python { read: 1 };
                    return;
                }
                _ => {}
            }
        }
        self.held.push(character);
        if self.held == marker {
            self.held.clear();
        } else if !marker.starts_with(&self.held) {
            self.place = Place::Plain;
            let held = std::mem::take(&mut self.held);
            self.say(&held);
        }
    }

    fn head(&mut self, character: char) {
        let Place::Head(head) = &mut self.place else { return };
        match character {
            '[' if head.is_empty() => {
                self.in_list = true;
                self.place = Place::List;
            }
            '{' if head.is_empty() => self.open(character),
            '{' => {
                let name = head.split('[').next().unwrap_or_default().trim().to_owned();
                self.begin(name);
                self.place = Place::Bare(CallJson::of_arguments());
                self.call(character);
            }
            _ if head.is_empty() && character.is_whitespace() => {}
            _ => head.push(character),
        }
    }

    /// A JSON object that should be a call begins.
    fn open(&mut self, character: char) {
        self.begun = false;
        self.place = Place::Call(CallJson::default());
        self.raw.clear();
        self.call(character);
    }

    fn call(&mut self, character: char) {
        let mut parts = Vec::new();
        let (state, is_bare) = match &mut self.place {
            Place::Call(call) => (call.push(character, &mut parts), false),
            Place::Bare(call) => {
                let state = call.push(character, &mut parts);
                (if call.has_value() { State::Complete } else { state }, true)
            }
            _ => return,
        };
        if !self.begun {
            self.raw.push(character);
        }
        for part in parts {
            match part {
                Part::Name(name) if self.is_known(&name) => self.begin(name),
                Part::Name(_) => return self.is_no_call(),
                Part::Arguments(text) => self.argue(text),
            }
        }
        match state {
            State::Open => {}
            State::Broken if !self.begun => self.is_no_call(),
            State::Broken | State::Complete => self.call_ends(is_bare),
        }
    }

    /// Where nothing marks a call, only a known name does.
    fn is_known(&self, name: &str) -> bool {
        let is_marked = matches!(self.syntax, ToolSyntax::Hermes | ToolSyntax::Mistral);
        is_marked || self.tools.iter().any(|tool| tool.name == name)
    }

    fn call_ends(&mut self, is_bare: bool) {
        self.begun = false;
        self.raw.clear();
        self.place = match self.syntax {
            _ if !self.parallel => Place::Over,
            ToolSyntax::Hermes => Place::Until("</tool_call>"),
            ToolSyntax::Mistral if self.in_list && !is_bare => Place::List,
            ToolSyntax::Mistral => Place::Text,
            ToolSyntax::LlamaJson | ToolSyntax::Pythonic => Place::Row,
        };
    }

    fn is_no_call(&mut self) {
        let raw = std::mem::take(&mut self.raw);
        self.place = match self.syntax {
            ToolSyntax::Hermes => Place::Text,
            _ => Place::Plain,
        };
        self.say(&raw);
    }

    fn python(&mut self, character: char) {
        self.raw.push(character);
        let Place::Python { read } = self.place else { return };
        let rest = self.raw[read..].trim_start_matches([',', ' ', '\n', '\t']);
        if rest.starts_with(']') {
            self.raw.clear();
            self.place = Place::Over;
            return;
        }
        let name = rest.split('(').next().unwrap_or_default().trim_end();
        let could_be = match rest.contains('(') {
            true => self.tools.iter().any(|tool| tool.name == name),
            false => self.tools.iter().any(|tool| tool.name.starts_with(name)),
        };
        if !could_be {
            return match self.calls {
                0 => self.is_no_call(),
                _ => self.place = Place::Over,
            };
        }
        if character != ')' {
            return;
        }
        let Some((name, arguments, rest)) = python_call::read(rest) else { return };
        let read = self.raw.len() - rest.len();
        self.begin(name);
        self.argue(arguments.to_string());
        self.begun = false;
        self.place = if self.parallel { Place::Python { read } } else { Place::Over };
    }

    fn begin(&mut self, name: String) {
        self.begun = true;
        // Blanks before a call are nobody's.
        self.blanks.clear();
        self.events.push(CallEvent::Begin { index: self.calls, name });
        self.calls += 1;
    }

    fn argue(&mut self, text: String) {
        self.events.push(CallEvent::Arguments { index: self.calls - 1, text });
    }

    /// Text whose blanks at the end may stand before a call.
    fn say(&mut self, text: &str) {
        let spoken = text.trim_end();
        if !spoken.is_empty() {
            let blanks = std::mem::take(&mut self.blanks);
            self.push_text(&format!("{blanks}{spoken}"));
        }
        self.blanks.push_str(&text[spoken.len()..]);
    }

    fn push_text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(CallEvent::Text(last)) => last.push_str(text),
            _ => self.events.push(CallEvent::Text(text.to_owned())),
        }
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
