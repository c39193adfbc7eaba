//! Linear layers split over the tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM).

use trireme_collectives::CollectiveError;
use trireme_kernels::Activation;

use crate::device::Device;

/// Every rank computes its own outputs from the whole input: nothing to exchange.
pub struct ColumnParallel<D: Device> {
    weight: D::Matrix,
    bias: Option<D::Vector>,
}

impl<D: Device> ColumnParallel<D> {
    pub fn new(weight: D::Matrix, bias: Option<D::Vector>) -> Self {
        Self { weight, bias }
    }
    pub fn forward(&self, device: &mut D, x: &D::Buffer, rows: usize, out: &mut D::Buffer) {
        device.linear(x, rows, (&self.weight, self.bias.as_ref()), out);
    }
    /// `out = activation(gate) * up`, where the weight is gate rows, then up rows, each `gate_up.1`.
    pub fn forward_gated(
        &self,
        device: &mut D,
        activation: Activation,
        x: &D::Buffer,
        rows: usize,
        gate_up: (&mut D::Buffer, usize),
        out: &mut D::Buffer,
    ) {
        device.gated_linear(activation, x, rows, (&self.weight, self.bias.as_ref()), gate_up, out);
    }
}

/// Every rank holds some of the inputs; the sum over ranks is the result, on every rank.
pub struct RowParallel<D: Device> {
    weight: D::Matrix,
    /// On one rank alone, since the sum takes it in once.
    bias: Option<D::Vector>,
}

impl<D: Device> RowParallel<D> {
    pub fn new(weight: D::Matrix, bias: Option<D::Vector>) -> Self {
        Self { weight, bias }
    }
    pub fn forward(
        &self,
        device: &mut D,
        x: &D::Buffer,
        rows: usize,
        out: &mut D::Buffer,
    ) -> Result<(), CollectiveError> {
        device.linear(x, rows, (&self.weight, self.bias.as_ref()), out);
        device.all_reduce(out, rows)
    }
}
