//! Steps per second of one rank without RPC: prefill of 512 tokens, then decode.
//!
//! `cargo run --release -p trireme-shard --example step_speed -- MODEL [THREADS] [f32|bf16]`

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, bail};
use trireme_checkpoint::Split;
use trireme_collectives::local;
use trireme_kernels::{KvPages, Storage};
use trireme_shard::{
    config::{Backend, Config, Identity, LoadFormat},
    device::{
        Device,
        cpu::{Cpu, WeightStore},
    },
    runner::{Runner, WarmupPlan},
    sampler::Sampling,
    server,
    status::Status,
    step::{BlockUpdate, Chunk, NewSequence, Step},
};

const PREFILL_TOKENS: usize = 512;
const DECODE_STEPS: usize = 200;
const MAX_MODEL_LEN: usize = 1024;
const SEQUENCES: [usize; 4] = [1, 4, 16, 64];

#[allow(clippy::print_stdout)] // An example's output is its purpose.
fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let model = PathBuf::from(args.next().context("MODEL: a folder or file")?);
    let threads = args.next().map_or(Ok(2), |n| n.parse()).context("THREADS: a number")?;
    let store = |numbers, keep_blocks| WeightStore { numbers, keep_blocks };
    let weights = match args.next().as_deref() {
        None | Some("bf16") => store(Storage::Bf16, false),
        Some("f32") => store(Storage::F32, false),
        Some("quantized") => store(Storage::Bf16, true),
        Some(other) => bail!("{other}: neither f32, bf16 nor quantized"),
    };
    let start = Instant::now();
    let mut runner = server::load(&config(model, threads, weights), &Status::default())?;
    println!("load          {:8.2} s", start.elapsed().as_secs_f64());
    println!("weights       {:8.1} MiB", runner.weight_bytes() as f64 / f64::from(1 << 20));
    let world = local::worlds(1, 1).pop().context("a world of one rank")?;
    runner.device.join(world).expect("join");
    let start = Instant::now();
    runner.warmup(&WarmupPlan {
        max_batch_tokens: PREFILL_TOKENS,
        max_sequences: 64,
        max_model_len: MAX_MODEL_LEN,
        num_blocks: 64 * MAX_MODEL_LEN / KvPages::BLOCK_TOKENS,
    })?;
    println!("warm-up       {:8.2} s", start.elapsed().as_secs_f64());
    let prefill_ms = prefill(&mut runner)?;
    println!("prefill {PREFILL_TOKENS}   {:8.0} tok/s", 512e3 / prefill_ms);
    for sequences in SEQUENCES {
        let (forward_ms, sample_ms) = decode(&mut runner, sequences)?;
        let rate = sequences as f64 * 1e3 / (forward_ms + sample_ms);
        println!(
            "decode {sequences:4}   {rate:8.1} tok/s   forward {forward_ms:.3} ms   sample {sample_ms:.3} ms"
        );
    }
    Ok(())
}

fn config(model: PathBuf, threads: usize, weights: WeightStore) -> Config {
    let identity = Identity {
        rank: 0,
        split: Split { tp: 1, pp: 1 },
        device: "cpu".into(),
        dtype: "",
        kv_dtype: "",
    };
    Config {
        identity,
        model,
        load_format: LoadFormat::Auto,
        seed: 0,
        weights,
        kv_storage: weights.numbers,
        threads,
        socket: PathBuf::new(),
        kv_cache_memory: None,
        backend: Backend::Cpu,
    }
}

/// A new sequence of `tokens` tokens with `blocks` blocks of its own, prefilled at once.
fn prefill_step(id: u64, tokens: usize, blocks: usize) -> Step {
    let first = (id as usize % 64 * MAX_MODEL_LEN / KvPages::BLOCK_TOKENS) as u32;
    Step {
        new: vec![NewSequence {
            id,
            tokens: (0..tokens as u32).map(|token| token * 31 % 4000).collect(),
            prompt_len: tokens,
            sampling: Ok(Sampling::default()),
            scoring: Ok(None),
        }],
        blocks: vec![BlockUpdate {
            sequence: id,
            append: (first..first + blocks as u32).collect(),
        }],
        chunks: vec![Chunk { sequence: id, start: 0, len: tokens, sample: true }],
        ..Step::default()
    }
}

/// Milliseconds of the fastest of a few prefills.
fn prefill(runner: &mut Runner<Cpu>) -> anyhow::Result<f64> {
    let mut best_ms = f64::INFINITY;
    for _ in 0..5 {
        let step = prefill_step(0, PREFILL_TOKENS, PREFILL_TOKENS / KvPages::BLOCK_TOKENS);
        let timings = runner.step(step)?.timings;
        best_ms = best_ms.min((timings.forward + timings.sample).as_secs_f64() * 1e3);
        runner.step(Step { drop: vec![0], ..Step::default() })?;
    }
    Ok(best_ms)
}

/// Mean milliseconds of a decode step (forward, sample) from a context of 128 tokens on.
fn decode(runner: &mut Runner<Cpu>, sequences: usize) -> anyhow::Result<(f64, f64)> {
    let ids: Vec<u64> = (0..sequences as u64).collect();
    for &id in &ids {
        runner.step(prefill_step(id, 128, MAX_MODEL_LEN / KvPages::BLOCK_TOKENS))?;
    }
    let (mut forward_ms, mut sample_ms) = (0.0, 0.0);
    let steps = (DECODE_STEPS / sequences).max(20);
    for _ in 0..steps {
        let timings = runner.step(Step { decode: ids.clone(), ..Step::default() })?.timings;
        forward_ms += timings.forward.as_secs_f64() * 1e3 / steps as f64;
        sample_ms += timings.sample.as_secs_f64() * 1e3 / steps as f64;
    }
    runner.step(Step { drop: ids, ..Step::default() })?;
    Ok((forward_ms, sample_ms))
}
