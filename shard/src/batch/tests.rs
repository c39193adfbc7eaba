//! Steps as data: what a shard with two sequences makes of them.

use trireme_kernels::SequenceRows;

use super::*;
use crate::sampler::{Sampling, Scoring};
use crate::step::{BlockUpdate, NewSequence};

const LIMITS: Limits = Limits {
    max_batch_tokens: 64,
    max_sequences: 4,
    max_model_len: 48,
    num_blocks: 10,
    vocab_size: 100,
};

fn new_sequence(id: u64, tokens: usize) -> NewSequence {
    NewSequence {
        id,
        tokens: vec![7; tokens],
        prompt_len: tokens,
        sampling: Ok(Sampling::default()),
        scoring: Ok(None),
    }
}

fn blocks(sequence: u64, append: &[u32]) -> BlockUpdate {
    BlockUpdate { sequence, append: append.to_vec() }
}

fn chunk(sequence: u64, start: usize, len: usize, sample: bool) -> Chunk {
    Chunk { sequence, start, len, sample }
}

/// Sequence 1: 20 tokens, all but the last in the cache, two blocks. Sequence 2: 5 tokens, new, one block.
fn sequences() -> Sequences {
    let mut sequences = Sequences::default();
    let errors = sequences.admit(vec![new_sequence(1, 20), new_sequence(2, 5)], &LIMITS);
    assert_eq!(errors, []);
    let errors = sequences.append_blocks(&[blocks(1, &[3, 0]), blocks(2, &[9])], &LIMITS);
    assert_eq!(errors, []);
    sequences.get_mut(1).expect("admitted").computed = Some(19);
    sequences
}

/// `rows`: (sequence, positions, samples); `errors`: (sequence, a word of the message).
fn check(step: Step, rows: &[(u64, Range<usize>, bool)], errors: &[(u64, &str)]) {
    let mut batch = Batch::default();
    assert_eq!(Batch::check(&step, &LIMITS), Ok(()), "{step:?}");
    let found = batch.build(&step, &sequences(), &LIMITS);
    let entries: Vec<_> =
        batch.entries().iter().map(|e| (e.sequence, e.positions.clone(), e.sample)).collect();
    assert_eq!(entries, rows, "{step:?}");
    assert_eq!(found.len(), errors.len(), "{found:?}");
    for (found, (sequence, word)) in found.iter().zip(errors) {
        assert_eq!(found.sequence, *sequence, "{found:?}");
        assert!(found.message.contains(word), "{found:?} should say {word}");
    }
}

fn step(decode: &[u64], chunks: &[Chunk]) -> Step {
    Step { decode: decode.to_vec(), chunks: chunks.to_vec(), ..Step::default() }
}

#[test]
fn rows_of_good_sequences_and_errors_of_bad_ones() {
    check(step(&[1], &[]), &[(1, 19..20, true)], &[]);
    check(step(&[], &[chunk(2, 0, 5, true)]), &[(2, 0..5, true)], &[]);
    // After a shared prefix the first chunk starts later.
    check(step(&[], &[chunk(2, 3, 2, true)]), &[(2, 3..5, true)], &[]);
    let both = step(&[1], &[chunk(2, 0, 4, false)]);
    check(both, &[(1, 19..20, true), (2, 0..4, false)], &[]);
    check(step(&[1, 5], &[]), &[(1, 19..20, true)], &[(5, "unknown")]);
    check(step(&[2], &[]), &[], &[(2, "before any chunk")]);
    check(step(&[], &[chunk(1, 18, 2, true)]), &[], &[(1, "cache holds 19")]);
    check(step(&[], &[chunk(2, 0, 6, true)]), &[], &[(2, "5 tokens are known")]);
    check(step(&[], &[chunk(2, 5, 0, false)]), &[], &[(2, "len 0")]);
    check(step(&[], &[chunk(2, 0, 4, true)]), &[], &[(2, "sample")]);
    check(step(&[1], &[chunk(2, usize::MAX, 2, true)]), &[(1, 19..20, true)], &[(2, "start")]);
}

#[test]
fn a_sequence_needs_its_blocks() {
    let mut sequences = sequences();
    sequences.get_mut(1).expect("admitted").blocks.pop();
    let mut batch = Batch::default();
    let errors = batch.build(&step(&[1], &[]), &sequences, &LIMITS);
    assert_eq!(errors, [SequenceError::new(1, "blocks: 1, but 20 tokens need 2")]);
    assert_eq!(batch.rows(), 0);
}

#[test]
fn a_sequence_ends_at_max_model_len() {
    let mut sequences = sequences();
    let sequence = sequences.get_mut(1).expect("admitted");
    (sequence.len, sequence.computed) = (49, Some(48));
    sequence.blocks.extend([1, 2]);
    let errors = Batch::default().build(&step(&[1], &[]), &sequences, &LIMITS);
    assert_eq!(errors, [SequenceError::new(1, "position: 49 tokens, but max_model_len is 48")]);
}

#[test]
fn a_step_too_large_or_ambiguous_is_refused() {
    let check = |step: Step, expected: BatchError| {
        assert_eq!(Batch::check(&step, &LIMITS), Err(expected), "{step:?}");
    };
    let too_many = BatchError::TooManyTokens { tokens: 65, limit: 64 };
    check(step(&[1], &[chunk(2, 0, 64, false)]), too_many);
    let endless = BatchError::TooManyTokens { tokens: usize::MAX, limit: 64 };
    check(step(&[1], &[chunk(2, 0, usize::MAX, false)]), endless);
    check(step(&[1, 2, 3, 4, 5], &[]), BatchError::TooManySequences { sequences: 5, limit: 4 });
    check(step(&[1, 2, 1], &[]), BatchError::Twice { sequence: 1 });
    check(step(&[1], &[chunk(1, 0, 1, false)]), BatchError::Twice { sequence: 1 });
}

#[test]
fn bad_sequences_are_not_admitted() {
    let check = |new: NewSequence, word: &str| {
        let errors = sequences().admit(vec![new], &LIMITS);
        assert!(errors.len() == 1 && errors[0].message.contains(word), "{errors:?}");
    };
    check(new_sequence(1, 3), "already in use");
    check(new_sequence(3, 0), "tokens: 0");
    check(new_sequence(3, 49), "1 to 48");
    check(NewSequence { tokens: vec![100], ..new_sequence(3, 1) }, "vocabulary has 100");
    check(NewSequence { prompt_len: 4, ..new_sequence(3, 3) }, "prompt_len");
    check(NewSequence { sampling: Err("top_p: 2".into()), ..new_sequence(3, 3) }, "top_p");
    check(NewSequence { scoring: Err("top: 129".into()), ..new_sequence(3, 3) }, "top: 129");
}

#[test]
fn blocks_must_exist_and_have_an_owner() {
    let check = |update: BlockUpdate, word: &str| {
        let errors = sequences().append_blocks(&[update], &LIMITS);
        assert!(errors.len() == 1 && errors[0].message.contains(word), "{errors:?}");
    };
    check(blocks(1, &[4, 10]), "10, but there are 10");
    check(blocks(8, &[1]), "unknown");
}

#[test]
fn the_batch_is_laid_out_for_attention() {
    let mut batch = Batch::default();
    batch.build(&step(&[1], &[chunk(2, 0, 4, false)]), &sequences(), &LIMITS);
    let rows: Vec<SequenceRows<'_>> = batch.sequences().collect();
    let layout: Vec<_> =
        rows.iter().map(|r| (r.first_row, r.rows, r.context_len, r.blocks.to_vec())).collect();
    assert_eq!(layout, [(0, 1, 20, vec![3, 0]), (1, 4, 4, vec![9])]);
    assert_eq!(batch.sampled_rows(), [0]);
    assert_eq!(batch.rows(), 5);
}

#[test]
fn a_cached_prefix_hides_no_token_that_is_to_be_scored() {
    let check = |scored_from: usize, start: usize, expected: Option<&str>| {
        let scoring = Ok(Some(Scoring { start: scored_from, top_logprobs: 0 }));
        let mut sequences = Sequences::default();
        let new = NewSequence { scoring, ..new_sequence(1, 40) };
        assert_eq!(sequences.admit(vec![new], &LIMITS), []);
        assert_eq!(sequences.append_blocks(&[blocks(1, &[3, 0, 1])], &LIMITS), []);
        let step = step(&[], &[chunk(1, start, 40 - start, true)]);
        let errors = Batch::default().build(&step, &sequences, &LIMITS);
        let found = errors.first().map(|error| error.message.as_str());
        assert_eq!(found, expected, "from {scored_from}, start {start}");
    };
    check(0, 0, None);
    check(17, 16, None);
    check(16, 16, Some("start: 16 leaves the prompt tokens 16..17 unscored"));
    check(0, 16, Some("start: 16 leaves the prompt tokens 1..17 unscored"));
    check(40, 32, None);
}
