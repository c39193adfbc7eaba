//! Model families. A family's file says what its layers are made of, and never mentions a rank.

mod gemma3;
mod granite;
mod llama;
mod mixtral;
mod qwen3_moe;

use trireme_checkpoint::{CheckpointError, Family};
use trireme_collectives::CollectiveError;

use crate::{
    batch::Batch,
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        attention::LayerStep, decoder::PreNormLayer, embedding::LogitUse, rotary::RotaryTables,
        workspace::Workspace,
    },
    stage::{Entry, Exit},
    weights::Weights,
};

/// One layer of a decoder.
pub trait Layer<D: Device>: Send {
    /// From the residual stream, to which `work.delta` belongs where the step says so, to the residual
    /// stream and a new `work.delta`. Appends this step's keys and values to `pages`.
    fn forward(
        &self,
        device: &mut D,
        step: &LayerStep<'_, D>,
        pages: &mut D::Pages,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError>;
}

/// The layers of one stage, with what comes before and after them.
pub struct Model<D: Device> {
    entry: Entry<D>,
    layers: Vec<Box<dyn Layer<D>>>,
    exit: Exit<D>,
}

impl<D: Device> Model<D> {
    pub fn load(weights: &Weights<'_, D>) -> Result<Self, CheckpointError> {
        let family = weights.checkpoint.model().family;
        let ((entry, exit), layers) = weights.ends_and_layers(|layer| load_layer(family, layer))?;
        Ok(Self { entry, layers, exit })
    }

    /// Leaves logits of the batch's sampled rows in `work.logits` (last stage). `pages`: one for each layer.
    pub fn forward(
        &self,
        device: &mut D,
        batch: &Batch,
        rotary: &RotaryTables<D>,
        pages: &mut [D::Pages],
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let rows = device.rows(batch);
        let mut step = LayerStep { rows, row_count: batch.rows(), rotary, delta_waits: false };
        self.entry.forward(device, batch, work)?;
        for (layer, pages) in self.layers.iter().zip(pages) {
            layer.forward(device, &step, pages, work)?;
            step.delta_waits = true;
        }
        self.exit.forward(device, batch, work)
    }

    /// Logits for the scores of other rows of the batch that [`Model::forward`] has just computed.
    pub fn score_logits(&self, device: &mut D, rows: &[usize], work: &mut Workspace<D>) {
        self.exit.logits(device, rows, LogitUse::Scores, work);
    }
}

fn load_layer<D: Device>(
    family: Family,
    weights: &LayerWeights<'_, D>,
) -> Result<Box<dyn Layer<D>>, CheckpointError> {
    let pre_norm = |layer: PreNormLayer<D>| -> Box<dyn Layer<D>> { Box::new(layer) };
    match family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Phi3 => {
            llama::layer(weights).map(pre_norm)
        }
        Family::Mixtral => mixtral::layer(weights).map(pre_norm),
        Family::Qwen3Moe => qwen3_moe::layer(weights).map(pre_norm),
        Family::Granite => granite::layer(weights).map(pre_norm),
        Family::Gemma3 => Ok(Box::new(gemma3::Gemma3Layer::load(weights)?)),
    }
}
