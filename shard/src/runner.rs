//! One rank at work: the device with its model, caches and sequences, one step at a time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use trireme_checkpoint::ModelConfig;
use trireme_collectives::CollectiveError;
use trireme_kernels::KvPages;

use crate::{
    batch::{Batch, BatchError},
    device::Device,
    grammar::{Grammars, Masks},
    layers::{
        rotary::RotaryTables,
        workspace::{StepSize, Workspace},
    },
    memory::KvDemand,
    models::Model,
    prompt_scores::{PromptScores, ROWS_AT_ONCE, Targets},
    sampler::SampleRow,
    sequences::{Limits, SequenceError, Sequences},
    step::Step,
    token_return::TokenReturn,
    weights::Place,
};

/// Bytes that token messages may fill on their way back to the first stage without blocking.
const TOKEN_RETURN_BYTES: usize = 64 << 10;

/// What a step left behind.
#[derive(Debug, Default)]
pub struct StepOutcome {
    pub step_id: u64,
    /// Of the last stage; empty on the others.
    pub tokens: Vec<StepToken>,
    /// Of the last stage, too.
    pub prompts: Vec<PromptScores>,
    pub errors: Vec<SequenceError>,
    pub timings: Timings,
}

#[derive(Clone, Debug, PartialEq)]
pub struct StepToken {
    pub sequence: u64,
    pub token: u32,
    /// Raw model, natural log; 0 when not asked for.
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// From arrival to start.
    pub wait: Duration,
    pub forward: Duration,
    /// Part of forward.
    pub collective: Duration,
    pub sample: Duration,
    /// Part of sample: waiting for grammar masks.
    pub grammar: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("no warm-up since the group was configured")]
    NotWarm,
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error("{field}: {value}, but must be {limit}")]
    Limit { field: &'static str, value: usize, limit: String },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

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

/// KV pages and workspace, from warm-up to reset.
struct Ready<D: Device> {
    limits: Limits,
    rotary: RotaryTables<D>,
    pages: Vec<D::Pages>,
    work: Workspace<D>,
}

pub struct Runner<D: Device> {
    pub device: D,
    pub place: Place,
    pub model: ModelConfig,
    layers: Model<D>,
    weight_bytes: u64,
    kv_memory: Option<u64>,
    ready: Option<Ready<D>>,
    sequences: Sequences,
    batch: Batch,
    token_return: TokenReturn,
    masks: Masks,
}

/// What a [`Runner`] is made of, once loaded.
pub struct Loaded<D: Device> {
    pub device: D,
    pub place: Place,
    pub model: ModelConfig,
    pub layers: Model<D>,
    pub weight_bytes: u64,
    /// `--kv-cache-memory`, in bytes.
    pub kv_memory: Option<u64>,
}

impl<D: Device> Runner<D> {
    pub fn new(loaded: Loaded<D>) -> Self {
        Self {
            token_return: TokenReturn::new(&loaded.place),
            device: loaded.device,
            place: loaded.place,
            model: loaded.model,
            layers: loaded.layers,
            weight_bytes: loaded.weight_bytes,
            kv_memory: loaded.kv_memory,
            ready: None,
            sequences: Sequences::default(),
            batch: Batch::default(),
            masks: Masks::default(),
        }
    }

    /// Takes grammars from where calls beside the steps compile them.
    pub fn share_grammars(&mut self, grammars: Arc<Grammars>) {
        self.masks = Masks::new(grammars);
    }

    /// Memory that the weights take.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    pub fn kv_bytes_per_block(&self) -> u64 {
        let slice = &self.place.slice;
        let layer = self.device.page_bytes_per_block(slice.kv_heads.len(), self.model.head_dim);
        (layer * slice.layers.len()) as u64
    }

    /// Drops groups, sequences, pages and workspace. Weights stay.
    pub fn reset(&mut self) {
        self.device.leave();
        self.ready = None;
        self.sequences.clear();
        self.batch.clear();
        self.masks.clear();
        self.token_return = TokenReturn::new(&self.place);
    }

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
        let blocks: Vec<u32> = (0..plan.num_blocks as u32).collect();
        let mut rows_left = plan.max_batch_tokens.min(blocks.len() * KvPages::BLOCK_TOKENS);
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
        let sampled = plan.max_sequences.min(self.batch.rows());
        self.batch.set_sampled_rows((0..sampled).collect());
        self.forward()?;
        self.batch.clear();
        self.device.take_collective_time();
        Ok(())
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

    /// Runs one step: forget, admit, append blocks, compute, sample.
    pub fn step(&mut self, step: Step) -> Result<StepOutcome, RunError> {
        let mut outcome = StepOutcome { step_id: step.id, ..StepOutcome::default() };
        outcome.errors = self.prepare(step)?;
        if self.batch.rows() == 0 {
            return Ok(outcome);
        }
        let start = Instant::now();
        self.device.take_collective_time();
        let (batch, sequences) = (&mut self.batch, &mut self.sequences);
        if self.place.slice.last_stage {
            self.masks.begin(batch, sequences);
        }
        self.token_return.fill(&mut self.device, batch, sequences)?;
        self.forward()?;
        outcome.timings.forward = start.elapsed();
        outcome.timings.collective = self.device.take_collective_time();
        self.advance();
        let start = Instant::now();
        if self.place.slice.last_stage {
            self.sample(&mut outcome)?;
            self.score_prompts(&mut outcome)?;
        } else {
            self.token_return.expect(&mut self.device, &self.batch, &mut self.sequences)?;
        }
        outcome.timings.sample = start.elapsed();
        Ok(outcome)
    }

    /// Takes a step's changes into the state and lays out its batch. Deterministic over ranks.
    pub fn prepare(&mut self, step: Step) -> Result<Vec<SequenceError>, RunError> {
        let limits = self.ready.as_ref().ok_or(RunError::NotWarm)?.limits;
        Batch::check(&step, &limits)?;
        let mut step = step;
        self.sequences.drop_all(&step.drop);
        self.masks.drop_all(&step.drop);
        let mut errors = self.sequences.admit(std::mem::take(&mut step.new), &limits);
        errors.extend(self.sequences.append_blocks(&step.blocks, &limits));
        for error in self.batch.build(&step, &self.sequences, &limits) {
            // The first cause of a bad sequence is the one worth reading.
            if errors.iter().all(|known| known.sequence != error.sequence) {
                errors.push(error);
            }
        }
        Ok(errors)
    }

    /// The model over the batch as it is laid out; logits of its sampled rows on the last stage.
    fn forward(&mut self) -> Result<(), RunError> {
        let ready = self.ready.as_mut().ok_or(RunError::NotWarm)?;
        let Ready { rotary, pages, work, .. } = ready;
        let (layers, batch) = (&self.layers, &self.batch);
        self.device
            .run_step(batch, &mut |device| layers.forward(device, batch, rotary, pages, work))?;
        Ok(())
    }

    fn advance(&mut self) {
        for entry in self.batch.entries() {
            if let Some(sequence) = self.sequences.get_mut(entry.sequence) {
                sequence.advance(entry.positions.end, entry.sample);
            }
        }
    }

    fn sample(&mut self, outcome: &mut StepOutcome) -> Result<(), RunError> {
        let start = Instant::now();
        let masks = self.masks.finish();
        outcome.timings.grammar = start.elapsed();
        let ready = self.ready.as_mut().ok_or(RunError::NotWarm)?;
        let mut rows = Vec::with_capacity(self.batch.sampled_rows().len());
        for id in self.batch.sampled_sequences() {
            if let Some(sequence) = self.sequences.get(id) {
                rows.push(SampleRow {
                    sequence: id,
                    sampling: &sequence.sampling,
                    tokens: &sequence.tokens,
                    prompt_len: sequence.prompt_len,
                    constraint: masks.constraint(id, sequence.sampling.grammar.is_some()),
                });
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let vocab = &self.place.slice.vocab;
        let vocab = vocab.start as u32..vocab.end as u32;
        let samples = self.device.sample(&rows, &mut ready.work.logits, vocab)?;
        let mut sampled = Vec::with_capacity(rows.len());
        for (row, sample) in rows.iter().zip(samples) {
            let sequence = row.sequence;
            sampled.push((sequence, sample.as_ref().ok().map(|sample| sample.token)));
            match sample {
                Ok(sample) => outcome.tokens.push(StepToken {
                    sequence,
                    token: sample.token,
                    logprob: sample.logprob,
                    top: sample.top,
                }),
                Err(error) => {
                    let told = masks.error(sequence).unwrap_or_else(|| error.to_string());
                    outcome.errors.push(SequenceError::new(sequence, told));
                }
            }
        }
        self.token_return.publish(&mut self.device, &sampled, &mut self.sequences)?;
        Ok(())
    }

    /// Scores prompt tokens from the batch's residual stream, some rows at a time: the choice of
    /// tokens, for which others may wait, is done and its logits are not needed any more.
    fn score_prompts(&mut self, outcome: &mut StepOutcome) -> Result<(), RunError> {
        let ready = self.ready.as_mut().ok_or(RunError::NotWarm)?;
        let targets = Targets::of(&self.batch, &self.sequences);
        let vocab = &self.place.slice.vocab;
        let vocab = vocab.start as u32..vocab.end as u32;
        let mut outcomes = Vec::new();
        for (rows, scores) in targets.passes(ROWS_AT_ONCE) {
            self.layers.score_logits(&mut self.device, &rows, &mut ready.work);
            outcomes.extend(self.device.score(&scores, &ready.work.logits, vocab.clone())?);
        }
        let (prompts, errors) = targets.join(outcomes);
        outcome.prompts = prompts;
        // One answer for a sequence: its error stands for the token it may have got.
        let failed = |sequence| errors.iter().any(|error| error.sequence == sequence);
        outcome.tokens.retain(|token| !failed(token.sequence));
        let known: Vec<u64> = outcome.errors.iter().map(|error| error.sequence).collect();
        outcome.errors.extend(errors.into_iter().filter(|e| !known.contains(&e.sequence)));
        outcome.prompts.retain(|prompt| !known.contains(&prompt.sequence));
        Ok(())
    }

    /// Logits `[rows, vocab slice]` of every row of a step instead of its sampled ones, for
    /// comparison with a reference. Samples nothing. Empty on stages before the last.
    pub fn score(&mut self, step: Step) -> Result<Vec<f32>, RunError> {
        self.prepare(step)?;
        let rows = self.batch.rows();
        self.batch.set_sampled_rows((0..rows).collect());
        self.token_return.fill(&mut self.device, &mut self.batch, &mut self.sequences)?;
        self.forward()?;
        let ready = self.ready.as_ref().ok_or(RunError::NotWarm)?;
        if !self.place.slice.last_stage {
            return Ok(Vec::new());
        }
        Ok(self.device.read(&ready.work.logits, rows))
    }
}
