//! The names, one by one.

/// One metric.
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Counter,
    Gauge,
    /// With the upper bounds of its buckets.
    Histogram(&'static [f64]),
}

impl Kind {
    /// As in a `# TYPE` line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

pub const HTTP_REQUESTS: &str = "trireme_http_requests_total";
pub const HTTP_IN_FLIGHT: &str = "trireme_http_requests_in_flight";
pub const HTTP_DURATION: &str = "trireme_http_request_duration_seconds";
pub const READY: &str = "trireme_ready";
pub const QUEUE_WAITING: &str = "trireme_queue_sequences";
pub const QUEUE_REFUSED: &str = "trireme_queue_refused_total";
pub const QUEUE_WAIT: &str = "trireme_queue_wait_seconds";
pub const BATCH_RUNNING: &str = "trireme_running_sequences";
pub const STEPS_IN_FLIGHT: &str = "trireme_steps_in_flight";
pub const STEP_DURATION: &str = "trireme_step_duration_seconds";
pub const STEP_TOKENS: &str = "trireme_step_tokens";
pub const STEP_SEQUENCES: &str = "trireme_step_sequences";
pub const STEP_GRAMMAR_WAIT: &str = "trireme_step_grammar_wait_seconds";
pub const KV_BLOCKS_TOTAL: &str = "trireme_kv_blocks_total";
pub const KV_BLOCKS_USED: &str = "trireme_kv_blocks_used";
pub const KV_BLOCKS_CACHED: &str = "trireme_kv_blocks_cached";
pub const PROMPT_TOKENS: &str = "trireme_prompt_tokens_total";
pub const CACHED_TOKENS: &str = "trireme_cached_tokens_total";
pub const GENERATED_TOKENS: &str = "trireme_generated_tokens_total";
pub const REQUEST_PROMPT_TOKENS: &str = "trireme_request_prompt_tokens";
pub const REQUEST_GENERATED_TOKENS: &str = "trireme_request_generated_tokens";
pub const SEQUENCES: &str = "trireme_sequences_total";
pub const CANCELLED: &str = "trireme_cancelled_total";
pub const PREEMPTIONS: &str = "trireme_preemptions_total";
pub const GROUPS_LOST: &str = "trireme_groups_lost_total";
pub const TIME_TO_FIRST_TOKEN: &str = "trireme_time_to_first_token_seconds";
pub const INTER_TOKEN: &str = "trireme_inter_token_seconds";
pub const REQUEST_DURATION: &str = "trireme_request_duration_seconds";

/// From a step on a GPU to a long prefill on a CPU.
const STEP_S: &[f64] = &[
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0,
];
/// Waits a user feels.
const WAIT_S: &[f64] = &[
    0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0,
    10.0, 30.0, 60.0,
];
/// Whole answers.
const ANSWER_S: &[f64] =
    &[0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0];
const TOKENS: &[f64] = &[
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131_072.0,
];
const SEQUENCE_COUNTS: &[f64] =
    &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

const fn metric(name: &'static str, kind: Kind, help: &'static str) -> Metric {
    Metric { name, kind, labels: &[], help }
}

const fn labelled(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, help }
}

/// All of them, in the order of the handbook.
#[rustfmt::skip]
pub const METRICS: &[Metric] = &[
    metric(READY, Kind::Gauge, "1 while requests are run, 0 while shards start, are lost or drain."),
    labelled(HTTP_REQUESTS, Kind::Counter, &["route", "status"], "HTTP requests by route and status."),
    metric(HTTP_IN_FLIGHT, Kind::Gauge, "HTTP requests whose response has not ended."),
    labelled(HTTP_DURATION, Kind::Histogram(ANSWER_S), &["route"], "From an HTTP request's head to the last byte of its response."),
    metric(QUEUE_WAITING, Kind::Gauge, "Sequences that wait to be run."),
    metric(QUEUE_REFUSED, Kind::Counter, "Requests refused because the queue was full."),
    metric(QUEUE_WAIT, Kind::Histogram(WAIT_S), "From a sequence's admission to its first step."),
    metric(BATCH_RUNNING, Kind::Gauge, "Sequences that hold KV blocks."),
    metric(STEPS_IN_FLIGHT, Kind::Gauge, "Steps sent to the shards and not answered."),
    labelled(STEP_DURATION, Kind::Histogram(STEP_S), &["kind"], "From sending a step to the last rank's answer, for prefill, decode or mixed steps."),
    metric(STEP_TOKENS, Kind::Histogram(TOKENS), "Tokens computed in a step."),
    metric(STEP_SEQUENCES, Kind::Histogram(SEQUENCE_COUNTS), "Sequences that a step advances by one token."),
    metric(STEP_GRAMMAR_WAIT, Kind::Histogram(STEP_S), "How long a step waited for the masks of grammars, where it did."),
    metric(KV_BLOCKS_TOTAL, Kind::Gauge, "KV blocks there are."),
    metric(KV_BLOCKS_USED, Kind::Gauge, "KV blocks held by sequences."),
    metric(KV_BLOCKS_CACHED, Kind::Gauge, "KV blocks free for use that still hold a cached prefix."),
    metric(PROMPT_TOKENS, Kind::Counter, "Prompt tokens of started sequences."),
    metric(CACHED_TOKENS, Kind::Counter, "Prompt tokens that came from the prefix cache."),
    metric(GENERATED_TOKENS, Kind::Counter, "Tokens generated."),
    metric(REQUEST_PROMPT_TOKENS, Kind::Histogram(TOKENS), "Prompt tokens of a sequence."),
    metric(REQUEST_GENERATED_TOKENS, Kind::Histogram(TOKENS), "Tokens generated for a sequence, when it ends."),
    labelled(SEQUENCES, Kind::Counter, &["outcome"], "Sequences ended: stop, length, failed or cancelled."),
    metric(CANCELLED, Kind::Counter, "Sequences given up because the client left."),
    metric(PREEMPTIONS, Kind::Counter, "Running sequences that gave their blocks back to be recomputed later."),
    metric(GROUPS_LOST, Kind::Counter, "Times the group of shards was lost."),
    metric(TIME_TO_FIRST_TOKEN, Kind::Histogram(WAIT_S), "From admission to the first token."),
    metric(INTER_TOKEN, Kind::Histogram(STEP_S), "Between two tokens of a sequence."),
    metric(REQUEST_DURATION, Kind::Histogram(ANSWER_S), "From a sequence's admission to its end."),
];

/// The page `docs/metrics.md`.
#[cfg(test)]
pub fn page() -> String {
    let mut page = String::from(
        "# Metrics\n\n`GET /metrics` answers in the Prometheus text format. Durations are in \
         seconds. This page is written from the table\nin `router/src/metrics/table.rs`; a test \
         compares them.\n\n| name | type | labels | meaning |\n| --- | --- | --- | --- |\n",
    );
    for metric in METRICS {
        let labels = metric.labels.join(", ");
        let word = metric.kind.word();
        page += &format!("| `{}` | {word} | {labels} | {} |\n", metric.name, metric.help);
    }
    page
}
