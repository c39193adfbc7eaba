//! Plans and events of small cases, as transcripts.

mod transcript;

use crate::{ApplyError, Limits, NewSequence, Scheduler, StepOutput};
use transcript::{check, limits};

#[test]
fn a_decode_is_planned_while_its_token_is_unknown() {
    let transcript = "
        > add 1 5 3
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..5!; 1=[0 1]
        > plan
        #2 decode 1
        > plan
        idle
        > done
        token 1
        > plan
        #3 decode 1
        > done
        token 1
        > plan
        idle
        > done
        token 1
        finished 1: Length
        > plan
        #4 drop 1
        > done
        > plan
        idle
        > usage
        0 waiting, 0 running, 0 blocks used, 1 cached
    ";
    check(limits(), transcript);
}

#[test]
fn lag_0_waits_for_each_token() {
    let transcript = "
        > add 1 5 2
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..5!; 1=[0 1]
        > plan
        idle
        > done
        token 1
        > plan
        #2 decode 1
        > done
        token 1
        finished 1: Length
    ";
    check(Limits { max_steps_in_flight: 1, ..limits() }, transcript);
}

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
fn no_new_token_is_asked_for_and_none_is_reported() {
    let transcript = "
        > add 1 4 0
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..4!; 1=[0]
        > plan
        idle
        > done
        finished 1: Length
    ";
    check(limits(), transcript);
}

#[test]
fn decodes_come_first_and_long_prompts_share_what_is_left() {
    // 2 gets half of the 15 tokens that 1 leaves, then what 3 leaves of them.
    let transcript = "
        > add 1 3 9
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..3!; 1=[0]
        > add 2 40 1
        > add 3 3 1
        > add 4 40 1
        > plan
        started 2, 0 cached
        started 3, 0 cached
        #2 admit 2 3; 2:0..12; 3:0..3!; decode 1; 2=[1 2 4]; 3=[3]
        > done
        token 1
        > plan
        #3 2:12..27; decode 1; 2=[6 7 8 9]; 1=[5]
    ";
    check(Limits { num_blocks: 20, ..limits() }, transcript);
}

#[test]
fn pipeline_stages_share_the_decodes() {
    let transcript = "
        > add 1 2 9
        > add 2 2 9
        > add 3 2 9
        > plan
        started 1, 0 cached
        started 2, 0 cached
        started 3, 0 cached
        #1 admit 1 2 3; 1:0..2!; 2:0..2!; 3:0..2!; 1=[0]; 2=[1]; 3=[2]
        > plan
        #2 decode 1 2
        > plan
        #3 decode 3
        > plan
        idle
        > done
        token 1
        token 2
        token 3
        > plan
        #4 decode 1 2
    ";
    check(Limits { stages: 2, max_steps_in_flight: 3, ..limits() }, transcript);
}

#[test]
fn a_prefix_is_shared_once_it_is_computed() {
    let transcript = "
        > add 1 9 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..9!; 1=[0 1 2]
        > add 2 8 1 like 1
        > plan
        started 2, 0 cached
        #2 admit 2; 2:0..8!; 2=[3 4]
        > done
        token 1
        finished 1: Length
        > add 3 8 1 like 1
        > add 4 9 1 like 1
        > plan
        started 3, 4 cached
        started 4, 8 cached
        #3 drop 1; admit 3 4; 3:4..8!; 4:8..9!; 3=[0 2]; 4=[0 1 5]
        > reset
        > done
        token 2
        finished 2: Length
        > done
        token 3
        finished 3: Length
        token 4
        finished 4: Length
        > usage
        0 waiting, 0 running, 0 blocks used, 0 cached
    ";
    check(limits(), transcript);
}

#[test]
fn nothing_that_ran_before_a_reset_is_entered_after_it() {
    let transcript = "
        > add 1 9 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..9!; 1=[0 1 2]
        > reset
        > done
        token 1
        finished 1: Length
        > usage
        0 waiting, 0 running, 0 blocks used, 0 cached
    ";
    check(limits(), transcript);
}

#[test]
fn without_a_prefix_cache_nothing_is_shared() {
    let transcript = "
        > add 1 9 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..9!; 1=[0 1 2]
        > done
        token 1
        finished 1: Length
        > add 2 9 1 like 1
        > plan
        started 2, 0 cached
        #2 drop 1; admit 2; 2:0..9!; 2=[0 1 2]
    ";
    check(Limits { prefix_cache: false, ..limits() }, transcript);
}

#[test]
fn the_youngest_yields_its_blocks_and_comes_back() {
    let transcript = "
        > add 1 8 8
        > add 2 4 8
        > plan
        started 1, 0 cached
        started 2, 0 cached
        #1 admit 1 2; 1:0..8!; 2:0..4!; 1=[0 1]; 2=[2]
        > done
        token 1
        token 2
        > plan
        #2 decode 1; 1=[3]
        > plan
        #3 decode 1
        > done
        token 1
        > plan
        #4 decode 1
        > done
        token 1
        > plan
        #5 decode 1
        > usage
        0 waiting, 2 running, 4 blocks used, 0 cached
        > done
        token 1
        > plan
        preempted 2
        #6 drop 2; decode 1; 1=[2]
        > done
        token 1
        > plan
        #7 decode 1
        > done
        token 1
        > plan
        #8 decode 1
        > done
        token 1
        > plan
        idle
        > done
        token 1
        finished 1: Length
        > plan
        started 2, 0 cached
        #9 drop 1; admit 2; 2:0..5!; 2=[2 3]
    ";
    // Of 4 blocks, 1 takes the last free one; 2 waits with its own until 1 needs that as well.
    check(Limits { num_blocks: 4, ..limits() }, transcript);
}

#[test]
fn the_oldest_does_not_yield_to_one_that_is_gone() {
    let transcript = "
        > add 1 7 8
        > add 2 8 8
        > plan
        started 1, 0 cached
        started 2, 0 cached
        #1 admit 1 2; 1:0..7!; 2:0..8!; 1=[0 1]; 2=[2 3]
        > plan
        #2 decode 1 2; 2=[4]
        > done
        token 1
        token 2
        > plan
        idle
        > cancel 1
        true
        > plan
        #3 drop 1; decode 2
    ";
    // At the third plan 1 asked 2 to yield, as soon as step 2 is done.
    check(Limits { num_blocks: 5, ..limits() }, transcript);
}

#[test]
fn those_that_run_get_blocks_before_those_that_wait() {
    // Half of the budget is left and 2 would fit into 2 of the 5 free blocks, but 1 still needs 3
    // for its own prompt, and one more is kept for growth. 3 needs no more than what is left over.
    let transcript = "
        > add 1 24 1
        > add 2 8 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..20; 1=[0 1 2 3 4]
        > add 3 4 1
        > plan
        started 3, 0 cached
        #2 admit 3; 1:20..24!; 3:0..4!; 1=[5]; 3=[6]
    ";
    check(Limits { max_batch_tokens: 20, ..limits() }, transcript);
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
fn priority_goes_before_arrival() {
    let transcript = "
        > add 1 16 1
        > add 2 16 1 priority 1
        > plan
        started 2, 0 cached
        #1 admit 2; 2:0..16!; 2=[0 1 2 3]
        > plan
        idle
        > done
        token 2
        finished 2: Length
        > plan
        started 1, 0 cached
        #2 drop 2; admit 1; 1:0..16!; 1=[4 5 6 7]
    ";
    check(limits(), transcript);
}

#[test]
fn what_can_never_run_is_refused() {
    let transcript = "
        > add 1 0 1
        the prompt is empty
        > add 1 64 1
        prompt of 64 tokens leaves no room for an answer in 64
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
        let prompt = vec![5; len];
        let (max_new_tokens, min_new_tokens, stop_token_ids, priority) = (2, 0, vec![], 0);
        let new =
            NewSequence { id, prompt, max_new_tokens, min_new_tokens, stop_token_ids, priority };
        scheduler.add(new).unwrap();
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
