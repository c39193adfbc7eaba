//! Root-mean-square norm (Zhang & Sennrich 2019), the same on every rank.

use crate::device::Device;

pub struct RmsNorm<D: Device> {
    weight: D::Vector,
    eps: f32,
}

impl<D: Device> RmsNorm<D> {
    pub fn new(weight: D::Vector, eps: f32) -> Self {
        Self { weight, eps }
    }
    pub fn forward(&self, device: &mut D, x: &D::Buffer, rows: usize, out: &mut D::Buffer) {
        device.rms_norm(x, rows, (&self.weight, self.eps), out);
    }
    /// `residual += delta`, then the norm of it.
    pub fn forward_add(
        &self,
        device: &mut D,
        residual: &mut D::Buffer,
        delta: &D::Buffer,
        rows: usize,
        out: &mut D::Buffer,
    ) {
        device.add_rms_norm(residual, delta, rows, (&self.weight, self.eps), out);
    }
}
