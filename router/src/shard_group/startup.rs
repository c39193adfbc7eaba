//! From sockets to a serving group: Info, Configure, Warmup, and a watch on every rank.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use futures::future::{join_all, try_join_all};
use tokio::sync::mpsc;
use trireme_proto::shard::v1::{self as proto, ShardState};

use super::{
    GroupError, GroupInfo, GroupSettings, ShardGroup,
    rank::{Connection, Rank},
    wire,
};

const INFO_LIMIT: Duration = Duration::from_secs(5);
const RESET_LIMIT: Duration = Duration::from_secs(10);
const MEETING_LIMIT: Duration = Duration::from_secs(20);
const LOADING_POLL: Duration = Duration::from_millis(100);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MOST: Duration = Duration::from_secs(2);
/// Tokens of one KV block, as the contract fixes it.
pub const BLOCK_TOKENS: u32 = 16;

impl ShardGroup {
    /// Tries until the group serves; only a mismatch ends it early. `epoch` is the last one that
    /// was used, `progress` hears what is being waited for.
    pub async fn connect(
        settings: &GroupSettings,
        epoch: &mut u64,
        progress: impl Fn(String),
    ) -> Result<Self, GroupError> {
        let mut backoff = BACKOFF_FIRST;
        loop {
            match start(settings, epoch, &progress).await {
                Ok(group) => return Ok(group),
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) => {
                    tracing::info!(%error, "shards are not up yet");
                    progress(error.to_string());
                }
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MOST);
        }
    }
}

/// One attempt.
async fn start(
    settings: &GroupSettings,
    epoch: &mut u64,
    progress: &impl Fn(String),
) -> Result<ShardGroup, GroupError> {
    let open = settings.sockets.iter().enumerate();
    let ranks = try_join_all(open.map(|(rank, socket)| Connection::open(rank, socket))).await?;
    let mut infos = Vec::with_capacity(ranks.len());
    for rank in &ranks {
        infos.push(loaded(rank, progress).await?);
    }
    let shape = agree(settings, &infos)?;
    *epoch = infos.iter().map(|info| info.epoch).fold(*epoch, u64::max) + 1;

    // Before the first call that can fail, so that a death in it is seen.
    let watches = try_join_all(ranks.iter().map(Connection::watch)).await?;
    progress("joining the ranks".to_owned());
    let ids = nccl_unique_ids(&ranks[0]).await?;
    try_join_all(ranks.iter().map(|rank| configure(rank, settings, *epoch, &ids))).await?;
    progress("warming up".to_owned());
    let (num_blocks, max_model_len) = warm_up(&ranks, settings, *epoch, &shape).await?;

    let info = GroupInfo {
        epoch: *epoch,
        num_blocks,
        max_model_len,
        vocab_size: shape.vocab_size,
        dtype: infos[0].dtype.clone(),
    };
    let (sender, events) = mpsc::channel(ranks.len() * (settings.steps_in_flight + 1));
    let answered = ranks.iter().map(|_| VecDeque::new()).collect();
    let last_stage = ranks[ranks.len() - settings.tp as usize..].to_vec();
    let lanes = ranks.into_iter().zip(watches).zip(&infos).map(|((rank, watch), info)| {
        Rank::start(rank, info.pid, watch, settings.steps_in_flight, sender.clone())
    });
    Ok(ShardGroup {
        info,
        step_deadline: settings.step_deadline,
        ranks: lanes.collect(),
        last_stage,
        events,
        in_flight: VecDeque::new(),
        answered,
        last_answer: Instant::now(),
    })
}

/// Waits while the rank reads weights; ends what an earlier epoch left behind.
async fn loaded(
    rank: &Connection,
    progress: &impl Fn(String),
) -> Result<proto::InfoReply, GroupError> {
    let mut was_reset = false;
    loop {
        let info = rank.info(INFO_LIMIT).await?;
        match info.state() {
            ShardState::Loaded => return Ok(info),
            ShardState::Loading => {
                progress(loading(rank.rank, &info));
                tokio::time::sleep(LOADING_POLL).await;
            }
            ShardState::Unspecified => {
                let detail = "it does not say its state".to_owned();
                return Err(GroupError::Protocol { rank: rank.rank, detail });
            }
            ShardState::Failed if was_reset => {
                return Err(GroupError::Failed { rank: rank.rank, detail: info.failure });
            }
            ShardState::Configured | ShardState::Serving | ShardState::Failed => {
                if was_reset {
                    let detail = format!("it is {:?} after Reset", info.state());
                    return Err(GroupError::Protocol { rank: rank.rank, detail });
                }
                rank.reset(info.epoch, RESET_LIMIT).await?;
                was_reset = true;
            }
        }
    }
}

fn loading(rank: usize, info: &proto::InfoReply) -> String {
    let done = info.weight_bytes_loaded.saturating_mul(100);
    match done.checked_div(info.weight_bytes_total) {
        Some(percent) => format!("rank {rank} is loading weights, {percent} %"),
        None => format!("rank {rank} is loading weights"),
    }
}

/// All ranks are who they should be and hold the same model.
fn agree(
    settings: &GroupSettings,
    infos: &[proto::InfoReply],
) -> Result<proto::ModelShape, GroupError> {
    let mismatch = |rank, detail| Err(GroupError::Mismatch { rank, detail });
    let Some(shape) = infos[0].model else {
        return mismatch(0, "it does not say its model".to_owned());
    };
    for (rank, info) in infos.iter().enumerate() {
        let (tp, pp) = (settings.tp, settings.pp);
        if info.rank as usize != rank || info.tp != tp || info.pp != pp {
            return mismatch(
                rank,
                format!(
                    "expected rank {rank} of tp {tp}, pp {pp}; it is rank {} of tp {}, pp {}",
                    info.rank, info.tp, info.pp
                ),
            );
        }
        if info.model != Some(shape) {
            return mismatch(rank, format!("it holds {:?}, rank 0 {shape:?}", info.model));
        }
        if info.checkpoint_fingerprint != settings.checkpoint_fingerprint {
            let detail = "its weight files are not those that this server was started with";
            return mismatch(rank, detail.to_owned());
        }
        if info.dtype != infos[0].dtype || info.kv_dtype != infos[0].kv_dtype {
            return mismatch(
                rank,
                format!(
                    "it computes in {} with KV in {}, rank 0 in {} with {}",
                    info.dtype, info.kv_dtype, infos[0].dtype, infos[0].kv_dtype
                ),
            );
        }
    }
    let most = shape.max_position_embeddings;
    match settings.max_model_len {
        Some(given) if given > most => {
            mismatch(0, format!("max-model-len {given} is over the model's {most} positions"))
        }
        _ => Ok(shape),
    }
}

/// What GPUs of several ranks find each other by; none: they exchange through the host.
async fn nccl_unique_ids(first: &Connection) -> Result<Vec<Vec<u8>>, GroupError> {
    let mut client = first.client.clone();
    let call = client.meeting_point(proto::MeetingPointRequest {});
    let reply = first.call("MeetingPoint", MEETING_LIMIT, call).await?;
    if !reply.problem.is_empty() {
        let problem = reply.problem;
        tracing::warn!(problem, "GPUs exchange tensors through the host, which is slow");
    }
    Ok(reply.nccl_unique_ids)
}

async fn configure(
    rank: &Connection,
    settings: &GroupSettings,
    epoch: u64,
    nccl_unique_ids: &[Vec<u8>],
) -> Result<(), GroupError> {
    // Grammars are the last stage's.
    let is_last_stage = rank.rank as u32 / settings.tp + 1 == settings.pp;
    let vocabulary = settings.vocabulary.as_ref().filter(|_| is_last_stage);
    let vocabulary = vocabulary.map(|vocabulary| wire::vocabulary(vocabulary));
    let request = proto::ConfigureRequest {
        epoch,
        shared_memory: format!("/trireme-{}-{epoch}", settings.instance),
        nccl_unique_ids: nccl_unique_ids.to_vec(),
        step_deadline_ms: settings.step_deadline.as_millis() as u32,
        vocabulary,
    };
    let mut client = rank.client.clone();
    let call = client.configure(request);
    let reply = rank.call("Configure", settings.start_deadline, call).await?;
    tracing::debug!(rank = rank.rank, all_reduce_us = reply.all_reduce_us, "joined");
    Ok(())
}

/// Asks what each rank has room for, then has all of them allocate the least of it.
async fn warm_up(
    ranks: &[Connection],
    settings: &GroupSettings,
    epoch: u64,
    shape: &proto::ModelShape,
) -> Result<(u32, u32), GroupError> {
    let mut max_model_len = settings.max_model_len.unwrap_or(shape.max_position_embeddings);
    let mut request = proto::WarmupRequest {
        epoch,
        max_batch_tokens: settings.max_batch_tokens,
        max_sequences: settings.max_sequences,
        max_model_len,
        num_blocks: 0,
    };
    let limit = settings.start_deadline;
    let room = try_join_all(ranks.iter().map(|rank| warm_up_rank(rank, request, limit))).await?;
    let (tightest, num_blocks) = room
        .iter()
        .map(|reply| reply.num_blocks)
        .enumerate()
        .min_by_key(|(_, blocks)| *blocks)
        .unwrap_or_default();
    let kv_tokens = num_blocks.saturating_mul(BLOCK_TOKENS);
    // One token of room is a prompt of one and nothing to say: the least that is of use is two.
    if kv_tokens < 2 || settings.max_model_len.is_some_and(|given| given > kv_tokens) {
        let memory = room[tightest].memory;
        let detail = format!(
            "its memory holds {kv_tokens} KV tokens, max-model-len asks for {max_model_len}; \
             lower it or give the KV cache more memory ({memory:?})"
        );
        return Err(GroupError::Mismatch { rank: tightest, detail });
    }
    max_model_len = max_model_len.min(kv_tokens);
    request.max_model_len = max_model_len;
    request.num_blocks = num_blocks;
    let given = join_all(ranks.iter().map(|rank| warm_up_rank(rank, request, limit))).await;
    for (rank, reply) in given.into_iter().enumerate() {
        let allocated = reply?.num_blocks;
        if allocated != num_blocks {
            let detail = format!("allocated {allocated} KV blocks, not {num_blocks}");
            return Err(GroupError::Protocol { rank, detail });
        }
    }
    Ok((num_blocks, max_model_len))
}

async fn warm_up_rank(
    rank: &Connection,
    request: proto::WarmupRequest,
    limit: Duration,
) -> Result<proto::WarmupReply, GroupError> {
    let mut client = rank.client.clone();
    rank.call("Warmup", limit, client.warmup(request)).await
}
