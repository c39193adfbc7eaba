//! Logs, spans and the W3C trace context over gRPC metadata and HTTP headers, the same in every
//! process.
//!
//! Logs go to stderr, filtered by `TRIREME_LOG` (the syntax of `tracing_subscriber::EnvFilter`,
//! `info` by default). With an OTLP endpoint, spans of level info and above are exported over gRPC
//! in batches, whatever the log filter says.

#![forbid(unsafe_code)]

mod export;
mod propagation;

use std::{io::IsTerminal, sync::atomic::Ordering, time::Duration};

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt,
};

pub use propagation::{extract, extract_headers, inject, inject_headers, set_parent};

/// Names the environment variable that filters the logs.
pub const LOG_VARIABLE: &str = "TRIREME_LOG";

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// Who speaks: the resource of every exported span.
#[derive(Clone, Debug)]
pub struct Service {
    /// `service.name`.
    pub name: &'static str,
    /// `trireme.rank`, in a shard.
    pub rank: Option<u32>,
    /// `service.instance.id`; unique among the processes that run at one time.
    pub instance: String,
}

impl From<&'static str> for Service {
    /// A service without a rank; its instance is named by host-wide process id and start time.
    fn from(name: &'static str) -> Self {
        let started =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let instance = format!("{name}-{}-{:x}", std::process::id(), started.as_nanos());
        Self { name, rank: None, instance }
    }
}

/// Installs logging and, with an endpoint, OTLP export over gRPC. Keep the guard until after the
/// drain. Must run inside a tokio runtime when an endpoint is given: the exporter's connection
/// lives on it.
///
/// # Errors
/// `TRIREME_LOG` or the endpoint cannot be parsed, or a subscriber is installed already. An
/// endpoint that does not answer is no error: that is logged once, and spans are dropped.
pub fn install(
    service: impl Into<Service>,
    format: LogFormat,
    otlp_endpoint: Option<&str>,
) -> anyhow::Result<Guard> {
    let filter = log_filter(std::env::var(LOG_VARIABLE).ok())?;
    let export =
        otlp_endpoint.map(|endpoint| export::start(&service.into(), endpoint)).transpose()?;
    let spans = export.as_ref().map(|export| {
        tracing_opentelemetry::layer()
            .with_tracer(export.provider.tracer("trireme"))
            .with_filter(span_filter())
    });
    tracing_subscriber::registry()
        .with(log_layer(format).with_filter(filter))
        .with(spans)
        .try_init()
        .context("install the tracing subscriber")?;
    Ok(Guard { export })
}

/// Flushes and ends the export.
#[must_use = "dropping the guard loses the spans of the last seconds"]
pub struct Guard {
    export: Option<export::Export>,
}

impl Guard {
    /// Exports what is left, within the deadline, and ends the export. Blocks the calling thread,
    /// so the runtime must have another one to send on.
    pub fn flush(self, deadline: Duration) {
        let Some(export::Export { provider, failed }) = self.export else {
            return;
        };
        // On a thread of its own: the SDK takes a lock before it looks at its deadline.
        let (done, ended) = std::sync::mpsc::sync_channel(1);
        let spawned = std::thread::Builder::new().name("otlp-flush".into()).spawn(move || {
            let _ = done.send(provider.shutdown_with_timeout(deadline));
        });
        let outcome = match spawned {
            Ok(_detached) => ended.recv_timeout(deadline),
            Err(error) => {
                tracing::warn!(%error, "the last spans are lost: no thread to flush them on");
                return;
            }
        };
        if !matches!(outcome, Ok(Ok(()))) && !failed.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                deadline_ms = deadline.as_millis(),
                "the last spans are lost: the collector did not take them in time"
            );
        }
    }
}

fn log_filter(directives: Option<String>) -> anyhow::Result<EnvFilter> {
    let directives = directives.filter(|text| !text.trim().is_empty());
    let text = directives.as_deref().unwrap_or("info");
    // The SDK reports each failed export; ours is said once, by `export`.
    let quiet = format!("opentelemetry=off,opentelemetry_sdk=off,opentelemetry-otlp=off,{text}");
    EnvFilter::try_new(quiet).with_context(|| format!("parse {LOG_VARIABLE}={text:?}"))
}

/// What is exported. The exporter speaks gRPC itself: spans of its own transport must never reach
/// it, or each export would cause the next.
fn span_filter() -> Targets {
    ["h2", "hyper", "hyper_util", "tonic", "tower", "opentelemetry"]
        .into_iter()
        .fold(Targets::new(), |targets, own| {
            targets.with_target(own, tracing::level_filters::LevelFilter::OFF)
        })
        .with_default(tracing::Level::INFO)
}

fn log_layer(format: LogFormat) -> Box<dyn Layer<Registry> + Send + Sync> {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => {
            layer.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_directives_are_parsed_or_named() {
        for (given, accepted) in [
            (None, true),
            (Some(""), true),
            (Some("debug"), true),
            (Some("warn,trireme_router=trace"), true),
            (Some("trireme_router=loudly"), false),
        ] {
            let parsed = log_filter(given.map(str::to_owned));
            assert_eq!(parsed.is_ok(), accepted, "{given:?}");
            if let Err(error) = parsed {
                let text = format!("{error:#}");
                assert!(text.contains("TRIREME_LOG") && text.contains("loudly"), "{text}");
            }
        }
    }
}
