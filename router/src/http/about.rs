//! What the server says of itself: models, versions, health, metrics.

use axum::{
    Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{App, refusal::Refusal};
use crate::api::{Readiness, ServedModel};

/// `GET /v1/models`.
pub async fn models(State(app): State<App>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app.generator.model())]}))
}

/// `GET /v1/models/{id}`; an id may hold slashes.
pub async fn model(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    app.check_model_name(&id)?;
    Ok(Json(card(&app.generator.model())))
}

fn card(model: &ServedModel) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "trireme",
        "root": model.name,
        "parent": null,
        "max_model_len": model.max_model_len,
    })
}

/// `GET /info`: TGI's fields, then how the model is split and batched.
pub async fn info(State(app): State<App>) -> Json<Value> {
    let model = app.generator.model();
    Json(json!({
        "model_id": model.name,
        "model_sha": null,
        "model_pipeline_tag": "text-generation",
        "model_dtype": model.dtype,
        "max_concurrent_requests": app.config.max_concurrent_requests,
        "max_best_of": 1,
        "max_client_batch_size": app.config.max_choices,
        "max_input_tokens": model.max_model_len.saturating_sub(1),
        "max_total_tokens": model.max_model_len,
        "router": "trireme-router",
        "version": env!("CARGO_PKG_VERSION"),
        "tp": model.tp,
        "pp": model.pp,
        "max_sequences": model.max_sequences,
        "max_batch_tokens": model.max_batch_tokens,
        "kv_blocks": model.kv_blocks,
        "kv_block_tokens": model.kv_block_tokens,
    }))
}

/// `GET /version`.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /live`: the process answers.
pub async fn live() -> Json<Value> {
    Json(json!({"status": "live"}))
}

/// `GET /ready` and `GET /health`: 200 when a request would be run now, else 503 with the reason.
pub async fn ready(State(app): State<App>) -> Response {
    let (status, reason) = match app.generator.readiness() {
        Readiness::Ready => return Json(json!({"status": "ready"})).into_response(),
        Readiness::Starting(reason) => ("starting", reason),
        Readiness::Lost(reason) => ("lost", reason),
        Readiness::Draining => ("draining", "the server is shutting down".to_owned()),
    };
    let body = Json(json!({"status": status, "reason": reason}));
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
pub async fn reset_prefix_cache(State(app): State<App>) -> Result<Json<Value>, Refusal> {
    app.generator.reset_prefix_cache().await?;
    Ok(Json(json!({"status": "ok"})))
}

/// `GET /tokenizer_info`: at least `eos_token`, as lm_eval's remote tokenizer needs.
pub async fn tokenizer_info(State(app): State<App>) -> Result<Json<Value>, Refusal> {
    // 404 tells lm_eval to look for a tokenizer elsewhere.
    let unknown = || Refusal::not_available("this model's end-of-sequence token is not known");
    app.generator.tokenizer_info().map(Json).ok_or_else(unknown)
}
