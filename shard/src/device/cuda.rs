//! The CUDA device: one GPU of one rank, steps recorded by batch size.

mod choice;
mod experts;
mod ranks;
mod recording;

use std::{collections::HashMap, ops::Range, sync::Arc, time::Duration};

use trireme_checkpoint::DType;
use trireme_collectives::{AbortHandle, CollectiveError, nccl::GpuGroups};
use trireme_kernels::{
    Activation, HeadLayout, KvPages, Team,
    cuda::{
        self, Context, CudaError, Element, Graph, Matrix, Pages, SampleBuffers, Scoring,
        StepInputs, Stream, Tensor, Vector,
    },
};

use self::experts::Expertise;
pub use self::ranks::GpuWorld;
use super::{AttentionRule, Device, Samples, Scores, host_groups::HostGroups};
use crate::{
    batch::{self, Batch},
    layers::mixture::{ExpertBuffers, Experts},
    sampler::{self, SampleRow, Sampling, ScoreRow},
    sequences::Limits,
};

const _: () = assert!(batch::CHOSEN == cuda::CHOSEN);

/// Where weights go.
pub struct CudaStore {
    pub context: Arc<Context>,
    pub element: Element,
}

/// Cosines and sines, `[positions, half_dim]`.
pub struct Rotary {
    cos: Vector,
    sin: Vector,
    half_dim: usize,
}

/// A GPU that has failed stays so: the engine catches this and gives the group up.
fn done<T>(result: Result<T, CudaError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// What steps need besides weights and the workspace, from warm-up on.
struct Ready {
    inputs: StepInputs,
    samples: SampleBuffers,
    max_sequences: usize,
    /// Decode steps by number of sequences.
    graphs: HashMap<usize, Graph>,
}

pub struct Cuda {
    stream: Stream,
    element: Element,
    memory_fraction: f64,
    gpus: usize,
    /// Rows that the kernels of the GPU do not choose for are chosen for by the host.
    team: Team,
    ready: Option<Ready>,
    /// While a step of some rows is recorded for more rows: both numbers.
    padded: Option<(usize, usize)>,
    hosts: HostGroups,
    /// Beside the host's of several ranks, where there is NCCL.
    groups: Option<GpuGroups>,
    expertise: Expertise,
}

impl Cuda {
    /// # Errors
    /// If the GPU or cuBLASLt cannot be used.
    pub fn new(store: &CudaStore, memory_fraction: f64, threads: usize) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(&store.context)?,
            element: store.element,
            memory_fraction,
            gpus: cuda::gpu_count()?,
            team: Team::new(threads),
            ready: None,
            padded: None,
            hosts: HostGroups::default(),
            groups: None,
            expertise: Expertise::default(),
        })
    }

    /// The rows that kernels work on for a step of `rows`.
    fn padded(&self, rows: usize) -> usize {
        self.padded.filter(|(given, _)| *given == rows).map_or(rows, |(_, padded)| padded)
    }

    fn ready(&self) -> &Ready {
        self.ready.as_ref().unwrap_or_else(|| panic!("a step before the warm-up"))
    }

    /// Stream and inputs apart, so that one can change while the other is read.
    fn parts(&mut self) -> (&mut Stream, &StepInputs) {
        let ready = self.ready.as_ref().unwrap_or_else(|| panic!("a step before the warm-up"));
        (&mut self.stream, &ready.inputs)
    }
}

impl Device for Cuda {
    type Store = CudaStore;
    type Matrix = Matrix;
    type Vector = Vector;
    type Buffer = Tensor;
    type Rotary = Rotary;
    type Pages = Pages;
    type World = GpuWorld;
    type Rows<'a> = ();

    const SPARSE_BUFFERS: bool = false;

    fn matrix(store: &CudaStore, outputs: usize, inputs: usize) -> Matrix {
        done(Matrix::new(&store.context, outputs, inputs, store.element))
    }
    fn set_row(matrix: &mut Matrix, output: usize, row: &[f32]) {
        done(matrix.set_row(output, row));
    }
    fn finish(matrix: &mut Matrix) {
        done(matrix.flush());
    }
    fn block_matrix(_: &CudaStore, _: usize, _: usize, _: DType) -> Option<Matrix> {
        None
    }
    fn set_blocks(_matrix: &mut Matrix, _output: usize, _blocks: &[u8]) {
        panic!("stored blocks on a GPU: no matrix is made for them");
    }
    fn stacked(_parts: Vec<Matrix>) -> Matrix {
        panic!("matrices of several kinds on a GPU: it has one");
    }
    fn matrix_bytes(matrix: &Matrix) -> usize {
        matrix.bytes()
    }
    fn vector(store: &CudaStore, values: Vec<f32>) -> Vector {
        done(Vector::new(&store.context, &values))
    }
    fn weight_size(store: &CudaStore) -> usize {
        store.element.bytes()
    }

    fn buffer(&self, rows: usize, width: usize) -> Tensor {
        done(Tensor::new(self.stream.context(), rows, width, Element::F32))
    }
    fn activations(&self, rows: usize, width: usize) -> Tensor {
        done(Tensor::new(self.stream.context(), rows, width, self.element))
    }
    fn available_bytes(&self) -> u64 {
        let (free, total) = done(self.stream.context().memory());
        let kept = (total as f64 * (1.0 - self.memory_fraction)) as u64;
        (free as u64).saturating_sub(kept)
    }
    fn default_kv_share(&self) -> f64 {
        1.0
    }
    fn sharers(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.gpus.max(1))
    }
    fn reserve(&mut self, limits: &Limits) {
        self.ready = None;
        self.stream.begin_measuring();
        let context = self.stream.context();
        let blocks = limits.max_model_len.div_ceil(KvPages::BLOCK_TOKENS);
        let rows = limits.max_batch_tokens.max(limits.max_sequences);
        self.ready = Some(Ready {
            inputs: done(StepInputs::new(context, rows, limits.max_sequences, blocks)),
            samples: done(SampleBuffers::new(context, limits.max_sequences)),
            max_sequences: limits.max_sequences,
            graphs: HashMap::new(),
        });
    }
    fn decode_warmups(&self, max_sequences: usize) -> Vec<usize> {
        recording::sizes(max_sequences)
    }
    fn prefill_warmups(&self, least: usize, most: usize) -> Vec<usize> {
        cuda::measured_rows(least, most)
    }
    fn warmed_up(&mut self) {
        self.stream.end_measuring();
    }
    fn read(&self, buffer: &Tensor, rows: usize) -> Vec<f32> {
        done(self.stream.read_rows(buffer, 0..rows))
    }
    fn write(&self, buffer: &mut Tensor, values: &[f32]) {
        done(self.stream.write(buffer, values));
    }
    fn rotary(&self, cos: Vec<f32>, sin: Vec<f32>, half_dim: usize) -> Rotary {
        let context = self.stream.context();
        let (cos, sin) = (done(Vector::new(context, &cos)), done(Vector::new(context, &sin)));
        Rotary { cos, sin, half_dim }
    }
    fn pages(&self, num_blocks: usize, kv_heads: usize, head_dim: usize) -> Pages {
        let context = self.stream.context();
        done(Pages::new(context, num_blocks, kv_heads, head_dim, self.element))
    }
    fn page_bytes_per_block(&self, kv_heads: usize, head_dim: usize) -> usize {
        Pages::bytes_per_block(kv_heads, head_dim, self.element)
    }
    /// The step's inputs are on the GPU already: see [`Device::run_step`].
    fn rows(&mut self, _batch: &Batch) {}

    fn run_step(
        &mut self,
        batch: &Batch,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let size = self.recorded_size(batch);
        // With NCCL a step is begun when the one before is known to be worth anything.
        if self.groups.is_some() {
            done(self.stream.synchronize());
            self.check_groups()?;
        }
        let ready = self.ready.as_mut().unwrap_or_else(|| panic!("a step before the warm-up"));
        done(ready.inputs.fill(batch.sequences(), batch.tokens(), batch.sampled_rows()));
        if let Some(size) = size {
            ready.inputs.pad(size);
        }
        done(ready.inputs.upload(&self.stream));
        match size {
            None => work(self),
            Some(size) => match ready.graphs.get(&size) {
                Some(graph) => {
                    done(self.stream.replay(graph));
                    self.watch_queued()
                }
                None => self.record(batch.rows(), size, work),
            },
        }
    }

    fn embed(&mut self, table: &Matrix, tokens: &[u32], vocab: &Range<u32>, out: &mut Tensor) {
        let rows = self.padded(tokens.len());
        let ready = self.ready.as_ref().unwrap_or_else(|| panic!("a step before the warm-up"));
        let from = (&ready.inputs, &ready.samples);
        done(self.stream.embed(table, from, rows, vocab, out));
    }
    fn linear(
        &mut self,
        x: &Tensor,
        rows: usize,
        (w, bias): (&Matrix, Option<&Vector>),
        out: &mut Tensor,
    ) {
        let rows = self.padded(rows);
        done(self.stream.linear(x, rows, w, bias, out));
    }
    fn gated_linear(
        &mut self,
        activation: Activation,
        x: &Tensor,
        rows: usize,
        w: (&Matrix, Option<&Vector>),
        (gate_up, _): (&mut Tensor, usize),
        out: &mut Tensor,
    ) {
        let rows = self.padded(rows);
        done(self.stream.gated_linear(activation, x, rows, w, gate_up, out));
    }
    fn rms_norm(&mut self, x: &Tensor, rows: usize, norm: (&Vector, f32), out: &mut Tensor) {
        let rows = self.padded(rows);
        done(self.stream.add_rms_norm(x, None, rows, norm, out));
    }
    fn add_rms_norm(
        &mut self,
        residual: &mut Tensor,
        delta: &Tensor,
        rows: usize,
        norm: (&Vector, f32),
        out: &mut Tensor,
    ) {
        let rows = self.padded(rows);
        done(self.stream.add_rms_norm(residual, Some(delta), rows, norm, out));
    }
    fn add(&mut self, x: &mut Tensor, delta: &Tensor, rows: usize) {
        let rows = self.padded(rows);
        done(self.stream.add(x, delta, rows));
    }
    fn gather(&mut self, x: &Tensor, indices: &[usize], out: &mut Tensor) {
        let count = self.padded(indices.len());
        let ready = self.ready.as_mut().unwrap_or_else(|| panic!("a step before the warm-up"));
        // Other rows are asked for when prompts are scored, after the step.
        if !ready.inputs.samples(indices) {
            done(ready.inputs.sample(indices, &self.stream));
        }
        done(self.stream.gather(x, &ready.inputs, count, out));
    }
    fn rms_norm_heads(
        &mut self,
        qkv: &mut Tensor,
        layout: &HeadLayout,
        rows: usize,
        norms: (&Vector, &Vector, f32),
    ) {
        let rows = self.padded(rows);
        done(self.stream.rms_norm_heads(qkv, layout, rows, norms));
    }
    fn scale(&mut self, x: &mut Tensor, rows: usize, factor: f32) {
        let rows = self.padded(rows);
        done(self.stream.scale(x, rows, factor));
    }
    fn gate_mul(
        &mut self,
        activation: Activation,
        gate_up: &Tensor,
        rows: usize,
        _width: usize,
        out: &mut Tensor,
    ) {
        let rows = self.padded(rows);
        done(self.stream.gate_mul(activation, gate_up, rows, out));
    }
    fn mixture(
        &mut self,
        x: &Tensor,
        rows: usize,
        experts: &Experts<Self>,
        buffers: &mut ExpertBuffers<Self>,
        out: &mut Tensor,
    ) -> Result<(), CollectiveError> {
        self.mix(x, rows, experts, buffers, out)
    }
    fn rotate_and_append(
        &mut self,
        qkv: &mut Tensor,
        layout: &HeadLayout,
        rotary: &Rotary,
        (): &(),
        pages: &mut Pages,
    ) {
        let (stream, inputs) = self.parts();
        let (table, rows) = ((&rotary.cos, &rotary.sin, rotary.half_dim), inputs.row_count());
        done(stream.rotate_and_append(qkv, layout, table, inputs, rows, pages));
    }
    fn paged_attention(
        &mut self,
        qkv: &Tensor,
        layout: &HeadLayout,
        rule: AttentionRule,
        (): &(),
        pages: &Pages,
        out: &mut Tensor,
    ) {
        let (stream, inputs) = self.parts();
        let window = rule.window.map_or(0, |window| i32::try_from(window).unwrap_or(i32::MAX));
        let scoring = Scoring { scale: rule.scale, soft_cap: 0.0, window };
        let rows = inputs.row_count();
        done(stream.paged_attention(qkv, layout, scoring, inputs, rows, pages, out));
    }

    fn abort_handle(world: &GpuWorld) -> AbortHandle {
        world.hosts.abort.clone()
    }
    fn join(&mut self, world: GpuWorld) -> Result<(), CollectiveError> {
        self.enter(world)
    }
    fn leave(&mut self) {
        self.depart();
    }
    fn set_deadline(&mut self, deadline: Duration) -> Result<(), CollectiveError> {
        self.limit_waits(deadline)
    }
    fn all_reduce(&mut self, x: &mut Tensor, rows: usize) -> Result<(), CollectiveError> {
        self.sum(x, rows)
    }
    fn send(&mut self, to: usize, x: &Tensor, rows: usize) -> Result<(), CollectiveError> {
        self.pass_on(to, x, rows)
    }
    fn recv(&mut self, from: usize, x: &mut Tensor, rows: usize) -> Result<(), CollectiveError> {
        self.take_over(from, x, rows)
    }
    fn send_tokens(&mut self, to: usize, tokens: &[u32]) -> Result<(), CollectiveError> {
        let bytes = bytemuck::cast_slice(tokens);
        self.hosts.run(|world| world.global.send_bytes(to, bytes))
    }
    fn recv_tokens(&mut self, from: usize, tokens: &mut [u32]) -> Result<(), CollectiveError> {
        let bytes = bytemuck::cast_slice_mut(tokens);
        self.hosts.run(|world| world.global.recv_bytes(from, bytes))
    }
    fn sample(
        &mut self,
        rows: &[SampleRow<'_>],
        logits: &mut Tensor,
        vocab: Range<u32>,
    ) -> Result<Samples, CollectiveError> {
        let samples = if self.hosts.tensor_ranks() == 1 {
            self.sample_alone(rows, logits, &vocab)
        } else {
            self.hosts.run(|world| {
                let mut values = done(self.stream.read_rows(logits, 0..rows.len()));
                sampler::sample(rows, &mut values, vocab, &mut *world.tensor, &self.team)
            })
        };
        self.check_groups()?;
        samples
    }
    fn queue_choices(
        &mut self,
        rows: &[(&Sampling, usize)],
        logits: &Tensor,
        vocab: &Range<u32>,
    ) -> bool {
        let alone = self.hosts.is_alone();
        if alone {
            self.queue(rows.iter().copied(), logits, vocab);
        }
        alone
    }
    fn choices_known(&self) -> bool {
        self.ready().samples.is_known()
    }
    fn take_choices(&mut self) -> Samples {
        let ready = self.ready.as_mut().unwrap_or_else(|| panic!("a step before the warm-up"));
        done(ready.samples.take()).iter().map(sampler::device_sample).collect()
    }
    fn score(
        &mut self,
        rows: &[ScoreRow],
        logits: &Tensor,
        vocab: Range<u32>,
    ) -> Result<Scores, CollectiveError> {
        self.hosts
            .run(|world| {
                let values = done(self.stream.read_rows(logits, 0..rows.len()));
                sampler::score(rows, &values, vocab, &mut *world.tensor, &self.team)
            })
            .and_then(|scores| self.check_groups().map(|()| scores))
    }
    fn take_collective_time(&mut self) -> Duration {
        self.hosts.take_time()
    }
}
