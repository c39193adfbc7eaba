//! Memory arithmetic of one rank.

use serde::Serialize;

use crate::{ModelConfig, RankNumbers, RankSlice};

/// Memory of one rank, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    pub weight_bytes: u64,
    pub kv_bytes_per_block: u64,
}

impl MemoryEstimate {
    /// `weight_size` and `kv_size`: bytes of one number. Blocks hold `block_tokens` tokens.
    pub fn of(
        model: &ModelConfig,
        slice: &RankSlice,
        weight_size: usize,
        kv_size: usize,
        block_tokens: usize,
    ) -> Self {
        let kv_numbers = 2 * slice.kv_heads.len() * model.head_dim * slice.layers.len();
        let numbers = RankNumbers::of(model, slice);
        Self {
            weight_bytes: (numbers.matrices + numbers.vectors) * weight_size as u64,
            kv_bytes_per_block: kv_numbers as u64 * kv_size as u64 * block_tokens as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Split, config::tests::model};

    /// Parameters of SmolLM2-135M, as its model card counts them.
    const SMOLLM2: u64 = 134_515_008;
    const TABLE: u64 = 49152 * 576;

    fn total(model: &ModelConfig, tp: usize, pp: usize) -> (u64, u64) {
        let split = Split { tp, pp };
        let ranks = (0..tp * pp).map(|rank| split.slice(model, rank));
        let sizes = ranks.map(|slice| MemoryEstimate::of(model, &slice, 2, 4, 16));
        sizes.fold((0, 0), |sum, size| (sum.0 + size.weight_bytes, sum.1 + size.kv_bytes_per_block))
    }

    #[test]
    fn weights_and_blocks_add_up() {
        let kv_block = 2 * 3 * 64 * 30 * 16 * 4;
        let layer_norms = 30 * 2 * 576;
        let untied = ModelConfig { tied_embeddings: false, ..model() };
        for (model, tp, pp, parameters, kv) in [
            (&model(), 1, 1, SMOLLM2, kv_block),
            (&untied, 1, 1, SMOLLM2 + TABLE, kv_block),
            // A tied table is held at both ends of the pipeline.
            (&model(), 1, 2, SMOLLM2 + TABLE, kv_block),
            (&untied, 1, 2, SMOLLM2 + TABLE, kv_block),
            // Norms are whole on each of two ranks.
            (&model(), 2, 1, SMOLLM2 + layer_norms + 576, kv_block),
        ] {
            assert_eq!(total(model, tp, pp), (2 * parameters, kv), "tp {tp} pp {pp}");
        }
        // Nine ranks, three KV heads: each is held three times, in weights and in cache.
        let (weights, kv) = total(&model(), 9, 1);
        let replicas = 30 * 2 * 2 * 192 * 576;
        assert_eq!(kv, 3 * kv_block);
        assert_eq!(weights, 2 * (SMOLLM2 + replicas + 8 * (layer_norms + 576)));
    }
}
