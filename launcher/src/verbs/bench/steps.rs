//! Single steps of the shards, with the bench in the router's place.

mod group;

use std::{
    collections::VecDeque,
    num::{NonZeroU32, NonZeroUsize},
    time::{Duration, Instant},
};

use anyhow::bail;
use serde_json::json;
use trireme_proto::shard::v1::{BlockUpdate, Chunk, Sampling, Sequence};

use self::group::{Group, InFlight, Step, StepTimes};
use super::{Report, figures::percentile, prompts::Prompts, sweep::Decode};
use crate::{
    cli::BenchArgs,
    config::EngineConfig,
    instance::{Instance, Voice, open_model},
    verbs::{
        runtime,
        session::{Interrupt, beside, listen_to_logs},
    },
};

const BLOCK_TOKENS: u32 = 16;
const PROMPT_TOKENS: u32 = 16;
/// Most tokens of a step when no flag says so, as in the router.
const DEFAULT_BATCH_TOKENS: u32 = 512;
const PREFILL_RUNS: usize = 5;

/// A decode step without the router.
pub struct BareStep {
    pub sequences: NonZeroU32,
    /// What the engine took: forward pass with its collectives, and sampling.
    pub engine_ms_p50: f64,
}

impl BareStep {
    /// What router and RPC add to each step of the same batch. With several stages there is no
    /// single time of the engine: a stage's time has waits for the others in it.
    pub fn overhead(&self, routed: &Decode, pp: NonZeroUsize) -> serde_json::Value {
        let overhead_ms = routed.inter_token_ms_p50 - self.engine_ms_p50;
        json!({
            "case": "overhead", "sequences": self.sequences,
            "inter_token_ms_p50": routed.inter_token_ms_p50,
            "engine_ms_p50": self.engine_ms_p50,
            "overhead_ms": (pp.get() == 1).then_some(overhead_ms),
        })
    }
}

pub fn bench(
    args: &BenchArgs,
    engine: &EngineConfig,
    report: &mut Report,
) -> anyhow::Result<Vec<BareStep>> {
    let mut steps = Vec::new();
    let (model, checkpoint) = open_model(&args.engine.model.model, engine)?;
    drop(checkpoint);
    runtime()?.block_on(async {
        listen_to_logs(args.engine.log_format)?;
        let format = args.engine.log_format;
        let (instance, reach) = Instance::prepare(&model, engine, None, format, Voice::Quiet)?;
        let work = async {
            let widest = args.batch.iter().map(|n| n.get()).max().unwrap_or(1);
            let sequence_tokens = PROMPT_TOKENS + 2 * args.decode.get() + BLOCK_TOKENS;
            let longest = args.prefill.iter().map(|n| n.get()).max().unwrap_or(1);
            let shape = Shape {
                max_batch_tokens: engine
                    .limits
                    .max_batch_tokens
                    .map_or(DEFAULT_BATCH_TOKENS, |n| n.get()),
                max_sequences: widest,
                max_model_len: sequence_tokens.max(longest + 1),
                num_blocks: (widest * sequence_tokens.div_ceil(BLOCK_TOKENS))
                    .max((longest + 1).div_ceil(BLOCK_TOKENS)),
            };
            let deadline = engine.supervision.start_deadline;
            let group = Group::form(&reach.shards, &reach.instance, &shape, deadline).await?;
            Run { args, group, shape, prompts: Prompts::new(engine.seed), next_sequence: 1 }
                .all(report, &mut steps)
                .await
        };
        beside(instance, reach.handle.stop, Interrupt::Ends, work).await
    })?;
    Ok(steps)
}

/// What the shards are warmed up for.
pub struct Shape {
    max_batch_tokens: u32,
    max_sequences: u32,
    max_model_len: u32,
    num_blocks: u32,
}

struct Run<'a> {
    args: &'a BenchArgs,
    group: Group,
    shape: Shape,
    prompts: Prompts,
    next_sequence: u64,
}

impl Run<'_> {
    async fn all(mut self, report: &mut Report, steps: &mut Vec<BareStep>) -> anyhow::Result<()> {
        for tokens in self.args.prefill.clone() {
            let mut times_ms = Vec::new();
            for _ in 0..PREFILL_RUNS {
                times_ms.push(self.prefill(tokens.get()).await?.as_secs_f64() * 1e3);
            }
            let median_ms = percentile(&times_ms, 50.0);
            report.row(json!({
                "case": "prefill steps", "prompt_tokens": tokens, "ms_p50": median_ms,
                "tokens_per_s": f64::from(tokens.get()) / median_ms * 1e3,
            }))?;
        }
        for sequences in self.args.batch.clone() {
            let (engine_ms_p50, row) = self.decode(sequences.get()).await?;
            report.row(row)?;
            steps.push(BareStep { sequences, engine_ms_p50 });
        }
        Ok(())
    }

    fn ids(&mut self, count: u32) -> Vec<u64> {
        let first = self.next_sequence;
        self.next_sequence += u64::from(count);
        (first..self.next_sequence).collect()
    }

    /// One prompt in chunks, until its token is there.
    async fn prefill(&mut self, tokens: u32) -> anyhow::Result<Duration> {
        let id = self.ids(1)[0];
        let prompt = self.prompts.next(tokens as usize);
        let blocks = (0..(tokens + 1).div_ceil(BLOCK_TOKENS)).collect();
        let mut blocks = Some(BlockUpdate { sequence: id, append: blocks });
        let mut new = Some(new_sequence(id, prompt));
        let start = Instant::now();
        let mut at = 0;
        while at < tokens {
            let len = self.shape.max_batch_tokens.min(tokens - at);
            let sample = at + len == tokens;
            let chunk = Chunk { sequence: id, start: at, len, sample };
            let step = Step {
                blocks: blocks.take().into_iter().collect(),
                new: new.take().into_iter().collect(),
                chunks: vec![chunk],
                ..Step::default()
            };
            self.group.send(step).answered().await?;
            at += len;
        }
        let time = start.elapsed();
        self.group.forget([id]);
        Ok(time)
    }

    /// Each step waited for, then as many in flight as the router keeps. Also gives the engine's
    /// median time of a step.
    async fn decode(&mut self, sequences: u32) -> anyhow::Result<(f64, serde_json::Value)> {
        let ids = self.start_sequences(sequences).await?;
        let steps = self.args.decode.get();
        let decode = || Step { decode: ids.clone(), ..Step::default() };
        let (mut lockstep, mut engine_ms, mut rpc_ms) = (Vec::new(), Vec::new(), Vec::new());
        let mut times = StepTimes::default();
        for _ in 0..steps {
            let start = Instant::now();
            let answer = self.group.send(decode()).answered().await?;
            lockstep.push(start.elapsed().as_secs_f64() * 1e3);
            if answer.tokens != sequences as usize {
                bail!("{} tokens came from a step of {sequences} sequences", answer.tokens);
            }
            times.add(&answer);
            engine_ms.push(answer.engine_ms());
            rpc_ms.extend(lockstep.last().map(|step_ms| step_ms - answer.engine_ms()));
        }
        let engine_ms_p50 = percentile(&engine_ms, 50.0);
        let in_flight = self.args.engine.pp.get() + 1;
        let start = Instant::now();
        let mut sent: VecDeque<InFlight> = VecDeque::new();
        for _ in 0..steps {
            if sent.len() == in_flight
                && let Some(oldest) = sent.pop_front()
            {
                oldest.answered().await?;
            }
            sent.push_back(self.group.send(decode()));
        }
        for step in sent {
            step.answered().await?;
        }
        let pipelined_ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(steps);
        self.group.forget(ids);
        let row = json!({
            "case": "decode steps", "sequences": sequences, "steps": steps,
            "engine_ms_p50": engine_ms_p50, "rpc_ms_p50": percentile(&rpc_ms, 50.0),
            "lockstep_ms_p50": percentile(&lockstep, 50.0), "lockstep_ms_p99": percentile(&lockstep, 99.0),
            "forward_ms_mean": times.mean_ms(times.forward_us),
            "collective_ms_mean": times.mean_ms(times.collective_us),
            "sample_ms_mean": times.mean_ms(times.sample_us),
            "steps_in_flight": in_flight, "pipelined_ms_mean": pipelined_ms,
            "tokens_per_s": f64::from(sequences) / pipelined_ms * 1e3,
        });
        Ok((engine_ms_p50, row))
    }

    /// Prompts of so many sequences, in as few steps as the token budget allows.
    async fn start_sequences(&mut self, count: u32) -> anyhow::Result<Vec<u64>> {
        let ids = self.ids(count);
        let each = (PROMPT_TOKENS + 2 * self.args.decode.get() + 1).div_ceil(BLOCK_TOKENS);
        let at_once = (self.shape.max_batch_tokens / PROMPT_TOKENS).max(1) as usize;
        for (group, ids) in ids.chunks(at_once).enumerate() {
            let mut step = Step::default();
            for (index, id) in ids.iter().enumerate() {
                let first = (group * at_once + index) as u32 * each;
                let append = (first..first + each).collect();
                step.blocks.push(BlockUpdate { sequence: *id, append });
                step.new.push(new_sequence(*id, self.prompts.next(PROMPT_TOKENS as usize)));
                let chunk = Chunk { sequence: *id, start: 0, len: PROMPT_TOKENS, sample: true };
                step.chunks.push(chunk);
            }
            self.group.send(step).answered().await?;
        }
        Ok(ids)
    }
}

fn new_sequence(id: u64, tokens: Vec<u32>) -> Sequence {
    let sampling = Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Sampling::default() };
    let prompt_len = tokens.len() as u32;
    Sequence { id, prompt_len, tokens, sampling: Some(sampling), scoring: None }
}
