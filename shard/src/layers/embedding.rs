//! Embedding and head, each rank with its own rows of the vocabulary.

use std::{ops::Range, sync::Arc};

use trireme_collectives::CollectiveError;

use crate::device::Device;

/// Looks up the tokens this rank holds; the sum over ranks has them all.
pub struct Embedding<D: Device> {
    table: Arc<D::Matrix>,
    vocab: Range<u32>,
    multiplier: f32,
}

impl<D: Device> Embedding<D> {
    pub fn new(table: Arc<D::Matrix>, vocab: Range<u32>, multiplier: f32) -> Self {
        Self { table, vocab, multiplier }
    }
    pub fn forward(
        &self,
        device: &mut D,
        tokens: &[u32],
        out: &mut D::Buffer,
    ) -> Result<(), CollectiveError> {
        device.embed(&self.table, tokens, &self.vocab, out);
        device.all_reduce(out, tokens.len())?;
        if self.multiplier != 1.0 {
            device.scale(out, tokens.len(), self.multiplier);
        }
        Ok(())
    }
}

/// Logits of this rank's slice of the vocabulary. The sampler joins the slices without gathering them.
pub struct Head<D: Device> {
    /// Shared with the embedding where the model ties them and one stage holds both.
    weight: Arc<D::Matrix>,
    multiplier: f32,
}

/// What logits are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitUse {
    /// The choice of a token.
    Choice,
    /// The scores of a prompt's tokens: many rows, for which the head is a large part of the work.
    Scores,
}

impl<D: Device> Head<D> {
    pub fn new(weight: Arc<D::Matrix>, multiplier: f32) -> Self {
        Self { weight, multiplier }
    }
    pub fn forward(
        &self,
        device: &mut D,
        x: &D::Buffer,
        rows: usize,
        use_of_logits: LogitUse,
        logits: &mut D::Buffer,
    ) {
        match use_of_logits {
            LogitUse::Choice => device.linear(x, rows, (&self.weight, None), logits),
            LogitUse::Scores => device.linear_for_scores(x, rows, &self.weight, logits),
        }
        if self.multiplier != 1.0 {
            device.scale(logits, rows, self.multiplier);
        }
    }
}
