//! Text to ids and conversations to text, on a few threads with a bounded queue, so that no long prompt holds up the runtime.
//! A caller that leaves the queue takes its work with it.
//!
//! - A plain prompt (`/v1/completions`) is read as Hugging Face and vLLM read it: text that spells
//!   a special token is that token, and special tokens are added around it unless told otherwise.
//! - A conversation's special tokens come from its template alone: what a message says stays text,
//!   so a user cannot write an end of turn (see [`crate::chat_template`]).

use std::sync::Arc;

use anyhow::anyhow;
use tokio::sync::Semaphore;
use trireme_checkpoint::{CheckpointError, TextSources};

use crate::{
    api::{Conversation, Piece, Tokenized},
    chat_template::{ChatTemplate, Rendered, TemplateError, TemplateTokens},
    detokenizer::TextDecoder,
    error::RouterError,
};

/// Jobs that wait or run; one more is refused.
const JOBS_MOST: usize = 1024;

/// For tokenizers that make text shorter before they cut it, as by composing characters.
pub const TOKEN_CHARS_LEAST: usize = 32;

/// A handle to the model's tokenizer and chat template.
#[derive(Clone)]
pub struct TextPipeline {
    text: Arc<ModelText>,
    workers: Arc<Semaphore>,
    jobs: Arc<Semaphore>,
    token_chars: usize,
}

impl TextPipeline {
    /// At most `workers` threads work at once. `template` replaces the model's own ones.
    ///
    /// # Errors
    /// `template` cannot be parsed. A broken template of the model only takes conversations away.
    pub fn new(
        sources: TextSources,
        template: Option<String>,
        workers: usize,
    ) -> Result<Self, TemplateError> {
        let text = Arc::new(ModelText::new(sources, template)?);
        Ok(Self {
            token_chars: text.decoder.vocabulary.longest_chars().max(TOKEN_CHARS_LEAST),
            text,
            workers: Arc::new(Semaphore::new(workers.max(1))),
            jobs: Arc::new(Semaphore::new(JOBS_MOST)),
        })
    }

    pub fn decoder(&self) -> &Arc<TextDecoder> {
        &self.text.decoder
    }

    /// The most characters that one id can stand for.
    pub fn token_chars(&self) -> usize {
        self.token_chars
    }

    /// Ids from 0 that the tokenizer may know.
    pub fn vocab_size(&self) -> u32 {
        self.text.decoder.vocabulary.size()
    }

    /// The special tokens and the default chat template, in the keys of `tokenizer_config.json`;
    /// `None` for a model that names no `eos_token`.
    pub fn info(&self) -> Option<serde_json::Value> {
        let sources = &self.text.decoder.sources;
        let eos_token = sources.eos_token.as_ref()?;
        let template = sources.chat_templates.iter().find(|(name, _)| name == "default");
        Some(serde_json::json!({
            "bos_token": sources.bos_token,
            "eos_token": eos_token,
            "chat_template": template.map(|(_, source)| source),
        }))
    }

    /// A plain prompt; text that spells a special token is that token.
    pub async fn encode(
        &self,
        text: String,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, RouterError> {
        self.run(move |model| model.encode(&text, add_special_tokens)).await
    }

    /// As [`Self::encode`], with the place of each token.
    pub async fn pieces(
        &self,
        text: String,
        add_special_tokens: bool,
    ) -> Result<Tokenized, RouterError> {
        self.run(move |model| model.pieces(&text, add_special_tokens)).await
    }

    /// As [`Self::encode_rendered`], with the place of each token.
    pub async fn rendered_pieces(&self, rendered: Rendered) -> Result<Tokenized, RouterError> {
        self.run(move |model| model.rendered_pieces(&rendered)).await
    }

    /// The prompt of a conversation, in text.
    pub async fn render(&self, conversation: Arc<Conversation>) -> Result<Rendered, RouterError> {
        self.run(move |text| text.render(&conversation)).await
    }

    /// A rendered conversation; its template has written every special token already.
    pub async fn encode_rendered(&self, rendered: Rendered) -> Result<Vec<u32>, RouterError> {
        self.run(move |text| text.encode_rendered(&rendered)).await
    }

    /// Special tokens are part of the text.
    pub async fn decode(&self, ids: Vec<u32>) -> Result<String, RouterError> {
        self.run(move |text| {
            let text = text.decoder.sources.tokenizer.decode(&ids, false);
            text.map_err(|error| RouterError::Internal(anyhow!(error).context("decode ids")))
        })
        .await
    }

    async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&ModelText) -> Result<T, RouterError> + Send + 'static,
    ) -> Result<T, RouterError> {
        let overloaded = |_| RouterError::Overloaded { limit: JOBS_MOST, retry_after_s: 1 };
        let place = self.jobs.clone().try_acquire_owned().map_err(overloaded)?;
        let closed = |error| RouterError::Internal(anyhow::Error::new(error));
        let worker = self.workers.clone().acquire_owned().await.map_err(closed)?;
        let text = self.text.clone();
        // A thread cannot be interrupted, so it takes the permits along.
        let running = tokio::task::spawn_blocking(move || {
            let outcome = job(&text);
            drop((worker, place));
            outcome
        });
        running.await.map_err(|error| RouterError::Internal(anyhow::Error::new(error)))?
    }
}

struct ModelText {
    decoder: Arc<TextDecoder>,
    template: Option<ChatTemplate>,
}

impl ModelText {
    fn new(sources: TextSources, template: Option<String>) -> Result<Self, TemplateError> {
        let decoder = Arc::new(TextDecoder::new(sources));
        let sources = &decoder.sources;
        let named = |name: &str, token: &Option<String>| Some((name.to_owned(), token.clone()?));
        let ends = [("bos_token", &sources.bos_token), ("eos_token", &sources.eos_token)];
        let ends = ends.into_iter().filter_map(|(name, token)| named(name, token));
        let tokens = TemplateTokens {
            named: ends.chain(sources.special_tokens.iter().cloned()).collect(),
            control: sources.control_tokens(),
        };
        let template = match template {
            Some(given) => Some(ChatTemplate::new(&[("default".to_owned(), given)], tokens)?),
            None if sources.chat_templates.is_empty() => None,
            None => match ChatTemplate::new(&sources.chat_templates, tokens) {
                Ok(template) => Some(template),
                Err(error) => {
                    tracing::warn!(%error, "conversations are not served");
                    None
                }
            },
        };
        Ok(Self { decoder, template })
    }

    fn render(&self, conversation: &Conversation) -> Result<Rendered, RouterError> {
        let Some(template) = &self.template else {
            let message = "messages: the model has no chat template; send a prompt".to_owned();
            return Err(RouterError::Unsupported { field: "messages", message });
        };
        let now = chrono::Local::now().naive_local();
        template
            .render(conversation, now)
            .map_err(|error| RouterError::Invalid { field: "messages", message: error.to_string() })
    }

    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, RouterError> {
        ids(self.decoder.sources.encode(text, add_special_tokens, true))
    }

    fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>, RouterError> {
        let Some(segments) = rendered.segments() else {
            return self.encode(rendered.text(), false);
        };
        ids(self.decoder.sources.encode_segments(segments))
    }

    fn pieces(&self, text: &str, add_special_tokens: bool) -> Result<Tokenized, RouterError> {
        let encoding = self.decoder.sources.encode_with_offsets(text, add_special_tokens);
        let encoding = encoding.map_err(not_encoded)?;
        let tokens = encoding.get_tokens().iter().zip(encoding.get_offsets());
        let pieces = encoding.get_ids().iter().zip(tokens).map(|(&id, (token, &(start, stop)))| {
            Piece { id, token: token.clone(), chars: start..stop }
        });
        Ok(Tokenized { text: text.to_owned(), pieces: pieces.collect() })
    }

    fn rendered_pieces(&self, rendered: &Rendered) -> Result<Tokenized, RouterError> {
        let Some(segments) = rendered.segments() else {
            return self.pieces(rendered.text(), false);
        };
        let sources = &self.decoder.sources;
        let placed = sources.encode_segments_with_offsets(segments).map_err(not_encoded)?;
        let token = |id| sources.tokenizer.id_to_token(id).unwrap_or_default();
        let pieces = placed.into_iter().map(|(id, chars)| Piece { id, token: token(id), chars });
        Ok(Tokenized { text: rendered.text().to_owned(), pieces: pieces.collect() })
    }
}

fn ids(encoded: Result<Vec<u32>, CheckpointError>) -> Result<Vec<u32>, RouterError> {
    encoded.map_err(not_encoded)
}

fn not_encoded(error: CheckpointError) -> RouterError {
    RouterError::Internal(anyhow!(error).context("encode text"))
}

#[cfg(test)]
mod tests;
