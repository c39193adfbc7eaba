//! The choice of tokens: by the GPU's kernel, and by the host's sampler where a row asks for more.

use std::ops::Range;

use trireme_collectives::CollectiveError;
use trireme_kernels::cuda::Tensor;

use super::{Cuda, done};
use crate::{
    device::{Device, Samples},
    sampler::{self, SampleRow, Sampling},
};

impl Cuda {
    /// Queues the choice for the first rows of `logits`.
    pub(super) fn queue<'a>(
        &mut self,
        rows: impl Iterator<Item = (&'a Sampling, usize)>,
        logits: &Tensor,
        vocab: &Range<u32>,
    ) {
        let choices: Vec<_> =
            rows.map(|(sampling, position)| sampler::device_choice(sampling, position)).collect();
        let ready = self.ready.as_mut().unwrap_or_else(|| panic!("a step before the warm-up"));
        done(ready.samples.queue(&self.stream, logits, vocab.start, &choices));
    }

    /// Chooses and waits.
    pub(super) fn sample_alone(
        &mut self,
        rows: &[SampleRow<'_>],
        logits: &Tensor,
        vocab: &Range<u32>,
    ) -> Result<Samples, CollectiveError> {
        self.queue(rows.iter().map(|row| (row.sampling, row.tokens.len())), logits, vocab);
        let mut samples = self.take_choices();
        for (index, row) in rows.iter().enumerate() {
            if row.sampling.is_plain() {
                continue;
            }
            let mut values = done(self.stream.read_rows(logits, index..index + 1));
            let mut sampled = self.hosts.run(|world| {
                let row = std::slice::from_ref(row);
                sampler::sample(row, &mut values, vocab.clone(), &mut *world.tensor, &self.team)
            })?;
            samples[index] = sampled.remove(0);
        }
        Ok(samples)
    }
}
