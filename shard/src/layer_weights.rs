//! The weights of one layer, by the names that the model's paper and checkpoint give them.

use trireme_checkpoint::{CheckpointError, ModelConfig, RankSlice};

use crate::{
    device::Device,
    layers::{
        linear::{ColumnParallel, RowParallel},
        norm::RmsNorm,
    },
    weights::Weights,
};

/// Reads this rank's part of the tensors of a layer. Names are what stands between
/// `model.layers.N.` and `.weight`.
pub struct LayerWeights<'a, D: Device> {
    weights: &'a Weights<'a, D>,
    layer: usize,
}

impl<'a, D: Device> LayerWeights<'a, D> {
    pub fn new(weights: &'a Weights<'a, D>, layer: usize) -> Self {
        Self { weights, layer }
    }

    pub fn model(&self) -> &ModelConfig {
        self.weights.model()
    }

    pub fn slice(&self) -> &RankSlice {
        &self.weights.place.slice
    }

    /// Number of the layer in the whole model.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Whether a mixture of experts stands in place of the MLP.
    pub fn is_mixture(&self) -> bool {
        self.model().experts(self.layer).is_some()
    }

    pub fn norm(&self, name: &str) -> Result<RmsNorm<D>, CheckpointError> {
        self.weights.norm(&self.name(name, "weight"))
    }

    /// What a norm multiplies by.
    pub fn norm_vector(&self, name: &str) -> Result<D::Vector, CheckpointError> {
        self.weights.norm_vector(&self.name(name, "weight"))
    }

    /// Projections of the same input, with their biases if the model has them.
    pub fn column_parallel(&self, names: &[&str]) -> Result<ColumnParallel<D>, CheckpointError> {
        Ok(ColumnParallel::new(self.matrix(names)?, self.bias(names)?))
    }

    /// A projection whose outputs are summed over ranks, with its bias if the model has it.
    pub fn row_parallel(&self, name: &str) -> Result<RowParallel<D>, CheckpointError> {
        Ok(RowParallel::new(self.matrix(&[name])?, self.bias(&[name])?))
    }

    /// Projections of the same input, one under the other.
    pub fn matrix(&self, names: &[&str]) -> Result<D::Matrix, CheckpointError> {
        let names: Vec<String> = names.iter().map(|name| self.name(name, "weight")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.weights.matrix(&names)
    }

    fn bias(&self, names: &[&str]) -> Result<Option<D::Vector>, CheckpointError> {
        let names: Vec<String> = names.iter().map(|name| self.name(name, "bias")).collect();
        self.weights.bias(&names)
    }

    fn name(&self, name: &str, part: &str) -> String {
        format!("model.layers.{}.{name}.{part}", self.layer)
    }
}
