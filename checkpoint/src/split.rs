//! How a model is split over devices: by whole KV-head groups in a stage, by layers over stages.

use std::{fmt::Write, ops::Range};

use serde::Serialize;

use crate::{CheckpointError, ModelConfig, Part, manifest::layer_parameters};

/// MLP columns and vocabulary rows are cut at multiples of this where the width allows it: the
/// block of the common quantised types, and a whole number of SIMD registers and GPU tiles.
const WIDTH_UNIT: usize = 32;

/// How a model is split: `tp` ranks a stage, `pp` stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Split {
    pub tp: usize,
    pub pp: usize,
}

/// What one rank holds. Heads and KV heads are whole; a KV head is replicated where TP exceeds them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankSlice {
    pub stage: usize,
    pub tp_rank: usize,
    pub layers: Range<usize>,
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    /// Columns of the MLP's inner width.
    pub mlp: Range<usize>,
    /// Columns of each expert's inner width; empty where there are no experts.
    pub expert_mlp: Range<usize>,
    /// Rows of embedding and head.
    pub vocab: Range<usize>,
    pub first_stage: bool,
    pub last_stage: bool,
}

impl Split {
    /// Refused with the splits that can work on as many or fewer devices.
    pub fn check(&self, model: &ModelConfig) -> Result<(), CheckpointError> {
        match self.obstacle(model) {
            None => Ok(()),
            Some(reason) => Err(CheckpointError::Split {
                split: *self,
                reason,
                legal: Self::alternatives(model, self.tp.saturating_mul(self.pp)),
            }),
        }
    }

    /// What rank `stage * tp + tp_rank` holds.
    ///
    /// # Panics
    /// If the split fails `check` or `rank >= tp * pp`: plans are checked before ranks exist.
    pub fn slice(&self, model: &ModelConfig, rank: usize) -> RankSlice {
        assert!(self.obstacle(model).is_none(), "slice of a split that was not checked: {self:?}");
        assert!(rank < self.tp * self.pp, "rank {rank} is not in {self:?}");
        let (stage, tp_rank) = (rank / self.tp, rank % self.tp);
        let (heads, kv_heads) = attention(model, self.tp, tp_rank);
        RankSlice {
            stage,
            tp_rank,
            layers: stage_layers(model, self.pp, stage),
            heads,
            kv_heads,
            mlp: width(model.intermediate_size, self.tp, tp_rank),
            expert_mlp: match &model.experts {
                Some(experts) => width(experts.width, self.tp, tp_rank),
                None => 0..0,
            },
            vocab: width(model.vocab_size, self.tp, tp_rank),
            first_stage: stage == 0,
            last_stage: stage + 1 == self.pp,
        }
    }

    /// All splits of `model` on exactly `devices` ranks, widest TP first.
    pub fn legal(model: &ModelConfig, devices: usize) -> Vec<Split> {
        (1..=devices.min(model.layers))
            .filter(|pp| devices.is_multiple_of(*pp))
            .map(|pp| Split { tp: devices / pp, pp })
            .filter(|split| split.obstacle(model).is_none())
            .collect()
    }

    /// Why `model` cannot be split so, naming the limit and the value.
    fn obstacle(&self, model: &ModelConfig) -> Option<String> {
        let Self { tp, pp } = *self;
        if tp == 0 || pp == 0 {
            return Some("tp and pp are at least 1".to_owned());
        }
        for (limit, name) in limits(model) {
            if tp > limit {
                return Some(format!("tp is {tp}, but there are {limit} {name}"));
            }
        }
        (pp > model.layers).then(|| format!("pp is {pp}, but there are {} layers", model.layers))
    }

    /// The plans on the most devices that can be used, at most as many as asked for.
    fn alternatives(model: &ModelConfig, devices: usize) -> Vec<Split> {
        /// Enough to choose from; a message is not a table.
        const MOST_LISTED: usize = 12;
        let widest = limits(model).iter().map(|(limit, _)| *limit).min().unwrap_or(0);
        let usable = widest.saturating_mul(model.layers);
        let mut plans = Vec::new();
        for count in (1..=devices.min(usable)).rev() {
            plans.extend(Self::legal(model, count));
            if plans.len() >= MOST_LISTED {
                break;
            }
        }
        plans.truncate(MOST_LISTED);
        plans
    }

    pub(crate) fn list(plans: &[Split]) -> String {
        let mut text = String::new();
        for (i, Split { tp, pp }) in plans.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            // Writing to a String does not fail.
            let _ = write!(text, "{separator}tp {tp} x pp {pp}");
        }
        if text.is_empty() { "none".to_owned() } else { text }
    }
}

/// The most ranks of a stage, and what limits them so.
fn limits(model: &ModelConfig) -> [(usize, &'static str); 4] {
    let expert = model.experts.as_ref().map_or(usize::MAX, |experts| experts.width);
    [
        (model.heads, "query heads"),
        (model.intermediate_size, "MLP columns"),
        (expert, "columns of an expert"),
        (model.vocab_size, "vocabulary entries"),
    ]
}

impl RankSlice {
    /// The rank's `part` of a dimension of `size`.
    pub fn part(&self, model: &ModelConfig, part: Part, size: usize) -> Range<usize> {
        let heads = |heads: &Range<usize>| heads.start * model.head_dim..heads.end * model.head_dim;
        match part {
            Part::Whole => 0..size,
            Part::FirstRank if self.tp_rank == 0 => 0..size,
            Part::FirstRank => 0..0,
            Part::Heads => heads(&self.heads),
            Part::KvHeads => heads(&self.kv_heads),
            Part::Mlp => self.mlp.clone(),
            Part::ExpertMlp => self.expert_mlp.clone(),
            Part::Vocab => self.vocab.clone(),
        }
    }
}

/// Item range of part `index` when `count` items are dealt to `parts` as evenly as can be, the
/// first parts getting the odd ones.
fn share(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, odd) = (count / parts, count % parts);
    let start = index * each + index.min(odd);
    start..start + each + usize::from(index < odd)
}

/// Query and KV heads of a rank.
fn attention(model: &ModelConfig, tp: usize, rank: usize) -> (Range<usize>, Range<usize>) {
    let group = model.heads / model.kv_heads;
    if tp <= model.kv_heads {
        let kv = share(model.kv_heads, tp, rank);
        return (kv.start * group..kv.end * group, kv);
    }
    // More ranks than KV heads: deal the ranks to the groups, then a group's heads to its ranks.
    let ranks_of = |kv| share(tp, model.kv_heads, kv);
    let kv = (0..model.kv_heads).find(|&kv| ranks_of(kv).contains(&rank)).unwrap_or(0);
    let ranks = ranks_of(kv);
    let heads = share(group, ranks.len(), rank - ranks.start);
    (kv * group + heads.start..kv * group + heads.end, kv..kv + 1)
}

/// Part `rank` of a width, cut at multiples of the largest unit that leaves no rank empty; what
/// is left over goes to the last rank.
fn width(width: usize, tp: usize, rank: usize) -> Range<usize> {
    let mut unit = WIDTH_UNIT;
    while width / unit < tp {
        unit /= 2;
    }
    let units = share(width / unit, tp, rank);
    let end = if rank + 1 == tp { width } else { units.end * unit };
    units.start * unit..end
}

/// Layers of a stage, so that the stage with the most parameters has as few as can be. The first
/// stage holds the embedding as well, the last the head.
fn stage_layers(model: &ModelConfig, pp: usize, stage: usize) -> Range<usize> {
    let layer = layer_parameters(model);
    let table = model.vocab_size as u64 * model.hidden_size as u64;
    let mut load = vec![layer; pp];
    let mut layers = vec![1usize; pp];
    load[0] += table;
    load[pp - 1] += table;
    // Giving each further layer to the lightest stage is optimal, since layers weigh the same.
    for _ in pp..model.layers {
        let lightest = (0..pp).min_by_key(|&s| load[s]).unwrap_or(0);
        load[lightest] += layer;
        layers[lightest] += 1;
    }
    let start = layers[..stage].iter().sum();
    start..start + layers[stage]
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
