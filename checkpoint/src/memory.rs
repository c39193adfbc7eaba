//! Memory arithmetic of one rank.

use serde::Serialize;

use crate::{ModelConfig, RankSlice};

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
        Self {
            weight_bytes: rank_parameters(model, slice) * weight_size as u64,
            kv_bytes_per_block: kv_numbers as u64 * kv_size as u64 * block_tokens as u64,
        }
    }
}

/// Numbers that a rank holds. Norms are whole on every rank; a tied embedding is held once where
/// one rank both embeds and predicts, else once at either end.
fn rank_parameters(model: &ModelConfig, slice: &RankSlice) -> u64 {
    let hidden = model.hidden_size as u64;
    let table = slice.vocab.len() as u64 * hidden;
    let heads = 2 * (slice.heads.len() + slice.kv_heads.len()) * model.head_dim;
    let layer = (heads + 3 * slice.mlp.len() + 2) as u64 * hidden;
    let embedding = if slice.first_stage { table } else { 0 };
    let shared = model.tied_embeddings && slice.first_stage;
    let head = if slice.last_stage && !shared { table } else { 0 };
    let final_norm = if slice.last_stage { hidden } else { 0 };
    slice.layers.len() as u64 * layer + embedding + head + final_norm
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
