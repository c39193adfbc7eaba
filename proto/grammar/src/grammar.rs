//! A grammar in text, in one of three languages.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::GrammarError;

/// Between two parts of a JSON answer: a blank, or a new line with its indentation. Bounded, for a model
/// that begins to write blanks may never end; wide enough for JSON ten deep.
const WHITESPACE: &str = r" |\n[ \t]{0,20}";
/// The key under which llguidance reads its options from a schema.
const OPTIONS: &str = "x-guidance";
/// The nesting of a schema; serde_json reads 128.
const SCHEMA_DEPTH_MOST: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// JSON Schema, drafts 4 to 2020-12.
    JsonSchema,
    /// A regular expression in the syntax of Rust's `regex` crate, for the whole answer.
    Regex,
    /// llguidance's variant of Lark.
    Lark,
}

/// What may stand between the parts of a JSON answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Whitespace<'a> {
    /// A blank, or the end of a line and up to 20 blanks or tabs.
    #[default]
    Some,
    /// As a regular expression.
    Pattern(&'a str),
}

/// What an answer must match, as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grammar {
    pub kind: Kind,
    pub text: String,
}

impl Grammar {
    /// # Errors
    /// The schema is no schema, or is nested too deep.
    pub fn json_schema(schema: &Value, whitespace: Whitespace<'_>) -> Result<Self, GrammarError> {
        let text = with_options(schema, whitespace)?.to_string();
        Ok(Self { kind: Kind::JsonSchema, text })
    }

    /// Any JSON object.
    pub fn json_object(whitespace: Whitespace<'_>) -> Result<Self, GrammarError> {
        Self::json_schema(&json!({"type": "object"}), whitespace)
    }

    /// The whole answer matches `pattern`: anchors around it say nothing more and are dropped.
    pub fn regex(pattern: &str) -> Self {
        let text = pattern.strip_prefix('^').unwrap_or(pattern);
        // After an odd number of backslashes the dollar is a dollar.
        let is_anchor =
            |rest: &&str| (rest.len() - rest.trim_end_matches('\\').len()).is_multiple_of(2);
        let text = text.strip_suffix('$').filter(is_anchor).unwrap_or(text);
        Self { kind: Kind::Regex, text: text.to_owned() }
    }

    /// One of `choices`, letter by letter.
    pub fn choice(choices: &[String]) -> Self {
        let escaped: Vec<String> =
            choices.iter().map(|choice| regex_syntax::escape(choice)).collect();
        Self { kind: Kind::Regex, text: format!("(?:{})", escaped.join("|")) }
    }

    pub fn lark(text: impl Into<String>) -> Self {
        Self { kind: Kind::Lark, text: text.into() }
    }

    /// A schema as it stands after `%json` in a Lark grammar.
    ///
    /// # Errors
    /// As [`Self::json_schema`].
    pub fn inline_schema(schema: &Value) -> Result<String, GrammarError> {
        Ok(format!("%json {}", with_options(schema, Whitespace::Some)?))
    }
}

fn with_options(schema: &Value, whitespace: Whitespace<'_>) -> Result<Value, GrammarError> {
    let mut entries = match schema {
        Value::Object(entries) => entries.clone(),
        Value::Bool(true) => Map::new(),
        other => {
            let kind = match other {
                Value::Bool(_) => "false, which nothing matches",
                Value::Array(_) => "a list",
                Value::String(_) => "a string",
                _ => "a number or null",
            };
            let message = format!("a schema is an object, not {kind}");
            return Err(GrammarError::Invalid(message));
        }
    };
    if depth_exceeds(schema, SCHEMA_DEPTH_MOST) {
        let message = format!("the schema is nested over {SCHEMA_DEPTH_MOST} deep");
        return Err(GrammarError::Invalid(message));
    }
    let pattern = match whitespace {
        Whitespace::Some => WHITESPACE,
        Whitespace::Pattern(pattern) => pattern,
    };
    entries.insert(OPTIONS.to_owned(), json!({"whitespace_pattern": pattern}));
    Ok(Value::Object(entries))
}

fn depth_exceeds(value: &Value, most: usize) -> bool {
    match value {
        Value::Array(items) => most == 0 || items.iter().any(|item| depth_exceeds(item, most - 1)),
        Value::Object(entries) => {
            most == 0 || entries.values().any(|entry| depth_exceeds(entry, most - 1))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CheckFacts, check};

    fn check_regex(pattern: &str, text: &str) {
        assert_eq!(Grammar::regex(pattern).text, text, "{pattern}");
    }

    #[test]
    fn anchors_around_a_regex_say_nothing() {
        check_regex("a+", "a+");
        check_regex("^a+$", "a+");
        check_regex(r"a\$", r"a\$");
        check_regex(r"^a\\$", r"a\\");
        check_regex("$", "");
    }

    /// `verdict`: "" for a grammar that can be used, else a part of what is said.
    fn verdict(grammar: Result<Grammar, GrammarError>, verdict: &str) {
        let facts = CheckFacts { vocab_size: 500, special: vec![(7, "<|tool|>".into())] };
        let shown = format!("{grammar:?}").chars().take(120).collect::<String>();
        match grammar.and_then(|grammar| check(&grammar, &facts)) {
            Ok(()) => assert_eq!(verdict, "", "{shown}"),
            Err(error) => {
                let said = error.to_string();
                assert!(!verdict.is_empty() && said.contains(verdict), "{shown}: {said}");
            }
        }
    }

    #[test]
    fn grammars_are_checked() {
        let schema = |value: Value| Grammar::json_schema(&value, Whitespace::Some);
        verdict(schema(json!({"type": "object", "properties": {"a": {"enum": [1, "b"]}}})), "");
        verdict(schema(json!(true)), "");
        verdict(schema(json!(false)), "a schema is an object");
        verdict(schema(json!([])), "not a list");
        verdict(schema(json!({"type": "objekt"})), "objekt");
        verdict(schema(json!({"$ref": "#/$defs/a"})), "$defs/a");
        verdict(schema(json!({"$ref": "#"})), "no text matches it");
        verdict(schema(json!({"$ref": "http://example.com/a"})), "example.com");
        verdict(schema(json!({"type": "string", "pattern": "("})), "(");
        verdict(schema(json!({"type": "integer", "minimum": 3, "maximum": 2})), "minimum");
        let wide = json!({"type": "integer", "minimum": -1e21, "maximum": 1e300});
        verdict(schema(wide), "beyond what is supported");
        let overlapping = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
        verdict(schema(overlapping), "oneOf");
        let deep = (0..70).fold(json!({}), |inner, _| json!({"items": inner}));
        verdict(schema(deep), "64 deep");
        verdict(Ok(Grammar::regex(r"\d{3}-\d{4}")), "");
        verdict(Ok(Grammar::regex("(")), "unclosed group");
        verdict(Ok(Grammar::regex("(?=a)b")), "look-around");
        let odd = ["a.b", "(c", "é\n|", "<yes>", "a&b~c#d-e", "/\\\"'`"].map(str::to_owned);
        verdict(Ok(Grammar::choice(&odd)), "");
        verdict(Ok(Grammar::lark("start: \"a\" <|tool|> <[3]> b\nb: /[0-9]+/")), "");
        verdict(Ok(Grammar::lark("start: <|other|>")), "other");
        verdict(Ok(Grammar::lark("start: nothing")), "nothing");
        let inline = Grammar::inline_schema(&json!({"type": "object"}));
        verdict(
            inline.map(|schema| Grammar::lark(format!("start: \"f(\" a \")\"\na: {schema}"))),
            "",
        );
    }
}
