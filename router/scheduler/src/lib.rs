//! Continuous batching as a pure state machine: commands in, plans out, results in, events out.
//!
//! No clock, socket, thread or device: time is given, randomness is not used, and the same calls
//! give the same plans. Several steps may be in flight; results come in step order, late by design.

/// Identifies a sequence; chosen by the caller, never reused while the sequence lives.
pub type SequenceId = u64;

/// Bounds of the engine behind the scheduler.
#[derive(Clone, Debug)]
pub struct Limits {
    pub num_blocks: usize,
    /// Tokens of one KV block (16).
    pub block_tokens: usize,
    /// Most tokens computed in one step.
    pub max_batch_tokens: usize,
    /// Most sequences running at once.
    pub max_sequences: usize,
    /// Most sequences waiting; one more is refused.
    pub max_waiting: usize,
    /// Most tokens of one sequence, prompt and answer.
    pub max_model_len: usize,
    /// Pipeline stages: decodes are spread over that many steps so that stages overlap.
    pub stages: usize,
    /// Most steps in flight (`stages + 1`; 1 gives lag 0).
    pub max_steps_in_flight: usize,
    pub prefix_cache: bool,
}

/// A request for the scheduler. Sampling is the caller's and travels beside it.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    pub max_new_tokens: usize,
    /// Before this many generated tokens, `stop_token_ids` do not end the sequence.
    pub min_new_tokens: usize,
    /// End-of-sequence ids and stop ids; empty to ignore them.
    pub stop_token_ids: Vec<u32>,
    /// Higher runs first; equal ones in order of arrival.
    pub priority: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("the queue holds {limit} sequences, its limit")]
    QueueFull { limit: usize },
    #[error("prompt of {given} tokens leaves no room for an answer in {limit}")]
    TooLong { given: usize, limit: usize },
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("a sequence of {given} tokens can never fit in {limit} KV tokens")]
    NeverFits { given: usize, limit: usize },
    #[error("sequence {0} is already known")]
    Duplicate(SequenceId),
}

/// What every rank does in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// From 1, +1 each, within a group's life.
    pub step_id: u64,
    /// Sequences the shards forget before this step.
    pub drop: Vec<SequenceId>,
    /// New blocks of sequences, appended to their tables.
    pub blocks: Vec<(SequenceId, Vec<u32>)>,
    /// Sequences the shards do not know (new, or again after a preemption).
    pub admit: Vec<Admit>,
    pub chunks: Vec<Chunk>,
    /// Running sequences that advance by one token.
    pub decode: Vec<SequenceId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admit {
    pub id: SequenceId,
    /// Prompt, then what was generated before a preemption.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub id: SequenceId,
    pub start: usize,
    pub len: usize,
    /// Ends at the last known token: the next one is sampled.
    pub sample: bool,
}

/// What the shards answered to one plan.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub step_id: u64,
    /// One for each decode and each sampling chunk of the plan that did not fail.
    pub tokens: Vec<(SequenceId, u32)>,
    /// Sequences that failed alone.
    pub failed: Vec<SequenceId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Left the queue; `cached` prompt tokens came from the prefix cache.
    Started {
        id: SequenceId,
        cached_tokens: usize,
    },
    Token {
        id: SequenceId,
        token: u32,
    },
    Finished {
        id: SequenceId,
        reason: FinishReason,
    },
    Failed {
        id: SequenceId,
        reason: FailReason,
    },
    /// Back to the queue to be recomputed; nothing is lost.
    Preempted {
        id: SequenceId,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    Stop,
    Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailReason {
    /// The shards refused this sequence in a step.
    Sequence,
    /// The group of shards was lost while this sequence had state on it.
    GroupLost,
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub waiting: usize,
    pub running: usize,
    pub steps_in_flight: usize,
    pub blocks_total: usize,
    /// Held by sequences.
    pub blocks_used: usize,
    /// Free for use, but still holding cached prefixes.
    pub blocks_cached: usize,
}

pub struct Scheduler {}

impl Scheduler {
    pub fn new(_limits: Limits) -> Self {
        unimplemented!("seam")
    }
    // commands
    pub fn add(&mut self, _sequence: NewSequence) -> Result<(), Rejection> {
        unimplemented!("seam")
    }
    /// Forgets a sequence wherever it is (client left, stop string found). No event follows.
    /// False when it is not known.
    pub fn cancel(&mut self, _id: SequenceId) -> bool {
        unimplemented!("seam")
    }
    // plan out
    /// The next step, or nothing when there is no work or enough steps are in flight.
    pub fn schedule(&mut self) -> Option<Plan> {
        unimplemented!("seam")
    }
    // results in, events out
    /// Takes the result of the oldest step in flight.
    pub fn apply(&mut self, _output: StepOutput) -> Vec<Event> {
        unimplemented!("seam")
    }
    /// Events that `schedule` gave rise to (started, preempted), oldest first.
    pub fn poll_events(&mut self) -> Vec<Event> {
        unimplemented!("seam")
    }
    /// The shards are gone: steps in flight, KV and cache are lost. Sequences with state on the
    /// shards fail; waiting ones wait on. Plans start again from step 1 on `num_blocks` blocks.
    pub fn lose_group(&mut self, _num_blocks: usize) -> Vec<Event> {
        unimplemented!("seam")
    }
    pub fn reset_prefix_cache(&mut self) {
        unimplemented!("seam")
    }
    // getters
    pub fn usage(&self) -> Usage {
        unimplemented!("seam")
    }
    pub fn limits(&self) -> &Limits {
        unimplemented!("seam")
    }
    /// Panics when a block is leaked or shared wrongly, or a count does not add up. For tests.
    pub fn check_invariants(&self) {
        unimplemented!("seam")
    }
}
