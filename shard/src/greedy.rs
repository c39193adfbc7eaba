//! Greedy sampling over a split vocabulary; stands in until the full sampler lands.

use std::ops::Range;

use trireme_collectives::{Collective, CollectiveError};
use trireme_proto::shard::v1::Sampling;

/// One row to sample.
pub struct SampleRow<'a> {
    pub sequence: u64,
    pub sampling: &'a Sampling,
    /// Prompt and generated tokens.
    pub tokens: &'a [u32],
    pub prompt_len: usize,
}

pub struct Sampled {
    pub token: u32,
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug, thiserror::Error)]
#[error("the logits hold no finite number")]
pub struct SampleError;

/// The best token of each row of `logits` (`[rows, vocab]`) and its raw logprob.
pub fn sample(
    rows: &[SampleRow<'_>],
    logits: &mut [f32],
    vocab: Range<u32>,
    tensor: &mut dyn Collective,
    _team: &trireme_kernels::Team,
) -> Result<Vec<Result<Sampled, SampleError>>, CollectiveError> {
    let width = vocab.len();
    let mut samples = Vec::with_capacity(rows.len());
    for row in logits.chunks_exact(width).take(rows.len()) {
        let (index, best) = trireme_kernels::argmax(row);
        let (max, sum) = trireme_kernels::max_and_sum_exp(row);
        let mine = [best, f32::from_bits(vocab.start + index as u32), max, sum];
        let mut all = vec![0f32; 4 * tensor.size()];
        tensor.all_gather(bytemuck::bytes_of(&mine), bytemuck::cast_slice_mut(&mut all))?;
        samples.push(merge(&all));
    }
    Ok(samples)
}

fn merge(all: &[f32]) -> Result<Sampled, SampleError> {
    let (mut best, mut token) = (f32::NEG_INFINITY, None);
    let max = all.chunks_exact(4).map(|part| part[2]).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f64;
    for part in all.chunks_exact(4) {
        if part[0] > best {
            (best, token) = (part[0], Some(part[1].to_bits()));
        }
        sum += f64::from(part[3]) * f64::from(part[2] - max).exp();
    }
    let token = token.ok_or(SampleError)?;
    Ok(Sampled { token, logprob: (f64::from(best - max) - sum.ln()) as f32, top: Vec::new() })
}
