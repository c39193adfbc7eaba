//! What turns text to ids and back, and conversations to text.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::{
    CheckpointError,
    json_file::{read_object, read_text},
};

/// Tokenizer and chat templates of a model.
pub struct TextSources {
    /// Parses special tokens where it meets them; `encode` offers both ways.
    pub tokenizer: Tokenizer,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    /// `(name, source)`; the unnamed one is "default".
    pub chat_templates: Vec<(String, String)>,
    pub vocab_size: usize,
    /// The same tokenizer, to which a special token's text is text.
    plain: Tokenizer,
}

impl TextSources {
    /// `vocab_size` is the model's. No templates and no special tokens are set yet.
    pub fn new(tokenizer: Tokenizer, vocab_size: usize) -> Self {
        let mut tokenizer = tokenizer;
        // Lengths are the router's to limit, with an error; a file must not cut or pad silently.
        tokenizer.with_padding(None);
        let truncation = tokenizer.with_truncation(None);
        debug_assert!(truncation.is_ok(), "no truncation is always accepted");
        tokenizer.set_encode_special_tokens(false);
        let mut plain = tokenizer.clone();
        plain.set_encode_special_tokens(true);
        Self {
            tokenizer,
            plain,
            bos_token: None,
            eos_token: None,
            chat_templates: Vec::new(),
            vocab_size,
        }
    }

    /// Token ids of `text`. `add_special` adds what the model expects around a text (usually a
    /// begin token). Without `parse_special`, as for text of users, the text `<|im_end|>` is eight
    /// or so ordinary tokens and cannot end a turn.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, CheckpointError> {
        let tokenizer = if parse_special { &self.tokenizer } else { &self.plain };
        match tokenizer.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                let (bytes, detail) = (text.len(), error.to_string());
                Err(CheckpointError::Encode { bytes, detail })
            }
        }
    }

    /// From tokenizer.json, tokenizer_config.json and chat_template.jinja.
    pub(crate) fn from_folder(folder: &Path, vocab_size: usize) -> Result<Self, CheckpointError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Err(no_tokenizer(folder));
        }
        let tokenizer = Tokenizer::from_file(&path).map_err(|error| {
            CheckpointError::Tokenizer { path: path.clone(), detail: error.to_string() }
        })?;
        let mut text = Self::new(tokenizer, vocab_size);
        text.check_vocabulary(&path)?;
        let config_path = folder.join("tokenizer_config.json");
        if config_path.exists() {
            let config = read_object(&config_path)?;
            text.bos_token = token(&config_path, &config, "bos_token")?;
            text.eos_token = token(&config_path, &config, "eos_token")?;
            text.chat_templates = templates(&config_path, &config)?;
        }
        // A template of its own file replaces the one in the config, as transformers has it.
        let template_path = folder.join("chat_template.jinja");
        if template_path.exists() {
            text.set_template("default", read_text(&template_path)?);
        }
        Ok(text)
    }

    pub(crate) fn set_template(&mut self, name: &str, source: String) {
        self.chat_templates.retain(|(other, _)| other != name);
        self.chat_templates.push((name.to_owned(), source));
    }

    /// No id of the tokenizer is beyond the embedding.
    pub(crate) fn check_vocabulary(&self, path: &Path) -> Result<(), CheckpointError> {
        let largest = self.tokenizer.get_vocab(true).into_values().max();
        match largest {
            Some(id) if id as usize >= self.vocab_size => {
                let size = self.vocab_size;
                let detail = format!("it has ids up to {id}, but the model's vocab_size is {size}");
                Err(CheckpointError::Tokenizer { path: path.to_owned(), detail })
            }
            Some(_) => Ok(()),
            None => {
                let detail = "its vocabulary is empty".to_owned();
                Err(CheckpointError::Tokenizer { path: path.to_owned(), detail })
            }
        }
    }
}

fn no_tokenizer(folder: &Path) -> CheckpointError {
    let other = folder.join("tokenizer.model");
    if other.exists() {
        let format = "sentencepiece or tiktoken model without tokenizer.json".to_owned();
        return CheckpointError::UnsupportedFormat { path: other, format };
    }
    let (what, looked_for) = ("tokenizer", "tokenizer.json".to_owned());
    CheckpointError::NotFound { path: PathBuf::from(folder), what, looked_for }
}

fn refuse(path: &Path, field: &str, expected: &str, found: &Value) -> CheckpointError {
    CheckpointError::Field {
        path: path.to_owned(),
        field: field.to_owned(),
        expected: expected.to_owned(),
        found: found.to_string(),
    }
}

/// A token written as a string or as an object with its `content`.
fn token(
    path: &Path,
    config: &Map<String, Value>,
    field: &str,
) -> Result<Option<String>, CheckpointError> {
    let Some(value) = config.get(field).filter(|value| !value.is_null()) else { return Ok(None) };
    let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
    let expected = "a token as a string, or an object with its content";
    text.map(|text| Some(text.to_owned())).ok_or_else(|| refuse(path, field, expected, value))
}

/// `chat_template`: one source, or a list of `{name, template}`.
fn templates(
    path: &Path,
    config: &Map<String, Value>,
) -> Result<Vec<(String, String)>, CheckpointError> {
    let expected = "a template, or a list of objects with name and template";
    let named = |value: &Value| {
        let part = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        match (part("name"), part("template")) {
            (Some(name), Some(template)) => Ok((name, template)),
            _ => Err(refuse(path, "chat_template", expected, value)),
        }
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(source)) => Ok(vec![("default".to_owned(), source.clone())]),
        Some(Value::Array(list)) => list.iter().map(named).collect(),
        Some(other) => Err(refuse(path, "chat_template", expected, other)),
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
pub(crate) mod tests;
