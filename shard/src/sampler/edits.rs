//! Penalties, logit bias, the grammar's mask and the min_tokens mask: what is done to single tokens.

use super::{Constraint, SampleRow};

/// Applies the edits of one row to this rank's slice, whose first token is `first`, and notes in
/// `edited` each token with the value that it had before. What a grammar forbids is not noted: it
/// cannot be chosen, and so nobody asks for its value.
pub(super) fn apply(
    row: &SampleRow<'_>,
    logits: &mut [f32],
    first: u32,
    edited: &mut Vec<(u32, f32)>,
) {
    let mut slice = Slice { logits, first, edited };
    slice.penalise(row);
    for &(token, bias) in &row.sampling.logit_bias {
        slice.edit(token, |logit| logit + bias);
    }
    let mut ends = false;
    if let Constraint::Mask(mask) = row.constraint {
        mask.apply(first, slice.logits);
        ends = mask.ends();
    }
    let generated = row.tokens.len().saturating_sub(row.prompt_len);
    // A complete answer ends, be it shorter than asked for.
    if generated < row.sampling.min_tokens as usize && !ends {
        for &token in &row.sampling.stop_token_ids {
            slice.edit(token, |_| f32::NEG_INFINITY);
        }
    }
}

struct Slice<'a> {
    logits: &'a mut [f32],
    first: u32,
    edited: &'a mut Vec<(u32, f32)>,
}

impl Slice<'_> {
    /// Where a token is in this slice, if it is.
    fn index(&self, token: u32) -> Option<usize> {
        let index = token.checked_sub(self.first)? as usize;
        (index < self.logits.len()).then_some(index)
    }

    fn edit(&mut self, token: u32, change: impl FnOnce(f32) -> f32) {
        if let Some(index) = self.index(token) {
            let before = self.logits[index];
            self.edited.push((token, before));
            self.logits[index] = change(before);
        }
    }

    /// Repetition over prompt and generated tokens as in transformers (Keskar et al. 2019: divide
    /// what is positive, multiply what is not); frequency and presence over the generated tokens as
    /// in the OpenAI API.
    fn penalise(&mut self, row: &SampleRow<'_>) {
        let sampling = row.sampling;
        let repetition = sampling.repetition_penalty;
        let (frequency, presence) = (sampling.frequency_penalty, sampling.presence_penalty);
        let repeats = repetition != 1.0;
        if !repeats && frequency == 0.0 && presence == 0.0 {
            return;
        }
        const IN_PROMPT: u32 = 1 << 31;
        let (prompt, generated) = row.tokens.split_at(row.prompt_len.min(row.tokens.len()));
        // For each token of the slice: how often it was generated, and whether it was prompted.
        let mut seen = vec![0u32; self.logits.len()];
        for &token in generated {
            if let Some(index) = self.index(token) {
                seen[index] += 1;
            }
        }
        for &token in prompt.iter().filter(|_| repeats) {
            if let Some(index) = self.index(token) {
                seen[index] |= IN_PROMPT;
            }
        }
        for &token in row.tokens {
            let Some(index) = self.index(token) else { continue };
            // Taken: a token's second appearance finds nothing left to do.
            let seen = std::mem::take(&mut seen[index]);
            if seen == 0 {
                continue;
            }
            let count = seen & !IN_PROMPT;
            self.edit(token, |mut logit| {
                if repeats {
                    logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
                }
                logit -= frequency * count as f32;
                if count > 0 { logit - presence } else { logit }
            });
        }
    }
}
