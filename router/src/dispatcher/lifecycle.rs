//! A request's spans, times and metrics: queue, prefill, decode.

use std::time::Instant;

use tracing::Span;

use crate::metrics::{self, Outcome};

/// Where a request is. Entering a phase ends the span of the one before.
pub struct Lifecycle {
    request: Span,
    phase: Span,
    submitted: Instant,
    last_token: Option<Instant>,
    is_started: bool,
}

impl Lifecycle {
    pub fn queued(request: Span) -> Self {
        let phase = tracing::info_span!(parent: &request, "queue");
        Self { request, phase, submitted: Instant::now(), last_token: None, is_started: false }
    }

    pub fn span(&self) -> &Span {
        &self.request
    }

    /// Left the queue. False when it was there again after a preemption.
    pub fn started(&mut self, prompt_tokens: u32, cached_tokens: u32) -> bool {
        if std::mem::replace(&mut self.is_started, true) {
            return false;
        }
        self.phase = tracing::info_span!(parent: &self.request, "prefill", cached_tokens);
        metrics::started(self.submitted.elapsed(), prompt_tokens, cached_tokens);
        true
    }

    pub fn token(&mut self) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(last) => metrics::token(now - last),
            None => {
                self.phase = tracing::info_span!(parent: &self.request, "decode");
                metrics::first_token(now - self.submitted);
            }
        }
    }

    /// Writes the outcome into the request's span.
    pub fn ended(&self, outcome: Outcome, output_tokens: u32) {
        self.request.record("gen_ai.usage.output_tokens", output_tokens);
        self.request.record("gen_ai.response.finish_reasons", outcome.label());
        metrics::ended(outcome, self.submitted.elapsed(), output_tokens);
    }
}
