//! Random workloads on a fake shard whose KV pages remember what was written into them.
//!
//! A token depends on the whole history behind it, so a wrong share, a page used before it is
//! computed, a block reused too early or a wrong position changes the answer. Every finished answer
//! must be the one computed without batching. A failure prints its seed;
//! `TRIREME_SIMULATION_SEED=N` repeats that one, `TRIREME_SIMULATION_SEEDS=N` runs the first N.

#![allow(clippy::print_stdout, reason = "a failure prints its seed, a long run its counts")]

mod rules;
mod shard;
mod workload;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use world::{Counts, World};

const SEEDS: u64 = 2_200;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number of seeds"))
}

fn run(seed: u64) -> Counts {
    let result = catch_unwind(AssertUnwindSafe(|| World::new(seed).run()));
    result.unwrap_or_else(|cause| {
        println!("repeat with TRIREME_SIMULATION_SEED={seed}");
        resume_unwind(cause)
    })
}

/// Every seed holds, and together they went everywhere: a workload that never preempts would prove
/// nothing about preemption.
#[test]
fn every_answer_is_the_one_without_batching() {
    if let Some(seed) = number("TRIREME_SIMULATION_SEED") {
        println!("{:#?}", run(seed));
        return;
    }
    let seeds = number("TRIREME_SIMULATION_SEEDS").unwrap_or(SEEDS);
    let mut total = Counts::default();
    for seed in 0..seeds {
        total.add(&run(seed));
    }
    println!("{seeds} seeds: {total:#?}");
    if seeds >= SEEDS {
        assert!(total.steps >= 2_000_000, "{} steps", total.steps);
        for (what, count) in total.named() {
            assert!(count >= 500, "only {count} {what}");
        }
    }
}

/// The same calls give the same plans.
#[test]
fn a_run_repeats_itself() {
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
