//! Chooses the next token of every row of a step, over a vocabulary that is split over the ranks of
//! a stage.
//!
//! `[rows, vocabulary]` is never gathered. Everything that the order *penalties, logit bias,
//! grammar mask, min_tokens mask, temperature, top-k, top-p, min-p, typical-p* asks for is found from a few small messages:
//!
//! - `peak.rs`: the best token, the raw log-sum-exp and the raw n best, one gather. A greedy row is
//!   done here.
//! - `selection.rs`: top-k, top-p and min-p keep the likeliest tokens down to some cut; the cut is
//!   found by radix selection over histograms, without sorting the vocabulary.
//! - `typical.rs`: of these, the tokens whose surprise is nearest to the expected one; five gathers.
//! - `scoring.rs`: the logprobs of a prompt's own tokens, two gathers.
//! - `race.rs`: the draw among the kept tokens, by a counter-based Gumbel-max, one gather.
//!
//! All rows of a step share each gather, so the number of collective calls does not grow with rows.
//!
//! A row's token depends on its logits, its parameters, its seed and its position alone: not on the
//! other rows, the number of ranks or the number of threads. The masses behind top-p are integers
//! (`weight.rs`), so that not even their summation order can move a cut. Reported logprobs are of
//! the raw logits; their normaliser is a float sum in rank order, whose last bits may differ between
//! different numbers of ranks, but not between the ranks of one group or from run to run.

mod edits;
#[cfg(feature = "cuda")]
mod on_device;
mod peak;
mod race;
mod row;
mod sampling;
mod scoring;
mod selection;
#[cfg(test)]
mod tests;
mod typical;
mod weight;

use std::ops::Range;

use trireme_collectives::{Collective, CollectiveError};
use trireme_grammar::Mask;
use trireme_kernels::Team;

#[cfg(feature = "cuda")]
pub use on_device::{device_choice, device_sample};
use row::Row;
pub use sampling::{Sampling, SamplingError, grammar};
pub use scoring::{Score, ScoreRow, Scoring, ScoringError, score};

/// Most alternatives one token may report.
const TOP_LOGPROBS_MAX: u32 = 128;

/// One row of logits and the sequence it belongs to.
#[derive(Clone, Copy)]
pub struct SampleRow<'a> {
    pub sequence: u64,
    pub sampling: &'a Sampling,
    /// Prompt and generated tokens; the next one is to be chosen.
    pub tokens: &'a [u32],
    /// `tokens[prompt_len..]` were generated.
    pub prompt_len: usize,
    pub constraint: Constraint<'a>,
}

/// What a grammar says about the next token.
#[derive(Clone, Copy, Default)]
pub enum Constraint<'a> {
    #[default]
    Free,
    Mask(&'a Mask),
    /// Its mask could not be made.
    Broken,
}

/// The token chosen for one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Of the raw logits, natural log; 0 where it was not asked for.
    pub logprob: f32,
    /// The likeliest tokens and their raw logprobs, best first, lowest id first on a tie.
    pub top: Vec<(u32, f32)>,
}

/// Why one row has no next token. Its neighbours are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("the model computed NaN for this sequence")]
    NotANumber,
    #[error("the model computed an infinite logit for this sequence")]
    Infinite,
    #[error("the grammar of this sequence cannot go on")]
    Grammar,
    #[error("every token is impossible: all logits are -inf after bias and masks")]
    NothingPossible,
}

/// Chooses a token for each of `rows`. Every rank of the stage calls it with equal rows and gets
/// equal results.
///
/// `logits`: `[rows, vocab.len()]`, this rank's slice of the vocabulary, which is `vocab`; they are
/// overwritten. The ranks' slices are disjoint and ascending in rank order; one may be empty.
///
/// # Errors
/// `Mismatch` if `logits` has another shape; else what the collectives report.
pub fn sample(
    rows: &[SampleRow<'_>],
    logits: &mut [f32],
    vocab: Range<u32>,
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<Vec<Result<Sampled, SampleError>>, CollectiveError> {
    let width = vocab.len();
    if logits.len() != rows.len() * width {
        let detail = format!("{} logits for {} rows of {width} tokens", logits.len(), rows.len());
        return Err(CollectiveError::Mismatch { operation: "sample", detail });
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let mut rest = logits;
    let mut rows: Vec<Row<'_>> = rows
        .iter()
        .map(|request| {
            let (mine, later) = std::mem::take(&mut rest).split_at_mut(width);
            rest = later;
            Row::new(request, mine, vocab.start)
        })
        .collect();

    peak::find(&mut rows, tensor, team)?;
    selection::find_cuts(&mut rows, tensor, team)?;
    typical::apply(&mut rows, tensor, team)?;
    race::run(&mut rows, tensor, team)?;
    Ok(rows.into_iter().map(Row::finish).collect())
}

/// Gathers equally long messages of all ranks; `chunks(mine.len())` of the result are the ranks'.
fn gather<T: bytemuck::Pod>(
    mine: &[T],
    tensor: &mut dyn Collective,
) -> Result<Vec<T>, CollectiveError> {
    let mut all = vec![T::zeroed(); mine.len() * tensor.size()];
    tensor.all_gather(bytemuck::cast_slice(mine), bytemuck::cast_slice_mut(&mut all))?;
    Ok(all)
}
