//! Where a stage begins and ends: at tokens and logits, or at the stage before and after it.

use trireme_collectives::CollectiveError;

use crate::{
    batch::Batch,
    device::Device,
    layers::{
        embedding::{Embedding, Head, LogitUse},
        norm::RmsNorm,
        workspace::Workspace,
    },
};

/// How a batch enters a stage; fills `work.residual`.
pub enum Entry<D: Device> {
    Tokens(Embedding<D>),
    /// The residual stream of this rank of all ranks: the same place in the stage before.
    From(usize),
}

impl<D: Device> Entry<D> {
    pub fn forward(
        &self,
        device: &mut D,
        batch: &Batch,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        match self {
            Self::Tokens(embedding) => {
                embedding.forward(device, batch.tokens(), &mut work.residual)
            }
            Self::From(rank) => device.recv(*rank, &mut work.residual, batch.rows()),
        }
    }
}

/// How a batch leaves a stage; takes `work.residual` and `work.delta`.
pub enum Exit<D: Device> {
    Logits { norm: RmsNorm<D>, head: Head<D> },
    To(usize),
}

impl<D: Device> Exit<D> {
    pub fn forward(
        &self,
        device: &mut D,
        batch: &Batch,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        match self {
            Self::To(rank) => {
                device.add(&mut work.residual, &work.delta, batch.rows());
                device.send(*rank, &work.residual, batch.rows())
            }
            // Only rows that sample go through the head: it is the largest matrix of small models.
            Self::Logits { .. } => {
                self.logits(device, batch.sampled_rows(), LogitUse::Choice, work);
                Ok(())
            }
        }
    }

    /// Leaves the logits of `rows` of the batch in `work.logits`, as long as the batch's residual
    /// stream is in `work`. Nothing on stages before the last.
    pub fn logits(
        &self,
        device: &mut D,
        rows: &[usize],
        use_of_logits: LogitUse,
        work: &mut Workspace<D>,
    ) {
        let Self::Logits { norm, head } = self else { return };
        if rows.is_empty() {
            return;
        }
        device.gather(&work.residual, rows, &mut work.sampled_residual);
        device.gather(&work.delta, rows, &mut work.sampled_delta);
        let Workspace { sampled_residual, sampled_delta, sampled_normed, .. } = work;
        norm.forward_add(device, sampled_residual, sampled_delta, rows.len(), sampled_normed);
        head.forward(device, sampled_normed, rows.len(), use_of_logits, &mut work.logits);
    }
}
