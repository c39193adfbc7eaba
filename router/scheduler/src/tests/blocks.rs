//! Who holds which blocks: prefix cache, preemption, admission.

use super::sequence;
use super::transcript::{check, limits, output};
use crate::{Event, Limits, MAX_BYPASSES, Scheduler};

#[test]
fn a_prefix_is_shared_once_it_is_computed() {
    let transcript = "
        > add 1 9 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..9!; 1=[0 1 2]
        > add 2 20 1 like 1
        > plan
        started 2, 0 cached
        #2 admit 2; 2:0..16; 2=[3 4 5 6]
        > done
        token 1
        finished 1: Length
        > add 3 8 1 like 1
        > add 4 9 1 like 1
        > plan
        started 3, 4 cached
        started 4, 8 cached
        #3 drop 1; admit 3 4; 2:16..20!; 3:4..8!; 4:8..9!; 2=[2]; 3=[0 7]; 4=[0 1 8]
        > reset
        > done
        > done
        token 2
        finished 2: Length
        token 3
        finished 3: Length
        token 4
        finished 4: Length
        > usage
        0 waiting, 0 running, 0 blocks used, 0 cached
    ";
    // When 2 comes, 1 is computing less than half of it: too little to wait for.
    check(Limits { num_blocks: 10, ..limits() }, transcript);
}

#[test]
fn a_prefix_in_flight_is_waited_for() {
    let transcript = "
        > add 1 13 3
        > add 2 13 1 like 1
        > add 3 2 1
        > plan
        started 1, 0 cached
        started 3, 0 cached
        #1 admit 1 3; 1:0..13!; 3:0..2!; 1=[0 1 2 3]; 3=[4]
        > plan
        #2 decode 1
        > done
        token 1
        token 3
        finished 3: Length
        > plan
        started 2, 12 cached
        #3 drop 3; admit 2; 2:12..13!; decode 1; 2=[0 1 2 4]
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

/// Text-generation-inference issue 2842, where two prompts near the limit hung.
#[test]
fn two_prompts_of_most_of_the_pool_among_many_short_ones_finish() {
    let mut scheduler = Scheduler::new(Limits { num_blocks: 20, max_waiting: 200, ..limits() });
    for id in 0..102 {
        let (len, max_new_tokens) = if id < 2 { (48, 9) } else { (3, 9) };
        let prompt = (0..len).map(|token| 100 * id as u32 + token).collect();
        scheduler.add(sequence(id, prompt, max_new_tokens)).unwrap();
    }
    let mut plans = std::collections::VecDeque::new();
    let mut finished = Vec::new();
    while finished.len() < 102 {
        let plan = scheduler.schedule();
        let is_idle = plan.is_none();
        plans.extend(plan);
        assert!(plans.back().is_none_or(|plan: &crate::Plan| plan.step_id < 1_000));
        if is_idle {
            let events = scheduler.apply(output(&plans.pop_front().unwrap(), vec![])).unwrap();
            finished.extend(events.into_iter().filter_map(|event| match event {
                Event::Finished { id, .. } => Some(id),
                _ => None,
            }));
        }
        scheduler.check_invariants();
    }
    let place = |id: u64| finished.iter().position(|other| *other == id).unwrap();
    assert!(place(0) < 2 + MAX_BYPASSES && place(1) < place(0) + 2 + MAX_BYPASSES, "{finished:?}");
}

#[test]
fn tokens_that_score_others_do_not_come_from_the_cache() {
    // Token 4 foretells token 5, 8 foretells 9: of the two cached blocks of 1, sequence 2 takes
    // none, 3 takes one, 4 both, and 5, whose prompt has no such token, both.
    let transcript = "
        > add 1 9 1
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..9!; 1=[0 1 2]
        > done
        token 1
        finished 1: Length
        > add 2 10 1 like 1 score 0
        > plan
        started 2, 0 cached
        #2 drop 1; admit 2 (score 1); 2:0..10!; 2=[2 3 4]
        > done
        token 2
        finished 2: Length
        > add 3 10 1 like 1 score 5
        > plan
        started 3, 4 cached
        #3 drop 2; admit 3 (score 5); 3:4..10!; 3=[0 2 3]
        > done
        token 3
        finished 3: Length
        > add 4 10 0 like 1 score 9
        > add 5 10 0 like 1 score 10
        > plan
        started 4, 8 cached
        started 5, 8 cached
        #4 drop 3; admit 4 (score 9) 5; 4:8..10!; 5:8..10!; 4=[0 1 2]; 5=[0 1 3]
        > done
        finished 4: Length
        finished 5: Length
    ";
    check(limits(), transcript);
}

#[test]
fn what_is_scored_is_not_scored_again_after_a_preemption() {
    // 13 tokens of 3 are computed when it is preempted, so tokens 1 to 13 are scored.
    let transcript = "
        > add 1 4 9
        > add 2 4 9
        > plan
        started 1, 0 cached
        started 2, 0 cached
        #1 admit 1 2; 1:0..4!; 2:0..1; 1=[0]; 2=[1]
        > done
        token 1
        > add 3 15 1 score 0
        > plan
        started 3, 0 cached
        #2 admit 3 (score 1); 2:1..4!; 3:0..1; decode 1; 3=[3]; 1=[2]
        > done
        token 2
        token 1
        > plan
        #3 3:1..4; decode 1 2; 2=[4]
        > done
        token 1
        token 2
        > plan
        #4 3:4..7; decode 1 2; 3=[5]
        > done
        token 1
        token 2
        > plan
        #5 3:7..10; decode 1 2; 3=[6]
        > done
        token 1
        token 2
        > plan
        #6 3:10..13; decode 1 2; 3=[8]; 1=[7]
        > done
        token 1
        token 2
        > plan
        preempted 3
        #7 drop 3; decode 1 2; 2=[8]
        > done
        token 1
        token 2
        > plan
        #8 decode 1 2
        > done
        token 1
        token 2
        > plan
        #9 decode 1 2
        > done
        token 1
        finished 1: Length
        token 2
        > plan
        started 3, 12 cached
        #10 drop 1; admit 3 (score 14); 3:12..15!; decode 2; 3=[3 5 6 7]
        > done
        token 3
        finished 3: Length
        token 2
        finished 2: Length
        > plan
        #11 drop 3 2
        > done
    ";
    let limits = Limits { num_blocks: 9, max_batch_tokens: 5, max_steps_in_flight: 1, ..limits() };
    check(limits, transcript);
}
