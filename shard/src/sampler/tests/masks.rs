//! A masked row chooses as if the forbidden tokens were impossible, and reports raw logprobs.

use std::sync::Arc;

use trireme_grammar::Mask;

use super::{Case, Random, SHAPES, SampleError, Sampling, choice::samplings, logits, run};

const STOP: u32 = 2;

/// A row with a mask, and the same row whose forbidden logits are -inf.
fn pair(sampling: &Sampling, logits: Vec<f32>, allowed: &[u32]) -> (Case, Case) {
    let vocab = logits.len();
    let free = Case::new(logits.clone(), sampling.clone());
    let mask = Some(Some(Arc::new(Mask::new(vocab, allowed, false))));
    let forbidden = |(token, logit): (usize, f32)| match allowed.contains(&(token as u32)) {
        true => logit,
        false => f32::NEG_INFINITY,
    };
    let emptied = logits.into_iter().enumerate().map(forbidden).collect();
    (Case { mask, ..free }, Case::new(emptied, sampling.clone()))
}

#[test]
fn forbidden_tokens_are_impossible_on_any_number_of_ranks() {
    for (shape, vocab) in SHAPES.into_iter().flat_map(|shape| [40, 257].map(|v| (shape, v))) {
        let mut random = Random(vocab as u64 + shape as u64 * 1000);
        let (mut masked, mut emptied, mut allowed) = (Vec::new(), Vec::new(), Vec::new());
        for sampling in samplings() {
            let tokens: Vec<u32> =
                (0..1 + random.below(9)).map(|_| 5 + random.below(vocab - 5) as u32).collect();
            let sampling = Sampling { seed: random.next(), logprobs: true, ..sampling };
            let (row, other) = pair(&sampling, logits(shape, vocab, &mut random), &tokens);
            masked.push(row);
            emptied.push(other);
            allowed.push(tokens);
        }
        for (tp, threads) in [(1, 1), (2, 2), (5, 1)] {
            let chosen = run(&masked, tp, threads);
            let reference = run(&emptied, tp, threads);
            for (index, (row, other)) in chosen.into_iter().zip(reference).enumerate() {
                let sampling = &masked[index].sampling;
                let token = row.as_ref().map(|row| row.token);
                assert_eq!(token, other.as_ref().map(|other| other.token), "tp {tp}: {sampling:?}");
                if let Ok(row) = row {
                    assert!(allowed[index].contains(&row.token), "tp {tp}: {sampling:?}");
                    check_raw(&masked[index], row.token, row.logprob);
                }
            }
        }
    }
}

/// The logprob is the token's under the whole raw distribution.
fn check_raw(case: &Case, token: u32, logprob: f32) {
    let max = case.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = case.logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let raw = f64::from(case.logits[token as usize] - max) - sum.ln();
    let close = (raw - f64::from(logprob)).abs() <= 1e-3 || raw.is_infinite();
    assert!(close, "token {token}: {logprob}, but raw {raw}");
}

#[test]
fn a_complete_answer_ends_before_min_tokens() {
    let sampling = Sampling { min_tokens: 100, stop_token_ids: vec![STOP], ..Sampling::default() };
    let case = |ends| Case {
        mask: Some(Some(Arc::new(Mask::new(8, &[STOP], ends)))),
        ..Case::new(vec![1.0; 8], sampling.clone())
    };
    for tp in [1, 3] {
        let outcome = run(&[case(true), case(false)], tp, 1);
        assert_eq!(outcome[0].as_ref().map(|row| row.token), Ok(STOP));
        assert_eq!(outcome[1], Err(SampleError::NothingPossible));
    }
}

#[test]
fn a_missing_mask_fails_its_row_alone() {
    let broken = Case { mask: Some(None), ..Case::greedy(&[1.0, 2.0, 0.0]) };
    let outcome = run(&[Case::greedy(&[1.0, 2.0, 0.0]), broken], 2, 1);
    assert_eq!(outcome[0].as_ref().map(|row| row.token), Ok(1));
    assert_eq!(outcome[1], Err(SampleError::Grammar));
}
