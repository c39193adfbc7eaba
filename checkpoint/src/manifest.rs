//! The tensors that a model has: Hugging Face names and row order, shapes, and how ranks share them.

use serde::Serialize;

use crate::{Family, ModelConfig, RankSlice};

/// Name of the embedding, which a tied head is read from.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// Which part of a dimension a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Part {
    Whole,
    /// Whole on the first rank of a stage, nothing on the others: it is added before a sum over ranks.
    FirstRank,
    Heads,
    KvHeads,
    Mlp,
    /// Of each expert's inner width.
    ExpertMlp,
    Vocab,
}

/// A tensor that the model needs.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Of a layer: what follows `model.layers.N.`.
    pub name: String,
    /// `[rows, columns]` or `[width]`.
    pub shape: Vec<usize>,
    /// Of the first dimension.
    pub rows: Part,
    /// Of the second dimension, if there is one.
    pub columns: Part,
}

impl TensorSpec {
    /// Every rank holds its part of the outputs.
    fn outputs(name: &str, [outputs, inputs]: [usize; 2], part: Part) -> Self {
        let shape = vec![outputs, inputs];
        Self { name: format!("{name}.weight"), shape, rows: part, columns: Part::Whole }
    }

    /// Every rank holds its part of the inputs.
    fn inputs(name: &str, [outputs, inputs]: [usize; 2], part: Part) -> Self {
        let shape = vec![outputs, inputs];
        Self { name: format!("{name}.weight"), shape, rows: Part::Whole, columns: part }
    }

    fn vector(name: &str, width: usize, part: Part) -> Self {
        Self { name: name.to_owned(), shape: vec![width], rows: part, columns: Part::Whole }
    }

    fn norm(name: &str, width: usize) -> Self {
        Self::vector(&format!("{name}.weight"), width, Part::Whole)
    }

    fn numbers(&self, model: &ModelConfig, slice: &RankSlice) -> u64 {
        let part = |part, size| slice.part(model, part, size).len() as u64;
        let columns = self.shape.get(1).map_or(1, |&columns| part(self.columns, columns));
        part(self.rows, self.shape[0]) * columns
    }
}

/// Numbers of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankNumbers {
    pub matrices: u64,
    /// Norms and biases.
    pub vectors: u64,
}

impl RankNumbers {
    /// What the rank of `slice` holds. A tied embedding is held once where one rank both embeds and
    /// predicts, else once at either end.
    pub fn of(model: &ModelConfig, slice: &RankSlice) -> Self {
        let mut numbers = Self::default();
        let mixtures = slice.layers.clone().filter(|&layer| model.experts(layer).is_some());
        let mixtures = mixtures.count();
        for (is_mixture, layers) in [(true, mixtures), (false, slice.layers.len() - mixtures)] {
            if layers > 0 {
                numbers.add(&layer_tensors(model, is_mixture), layers, model, slice);
                let expert = if is_mixture { expert_tensors(model, 0) } else { Vec::new() };
                let experts = model.experts.as_ref().map_or(0, |experts| experts.count);
                numbers.add(&expert, layers * experts, model, slice);
            }
        }
        let [embedding, norm, head] = end_tensors(model);
        let shared = model.tied_embeddings && slice.first_stage;
        for (spec, held) in [
            (embedding, slice.first_stage),
            (norm, slice.last_stage),
            (head, slice.last_stage && !shared),
        ] {
            numbers.add(&[spec], usize::from(held), model, slice);
        }
        numbers
    }

    fn add(&mut self, specs: &[TensorSpec], copies: usize, model: &ModelConfig, slice: &RankSlice) {
        for spec in specs {
            let numbers = spec.numbers(model, slice) * copies as u64;
            if spec.shape.len() == 1 {
                self.vectors += numbers;
            } else {
                self.matrices += numbers;
            }
        }
    }
}

/// Numbers of a layer, the mean over all layers.
pub(crate) fn layer_parameters(model: &ModelConfig) -> u64 {
    let sum = |specs: &[TensorSpec]| -> u64 {
        specs.iter().map(|spec| spec.shape.iter().map(|&size| size as u64).product::<u64>()).sum()
    };
    let layers = model.layers as u64;
    let mixtures = (0..model.layers).filter(|&layer| model.experts(layer).is_some());
    let mixtures = mixtures.count() as u64;
    let mut total = 0;
    if mixtures > 0 {
        let experts = model.experts.as_ref().map_or(0, |experts| experts.count as u64);
        let experts = experts * sum(&expert_tensors(model, 0));
        total += mixtures * (sum(&layer_tensors(model, true)) + experts);
    }
    if mixtures < layers {
        total += (layers - mixtures) * sum(&layer_tensors(model, false));
    }
    total / layers
}

/// Every tensor that `model` needs.
pub(crate) fn tensors(model: &ModelConfig) -> Vec<TensorSpec> {
    let [embedding, norm, head] = end_tensors(model);
    let mut tensors = vec![embedding];
    for layer in 0..model.layers {
        let experts = model.experts(layer);
        let mut specs = layer_tensors(model, experts.is_some());
        let count = experts.map_or(0, |experts| experts.count);
        specs.extend((0..count).flat_map(|expert| expert_tensors(model, expert)));
        for spec in &mut specs {
            spec.name = format!("model.layers.{layer}.{}", spec.name);
        }
        tensors.extend(specs);
    }
    tensors.push(norm);
    if !model.tied_embeddings {
        tensors.push(head);
    }
    tensors
}

fn end_tensors(model: &ModelConfig) -> [TensorSpec; 3] {
    let shape = vec![model.vocab_size, model.hidden_size];
    let table = |name: &str| TensorSpec {
        name: name.to_owned(),
        shape: shape.clone(),
        rows: Part::Vocab,
        columns: Part::Whole,
    };
    [table(EMBEDDING), TensorSpec::norm("model.norm", model.hidden_size), table(HEAD)]
}

/// All tensors of a layer but its experts.
fn layer_tensors(model: &ModelConfig, is_mixture: bool) -> Vec<TensorSpec> {
    let hidden = model.hidden_size;
    let mut tensors = attention_tensors(model);
    let norms: &[&str] = match model.layer.post_norms {
        false => &["input_layernorm", "post_attention_layernorm"],
        true => &[
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ],
    };
    tensors.extend(norms.iter().map(|name| TensorSpec::norm(name, hidden)));
    if let (true, Some(experts)) = (is_mixture, &model.experts) {
        let router = format!("{}.gate", mixture_name(model.family));
        tensors.push(TensorSpec::outputs(&router, [experts.count, hidden], Part::Whole));
        return tensors;
    }
    let width = model.intermediate_size;
    tensors.extend(gated_mlp(hidden, width, Part::Mlp, &MLP.map(|part| format!("mlp.{part}"))));
    if model.layer.mlp_bias {
        tensors.extend([
            TensorSpec::vector("mlp.gate_proj.bias", width, Part::Mlp),
            TensorSpec::vector("mlp.up_proj.bias", width, Part::Mlp),
            TensorSpec::vector("mlp.down_proj.bias", hidden, Part::FirstRank),
        ]);
    }
    tensors
}

fn attention_tensors(model: &ModelConfig) -> Vec<TensorSpec> {
    let (hidden, query, kv) = (model.hidden_size, model.query_width(), model.kv_width());
    let projections = [
        ("self_attn.q_proj", query, Part::Heads),
        ("self_attn.k_proj", kv, Part::KvHeads),
        ("self_attn.v_proj", kv, Part::KvHeads),
    ];
    let mut tensors = Vec::new();
    for (name, width, part) in projections {
        tensors.push(TensorSpec::outputs(name, [width, hidden], part));
        if model.layer.qkv_bias {
            tensors.push(TensorSpec::vector(&format!("{name}.bias"), width, part));
        }
    }
    tensors.push(TensorSpec::inputs("self_attn.o_proj", [hidden, query], Part::Heads));
    if model.layer.output_bias {
        tensors.push(TensorSpec::vector("self_attn.o_proj.bias", hidden, Part::FirstRank));
    }
    if model.layer.qk_norm {
        tensors.push(TensorSpec::norm("self_attn.q_norm", model.head_dim));
        tensors.push(TensorSpec::norm("self_attn.k_norm", model.head_dim));
    }
    tensors
}

/// Gate, up and down.
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn gated_mlp(hidden: usize, width: usize, part: Part, names: &[String; 3]) -> [TensorSpec; 3] {
    let [gate, up, down] = names;
    [
        TensorSpec::outputs(gate, [width, hidden], part),
        TensorSpec::outputs(up, [width, hidden], part),
        TensorSpec::inputs(down, [hidden, width], part),
    ]
}

/// What a mixture is called in a layer.
pub(crate) fn mixture_name(family: Family) -> &'static str {
    match family {
        Family::Mixtral => "block_sparse_moe",
        _ => "mlp",
    }
}

/// What gate, up and down of an expert are called.
pub(crate) fn expert_parts(family: Family) -> [&'static str; 3] {
    match family {
        Family::Mixtral => ["w1", "w3", "w2"],
        _ => MLP,
    }
}

fn expert_tensors(model: &ModelConfig, expert: usize) -> Vec<TensorSpec> {
    let Some(experts) = &model.experts else { return Vec::new() };
    let mixture = mixture_name(model.family);
    let names = expert_parts(model.family).map(|part| format!("{mixture}.experts.{expert}.{part}"));
    gated_mlp(model.hidden_size, experts.width, Part::ExpertMlp, &names).into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Checkpoint, Split, checkpoint::tests::whole, fixtures::fixture};

    /// Made-up weights have the tensors of the files, norms that do nothing, and biases of zero.
    #[test]
    fn made_up_weights_have_every_tensor() {
        for folder in fs::read_dir(fixture("models")).unwrap() {
            let path = folder.unwrap().path();
            let (real, dummy) =
                (Checkpoint::open(&path).unwrap(), Checkpoint::dummy(&path, 7).unwrap());
            assert_eq!(real.parameters(), dummy.parameters(), "{}", path.display());
            let model = dummy.model();
            assert_eq!(real.model(), model);
            for TensorSpec { name, shape, .. } in tensors(model) {
                let (real, dummy) = (whole(&real, &name), whole(&dummy, &name));
                assert_eq!(real.len(), dummy.len(), "{name}");
                let neutral =
                    if name.ends_with(".bias") || model.layer.norms_add_one { 0.0 } else { 1.0 };
                let is_neutral = dummy.iter().all(|&value| value == neutral);
                assert_eq!(is_neutral, shape.len() == 1, "{name}");
            }
            // One rank holds the whole model.
            let numbers = RankNumbers::of(model, &Split { tp: 1, pp: 1 }.slice(model, 0));
            assert_eq!(numbers.matrices + numbers.vectors, real.parameters(), "{}", path.display());
        }
    }
}
