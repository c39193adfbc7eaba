//! What a client is told when a request is not served, in the words of its dialect.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::error::RouterError;

/// One refusal: everything either dialect says. As a response it carries itself as an extension,
/// and [`crate::stack`] writes the body, so that handlers and layers need not know the dialect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    /// The stable word for programs, such as `shard_lost`.
    pub code: &'static str,
    /// The field that is wrong, in the client's spelling.
    pub param: Option<String>,
    pub message: String,
    pub retry_after_s: Option<u64>,
}

impl Refusal {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, param: None, message: message.into(), retry_after_s: None }
    }

    /// 400: `message` says the limit and the value.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let refusal = Self::new(StatusCode::BAD_REQUEST, "invalid_value", message);
        Self { param: Some(field.into()), ..refusal }
    }

    /// The same of a field that the client sent under another name.
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            if let Some(words) = self.message.strip_prefix(from) {
                self.message = format!("{to}{words}");
            }
            self.param = Some(to.to_owned());
        }
        self
    }

    /// Of a field that is a list: names the entry, where the field itself is what is wrong.
    pub fn of_entry(mut self, field: &str, index: usize) -> Self {
        if self.param.as_deref() == Some(field) {
            let entry = format!("{field}[{index}]");
            let words = self.message.strip_prefix(field);
            self.message = match words.filter(|words| words.starts_with([' ', ':'])) {
                Some(words) => format!("{entry}{words}"),
                None => format!("{entry}: {}", self.message),
            };
            self.param = Some(entry);
        }
        self
    }

    /// 400: a field that must be there is not.
    pub fn missing(field: &'static str) -> Self {
        let message = format!("{field}: this field is required");
        Self { code: "missing_field", ..Self::invalid(field, message) }
    }

    /// 400: the body is not JSON.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed_body", message)
    }

    /// 422: understood, not supported.
    pub fn unsupported(field: impl Into<String>, message: impl Into<String>) -> Self {
        let refusal = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "unsupported_field", message);
        Self { param: Some(field.into()), ..refusal }
    }

    /// 404: no such route.
    pub fn no_route(method: &str, path: &str) -> Self {
        let message = format!("{method} {path}: there is no such route");
        Self::new(StatusCode::NOT_FOUND, "unknown_route", message)
    }

    /// 404: the route is known, what it shows is not there.
    pub fn not_available(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_available", message)
    }

    /// 405.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{method} {path}: this route takes another method");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message)
    }

    /// 408: the body did not come in time.
    pub fn slow_body(limit_s: u64) -> Self {
        let message = format!("the body did not arrive within {limit_s} s, the limit");
        Self::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    }

    /// 413.
    pub fn body_too_large(limit_bytes: usize, given_bytes: Option<u64>) -> Self {
        let given = given_bytes.map_or("more".into(), |bytes| format!("{bytes} bytes"));
        let message = format!("the body may have {limit_bytes} bytes, this one has {given}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    /// 415.
    pub fn wrong_media(given: &str) -> Self {
        let message = format!("content-type {given:?} is not application/json");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    /// 415: a compressed body.
    pub fn wrong_encoding(given: &str) -> Self {
        let message = format!("content-encoding {given:?} is not supported, only identity");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message)
    }

    /// 429: more requests than the server holds at once.
    pub fn too_many_requests(limit: usize) -> Self {
        RouterError::Overloaded { limit, retry_after_s: 1 }.into()
    }

    /// 500: a handler panicked.
    pub fn panicked() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "internal error")
    }

    /// `{"error": {"message", "type", "param", "code"}}`.
    pub fn openai(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            500..=599 => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }

    /// TGI's `{"error", "error_type"}`, with the words its clients know.
    pub fn tgi(&self) -> Value {
        let kind = match (self.status.as_u16(), self.code) {
            (429, _) => "overloaded",
            (_, "shard_lost") => "shard_lost",
            (503, _) => "healthcheck",
            (500..=599, _) => "generation",
            _ => "validation",
        };
        json!({"error": self.message, "error_type": kind})
    }
}

/// Which client a route speaks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenAi,
    Tgi,
}

impl Dialect {
    pub fn of_path(path: &str) -> Self {
        match path {
            "/" | "/generate" | "/generate_stream" | "/chat_tokenize" => Self::Tgi,
            _ => Self::OpenAi,
        }
    }

    /// The whole response to a refused request.
    pub fn response(self, refusal: &Refusal) -> Response {
        let (status, body) = match self {
            Self::OpenAi => (refusal.status, refusal.openai()),
            // TGI's clients know a wrong value by this status.
            Self::Tgi if refusal.status == StatusCode::BAD_REQUEST => {
                (StatusCode::UNPROCESSABLE_ENTITY, refusal.tgi())
            }
            Self::Tgi => (refusal.status, refusal.tgi()),
        };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = refusal.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The error as an event of a stream; `error` is the first key, by which clients know it.
#[derive(Serialize)]
#[serde(transparent)]
pub struct ErrorEvent(Value);

impl ErrorEvent {
    pub fn new(dialect: Dialect, refusal: &Refusal) -> Self {
        Self(match dialect {
            Dialect::OpenAi => refusal.openai(),
            Dialect::Tgi => refusal.tgi(),
        })
    }
}

impl From<RouterError> for Refusal {
    fn from(error: RouterError) -> Self {
        let message = error.to_string();
        let (status, code) = match &error {
            RouterError::Invalid { field, .. } => return Self::invalid(spelling(field), message),
            RouterError::Unsupported { field, .. } => {
                return Self::unsupported(spelling(field), message);
            }
            RouterError::Unauthorized => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
            RouterError::ModelNotFound { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            RouterError::Overloaded { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            RouterError::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, "not_ready"),
            RouterError::ShardLost => (StatusCode::SERVICE_UNAVAILABLE, "shard_lost"),
            RouterError::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            RouterError::SlowReader { .. } => (StatusCode::REQUEST_TIMEOUT, "slow_reader"),
            RouterError::Sequence(_) => (StatusCode::INTERNAL_SERVER_ERROR, "sequence_failed"),
            RouterError::Internal(cause) => {
                tracing::error!(error = format!("{cause:#}"), "a request failed");
                (StatusCode::INTERNAL_SERVER_ERROR, "internal_error")
            }
        };
        let retry_after_s = match (&error, status) {
            (RouterError::Overloaded { retry_after_s, .. }, _) => Some(*retry_after_s),
            (_, StatusCode::SERVICE_UNAVAILABLE) => Some(1),
            _ => None,
        };
        let param = matches!(error, RouterError::ModelNotFound { .. }).then(|| "model".into());
        Self { status, code, param, message, retry_after_s }
    }
}

/// The core's name of a field in the spelling of the HTTP API, where they differ.
fn spelling(field: &str) -> &str {
    match field {
        "max_new_tokens" => "max_tokens",
        "min_new_tokens" => "min_tokens",
        "include_stop" => "include_stop_str_in_output",
        "truncate" => "truncate_prompt_tokens",
        same => same,
    }
}
