//! What the kernels of a step read besides weights: tokens, positions, KV slots, sequences and block
//! tables, at fixed addresses, so that a recorded step reads those of the step it is replayed for.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{
    context::Context,
    error::CudaError,
    event::Event,
    memory::{Memory, Pinned},
    stream::Stream,
};
use crate::{KvPages, SequenceRows};

/// A token that only the GPU knows: what the step before chose for its sampled row `token - CHOSEN`.
pub const CHOSEN: u32 = 1 << 31;
/// Slot of a row that belongs to no sequence.
pub const NO_SLOT: u32 = u32::MAX;
/// Rows of a tile of prefill attention.
const ATTENTION_ROWS: usize = 128;

/// One row of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenInput {
    pub token: u32,
    pub position: u32,
    /// `block * 16 + offset` in the pages.
    pub slot: u32,
    /// Which of the step's sequences.
    pub sequence: u32,
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SequenceInput {
    pub first_row: u32,
    pub rows: u32,
    /// 0: padding.
    pub context_len: u32,
    /// Where its block table starts.
    pub table_start: u32,
}

/// A list of fixed capacity on the GPU, with its page-locked source.
struct List<T: Pod> {
    memory: Memory,
    staging: Pinned<T>,
    len: usize,
}

impl<T: Pod> List<T> {
    fn new(context: &Arc<Context>, capacity: usize) -> Result<Self, CudaError> {
        let memory = Memory::new(context, capacity * size_of::<T>(), "step inputs")?;
        Ok(Self { memory, staging: Pinned::new(context, capacity)?, len: 0 })
    }

    fn push(&mut self, value: T) {
        self.staging.values_mut()[self.len] = value;
        self.len += 1;
    }

    fn extend(&mut self, values: impl Iterator<Item = T>) {
        let staging = &mut self.staging.values_mut()[self.len..];
        let mut count = 0;
        for (to, value) in staging.iter_mut().zip(values) {
            *to = value;
            count += 1;
        }
        self.len += count;
    }

    fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        if self.len == 0 { Ok(()) } else { stream.copy_in(&self.staging, self.len, &self.memory) }
    }
}

/// Inputs of one step.
pub struct StepInputs {
    /// The copies of the step before, which read what a new step is written to.
    uploaded: Event,
    rows: List<TokenInput>,
    sequences: List<SequenceInput>,
    tables: List<u32>,
    sampled: List<u32>,
    /// Tiles of prefill attention: sequence and first of its rows; the longest first.
    work: List<[u32; 2]>,
    /// Leading sequences of one row each.
    decodes: usize,
    /// Blocks that the pages must have.
    blocks: usize,
}

impl StepInputs {
    /// For steps of so many rows and sequences, each with at most so many blocks.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(
        context: &Arc<Context>,
        rows: usize,
        sequences: usize,
        blocks_per_sequence: usize,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        Ok(Self {
            uploaded: Event::of(context)?,
            rows: List::new(context, rows)?,
            sequences: List::new(context, sequences)?,
            tables: List::new(context, sequences * blocks_per_sequence)?,
            sampled: List::new(context, rows.max(sequences))?,
            work: List::new(context, rows / ATTENTION_ROWS + sequences)?,
            decodes: 0,
            blocks: 0,
        })
    }

    /// Takes a step: its sequences in the order of their rows, its tokens (none on later stages) and
    /// the rows that sample. Waits for the copies of the step before.
    ///
    /// # Errors
    /// If the GPU has failed.
    pub fn fill<'a>(
        &mut self,
        sequences: impl Iterator<Item = SequenceRows<'a>>,
        tokens: &[u32],
        sampled: &[usize],
    ) -> Result<(), CudaError> {
        self.uploaded.wait()?;
        for len in [&mut self.rows.len, &mut self.sequences.len, &mut self.tables.len] {
            *len = 0;
        }
        (self.work.len, self.sampled.len, self.decodes, self.blocks) = (0, 0, 0, 0);
        for sequence in sequences {
            self.push(&sequence, tokens);
        }
        let sequences = self.sequences.staging.values();
        self.work.staging.values_mut()[..self.work.len].sort_by_key(|&[index, first_row]| {
            let SequenceInput { rows, context_len, .. } = sequences[index as usize];
            std::cmp::Reverse(context_len - rows + first_row)
        });
        self.sampled.extend(sampled.iter().map(|&row| row as u32));
        Ok(())
    }

    fn push(&mut self, sequence: &SequenceRows<'_>, tokens: &[u32]) {
        let SequenceRows { first_row, rows, context_len, blocks } = sequence;
        let index = self.sequences.len as u32;
        let blocks = &blocks[..context_len.div_ceil(KvPages::BLOCK_TOKENS)];
        let first_position = context_len - rows;
        assert_eq!(*first_row, self.rows.len, "rows follow each other");
        self.rows.extend((0..*rows).map(|row| {
            let position = first_position + row;
            let block = blocks[position / KvPages::BLOCK_TOKENS];
            TokenInput {
                token: tokens.get(first_row + row).copied().unwrap_or(0),
                position: position as u32,
                slot: block * KvPages::BLOCK_TOKENS as u32
                    + (position % KvPages::BLOCK_TOKENS) as u32,
                sequence: index,
            }
        }));
        if *rows == 1 && self.decodes == self.sequences.len {
            self.decodes += 1;
        } else {
            for first in (0..*rows).step_by(ATTENTION_ROWS) {
                self.work.push([index, first as u32]);
            }
        }
        self.sequences.push(SequenceInput {
            first_row: *first_row as u32,
            rows: *rows as u32,
            context_len: *context_len as u32,
            table_start: self.tables.len as u32,
        });
        let most = blocks.iter().max().map_or(0, |&block| block as usize + 1);
        self.blocks = self.blocks.max(most);
        self.tables.extend(blocks.iter().copied());
    }

    /// Adds rows that belong to nobody until there are `rows`: one sequence and one sampled row each.
    pub fn pad(&mut self, rows: usize) {
        while self.rows.len < rows {
            let row = self.rows.len as u32;
            self.rows.push(TokenInput { slot: NO_SLOT, ..TokenInput::default() });
            self.sequences.push(SequenceInput {
                first_row: row,
                rows: 1,
                ..SequenceInput::default()
            });
            self.sampled.push(row);
            self.decodes += 1;
        }
    }

    /// Whether the step's first sampled rows are these.
    pub fn samples(&self, rows: &[usize]) -> bool {
        let mine = &self.sampled.staging.values()[..self.sampled.len];
        mine.len() >= rows.len() && rows.iter().zip(mine).all(|(&row, &of)| row == of as usize)
    }

    /// Samples other rows of the step from here on.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn sample(&mut self, rows: &[usize], stream: &Stream) -> Result<(), CudaError> {
        stream.synchronize()?;
        self.sampled.len = 0;
        self.sampled.extend(rows.iter().map(|&row| row as u32));
        self.sampled.upload(stream)
    }

    /// Queues the copies to the GPU.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        self.rows.upload(stream)?;
        self.sequences.upload(stream)?;
        self.tables.upload(stream)?;
        self.sampled.upload(stream)?;
        self.work.upload(stream)?;
        self.uploaded.record(stream)
    }

    pub fn row_count(&self) -> usize {
        self.rows.len
    }
    pub fn sampled_count(&self) -> usize {
        self.sampled.len
    }
    pub(super) fn decode_count(&self) -> usize {
        self.decodes
    }
    pub(super) fn work_count(&self) -> usize {
        self.work.len
    }
    pub(super) fn block_count(&self) -> usize {
        self.blocks
    }
    pub(super) fn rows(&self) -> u64 {
        self.rows.memory.address()
    }
    pub(super) fn sequences(&self) -> u64 {
        self.sequences.memory.address()
    }
    pub(super) fn tables(&self) -> u64 {
        self.tables.memory.address()
    }
    pub(super) fn sampled(&self) -> u64 {
        self.sampled.memory.address()
    }
    pub(super) fn work(&self) -> u64 {
        self.work.memory.address()
    }
}
