//! Models on a GPU against numbers from transformers (f32). Needs a GPU and a build with the `cuda`
//! feature; `scripts/test-gpu` runs it.

#![cfg(feature = "cuda")]

mod reference {
    #[expect(dead_code, reason = "reference.rs reads the rest")]
    pub mod expected;
}

use std::path::{Path, PathBuf};

use reference::expected::{Expected, Prompt};
use trireme_checkpoint::Split;
use trireme_collectives::local;
use trireme_kernels::{KvPages, Storage};
use trireme_shard::{
    config::{Backend, Config, Identity, LoadFormat},
    device::{Device, cpu::WeightStore, cuda::Cuda},
    runner::{Runner, WarmupPlan},
    sampler::Sampling,
    server,
    status::Status,
    step::{BlockUpdate, Chunk, NewSequence, Step},
};

/// f32 on the GPU, as far as the order of sums goes.
const F32: f64 = 2e-3;
/// Activations of bf16 have 8 bits.
const BF16: f64 = 0.15;
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
    runner.device.join(local::worlds(1, 1).pop().expect("a world"));
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

/// Admits `prompts` with blocks for `new_tokens` more, scattered over the pool.
fn admit(prompts: &[Vec<u32>], new_tokens: usize) -> Step {
    let mut step = Step::default();
    let mut free = (0..NUM_BLOCKS as u32).rev();
    for (id, tokens) in (0u64..).zip(prompts) {
        let count = (tokens.len() + new_tokens).div_ceil(KvPages::BLOCK_TOKENS);
        step.blocks.push(BlockUpdate { sequence: id, append: free.by_ref().take(count).collect() });
        step.new.push(sequence(id, tokens));
    }
    step
}

fn run(runner: &mut Runner<Cuda>, step: Step, outputs: &mut [Vec<(u32, f32)>]) {
    let outcome = runner.step(step).expect("step");
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
    for _ in 1..new_tokens {
        run(runner, Step { decode: ids.clone(), ..Step::default() }, &mut outputs);
    }
    run(runner, Step { drop: ids, ..Step::default() }, &mut outputs);
    outputs
}

fn ids(prompts: &[Prompt]) -> Vec<Vec<u32>> {
    prompts.iter().map(|prompt| prompt.ids.clone()).collect()
}

/// Greedy tokens and their logprobs. In bf16 a token may differ where the reference's best two are
/// close; its logprob then is that of another token, so the comparison of that prompt ends there.
fn check(path: &Path, expected: &Expected, storage: Storage, tolerance: f64) {
    let mut runner = runner(path, storage);
    let new_tokens = expected.prompts.iter().map(|p| p.greedy_ids.len()).max().unwrap_or(0);
    let mut worst = 0.0f64;
    let (mut same, mut all) = (0, 0);
    for chunk in [7, 1000] {
        let outputs = generate(&mut runner, &ids(&expected.prompts), new_tokens, chunk);
        for (prompt, output) in expected.prompts.iter().zip(&outputs) {
            let what =
                format!("{} {storage:?} {} in chunks of {chunk}", path.display(), prompt.name);
            all += prompt.greedy_ids.len();
            for (step, (token, logprob)) in output.iter().take(prompt.greedy_ids.len()).enumerate()
            {
                let off = (f64::from(*logprob) - prompt.greedy_logprobs[step]).abs();
                assert!(off <= tolerance, "{what}: logprob at {step} is off by {off}");
                worst = worst.max(off);
                if *token != prompt.greedy_ids[step] {
                    assert_eq!(storage, Storage::Bf16, "{what}: token {token} at {step}");
                    break;
                }
                same += 1;
            }
        }
    }
    println!("{} {storage:?}: {same} of {all} tokens, logprobs within {worst:.5}", path.display());
    assert!(same * 10 >= all * 8, "{}: only {same} of {all} tokens", path.display());
}

fn check_fixture(name: &str) {
    let path = fixture(name);
    let expected = Expected::beside(&path);
    check(&path, &expected, Storage::F32, F32);
    check(&path, &expected, Storage::Bf16, BF16);
}

#[test]
fn llama3_like() {
    check_fixture("models/llama3-like");
}

#[test]
fn phi3_like() {
    check_fixture("models/phi3-like");
}

#[test]
fn smollm_like() {
    check_fixture("models/smollm-like");
}

#[test]
fn mistral_like() {
    check_fixture("models/mistral-like");
}

#[test]
fn qwen2_like() {
    check_fixture("models/qwen2-like");
}

#[test]
fn qwen3_like() {
    check_fixture("models/qwen3-like");
}

#[test]
fn granite_like() {
    check_fixture("models/granite-like");
}

#[test]
fn gemma3_like() {
    check_fixture("models/gemma3-like");
}

#[test]
fn smollm2_itself() {
    let path = std::env::var_os("TRIREME_SMOLLM2").expect("TRIREME_SMOLLM2 names the GGUF file");
    let expected = Expected::read(&fixture("smollm2/generation.json"));
    check(path.as_ref(), &expected, Storage::F32, F32);
    check(path.as_ref(), &expected, Storage::Bf16, BF16);
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
