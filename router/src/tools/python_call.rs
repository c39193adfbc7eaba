//! Calls written as in Python, `name(key=value, …)`, with literal values.

use serde_json::{Map, Number, Value};

const DEPTH_MOST: usize = 32;

/// Reads the call that `text` begins with: its name, its arguments, and what follows. `None` where
/// it is no call, or not all of one.
pub fn read(text: &str) -> Option<(String, Value, &str)> {
    let mut reader = Reader { rest: text };
    let name = reader.name()?;
    reader.expect('(')?;
    let mut arguments = Map::new();
    while !reader.take(')') {
        if !arguments.is_empty() {
            reader.expect(',')?;
            if reader.take(')') {
                break;
            }
        }
        let key = reader.name()?;
        reader.expect('=')?;
        arguments.insert(key, reader.value(0)?);
    }
    Some((name, Value::Object(arguments), reader.rest))
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, character: char) -> bool {
        self.skip();
        match self.rest.strip_prefix(character) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, character: char) -> Option<()> {
        self.take(character).then_some(())
    }

    /// An identifier; dots and dashes are in some tools' names.
    fn name(&mut self) -> Option<String> {
        self.skip();
        let is_part = |c: char| c.is_alphanumeric() || "_.-".contains(c);
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        let begins = name.starts_with(|c: char| c.is_alphabetic() || c == '_');
        begins.then(|| name.to_owned())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MOST {
            return None;
        }
        self.skip();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => self.list('[', ']', depth).map(Value::Array),
            '(' => self.list('(', ')', depth).map(Value::Array),
            '{' => self.object(depth),
            _ => self.word(),
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Vec<Value>> {
        self.expect(open)?;
        let mut items = Vec::new();
        while !self.take(close) {
            if !items.is_empty() {
                self.expect(',')?;
                if self.take(close) {
                    break;
                }
            }
            items.push(self.value(depth + 1)?);
        }
        Some(items)
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.expect('{')?;
        let mut entries = Map::new();
        while !self.take('}') {
            if !entries.is_empty() {
                self.expect(',')?;
                if self.take('}') {
                    break;
                }
            }
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                other => other.to_string(),
            };
            self.expect(':')?;
            entries.insert(key, self.value(depth + 1)?);
        }
        Some(Value::Object(entries))
    }

    fn string(&mut self, quote: char) -> Option<String> {
        self.expect(quote)?;
        let mut text = String::new();
        let mut characters = self.rest.char_indices();
        while let Some((at, character)) = characters.next() {
            match character {
                _ if character == quote => {
                    self.rest = &self.rest[at + quote.len_utf8()..];
                    return Some(text);
                }
                '\\' => {
                    let (_, escaped) = characters.next()?;
                    let digits = match escaped {
                        'x' => 2,
                        'u' => 4,
                        'U' => 8,
                        _ => 0,
                    };
                    if digits == 0 {
                        text.push_str(&plain_escape(escaped));
                        continue;
                    }
                    let code: String =
                        (0..digits).map_while(|_| characters.next()).map(|(_, c)| c).collect();
                    let code = u32::from_str_radix(&code, 16).ok()?;
                    text.push(self::surrogate_or(code, &mut characters));
                }
                other => text.push(other),
            }
        }
        None
    }

    fn word(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_alphanumeric() || "+-._".contains(c);
        let end = self.rest.find(|c| !is_part(c))?;
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            number => {
                let plain = number.replace('_', "");
                let whole = plain.parse::<i64>().ok().map(Number::from);
                let real = || plain.parse::<f64>().ok().and_then(Number::from_f64);
                whole.or_else(real).map(Value::Number)
            }
        }
    }
}

/// The character of a code; JSON's pairs of surrogates are one character.
fn surrogate_or(code: u32, characters: &mut std::str::CharIndices<'_>) -> char {
    if (0xD800..0xDC00).contains(&code) {
        let mut ahead = characters.clone();
        let marks = (ahead.next().map(|(_, c)| c), ahead.next().map(|(_, c)| c));
        let low: String = (0..4).map_while(|_| ahead.next()).map(|(_, c)| c).collect();
        if let ((Some('\\'), Some('u')), Ok(low @ 0xDC00..=0xDFFF)) =
            (marks, u32::from_str_radix(&low, 16))
        {
            *characters = ahead;
            let code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            return char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        }
    }
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn plain_escape(escaped: char) -> String {
    match escaped {
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        'r' => "\r".to_owned(),
        'b' => "\u{8}".to_owned(),
        'f' => "\u{c}".to_owned(),
        '0' => "\0".to_owned(),
        '\n' => String::new(),
        '\\' | '\'' | '"' | '/' => escaped.to_string(),
        other => format!("\\{other}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(text: &str, expected: Option<(&str, Value, &str)>) {
        let found = read(text);
        let found = found.as_ref().map(|(name, value, rest)| (name.as_str(), value.clone(), *rest));
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn calls_are_read_with_literals() {
        check("f()", Some(("f", json!({}), "")));
        check("f(a=1, b='x'), g", Some(("f", json!({"a": 1, "b": "x"}), ", g")));
        check(
            r#"a.b(x=-1.5e3, y=[True, None, (1, 2)], z={"k": 'v', 2: "\u00e9\n"},)]"#,
            Some((
                "a.b",
                json!({"x": -1500.0, "y": [true, null, [1, 2]], "z": {"k": "v", "2": "é\n"}}),
                "]",
            )),
        );
        check(r#"f(a="\ud83d\ude00 \'")"#, Some(("f", json!({"a": "😀 '"}), "")));
        check(r#"f(a=true, b=null)"#, Some(("f", json!({"a": true, "b": null}), "")));
        check("f(a=1", None);
        check("f(1)", None);
        check("f(a=b)", None);
        check("1(a=1)", None);
        check(&format!("f(a={}1", "[".repeat(1000)), None);
    }
}
