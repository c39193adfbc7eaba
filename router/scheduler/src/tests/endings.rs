//! Ways out and wrong input: stops, cancels, failures, refusals.

use super::sequence;
use super::transcript::{check, limits};
use crate::{ApplyError, Limits, Scheduler, StepOutput};

#[test]
fn a_stopped_sequence_leaves_its_extra_token_behind() {
    let transcript = "
        > add 1 4 9 stop min 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..4!; 1=[0]
        > plan
        #2 decode 1; 1=[1]
        > done
        token 1
        > plan
        #3 decode 1
        > done
        token 1
        finished 1: Stop
        > usage
        0 waiting, 0 running, 2 blocks used, 0 cached
        > plan
        idle
        > done
        > usage
        0 waiting, 0 running, 0 blocks used, 1 cached
        > plan
        #4 drop 1
    ";
    check(limits(), transcript);
}

#[test]
fn a_cancelled_sequence_is_dropped_once_from_wherever_it_is() {
    let transcript = "
        > add 1 20 9
        > add 2 20 9
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..16; 1=[0 1 2 3]
        > cancel 2
        true
        > cancel 1
        true
        > cancel 1
        false
        > add 1 4 9
        > plan
        started 1, 0 cached
        #2 drop 1; admit 1; 1:0..4!; 1=[4]
        > done
        > cancel 1
        true
        > plan
        idle
        > done
        > plan
        #3 drop 1
        > done
        > usage
        0 waiting, 0 running, 0 blocks used, 0 cached
    ";
    check(limits(), transcript);
}

#[test]
fn a_sequence_fails_alone_and_its_blocks_are_not_cached() {
    let transcript = "
        > add 1 4 9
        > add 2 4 9
        > plan
        started 1, 0 cached
        started 2, 0 cached
        #1 admit 1 2; 1:0..4!; 2:0..4!; 1=[0]; 2=[1]
        > done fail 1
        failed 1: Sequence
        token 2
        > plan
        #2 drop 1; decode 2; 2=[0]
        > usage
        0 waiting, 1 running, 2 blocks used, 0 cached
    ";
    check(limits(), transcript);
}

#[test]
fn a_lost_group_takes_what_runs_and_leaves_what_waits() {
    let transcript = "
        > add 1 4 9
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..4!; 1=[0]
        > add 2 4 2
        > add 3 20 9
        > lose 4
        failed 1: GroupLost
        failed 3: GroupLost
        > plan
        started 2, 0 cached
        #1 admit 2; 2:0..4!; 2=[0]
        > done
        token 2
    ";
    check(limits(), transcript);
}

#[test]
fn what_can_never_run_is_refused() {
    let transcript = "
        > add 1 0 1
        the prompt is empty
        > add 1 64 1
        prompt of 64 tokens does not fit in 64 with its answer
        > add 1 30 4
        a sequence of 34 tokens can never fit in 32 KV tokens
        > add 1 30 3
        > add 1 1 1
        sequence 1 is already known
        > add 2 1 1
        the queue holds 1 sequences, its limit
    ";
    check(Limits { max_waiting: 1, ..limits() }, transcript);
}

/// A result that is not the step's own is refused, and the right one is still taken after it.
#[test]
fn results_that_do_not_belong_are_refused() {
    let mut scheduler = Scheduler::new(Limits { max_batch_tokens: 9, ..limits() });
    let early = StepOutput { step_id: 1, ..StepOutput::default() };
    assert_eq!(scheduler.apply(early), Err(ApplyError::NoStep { given: 1 }));
    for (id, len) in [(1, 4), (2, 16)] {
        scheduler.add(sequence(id, vec![5; len], 2)).unwrap();
    }
    scheduler.schedule().unwrap();
    let step = 1;
    let cases = [
        (2, vec![(1, 7)], vec![], ApplyError::WrongStep { given: 2, expected: 1 }),
        (1, vec![], vec![], ApplyError::MissingToken { step, id: 1 }),
        (1, vec![(1, 7), (2, 7)], vec![], ApplyError::Unexpected { step, id: 2 }),
        (1, vec![(1, 7), (3, 7)], vec![], ApplyError::Unexpected { step, id: 3 }),
        (1, vec![(1, 7), (1, 7)], vec![], ApplyError::Twice { step, id: 1 }),
        (1, vec![(1, 7)], vec![1], ApplyError::Twice { step, id: 1 }),
        (1, vec![(1, 7)], vec![3], ApplyError::Unexpected { step, id: 3 }),
    ];
    for (step_id, tokens, failed, error) in cases {
        assert_eq!(scheduler.apply(StepOutput { step_id, tokens, failed }), Err(error));
        scheduler.check_invariants();
    }
    let output = StepOutput { step_id: 1, tokens: vec![(1, 7)], failed: vec![2] };
    assert_eq!(scheduler.apply(output).unwrap().len(), 4);
}

#[test]
fn limits_that_cannot_work_are_named() {
    let cases = [
        (Limits { block_tokens: 0, ..limits() }, "block_tokens is 0, but must be at least 1"),
        (Limits { max_model_len: 1, ..limits() }, "max_model_len is 1, but must be at least 2"),
        (Limits { stages: 0, ..limits() }, "stages is 0, but must be at least 1"),
    ];
    for (limits, message) in cases {
        assert_eq!(limits.check().unwrap_err().to_string(), message);
    }
    assert_eq!(limits().check(), Ok(()));
}
