//! Decode steps recorded by their number of sequences.

use trireme_collectives::CollectiveError;
use trireme_kernels::cuda::{measured_rows, product_rows};

use super::{Cuda, done};
use crate::batch::Batch;

/// Decode steps are recorded for so many sequences at most; larger ones are queued kernel by kernel.
const RECORDED_SEQUENCES: usize = 512;

/// Every size up to `max_sequences`.
pub(super) fn sizes(max_sequences: usize) -> Vec<usize> {
    measured_rows(1, max_sequences.min(RECORDED_SEQUENCES))
}

impl Cuda {
    /// The size that a decode step is recorded for, where it is one that can be.
    pub(super) fn recorded_size(&self, batch: &Batch) -> Option<usize> {
        let rows = batch.rows();
        let decodes = batch.entries().iter().all(|e| e.positions.len() == 1 && e.sample)
            && batch.sampled_rows().len() == rows;
        if !self.records() || !decodes || rows == 0 || rows > RECORDED_SEQUENCES {
            return None;
        }
        Some(product_rows(rows).min(self.ready().max_sequences))
    }

    /// Runs a step of a size that was not seen yet, then records it.
    pub(super) fn record(
        &mut self,
        rows: usize,
        size: usize,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        self.padded = Some((rows, size));
        // Kernels are measured and chosen here; the recording has to find them chosen.
        let run = work(self).and_then(|()| {
            if !self.records() {
                return Ok(None);
            }
            done(self.stream.synchronize());
            done(self.stream.begin_recording());
            let recorded = work(self);
            let graph = self.stream.end_recording();
            recorded.map(|()| Some(done(graph)))
        });
        self.padded = None;
        if let (Some(ready), Some(graph)) = (&mut self.ready, run?) {
            ready.graphs.insert(size, graph);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_size_near_above() {
        for most in [1, 3, 20, 64, 256, 600] {
            let sizes = sizes(most);
            assert!(sizes.is_sorted() && sizes.last() == Some(&most.min(RECORDED_SEQUENCES)));
            for sequences in 1..=most.min(RECORDED_SEQUENCES) {
                let size = product_rows(sequences).min(most);
                assert!(sizes.contains(&size) && size >= sequences && size <= 2 * sequences + 7);
            }
        }
    }
}
