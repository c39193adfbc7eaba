//! Models split in every way against numbers from transformers (f32), rank by rank on threads.

mod reference {
    pub mod expected;
    pub mod ranks;
}

use std::{fs, path::PathBuf};

use reference::{
    expected::{Expected, Prompt},
    ranks::{Model, on_ranks, prefill_all, scored_step},
};
use trireme_checkpoint::{Checkpoint, Split};
use trireme_shard::{
    sampler::Score,
    step::{Chunk, Step},
};

/// Those of fixtures/README.md for float32, or stricter.
const LOGIT: f64 = 2e-4;
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

/// Every rank's part of every position's logits, for each prompt.
fn logits(model: &Model, expected: &Expected) -> Vec<Vec<Vec<f32>>> {
    let prompts = &expected.prompts;
    on_ranks(model, |runner| {
        let score = |(id, prompt): (usize, &Prompt)| {
            let step = scored_step(id as u64, prompt, id as u64 * 7);
            runner.score(step).expect("score")
        };
        prompts.iter().enumerate().map(score).collect()
    })
}

/// Every position's logits of every prompt.
fn check_logits(model: &Model, expected: &Expected) {
    let (prompts, slices) = (&expected.prompts, logits(model, expected));
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

/// Folders of the fixtures' `group`, in order.
fn folders(group: &str) -> Vec<String> {
    let entries = fs::read_dir(fixture(group)).expect("a folder of fixtures");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .map(|name| format!("{group}/{name}"))
        .collect();
    names.sort();
    names
}

/// TP 1 to 4 and PP 1 to 3, where the model can be split so.
fn splits(path: &str) -> Vec<(usize, usize)> {
    let checkpoint = Checkpoint::open(&fixture(path)).unwrap_or_else(|error| panic!("{error}"));
    let all = (1..=4).flat_map(|tp| (1..=3).map(move |pp| (tp, pp)));
    all.filter(|&(tp, pp)| Split { tp, pp }.check(checkpoint.model()).is_ok()).collect()
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

/// TP from 1 to 8 and PP from 1 to the layers, where the model can be split so.
#[test]
fn the_widest_and_deepest_splits() {
    let mut checked = 0;
    for path in folders("models").iter().map(|path| fixture(path)) {
        let expected = Expected::beside(&path);
        let checkpoint = Checkpoint::open(&path).expect("open");
        let layers = checkpoint.model().layers;
        let all = (1..=8).flat_map(|tp| (1..=layers).map(move |pp| Split { tp, pp }));
        for split in all.filter(|split| split.check(checkpoint.model()).is_ok()) {
            check_logits(&Model::open(&path, split.tp, split.pp), &expected);
            checked += 1;
        }
    }
    assert!(checked > 180, "{checked} splits");
}

/// A format decides what is read, not what is computed: logits say whether each rank read its part,
/// and tokens are generated in the widest split alone. Where the values and the rotary frequencies
/// are a model's, so are the logits, bit by bit.
fn check_format(path: &str) {
    let folder = fixture(path);
    let expected = Expected::beside(&folder);
    let splits = splits(path);
    for &(tp, pp) in &splits {
        check_logits(&Model::open(&folder, tp, pp), &expected);
    }
    let &(tp, pp) = splits.last().expect("a split");
    check_greedy(&Model::open(&folder, tp, pp), &expected, 7, LOGPROB);
    let Some(source) = Expected::source(&folder) else { return };
    let (model, source) = (Model::open(&folder, 2, 2), Model::open(&source, 2, 2));
    if model.config.rope_scaling == source.config.rope_scaling {
        let (found, expected) = (logits(&model, &expected), logits(&source, &expected));
        assert!(found == expected, "{path} differs from the model that it was made of");
    }
}

#[test]
fn every_model_in_every_split() {
    let models = folders("models");
    assert!(models.len() >= 10, "{models:?}");
    for path in &models {
        let mut splits = splits(path);
        let layers = Model::open(&fixture(path), 1, 1).config.layers;
        if layers > 3 {
            splits.push((1, layers));
        }
        check(path, &splits);
    }
}

#[test]
fn every_format_in_every_split() {
    let formats = folders("formats");
    assert!(formats.len() >= 34, "{formats:?}");
    formats.iter().for_each(|path| check_format(path));
}

/// Quantised weights as they are stored, held to transformers' numbers of the decoded weights, and
/// bit for bit to a run that decodes them. Some splits tear blocks; those parts are decoded.
#[test]
fn kept_blocks_change_no_bit() {
    let mut kept = 0;
    for path in [
        "gguf-q4_0/llama3-like.Q4_0.gguf",
        "gguf-q8_0/llama3-like.Q8_0.gguf",
        "gguf-mixed/llama3-like.MIXED.gguf",
        "gguf-q4_k_m/wide-like.Q4_K_M.gguf",
    ] {
        let path = fixture(&format!("formats/{path}"));
        let expected = Expected::beside(&path);
        for (tp, pp) in [(1, 1), (2, 1), (3, 1), (1, 2)] {
            let model = || Model::open(&path, tp, pp);
            let bytes = |model: &Model| -> u64 {
                on_ranks(model, |runner| runner.weight_bytes()).into_iter().sum()
            };
            check_logits(&model().keeping_blocks(), &expected);
            let decoded = generate(&model(), &expected.prompts, 7);
            let blocks = generate(&model().keeping_blocks(), &expected.prompts, 7);
            assert_eq!(blocks, decoded, "{}", model().name());
            kept += usize::from(bytes(&model().keeping_blocks()) * 2 < bytes(&model()));
        }
    }
    assert!(kept >= 12, "only {kept} of 16 took less than half the memory");
}

/// A sequence's numbers do not depend on its neighbours, nor on where its prompt was cut.
#[test]
fn a_batch_equals_single_runs() {
    for name in ["smollm-like", "qwen3-moe-like", "gemma3-like"] {
        let path = fixture(&format!("models/{name}"));
        let expected = Expected::beside(&path);
        let model = Model::open(&path, 2, 1);
        let batched = generate(&model, &expected.prompts, 1000);
        for (prompt, output) in expected.prompts.iter().zip(&batched) {
            let alone = generate(&model, std::slice::from_ref(prompt), 1000);
            assert_eq!(&alone[0], output, "{name} {}", prompt.name);
        }
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
