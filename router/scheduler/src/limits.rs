//! Bounds of the engine behind the scheduler.

#[derive(Clone, Debug)]
pub struct Limits {
    pub num_blocks: usize,
    /// Tokens of one KV block (16).
    pub block_tokens: usize,
    /// Most tokens computed in one step.
    pub max_batch_tokens: usize,
    /// Most tokens computed in a step that decodes and has prompts: what decodes wait for. Prompts get a
    /// quarter of it at least.
    pub max_mixed_tokens: usize,
    /// Most sequences running at once.
    pub max_sequences: usize,
    /// Most sequences waiting; one more is refused. Preempted ones come back all the same.
    pub max_waiting: usize,
    /// Most tokens of one sequence, prompt and answer.
    pub max_model_len: usize,
    /// Pipeline stages: decodes are spread over that many steps so that stages overlap.
    pub stages: usize,
    /// Most steps in flight (`stages + 1`; 1 gives lag 0).
    pub max_steps_in_flight: usize,
    pub prefix_cache: bool,
}

/// A limit that no engine can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {given}, but must be at least {least}")]
pub struct LimitError {
    pub field: &'static str,
    pub given: usize,
    pub least: usize,
}

impl Limits {
    /// Names the first limit that cannot work. `num_blocks` and `max_waiting` may be 0: then every
    /// sequence is refused.
    pub fn check(&self) -> Result<(), LimitError> {
        let limits = [
            ("block_tokens", self.block_tokens, 1),
            ("max_batch_tokens", self.max_batch_tokens, 1),
            ("max_mixed_tokens", self.max_mixed_tokens, 1),
            ("max_sequences", self.max_sequences, 1),
            ("max_model_len", self.max_model_len, 2),
            ("stages", self.stages, 1),
            ("max_steps_in_flight", self.max_steps_in_flight, 1),
        ];
        for (field, given, least) in limits {
            if given < least {
                return Err(LimitError { field, given, least });
            }
        }
        Ok(())
    }

    /// Prompt tokens of a step that decodes so many sequences.
    pub(crate) fn tokens_beside(&self, decodes: usize) -> usize {
        match decodes {
            0 => self.max_batch_tokens,
            _ => {
                let mixed = self.max_mixed_tokens;
                mixed.saturating_sub(decodes).max(mixed.div_ceil(4))
            }
        }
    }

    /// Blocks that hold the KV of `tokens` tokens.
    pub(crate) fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Most steps in flight that name one sequence: with two, a decode is planned while the token
    /// before it is still being computed.
    pub(crate) fn max_steps_of_sequence(&self) -> usize {
        self.max_steps_in_flight.min(2)
    }

    /// Steps over which decodes are spread. Stages that cannot overlap are not worth a spread.
    pub(crate) fn decode_spread(&self) -> usize {
        self.stages.min(self.max_steps_in_flight)
    }

    /// Blocks kept back from admissions, so that running sequences can grow for a while.
    pub(crate) fn headroom_blocks(&self) -> usize {
        (self.num_blocks / 100).max(1)
    }
}
