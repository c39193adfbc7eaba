//! What a shard keeps of one sequence between steps.

use std::ops::Range;

use crate::sampler::{Sampling, Scoring};

/// A sequence and its place in the KV cache.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Tells apart two sequences that had the same id one after the other.
    pub generation: u64,
    /// The tokens whose ids this rank knows. On the last stage and, once returned, on the first:
    /// all of them; on the others only those it was given.
    pub tokens: Vec<u32>,
    /// Tokens that exist, whether or not this rank knows their ids. The same on all ranks.
    pub len: usize,
    pub prompt_len: usize,
    /// Tokens in the KV cache; `None` before the first chunk, which may start after a shared prefix.
    pub computed: Option<usize>,
    /// Token `t` is in block `blocks[t / 16]`.
    pub blocks: Vec<u32>,
    pub sampling: Sampling,
    /// Prompt tokens to be scored.
    pub scoring: Option<Scoring>,
}

impl Sequence {
    /// The prompt tokens that are scored by computing `positions`: each position gives the
    /// distribution of the token after it.
    pub fn scored_tokens(&self, positions: &Range<usize>) -> Range<usize> {
        let Some(scoring) = &self.scoring else { return 0..0 };
        let start = (positions.start + 1).max(scoring.start);
        let end = (positions.end + 1).min(self.prompt_len);
        start..end.max(start)
    }

    /// Tokens to be scored whose scores are lost where the first chunk begins at `start`.
    pub fn unscored_before(&self, start: usize) -> Range<usize> {
        self.scored_tokens(&(0..start))
    }

    /// Whether its tokens are chosen without those before them, and its prompt is not scored.
    pub fn is_plain(&self) -> bool {
        self.sampling.is_plain() && self.scoring.is_none()
    }

    /// A step computes tokens up to `end`, and may add the one it samples.
    pub fn advance(&mut self, end: usize, sampled: bool) {
        self.computed = Some(end);
        self.len += usize::from(sampled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_position_scores_the_token_after_it() {
        let check = |start: Option<usize>, positions: Range<usize>, expected: Range<usize>| {
            let sequence = Sequence {
                generation: 1,
                tokens: vec![0; 12],
                len: 12,
                prompt_len: 10,
                computed: None,
                blocks: Vec::new(),
                sampling: Sampling::default(),
                scoring: start.map(|start| Scoring { start, top_logprobs: 0 }),
            };
            let scored = sequence.scored_tokens(&positions);
            assert_eq!(scored, expected, "from {start:?} by {positions:?}");
        };
        check(Some(0), 0..10, 1..10);
        check(Some(0), 0..4, 1..5);
        check(Some(0), 4..10, 5..10);
        check(Some(7), 0..10, 7..10);
        check(Some(7), 0..4, 7..7);
        // Generated tokens have scores of their own.
        check(Some(0), 8..12, 9..10);
        check(Some(0), 11..12, 12..12);
        check(None, 0..10, 0..0);
    }
}
