//! Times of the CUDA kernels at shapes of Llama-3.1-8B, and the bytes and operations that they need at
//! least: `cargo bench -p trireme-kernels --features cuda --bench cuda`. `scripts/gpu-floors` tells what
//! the GPU does at best. Each is the median of replays of a recording; inputs of many rows are larger
//! than the GPU's caches.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the times are the result")]

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use trireme_kernels::{
    Activation, HeadLayout, SequenceRows,
    cuda::{
        Choice, Context, CudaError, Element, Pages, SampleBuffers, Scoring, StepInputs, Stream,
        Tensor, Vector,
    },
};

const HIDDEN: usize = 4096;
const INNER: usize = 14_336;
const VOCABULARY: usize = 128_256;
const ROWS: usize = 8000;
/// Launches in a recording, and replays of it.
const LAUNCHES: usize = 10;
const REPLAYS: usize = 5;

struct Bench {
    stream: Stream,
    random: u64,
}

impl Bench {
    fn tensor(&mut self, rows: usize, width: usize, element: Element) -> Result<Tensor, CudaError> {
        let mut tensor = Tensor::new(self.stream.context(), rows, width, element)?;
        let mut next = || {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..rows * width).map(|_| next()).collect();
        self.stream.write(&mut tensor, &values)?;
        Ok(tensor)
    }

    /// Median seconds of `work`.
    fn time(
        &mut self,
        work: &mut dyn FnMut(&mut Stream) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        work(&mut self.stream)?;
        self.stream.begin_recording()?;
        (0..LAUNCHES).try_for_each(|_| work(&mut self.stream))?;
        let recording = self.stream.end_recording()?;
        let mut times = Vec::new();
        for _ in 0..=REPLAYS {
            self.stream.synchronize()?;
            let start = Instant::now();
            self.stream.replay(&recording)?;
            self.stream.synchronize()?;
            times.push(start.elapsed());
        }
        times.remove(0);
        times.sort();
        Ok(times[REPLAYS / 2].as_secs_f64() / LAUNCHES as f64)
    }
}

fn moved(what: &str, seconds: f64, bytes: usize) {
    println!("{what}: {:.1} us, {:.2} TB/s", seconds * 1e6, bytes as f64 / seconds / 1e12);
}

fn element_wise(bench: &mut Bench) -> Result<(), CudaError> {
    let residual = bench.tensor(ROWS, HIDDEN, Element::F32)?;
    let delta = bench.tensor(ROWS, HIDDEN, Element::Bf16)?;
    let mut normed = bench.tensor(ROWS, HIDDEN, Element::Bf16)?;
    let weight = Vector::new(bench.stream.context(), &[1.0; HIDDEN])?;
    let gate_up = bench.tensor(ROWS, 2 * INNER, Element::Bf16)?;
    let mut inner = bench.tensor(ROWS, INNER, Element::Bf16)?;
    for rows in [1, 256, ROWS] {
        let norm = (&weight, 1e-5);
        let time = bench.time(&mut |stream| {
            stream.add_rms_norm(&residual, Some(&delta), rows, norm, &mut normed)
        })?;
        moved(&format!("add and norm, {rows} rows"), time, rows * HIDDEN * 12);
        let time = bench
            .time(&mut |stream| stream.gate_mul(Activation::Silu, &gate_up, rows, &mut inner))?;
        moved(&format!("gate and multiply, {rows} rows"), time, rows * INNER * 6);
    }
    Ok(())
}

fn attention(bench: &mut Bench) -> Result<(), CudaError> {
    let (heads, kv_heads, head_dim) = (32, 8, 128);
    let kv_of_head = (0..heads).map(|head| head * kv_heads / heads).collect();
    let layout = HeadLayout { heads, kv_heads, head_dim, kv_of_head };
    let row_len = layout.row_len();
    let context = bench.stream.context().clone();
    let count = ROWS.div_ceil(16);
    // Scattered, as a pool gets after a while.
    let blocks: Vec<u32> = (0..count).map(|block| (block * 7 % count) as u32).collect();
    let mut pages = Pages::new(&context, count, kv_heads, head_dim, Element::Bf16)?;
    let mut qkv = bench.tensor(ROWS, row_len, Element::Bf16)?;
    let mut out = bench.tensor(ROWS, heads * head_dim, Element::Bf16)?;
    let mut inputs = StepInputs::new(&context, ROWS, 1, count)?;
    let angles: Vec<f32> = (0..ROWS * head_dim / 2).map(|i| i as f32 * 0.01).collect();
    let cos: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
    let (cos, sin) = (Vector::new(&context, &cos)?, Vector::new(&context, &sin)?);
    let scoring = Scoring { scale: (head_dim as f32).sqrt().recip(), soft_cap: 0.0, window: 0 };
    for (rows, context_len) in
        [(ROWS, ROWS), (1, 1), (256, 256), (512, 512), (2048, 2048), (1024, ROWS)]
    {
        let sequence = SequenceRows { first_row: 0, rows, context_len, blocks: &blocks };
        inputs.fill([sequence].into_iter(), &[], &[])?;
        inputs.upload(&bench.stream)?;
        let table = (&cos, &sin, head_dim / 2);
        let time = bench.time(&mut |stream| {
            stream.rotate_and_append(&mut qkv, &layout, table, &inputs, rows, &mut pages)
        })?;
        moved(&format!("rotate and append, {rows} rows"), time, rows * row_len * 4);
        let time = bench.time(&mut |stream| {
            stream.paged_attention(&qkv, &layout, scoring, &inputs, rows, &pages, &mut out)
        })?;
        let seen = rows * (context_len - rows) + rows * (rows + 1) / 2;
        println!(
            "attention, {rows} rows of {context_len}: {:.1} us, {:.0} TFLOP/s",
            time * 1e6,
            (4 * seen * heads * head_dim) as f64 / time / 1e12
        );
    }
    Ok(())
}

/// With the copies there and back, and the wait.
fn choices(bench: &mut Bench) -> Result<(), CudaError> {
    let logits = bench.tensor(256, VOCABULARY, Element::F32)?;
    let mut buffers = SampleBuffers::new(bench.stream.context(), 256)?;
    for (what, choice) in cases() {
        for rows in [1, 32, 256] {
            let rows = vec![choice; rows];
            let mut times: Vec<Duration> = Vec::new();
            for _ in 0..=2 * REPLAYS {
                let start = Instant::now();
                buffers.queue(&bench.stream, &logits, 0, &rows)?;
                buffers.take()?;
                times.push(start.elapsed());
            }
            times.sort();
            println!(
                "choice, {what}, {} rows: {:.1} us",
                rows.len(),
                times[REPLAYS].as_secs_f64() * 1e6
            );
        }
    }
    Ok(())
}

fn cases() -> Vec<(&'static str, Choice)> {
    let drawn =
        Choice { inverse_temperature: 1.0, farthest: f32::INFINITY, race: 7, ..Choice::default() };
    let top_p = Choice { top_p: 0.95, ..drawn };
    vec![
        ("greedy", Choice::default()),
        ("drawn", drawn),
        ("top-k 50", Choice { top_k: 50, ..drawn }),
        ("top-p 0.95", top_p),
        ("top-k 50 and top-p 0.95", Choice { top_k: 50, ..top_p }),
    ]
}

fn run() -> Result<(), CudaError> {
    let context = Context::open(0)?;
    println!("{}", context.name());
    let mut bench = Bench { stream: Stream::new(&context)?, random: 1 };
    element_wise(&mut bench)?;
    attention(&mut bench)?;
    choices(&mut bench)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
