//! W3C trace context (`traceparent`, `tracestate`) over gRPC metadata and HTTP headers.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapPropagator},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Puts the current span's context into an outgoing call. Adds nothing when spans are not exported.
pub fn inject(metadata: &mut MetadataMap) {
    let context = tracing::Span::current().context();
    TraceContextPropagator::new().inject_context(&context, &mut MetadataCarrier(metadata));
}

/// As [`inject`], for HTTP.
pub fn inject_headers(headers: &mut HeaderMap) {
    let context = tracing::Span::current().context();
    TraceContextPropagator::new().inject_context(&context, &mut HeaderCarrier(headers));
}

/// The caller's context, to be set as parent of a new span before it is entered.
pub fn extract(metadata: &MetadataMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &MetadataRead(metadata))
}

/// As [`extract`], for HTTP.
pub fn extract_headers(headers: &HeaderMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderRead(headers))
}

/// Makes `parent` the parent of a span that was not entered yet. Without export this does nothing.
pub fn set_parent(span: &tracing::Span, parent: Context) {
    // The one other failure is a span that was entered before, which is a defect of the caller.
    if let Err(tracing_opentelemetry::SetParentError::AlreadyStarted) = span.set_parent(parent) {
        debug_assert!(false, "the parent of a span was set after it was entered");
    }
}

struct MetadataCarrier<'a>(&'a mut MetadataMap);

impl Injector for MetadataCarrier<'_> {
    fn set(&mut self, key: &str, value: String) {
        let (Ok(key), Ok(value)) =
            (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value))
        else {
            return;
        };
        self.0.insert(key, value);
    }
}

struct HeaderCarrier<'a>(&'a mut HeaderMap);

impl Injector for HeaderCarrier<'_> {
    fn set(&mut self, key: &str, value: String) {
        let (Ok(key), Ok(value)) =
            (HeaderName::from_bytes(key.as_bytes()), HeaderValue::try_from(value))
        else {
            return;
        };
        self.0.insert(key, value);
    }
}

struct MetadataRead<'a>(&'a MetadataMap);

impl Extractor for MetadataRead<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        // The propagator asks by name; the list serves only the trait.
        Vec::new()
    }
}

struct HeaderRead<'a>(&'a HeaderMap);

impl Extractor for HeaderRead<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::TraceContextExt;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    /// What both carriers read from one `traceparent` value: trace id and span id, or nothing.
    fn check(traceparent: Option<&str>, expected: Option<(&str, &str)>) {
        let mut headers = HeaderMap::new();
        let mut metadata = MetadataMap::new();
        if let Some(value) = traceparent {
            headers.insert("traceparent", HeaderValue::from_str(value).unwrap());
            metadata.insert("traceparent", MetadataValue::try_from(value).unwrap());
        }
        for context in [extract(&metadata), extract_headers(&headers)] {
            let span = context.span().span_context().clone();
            let read =
                span.is_valid().then(|| (span.trace_id().to_string(), span.span_id().to_string()));
            let expected = expected.map(|(trace, span)| (trace.to_owned(), span.to_owned()));
            assert_eq!(read, expected, "{traceparent:?}");
        }
    }

    #[test]
    fn traceparent_is_read_or_ignored() {
        check(None, None);
        check(Some(&format!("00-{TRACE}-{SPAN}-01")), Some((TRACE, SPAN)));
        check(Some(&format!("00-{TRACE}-{SPAN}-00")), Some((TRACE, SPAN)));
        check(Some("00-0000-b7-01"), None);
        check(Some(&format!("00-{}-{SPAN}-01", "0".repeat(32))), None);
        check(Some("rubbish"), None);
    }

    #[test]
    fn without_export_nothing_is_injected() {
        let (mut headers, mut metadata) = (HeaderMap::new(), MetadataMap::new());
        inject_headers(&mut headers);
        inject(&mut metadata);
        assert!(headers.is_empty() && metadata.is_empty());
    }
}
