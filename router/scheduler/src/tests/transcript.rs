//! A scheduler driven by a script: lines with `>` are commands, the others what must come of them.
//!
//! ```text
//! > add ID PROMPT_LEN MAX_NEW [like ID] [priority N] [stop] [min N] [score FROM]
//! > plan             the next plan, or `idle`
//! > done [fail ID]   the oldest step's result: every token it samples is 7
//! > cancel ID        > lose NUM_BLOCKS    > reset    > usage
//! ```

use std::collections::VecDeque;
use std::fmt::Write;

use crate::{Event, Limits, NewSequence, Plan, Scheduler, StepOutput};

const TOKEN: u32 = 7;

/// 8 blocks of 4 tokens, 16 tokens a step, one stage, lag 1.
pub fn limits() -> Limits {
    Limits {
        num_blocks: 8,
        block_tokens: 4,
        max_batch_tokens: 16,
        max_mixed_tokens: 16,
        max_sequences: 8,
        max_waiting: 8,
        max_model_len: 64,
        stages: 1,
        max_steps_in_flight: 2,
        prefix_cache: true,
    }
}

/// Runs the commands of `transcript` and compares all that is said with it.
#[track_caller]
pub fn check(limits: Limits, transcript: &str) {
    let mut script = Script { scheduler: Scheduler::new(limits), plans: VecDeque::new() };
    let mut expected = String::new();
    let mut said = String::new();
    for line in transcript.lines().map(str::trim).filter(|line| !line.is_empty()) {
        writeln!(expected, "{line}").unwrap();
        if let Some(command) = line.strip_prefix("> ") {
            writeln!(said, "{line}").unwrap();
            said.push_str(&script.run(command));
            script.scheduler.check_invariants();
        }
    }
    assert!(said == expected, "expected\n{expected}\nbut got\n{said}");
}

struct Script {
    scheduler: Scheduler,
    plans: VecDeque<Plan>,
}

impl Script {
    fn run(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split_whitespace().collect();
        let number = |index: usize| -> u64 { words[index].parse().unwrap() };
        match words[0] {
            "add" => {
                let result = self.scheduler.add(new_sequence(&words));
                result.map_or_else(|error| format!("{error}\n"), |()| String::new())
            }
            "plan" => {
                let plan = self.scheduler.schedule();
                let mut said = events(&self.scheduler.poll_events());
                said.push_str(&plan.as_ref().map_or("idle\n".to_owned(), show));
                self.plans.extend(plan);
                said
            }
            "done" => {
                let plan = self.plans.pop_front().unwrap();
                let failed = if words.len() > 1 { vec![number(2)] } else { vec![] };
                events(&self.scheduler.apply(output(&plan, failed)).unwrap())
            }
            "cancel" => format!("{}\n", self.scheduler.cancel(number(1))),
            "lose" => {
                self.plans.clear();
                events(&self.scheduler.lose_group(number(1) as usize))
            }
            "reset" => {
                self.scheduler.reset_prefix_cache();
                String::new()
            }
            "usage" => {
                let usage = self.scheduler.usage();
                format!(
                    "{} waiting, {} running, {} blocks used, {} cached\n",
                    usage.waiting, usage.running, usage.blocks_used, usage.blocks_cached
                )
            }
            other => panic!("no such command: {other}"),
        }
    }
}

/// Prompts share no token unless one is `like` another.
fn new_sequence(words: &[&str]) -> NewSequence {
    let number = |word: &str| -> usize { word.parse().unwrap() };
    let option = |name: &str| {
        words.iter().position(|word| *word == name).map(|index| number(words[index + 1]))
    };
    let id = number(words[1]);
    let first = 1_000 * option("like").unwrap_or(id) as u32;
    NewSequence {
        id: id as u64,
        prompt: (first..first + number(words[2]) as u32).collect(),
        max_new_tokens: number(words[3]),
        min_new_tokens: option("min").unwrap_or(0),
        stop_token_ids: if words.contains(&"stop") { vec![TOKEN] } else { vec![] },
        priority: option("priority").unwrap_or(0) as i32,
        score_from: option("score"),
    }
}

/// What shards answer to a plan when `failed` fail alone.
pub fn output(plan: &Plan, failed: Vec<u64>) -> StepOutput {
    let sampling = plan.chunks.iter().filter(|chunk| chunk.sample).map(|chunk| chunk.id);
    let sampled = sampling.chain(plan.decode.iter().copied());
    let tokens = sampled.filter(|id| !failed.contains(id)).map(|id| (id, TOKEN)).collect();
    StepOutput { step_id: plan.step_id, tokens, failed }
}

/// `#2 drop 1; admit 2; 2:0..8 2:8..12! decode 3; blocks 2=[4 5]`, without what is empty; `!` samples.
fn show(plan: &Plan) -> String {
    let mut parts = Vec::new();
    if !plan.drop.is_empty() {
        parts.push(format!("drop {}", join(&plan.drop)));
    }
    if !plan.admit.is_empty() {
        let scored = |from| format!(" (score {from})");
        let admits = plan
            .admit
            .iter()
            .map(|admit| format!("{}{}", admit.id, admit.score_from.map_or(String::new(), scored)));
        parts.push(format!("admit {}", join(&admits.collect::<Vec<_>>())));
    }
    for chunk in &plan.chunks {
        let (end, mark) = (chunk.start + chunk.len, if chunk.sample { "!" } else { "" });
        parts.push(format!("{}:{}..{end}{mark}", chunk.id, chunk.start));
    }
    if !plan.decode.is_empty() {
        parts.push(format!("decode {}", join(&plan.decode)));
    }
    for (id, blocks) in &plan.blocks {
        parts.push(format!("{id}=[{}]", join(blocks)));
    }
    format!("#{} {}\n", plan.step_id, parts.join("; "))
}

fn events(events: &[Event]) -> String {
    events.iter().fold(String::new(), |said, event| {
        said + &match event {
            Event::Started { id, cached_tokens } => {
                format!("started {id}, {cached_tokens} cached\n")
            }
            Event::Token { id, .. } => format!("token {id}\n"),
            Event::Finished { id, reason } => format!("finished {id}: {reason:?}\n"),
            Event::Failed { id, reason } => format!("failed {id}: {reason:?}\n"),
            Event::Preempted { id } => format!("preempted {id}\n"),
        }
    })
}

fn join<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(" ")
}
