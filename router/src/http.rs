//! HTTP: the OpenAI and text-generation-inference APIs over a [`Generator`].
//!
//! Every request is read, checked and admitted before the head of its response is written, so a
//! stream's status is true. A client that leaves drops the response, and with it the generation.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{api::Generator, error::RouterError, metrics::Exposition};
use fields::{Fields, field::Field};
use refusal::Refusal;

pub use routes::routes;
pub use server::serve;

mod about;
mod best_of;
mod chat;
mod completions;
mod constraint;
mod conversation;
mod documentation;
mod ending;
mod fields;
mod first_bytes;
mod logprobs;
mod prompts;
pub mod refusal;
mod routes;
mod sampling;
mod server;
mod tgi;
mod tokens;
mod tools;
pub mod turns;
mod usage;

#[cfg(test)]
pub(crate) mod tests;

/// The fields of every body, and so all that a body is read for.
const TABLES: &[&[Field]] = &[
    completions::FIELDS,
    chat::FIELDS,
    conversation::FIELDS,
    constraint::FIELDS,
    sampling::FIELDS,
    tgi::FIELDS,
    tokens::TOKENIZE,
    tokens::DETOKENIZE,
    tokens::CHAT_TOKENIZE,
];

/// The front's own bounds.
#[derive(Clone)]
pub struct HttpConfig {
    /// `Authorization: Bearer` must hold it, on all routes but `/live`, `/ready` and `/health`.
    pub api_key: Option<String>,
    /// `None`: enough for any prompt, see [`App::body_limit_bytes`].
    pub body_limit_bytes: Option<usize>,
    /// Requests whose response has not ended; one more is refused with 429.
    pub max_concurrent_requests: usize,
    /// Choices of one request: prompts times `n`. No more than may wait in the queue.
    pub max_choices: usize,
    /// A new connection that says nothing is closed.
    pub first_bytes_limit: Duration,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            api_key: None,
            body_limit_bytes: None,
            max_concurrent_requests: 4096,
            max_choices: 512,
            first_bytes_limit: Duration::from_secs(30),
        }
    }
}

/// Least limit of a body that is not given.
const BODY_BYTES_LEAST: usize = 2 << 20;
/// An id of a prompt takes up to ten digits, a comma and a blank; the rest is for other fields.
const BODY_BYTES_PER_TOKEN: usize = 16;

/// What handlers share. Cheap to clone.
#[derive(Clone)]
pub struct App {
    pub generator: Arc<dyn Generator>,
    pub config: Arc<HttpConfig>,
    /// `None` only where no recorder is installed; `/metrics` is then not found.
    pub exposition: Option<Exposition>,
}

impl App {
    pub fn new(
        generator: Arc<dyn Generator>,
        config: HttpConfig,
        exposition: Option<Exposition>,
    ) -> Self {
        Self { generator, config: Arc::new(config), exposition }
    }

    /// As configured; else 2 MiB, or more where a prompt of the model's length in ids needs it.
    fn body_limit_bytes(&self) -> usize {
        self.config.body_limit_bytes.unwrap_or_else(|| {
            let tokens = self.generator.model().max_model_len as usize;
            tokens.saturating_mul(BODY_BYTES_PER_TOKEN).max(BODY_BYTES_LEAST)
        })
    }

    /// Refuses a request for another model. An absent name is taken, and so are the names by which
    /// TGI's clients (`text-generation`, `huggingface_hub`) call whatever is served.
    fn check_model(&self, fields: &Fields) -> Result<(), Refusal> {
        match fields.text("model")? {
            None | Some("" | "tgi" | "dummy") => Ok(()),
            Some(given) => self.check_model_name(given),
        }
    }

    fn check_model_name(&self, given: &str) -> Result<(), Refusal> {
        let served = self.generator.model().name;
        if given == served {
            return Ok(());
        }
        let given = given.chars().take(200).collect();
        Err(RouterError::ModelNotFound { given, served }.into())
    }

    /// Refuses more answers than can wait at once, which could never be admitted together.
    /// `field` is what asks for `each` of them for each prompt.
    fn check_choices(&self, prompts: usize, each: u32, field: &'static str) -> Result<(), Refusal> {
        let limit = self.config.max_choices;
        let choices = prompts.saturating_mul(each as usize);
        if choices <= limit {
            return Ok(());
        }
        let field = if prompts > 1 { "prompt" } else { field };
        let message =
            format!("{field} asks for {choices} answers, one request may ask for {limit}");
        Err(Refusal::invalid(field, message))
    }

    /// OpenAI's `system_fingerprint`: two answers with the same one come from the same arithmetic.
    fn fingerprint(&self) -> String {
        let model = self.generator.model();
        let version = env!("CARGO_PKG_VERSION");
        format!("trireme-{version}-{}-tp{}-pp{}", model.dtype, model.tp, model.pp)
    }

    fn now_s(&self) -> u64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}
