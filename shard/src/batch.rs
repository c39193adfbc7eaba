//! What one step computes: rows, positions, block tables. Reused from step to step.

use std::{collections::HashSet, ops::Range};

use trireme_kernels::{KvPages, SequenceRows};

use crate::{
    sequence::Sequence,
    sequences::{Limits, SequenceError, Sequences},
    step::{Chunk, Step},
};

/// From here on a token stands for the one that the step before chooses in its row `token - CHOSEN` of
/// those that sample. Only a device that queues choices is given such.
pub const CHOSEN: u32 = 1 << 31;

/// Rows of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub sequence: u64,
    pub first_row: usize,
    /// Positions computed.
    pub positions: Range<usize>,
    pub sample: bool,
    /// Its part of the batch's block tables.
    blocks: Range<usize>,
}

/// A step that cannot run at all. All ranks refuse it alike.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BatchError {
    #[error("step computes {tokens} tokens, but was warmed up for max_batch_tokens = {limit}")]
    TooManyTokens { tokens: usize, limit: usize },
    #[error("step computes {sequences} sequences, but was warmed up for max_sequences = {limit}")]
    TooManySequences { sequences: usize, limit: usize },
    #[error("sequence {sequence} is named twice in one step")]
    Twice { sequence: u64 },
}

#[derive(Debug, Default)]
pub struct Batch {
    entries: Vec<Entry>,
    rows: usize,
    block_tables: Vec<u32>,
    sampled_rows: Vec<usize>,
    tokens: Vec<u32>,
}

impl Batch {
    pub fn check(step: &Step, limits: &Limits) -> Result<(), BatchError> {
        let (tokens, limit) = (step.tokens(), limits.max_batch_tokens);
        if tokens > limit {
            return Err(BatchError::TooManyTokens { tokens, limit });
        }
        let (sequences, limit) = (step.sequences(), limits.max_sequences);
        if sequences > limit {
            return Err(BatchError::TooManySequences { sequences, limit });
        }
        let named = step.decode.iter().copied().chain(step.chunks.iter().map(|c| c.sequence));
        let mut seen = HashSet::with_capacity(sequences);
        for sequence in named {
            if !seen.insert(sequence) {
                return Err(BatchError::Twice { sequence });
            }
        }
        Ok(())
    }

    /// Rows of the good sequences, decodes first; the bad ones come back as errors.
    pub fn build(
        &mut self,
        step: &Step,
        sequences: &Sequences,
        limits: &Limits,
    ) -> Vec<SequenceError> {
        self.clear();
        let mut errors = Vec::new();
        let decodes = step.decode.iter().map(|&id| (id, None));
        let chunks = step.chunks.iter().map(|chunk| (chunk.sequence, Some(chunk)));
        for (id, chunk) in decodes.chain(chunks) {
            let checked = match sequences.get(id) {
                None => Err("unknown sequence".to_owned()),
                Some(sequence) => positions(sequence, chunk, limits).map(|range| (sequence, range)),
            };
            match checked {
                Ok((sequence, positions)) => {
                    let sample = chunk.is_none_or(|chunk| chunk.sample);
                    self.push(id, positions, &sequence.blocks, sample);
                }
                Err(message) => errors.push(SequenceError::new(id, message)),
            }
        }
        errors
    }

    /// Adds rows for positions `positions` of a sequence.
    pub fn push(&mut self, sequence: u64, positions: Range<usize>, blocks: &[u32], sample: bool) {
        let table = self.block_tables.len();
        let used = positions.end.div_ceil(KvPages::BLOCK_TOKENS);
        self.block_tables.extend_from_slice(&blocks[..used]);
        let first_row = self.rows;
        self.rows += positions.len();
        if sample {
            self.sampled_rows.push(self.rows - 1);
        }
        let blocks = table..table + used;
        self.entries.push(Entry { sequence, first_row, positions, sample, blocks });
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.block_tables.clear();
        self.sampled_rows.clear();
        self.tokens.clear();
        self.rows = 0;
    }

    /// Takes the input tokens: only the first stage needs them.
    pub fn push_tokens(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Sends other rows than the last ones through the head.
    pub fn set_sampled_rows(&mut self, rows: Vec<usize>) {
        self.sampled_rows = rows;
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
    pub fn rows(&self) -> usize {
        self.rows
    }
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    pub fn sampled_rows(&self) -> &[usize] {
        &self.sampled_rows
    }
    /// Sequences that sample, in the order of [`Batch::sampled_rows`].
    pub fn sampled_sequences(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().filter(|entry| entry.sample).map(|entry| entry.sequence)
    }

    /// Whether its tokens are chosen without those before them, and no prompt is scored.
    pub fn is_plain(&self, sequences: &Sequences) -> bool {
        let of = |entry: &Entry| sequences.get(entry.sequence);
        self.entries.iter().filter_map(of).all(Sequence::is_plain)
    }

    /// The form that attention reads.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceRows<'_>> {
        self.entries.iter().map(|entry| SequenceRows {
            first_row: entry.first_row,
            rows: entry.positions.len(),
            context_len: entry.positions.end,
            blocks: &self.block_tables[entry.blocks.clone()],
        })
    }
}

/// The positions that a decode (no chunk) or a chunk of `sequence` computes.
fn positions(
    sequence: &Sequence,
    chunk: Option<&Chunk>,
    limits: &Limits,
) -> Result<Range<usize>, String> {
    let (start, len) = chunk.map_or((sequence.len - 1, 1), |chunk| (chunk.start, chunk.len));
    let end = start.checked_add(len).filter(|end| *end <= sequence.len);
    let Some(end) = end.filter(|_| len > 0) else {
        let known = sequence.len;
        return Err(format!("chunk: start {start}, len {len}, but {known} tokens are known"));
    };
    if let Some(computed) = sequence.computed.filter(|computed| *computed != start) {
        return Err(format!("start: {start}, but the cache holds {computed} tokens"));
    }
    if sequence.computed.is_none() && chunk.is_none() {
        return Err("decode: before any chunk was computed".into());
    }
    let unscored = sequence.unscored_before(start);
    if sequence.computed.is_none() && !unscored.is_empty() {
        return Err(format!("start: {start} leaves the prompt tokens {unscored:?} unscored"));
    }
    if chunk.is_some_and(|chunk| chunk.sample && end != sequence.len) {
        return Err(format!("sample: at {end}, but {} tokens are known", sequence.len));
    }
    if end > limits.max_model_len {
        return Err(format!(
            "position: {end} tokens, but max_model_len is {}",
            limits.max_model_len
        ));
    }
    let needed = end.div_ceil(KvPages::BLOCK_TOKENS);
    if sequence.blocks.len() < needed {
        let held = sequence.blocks.len();
        return Err(format!("blocks: {held}, but {end} tokens need {needed}"));
    }
    Ok(start..end)
}

#[cfg(test)]
mod tests;
