//! The scores of a prompt, gathered from the steps that computed it.

use std::sync::Arc;

use anyhow::anyhow;
use trireme_proto::shard::v1 as proto;

use crate::{
    api::{PromptScore, PromptScoring, PromptToken, TopToken},
    detokenizer::{Detokenizer, TextDecoder},
    error::RouterError,
};

/// What the shards have said of a prompt so far, as they said it: words are found later, off the
/// loop.
#[derive(Debug)]
pub struct ScoredPrompt {
    ids: Arc<[u32]>,
    /// The first token that is scored.
    start: usize,
    top_logprobs: usize,
    logprobs: Vec<f32>,
    ranks: Vec<u32>,
    top: Vec<(u32, f32)>,
    /// Candidates that came with each score: fewer than were asked for in a tiny vocabulary.
    top_of_each: usize,
    /// A step's scores did not follow those before it.
    has_gap: bool,
}

impl ScoredPrompt {
    pub fn new(ids: Arc<[u32]>, scoring: PromptScoring) -> Self {
        Self {
            // The first token has no distribution before it.
            start: (scoring.start as usize).max(1).min(ids.len()),
            ids,
            top_logprobs: scoring.top_logprobs as usize,
            logprobs: Vec::new(),
            ranks: Vec::new(),
            top: Vec::new(),
            top_of_each: 0,
            has_gap: false,
        }
    }

    /// Takes the scores of one step. Steps come in order, and a preempted sequence goes on where it
    /// was.
    pub fn push(&mut self, scores: proto::PromptScores) {
        let count = scores.logprobs.len();
        let each = scores.top_tokens.len() / count.max(1);
        let is_next = scores.start as usize == self.start + self.logprobs.len();
        let is_whole = scores.ranks.len() == count
            && scores.top_tokens.len() == each * count
            && scores.top_logprobs.len() == each * count
            && (self.logprobs.is_empty() || each == self.top_of_each);
        self.has_gap |= !is_next || !is_whole;
        self.top_of_each = each;
        self.logprobs.extend(scores.logprobs);
        self.ranks.extend(scores.ranks);
        self.top.extend(scores.top_tokens.into_iter().zip(scores.top_logprobs));
    }

    /// # Errors
    /// A score is missing: better none than wrong ones.
    pub fn check(&self) -> Result<(), RouterError> {
        let (scored, wanted) = (self.logprobs.len(), self.ids.len() - self.start);
        if scored == wanted && !self.has_gap {
            return Ok(());
        }
        let detail = format!("{scored} scores of {wanted} prompt tokens, gap: {}", self.has_gap);
        Err(RouterError::Internal(anyhow!(detail)))
    }

    /// Every token of the prompt, with its text and its score.
    pub fn describe(&self, decoder: Option<&Arc<TextDecoder>>) -> Vec<PromptToken> {
        let vocabulary = decoder.map(|decoder| &decoder.vocabulary);
        let mut detokenizer = decoder.map(|decoder| Detokenizer::new(decoder.clone(), false));
        let piece = |id| vocabulary.map(|known| known.piece(id)).unwrap_or_default();
        let bytes = |id| vocabulary.map(|known| known.bytes(id).to_vec()).unwrap_or_default();
        let mut tokens: Vec<PromptToken> = Vec::with_capacity(self.ids.len());
        for (position, &id) in self.ids.iter().enumerate() {
            let top = |&(id, logprob): &(u32, f32)| TopToken {
                id,
                piece: piece(id),
                bytes: bytes(id),
                logprob,
            };
            let score = position.checked_sub(self.start).map(|index| {
                let first = index * self.top_of_each;
                let candidates = &self.top[first..first + self.top_of_each];
                PromptScore {
                    logprob: self.logprobs[index],
                    rank: self.ranks[index],
                    top: candidates.iter().take(self.top_logprobs).map(top).collect(),
                }
            });
            tokens.push(PromptToken {
                id,
                text: detokenizer.as_mut().map(|decode| decode.push(id)).unwrap_or_default(),
                piece: piece(id),
                special: vocabulary.is_some_and(|known| known.is_special(id)),
                score,
            });
        }
        if let (Some(last), Some(detokenizer)) = (tokens.last_mut(), &mut detokenizer) {
            last.text.push_str(&detokenizer.finish());
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(start: u32, logprobs: &[f32]) -> proto::PromptScores {
        proto::PromptScores {
            sequence: 1,
            start,
            logprobs: logprobs.to_vec(),
            ranks: vec![3; logprobs.len()],
            top_tokens: (0..logprobs.len() as u32).flat_map(|at| [at, at + 50]).collect(),
            top_logprobs: vec![-0.5; 2 * logprobs.len()],
        }
    }

    /// What a prompt of 5 ids says of its tokens, or how its error ends.
    fn check(
        start: u32,
        top_logprobs: u32,
        parts: Vec<proto::PromptScores>,
        expected: Result<&[Option<(f32, usize)>], &str>,
    ) {
        let ids: Arc<[u32]> = [7, 8, 9, 10, 11].into();
        let mut prompt = ScoredPrompt::new(ids, PromptScoring { top_logprobs, start });
        parts.into_iter().for_each(|part| prompt.push(part));
        match (prompt.check(), expected) {
            (Ok(()), Ok(expected)) => {
                let tokens = prompt.describe(None);
                let found: Vec<_> = tokens
                    .iter()
                    .map(|token| token.score.as_ref().map(|s| (s.logprob, s.top.len())))
                    .collect();
                assert_eq!(found, expected);
            }
            (Err(RouterError::Internal(cause)), Err(expected)) => {
                assert!(cause.to_string().contains(expected), "{cause}");
            }
            (found, expected) => panic!("{found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn every_score_is_there_or_none() {
        let all = || vec![scores(1, &[-1.0, -2.0]), scores(3, &[-3.0, -4.0])];
        let expected = [None, Some((-1.0, 2)), Some((-2.0, 2)), Some((-3.0, 2)), Some((-4.0, 2))];
        check(0, 2, all(), Ok(&expected));
        let expected = expected.map(|score| score.map(|(logprob, _)| (logprob, 1)));
        check(1, 1, all(), Ok(&expected));
        let late = vec![scores(4, &[-4.0])];
        check(4, 2, late.clone(), Ok(&[None, None, None, None, Some((-4.0, 2))]));
        check(9, 2, vec![], Ok(&[None; 5]));
        check(0, 2, late.clone(), Err("1 scores of 4 prompt tokens, gap: true"));
        check(0, 2, vec![scores(1, &[-1.0, -2.0])], Err("2 scores of 4"));
        check(0, 2, vec![scores(2, &[-1.0; 4])], Err("gap: true"));
        let torn = proto::PromptScores { ranks: vec![1], ..scores(1, &[-1.0; 4]) };
        check(0, 2, vec![torn], Err("gap: true"));
    }
}
