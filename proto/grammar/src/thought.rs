//! Grammars of answers that begin with a thought: it is free, and what comes after it is not.

use crate::{Grammar, Kind};

/// Blanks around a thought.
const BLANKS: &str = r"/[ \t\r\n]{1,8}/";

/// What begins or ends a thought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marker {
    Text(&'static str),
    /// A special token, which no text can produce.
    Special(u32),
}

impl Marker {
    fn lark(&self) -> String {
        match self {
            Self::Text(text) => format!("{text:?}"),
            Self::Special(id) => format!("<[{id}]>"),
        }
    }
}

impl Grammar {
    /// Answers of this grammar after a thought: one that has begun already and goes on to `close`
    /// (`is_open`), or one from `open` to `close` if the answer begins with it.
    #[must_use]
    pub fn after_thought(&self, is_open: bool, open: &Marker, close: &Marker) -> Self {
        let answer = match self.kind {
            Kind::JsonSchema => format!("%json {}", self.text),
            Kind::Regex if self.text.is_empty() => "\"\"".to_owned(),
            Kind::Regex => format!("/{}/", regex_literal(&self.text)),
            Kind::Lark => format!("%lark {{\n{}\n}}", self.text),
        };
        let start = match (is_open, open) {
            // A thought in text may begin with anything, so with the marker too.
            (true, Marker::Text(_)) => "thought BLANKS? answer".to_owned(),
            (true, Marker::Special(_)) => format!("{}? thought BLANKS? answer", open.lark()),
            (false, _) => format!("(BLANKS? {} thought BLANKS?)? answer", open.lark()),
        };
        let thought = match close {
            Marker::Text(_) => format!("thought[suffix={}]: /(?s:.*)/", close.lark()),
            Marker::Special(_) => {
                format!("thought: ANYTHING? {}\nANYTHING: /(?s:.+)/", close.lark())
            }
        };
        Self::lark(format!("start: {start}\n{thought}\nBLANKS: {BLANKS}\nanswer: {answer}\n"))
    }
}

/// `pattern` between the slashes of Lark.
fn regex_literal(pattern: &str) -> String {
    let mut literal = String::with_capacity(pattern.len());
    let mut is_escaped = false;
    for character in pattern.chars() {
        match character {
            '/' if !is_escaped => literal.push_str("\\/"),
            '\n' if !is_escaped => literal.push_str("\\n"),
            _ => literal.push(character),
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    literal
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Compiler, Vocabulary, Whitespace};

    const OPEN: (&str, u32) = ("<think>", 256);
    const CLOSE: (&str, u32) = ("</think>", 257);
    const END: u32 = 258;

    /// Bytes, then the tags, each of which may stand for its token.
    fn tokens(text: &str, is_special: bool) -> Vec<u32> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.bytes().next() {
            let tag =
                [OPEN, CLOSE].into_iter().find(|(tag, _)| is_special && rest.starts_with(tag));
            let (token, len) = tag.map_or((u32::from(first), 1), |(tag, id)| (id, tag.len()));
            tokens.push(token);
            rest = &rest[len..];
        }
        tokens
    }

    /// Whether `text` is an answer, with tags as text and as special tokens.
    fn check(grammar: &Grammar, is_open: bool, text: &str, expected: bool) {
        let mut words: Vec<(Vec<u8>, bool)> =
            (0..=u8::MAX).map(|byte| (vec![byte], false)).collect();
        words.extend([OPEN, CLOSE].map(|(tag, _)| (tag.as_bytes().to_vec(), true)));
        words.push((b"<end>".to_vec(), true));
        let words = words.iter().map(|(bytes, special)| (&bytes[..], *special));
        let compiler = Compiler::new(&Vocabulary::new(words, &[END])).expect("a vocabulary");
        for is_special in [false, true] {
            let marker =
                |(tag, id)| if is_special { Marker::Special(id) } else { Marker::Text(tag) };
            let wrapped = grammar.after_thought(is_open, &marker(OPEN), &marker(CLOSE));
            let mut matcher = compiler.compile(&wrapped).expect(&wrapped.text);
            let mut takes = |token: u32| {
                matcher.mask().is_ok_and(|mask| mask.allows(token))
                    && matcher.advance(&[token]).is_ok()
            };
            let taken = tokens(text, is_special).into_iter().all(&mut takes) && takes(END);
            assert_eq!(taken, expected, "{text:?}, open {is_open}, special {is_special}");
        }
    }

    #[test]
    fn the_grammar_begins_after_the_thought() {
        let list = json!({"type": "array", "items": {"type": "integer"}});
        let list = Grammar::json_schema(&list, Whitespace::Some).expect("a schema");
        let lark = Grammar::lark("start: a \"!\"\na: /[a-z\\/]+/");
        for (grammar, answer) in
            [(&list, "[1,2]"), (&Grammar::regex("^a/b\\/c$"), "a/b/c"), (&lark, "a/b!")]
        {
            check(grammar, false, answer, true);
            check(grammar, false, &format!("<think>Hm, {{}}.</think>\n\n{answer}"), true);
            check(grammar, false, &format!("\n<think></think>{answer}"), true);
            check(grammar, false, &format!("Hm.</think>{answer}"), false);
            check(grammar, false, "<think>Hm.</think>\n\nSo", false);
            check(grammar, true, &format!("Hm < \"it\".\n</think>\n{answer}"), true);
            check(grammar, true, &format!("<think>\nHm.</think>{answer}"), true);
            check(grammar, true, answer, false);
            check(grammar, true, "Hm.</think>Yes</think>", false);
        }
        check(&Grammar::regex(""), true, "Hm.</think>", true);
    }
}
