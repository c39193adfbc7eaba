//! Reported logprobs are the raw model's, whatever was done to the logits.

use super::{Case, Random, SHAPES, Sampling, logits, reference, run};

#[test]
fn logprobs_are_of_the_raw_logits() {
    for (shape, vocab) in SHAPES.into_iter().flat_map(|shape| [3, 1001].map(|v| (shape, v))) {
        let mut random = Random(9 + vocab as u64);
        let reported = Sampling { logprobs: true, top_logprobs: 5, ..Sampling::default() };
        let hot = Sampling { temperature: Some(1.5), top_k: Some(20), ..reported.clone() };
        let edited = Sampling {
            repetition_penalty: 1.5,
            logit_bias: vec![(1, 3.0), (1, 3.0), (0, -1.0)],
            ..hot.clone()
        };
        let cases: Vec<Case> = [reported, hot, edited]
            .into_iter()
            .map(|sampling| Case::new(logits(shape, vocab, &mut random), sampling))
            .collect();
        for tp in [1, 2, 3, 5] {
            for (case, sampled) in cases.iter().zip(run(&cases, tp, 2)) {
                check(case, &sampled.expect("a token"), &format!("{shape:?}, {vocab}, tp {tp}"));
            }
        }
    }
}

fn check(case: &Case, sampled: &crate::sampler::Sampled, what: &str) {
    let expected = reference::logprobs(&case.logits);
    let close = |token: u32, logprob: f32| {
        let expected = expected[token as usize];
        let same = f64::from(logprob) == expected
            || (f64::from(logprob) - expected).abs() < 2e-6 * expected.abs().max(1.0);
        assert!(same, "{what}: token {token} has {logprob}, not {expected}");
    };
    close(sampled.token, sampled.logprob);
    let mut best: Vec<u32> = (0..case.logits.len() as u32).collect();
    best.sort_by(|&a, &b| {
        let value = |token: u32| case.logits[token as usize];
        value(b).total_cmp(&value(a)).then(a.cmp(&b))
    });
    best.truncate(5);
    let tokens: Vec<u32> = sampled.top.iter().map(|&(token, _)| token).collect();
    assert_eq!(tokens, best, "{what}");
    for &(token, logprob) in &sampled.top {
        close(token, logprob);
        if token == sampled.token {
            assert_eq!(
                logprob.to_bits(),
                sampled.logprob.to_bits(),
                "{what}: one token, one float"
            );
        }
    }
}

#[test]
fn what_was_not_asked_for_is_not_reported() {
    let sampled = run(&[Case::greedy(&[0.0, 1.0])], 2, 1).remove(0).expect("a token");
    assert_eq!((sampled.token, sampled.logprob, sampled.top.len()), (1, 0.0, 0));
}
