//! What happened to a sequence, for the one who asked for it.

use crate::sequence::SequenceId;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Left the queue (again, after a preemption); `cached` prompt tokens came from the prefix
    /// cache.
    Started { id: SequenceId, cached_tokens: usize },
    /// A generated token; a stop token too, before its [`Event::Finished`].
    Token { id: SequenceId, token: u32 },
    /// Nothing follows for this id.
    Finished { id: SequenceId, reason: FinishReason },
    /// Nothing follows for this id.
    Failed { id: SequenceId, reason: FailReason },
    /// Back to the queue to be recomputed; nothing is lost.
    Preempted { id: SequenceId },
}

impl Event {
    pub fn id(&self) -> SequenceId {
        match *self {
            Self::Started { id, .. }
            | Self::Token { id, .. }
            | Self::Finished { id, .. }
            | Self::Failed { id, .. }
            | Self::Preempted { id } => id,
        }
    }
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
    /// The group of shards was lost while this sequence had state on it, or the group that
    /// followed has too few blocks for it.
    GroupLost,
}
