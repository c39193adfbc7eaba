//! A step in flight, as traces and metrics see it.

use std::collections::HashMap;

use tracing::{Span, field};
use trireme_scheduler::{Plan, SequenceId};

use super::active::ActiveRequest;
use crate::shard_group::StepResult;

pub struct SentStep {
    /// A trace of its own, linked to those of the requests that share the step.
    pub span: Span,
    pub prefill_tokens: u32,
    pub decode_sequences: u32,
}

impl SentStep {
    pub fn new(plan: &Plan, active: &HashMap<SequenceId, ActiveRequest>) -> Self {
        let prefill_tokens = plan.chunks.iter().map(|chunk| chunk.len as u32).sum();
        let decode_sequences = plan.decode.len() as u32;
        let span = tracing::info_span!(
            parent: None,
            "step",
            step_id = plan.step_id,
            prefill_tokens,
            decode_sequences,
            forward_us = field::Empty,
            collective_us = field::Empty,
        );
        if !span.is_disabled() {
            let chunked = plan.chunks.iter().map(|chunk| &chunk.id);
            for request in chunked.chain(&plan.decode).filter_map(|id| active.get(id)) {
                span.follows_from(request.span());
            }
        }
        Self { span, prefill_tokens, decode_sequences }
    }

    pub fn record(&self, result: &StepResult) {
        self.span.record("forward_us", result.timings.forward_us);
        self.span.record("collective_us", result.timings.collective_us);
    }
}
