//! Span export over OTLP/gRPC that can fail without harm.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{SdkTracerProvider, SpanData, SpanExporter},
};

use crate::Service;

/// Longest wait for one batch to be taken.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// A running export.
pub(crate) struct Export {
    pub provider: SdkTracerProvider,
    /// Whether a failure was told already.
    pub failed: Arc<AtomicBool>,
}

/// Starts a tracer provider that exports in batches from a thread of its own; its queue is bounded
/// (2,048 spans unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise) and drops what does not fit.
pub(crate) fn start(service: &Service, endpoint: &str) -> anyhow::Result<Export> {
    ensure!(
        endpoint.starts_with("http://"),
        "otlp endpoint {endpoint:?} must be of the form http://host:port"
    );
    ensure!(
        tokio::runtime::Handle::try_current().is_ok(),
        "the OTLP exporter must be installed inside a tokio runtime"
    );
    let exporter = OtlpExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .with_context(|| format!("otlp endpoint {endpoint:?}"))?;
    let failed = Arc::new(AtomicBool::new(false));
    let provider = SdkTracerProvider::builder()
        .with_resource(resource(service))
        .with_batch_exporter(SayOnce { inner: exporter, failed: failed.clone() })
        .build();
    Ok(Export { provider, failed })
}

fn resource(service: &Service) -> Resource {
    let rank = service.rank.map(|rank| KeyValue::new("trireme.rank", i64::from(rank)));
    Resource::builder()
        .with_service_name(service.name)
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attribute(KeyValue::new("service.instance.id", service.instance.clone()))
        .with_attributes(rank)
        .build()
}

/// Reports the first failure and swallows the rest.
#[derive(Debug)]
struct SayOnce<E> {
    inner: E,
    failed: Arc<AtomicBool>,
}

impl<E: SpanExporter> SpanExporter for SayOnce<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let outcome = self.inner.export(batch).await;
        if let Err(error) = &outcome
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "spans cannot be exported; serving goes on, this is said once");
        }
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
