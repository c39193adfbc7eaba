//! What each rank of a split holds, in bytes, and which split to take.

use serde::Serialize;
use trireme_checkpoint::{MemoryEstimate, ModelConfig, RankSlice, Split};

use crate::topology::BLOCK_TOKENS;

/// Bytes of one number.
#[derive(Clone, Copy, Debug)]
pub struct Storage {
    pub weight_size: usize,
    pub kv_size: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct RankMemory {
    pub rank: usize,
    #[serde(flatten)]
    pub slice: RankSlice,
    pub weight_bytes: u64,
    pub kv_bytes_per_token: u64,
    /// Of one sequence as long as the model allows.
    pub kv_bytes_per_sequence: u64,
}

impl RankMemory {
    /// The least that a rank needs to be of use.
    pub fn least_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.kv_bytes_per_sequence)
    }
}

/// All ranks of one legal split.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPlan {
    #[serde(flatten)]
    pub split: Split,
    pub ranks: Vec<RankMemory>,
}

impl MemoryPlan {
    /// Of a split that was checked.
    pub fn of(model: &ModelConfig, split: Split, storage: Storage) -> Self {
        let rank = |rank| {
            let slice = split.slice(model, rank);
            let Storage { weight_size, kv_size } = storage;
            let estimate = MemoryEstimate::of(model, &slice, weight_size, kv_size, BLOCK_TOKENS);
            let blocks = model.max_position_embeddings.div_ceil(BLOCK_TOKENS) as u64;
            RankMemory {
                rank,
                slice,
                weight_bytes: estimate.weight_bytes,
                kv_bytes_per_token: estimate.kv_bytes_per_block / BLOCK_TOKENS as u64,
                kv_bytes_per_sequence: estimate.kv_bytes_per_block.saturating_mul(blocks),
            }
        };
        Self { split, ranks: (0..split.tp * split.pp).map(rank).collect() }
    }

    /// The largest of a figure over all ranks.
    pub fn most(&self, figure: impl Fn(&RankMemory) -> u64) -> u64 {
        self.ranks.iter().map(figure).max().unwrap_or(0)
    }

    /// The fewest ranks, and among these the widest TP, whose devices have the memory: weights and
    /// one whole sequence. None where even the last of `plans` is too large.
    pub fn recommended(plans: &[Self], device_memory_bytes: u64) -> Option<&Self> {
        plans.iter().find(|plan| plan.most(RankMemory::least_bytes) <= device_memory_bytes)
    }
}

/// Every legal split on up to so many ranks, fewest ranks and widest TP first.
pub fn plans(model: &ModelConfig, ranks_max: usize, storage: Storage) -> Vec<MemoryPlan> {
    (1..=ranks_max)
        .flat_map(|ranks| Split::legal(model, ranks))
        .map(|split| MemoryPlan::of(model, split, storage))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use trireme_checkpoint::Checkpoint;

    use super::*;

    #[test]
    fn the_recommended_split_is_the_smallest_that_fits() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures");
        let model = Checkpoint::open(&root.join("models/llama3-like")).unwrap().model().clone();
        let plans = plans(&model, 8, Storage { weight_size: 2, kv_size: 2 });
        let need = |tp: usize, pp: usize| {
            let plan = plans.iter().find(|plan| plan.split == Split { tp, pp }).unwrap();
            assert_eq!(plan.ranks.len(), tp * pp);
            plan.most(RankMemory::least_bytes)
        };
        let check = |memory: u64, want: Option<(usize, usize)>| {
            let got = MemoryPlan::recommended(&plans, memory);
            assert_eq!(got.map(|plan| (plan.split.tp, plan.split.pp)), want, "{memory} bytes");
        };
        assert!(need(2, 1) < need(1, 1), "two ranks need less each");
        check(need(1, 1), Some((1, 1)));
        check(need(1, 1) - 1, Some((2, 1)));
        check(need(2, 1), Some((2, 1)));
        check(10, None);
        // Keys and values of 2 heads of 8 numbers, 4 layers, 2 bytes; 512 positions.
        let one = &plans[0].ranks[0];
        assert_eq!((one.kv_bytes_per_token, one.kv_bytes_per_sequence), (256, 256 * 512));
    }
}
