//! Figures for metrics.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub waiting: usize,
    pub running: usize,
    pub steps_in_flight: usize,
    pub blocks_total: usize,
    /// Held by sequences.
    pub blocks_used: usize,
    /// Free for use, but still holding cached prefixes.
    pub blocks_cached: usize,
    /// Tokens looked up in the prefix cache since the start, one count for each admission.
    pub prefix_lookup_tokens_total: u64,
    /// Of those, tokens that were found.
    pub prefix_hit_tokens_total: u64,
    pub preemptions_total: u64,
}
