//! Scores of prompt tokens: which rows of a batch give them, and what comes of it.

use crate::{
    batch::Batch,
    sampler::{Score, ScoreRow},
    sequences::{SequenceError, Sequences},
};

/// Rows whose logits are held at once. It bounds the memory of scoring, which does not grow with
/// the prompt: as many rows of the vocabulary as fit here. Six full tiles of the CPU.
pub const ROWS_AT_ONCE: usize = 72;

/// Scores of consecutive prompt tokens of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptScores {
    pub sequence: u64,
    /// Position of the first of them.
    pub start: usize,
    pub scores: Vec<Score>,
}

/// One row of a batch that scores the token after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    sequence: u64,
    /// Of the scored token.
    position: usize,
    row: usize,
    score: ScoreRow,
}

/// All rows of a batch that score a token. The same on all ranks, which know the whole prompts.
#[derive(Debug, Default)]
pub struct Targets(Vec<Target>);

impl Targets {
    pub fn of(batch: &Batch, sequences: &Sequences) -> Self {
        let mut targets = Vec::new();
        for entry in batch.entries() {
            let Some(sequence) = sequences.get(entry.sequence) else { continue };
            let top_logprobs = sequence.scoring.map_or(0, |scoring| scoring.top_logprobs);
            targets.extend(sequence.scored_tokens(&entry.positions).map(|position| Target {
                sequence: entry.sequence,
                position,
                row: entry.first_row + position - 1 - entry.positions.start,
                score: ScoreRow { token: sequence.tokens[position], top_logprobs },
            }));
        }
        Self(targets)
    }

    /// The rows in passes of at most `most`: their numbers in the batch, and what they score.
    pub fn passes(&self, most: usize) -> impl Iterator<Item = (Vec<usize>, Vec<ScoreRow>)> {
        self.0.chunks(most.max(1)).map(|targets| {
            let rows = targets.iter().map(|target| target.row).collect();
            (rows, targets.iter().map(|target| target.score).collect())
        })
    }

    /// What `outcomes`, one for each row, say of each sequence; one bad row is an error of its
    /// sequence alone.
    pub fn join<E: std::fmt::Display>(
        &self,
        outcomes: Vec<Result<Score, E>>,
    ) -> (Vec<PromptScores>, Vec<SequenceError>) {
        let (mut prompts, mut errors) = (Vec::<PromptScores>::new(), Vec::<SequenceError>::new());
        for (target, outcome) in self.0.iter().zip(outcomes) {
            let Target { sequence, position, .. } = *target;
            match outcome {
                Ok(score) => match prompts.last_mut().filter(|last| last.sequence == sequence) {
                    Some(last) => last.scores.push(score),
                    None => {
                        let scores = vec![score];
                        prompts.push(PromptScores { sequence, start: position, scores });
                    }
                },
                Err(error) if errors.iter().all(|known| known.sequence != sequence) => {
                    errors.push(SequenceError::new(sequence, error.to_string()));
                }
                Err(_) => {}
            }
        }
        prompts.retain(|prompt| errors.iter().all(|error| error.sequence != prompt.sequence));
        (prompts, errors)
    }
}
