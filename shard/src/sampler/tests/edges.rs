//! Ties, penalties worked out by hand, broken rows, and parameters that cannot be.

use trireme_collectives::CollectiveError;
use trireme_proto::shard::v1 as proto;

use super::{Case, Constraint, SampleError, SampleRow, Sampling, run, sample};

const INFINITY: f32 = f32::INFINITY;

#[test]
fn a_greedy_tie_goes_to_the_lowest_token() {
    fn check(logits: &[f32], expected: u32) {
        for tp in [1, 2, 3, 5] {
            let sampled = run(&[Case::greedy(logits)], tp, 1).remove(0).expect("a token");
            assert_eq!(sampled.token, expected, "tp {tp}: {logits:?}");
        }
    }
    check(&[1.0, 7.0, 7.0, 0.0, 7.0, 2.0], 1);
    check(&[-1.0; 100], 0);
    check(&[-0.0, 0.0], 0);
    check(&[-INFINITY, -3.0, -INFINITY, -3.0], 1);
    check(&[-INFINITY, -INFINITY, -INFINITY, f32::MIN], 3);
    check(&[9.0], 0);
}

/// Greedy choice between token 1, whose raw logit is given, and token 0 just above or below what
/// token 1 must become.
#[test]
fn penalties_are_those_of_transformers_and_openai() {
    fn check(raw: f32, tokens: &[u32], prompt_len: usize, sampling: Sampling, becomes: f32) {
        for (other, expected) in [(becomes - 1e-3, 1), (becomes + 1e-3, 0)] {
            let case = Case {
                logits: vec![other, raw, -50.0],
                sampling: sampling.clone(),
                tokens: tokens.to_vec(),
                prompt_len,
                mask: None,
            };
            let sampled = run(&[case], 2, 1).remove(0).expect("a token");
            assert_eq!(sampled.token, expected, "{raw} must become {becomes}: {sampling:?}");
        }
    }
    let repetition = || Sampling { repetition_penalty: 2.0, ..Sampling::default() };
    let frequency = || Sampling { frequency_penalty: 0.5, ..Sampling::default() };
    let presence = || Sampling { presence_penalty: 0.25, ..Sampling::default() };
    check(3.0, &[1, 2], 1, repetition(), 1.5);
    check(-3.0, &[1, 1, 2], 3, repetition(), -6.0);
    check(3.0, &[2, 2], 1, repetition(), 3.0);
    check(3.0, &[1, 2, 1, 1], 1, frequency(), 2.0);
    check(3.0, &[1, 1, 2], 2, frequency(), 3.0);
    check(3.0, &[1, 2, 1, 1], 1, presence(), 2.75);
    check(3.0, &[1, 1, 2], 2, presence(), 3.0);
    let all = Sampling { frequency_penalty: 0.5, presence_penalty: 0.25, ..repetition() };
    check(4.0, &[1, 2, 1, 1], 1, all, 2.0 - 1.0 - 0.25);
    let bias = Sampling { logit_bias: vec![(1, -1.5), (1, 1.0)], ..repetition() };
    check(4.0, &[1, 2], 1, bias, 1.5);
}

#[test]
fn stop_tokens_are_masked_before_min_tokens() {
    fn check(generated: usize, expected: u32) {
        let mut case = Case::greedy(&[1.0, 2.0, 3.0]);
        case.sampling.min_tokens = 3;
        case.sampling.stop_token_ids = vec![2];
        case.tokens = vec![0; 4 + generated];
        case.prompt_len = 4;
        let sampled = run(&[case], 1, 1).remove(0).expect("a token");
        assert_eq!(sampled.token, expected, "after {generated} tokens");
    }
    check(0, 1);
    check(2, 1);
    check(3, 2);
}

#[test]
fn a_broken_row_is_an_error_for_itself_alone() {
    fn check(broken: &[f32], sampling: Sampling, expected: SampleError) {
        let broken = Case::new(broken.to_vec(), sampling.clone());
        let good =
            |seed| Case::new(vec![0.0, 1.0, 2.0, 3.0], Sampling { seed, ..sampling.clone() });
        for tp in [1, 2, 3] {
            let cases = [good(1), broken.clone(), good(2)];
            let outcome = run(&cases, tp, 2);
            assert_eq!(outcome[1], Err(expected), "tp {tp}");
            let alone = run(&[good(1), good(2)], tp, 2);
            assert_eq!([&outcome[0], &outcome[2]], [&alone[0], &alone[1]]);
            assert!(alone.iter().all(Result::is_ok));
        }
    }
    let mut masked = Sampling { min_tokens: 9, ..Sampling::default() };
    masked.stop_token_ids = vec![0, 3];
    let hot =
        Sampling { temperature: Some(1.0), top_k: Some(2), top_p: Some(0.5), ..masked.clone() };
    for sampling in [Sampling::default(), masked.clone(), hot.clone()] {
        check(&[1.0, f32::NAN, 2.0, 3.0], sampling.clone(), SampleError::NotANumber);
        check(&[1.0, 2.0, 3.0, -f32::NAN], sampling.clone(), SampleError::NotANumber);
        check(&[-INFINITY; 4], sampling.clone(), SampleError::NothingPossible);
        check(&[1.0, INFINITY, 2.0, 3.0], sampling, SampleError::Infinite);
    }
    check(&[1.0, -INFINITY, -INFINITY, 3.0], masked, SampleError::NothingPossible);
    check(&[1.0, -INFINITY, -INFINITY, 3.0], hot, SampleError::NothingPossible);
}

#[test]
fn no_rows_need_no_collective_and_a_wrong_shape_is_refused() {
    assert!(run(&[], 2, 1).is_empty());
    let mut world = trireme_collectives::local::worlds(1, 1).remove(0);
    let sampling = Sampling::default();
    let constraint = Constraint::Free;
    let row =
        SampleRow { sequence: 1, sampling: &sampling, tokens: &[1], prompt_len: 1, constraint };
    let team = trireme_kernels::Team::new(1);
    let outcome = sample(&[row], &mut [0.0; 5], 0..4, &mut *world.tensor, &team);
    match outcome {
        Err(CollectiveError::Mismatch { detail, .. }) => {
            assert_eq!(detail, "5 logits for 1 rows of 4 tokens");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_wire_form_is_checked_and_off_is_absent() {
    type Change = fn(&mut proto::Sampling);
    fn parse(change: Change) -> Result<Sampling, String> {
        let mut wire = proto::Sampling::default();
        change(&mut wire);
        Sampling::try_from(&wire).map_err(|error| error.to_string())
    }
    fn check(change: Change, expected: Sampling) {
        assert_eq!(parse(change), Ok(expected));
    }
    fn refused(change: Change, message: &str) {
        assert_eq!(parse(change), Err(message.to_owned()));
    }
    check(|_| {}, Sampling::default());
    check(|s| (s.top_p, s.repetition_penalty) = (1.0, 1.0), Sampling::default());
    check(|s| s.temperature = 1e-6, Sampling::default());
    check(
        |s| (s.temperature, s.top_k, s.top_p, s.min_p) = (0.5, 4, 0.25, 0.125),
        Sampling {
            temperature: Some(0.5),
            top_k: Some(4),
            top_p: Some(0.25),
            min_p: Some(0.125),
            ..Sampling::default()
        },
    );
    refused(
        |s| s.temperature = -1.0,
        "sampling.temperature must be 0 or a finite positive number, not -1",
    );
    refused(
        |s| s.temperature = f32::NAN,
        "sampling.temperature must be 0 or a finite positive number, not NaN",
    );
    refused(|s| s.top_p = 1.5, "sampling.top_p must be between 0 and 1, not 1.5");
    refused(|s| s.min_p = -0.5, "sampling.min_p must be between 0 and 1, not -0.5");
    refused(|s| s.top_logprobs = 129, "sampling.top_logprobs must be at most 128, not 129");
    refused(
        |s| s.frequency_penalty = INFINITY,
        "sampling.frequency_penalty must be a finite number, not inf",
    );
    refused(
        |s| s.repetition_penalty = -0.5,
        "sampling.repetition_penalty must be 0 (off) or a finite positive number, not -0.5",
    );
    refused(
        |s| s.logit_bias = vec![proto::LogitBias { token: 1, bias: f32::NAN }],
        "sampling.logit_bias must be a finite number, not NaN",
    );
}
