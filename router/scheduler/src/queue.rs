//! Sequences that wait for admission, in order of service.

use std::collections::BTreeMap;

use crate::sequence::{Rank, SequenceId, Slot};

/// Most sequences of later order that start while an earlier one waits. Then it is the next to
/// start, and those behind it wait until it fits.
pub const MAX_BYPASSES: usize = 32;

/// Waiting sequences considered in one step; bounds the time of a step, not who gets in.
pub(crate) const LOOK_AHEAD: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("the queue holds {limit} sequences, its limit")]
    QueueFull { limit: usize },
    #[error("prompt of {given} tokens does not fit in {limit} with its answer")]
    TooLong { given: usize, limit: usize },
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("a sequence of {given} tokens can never fit in {limit} KV tokens")]
    NeverFits { given: usize, limit: usize },
    #[error("sequence {0} is already known")]
    Duplicate(SequenceId),
}

/// A preempted sequence keeps its rank, so it comes back before those that arrived after it.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    order: BTreeMap<Rank, Slot>,
}

impl Queue {
    pub fn insert(&mut self, rank: Rank, slot: Slot) {
        let before = self.order.insert(rank, slot);
        debug_assert!(before.is_none());
    }

    pub fn remove(&mut self, rank: Rank) {
        let slot = self.order.remove(&rank);
        debug_assert!(slot.is_some());
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// First to be served first.
    pub fn iter(&self) -> impl Iterator<Item = (Rank, Slot)> {
        self.order.iter().map(|(rank, slot)| (*rank, *slot))
    }
}
