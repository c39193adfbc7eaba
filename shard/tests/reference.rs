//! Models split in every way against numbers from transformers (f32), rank by rank on threads.

mod reference {
    pub mod expected;
    pub mod ranks;
}

use std::path::PathBuf;

use reference::{
    expected::{Expected, Prompt},
    ranks::{Model, on_ranks, prefill_all, scored_step},
};
use trireme_shard::{
    sampler::Score,
    step::{Chunk, Step},
};

/// Tolerances of fixtures/README.md for float32.
const LOGIT: f64 = 5e-4;
const LOGPROB: f64 = 2e-4;
/// SmolLM2's reference has larger margins of its own; the sum over 64 tokens is what counts there.
const SMOLLM2_LOGPROB: f64 = 2e-3;

fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures").join(path)
}

fn near(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!(
        (found - expected).abs() <= tolerance,
        "{what}: {found}, expected {expected} within {tolerance}"
    );
}

/// Every position's logits of every prompt.
fn check_logits(model: &Model, expected: &Expected) {
    let prompts = &expected.prompts;
    let slices = on_ranks(model, |runner| {
        let score = |(id, prompt): (usize, &Prompt)| {
            let step = scored_step(id as u64, prompt, id as u64 * 7);
            runner.score(step).expect("score")
        };
        let scores: Vec<Vec<f32>> = prompts.iter().enumerate().map(score).collect();
        scores
    });
    for (index, prompt) in prompts.iter().enumerate() {
        let parts: Vec<&[f32]> = slices.iter().map(|scores| scores[index].as_slice()).collect();
        let logits = model.join_vocabulary(&parts, prompt.ids.len());
        let what = |position: usize| format!("{} {} at {position}", model.name(), prompt.name);
        let last = logits.last().expect("at least one token");
        for (token, expected) in prompt.last_logits.iter().enumerate() {
            near(last[token], *expected, LOGIT, &what(token));
        }
        for (position, expected) in prompt.token_logprobs.iter().enumerate().skip(1) {
            let token = prompt.ids[position] as usize;
            let found = log_softmax(&logits[position - 1], token);
            near(found, *expected, LOGPROB, &what(position));
        }
    }
}

fn log_softmax(logits: &[f64], token: usize) -> f64 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits[token] - max - logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln()
}

/// What came of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
struct Output {
    /// Tokens and their logprobs.
    answer: Vec<(u32, f32)>,
    /// Of the prompt's tokens from the second on.
    scores: Vec<Score>,
}

/// All prompts in one batch, prefilled in chunks of `chunk` tokens, then decoded together.
fn generate(model: &Model, prompts: &[Prompt], chunk: usize) -> Vec<Output> {
    let new_tokens = prompts.iter().map(|prompt| prompt.greedy_ids.len()).max().unwrap_or(0);
    let answers = on_ranks(model, |runner| {
        let mut outputs = vec![Output::default(); prompts.len()];
        let mut run = |step: Step| {
            let outcome = runner.step(step).expect("step");
            assert_eq!(outcome.errors, []);
            for token in outcome.tokens {
                outputs[token.sequence as usize].answer.push((token.token, token.logprob));
            }
            for prompt in outcome.prompts {
                let scores = &mut outputs[prompt.sequence as usize].scores;
                assert_eq!(prompt.start, scores.len() + 1, "no gap and no overlap");
                scores.extend(prompt.scores);
            }
        };
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let mut admit = prefill_all(prompts, new_tokens);
        for start in (0..longest).step_by(chunk) {
            let chunks = prompts.iter().enumerate().filter_map(|(id, prompt)| {
                let len = prompt.ids.len().checked_sub(start).filter(|len| *len > 0)?;
                let (len, sample) = (len.min(chunk), len <= chunk);
                Some(Chunk { sequence: id as u64, start, len, sample })
            });
            run(Step { chunks: chunks.collect(), ..std::mem::take(&mut admit) });
        }
        for _ in 1..new_tokens {
            run(Step { decode: (0..prompts.len() as u64).collect(), ..Step::default() });
        }
        outputs
    });
    answers.into_iter().nth(model.answering_rank()).expect("the last stage's rank 0")
}

fn check_greedy(model: &Model, expected: &Expected, chunk: usize, tolerance: f64) {
    let outputs = generate(model, &expected.prompts, chunk);
    for (prompt, output) in expected.prompts.iter().zip(&outputs) {
        let what = format!("{} {} in chunks of {chunk}", model.name(), prompt.name);
        let ids: Vec<u32> = output.answer.iter().map(|(token, _)| *token).collect();
        assert_eq!(ids, prompt.greedy_ids, "{what}");
        for ((_, found), expected) in output.answer.iter().zip(&prompt.greedy_logprobs) {
            near(f64::from(*found), *expected, tolerance, &what);
        }
        check_scores(prompt, &output.scores, tolerance, &what);
    }
}

/// The prompt's own tokens: logprob, rank and the likeliest ones at each position.
fn check_scores(prompt: &Prompt, scores: &[Score], tolerance: f64, what: &str) {
    assert_eq!(scores.len() + 1, prompt.ids.len(), "{what}: one score for each later token");
    for (index, score) in scores.iter().enumerate() {
        let position = index + 1;
        let what = format!("{what}, prompt token {position}");
        near(f64::from(score.logprob), prompt.token_logprobs[position], tolerance, &what);
        let expected = prompt.top.get(index).map(Vec::as_slice).unwrap_or_default();
        for (place, (found, expected)) in score.top.iter().zip(expected).enumerate() {
            near(f64::from(found.1), expected.1, tolerance, &format!("{what}, top {place}"));
        }
        let own = score.top.iter().position(|(token, _)| *token == prompt.ids[position]);
        match own {
            Some(place) => {
                assert_eq!(score.rank as usize, place + 1, "{what}: rank");
                assert_eq!(score.top[place].1.to_bits(), score.logprob.to_bits(), "{what}");
            }
            None => assert!(score.rank > 5, "{what}: rank {}", score.rank),
        }
    }
}

/// Logits and greedy tokens in every split; whole prompts at once in the first split alone, since
/// cutting prompts is the same work in all of them.
fn check(path: &str, splits: &[(usize, usize)]) {
    let expected = Expected::beside(&fixture(path));
    for (index, &(tp, pp)) in splits.iter().enumerate() {
        let model = Model::open(&fixture(path), tp, pp);
        check_logits(&model, &expected);
        check_greedy(&model, &expected, 7, LOGPROB);
        if index == 0 {
            check_greedy(&model, &expected, 1000, LOGPROB);
        }
    }
}

/// A format decides what is read, not what is computed: logits say whether each rank read its part.
fn check_format(path: &str) {
    let expected = Expected::beside(&fixture(path));
    for (tp, pp) in [(1, 1), (2, 2)] {
        check_logits(&Model::open(&fixture(path), tp, pp), &expected);
    }
}

#[test]
fn llama3_like_in_every_split() {
    let splits = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 4)];
    check("models/llama3-like", &splits);
}

#[test]
fn smollm_like_in_every_split() {
    let splits = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 5)];
    check("models/smollm-like", &splits);
}

/// Every family: TP up to the heads and beyond the KV heads, PP up to the layers.
#[test]
fn families_in_every_split() {
    for (model, layers) in [
        ("mistral-like", 4),
        ("qwen2-like", 3),
        ("qwen3-like", 4),
        ("granite-like", 4),
        ("gemma3-like", 6),
        ("mixtral-like", 3),
        ("qwen3-moe-like", 3),
    ] {
        let splits = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, layers)];
        check(&format!("models/{model}"), &splits);
    }
}

#[test]
fn other_formats_of_the_same_weights() {
    for folder in ["hf-single", "hf-bf16", "hf-sharded", "hf-sharded-noindex"] {
        check_format(&format!("formats/{folder}"));
    }
}

#[test]
fn gguf_files_of_the_same_weights() {
    check_format("formats/gguf-f32/llama3-like.F32.gguf");
    check_format("formats/gguf-f16-smollm/smollm-like.F16.gguf");
}

/// A sequence's numbers do not depend on its neighbours, nor on where its prompt was cut.
#[test]
fn a_batch_equals_single_runs() {
    let expected = Expected::beside(&fixture("models/smollm-like"));
    let model = Model::open(&fixture("models/smollm-like"), 2, 1);
    let batched = generate(&model, &expected.prompts, 1000);
    for (prompt, output) in expected.prompts.iter().zip(&batched) {
        let alone = generate(&model, std::slice::from_ref(prompt), 1000);
        assert_eq!(&alone[0], output, "{}", prompt.name);
    }
}

#[test]
fn smollm2_itself() {
    let Some(path) = std::env::var_os("TRIREME_SMOLLM2") else {
        println!("SKIPPED smollm2_itself: TRIREME_SMOLLM2 does not name the GGUF file");
        return;
    };
    let expected = Expected::read(&fixture("smollm2/generation.json"));
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        let model = Model::open(path.as_ref(), tp, pp);
        check_greedy(&model, &expected, 1000, SMOLLM2_LOGPROB);
    }
}
