//! Mixture of experts (Shazeer et al. 2017; Jiang et al. 2024, Mixtral). Every rank holds its columns of
//! every expert, as of one MLP, so ranks have equal work whatever the router prefers.

use trireme_checkpoint::{CheckpointError, ExpertConfig, RankSlice};
use trireme_collectives::CollectiveError;
use trireme_kernels as kernels;

use super::{linear::ColumnParallel, mlp::activation, workspace::Workspace};
use crate::{device::Device, layer_weights::LayerWeights};

/// What experts and their parts are called in a layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    pub mixture: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

pub struct Mixture<D: Device> {
    /// The same on every rank, so that all choose the same experts.
    router: ColumnParallel<D>,
    experts: Experts<D>,
}

/// Gated MLPs of which each row uses a few.
pub struct Experts<D: Device> {
    /// Gate rows, then up rows, of each expert.
    pub gate_up: Vec<D::Matrix>,
    pub down: Vec<D::Matrix>,
    /// This rank's part of an expert's inner width.
    pub width: usize,
    /// Experts of a row.
    pub per_token: usize,
    /// The chosen experts' weights sum to one.
    pub renormalise: bool,
    pub activation: kernels::Activation,
}

/// Activations of a mixture, `[rows, width]`.
pub struct ExpertBuffers<D: Device> {
    /// What the router says of each expert.
    pub logits: D::Buffer,
    /// The rows of one expert at a time.
    pub input: D::Buffer,
    pub gate_up: D::Buffer,
    pub inner: D::Buffer,
    pub output: D::Buffer,
    /// Of all experts, on devices that do not add up in their result.
    pub sum: D::Buffer,
}

impl<D: Device> Mixture<D> {
    /// # Panics
    /// If the model has no experts: its family says that it has.
    pub fn load(
        weights: &LayerWeights<'_, D>,
        names: ExpertNames,
    ) -> Result<Self, CheckpointError> {
        let config = weights.model().experts.as_ref().expect("a family with experts");
        let ExpertNames { mixture, gate, up, down } = names;
        let part = |expert, part| format!("{mixture}.experts.{expert}.{part}");
        let gate_up = |expert| weights.matrix(&[&part(expert, gate), &part(expert, up)]);
        let down = |expert| weights.matrix(&[&part(expert, down)]);
        Ok(Self {
            router: weights.column_parallel(&[&format!("{mixture}.gate")])?,
            experts: Experts {
                gate_up: (0..config.count).map(gate_up).collect::<Result<_, _>>()?,
                down: (0..config.count).map(down).collect::<Result<_, _>>()?,
                width: weights.slice().expert_mlp.len(),
                per_token: config.per_token,
                renormalise: config.renormalise,
                activation: activation(weights.model().layer.activation),
            },
        })
    }

    /// From `work.normed` to `work.delta`.
    pub fn forward(
        &self,
        device: &mut D,
        rows: usize,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let Workspace { normed, delta, experts, .. } = work;
        self.router.forward(device, normed, rows, &mut experts.logits);
        device.mixture(normed, rows, &self.experts, experts, delta)?;
        device.all_reduce(delta, rows)
    }
}

/// Widths of [`ExpertBuffers`], in the order of its fields; all 0 without experts.
fn widths(config: Option<&ExpertConfig>, hidden: usize, slice: &RankSlice) -> [usize; 6] {
    let width = slice.expert_mlp.len();
    config.map_or([0; 6], |config| [config.count, hidden, 2 * width, width, hidden, hidden])
}

impl<D: Device> ExpertBuffers<D> {
    pub fn new(
        device: &D,
        rows: usize,
        config: Option<&ExpertConfig>,
        hidden: usize,
        slice: &RankSlice,
    ) -> Self {
        let [logits, input, gate_up, inner, output, sum] = widths(config, hidden, slice);
        Self {
            logits: device.buffer(rows, logits),
            input: device.activations(rows, input),
            gate_up: device.activations(rows, gate_up),
            inner: device.activations(rows, inner),
            output: device.buffer(rows, output),
            sum: device.buffer(rows, sum),
        }
    }

    /// Values of one row.
    pub fn row_len(config: Option<&ExpertConfig>, hidden: usize, slice: &RankSlice) -> usize {
        widths(config, hidden, slice).iter().sum()
    }
}
