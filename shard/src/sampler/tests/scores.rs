//! Scores of given tokens against a reference that sorts the whole vocabulary.

use trireme_collectives::local;
use trireme_kernels::Team;

use super::{Case, Random, SHAPES, Sampling, logits, reference, run, slices};
use crate::sampler::{SampleError, Score, ScoreRow, score};

type Outcome = Vec<Result<Score, SampleError>>;

/// Scores one token of each row on `tp` ranks, which must agree to the bit.
fn scored(rows: &[(Vec<f32>, ScoreRow)], tp: usize, threads: usize) -> Outcome {
    let vocab = rows[0].0.len();
    let mut ranks: Vec<Outcome> = std::thread::scope(|scope| {
        let ranks: Vec<_> = local::worlds(tp, 1)
            .into_iter()
            .zip(slices(vocab, tp))
            .map(|(mut world, slice)| {
                scope.spawn(move || {
                    let targets: Vec<ScoreRow> = rows.iter().map(|(_, row)| *row).collect();
                    let logits: Vec<f32> =
                        rows.iter().flat_map(|(row, _)| &row[slice.clone()]).copied().collect();
                    let vocab = slice.start as u32..slice.end as u32;
                    let team = Team::new(threads);
                    score(&targets, &logits, vocab, &mut *world.tensor, &team).expect("scores")
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    let first = ranks.swap_remove(0);
    assert!(ranks.iter().all(|rank| *rank == first), "ranks of {tp} disagree");
    first
}

fn check(row: &[f32], target: ScoreRow, score: &Score, what: &str) {
    let expected = reference::logprobs(row);
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| {
        let value = |token: u32| row[token as usize];
        value(b).total_cmp(&value(a)).then(a.cmp(&b))
    });
    let close = |token: u32, logprob: f32| {
        let expected = expected[token as usize];
        let same = f64::from(logprob) == expected
            || (f64::from(logprob) - expected).abs() < 2e-6 * expected.abs().max(1.0);
        assert!(same, "{what}: token {token} has {logprob}, not {expected}");
    };
    close(target.token, score.logprob);
    let rank = order.iter().position(|token| *token == target.token).expect("in the row") + 1;
    assert_eq!(score.rank as usize, rank, "{what}: rank of {}", target.token);
    let top: Vec<u32> = score.top.iter().map(|&(token, _)| token).collect();
    order.truncate(target.top_logprobs);
    assert_eq!(top, order, "{what}");
    for &(token, logprob) in &score.top {
        close(token, logprob);
        if token == target.token {
            assert_eq!(logprob.to_bits(), score.logprob.to_bits(), "{what}: one token, one float");
        }
    }
}

#[test]
fn scores_are_those_of_the_whole_row() {
    for (shape, vocab) in SHAPES.into_iter().flat_map(|shape| [3, 1001].map(|v| (shape, v))) {
        let mut random = Random(5 + vocab as u64);
        let row = |top_logprobs| {
            let row = logits(shape, vocab, &mut random);
            let token = random.below(vocab) as u32;
            (row, ScoreRow { token, top_logprobs })
        };
        let mut rows: Vec<(Vec<f32>, ScoreRow)> = [0, 1, 2, 20, 1, 3].map(row).into();
        // The likeliest token too.
        rows[4].1.token = u32::try_from(vocab / 2).expect("small");
        for tp in [1, 2, 3, 5] {
            for (index, outcome) in scored(&rows, tp, 2).into_iter().enumerate() {
                let what = format!("{shape:?}, {vocab}, tp {tp}, row {index}");
                check(&rows[index].0, rows[index].1, &outcome.expect("a score"), &what);
            }
        }
    }
}

/// A prompt's token has the float it would have had as an answer's.
#[test]
fn a_score_is_the_logprob_of_the_same_choice() {
    let mut random = Random(77);
    let reported = Sampling { logprobs: true, top_logprobs: 3, ..Sampling::default() };
    let cases: Vec<Case> = SHAPES
        .into_iter()
        .map(|shape| Case::new(logits(shape, 1001, &mut random), reported.clone()))
        .collect();
    for tp in [1, 3] {
        let chosen: Vec<_> = run(&cases, tp, 1).into_iter().map(|s| s.expect("a token")).collect();
        let rows: Vec<_> = cases
            .iter()
            .zip(&chosen)
            .map(|(case, sampled)| {
                (case.logits.clone(), ScoreRow { token: sampled.token, top_logprobs: 3 })
            })
            .collect();
        for (score, sampled) in scored(&rows, tp, 1).into_iter().zip(&chosen) {
            let score = score.expect("a score");
            assert_eq!(score.logprob.to_bits(), sampled.logprob.to_bits());
            assert_eq!((score.rank, score.top), (1, sampled.top.clone()));
        }
    }
}

#[test]
fn a_bad_row_fails_alone() {
    let target = ScoreRow { token: 1, top_logprobs: 1 };
    let rows = [
        (vec![0.0, f32::NAN, 1.0], target),
        (vec![0.0, 1.0, 2.0], target),
        (vec![0.0, f32::INFINITY, 1.0], target),
        (vec![0.0, f32::NEG_INFINITY, f32::NEG_INFINITY], target),
    ];
    for tp in [1, 2] {
        let outcomes = scored(&rows, tp, 1);
        assert_eq!(outcomes[0], Err(SampleError::NotANumber));
        assert_eq!(outcomes[2], Err(SampleError::Infinite));
        let good = outcomes[1].as_ref().expect("a score");
        assert_eq!((good.rank, good.top[0].0), (2, 2));
        let impossible = outcomes[3].as_ref().expect("a score");
        assert_eq!((impossible.logprob, impossible.rank), (f32::NEG_INFINITY, 2));
    }
}
