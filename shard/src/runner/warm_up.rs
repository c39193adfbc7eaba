//! Before a rank serves: what fits into memory, and steps that are run once.

use trireme_kernels::KvPages;

use super::{Ready, RunError, Runner};
use crate::{
    device::Device,
    layers::{
        rotary::RotaryTables,
        workspace::{StepSize, Workspace},
    },
    memory::KvDemand,
    prompt_scores::ROWS_AT_ONCE,
    sequences::Limits,
};

/// Bytes that token messages may fill on their way back to the first stage without blocking.
const TOKEN_RETURN_BYTES: usize = 64 << 10;

/// What the router asks a rank to be ready for.
#[derive(Clone, Copy, Debug)]
pub struct WarmupPlan {
    pub max_batch_tokens: usize,
    pub max_sequences: usize,
    pub max_model_len: usize,
    /// 0: report how many fit, allocate nothing.
    pub num_blocks: usize,
}

/// Bytes of this rank, as planned or allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub num_blocks: u32,
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub kv_bytes: u64,
}

impl<D: Device> Runner<D> {
    /// Reports what fits (`num_blocks == 0`), or allocates and runs the worst step once.
    pub fn warmup(&mut self, plan: &WarmupPlan) -> Result<MemoryPlan, RunError> {
        self.check_warmup(plan)?;
        let size = StepSize {
            rows: plan.max_batch_tokens,
            sampled: plan.max_sequences.max(ROWS_AT_ONCE.min(plan.max_batch_tokens)),
        };
        let bytes_per_block = self.kv_bytes_per_block();
        let mut memory = MemoryPlan {
            num_blocks: plan.num_blocks as u32,
            weight_bytes: self.weight_bytes,
            workspace_bytes: Workspace::<D>::bytes(&self.model, &self.place.slice, size),
            kv_bytes: 0,
        };
        if plan.num_blocks == 0 {
            let blocks_per_sequence = plan.max_model_len.div_ceil(KvPages::BLOCK_TOKENS);
            let available = self.device.available_bytes();
            let demand = KvDemand {
                bytes_per_block,
                useful_blocks: (plan.max_sequences as u64)
                    .saturating_mul(blocks_per_sequence as u64),
                memory: self.kv_memory,
                ranks: self.device.sharers(self.place.ranks()) as u64,
                default_share: self.device.default_kv_share(),
                available: available.saturating_sub(memory.workspace_bytes),
            };
            if let Some((value, most)) = demand.excess() {
                let limit = format!("at most {most} bytes, this rank's share of what is available");
                return Err(RunError::Limit {
                    field: "kv_cache_memory",
                    value: value as usize,
                    limit,
                });
            }
            memory.num_blocks = demand.blocks();
            if memory.num_blocks == 0 {
                let limit = format!("at least {bytes_per_block} bytes, for one block");
                let value = demand.memory.unwrap_or(available) as usize;
                return Err(RunError::Limit { field: "kv_cache_memory", value, limit });
            }
        } else {
            self.allocate(plan, size);
            self.run_worst_step(plan)?;
            if D::SPARSE_BUFFERS {
                self.renew(plan, size);
            }
            self.run_decode_steps(plan)?;
            self.device.warmed_up();
        }
        memory.kv_bytes = u64::from(memory.num_blocks) * bytes_per_block;
        Ok(memory)
    }

    fn check_warmup(&self, plan: &WarmupPlan) -> Result<(), RunError> {
        let sequences = TOKEN_RETURN_BYTES / 4 / (self.place.split.pp + 1);
        let positions = self.model.max_position_embeddings;
        let checks = [
            ("max_batch_tokens", plan.max_batch_tokens, 1 << 20),
            ("max_sequences", plan.max_sequences, sequences),
            ("max_model_len", plan.max_model_len, positions),
        ];
        for (field, value, most) in checks {
            if value == 0 || value > most {
                return Err(RunError::Limit { field, value, limit: format!("1 to {most}") });
            }
        }
        Ok(())
    }

    fn allocate(&mut self, plan: &WarmupPlan, size: StepSize) {
        // The old pages go before the new ones come: there may not be room for both.
        self.ready = None;
        self.sequences.clear();
        let limits = Limits {
            max_batch_tokens: plan.max_batch_tokens,
            max_sequences: plan.max_sequences,
            max_model_len: plan.max_model_len,
            num_blocks: plan.num_blocks,
            vocab_size: self.model.vocab_size,
        };
        self.device.reserve(&limits);
        let (device, slice, model) = (&self.device, &self.place.slice, &self.model);
        self.ready = Some(Ready {
            limits,
            rotary: RotaryTables::new(device, model, plan.max_model_len),
            pages: self.pages(plan),
            work: Workspace::new(device, model, slice, size),
        });
    }

    fn pages(&self, plan: &WarmupPlan) -> Vec<D::Pages> {
        let slice = &self.place.slice;
        let (kv_heads, head_dim) = (slice.kv_heads.len(), self.model.head_dim);
        let page = || self.device.pages(plan.num_blocks, kv_heads, head_dim);
        slice.layers.clone().map(|_| page()).collect()
    }

    /// Gives back the memory that the worst step touched: from here on what is resident follows use.
    fn renew(&mut self, plan: &WarmupPlan, size: StepSize) {
        let pages = self.pages(plan);
        let work = Workspace::new(&self.device, &self.model, &self.place.slice, size);
        if let Some(ready) = &mut self.ready {
            ready.pages = pages;
            ready.work = work;
        }
    }

    /// As many tokens as a step may have, in as few sequences as hold them, and every sampled row
    /// that the head may see: touches all of the workspace once and proves that the step fits.
    fn run_worst_step(&mut self, plan: &WarmupPlan) -> Result<(), RunError> {
        self.push_rows(plan, plan.max_batch_tokens);
        let sampled = plan.max_sequences.min(self.batch.rows());
        self.batch.set_sampled_rows((0..sampled).collect());
        self.forward()?;
        // The sizes up to `max_sequences` are those of decode steps.
        for rows in self.device.prefill_warmups(plan.max_sequences + 1, plan.max_batch_tokens) {
            self.push_rows(plan, rows);
            self.forward()?;
        }
        self.batch.clear();
        self.device.take_collective_time();
        Ok(())
    }

    /// Makes the batch one of so many rows, or as many as there are blocks for.
    fn push_rows(&mut self, plan: &WarmupPlan, rows: usize) {
        let blocks: Vec<u32> = (0..plan.num_blocks as u32).collect();
        let mut rows_left = rows.min(blocks.len() * KvPages::BLOCK_TOKENS);
        self.batch.clear();
        let per_sequence = plan.max_model_len.div_ceil(KvPages::BLOCK_TOKENS);
        for (id, blocks) in blocks.chunks(per_sequence).take(plan.max_sequences).enumerate() {
            let most = plan.max_model_len.min(blocks.len() * KvPages::BLOCK_TOKENS);
            let rows = rows_left.min(most);
            if rows == 0 {
                break;
            }
            rows_left -= rows;
            self.batch.push(id as u64, 0..rows, blocks, true);
            self.batch.push_tokens(&vec![0; rows]);
        }
    }

    /// Decode steps of the sizes that the device wants to see before it serves.
    fn run_decode_steps(&mut self, plan: &WarmupPlan) -> Result<(), RunError> {
        for sequences in self.device.decode_warmups(plan.max_sequences) {
            self.batch.clear();
            for id in 0..sequences {
                self.batch.push(id as u64, 0..1, &[0], true);
                self.batch.push_tokens(&[0]);
            }
            self.forward()?;
        }
        self.batch.clear();
        self.device.take_collective_time();
        Ok(())
    }
}
