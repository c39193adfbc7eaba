//! Continuous batching as a pure state machine: commands in, plans out, results in, events out.
//!
//! No clock, socket, thread or device: time is given, randomness is not used, and the same calls
//! give the same plans. Several steps may be in flight; results come in step order, late by design.
//!
//! One step has one token budget ([`Limits::max_batch_tokens`]), spent in this order:
//! 1. running decodes, one token each. With pipeline stages they are spread over as many steps as
//!    there are stages, least recently scheduled first;
//! 2. prefill chunks of sequences that run already, in [order](NewSequence::priority);
//! 3. new sequences from the queue, in the same order.
//!
//! A step that decodes too has [`Limits::max_mixed_tokens`] at most: a token must not wait for
//! thousands of others.
//!
//! **No head-of-line stall.** A prompt that cannot end within the step takes at most half of what
//! is left of the budget while shorter ones are behind it; what those leave, it gets. A waiting
//! sequence that does not fit (no KV blocks, or no share of the budget) is bypassed by later ones,
//! but at most [`MAX_BYPASSES`] times: then nothing behind it starts before it does.
//!
//! **Progress.** Blocks are taken as needed. When none is left, unused cached ones are evicted
//! (least recently used first), then the youngest running sequence younger than the one in need is
//! preempted: it frees its blocks once no step in flight names it, and is recomputed later. A
//! sequence never preempts an older one and nothing is admitted while a running sequence lacks
//! blocks, so the oldest always finishes; a sequence that could not even fit alone is refused.

#![forbid(unsafe_code)]

mod admission;
mod apply;
mod block_pool;
mod event;
mod invariants;
mod limits;
mod plan;
mod preempt;
mod prefix_cache;
mod queue;
mod schedule;
mod scheduler;
mod sequence;
#[cfg(test)]
mod tests;
mod usage;

pub use apply::ApplyError;
pub use event::{Event, FailReason, FinishReason};
pub use limits::{LimitError, Limits};
pub use plan::{Admit, Chunk, Plan, StepOutput};
pub use prefix_cache::BlockHash;
pub use queue::{MAX_BYPASSES, Rejection};
pub use scheduler::Scheduler;
pub use sequence::{NewSequence, SequenceId};
pub use usage::Usage;
