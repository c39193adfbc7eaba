//! Models on a GPU against numbers from transformers (f32). Needs a GPU and a build with the `cuda`
//! feature; `scripts/test-gpu` runs it.

#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "how far from its bound a figure is")]

mod reference {
    #[expect(dead_code, reason = "reference.rs reads the rest")]
    pub mod expected;
    pub mod forced;
}

use std::path::{Path, PathBuf};

use reference::{
    expected::{Expected, Prompt},
    forced::{self, Bound, Errors, Forced},
};
use trireme_checkpoint::Split;
use trireme_collectives::{local, nccl::Seat};
use trireme_kernels::{KvPages, Storage};
use trireme_shard::{
    config::{Backend, Config, Identity, LoadFormat},
    device::{
        Device,
        cpu::WeightStore,
        cuda::{Cuda, GpuWorld},
    },
    runner::{Runner, StepOutcome, WarmupPlan},
    sampler::Sampling,
    server,
    status::Status,
    step::{BlockUpdate, Chunk, NewSequence, Step},
};

/// f32 on the GPU, as far as the order of sums goes.
const F32: f64 = 2e-3;
const NUM_BLOCKS: usize = 160;

fn fixture(path: &str) -> PathBuf {
    let folder = std::env::var_os("TRIREME_FIXTURES").map(PathBuf::from);
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures");
    folder.unwrap_or_else(beside).join(path)
}

fn runner(path: &Path, storage: Storage) -> Runner<Cuda> {
    let split = Split { tp: 1, pp: 1 };
    let backend = Backend::Cuda { memory_fraction: 0.9 };
    let config = Config {
        identity: Identity { rank: 0, split, device: "cuda".into(), dtype: "", kv_dtype: "" },
        model: path.to_owned(),
        load_format: LoadFormat::Auto,
        seed: 0,
        weights: WeightStore { numbers: storage, keep_blocks: false },
        kv_storage: storage,
        threads: 2,
        socket: PathBuf::new(),
        kv_cache_memory: None,
        backend,
    };
    let mut runner = server::load_cuda(&config, &Status::default(), 0.9).expect("load");
    let hosts = local::worlds(1, 1).pop().expect("a world");
    let seat = Seat { tp: 1, pp: 1, rank: 0 };
    runner.device.join(GpuWorld { hosts, seat, ids: Vec::new() }).expect("join");
    let plan = WarmupPlan {
        max_batch_tokens: 2048,
        max_sequences: 20,
        max_model_len: 256,
        num_blocks: NUM_BLOCKS,
    };
    runner.warmup(&plan).expect("warm up");
    runner
}

fn sequence(id: u64, tokens: &[u32]) -> NewSequence {
    let sampling = Ok(Sampling { logprobs: true, ..Sampling::default() });
    NewSequence {
        id,
        tokens: tokens.to_vec(),
        prompt_len: tokens.len(),
        sampling,
        scoring: Ok(None),
    }
}

/// Blocks of one sequence.
struct Blocks(Vec<u32>);

impl Blocks {
    fn of(&self, sequence: u64) -> BlockUpdate {
        BlockUpdate { sequence, append: self.0.clone() }
    }
}

/// Blocks for sequences of so many tokens, scattered over the pool.
fn blocks(lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = Blocks> {
    let mut free = (0..NUM_BLOCKS as u32).rev();
    lengths.map(move |tokens| {
        Blocks(free.by_ref().take(tokens.div_ceil(KvPages::BLOCK_TOKENS)).collect())
    })
}

/// Admits `prompts` with blocks for `new_tokens` more.
fn admit(prompts: &[Vec<u32>], new_tokens: usize) -> Step {
    let mut step = Step::default();
    let lengths = prompts.iter().map(|tokens| tokens.len() + new_tokens);
    for ((id, tokens), blocks) in (0u64..).zip(prompts).zip(blocks(lengths)) {
        step.blocks.push(blocks.of(id));
        step.new.push(sequence(id, tokens));
    }
    step
}

fn outcome(runner: &mut Runner<Cuda>, step: Step) -> StepOutcome {
    let outcome = runner.step(step).expect("step");
    assert_eq!(outcome.errors, []);
    outcome
}

fn run(runner: &mut Runner<Cuda>, step: Step, outputs: &mut [Vec<(u32, f32)>]) {
    tell(runner.step(step).expect("step"), outputs);
}

fn tell(outcome: StepOutcome, outputs: &mut [Vec<(u32, f32)>]) {
    assert_eq!(outcome.errors, []);
    for token in outcome.tokens {
        outputs[token.sequence as usize].push((token.token, token.logprob));
    }
}

fn chunks(prompts: &[Vec<u32>], start: usize, chunk: usize) -> Vec<Chunk> {
    let of = |(id, tokens): (usize, &Vec<u32>)| {
        let len = tokens.len().checked_sub(start).filter(|len| *len > 0)?;
        let sample = len <= chunk;
        Some(Chunk { sequence: id as u64, start, len: len.min(chunk), sample })
    };
    prompts.iter().enumerate().filter_map(of).collect()
}

/// All prompts prefilled in chunks, then decoded together: tokens and logprobs of each.
fn generate(
    runner: &mut Runner<Cuda>,
    prompts: &[Vec<u32>],
    new_tokens: usize,
    chunk: usize,
) -> Vec<Vec<(u32, f32)>> {
    let mut outputs = vec![Vec::new(); prompts.len()];
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut first = admit(prompts, new_tokens);
    for start in (0..longest).step_by(chunk) {
        let step = Step { chunks: chunks(prompts, start, chunk), ..std::mem::take(&mut first) };
        run(runner, step, &mut outputs);
    }
    let ids: Vec<u64> = (0..prompts.len() as u64).collect();
    // Each step is begun before the tokens of the one before are known.
    let mut in_flight = 0;
    for _ in 1..new_tokens {
        let decode = Step { decode: ids.clone(), ..Step::default() };
        match runner.begin(decode).expect("step") {
            Some(outcome) => tell(outcome, &mut outputs),
            None => in_flight += 1,
        }
        if in_flight > 1 {
            tell(runner.finish(), &mut outputs);
            in_flight -= 1;
        }
    }
    if in_flight > 0 {
        tell(runner.finish(), &mut outputs);
    }
    run(runner, Step { drop: ids, ..Step::default() }, &mut outputs);
    outputs
}

fn ids(prompts: &[Prompt]) -> Vec<Vec<u32>> {
    prompts.iter().map(|prompt| prompt.ids.clone()).collect()
}

/// f32: greedy tokens are the reference's, and so are their logprobs.
fn check_f32(path: &Path, expected: &Expected) {
    let mut runner = runner(path, Storage::F32);
    let new_tokens = expected.prompts.iter().map(|p| p.greedy_ids.len()).max().unwrap_or(0);
    let (mut worst, mut all) = (0.0f64, 0);
    for chunk in [7, 1000] {
        let outputs = generate(&mut runner, &ids(&expected.prompts), new_tokens, chunk);
        for (prompt, output) in expected.prompts.iter().zip(&outputs) {
            let what = format!("{} {} in chunks of {chunk}", path.display(), prompt.name);
            let tokens: Vec<u32> = output.iter().map(|(token, _)| *token).collect();
            assert_eq!(tokens, prompt.greedy_ids, "{what}");
            for (step, (_, logprob)) in output.iter().enumerate() {
                let off = (f64::from(*logprob) - prompt.greedy_logprobs[step]).abs();
                assert!(off <= F32, "{what}: logprob at {step} is off by {off}");
                worst = worst.max(off);
            }
            all += tokens.len();
        }
    }
    println!("{} f32: {all} tokens, logprobs within {worst:.6}", path.display());
}

/// Prefilled in chunks and decoded, alone and in mixed steps, the reference's tokens have its logprobs.
fn check_forced(path: &Path, storage: Storage, prompts: &[Forced], (own, greedy): (Bound, Bound)) {
    let mut runner = runner(path, storage);
    let hold = |what: &str, found: Errors, bound: Bound| {
        let (max, mean) = (found.max, found.mean());
        let what = format!("{} {storage:?} {what}", path.display());
        println!(
            "{what}: off by {max:.6} at most of {:.6}, {mean:.6} on average of {:.6}",
            bound.max, bound.mean
        );
        // NaN fails.
        assert!(max <= bound.max && mean <= bound.mean, "{what}");
    };
    for chunk in [7, 1000] {
        let found = forced::prefilled(&mut runner, prompts, chunk);
        hold(&format!("prompts in chunks of {chunk}"), found.0, own);
        hold(&format!("continuations in chunks of {chunk}"), found.1, greedy);
    }
    for delay in [0, 2] {
        // Two logits that are each off by the most may change places.
        let (errors, others) = forced::decoded(&mut runner, prompts, delay, 2.0 * greedy.max);
        hold(&format!("decoded, delay {delay}, {others} other choices"), errors, greedy);
    }
}

fn check(name: &str, path: &Path, expected: &Path) {
    check_f32(path, &Expected::read(expected));
    let prompts = Forced::read(expected);
    let exact = Bound { max: F32, mean: F32 };
    check_forced(path, Storage::F32, &prompts, (exact, exact));
    let bounds = forced::bf16_bounds(&fixture("bf16_errors.json"), name);
    check_forced(path, Storage::Bf16, &prompts, bounds);
}

fn check_fixture(name: &str) {
    let path = fixture("models").join(name);
    check(name, &path, &path.join("expected.json"));
}

#[test]
fn llama3_like() {
    check_fixture("llama3-like");
}

#[test]
fn phi3_like() {
    check_fixture("phi3-like");
}

#[test]
fn smollm_like() {
    check_fixture("smollm-like");
}

#[test]
fn mistral_like() {
    check_fixture("mistral-like");
}

#[test]
fn qwen2_like() {
    check_fixture("qwen2-like");
}

#[test]
fn qwen3_like() {
    check_fixture("qwen3-like");
}

#[test]
fn granite_like() {
    check_fixture("granite-like");
}

#[test]
fn gemma3_like() {
    check_fixture("gemma3-like");
}

#[test]
fn mixtral_like() {
    check_fixture("mixtral-like");
}

#[test]
fn qwen3_moe_like() {
    check_fixture("qwen3-moe-like");
}

#[test]
fn smollm2_itself() {
    let path = std::env::var_os("TRIREME_SMOLLM2").expect("TRIREME_SMOLLM2 names the GGUF file");
    check("smollm2", path.as_ref(), &fixture("smollm2/generation.json"));
}

/// Recorded steps of every size answer as single sequences do.
#[test]
fn batches_of_every_size() {
    let path = fixture("models/smollm-like");
    let expected = Expected::beside(&path);
    let prompt = &expected.prompts[3];
    let mut runner = runner(&path, Storage::F32);
    for count in [1, 2, 3, 7, 9, 17, 20] {
        let prompts = vec![prompt.ids.clone(); count];
        for output in generate(&mut runner, &prompts, prompt.greedy_ids.len(), 1000) {
            let tokens: Vec<u32> = output.iter().map(|(token, _)| *token).collect();
            assert_eq!(tokens, prompt.greedy_ids, "{count} sequences");
        }
    }
}
