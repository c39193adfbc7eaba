//! The chosen token is the reference's, on any number of ranks, threads and neighbours.

use super::{Case, Random, SHAPES, Sampling, Shape, logits, reference, run};

fn sampled() -> Sampling {
    Sampling { temperature: Some(1.0), ..Sampling::default() }
}

/// Every kind of parameter alone, at its edges, and together.
pub(super) fn samplings() -> Vec<Sampling> {
    let mut all = vec![Sampling::default(), sampled()];
    for temperature in [1e-5, 0.3, 0.7, 2.0, 100.0, 1e30] {
        all.push(Sampling { temperature: Some(temperature), ..sampled() });
    }
    for top_k in [1, 2, 40, 700, 4096, u32::MAX] {
        all.push(Sampling { top_k: Some(top_k), ..sampled() });
    }
    for top_p in [1e-6, 0.1, 0.5, 0.9, 0.999, 0.999_999_9] {
        all.push(Sampling { top_p: Some(top_p), ..sampled() });
    }
    for min_p in [1e-6, 0.05, 0.5, 1.0] {
        all.push(Sampling { min_p: Some(min_p), ..sampled() });
    }
    for typical_p in [1e-6, 0.2, 0.7, 0.95] {
        all.push(Sampling { typical_p: Some(typical_p), ..sampled() });
    }
    all.push(Sampling { top_k: Some(30), typical_p: Some(0.5), ..sampled() });
    let everything = Sampling { top_k: Some(50), top_p: Some(0.8), min_p: Some(0.02), ..sampled() };
    all.push(Sampling { top_k: Some(3), top_p: Some(0.9), ..sampled() });
    all.push(Sampling { top_k: Some(u32::MAX), top_p: Some(0.9), ..sampled() });
    all.push(Sampling { temperature: Some(1.7), ..everything.clone() });
    all.push(Sampling {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: -0.7,
        logit_bias: vec![(1, 4.0), (3, -100.0), (1, 0.5), (4_000_000, 9.0)],
        min_tokens: 9,
        stop_token_ids: vec![2, 0, 4_000_000],
        ..everything
    });
    all
}

fn cases(shape: Shape, vocab: usize, random: &mut Random) -> Vec<Case> {
    let with = |sampling: Sampling| {
        let len = 1 + random.below(12);
        Case {
            logits: logits(shape, vocab, random),
            sampling: Sampling { seed: random.next(), ..sampling },
            tokens: (0..len).map(|_| random.below(vocab.min(6)) as u32).collect(),
            prompt_len: random.below(len + 1),
            mask: None,
        }
    };
    samplings().into_iter().map(with).collect()
}

#[test]
fn the_choice_is_the_references_on_any_number_of_ranks() {
    for (shape, vocab) in SHAPES.into_iter().flat_map(|shape| [3, 257, 5000].map(|v| (shape, v))) {
        let mut random = Random(vocab as u64 + shape as u64 * 1000);
        let cases = cases(shape, vocab, &mut random);
        let expected: Vec<u32> = cases.iter().map(reference::token).collect();
        for (tp, threads) in [(1, 1), (1, 3), (2, 1), (3, 2), (5, 1)] {
            for (index, sampled) in run(&cases, tp, threads).into_iter().enumerate() {
                let case = &cases[index].sampling;
                let token = sampled.expect("a token").token;
                assert_eq!(token, expected[index], "{shape:?}, {vocab}, tp {tp}: {case:?}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let mut random = Random(5);
    let cases = cases(Shape::Model, 1000, &mut random);
    let together = run(&cases, 2, 2);
    for (index, case) in cases.iter().enumerate() {
        let alone = run(std::slice::from_ref(case), 2, 2);
        assert_eq!(alone[0], together[index], "{:?}", case.sampling);
    }
}

/// The kept tokens are exactly the reference's: all of them are drawn, and no other.
#[test]
fn the_draw_covers_what_is_kept_and_nothing_else() {
    let mut random = Random(77);
    for shape in [Shape::Model, Shape::Steps, Shape::Equal] {
        let logits = logits(shape, 60, &mut random);
        for sampling in samplings().into_iter().filter(|s| s.temperature.is_some()) {
            let case = |seed| Case::new(logits.clone(), Sampling { seed, ..sampling.clone() });
            let cases: Vec<Case> = (0..600).map(case).collect();
            let kept = reference::kept(&cases[0]);
            let total: f64 = kept.iter().map(|token| token.2).sum();
            let mut drawn = [0; 60];
            run(&cases, 1, 1).iter().for_each(|s| drawn[s.as_ref().unwrap().token as usize] += 1);
            for (token, &times) in drawn.iter().enumerate() {
                let share = kept.iter().find(|k| k.0 == token as u32).map_or(0.0, |k| k.2 / total);
                assert!(share > 0.0 || times == 0, "{token} {times} times: {sampling:?}");
                // Missed by chance with less than e^-18.
                assert!(share < 0.03 || times > 0, "{token} never: {sampling:?}");
            }
        }
    }
}

#[test]
fn the_next_position_and_the_next_seed_draw_anew() {
    let logits = vec![0.0; 4096];
    let mut cases: Vec<Case> = Vec::new();
    for (seed, position) in [(1, 10), (1, 11), (2, 10), (2, 11), (1 << 63, 10)] {
        let mut case = Case::new(logits.clone(), Sampling { seed, ..sampled() });
        case.tokens = vec![0; position];
        cases.push(case);
    }
    let mut tokens: Vec<u32> = run(&cases, 1, 1).into_iter().map(|s| s.unwrap().token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 5, "{tokens:?}");
}
