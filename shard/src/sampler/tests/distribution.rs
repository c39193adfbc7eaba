//! The draws follow the distribution that the parameters describe (Pearson's chi-square).

use super::{Case, Random, Sampling, Shape, logits, reference, run};

const DRAWS: usize = 20_000;

/// Draws `DRAWS` tokens and compares their counts with the reference's probabilities.
fn check(sampling: Sampling, vary: impl Fn(&mut Case, usize)) {
    let logits = logits(Shape::Model, 40, &mut Random(3));
    let case = Case::new(logits.iter().map(|l| l * 0.4).collect(), sampling);
    let kept = reference::kept(&case);
    let total: f64 = kept.iter().map(|token| token.2).sum();
    let mut counts = vec![0.0; 40];
    for batch in 0..DRAWS / 500 {
        let cases: Vec<Case> = (0..500)
            .map(|index| {
                let mut case = case.clone();
                vary(&mut case, batch * 500 + index);
                case
            })
            .collect();
        for sampled in run(&cases, 1, 1) {
            counts[sampled.expect("a token").token as usize] += 1.0;
        }
    }
    // Rare tokens share one class, so that every class expects enough draws.
    let (mut square, mut classes, mut rare) = (0.0, 0, (0.0, 0.0));
    let mut class = |expected: f64, count: f64| {
        square += (count - expected).powi(2) / expected;
        classes += 1;
    };
    for &(token, _, weight) in &kept {
        let expected = weight / total * DRAWS as f64;
        if expected >= 10.0 {
            class(expected, counts[token as usize]);
        } else {
            rare = (rare.0 + expected, rare.1 + counts[token as usize]);
        }
    }
    if rare.0 > 0.0 {
        class(rare.0, rare.1);
    }
    let drawn: f64 = kept.iter().map(|token| counts[token.0 as usize]).sum();
    assert_eq!(drawn as usize, DRAWS, "a token that was not kept was drawn");
    // Mean df, variance 2 df; four deviations is about one in ten thousand.
    let freedom = f64::from(classes - 1);
    let limit = freedom + 4.0 * (2.0 * freedom).sqrt();
    assert!(square < limit, "chi-square {square} with {freedom} degrees of freedom");
    assert!(classes > 2, "too few classes to tell anything");
}

fn sampled() -> Sampling {
    Sampling { temperature: Some(1.0), ..Sampling::default() }
}

fn by_seed(case: &mut Case, draw: usize) {
    case.sampling.seed = draw as u64;
}

fn by_position(case: &mut Case, draw: usize) {
    case.sampling.seed = 42;
    case.tokens = vec![0; draw + 1];
    case.prompt_len = 0;
}

#[test]
fn draws_follow_the_softmax() {
    check(sampled(), by_seed);
    check(sampled(), by_position);
    check(Sampling { temperature: Some(0.6), ..sampled() }, by_seed);
    check(Sampling { temperature: Some(3.0), ..sampled() }, by_seed);
}

#[test]
fn draws_follow_the_filters() {
    check(Sampling { top_k: Some(6), ..sampled() }, by_seed);
    check(Sampling { top_p: Some(0.7), ..sampled() }, by_position);
    check(Sampling { min_p: Some(0.1), ..sampled() }, by_seed);
    check(Sampling { typical_p: Some(0.6), ..sampled() }, by_seed);
    check(Sampling { top_k: Some(12), top_p: Some(0.8), min_p: Some(0.05), ..sampled() }, by_seed);
    check(Sampling { logit_bias: vec![(0, 3.0)], ..sampled() }, by_seed);
}
