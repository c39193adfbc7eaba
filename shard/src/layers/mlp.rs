//! Gated MLP: `down(activation(gate(x)) * up(x))` (Shazeer 2020), split over its inner width.

use trireme_checkpoint::{Activation, CheckpointError};
use trireme_collectives::CollectiveError;
use trireme_kernels as kernels;

use super::{
    linear::{ColumnParallel, RowParallel},
    workspace::Workspace,
};
use crate::{device::Device, layer_weights::LayerWeights};

pub struct GatedMlp<D: Device> {
    /// Gate rows, then up rows: one pass over the input.
    gate_up: ColumnParallel<D>,
    down: RowParallel<D>,
    activation: kernels::Activation,
    /// This rank's part of the inner width.
    width: usize,
}

impl<D: Device> GatedMlp<D> {
    pub fn load(weights: &LayerWeights<'_, D>) -> Result<Self, CheckpointError> {
        Ok(Self {
            gate_up: weights.column_parallel(&["mlp.gate_proj", "mlp.up_proj"])?,
            down: weights.row_parallel("mlp.down_proj")?,
            activation: activation(weights.model().layer.activation),
            width: weights.slice().mlp.len(),
        })
    }

    /// From `work.normed` to `work.delta`.
    pub fn forward(
        &self,
        device: &mut D,
        rows: usize,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let Workspace { normed, gate_up, inner, .. } = work;
        let gate_up = (gate_up, self.width);
        self.gate_up.forward_gated(device, self.activation, normed, rows, gate_up, inner);
        self.down.forward(device, &work.inner, rows, &mut work.delta)
    }
}

/// The kernel of a config's activation.
pub fn activation(activation: Activation) -> kernels::Activation {
    match activation {
        Activation::Silu => kernels::Activation::Silu,
        Activation::GeluTanh => kernels::Activation::GeluTanh,
    }
}
