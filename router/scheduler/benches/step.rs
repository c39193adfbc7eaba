//! Cost of one step (`schedule`, `poll_events`, `apply`) when every sequence decodes.
//!
//! `cargo bench -p trireme-scheduler`

#![allow(clippy::print_stdout, reason = "a benchmark reports")]

use std::collections::VecDeque;
use std::time::Instant;

use trireme_scheduler::{Limits, NewSequence, Plan, Scheduler, StepOutput};

const PROMPT_TOKENS: u32 = 512;
const WARM_UP_STEPS: usize = 1_000;
const STEPS: usize = 4_000;

fn scheduler(num_sequences: usize, stages: usize) -> Scheduler {
    let mut scheduler = Scheduler::new(Limits {
        num_blocks: 400_000,
        block_tokens: 16,
        max_batch_tokens: 8_192,
        max_mixed_tokens: 8_192,
        max_sequences: num_sequences,
        max_waiting: num_sequences,
        max_model_len: 16_384,
        stages,
        max_steps_in_flight: stages + 1,
        prefix_cache: true,
    });
    for id in 0..num_sequences as u64 {
        let prompt = (0..PROMPT_TOKENS).map(|token| token + 1_000 * id as u32).collect();
        let new = NewSequence {
            id,
            prompt,
            max_new_tokens: 16_000,
            min_new_tokens: 0,
            stop_token_ids: vec![1, 2],
            priority: 0,
            score_from: None,
        };
        scheduler.add(new).expect("room for every sequence");
    }
    scheduler
}

fn answer(plan: &Plan) -> StepOutput {
    let sampling = plan.chunks.iter().filter(|chunk| chunk.sample).map(|chunk| chunk.id);
    let tokens = sampling.chain(plan.decode.iter().copied()).map(|id| (id, 7)).collect();
    StepOutput { step_id: plan.step_id, tokens, failed: vec![] }
}

fn measure(num_sequences: usize, stages: usize) {
    let mut scheduler = scheduler(num_sequences, stages);
    let mut in_flight = VecDeque::new();
    let mut nanoseconds: Vec<u128> = Vec::with_capacity(STEPS);
    let mut num_tokens = 0;
    for step in 0..WARM_UP_STEPS + STEPS {
        let start = Instant::now();
        let plan = scheduler.schedule();
        scheduler.poll_events();
        let planning = start.elapsed();
        in_flight.extend(plan.iter().map(answer));
        if plan.is_some() && in_flight.len() <= stages {
            continue;
        }
        let output = in_flight.pop_front().expect("a step in flight");
        let start = Instant::now();
        let events = scheduler.apply(output).expect("its own result");
        let applying = start.elapsed();
        if step >= WARM_UP_STEPS {
            num_tokens += events.len();
            nanoseconds.push((planning + applying).as_nanos());
        }
    }
    nanoseconds.sort_unstable();
    let at = |percent: usize| nanoseconds[(nanoseconds.len() - 1) * percent / 100] as f64 / 1e3;
    let per_step = num_tokens as f64 / nanoseconds.len() as f64;
    println!(
        "{num_sequences:>4} sequences, {stages} stages, {per_step:>5.1} tokens a step: median {:.1} us, p99 {:.1} us",
        at(50),
        at(99)
    );
}

fn main() {
    for (num_sequences, stages) in [(1, 1), (32, 1), (256, 1), (256, 2), (1024, 1)] {
        measure(num_sequences, stages);
    }
}
