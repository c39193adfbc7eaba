//! One rank at work: the device with its model, caches and sequences, one step at a time.

mod warm_up;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use trireme_checkpoint::ModelConfig;
use trireme_collectives::CollectiveError;

use crate::{
    batch::{Batch, BatchError},
    device::Device,
    grammar::{Grammars, Masks},
    in_flight::{ChosenRow, InFlight},
    layers::{rotary::RotaryTables, workspace::Workspace},
    models::Model,
    prompt_scores::{PromptScores, ROWS_AT_ONCE, Targets},
    sampler::{SampleError, SampleRow, Sampled, Sampling},
    sequence::Sequence,
    sequences::{Limits, SequenceError, Sequences},
    step::{NewSequence, Step},
    token_return::TokenReturn,
    weights::Place,
};

pub use self::warm_up::{MemoryPlan, WarmupPlan};

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

impl StepOutcome {
    /// Adds what came of a sequence.
    fn tell(&mut self, sequence: u64, sample: Result<Sampled, SequenceError>) {
        match sample {
            Ok(Sampled { token, logprob, top }) => {
                self.tokens.push(StepToken { sequence, token, logprob, top });
            }
            Err(error) => self.errors.push(error),
        }
    }
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
    /// The oldest first.
    in_flight: VecDeque<InFlight>,
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
            in_flight: VecDeque::new(),
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
        self.in_flight.clear();
        self.token_return = TokenReturn::new(&self.place);
    }

    /// Runs one step to its end; none is in flight.
    pub fn step(&mut self, step: Step) -> Result<StepOutcome, RunError> {
        Ok(match self.begin(step)? {
            Some(outcome) => outcome,
            None => self.finish(),
        })
    }

    /// Whether a step may begin while another is in flight: it needs none of the tokens that are not
    /// known yet, other than to compute with.
    pub fn can_overlap(&self, step: &Step) -> bool {
        let is_new_plain = |new: &NewSequence| {
            new.sampling.as_ref().is_ok_and(Sampling::is_plain) && matches!(new.scoring, Ok(None))
        };
        let named = step.decode.iter().copied().chain(step.chunks.iter().map(|c| c.sequence));
        step.new.iter().all(is_new_plain)
            && named.filter_map(|id| self.sequences.get(id)).all(Sequence::is_plain)
    }

    /// Begins one step: forget, admit, append blocks, compute, sample. Where the device lets the choice
    /// of its tokens wait, the step is in flight afterwards, and [`Runner::finish`] gives its outcome.
    pub fn begin(&mut self, step: Step) -> Result<Option<StepOutcome>, RunError> {
        let mut outcome = StepOutcome { step_id: step.id, ..StepOutcome::default() };
        outcome.errors = self.prepare(step)?;
        if self.batch.rows() == 0 {
            return Ok(Some(outcome));
        }
        let start = Instant::now();
        self.device.take_collective_time();
        let (batch, sequences) = (&mut self.batch, &mut self.sequences);
        let is_plain = batch.is_plain(sequences);
        if self.place.slice.last_stage && !is_plain {
            self.masks.begin(batch, sequences);
        }
        let in_flight = self.in_flight.back();
        self.token_return.fill(&mut self.device, batch, sequences, in_flight)?;
        self.forward()?;
        outcome.timings.forward = start.elapsed();
        outcome.timings.collective = self.device.take_collective_time();
        self.advance();
        if is_plain && self.queue_choices(&mut outcome)? {
            return Ok(None);
        }
        let start = Instant::now();
        if self.place.slice.last_stage {
            self.sample(&mut outcome)?;
            self.score_prompts(&mut outcome)?;
        } else {
            self.token_return.expect(&mut self.device, &self.batch, &mut self.sequences)?;
        }
        outcome.timings.sample = start.elapsed();
        Ok(Some(outcome))
    }

    /// Puts the step in flight, if the device lets the choice of its tokens wait.
    fn queue_choices(&mut self, outcome: &mut StepOutcome) -> Result<bool, RunError> {
        let ready = self.ready.as_ref().ok_or(RunError::NotWarm)?;
        let queued = Instant::now();
        let named = self.batch.sampled_sequences();
        let sampled: Vec<(u64, &Sequence)> =
            named.filter_map(|id| Some((id, self.sequences.get(id)?))).collect();
        let choices: Vec<(&Sampling, usize)> =
            sampled.iter().map(|(_, sequence)| (&sequence.sampling, sequence.len - 1)).collect();
        let vocab = &self.place.slice.vocab;
        let vocab = vocab.start as u32..vocab.end as u32;
        if !self.device.queue_choices(&choices, &ready.work.logits, &vocab) {
            return Ok(false);
        }
        let rows = sampled.iter().map(|(id, sequence)| ChosenRow::of(*id, sequence)).collect();
        self.in_flight.push_back(InFlight { outcome: std::mem::take(outcome), rows, queued });
        Ok(true)
    }

    /// Whether the oldest step in flight can be finished without waiting.
    pub fn is_over(&self) -> bool {
        self.device.choices_known()
    }

    /// Waits for the oldest step in flight.
    pub fn finish(&mut self) -> StepOutcome {
        let Some(step) = self.in_flight.pop_front() else { return StepOutcome::default() };
        let InFlight { mut outcome, rows, queued } = step;
        for (row, mut sample) in rows.iter().zip(self.device.take_choices()) {
            let token = sample.as_ref().map_or(0, |sample| sample.token);
            if let Some(sequence) = self.sequences.of_generation(row.sequence, row.generation) {
                sequence.tokens.push(token);
            }
            if let Ok(sample) = &mut sample
                && !row.logprob
            {
                sample.logprob = 0.0;
            }
            let told = |error: SampleError| SequenceError::new(row.sequence, error.to_string());
            outcome.tell(row.sequence, sample.map_err(told));
        }
        outcome.timings.sample = queued.elapsed();
        outcome
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
            let told = |error| match error {
                SampleError::Grammar => {
                    let why = masks.error(sequence).unwrap_or_else(|| error.to_string());
                    SequenceError::of_grammar(sequence, why)
                }
                _ => SequenceError::new(sequence, error.to_string()),
            };
            outcome.tell(sequence, sample.map_err(told));
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
        self.token_return.fill(&mut self.device, &mut self.batch, &mut self.sequences, None)?;
        self.forward()?;
        let ready = self.ready.as_ref().ok_or(RunError::NotWarm)?;
        if !self.place.slice.last_stage {
            return Ok(Vec::new());
        }
        Ok(self.device.read(&ready.work.logits, rows))
    }
}
