//! The reference's tokens forced on a runner: every position is compared, whatever a token before it
//! would have been.

use std::{fs, path::Path};

use serde_json::Value;
use trireme_shard::{
    device::cuda::Cuda,
    runner::Runner,
    sampler::{Sampling, Scoring},
    step::{Chunk, NewSequence, Step},
};

use crate::{blocks, outcome};

/// A prompt with the greedy tokens that follow it, and what the reference (f32) says of them.
pub struct Forced {
    ids: Vec<u32>,
    /// Of `ids` from the second on.
    prompt_logprobs: Vec<f64>,
    greedy: Vec<Greedy>,
}

struct Greedy {
    token: u32,
    logprob: f64,
    /// The second-best token, and how far its logit is below.
    runner_up: u32,
    margin: f64,
}

/// Distances between logprobs and those of the reference.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors {
    pub max: f64,
    sum: f64,
    count: usize,
}

impl Errors {
    fn add(&mut self, found: f32, expected: f64) {
        let off = (f64::from(found) - expected).abs();
        // A NaN stays.
        self.max = if off <= self.max { self.max } else { off };
        self.sum += off;
        self.count += 1;
    }

    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }
}

/// The most that errors may be.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    pub max: f64,
    pub mean: f64,
}

/// What transformers itself loses in bf16 may be exceeded by half.
const OF_THEIRS: f64 = 1.5;

/// Of a prompt's own tokens, and of the greedy ones. The largest error is that of the checkpoint: where
/// a mixture of experts chooses others it is a matter of chance which token that is.
pub fn bf16_bounds(errors: &Path, model: &str) -> (Bound, Bound) {
    let theirs = &read(errors)["models"][model]["bf16"];
    let of = |part: &str, key: &str| OF_THEIRS * theirs[part][key].as_f64().expect("a number");
    let max = of("prompt", "max").max(of("greedy", "max"));
    (Bound { max, mean: of("prompt", "mean") }, Bound { max, mean: of("greedy", "mean") })
}

fn read(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().expect("numbers").iter();
    numbers.map(|number| number.as_f64().unwrap_or(f64::NAN)).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|id| id as u32).collect()
}

impl Forced {
    /// The prompts of an `expected.json`.
    pub fn read(path: &Path) -> Vec<Self> {
        let prompt = |value: &Value| {
            let of = &value["greedy"];
            let (logprobs, margins) = (numbers(&of["logprobs"]), numbers(&of["margins"]));
            let tokens = ids(&of["ids"]).into_iter().zip(ids(&of["runner_up"]));
            let greedy = tokens.zip(logprobs.into_iter().zip(margins));
            let greedy = greedy.map(|((token, runner_up), (logprob, margin))| Greedy {
                token,
                logprob,
                runner_up,
                margin,
            });
            Self {
                ids: ids(&value["ids"]),
                prompt_logprobs: numbers(&value["token_logprobs"]).split_off(1),
                greedy: greedy.collect(),
            }
        };
        read(path)["prompts"].as_array().expect("prompts").iter().map(prompt).collect()
    }

    /// The prompt and its first greedy tokens.
    fn tokens(&self, greedy: usize) -> Vec<u32> {
        let greedy = self.greedy[..greedy].iter().map(|greedy| greedy.token);
        self.ids.iter().copied().chain(greedy).collect()
    }
}

/// All tokens prefilled in chunks and scored: errors of the prompts' own tokens, and of the greedy ones.
pub fn prefilled(runner: &mut Runner<Cuda>, prompts: &[Forced], chunk: usize) -> (Errors, Errors) {
    let (mut own, mut greedy) = (Errors::default(), Errors::default());
    let texts: Vec<_> = prompts.iter().map(|prompt| prompt.tokens(prompt.greedy.len())).collect();
    let mut step = Step::default();
    for ((id, tokens), blocks) in (0u64..).zip(&texts).zip(blocks(texts.iter().map(Vec::len))) {
        step.blocks.push(blocks.of(id));
        step.new.push(NewSequence {
            id,
            tokens: tokens.clone(),
            prompt_len: tokens.len(),
            sampling: Ok(Sampling::default()),
            scoring: Ok(Some(Scoring { start: 1, top_logprobs: 0 })),
        });
    }
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    for start in (0..longest).step_by(chunk) {
        let part = |(id, tokens): (u64, &Vec<u32>)| {
            let len = tokens.len().checked_sub(start).filter(|len| *len > 0)?.min(chunk);
            Some(Chunk { sequence: id, start, len, sample: false })
        };
        step.chunks = (0u64..).zip(&texts).filter_map(part).collect();
        for scored in outcome(runner, std::mem::take(&mut step)).prompts {
            let prompt = &prompts[scored.sequence as usize];
            for (position, score) in (scored.start..).zip(&scored.scores) {
                match position.checked_sub(prompt.ids.len()) {
                    None => own.add(score.logprob, prompt.prompt_logprobs[position - 1]),
                    Some(index) => greedy.add(score.logprob, prompt.greedy[index].logprob),
                }
            }
        }
    }
    let drop = (0..texts.len() as u64).collect();
    outcome(runner, Step { drop, ..Step::default() });
    (own, greedy)
}

/// Each prompt prefilled at once, then a row a step, as a running sequence has, with the reference's
/// token. With `delay`, each prompt starts so many steps after the one before: prefills and decodes
/// share steps. Greedy choices may differ from the reference's where its margin is at most
/// `clear`. Errors of the chosen tokens, and the number of those that differ.
pub fn decoded(
    runner: &mut Runner<Cuda>,
    prompts: &[Forced],
    delay: usize,
    clear: f64,
) -> (Errors, usize) {
    let (mut errors, mut others) = (Errors::default(), 0);
    let lengths = prompts.iter().map(|prompt| prompt.ids.len() + prompt.greedy.len());
    let tables: Vec<_> = blocks(lengths).collect();
    let steps = prompts.iter().enumerate().map(|(i, p)| i * delay + p.greedy.len()).max();
    let mut running: Vec<u64> = Vec::new();
    for step in 0..steps.unwrap_or(0) {
        let mut work = Step { drop: std::mem::take(&mut running), ..Step::default() };
        for (index, prompt) in prompts.iter().enumerate() {
            let Some(done) = step.checked_sub(index * delay) else { continue };
            if done >= prompt.greedy.len() {
                continue;
            }
            let (id, tokens) = (index as u64, prompt.tokens(done));
            let start = if done == 0 { 0 } else { tokens.len() - 1 };
            let len = tokens.len() - start;
            work.chunks.push(Chunk { sequence: id, start, len, sample: true });
            work.blocks.push(tables[index].of(id));
            let sampling = Ok(Sampling { logprobs: true, ..Sampling::default() });
            let prompt_len = prompt.ids.len();
            work.new.push(NewSequence { id, tokens, prompt_len, sampling, scoring: Ok(None) });
            running.push(id);
        }
        // As the engine's batches: those that decode come first.
        work.chunks.sort_by_key(|chunk| chunk.len > 1);
        for token in outcome(runner, work).tokens {
            let index = token.sequence as usize;
            let greedy = &prompts[index].greedy[step - index * delay];
            if token.token == greedy.token {
                errors.add(token.logprob, greedy.logprob);
                continue;
            }
            others += 1;
            let margin = greedy.margin;
            assert!(margin <= clear, "prompt {index}, step {step}: another token at {margin}");
            if token.token == greedy.runner_up {
                errors.add(token.logprob, greedy.logprob - margin);
            }
        }
    }
    outcome(runner, Step { drop: running, ..Step::default() });
    (errors, others)
}
