//! All ranks of one epoch: every step goes to each of them, in order.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use futures::future::{BoxFuture, FutureExt, try_join_all};
use tonic::transport::Channel;
use trireme_proto::shard::v1::{
    BlockUpdate, Chunk, ConfigureRequest, DecodeRequest, InfoRequest, MeetingPointRequest,
    PrefillRequest, Sequence, ShardState, StepHeader, StepReply, WarmupRequest,
    shard_client::ShardClient,
};

use super::Shape;
use crate::rpc;

const EPOCH: u64 = 1;
const STEP_DEADLINE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What a step does.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub blocks: Vec<BlockUpdate>,
    pub new: Vec<Sequence>,
    pub chunks: Vec<Chunk>,
    pub decode: Vec<u64>,
}

/// What all ranks together said to a step.
pub struct StepAnswer {
    pub tokens: usize,
    /// Of the slowest rank.
    pub forward_us: u32,
    pub collective_us: u32,
    pub sample_us: u32,
}

impl StepAnswer {
    /// Forward pass with its collectives, and sampling.
    pub fn engine_ms(&self) -> f64 {
        (f64::from(self.forward_us) + f64::from(self.sample_us)) / 1e3
    }
}

#[derive(Debug, Default)]
pub struct StepTimes {
    pub forward_us: u64,
    pub collective_us: u64,
    pub sample_us: u64,
    steps: u64,
}

impl StepTimes {
    pub fn add(&mut self, answer: &StepAnswer) {
        self.forward_us += u64::from(answer.forward_us);
        self.collective_us += u64::from(answer.collective_us);
        self.sample_us += u64::from(answer.sample_us);
        self.steps += 1;
    }
    pub fn mean_ms(&self, sum_us: u64) -> f64 {
        sum_us as f64 / self.steps.max(1) as f64 / 1e3
    }
}

/// A step that all ranks were sent.
pub struct InFlight(Vec<tokio::task::JoinHandle<Result<StepReply, tonic::Status>>>);

impl InFlight {
    pub async fn answered(self) -> anyhow::Result<StepAnswer> {
        let all = tokio::time::timeout(STEP_DEADLINE, try_join_all(self.0));
        let replies = all.await.context("a step was not answered within its deadline")??;
        let replies = replies.into_iter().collect::<Result<Vec<_>, _>>().map_err(refused)?;
        if let Some(error) = replies.iter().flat_map(|reply| &reply.errors).next() {
            bail!("sequence {}: {}", error.sequence, error.message);
        }
        let timings = || replies.iter().filter_map(|reply| reply.timings.as_ref());
        Ok(StepAnswer {
            tokens: replies.iter().map(|reply| reply.tokens.len()).sum(),
            forward_us: timings().map(|t| t.forward_us).max().unwrap_or(0),
            collective_us: timings().map(|t| t.collective_us).max().unwrap_or(0),
            sample_us: timings().map(|t| t.sample_us).max().unwrap_or(0),
        })
    }
}

pub struct Group {
    ranks: Vec<ShardClient<Channel>>,
    step_id: u64,
    drop: Vec<u64>,
}

impl Group {
    /// Waits until every rank has its weights, then joins and warms them up.
    pub async fn form(
        sockets: &[PathBuf],
        instance: &str,
        shape: &Shape,
        deadline: Duration,
    ) -> anyhow::Result<Self> {
        let connect = |socket: &PathBuf| {
            ShardClient::new(rpc::unix(socket)).max_decoding_message_size(rpc::MESSAGE_BYTES_MAX)
        };
        let group =
            Self { ranks: sockets.iter().map(connect).collect(), step_id: 0, drop: Vec::new() };
        try_join_all(group.ranks.iter().map(|rank| loaded(rank.clone(), deadline))).await?;
        let meeting = group.ranks[0].clone().meeting_point(MeetingPointRequest {}).await?;
        let request = ConfigureRequest {
            epoch: EPOCH,
            shared_memory: format!("/trireme-{instance}-{EPOCH}"),
            nccl_unique_ids: meeting.into_inner().nccl_unique_ids,
            step_deadline_ms: STEP_DEADLINE.as_millis() as u32,
            vocabulary: None,
        };
        group
            .each(|mut rank| {
                let request = request.clone();
                async move { rank.configure(request).await }.boxed()
            })
            .await?;
        let offered = group.warm_up(shape, 0).await?;
        if offered < shape.num_blocks {
            bail!(
                "{offered} KV blocks fit, the bench needs {}; lower --batch or --decode",
                shape.num_blocks
            );
        }
        group.warm_up(shape, shape.num_blocks).await?;
        Ok(group)
    }

    /// The fewest blocks of any rank.
    async fn warm_up(&self, shape: &Shape, num_blocks: u32) -> anyhow::Result<u32> {
        let request = WarmupRequest {
            epoch: EPOCH,
            max_batch_tokens: shape.max_batch_tokens,
            max_sequences: shape.max_sequences,
            max_model_len: shape.max_model_len,
            num_blocks,
        };
        let replies =
            self.each(|mut rank| async move { rank.warmup(request).await }.boxed()).await?;
        Ok(replies.iter().map(|reply| reply.get_ref().num_blocks).min().unwrap_or(0))
    }

    async fn each<T>(
        &self,
        call: impl Fn(ShardClient<Channel>) -> BoxFuture<'static, Result<T, tonic::Status>>,
    ) -> anyhow::Result<Vec<T>> {
        try_join_all(self.ranks.iter().map(|rank| call(rank.clone()))).await.map_err(refused)
    }

    /// The next step drops these.
    pub fn forget(&mut self, sequences: impl IntoIterator<Item = u64>) {
        self.drop.extend(sequences);
    }

    /// Sends a step to all ranks; it is on its way when this returns and the runtime runs.
    pub fn send(&mut self, step: Step) -> InFlight {
        self.step_id += 1;
        let drop = std::mem::take(&mut self.drop);
        let header = StepHeader { epoch: EPOCH, step_id: self.step_id, drop, blocks: step.blocks };
        let sent = self.ranks.iter().cloned().map(|mut rank| {
            let header = Some(header.clone());
            let (new, chunks, decode) =
                (step.new.clone(), step.chunks.clone(), step.decode.clone());
            tokio::spawn(async move {
                let reply = if chunks.is_empty() {
                    rank.decode(DecodeRequest { header, decode }).await
                } else {
                    rank.prefill(PrefillRequest { header, new, chunks, decode }).await
                };
                Ok(reply?.into_inner())
            })
        });
        InFlight(sent.collect())
    }
}

/// A shard's refusal in its own words.
fn refused(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}: {}", status.code(), status.message())
}

async fn loaded(mut rank: ShardClient<Channel>, deadline: Duration) -> anyhow::Result<()> {
    let start = Instant::now();
    while start.elapsed() < deadline {
        // Until the process listens, there is no one to answer.
        if let Ok(info) = rank.info(InfoRequest {}).await {
            let info = info.into_inner();
            match info.state() {
                ShardState::Loading | ShardState::Unspecified => {}
                ShardState::Failed => bail!("rank {}: {}", info.rank, info.failure),
                _ => return Ok(()),
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    bail!("a rank had not loaded its weights within {} s", deadline.as_secs())
}
