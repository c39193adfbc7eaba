//! What the server says of itself: models, versions, health, metrics.

use axum::{
    Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::{App, refusal::Refusal, sampling::CHOICES_MAX};
use crate::{
    api::{Readiness, ServedModel},
    validation::STOPS_MOST,
};

#[derive(Serialize, JsonSchema)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

#[derive(Serialize, JsonSchema)]
pub struct ModelCard {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    parent: Option<String>,
    max_model_len: u32,
}

/// TGI's fields, then how the model is split and batched.
#[derive(Serialize, JsonSchema)]
pub struct Info {
    model_id: String,
    model_sha: Option<String>,
    model_pipeline_tag: &'static str,
    model_dtype: String,
    max_concurrent_requests: usize,
    max_best_of: usize,
    max_stop_sequences: usize,
    max_client_batch_size: usize,
    max_input_tokens: u32,
    max_total_tokens: u32,
    router: &'static str,
    version: &'static str,
    tp: u32,
    pp: u32,
    max_sequences: u32,
    max_batch_tokens: u32,
    kv_blocks: u32,
    kv_block_tokens: u32,
}

#[derive(Serialize, JsonSchema)]
pub struct Version {
    version: &'static str,
}

#[derive(Serialize, JsonSchema)]
pub struct Status {
    status: &'static str,
    /// Why it is not ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl Status {
    fn of(status: &'static str) -> Self {
        Self { status, reason: None }
    }
}

/// `GET /v1/models`.
pub async fn models(State(app): State<App>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![card(app.generator.model())] })
}

/// `GET /v1/models/{id}`; an id may hold slashes.
pub async fn model(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<ModelCard>, Refusal> {
    app.check_model_name(&id)?;
    Ok(Json(card(app.generator.model())))
}

fn card(model: ServedModel) -> ModelCard {
    ModelCard {
        root: model.name.clone(),
        id: model.name,
        object: "model",
        created: model.created_s,
        owned_by: "trireme",
        parent: None,
        max_model_len: model.max_model_len,
    }
}

/// `GET /info`.
pub async fn info(State(app): State<App>) -> Json<Info> {
    let model = app.generator.model();
    Json(Info {
        model_id: model.name,
        model_sha: None,
        model_pipeline_tag: "text-generation",
        model_dtype: model.dtype,
        max_concurrent_requests: app.config.max_concurrent_requests,
        max_best_of: app.config.max_choices.min(CHOICES_MAX as usize),
        max_stop_sequences: STOPS_MOST,
        max_client_batch_size: app.config.max_choices,
        max_input_tokens: model.max_model_len.saturating_sub(1),
        max_total_tokens: model.max_model_len,
        router: "trireme-router",
        version: env!("CARGO_PKG_VERSION"),
        tp: model.tp,
        pp: model.pp,
        max_sequences: model.max_sequences,
        max_batch_tokens: model.max_batch_tokens,
        kv_blocks: model.kv_blocks,
        kv_block_tokens: model.kv_block_tokens,
    })
}

/// `GET /version`.
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// `GET /live`: the process answers.
pub async fn live() -> Json<Status> {
    Json(Status::of("live"))
}

/// `GET /ready` and `GET /health`: 200 when a request would be run now, else 503 with the reason.
pub async fn ready(State(app): State<App>) -> Response {
    let (status, reason) = match app.generator.readiness() {
        Readiness::Ready => return Json(Status::of("ready")).into_response(),
        Readiness::Starting(reason) => ("starting", reason),
        Readiness::Lost(reason) => ("lost", reason),
        Readiness::Draining => ("draining", "the server is shutting down".to_owned()),
    };
    let body = Json(Status { status, reason: Some(reason) });
    (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], body).into_response()
}

/// `GET /metrics`, in the Prometheus text format.
pub async fn metrics(State(app): State<App>) -> Result<Response, Refusal> {
    let exposition = app
        .exposition
        .as_ref()
        .ok_or_else(|| Refusal::not_available("no metrics recorder is installed"))?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, exposition.render()).into_response())
}

/// `POST /reset_prefix_cache` and `/flush_cache`: forgets cached prefixes, between two benchmarks.
pub async fn reset_prefix_cache(State(app): State<App>) -> Result<Json<Status>, Refusal> {
    app.generator.reset_prefix_cache().await?;
    Ok(Json(Status::of("ok")))
}

/// `GET /tokenizer_info`: at least `eos_token`, as lm_eval's remote tokenizer needs.
pub async fn tokenizer_info(State(app): State<App>) -> Result<Json<Value>, Refusal> {
    // 404 tells lm_eval to look for a tokenizer elsewhere.
    let unknown = || Refusal::not_available("this model's end-of-sequence token is not known");
    app.generator.tokenizer_info().map(Json).ok_or_else(unknown)
}
