//! The raw logprobs of tokens that are given, not chosen: a prompt's own.
//!
//! As for a choice, `[rows, vocabulary]` is never gathered. Two gathers: the slices' statistics (as
//! `peak.rs` takes them), then how many tokens of each slice come before the given one.

use std::ops::Range;

use trireme_collectives::{Collective, CollectiveError};
use trireme_kernels::{Team, count_greater, top_n};
use trireme_proto::shard::v1 as proto;

use super::peak::{Best, Normaliser, best_of, sum_of_weights};
use super::row::each;
use super::{SampleError, TOP_LOGPROBS_MAX, gather};

/// Which prompt tokens of a sequence are scored, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scoring {
    /// The first token to be scored; token 0 has no distribution before it.
    pub start: usize,
    /// Report this many of the likeliest tokens at each position.
    pub top_logprobs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("scoring.top_logprobs must be at most {TOP_LOGPROBS_MAX}, not {given}")]
pub struct ScoringError {
    given: u32,
}

impl TryFrom<&proto::Scoring> for Scoring {
    type Error = ScoringError;

    fn try_from(wire: &proto::Scoring) -> Result<Self, ScoringError> {
        if wire.top_logprobs > TOP_LOGPROBS_MAX {
            return Err(ScoringError { given: wire.top_logprobs });
        }
        Ok(Self { start: wire.start as usize, top_logprobs: wire.top_logprobs as usize })
    }
}

/// The token that stands where a row of logits foretells one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRow {
    pub token: u32,
    pub top_logprobs: usize,
}

/// One token's score.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// Natural log.
    pub logprob: f32,
    /// Place among all tokens, from 1: the likeliest first, the lowest id first on a tie.
    pub rank: u32,
    /// The likeliest tokens and their logprobs, best first, lowest id first on a tie.
    pub top: Vec<(u32, f32)>,
}

/// What this rank's slice of a row says.
struct Slice<'a> {
    row: ScoreRow,
    logits: &'a [f32],
    best: Best,
    /// Sum of `e^(logit - best)`.
    sum: f32,
    /// The given token's logit, if it is in this slice.
    given: f32,
    /// Tokens of this slice that come before the given one.
    before: u32,
    top: Vec<(usize, f32)>,
}

/// What all slices of a row say together.
struct Merged {
    outcome: Result<Normaliser, SampleError>,
    given: f32,
    top: Vec<(u32, f32)>,
}

/// Scores one token for each of `rows`. Every rank of the stage calls it with equal rows and gets
/// equal results.
///
/// `logits`: `[rows, vocab.len()]`, raw, this rank's slice of the vocabulary.
///
/// # Errors
/// `Mismatch` if `logits` has another shape; else what the collectives report.
pub fn score(
    rows: &[ScoreRow],
    logits: &[f32],
    vocab: Range<u32>,
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<Vec<Result<Score, SampleError>>, CollectiveError> {
    let width = vocab.len();
    if logits.len() != rows.len() * width {
        let detail = format!("{} logits for {} rows of {width} tokens", logits.len(), rows.len());
        return Err(CollectiveError::Mismatch { operation: "score", detail });
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let slice = |(index, row): (usize, &ScoreRow)| {
        Slice::new(*row, &logits[index * width..(index + 1) * width])
    };
    let mut slices: Vec<Slice<'_>> = rows.iter().enumerate().map(slice).collect();
    each(slices.iter_mut().collect(), team, |slice| slice.survey(&vocab));
    let merged = merge(&slices, &vocab, tensor)?;

    let mut counted: Vec<(&mut Slice<'_>, f32)> =
        slices.iter_mut().zip(merged.iter().map(|merged| merged.given)).collect();
    each(counted.iter_mut().collect(), team, |(slice, given)| slice.count(*given, &vocab));
    let before: Vec<u32> = slices.iter().map(|slice| slice.before).collect();
    let all = gather(&before, tensor)?;
    let scores = merged.into_iter().enumerate().map(|(index, merged)| {
        let normaliser = merged.outcome?;
        let before: u32 = all.chunks(rows.len()).map(|rank| rank[index]).sum();
        let top = merged.top.iter().map(|&(token, raw)| (token, normaliser.logprob(raw)));
        let logprob = normaliser.logprob(merged.given);
        Ok(Score { logprob, rank: before + 1, top: top.collect() })
    });
    Ok(scores.collect())
}

impl<'a> Slice<'a> {
    const FIXED_WORDS: usize = 4;

    fn new(row: ScoreRow, logits: &'a [f32]) -> Self {
        let (best, given) = (Best::default(), f32::NEG_INFINITY);
        Self { row, logits, best, sum: 0.0, given, before: 0, top: Vec::new() }
    }

    fn survey(&mut self, vocab: &Range<u32>) {
        self.best = best_of(self.logits, vocab.start);
        self.sum = sum_of_weights(self.logits, self.best.value);
        if vocab.contains(&self.row.token) {
            self.given = self.logits[(self.row.token - vocab.start) as usize];
        }
        self.top = match self.row.top_logprobs {
            0 => Vec::new(),
            1 if self.best.token == u32::MAX => Vec::new(),
            1 => vec![((self.best.token - vocab.start) as usize, self.best.value)],
            n => top_n(self.logits, n),
        };
    }

    /// Counts the tokens that are likelier than one of logit `given`, or as likely with a lower id.
    fn count(&mut self, given: f32, vocab: &Range<u32>) {
        let lower = self.row.token.clamp(vocab.start, vocab.end) - vocab.start;
        let (lower, higher) = self.logits.split_at(lower as usize);
        let lower = match given {
            f32::NEG_INFINITY => lower.len(),
            // What is at least as large is greater than the next smaller float.
            given => count_greater(lower, given.next_down()),
        };
        self.before = (lower + count_greater(higher, given)) as u32;
    }

    fn words(top: usize) -> usize {
        Self::FIXED_WORDS + 2 * top
    }

    fn write(&self, vocab: &Range<u32>, message: &mut Vec<u32>) {
        message.extend([
            u32::from(self.best.has_nan),
            self.best.value.to_bits(),
            self.sum.to_bits(),
            self.given.to_bits(),
        ]);
        let entry = |&(index, value): &(usize, f32)| [vocab.start + index as u32, value.to_bits()];
        let absent = [u32::MAX, f32::NEG_INFINITY.to_bits()];
        let entries = self.top.iter().map(entry).chain(std::iter::repeat(absent));
        message.extend(entries.take(self.row.top_logprobs).flatten());
    }
}

/// Gathers what the slices say and joins it, in rank order.
fn merge(
    slices: &[Slice<'_>],
    vocab: &Range<u32>,
    tensor: &mut dyn Collective,
) -> Result<Vec<Merged>, CollectiveError> {
    let mut message = Vec::new();
    for slice in slices {
        slice.write(vocab, &mut message);
    }
    let all = gather(&message, tensor)?;
    let mut start = 0;
    let rows = slices.iter().map(|slice| {
        let words = start..start + Slice::words(slice.row.top_logprobs);
        start = words.end;
        let ranks: Vec<&[u32]> =
            all.chunks(message.len()).map(|rank| &rank[words.clone()]).collect();
        merge_row(&ranks, slice.row.top_logprobs)
    });
    Ok(rows.collect())
}

fn merge_row(ranks: &[&[u32]], top_logprobs: usize) -> Merged {
    let float = |words: &[u32], at: usize| f32::from_bits(words[at]);
    let sums: Vec<(f32, f32)> =
        ranks.iter().map(|words| (float(words, 1), float(words, 2))).collect();
    let max = sums.iter().map(|(max, _)| *max).fold(f32::NEG_INFINITY, f32::max);
    let outcome = match max {
        _ if ranks.iter().any(|words| words[0] != 0) => Err(SampleError::NotANumber),
        f32::INFINITY => Err(SampleError::Infinite),
        f32::NEG_INFINITY => Err(SampleError::NothingPossible),
        _ => Ok(Normaliser::of(&sums)),
    };
    let mut top: Vec<(u32, f32)> = Vec::new();
    for words in ranks {
        let (entries, _) = words[Slice::FIXED_WORDS..].as_chunks::<2>();
        let present = entries.iter().filter(|entry| entry[0] != u32::MAX);
        top.extend(present.map(|&[token, bits]| (token, f32::from_bits(bits))));
    }
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.truncate(top_logprobs);
    let given = ranks.iter().map(|words| float(words, 3)).fold(f32::NEG_INFINITY, f32::max);
    Merged { outcome, given, top }
}
