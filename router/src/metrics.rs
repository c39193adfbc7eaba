//! What the router measures: every name, its meaning and its buckets in one table, and one typed
//! function for each event. Rendered by the `/metrics` route in the Prometheus text format.

use std::time::Duration;

use anyhow::Context as _;
use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use trireme_scheduler::Usage;

pub use table::{Kind, METRICS, Metric};

mod table;

/// How often histograms are folded, so that a server nobody scrapes does not grow.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Renders what was recorded. Cheap to clone.
#[derive(Clone)]
pub struct Exposition {
    handle: PrometheusHandle,
}

impl Exposition {
    /// The Prometheus text format, version 0.0.4.
    pub fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds histograms, for ever. The HTTP server runs it as long as it serves.
    pub async fn upkeep(&self) {
        let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
        loop {
            interval.tick().await;
            self.handle.run_upkeep();
        }
    }
}

/// Installs the recorder for this process.
///
/// # Errors
/// A recorder is installed already.
pub fn install() -> anyhow::Result<Exposition> {
    let (recorder, exposition) = recorder()?;
    metrics::set_global_recorder(recorder)
        .map_err(|error| anyhow::anyhow!("{error}"))
        .context("install the metrics recorder")?;
    describe();
    Ok(exposition)
}

fn recorder() -> anyhow::Result<(PrometheusRecorder, Exposition)> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let Kind::Histogram(buckets) = metric.kind {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), buckets)
                .with_context(|| format!("buckets of {}", metric.name))?;
        }
    }
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    Ok((recorder, Exposition { handle }))
}

/// Gives every metric its help text, and those without labels a first value: a rate over a counter
/// that appears late would miss its first increase.
fn describe() {
    for Metric { name, help, kind, labels } in METRICS {
        match kind {
            Kind::Counter => metrics::describe_counter!(*name, *help),
            Kind::Gauge => metrics::describe_gauge!(*name, *help),
            Kind::Histogram(_) => metrics::describe_histogram!(*name, *help),
        }
        match (kind, labels.is_empty()) {
            (Kind::Counter, true) => counter!(*name).absolute(0),
            (Kind::Gauge, true) => gauge!(*name).set(0.0),
            _ => {}
        }
    }
}

/// The scheduler's figures, after each turn of the loop.
pub fn usage(usage: &Usage) {
    gauge!(table::QUEUE_WAITING).set(usage.waiting as f64);
    gauge!(table::BATCH_RUNNING).set(usage.running as f64);
    gauge!(table::STEPS_IN_FLIGHT).set(usage.steps_in_flight as f64);
    gauge!(table::KV_BLOCKS_TOTAL).set(usage.blocks_total as f64);
    gauge!(table::KV_BLOCKS_USED).set(usage.blocks_used as f64);
    gauge!(table::KV_BLOCKS_CACHED).set(usage.blocks_cached as f64);
}

/// Whether a request would be run now.
pub fn ready(ready: bool) {
    gauge!(table::READY).set(if ready { 1.0 } else { 0.0 });
}

/// A request was turned away because the queue was full.
pub fn refused() {
    counter!(table::QUEUE_REFUSED).increment(1);
}

/// A sequence left the queue for the first time.
pub fn started(queue_wait: Duration, prompt_tokens: u32, cached_tokens: u32) {
    histogram!(table::QUEUE_WAIT).record(queue_wait);
    histogram!(table::REQUEST_PROMPT_TOKENS).record(f64::from(prompt_tokens));
    counter!(table::PROMPT_TOKENS).increment(u64::from(prompt_tokens));
    counter!(table::CACHED_TOKENS).increment(u64::from(cached_tokens));
}

/// A sequence's first token, so long after the request was admitted.
pub fn first_token(since_admission: Duration) {
    counter!(table::GENERATED_TOKENS).increment(1);
    histogram!(table::TIME_TO_FIRST_TOKEN).record(since_admission);
}

/// Each later token, so long after the one before.
pub fn token(since_last: Duration) {
    counter!(table::GENERATED_TOKENS).increment(1);
    histogram!(table::INTER_TOKEN).record(since_last);
}

/// How a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Stop,
    Length,
    Failed,
    /// The client left, or a transport dropped it.
    Cancelled,
}

impl Outcome {
    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A sequence ended, once for each admitted one.
pub fn ended(outcome: Outcome, since_admission: Duration, generated_tokens: u32) {
    counter!(table::SEQUENCES, "outcome" => outcome.label()).increment(1);
    if outcome == Outcome::Cancelled {
        counter!(table::CANCELLED).increment(1);
    }
    histogram!(table::REQUEST_DURATION).record(since_admission);
    histogram!(table::REQUEST_GENERATED_TOKENS).record(f64::from(generated_tokens));
}

/// A running sequence gave its blocks back and waits to be recomputed.
pub fn preempted() {
    counter!(table::PREEMPTIONS).increment(1);
}

/// The group of shards was lost.
pub fn group_lost() {
    counter!(table::GROUPS_LOST).increment(1);
}

/// One step, from sending the plan to the last answer.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub duration: Duration,
    pub prefill_tokens: u32,
    pub decode_sequences: u32,
    /// At the slowest rank.
    pub grammar_wait: Duration,
}

/// A step was answered by all ranks.
pub fn step(step: Step) {
    let kind = match (step.prefill_tokens, step.decode_sequences) {
        (0, _) => "decode",
        (_, 0) => "prefill",
        _ => "mixed",
    };
    histogram!(table::STEP_DURATION, "kind" => kind).record(step.duration);
    histogram!(table::STEP_TOKENS).record(f64::from(step.prefill_tokens + step.decode_sequences));
    histogram!(table::STEP_SEQUENCES).record(f64::from(step.decode_sequences));
    if !step.grammar_wait.is_zero() {
        histogram!(table::STEP_GRAMMAR_WAIT).record(step.grammar_wait);
    }
}

/// An HTTP request came in.
pub fn http_started() {
    gauge!(table::HTTP_IN_FLIGHT).increment(1.0);
}

/// An HTTP response went out to its last byte, or its client left.
pub fn http_ended(route: &str, status: u16, duration: Duration) {
    gauge!(table::HTTP_IN_FLIGHT).decrement(1.0);
    counter!(table::HTTP_REQUESTS, "route" => route.to_owned(), "status" => status.to_string())
        .increment(1);
    histogram!(table::HTTP_DURATION, "route" => route.to_owned()).record(duration);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls every function once and returns what is then shown.
    fn everything() -> String {
        let (recorder, exposition) = recorder().unwrap();
        metrics::with_local_recorder(&recorder, || {
            describe();
            usage(&Usage {
                waiting: 3,
                running: 2,
                blocks_total: 100,
                blocks_used: 40,
                blocks_cached: 7,
                steps_in_flight: 2,
                ..Usage::default()
            });
            ready(true);
            refused();
            started(Duration::from_millis(20), 100, 64);
            first_token(Duration::from_millis(30));
            token(Duration::from_millis(5));
            ended(Outcome::Stop, Duration::from_millis(40), 2);
            ended(Outcome::Cancelled, Duration::from_millis(40), 0);
            preempted();
            group_lost();
            step(Step {
                duration: Duration::from_millis(9),
                prefill_tokens: 100,
                decode_sequences: 2,
                grammar_wait: Duration::from_millis(1),
            });
            http_started();
            http_started();
            http_ended("/v1/completions", 200, Duration::from_millis(41));
        });
        exposition.render()
    }

    #[test]
    fn every_metric_is_shown_with_its_help_and_value() {
        let text = everything();
        for metric in METRICS {
            let help = format!("# HELP {} {}\n", metric.name, metric.help);
            let kind = format!("# TYPE {} {}\n", metric.name, metric.kind.word());
            assert!(text.contains(&help), "{help} in\n{text}");
            assert!(text.contains(&kind), "{kind} in\n{text}");
        }
        for line in [
            "trireme_queue_sequences 3",
            "trireme_kv_blocks_used 40",
            "trireme_kv_blocks_cached 7",
            "trireme_prompt_tokens_total 100",
            "trireme_cached_tokens_total 64",
            "trireme_generated_tokens_total 2",
            "trireme_sequences_total{outcome=\"stop\"} 1",
            "trireme_cancelled_total 1",
            "trireme_step_duration_seconds_count{kind=\"mixed\"} 1",
            "trireme_time_to_first_token_seconds_bucket{le=\"0.02\"} 0",
            "trireme_time_to_first_token_seconds_bucket{le=\"0.03\"} 1",
            "trireme_http_requests_in_flight 1",
            "trireme_http_requests_total{route=\"/v1/completions\",status=\"200\"} 1",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn counters_are_shown_before_their_first_event() {
        let (recorder, exposition) = recorder().unwrap();
        metrics::with_local_recorder(&recorder, describe);
        assert!(exposition.render().contains("\ntrireme_preemptions_total 0\n"));
    }

    #[test]
    fn the_handbook_lists_the_table() {
        let page = include_str!("../../docs/metrics.md");
        assert_eq!(page, table::page(), "docs/metrics.md is written by metrics::table::page");
    }
}
