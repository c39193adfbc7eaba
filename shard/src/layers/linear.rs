//! Linear layers split over the tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM).

use trireme_collectives::CollectiveError;

use crate::device::Device;

/// Every rank computes its own outputs from the whole input: nothing to exchange.
pub struct ColumnParallel<D: Device> {
    weight: D::Matrix,
}

impl<D: Device> ColumnParallel<D> {
    pub fn new(weight: D::Matrix) -> Self {
        Self { weight }
    }
    pub fn forward(&self, device: &mut D, x: &D::Buffer, rows: usize, out: &mut D::Buffer) {
        device.linear(x, rows, &self.weight, out);
    }
}

/// Every rank holds some of the inputs; the sum over ranks is the result, on every rank.
pub struct RowParallel<D: Device> {
    weight: D::Matrix,
}

impl<D: Device> RowParallel<D> {
    pub fn new(weight: D::Matrix) -> Self {
        Self { weight }
    }
    pub fn forward(
        &self,
        device: &mut D,
        x: &D::Buffer,
        rows: usize,
        out: &mut D::Buffer,
    ) -> Result<(), CollectiveError> {
        device.linear(x, rows, &self.weight, out);
        device.all_reduce(out, rows)
    }
}
