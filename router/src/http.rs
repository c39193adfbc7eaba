//! HTTP: the OpenAI and text-generation-inference APIs over a [`Generator`].
//!
//! Every request is read, checked and admitted before the head of its response is written, so a
//! stream's status is true. A client that leaves drops the response, and with it the generation.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Router,
    extract::Request,
    routing::{get, post},
};

use crate::{api::Generator, error::RouterError, metrics::Exposition, stack};
use fields::Fields;
use refusal::Refusal;

pub use server::serve;

mod about;
mod chat;
mod completions;
mod constraint;
mod conversation;
mod ending;
mod fields;
mod first_bytes;
mod logprobs;
mod prompts;
pub mod refusal;
mod sampling;
mod server;
mod tgi;
mod tokens;
pub mod turns;
mod usage;

#[cfg(test)]
pub(crate) mod tests;

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

    /// Refuses a request for another model. An absent name is taken.
    fn check_model(&self, fields: &Fields) -> Result<(), Refusal> {
        match fields.text("model")? {
            None | Some("") => Ok(()),
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
    fn check_choices(&self, prompts: usize, n: u32) -> Result<(), Refusal> {
        let limit = self.config.max_choices;
        let choices = prompts.saturating_mul(n as usize);
        if choices <= limit {
            return Ok(());
        }
        let field = if prompts > 1 { "prompt" } else { "n" };
        let message =
            format!("{field} asks for {choices} answers, one request may ask for {limit}");
        Err(Refusal::invalid(field, message))
    }

    fn now_s(&self) -> u64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

/// All routes under the whole stack.
pub fn routes(app: App) -> Router {
    let routes = Router::new()
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/models", get(about::models))
        .route("/v1/models/{*id}", get(about::model))
        .route("/", post(tgi::compatible))
        .route("/generate", post(tgi::generate))
        .route("/generate_stream", post(tgi::generate_stream))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(about::tokenizer_info))
        .route("/info", get(about::info))
        .route("/version", get(about::version))
        .route("/live", get(about::live))
        .route("/ready", get(about::ready))
        .route("/health", get(about::ready))
        .route("/metrics", get(about::metrics))
        .route("/reset_prefix_cache", post(about::reset_prefix_cache))
        .route("/flush_cache", post(about::reset_prefix_cache))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone());
    stack::wrap(routes, &app)
}

async fn no_route(request: Request) -> Refusal {
    Refusal::no_route(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> Refusal {
    Refusal::wrong_method(request.method().as_str(), request.uri().path())
}
