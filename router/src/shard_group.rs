//! The fan-out: one ordered stream of steps to every rank, and one answer from all of them.
//!
//! A group lives for one epoch. All ranks answer each step or the group is lost; there is no
//! partial answer and no retry of a step, because the other ranks already hold its effects.

mod grammars;
mod rank;
mod recovery;
mod startup;
mod wire;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tonic::{Code, Status};
use trireme_grammar::Vocabulary;
use trireme_proto::shard::v1 as proto;

pub use grammars::GrammarRanks;
use rank::{Connection, Rank, RankEvent};
pub use startup::BLOCK_TOKENS;
pub use wire::{SequenceParameters, StepRequest, sampling};

/// How much later than the shards the router gives up on a step, so that their own, more exact
/// account of what went wrong arrives first.
const DEADLINE_GRACE: Duration = Duration::from_millis(250);

/// What the group is started with.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    /// One unix socket for each rank, in rank order (`stage * tp + tp_rank`).
    pub sockets: Vec<PathBuf>,
    pub tp: u32,
    pub pp: u32,
    /// Part of the shared-memory name; one for each instance on a host.
    pub instance: String,
    pub step_deadline: Duration,
    /// Bounds `Configure` and `Warmup`, and the whole first start.
    pub start_deadline: Duration,
    pub steps_in_flight: usize,
    pub max_batch_tokens: u32,
    pub max_mixed_tokens: u32,
    pub max_sequences: u32,
    /// `None`: what the model and the KV memory allow.
    pub max_model_len: Option<u32>,
    /// Of the checkpoint that this router reads its texts from.
    pub checkpoint_fingerprint: u64,
    /// For grammars; `None` for a model without a tokenizer.
    pub vocabulary: Option<Arc<Vocabulary>>,
}

/// What the ranks agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    pub epoch: u64,
    pub num_blocks: u32,
    pub max_model_len: u32,
    pub vocab_size: u32,
    pub dtype: String,
}

/// Why a group could not start or was lost.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    #[error("rank {rank} cannot be reached: {detail}")]
    Unreachable { rank: usize, detail: String },
    #[error("rank {rank} failed: {detail}")]
    Failed { rank: usize, detail: String },
    /// Waiting does not help: the shards do not fit the router's arguments or each other.
    #[error("rank {rank}: {detail}")]
    Mismatch { rank: usize, detail: String },
    #[error("rank {rank} refused {call}: {}: {}", .status.code(), .status.message())]
    Call { rank: usize, call: &'static str, status: Box<Status> },
    #[error("rank {rank} did not answer {call} within {limit_ms} ms")]
    Slow { rank: usize, call: &'static str, limit_ms: u64 },
    #[error("step {step_id} was not answered within {limit_ms} ms by ranks {ranks:?}")]
    Deadline { step_id: u64, limit_ms: u64, ranks: Vec<usize> },
    #[error("rank {rank} is gone: {detail}")]
    Gone { rank: usize, detail: String },
    #[error("the shards did not start within {limit_s} s: {detail}")]
    NotStarted { limit_s: u64, detail: String },
    /// The ranks agree, but the answer does not fit the plan.
    #[error("the shards gave a wrong answer: {0}")]
    Answer(#[from] trireme_scheduler::ApplyError),
    #[error("rank {rank} broke the protocol: {detail}")]
    Protocol { rank: usize, detail: String },
}

impl GroupError {
    /// No amount of waiting or restarting helps: the shards do not fit the arguments, or say that
    /// the arguments are wrong.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Mismatch { .. } | Self::NotStarted { .. } => true,
            Self::Call { call: "Configure" | "Warmup", status, .. } => {
                status.code() == Code::InvalidArgument
            }
            _ => false,
        }
    }
}

/// One answered step.
#[derive(Debug)]
pub struct StepResult {
    pub step_id: u64,
    pub tokens: Vec<proto::TokenOut>,
    pub prompts: Vec<proto::PromptScores>,
    /// Sequences that failed alone, as any rank said.
    pub errors: Vec<proto::SequenceError>,
    /// From submission until the last rank's answer.
    pub duration: Duration,
    /// The slowest rank's share of each part.
    pub timings: proto::Timings,
}

struct InFlight {
    step_id: u64,
    submitted: Instant,
}

/// All ranks of one epoch, serving.
pub struct ShardGroup {
    info: GroupInfo,
    step_deadline: Duration,
    ranks: Vec<Rank>,
    last_stage: Vec<Connection>,
    events: mpsc::Receiver<(usize, RankEvent)>,
    in_flight: VecDeque<InFlight>,
    /// Answers of each rank that wait for the other ranks' ones.
    answered: Vec<VecDeque<proto::StepReply>>,
    last_answer: Instant,
}

impl ShardGroup {
    pub fn info(&self) -> &GroupInfo {
        &self.info
    }

    pub fn grammar_ranks(&self) -> GrammarRanks {
        GrammarRanks::new(self.last_stage.clone())
    }

    /// Sends one step to every rank. `step_id`s go up by one; the caller keeps at most
    /// `steps_in_flight` of them outstanding.
    pub fn submit(
        &mut self,
        step_id: u64,
        request: &StepRequest,
        span: &tracing::Span,
    ) -> Result<(), GroupError> {
        self.in_flight.push_back(InFlight { step_id, submitted: Instant::now() });
        for rank in &self.ranks {
            rank.send(request.clone(), span.clone())?;
        }
        Ok(())
    }

    /// The oldest outstanding step's result. Also watches idle ranks, so it is awaited always:
    /// without a step in flight it resolves only when the group is lost. Cancel-safe.
    pub async fn next(&mut self) -> Result<StepResult, GroupError> {
        loop {
            if let Some(result) = self.collate()? {
                return Ok(result);
            }
            let event = match self.deadline() {
                None => self.events.recv().await,
                Some(at) => match tokio::time::timeout_at(at.into(), self.events.recv()).await {
                    Ok(event) => event,
                    Err(_) => return Err(self.deadline_error()),
                },
            };
            match event {
                Some((rank, RankEvent::Reply(reply))) => self.answered[rank].push_back(*reply),
                Some((rank, RankEvent::Refused { call, status })) => {
                    return Err(GroupError::Call { rank, call, status });
                }
                Some((rank, RankEvent::Gone(detail))) => {
                    return Err(GroupError::Gone { rank, detail });
                }
                None => {
                    let detail = "its task ended".to_owned();
                    return Err(GroupError::Gone { rank: 0, detail });
                }
            }
        }
    }

    /// When the oldest step must be answered: counted from when it could start.
    fn deadline(&self) -> Option<Instant> {
        let oldest = self.in_flight.front()?;
        Some(oldest.submitted.max(self.last_answer) + self.step_deadline + DEADLINE_GRACE)
    }

    fn deadline_error(&self) -> GroupError {
        let silent = |(rank, replies): (usize, &VecDeque<_>)| replies.is_empty().then_some(rank);
        GroupError::Deadline {
            step_id: self.in_flight.front().map_or(0, |step| step.step_id),
            limit_ms: self.step_deadline.as_millis() as u64,
            ranks: self.answered.iter().enumerate().filter_map(silent).collect(),
        }
    }

    /// Joins the ranks' answers to the oldest step once all are there.
    fn collate(&mut self) -> Result<Option<StepResult>, GroupError> {
        if self.answered.iter().any(VecDeque::is_empty) {
            return Ok(None);
        }
        let replies: Vec<_> = self.answered.iter_mut().filter_map(VecDeque::pop_front).collect();
        let Some(step) = self.in_flight.pop_front() else {
            let detail = "answered a step that was not sent".to_owned();
            return Err(GroupError::Protocol { rank: 0, detail });
        };
        let mut result = StepResult {
            step_id: step.step_id,
            tokens: Vec::new(),
            prompts: Vec::new(),
            errors: Vec::new(),
            duration: step.submitted.elapsed(),
            timings: proto::Timings::default(),
        };
        for (rank, reply) in replies.into_iter().enumerate() {
            if reply.step_id != step.step_id {
                let detail = format!("answered step {}, not {}", reply.step_id, step.step_id);
                return Err(GroupError::Protocol { rank, detail });
            }
            result.absorb(reply);
        }
        self.last_answer = Instant::now();
        Ok(Some(result))
    }
}

impl StepResult {
    fn absorb(&mut self, reply: proto::StepReply) {
        // Only rank 0 of the last stage sends tokens, so there is nothing to merge.
        self.tokens.extend(reply.tokens);
        self.prompts.extend(reply.prompts);
        for error in reply.errors {
            if self.errors.iter().all(|known| known.sequence != error.sequence) {
                self.errors.push(error);
            }
        }
        if let Some(timings) = reply.timings {
            let slowest = &mut self.timings;
            slowest.wait_us = slowest.wait_us.max(timings.wait_us);
            slowest.forward_us = slowest.forward_us.max(timings.forward_us);
            slowest.collective_us = slowest.collective_us.max(timings.collective_us);
            slowest.sample_us = slowest.sample_us.max(timings.sample_us);
            slowest.grammar_us = slowest.grammar_us.max(timings.grammar_us);
        }
    }
}
