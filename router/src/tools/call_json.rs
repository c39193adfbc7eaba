//! One call written as a JSON object, read as it comes.

use serde_json::Value;

/// What became known of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Name(String),
    /// The next piece of the arguments' JSON.
    Arguments(String),
}

/// Keys under which models put the arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Object,
    Key,
    Colon,
    Value,
    /// The value's end, a comma, or the object's end.
    Next,
}

/// Reads `{"name": …, "arguments": …}`, keys in any order, others passed over.
#[derive(Debug)]
pub struct CallJson {
    expect: Expect,
    key: String,
    /// The key or value being read.
    token: String,
    /// Brackets open within a value.
    depth: usize,
    in_string: bool,
    escaped: bool,
    named: bool,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
}

/// How far a call has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Open,
    Complete,
    /// It is no call.
    Broken,
}

impl Default for CallJson {
    fn default() -> Self {
        Self {
            expect: Expect::Object,
            key: String::new(),
            token: String::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            named: false,
            early: String::new(),
            has_arguments: false,
        }
    }
}

impl CallJson {
    /// A value alone, the arguments of a call that was named before it.
    pub fn of_arguments() -> Self {
        let key = ARGUMENTS[0].to_owned();
        Self { expect: Expect::Value, key, named: true, ..Self::default() }
    }

    /// Takes one character.
    pub fn push(&mut self, character: char, parts: &mut Vec<Part>) -> State {
        match self.expect {
            Expect::Value => return self.value(character, parts),
            Expect::Key if self.in_string => return self.key(character),
            _ if character.is_whitespace() => return State::Open,
            _ => {}
        }
        let next = match (self.expect, character) {
            (Expect::Object, '{') => Expect::Key,
            (Expect::Key, '"') => {
                self.in_string = true;
                self.token.clear();
                Expect::Key
            }
            (Expect::Key | Expect::Next, '}') => return self.end(parts),
            (Expect::Colon, ':') => Expect::Value,
            (Expect::Next, ',') => Expect::Key,
            _ => return State::Broken,
        };
        self.expect = next;
        State::Open
    }

    fn key(&mut self, character: char) -> State {
        if character == '"' {
            self.in_string = false;
            self.key = std::mem::take(&mut self.token);
            self.expect = Expect::Colon;
        } else {
            self.token.push(character);
        }
        State::Open
    }

    fn is_arguments(&self) -> bool {
        ARGUMENTS.contains(&self.key.as_str())
    }

    fn value(&mut self, character: char, parts: &mut Vec<Part>) -> State {
        if self.token.is_empty() && character.is_whitespace() {
            return State::Open;
        }
        if self.in_string {
            self.token.push(character);
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
        } else {
            match character {
                // A bare value ends where the object goes on.
                ',' | '}' | ']' if self.depth == 0 && !self.token.is_empty() => {
                    return match self.value_end(parts) {
                        State::Open => self.push(character, parts),
                        ended => ended,
                    };
                }
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' => match self.depth.checked_sub(1) {
                    Some(depth) => self.depth = depth,
                    None => return State::Broken,
                },
                _ => {}
            }
            self.token.push(character);
        }
        if self.is_arguments() && self.token.starts_with('{') {
            self.argue(character.encode_utf8(&mut [0; 4]), parts);
        }
        let is_compound = self.token.starts_with(['{', '[', '"']);
        if is_compound && self.depth == 0 && !self.in_string {
            self.value_end(parts)
        } else {
            State::Open
        }
    }

    fn value_end(&mut self, parts: &mut Vec<Part>) -> State {
        let token = std::mem::take(&mut self.token);
        self.expect = Expect::Next;
        if self.is_arguments() && !token.starts_with('{') {
            // Arguments as a string of JSON, or as null; what else a model writes is the client's to judge.
            let text = match serde_json::from_str(token.trim()) {
                Ok(Value::Null) => "{}".to_owned(),
                Ok(Value::String(text)) => text,
                _ => token.trim().to_owned(),
            };
            self.argue(&text, parts);
        } else if self.key == "name" && !self.named {
            let Ok(name) = serde_json::from_str::<String>(token.trim()) else {
                return State::Broken;
            };
            self.named = true;
            parts.push(Part::Name(name));
            let early = std::mem::take(&mut self.early);
            if !early.is_empty() {
                parts.push(Part::Arguments(early));
            }
        }
        State::Open
    }

    fn argue(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.has_arguments = true;
        match parts.last_mut() {
            _ if !self.named => self.early.push_str(text),
            Some(Part::Arguments(last)) => last.push_str(text),
            _ => parts.push(Part::Arguments(text.to_owned())),
        }
    }

    fn end(&mut self, parts: &mut Vec<Part>) -> State {
        if !self.named {
            return State::Broken;
        }
        if !self.has_arguments {
            parts.push(Part::Arguments("{}".to_owned()));
        }
        State::Complete
    }

    /// Whether the arguments' value has ended, for [`Self::of_arguments`].
    pub fn has_value(&self) -> bool {
        self.expect == Expect::Next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name, the arguments and the state after each character was pushed.
    fn check(text: &str, name: &str, arguments: &str, state: State) {
        let (mut call, mut parts, mut found) = (CallJson::default(), Vec::new(), State::Open);
        for character in text.chars() {
            found = call.push(character, &mut parts);
            if found != State::Open {
                break;
            }
        }
        let names: String = parts
            .iter()
            .filter_map(|part| if let Part::Name(name) = part { Some(name.as_str()) } else { None })
            .collect();
        let told: String = parts
            .iter()
            .filter_map(|part| match part {
                Part::Arguments(text) => Some(text.as_str()),
                Part::Name(_) => None,
            })
            .collect();
        assert_eq!((names.as_str(), told.as_str(), found), (name, arguments, state), "{text}");
    }

    #[test]
    fn calls_are_read_in_any_order() {
        let complete = State::Complete;
        check(
            r#"{"name": "f", "arguments": {"a": [1, "}"]}}"#,
            "f",
            r#"{"a": [1, "}"]}"#,
            complete,
        );
        check(r#"{"parameters":{"a":"\"{"},"name":"f"}"#, "f", r#"{"a":"\"{"}"#, complete);
        check(r#"{"type": "function", "name": "f", "n": 12 }"#, "f", "{}", complete);
        check(r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, "f", r#"{"a": 1}"#, complete);
        check(r#"{"name": "f", "arguments": null}"#, "f", "{}", complete);
        check(r#"{"name": "f", "arguments": [1, 2]}"#, "f", "[1, 2]", complete);
        check(r#"{"name": "f", "arguments": 3 }"#, "f", "3", complete);
        check(r#"{"name": "f", "arguments": {"a"#, "f", r#"{"a"#, State::Open);
        check(r#"{"city": "Paris"}"#, "", "", State::Broken);
        check(r#"{"name": 3}"#, "", "", State::Broken);
        check(r#"{name: "f"}"#, "", "", State::Broken);
        check("[1]", "", "", State::Broken);
    }
}
