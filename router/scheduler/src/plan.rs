//! What every rank does in one step, and what comes back.

use std::collections::VecDeque;

use crate::sequence::{SequenceId, Slot};

/// What every rank does in one step.
///
/// Shards take it in this order: drop, admit with its blocks, blocks, chunks and decodes. An id may
/// be dropped and admitted by the same plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// From 1, +1 each, within a group's life.
    pub step_id: u64,
    /// Sequences the shards forget before this step; each one they were told to admit, once.
    pub drop: Vec<SequenceId>,
    /// New blocks of sequences, appended to their tables. For an admitted one, the blocks of its
    /// cached prefix come first.
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
    /// Prompt tokens from here on are to be scored.
    pub score_from: Option<usize>,
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
    /// One for each decode and each sampling chunk of the plan that did not fail, in any order.
    pub tokens: Vec<(SequenceId, u32)>,
    /// Sequences that failed alone.
    pub failed: Vec<SequenceId>,
}

/// A plan whose result has not come yet.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub step_id: u64,
    pub parts: Vec<Part>,
}

/// One sequence's part in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub slot: Slot,
    pub id: SequenceId,
    /// Tokens of it whose KV is computed before the step.
    pub start: usize,
    /// And after it.
    pub end: usize,
    pub samples: bool,
}

pub(crate) type StepsInFlight = VecDeque<InFlight>;
