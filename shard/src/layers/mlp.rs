//! Gated MLP: `down(silu(gate(x)) * up(x))` (Shazeer 2020), split over its inner width.

use trireme_collectives::CollectiveError;

use super::{
    linear::{ColumnParallel, RowParallel},
    workspace::Workspace,
};
use crate::device::Device;

pub struct GatedMlp<D: Device> {
    /// Gate rows, then up rows: one pass over the input.
    pub gate_up: ColumnParallel<D>,
    pub down: RowParallel<D>,
    /// This rank's part of the inner width.
    pub width: usize,
}

impl<D: Device> GatedMlp<D> {
    /// From `work.normed` to `work.delta`.
    pub fn forward(
        &self,
        device: &mut D,
        rows: usize,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        self.gate_up.forward(device, &work.normed, rows, &mut work.gate_up);
        device.silu_mul(&work.gate_up, rows, self.width, &mut work.inner);
        self.down.forward(device, &work.inner, rows, &mut work.delta)
    }
}
