//! Every route: what serves it, and what the OpenAPI document says of it.

use axum::{
    Router,
    extract::Request,
    http::Method,
    routing::{MethodRouter, get, post},
};
use schemars::{JsonSchema, Schema, SchemaGenerator};

use super::{
    App, about, chat, completions, constraint, conversation, documentation,
    fields::field::Field,
    refusal::{Dialect, Refusal},
    sampling, tgi, tokens,
};
use crate::stack;

/// A route as it is described.
pub struct Operation {
    pub method: Method,
    /// As axum matches it.
    pub path: &'static str,
    pub summary: &'static str,
    /// The tables of the body's fields; empty for a route without a body.
    pub fields: Vec<&'static [Field]>,
    pub answer: Option<SchemaOf>,
    /// The data of a stream's events, where there is a stream.
    pub event: Option<SchemaOf>,
}

pub type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

impl Operation {
    fn get(path: &'static str, summary: &'static str) -> Self {
        Self { method: Method::GET, path, summary, fields: Vec::new(), answer: None, event: None }
    }

    fn post(path: &'static str, summary: &'static str) -> Self {
        Self { method: Method::POST, ..Self::get(path, summary) }
    }

    fn takes(self, fields: &[&'static [Field]]) -> Self {
        Self { fields: fields.to_vec(), ..self }
    }

    fn answers<T: JsonSchema>(self) -> Self {
        Self { answer: Some(|generator| generator.subschema_for::<T>()), ..self }
    }

    fn streams<T: JsonSchema>(self) -> Self {
        Self { event: Some(|generator| generator.subschema_for::<T>()), ..self }
    }

    pub fn dialect(&self) -> Dialect {
        Dialect::of_path(self.path)
    }
}

/// The routes in the order of the document.
pub fn table() -> Vec<(Operation, MethodRouter<App>)> {
    let mut table = openai();
    table.extend(tgi());
    table.extend(tokenizer());
    table.extend(server());
    table
}

fn openai() -> Vec<(Operation, MethodRouter<App>)> {
    vec![
        (
            Operation::post("/v1/completions", "Completes prompts.")
                .takes(&[completions::FIELDS, constraint::FIELDS, sampling::FIELDS])
                .answers::<completions::Completion<'static>>()
                .streams::<completions::Completion<'static>>(),
            post(completions::create),
        ),
        (
            Operation::post("/v1/chat/completions", "Answers a conversation.")
                .takes(&[chat::FIELDS, conversation::FIELDS, constraint::FIELDS, sampling::FIELDS])
                .answers::<chat::Completion<'static, chat::Choice>>()
                .streams::<chat::Completion<'static, chat::stream::Chunk>>(),
            post(chat::create),
        ),
        (
            Operation::get("/v1/models", "Lists the served model.").answers::<about::ModelList>(),
            get(about::models),
        ),
        (
            Operation::get("/v1/models/{*id}", "Shows the served model.")
                .answers::<about::ModelCard>(),
            get(about::model),
        ),
    ]
}

fn tgi() -> Vec<(Operation, MethodRouter<App>)> {
    vec![
        (
            Operation::post("/", "TGI's compatible form; a whole answer comes in a list.")
                .takes(&[tgi::FIELDS])
                .answers::<[tgi::Generated; 1]>()
                .streams::<tgi::stream::Event>(),
            post(tgi::compatible),
        ),
        (
            Operation::post("/generate", "Completes a text, whole.")
                .takes(&[tgi::FIELDS])
                .answers::<tgi::Generated>(),
            post(tgi::generate),
        ),
        (
            Operation::post("/generate_stream", "Completes a text, token by token.")
                .takes(&[tgi::FIELDS])
                .streams::<tgi::stream::Event>(),
            post(tgi::generate_stream),
        ),
        (
            Operation::get("/info", "What is served, and its limits.").answers::<about::Info>(),
            get(about::info),
        ),
    ]
}

fn tokenizer() -> Vec<(Operation, MethodRouter<App>)> {
    vec![
        (
            Operation::post("/tokenize", "Text to ids, in vLLM's shape or TGI's.")
                .takes(&[tokens::TOKENIZE, conversation::FIELDS])
                .answers::<tokens::Tokens>(),
            post(tokens::tokenize),
        ),
        (
            Operation::post("/detokenize", "Ids to text.")
                .takes(&[tokens::DETOKENIZE])
                .answers::<tokens::Text>(),
            post(tokens::detokenize),
        ),
        (
            Operation::post("/chat_tokenize", "A conversation's prompt and its tokens.")
                .takes(&[tokens::CHAT_TOKENIZE, conversation::FIELDS])
                .answers::<tokens::ChatTokens>(),
            post(tokens::chat_tokenize),
        ),
        (
            Operation::get("/tokenizer_info", "The tokenizer's special tokens.")
                .answers::<serde_json::Map<String, serde_json::Value>>(),
            get(about::tokenizer_info),
        ),
    ]
}

fn server() -> Vec<(Operation, MethodRouter<App>)> {
    let ready = "200 when a request would be run now, else 503 with the reason.";
    let reset = "Forgets cached prefixes.";
    vec![
        (
            Operation::get("/version", "The server's version.").answers::<about::Version>(),
            get(about::version),
        ),
        (
            Operation::get("/live", "200 while the process answers.").answers::<about::Status>(),
            get(about::live),
        ),
        (Operation::get("/ready", ready).answers::<about::Status>(), get(about::ready)),
        (Operation::get("/health", ready).answers::<about::Status>(), get(about::ready)),
        (Operation::get("/metrics", "Prometheus text."), get(about::metrics)),
        (
            Operation::post("/reset_prefix_cache", reset).answers::<about::Status>(),
            post(about::reset_prefix_cache),
        ),
        (
            Operation::post("/flush_cache", reset).answers::<about::Status>(),
            post(about::reset_prefix_cache),
        ),
        (
            Operation::get("/openapi.json", "This document.")
                .answers::<serde_json::Map<String, serde_json::Value>>(),
            get(documentation::document),
        ),
    ]
}

/// All routes under the whole stack.
pub fn routes(app: App) -> Router {
    let routes = table()
        .into_iter()
        .fold(Router::new(), |routes, (operation, service)| routes.route(operation.path, service))
        .route("/docs", get(documentation::page))
        .route("/docs/{file}", get(documentation::asset))
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
