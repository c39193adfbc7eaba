//! A task: a file with one JSON object a line, all of one kind.
//!
//! | kind | fields |
//! | --- | --- |
//! | choice | `context`, `choices` (texts that may follow it), `answer` (number of the right one) |
//! | loglikelihood | `context`, `continuation` |
//! | rolling | `text` |
//! | generate | `prompt`, `until` (texts that end the answer), `max_new_tokens`, `target` |

use std::{fs, path::Path};

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::Value;

const MAX_NEW_TOKENS_DEFAULT: u32 = 256;

#[derive(Debug, PartialEq)]
pub struct Task {
    /// The file's name without its ending.
    pub name: String,
    pub documents: Documents,
}

#[derive(Debug, PartialEq)]
pub enum Documents {
    Choice(Vec<Choice>),
    Loglikelihood(Vec<Loglikelihood>),
    Rolling(Vec<Rolling>),
    Generate(Vec<Generate>),
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    pub context: String,
    pub choices: Vec<String>,
    pub answer: usize,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Loglikelihood {
    pub context: String,
    pub continuation: String,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Rolling {
    pub text: String,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Generate {
    pub prompt: String,
    #[serde(default)]
    pub until: Vec<String>,
    #[serde(default = "max_new_tokens_default")]
    pub max_new_tokens: u32,
    /// Without one the answer is not judged.
    #[serde(default)]
    pub target: Option<String>,
}

fn max_new_tokens_default() -> u32 {
    MAX_NEW_TOKENS_DEFAULT
}

impl Documents {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Choice(_) => "choice",
            Self::Loglikelihood(_) => "loglikelihood",
            Self::Rolling(_) => "rolling",
            Self::Generate(_) => "generate",
        }
    }

    pub fn truncate(&mut self, limit: usize) {
        match self {
            Self::Choice(documents) => documents.truncate(limit),
            Self::Loglikelihood(documents) => documents.truncate(limit),
            Self::Rolling(documents) => documents.truncate(limit),
            Self::Generate(documents) => documents.truncate(limit),
        }
    }
}

impl Task {
    /// # Errors
    /// The file cannot be read, or a line is no document of the kind that the first line is of; the
    /// error names the line.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let documents = documents(&text).with_context(|| path.display().to_string())?;
        Ok(Self { name, documents })
    }
}

fn documents(text: &str) -> anyhow::Result<Documents> {
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        lines.push((number, value));
    }
    let Some((_, first)) = lines.first() else { bail!("there is no document in it") };
    let has = |field: &str| first.get(field).is_some();
    Ok(match () {
        () if has("choices") => Documents::Choice(choices(lines)?),
        () if has("continuation") => Documents::Loglikelihood(parse(lines)?),
        () if has("text") => Documents::Rolling(parse(lines)?),
        () if has("prompt") => Documents::Generate(parse(lines)?),
        () => bail!("line 1 has none of choices, continuation, text and prompt"),
    })
}

fn parse<T: for<'a> Deserialize<'a>>(lines: Vec<(usize, Value)>) -> anyhow::Result<Vec<T>> {
    let parse =
        |(number, value)| serde_json::from_value(value).with_context(|| format!("line {number}"));
    lines.into_iter().map(parse).collect()
}

fn choices(lines: Vec<(usize, Value)>) -> anyhow::Result<Vec<Choice>> {
    let documents: Vec<Choice> = parse(lines)?;
    for (index, document) in documents.iter().enumerate() {
        let (answer, count) = (document.answer, document.choices.len());
        if answer >= count {
            bail!("document {}: answer is {answer}, but there are {count} choices", index + 1);
        }
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<(&str, usize), &str>) {
        match (documents(text), expected) {
            (Ok(found), Ok((kind, count))) => {
                let mut found = found;
                assert_eq!(found.kind(), kind, "{text}");
                let all = format!("{found:?}");
                found.truncate(count);
                assert_eq!(format!("{found:?}"), all, "{count} documents: {text}");
                found.truncate(count - 1);
                assert_ne!(format!("{found:?}"), all, "{count} documents: {text}");
            }
            (Err(error), Err(words)) => {
                assert!(format!("{error:#}").contains(words), "{text}: {error:#}");
            }
            (found, expected) => panic!("{text}: {found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn a_file_holds_documents_of_one_kind() {
        check(r#"{"context": "a", "choices": ["b", "c"], "answer": 1}"#, Ok(("choice", 1)));
        let pair = r#"{"context": "a", "continuation": "b"}"#;
        check(&format!("{pair}\n\n{pair}\n"), Ok(("loglikelihood", 2)));
        check(r#"{"text": "a"}"#, Ok(("rolling", 1)));
        check(r#"{"prompt": "a", "until": ["\n"], "target": "b"}"#, Ok(("generate", 1)));
        check("", Err("no document"));
        check("{", Err("line 1"));
        check(r#"{"question": "a"}"#, Err("none of choices"));
        check(&format!("{pair}\n{{\"text\": \"a\"}}"), Err("line 2"));
        check(r#"{"text": "a", "txet": "b"}"#, Err("txet"));
        check(r#"{"context": "a", "choices": ["b"], "answer": 1}"#, Err("answer is 1"));
    }
}
