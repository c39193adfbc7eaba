//! A step whose work is queued, and whose tokens are not known yet.

use std::time::Instant;

use crate::{runner::StepOutcome, sequence::Sequence};

pub struct InFlight {
    /// All but its tokens.
    pub outcome: StepOutcome,
    /// Whose tokens are being chosen, in the order of the batch's sampled rows.
    pub rows: Vec<ChosenRow>,
    pub queued: Instant,
}

pub struct ChosenRow {
    pub sequence: u64,
    /// Its number may be another's by the time the token is known.
    pub generation: u64,
    pub logprob: bool,
}

impl ChosenRow {
    pub fn of(id: u64, sequence: &Sequence) -> Self {
        let logprob = sequence.sampling.logprobs;
        Self { sequence: id, generation: sequence.generation, logprob }
    }
}

impl InFlight {
    /// Which of the rows chooses for a sequence; most likely `guess`, since steps are alike.
    pub fn row_of(&self, id: u64, sequence: &Sequence, guess: usize) -> Option<usize> {
        let is_its = |row: &ChosenRow| (row.sequence, row.generation) == (id, sequence.generation);
        let guessed = self.rows.get(guess).is_some_and(is_its).then_some(guess);
        guessed.or_else(|| self.rows.iter().position(is_its))
    }
}
