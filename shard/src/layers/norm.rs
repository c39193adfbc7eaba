//! Root-mean-square norm (Zhang & Sennrich 2019), the same on every rank.

use super::{attention::LayerStep, workspace::Workspace};
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
    /// The residual stream with `work.delta`, normalised into `work.normed`.
    pub fn forward_residual(&self, device: &mut D, rows: usize, work: &mut Workspace<D>) {
        let Workspace { residual, normed, delta, .. } = work;
        self.forward_add(device, residual, delta, rows, normed);
    }
    /// As [`RmsNorm::forward_residual`], at the start of a layer: in the first of a stage nothing is
    /// to be added.
    pub fn forward_step(&self, device: &mut D, step: &LayerStep<'_, D>, work: &mut Workspace<D>) {
        if step.delta_waits {
            return self.forward_residual(device, step.row_count, work);
        }
        self.forward(device, &work.residual, step.row_count, &mut work.normed);
    }
    /// `work.delta` normalised, before it is added.
    pub fn forward_delta(&self, device: &mut D, rows: usize, work: &mut Workspace<D>) {
        self.forward(device, &work.delta, rows, &mut work.normed);
        std::mem::swap(&mut work.delta, &mut work.normed);
    }
}
