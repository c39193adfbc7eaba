//! Who is in a step, and with how much.

use super::transcript::{check, limits};
use crate::Limits;

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
fn beside_decodes_prompts_get_a_share_of_their_own() {
    let transcript = "
        > add 1 5 8
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..5!; 1=[0 1]
        > done
        token 1
        > add 2 14 2
        > plan
        started 2, 0 cached
        #2 admit 2; 2:0..4; decode 1; 2=[2]
    ";
    check(Limits { max_mixed_tokens: 5, ..limits() }, transcript);
    check(
        Limits { max_mixed_tokens: 1, max_batch_tokens: 5, ..limits() },
        "
        > add 1 5 8
        > plan
        started 1, 0 cached
        #1 admit 1; 1:0..5!; 1=[0 1]
        > done
        token 1
        > add 2 4 2
        > plan
        started 2, 0 cached
        #2 admit 2; 2:0..1; decode 1; 2=[2]
    ",
    );
}
