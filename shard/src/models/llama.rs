//! Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024): pre-norm blocks of grouped-query
//! attention with rotary positions and a SwiGLU MLP.

use trireme_checkpoint::CheckpointError;
use trireme_collectives::CollectiveError;

use crate::{
    batch::Batch,
    device::Device,
    layers::{
        attention::{Attention, AttentionStep},
        linear::{ColumnParallel, RowParallel},
        mlp::GatedMlp,
        norm::RmsNorm,
        workspace::Workspace,
    },
    stage::{Entry, Exit},
    weights::{Part, Weights},
};

/// The layers of one stage, with what comes before and after them.
pub struct Llama<D: Device> {
    entry: Entry<D>,
    layers: Vec<Layer<D>>,
    exit: Exit<D>,
}

struct Layer<D: Device> {
    attention_norm: RmsNorm<D>,
    attention: Attention<D>,
    mlp_norm: RmsNorm<D>,
    mlp: GatedMlp<D>,
}

impl<D: Device> Llama<D> {
    pub fn load(weights: &Weights<'_, D>) -> Result<Self, CheckpointError> {
        let ((entry, exit), layers) = weights.ends_and_layers(Layer::load)?;
        Ok(Self { entry, layers, exit })
    }

    /// Leaves logits of the batch's sampled rows in `work.logits` (last stage). `pages`: one for each layer.
    pub fn forward(
        &self,
        device: &mut D,
        batch: &Batch,
        rotary: &D::Rotary,
        pages: &mut [D::Pages],
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let rows = device.rows(batch);
        let step = AttentionStep { rows, row_count: batch.rows(), rotary };
        self.entry.forward(device, batch, work)?;
        for (index, (layer, pages)) in self.layers.iter().zip(pages).enumerate() {
            layer.forward(device, &step, index == 0, pages, work)?;
        }
        self.exit.forward(device, batch, work)
    }

    /// Logits of other rows of the batch that [`Llama::forward`] has just computed.
    pub fn logits(&self, device: &mut D, rows: &[usize], work: &mut Workspace<D>) {
        self.exit.logits(device, rows, work);
    }
}

impl<D: Device> Layer<D> {
    fn load(weights: &Weights<'_, D>, layer: usize) -> Result<Self, CheckpointError> {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let qkv = [
            (name("self_attn.q_proj"), Part::Heads),
            (name("self_attn.k_proj"), Part::KvHeads),
            (name("self_attn.v_proj"), Part::KvHeads),
        ];
        let gate_up = [(name("mlp.gate_proj"), Part::Mlp), (name("mlp.up_proj"), Part::Mlp)];
        Ok(Self {
            attention_norm: weights.norm(&name("input_layernorm"))?,
            attention: Attention {
                qkv: ColumnParallel::new(weights.rows_of(&qkv)?),
                output: RowParallel::new(
                    weights.columns_of(&name("self_attn.o_proj"), Part::Heads)?,
                ),
                layout: weights.head_layout(),
            },
            mlp_norm: weights.norm(&name("post_attention_layernorm"))?,
            mlp: GatedMlp {
                gate_up: ColumnParallel::new(weights.rows_of(&gate_up)?),
                down: RowParallel::new(weights.columns_of(&name("mlp.down_proj"), Part::Mlp)?),
                width: weights.mlp_width(),
            },
        })
    }

    /// `x += attention(norm(x)); x += mlp(norm(x))`. Each addition is done by the norm that follows it.
    fn forward(
        &self,
        device: &mut D,
        step: &AttentionStep<'_, D>,
        first: bool,
        pages: &mut D::Pages,
        work: &mut Workspace<D>,
    ) -> Result<(), CollectiveError> {
        let Workspace { residual, normed, delta, .. } = work;
        if first {
            self.attention_norm.forward(device, residual, step.row_count, normed);
        } else {
            self.attention_norm.forward_add(device, residual, delta, step.row_count, normed);
        }
        self.attention.forward(device, step, pages, work)?;
        let Workspace { residual, normed, delta, .. } = work;
        self.mlp_norm.forward_add(device, residual, delta, step.row_count, normed);
        self.mlp.forward(device, step.row_count, work)
    }
}
