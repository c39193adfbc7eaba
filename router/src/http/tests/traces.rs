//! The span of a request: its parent, its attributes, its end.

use std::collections::BTreeMap;

use http::Method;
use http_body_util::Full;
use opentelemetry::trace::{SpanKind, Status, TracerProvider};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{SdkTracerProvider, SpanData, SpanExporter},
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing_subscriber::layer::SubscriberExt;

use super::{PATIENCE, Server};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

#[derive(Debug)]
struct Sent(mpsc::Sender<SpanData>);

impl SpanExporter for Sent {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        for span in batch {
            let _ = self.0.try_send(span);
        }
        Ok(())
    }
}

/// The span of one request: it hangs below the caller's, and tells `expected`.
async fn check(body: Value, expected: &[(&str, &str)], status: Status) {
    let (sender, mut spans) = mpsc::channel(16);
    let provider = SdkTracerProvider::builder().with_simple_exporter(Sent(sender)).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    // The test's runtime has one thread, so this reaches the server's tasks.
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let server = Server::start().await;
    let request = server
        .request(Method::POST, "/v1/completions")
        .header("traceparent", format!("00-{TRACE}-{CALLER}-01"));
    server.send(request.body(Full::from(body.to_string())).unwrap()).await;
    let next = async {
        loop {
            let span = spans.recv().await.expect("a span");
            if span.name == "http_request" {
                return span;
            }
        }
    };
    let span = tokio::time::timeout(PATIENCE, next).await.expect("the span ends");
    assert_eq!(span.span_context.trace_id().to_string(), TRACE, "{body}");
    assert_eq!(span.parent_span_id.to_string(), CALLER, "{body}");
    assert_eq!(span.span_kind, SpanKind::Server);
    assert_eq!(span.status, status, "{body}");
    let attributes: BTreeMap<_, _> =
        span.attributes.iter().map(|pair| (pair.key.as_str(), pair.value.to_string())).collect();
    for (key, value) in expected {
        assert_eq!(attributes.get(key).map(String::as_str), Some(*value), "{key} of {body}");
    }
}

#[tokio::test]
async fn a_request_is_a_span_below_the_callers() {
    for stream in [false, true] {
        let expected = [
            ("http.request.method", "POST"),
            ("http.route", "/v1/completions"),
            ("http.response.status_code", "200"),
            ("request_id", "test"),
            ("gen_ai.request.model", "org/tiny"),
            ("gen_ai.usage.output_tokens", "3"),
        ];
        let body = json!({"prompt": "hi", "stream": stream, "max_tokens": 3});
        check(body, &expected, Status::Unset).await;
    }
    let expected = [("http.response.status_code", "500")];
    check(json!({"prompt": "broken"}), &expected, Status::error("")).await;
}
