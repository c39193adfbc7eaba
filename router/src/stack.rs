//! What happens to every HTTP request before and after its handler, in one list.

use std::{
    any::Any,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use tower::ServiceBuilder;
use tower_http::{catch_panic::CatchPanicLayer, cors};
use tracing::Instrument;

use crate::{
    error::RouterError,
    http::{
        App,
        refusal::{Dialect, Refusal},
    },
    metrics,
};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// A longer id from a client is not kept: ids stand in logs and in every event.
pub const REQUEST_ID_CHARS_MAX: usize = 128;
/// Probes have no key and must be answered when the server is full.
const PROBES: &[&str] = &["/live", "/ready", "/health"];

/// Wraps the routes, outermost layer first.
pub fn wrap(routes: Router, app: &App) -> Router {
    let permits = Arc::new(Semaphore::new(app.config.max_concurrent_requests));
    let bound = Bound { permits, limit: app.config.max_concurrent_requests };
    routes.layer(
        ServiceBuilder::new()
            // Every request has an id, the client's or ours, and every response tells it.
            .layer(from_fn(identify))
            // One span for each request, under the caller's trace.
            .layer(from_fn(trace))
            // Counts and durations, to the last byte of the body.
            .layer(from_fn(measure))
            // Refusals get their body here, in the words of the route's clients.
            .layer(from_fn(speak))
            // A panic in a handler is one failed request.
            .layer(CatchPanicLayer::custom(panicked))
            // Browsers may call, with a key; before the key, since preflights carry none.
            .layer(cross_origin())
            // The key.
            .layer(from_fn_with_state(app.clone(), authorize))
            // More requests than this are refused, not queued. Bodies are bounded as they are
            // read, by `http::fields`. Nothing is compressed: events must leave at once.
            .layer(from_fn_with_state(bound, admit)),
    )
}

/// Whether a client's id can be kept.
pub fn is_request_id(id: &str) -> bool {
    (1..=REQUEST_ID_CHARS_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The id of a request, from `x-request-id` or made up.
#[derive(Clone, Debug)]
pub struct RequestId(Arc<str>);

impl RequestId {
    fn of(request: &Request) -> Self {
        let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
        match given.filter(|id| is_request_id(id)) {
            Some(id) => Self(id.into()),
            None => Self(uuid::Uuid::new_v4().simple().to_string().into()),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of one of several choices; the first has the request's.
    pub fn of_choice(&self, choice: usize) -> String {
        match choice {
            0 => self.0.to_string(),
            _ => format!("{}-{choice}", self.0),
        }
    }
}

async fn identify(mut request: Request, next: Next) -> Response {
    let id = RequestId::of(&request);
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The route as written in the table; a path that no route knows must not make a new label.
fn route(request: &Request) -> String {
    let matched = request.extensions().get::<MatchedPath>();
    matched.map_or("unknown", MatchedPath::as_str).to_owned()
}

async fn trace(request: Request, next: Next) -> Response {
    let id = request.extensions().get::<RequestId>().map_or("", |id| &*id.0).to_owned();
    let span = tracing::info_span!(
        "http_request",
        otel.kind = "server",
        otel.status_code = tracing::field::Empty,
        http.request.method = %request.method(),
        http.route = route(&request),
        http.response.status_code = tracing::field::Empty,
        request_id = id,
    );
    trireme_telemetry::set_parent(&span, trireme_telemetry::extract_headers(request.headers()));
    let response = next.run(request).instrument(span.clone()).await;
    span.record("http.response.status_code", response.status().as_u16());
    if response.status().is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
    // The span lives until the body ends.
    response.map(|body| Held::wrap(body, span))
}

/// A request in flight; its end is the end of this value.
struct InFlight {
    route: String,
    started: Instant,
    status: u16,
}

/// What nginx calls a client that left before the response began.
const CLIENT_LEFT: u16 = 499;

impl Drop for InFlight {
    fn drop(&mut self) {
        metrics::http_ended(&self.route, self.status, self.started.elapsed());
    }
}

async fn measure(request: Request, next: Next) -> Response {
    metrics::http_started();
    let mut flight =
        InFlight { route: route(&request), started: Instant::now(), status: CLIENT_LEFT };
    let response = next.run(request).await;
    flight.status = response.status().as_u16();
    response.map(|body| Held::wrap(body, flight))
}

async fn speak(request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let mut response = next.run(request).await;
    let Some(refusal) = response.extensions_mut().remove::<Refusal>() else {
        return response;
    };
    tracing::debug!(status = refusal.status.as_u16(), code = refusal.code, "refused");
    let mut spoken = dialect.response(&refusal);
    // Kept: `Allow` of a wrong method, and what CORS added.
    for (name, value) in response.headers() {
        if name != header::CONTENT_LENGTH && !spoken.headers().contains_key(name) {
            spoken.headers_mut().insert(name, value.clone());
        }
    }
    spoken
}

fn panicked(_cause: Box<dyn Any + Send>) -> Response {
    // The cause may quote a request; the panic hook has told where it was.
    tracing::error!("a handler panicked");
    Refusal::panicked().into_response()
}

fn cross_origin() -> cors::CorsLayer {
    let headers = [
        header::AUTHORIZATION,
        header::CONTENT_TYPE,
        REQUEST_ID,
        HeaderName::from_static("traceparent"),
        HeaderName::from_static("tracestate"),
    ];
    cors::CorsLayer::new()
        .allow_origin(cors::Any)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(headers)
        .expose_headers([REQUEST_ID, header::RETRY_AFTER])
        .max_age(Duration::from_secs(3600))
}

async fn authorize(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(key) = &app.config.api_key else {
        return next.run(request).await;
    };
    if is_open(request.uri().path()) || bears(&request, key) {
        return next.run(request).await;
    }
    Refusal::from(RouterError::Unauthorized).into_response()
}

/// Routes that need no key: probes, and what describes the API, of which a browser loads the page
/// before its user can give it the key. They tell nothing of the model.
fn is_open(path: &str) -> bool {
    let described = path == "/openapi.json" || path == "/docs" || path.starts_with("/docs/");
    described || PROBES.contains(&path)
}

/// Compares in a time that does not tell how much of the key was right.
fn bears(request: &Request, key: &str) -> bool {
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let Some((scheme, given)) = given.and_then(|value| value.split_at_checked("bearer ".len()))
    else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"bearer ") && given.ct_eq(key.as_bytes()).into()
}

#[derive(Clone)]
struct Bound {
    permits: Arc<Semaphore>,
    limit: usize,
}

async fn admit(State(bound): State<Bound>, request: Request, next: Next) -> Response {
    if PROBES.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    match bound.permits.try_acquire_owned() {
        Ok(permit) => next.run(request).await.map(|body| Held::wrap(body, permit)),
        Err(_) => Refusal::too_many_requests(bound.limit).into_response(),
    }
}

/// A body that holds something until it ended or its client left.
struct Held<T> {
    body: Body,
    _held: T,
}

impl<T: Send + Unpin + 'static> Held<T> {
    fn wrap(body: Body, held: T) -> Body {
        Body::new(Self { body, _held: held })
    }
}

impl<T: Unpin> HttpBody for Held<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
