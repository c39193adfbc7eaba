//! What a shard keeps of one sequence between steps.

use crate::sampler::Sampling;

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
}

impl Sequence {
    /// A step computes tokens up to `end`, and may add the one it samples.
    pub fn advance(&mut self, end: usize, sampled: bool) {
        self.computed = Some(end);
        self.len += usize::from(sampled);
    }
}
