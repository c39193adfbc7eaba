//! What turns text to ids and back, and conversations to text.

use std::path::Path;

use tokenizers::{Encoding, Model, Token, Tokenizer};

use crate::CheckpointError;

/// Tokenizer and chat templates of a model.
pub struct TextSources {
    /// Parses special tokens where it meets them; `encode` offers both ways.
    pub tokenizer: Tokenizer,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    /// Further tokens that end an answer, where the tokenizer's format tells.
    pub end_tokens: Vec<String>,
    /// `(name, token)` of further special tokens, as `pad_token`.
    pub special_tokens: Vec<(String, String)>,
    /// `(name, source)`; the unnamed one is "default".
    pub chat_templates: Vec<(String, String)>,
    pub vocab_size: usize,
    /// One more than the last id of the tokenizer's model, without added tokens.
    pub(crate) model_ids: u32,
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
        let last = tokenizer.get_model().get_vocab().into_values().max();
        Self {
            model_ids: last.map_or(0, |id| id + 1),
            tokenizer,
            bos_token: None,
            eos_token: None,
            end_tokens: Vec::new(),
            special_tokens: Vec::new(),
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
        let encoding = match parse_special {
            true => self.tokenizer.encode_fast(text, add_special),
            false => self.encode_parts(&[(text, false)]).and_then(|ids| {
                let tokens = ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0)));
                let encoding = Encoding::from_tokens(tokens.collect(), 0);
                self.tokenizer.post_process(encoding, None, add_special)
            }),
        };
        encoding
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| not_encoded(text, error.as_ref()))
    }

    /// As [`Self::encode`] with `parse_special`, each token with the characters of `text` that it
    /// stands for.
    pub fn encode_with_offsets(
        &self,
        text: &str,
        add_special: bool,
    ) -> Result<Encoding, CheckpointError> {
        let encoding = self.tokenizer.encode_char_offsets(text, add_special);
        encoding.map_err(|error| not_encoded(text, error.as_ref()))
    }

    /// Ids of the tokens that end an answer, as far as the tokenizer's files tell.
    pub fn end_token_ids(&self) -> Vec<u32> {
        let tokens = self.eos_token.iter().chain(&self.end_tokens);
        tokens.filter_map(|token| self.tokenizer.token_to_id(token)).collect()
    }

    /// Tokens that structure a conversation, which what users write must not become: the special
    /// ones, and those that have their form (`<|User|>`) though the tokenizer takes them for text.
    pub fn control_tokens(&self) -> Vec<String> {
        let added = self.tokenizer.get_added_tokens_decoder().into_values();
        let control = added.filter(|token| token.special || has_control_form(&token.content));
        control.map(|token| token.content).filter(|token| !token.trim().is_empty()).collect()
    }

    pub(crate) fn set_template(&mut self, name: &str, source: String) {
        self.chat_templates.retain(|(other, _)| other != name);
        self.chat_templates.push((name.to_owned(), source));
    }

    /// No id of the tokenizer is beyond the embedding.
    pub(crate) fn check_vocabulary(&self, path: &Path) -> Result<(), CheckpointError> {
        let added = self.tokenizer.get_added_tokens_decoder().into_keys().max();
        match self.model_ids.checked_sub(1).max(added) {
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

fn not_encoded(text: &str, error: &dyn std::error::Error) -> CheckpointError {
    CheckpointError::Encode { bytes: text.len(), detail: error.to_string() }
}

/// `<|…|>`, also with the full-width bars of DeepSeek.
fn has_control_form(token: &str) -> bool {
    let (open, close) = (["<|", "<\u{FF5C}"], ["|>", "\u{FF5C}>"]);
    open.iter().any(|open| token.starts_with(open)) && close.iter().any(|end| token.ends_with(end))
}

#[cfg(test)]
#[path = "text_tests.rs"]
pub(crate) mod tests;
