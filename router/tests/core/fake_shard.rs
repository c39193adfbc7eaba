//! A shard that computes nothing: its next token is the last one plus 1. It checks what a real one
//! would refuse, and dies, hangs or fails on demand. It lives in a runtime of its own, so that its
//! death takes its connections along, as a process's does.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{net::UnixListener, runtime::Runtime, sync::watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};
use trireme_proto::shard::v1::{self as proto, ShardState, shard_server};

pub const VOCAB: u32 = 49152;
const BLOCK_TOKENS: usize = 16;

/// How the shard behaves; may be changed while it runs.
#[derive(Clone, Debug, Default)]
pub struct Script {
    pub step_latency: Duration,
    pub hang: bool,
    /// The next token of such a sequence's prompt end is an error of that sequence.
    pub poison: Option<u32>,
    /// Answers the next steps of any kind with this.
    pub refuse: Option<String>,
}

#[derive(Clone, Debug)]
pub struct ShardSettings {
    pub rank: u32,
    pub tp: u32,
    pub pp: u32,
    pub num_blocks: u32,
    /// `Warmup` for more is refused.
    pub most_batch_tokens: u32,
}

struct Known {
    tokens: Vec<u32>,
    blocks: usize,
    prompt_len: usize,
    scoring: Option<proto::Scoring>,
}

/// What a test may look at.
#[derive(Default)]
pub struct Seen {
    pub epochs: Vec<u64>,
    pub steps: u64,
    pub most_decodes: usize,
    pub dropped: HashSet<u64>,
    pub admitted: HashSet<u64>,
}

struct Inner {
    settings: ShardSettings,
    script: watch::Sender<Script>,
    /// The step that may run next.
    turn: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    epoch: u64,
    phase: i32,
    known: HashMap<u64, Known>,
    seen: Seen,
}

pub struct FakeShard {
    inner: Arc<Inner>,
    runtime: Option<Runtime>,
}

#[derive(Clone)]
struct Service(Arc<Inner>);

impl FakeShard {
    pub fn start(socket: &PathBuf, settings: ShardSettings) -> Self {
        let _ = std::fs::remove_file(socket);
        let inner = Arc::new(Inner {
            settings,
            script: watch::channel(Script::default()).0,
            turn: watch::channel(1).0,
            state: Mutex::new(State { phase: ShardState::Loaded.into(), ..State::default() }),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(socket).unwrap()
        };
        let service = Service(inner.clone());
        runtime.spawn(async move {
            let (_reporter, health) = tonic_health::server::health_reporter();
            tonic::transport::Server::builder()
                .add_service(health)
                .add_service(shard_server::ShardServer::new(service))
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
        });
        Self { inner, runtime: Some(runtime) }
    }

    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        self.inner.script.send_modify(change);
    }

    pub fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.inner.lock().seen)
    }

    /// Connections break at once.
    pub fn die(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for FakeShard {
    fn drop(&mut self) {
        self.die();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn is_last(&self) -> bool {
        self.settings.rank == self.settings.tp * (self.settings.pp - 1)
    }

    async fn step(
        &self,
        header: Option<proto::StepHeader>,
        new: Vec<proto::Sequence>,
        chunks: Vec<proto::Chunk>,
        decode: Vec<u64>,
    ) -> Result<Response<proto::StepReply>, Status> {
        let header = header.ok_or_else(|| Status::invalid_argument("no header"))?;
        // Calls of one connection may be handled in any order; steps may not.
        let mut turn = self.turn.subscribe();
        let _ = turn.wait_for(|turn| *turn >= header.step_id).await;
        let _ = self.script.subscribe().wait_for(|script| !script.hang).await;
        let script = self.script.borrow().clone();
        tokio::time::sleep(script.step_latency).await;
        let reply = self.lock().step(self, &script, header, new, chunks, decode);
        self.turn.send_modify(|turn| *turn += 1);
        reply.map(Response::new).map_err(Status::failed_precondition)
    }
}

impl State {
    fn step(
        &mut self,
        shard: &Inner,
        script: &Script,
        header: proto::StepHeader,
        new: Vec<proto::Sequence>,
        chunks: Vec<proto::Chunk>,
        decode: Vec<u64>,
    ) -> Result<proto::StepReply, String> {
        if let Some(refusal) = &script.refuse {
            return Err(refusal.clone());
        }
        if header.epoch != self.epoch || header.step_id != *shard.turn.borrow() {
            return Err(format!("step {} of epoch {}", header.step_id, header.epoch));
        }
        self.seen.steps += 1;
        self.seen.most_decodes = self.seen.most_decodes.max(decode.len());
        for id in header.drop {
            self.known.remove(&id).ok_or(format!("drop of unknown {id}"))?;
            self.seen.dropped.insert(id);
        }
        for sequence in new {
            self.seen.admitted.insert(sequence.id);
            let known = Known {
                tokens: sequence.tokens,
                blocks: 0,
                prompt_len: sequence.prompt_len as usize,
                scoring: sequence.scoring,
            };
            if self.known.insert(sequence.id, known).is_some() {
                return Err(format!("{} is known", sequence.id));
            }
        }
        for update in header.blocks {
            let known = self.known.get_mut(&update.sequence).ok_or("blocks of unknown")?;
            known.blocks += update.append.len();
        }
        let mut reply = proto::StepReply { step_id: header.step_id, ..Default::default() };
        let samples = chunks.into_iter().map(|chunk| {
            let (start, end) = (chunk.start as usize, (chunk.start + chunk.len) as usize);
            (chunk.sequence, chunk.sample, Some(start..end))
        });
        let decodes = decode.into_iter().map(|id| (id, true, None));
        for (id, sample, positions) in samples.chain(decodes).collect::<Vec<_>>() {
            self.score(id, positions.as_ref(), &mut reply);
            self.advance(script, (id, sample, positions.map(|p| p.end)), &mut reply)?;
        }
        if !shard.is_last() {
            reply.tokens.clear();
            reply.prompts.clear();
        }
        Ok(reply)
    }

    /// The logprob of a prompt's token is minus itself, its rank 1, and it is its own best.
    fn score(
        &self,
        id: u64,
        positions: Option<&std::ops::Range<usize>>,
        reply: &mut proto::StepReply,
    ) {
        let Some(known) = self.known.get(&id) else { return };
        let (Some(scoring), Some(positions)) = (&known.scoring, positions) else { return };
        let start = (positions.start + 1).max(scoring.start as usize);
        let end = (positions.end + 1).min(known.prompt_len);
        let tokens = known.tokens.get(start..end).unwrap_or_default();
        if tokens.is_empty() {
            return;
        }
        let logprobs: Vec<f32> = tokens.iter().map(|token| -(*token as f32)).collect();
        let top = if scoring.top_logprobs > 0 { tokens } else { &[] };
        reply.prompts.push(proto::PromptScores {
            sequence: id,
            start: start as u32,
            ranks: vec![1; tokens.len()],
            top_tokens: top.to_vec(),
            top_logprobs: logprobs[..top.len()].to_vec(),
            logprobs,
        });
    }

    fn advance(
        &mut self,
        script: &Script,
        (id, sample, end): (u64, bool, Option<usize>),
        reply: &mut proto::StepReply,
    ) -> Result<(), String> {
        let known = self.known.get_mut(&id).ok_or(format!("{id} is unknown"))?;
        let end = end.unwrap_or(known.tokens.len());
        if known.blocks * BLOCK_TOKENS < end {
            return Err(format!("{id} has {} blocks for {end} tokens", known.blocks));
        }
        if !sample {
            return Ok(());
        }
        let last = *known.tokens.last().ok_or("empty")?;
        if script.poison == Some(last) {
            let message = "poisoned".to_owned();
            reply.errors.push(proto::SequenceError { sequence: id, message, grammar: false });
            return Ok(());
        }
        let token = (last + 1) % VOCAB;
        known.tokens.push(token);
        let logprob = -(token as f32);
        reply.tokens.push(proto::TokenOut { sequence: id, token, logprob, top: Vec::new() });
        Ok(())
    }
}

#[tonic::async_trait]
impl shard_server::Shard for Service {
    async fn info(
        &self,
        _: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::InfoReply>, Status> {
        let (state, settings) = (self.0.lock(), &self.0.settings);
        Ok(Response::new(proto::InfoReply {
            state: state.phase,
            epoch: state.epoch,
            rank: settings.rank,
            tp: settings.tp,
            pp: settings.pp,
            dtype: "f32".to_owned(),
            kv_dtype: "f32".to_owned(),
            model: Some(proto::ModelShape {
                vocab_size: VOCAB,
                layers: 4,
                max_position_embeddings: 8192,
                ..Default::default()
            }),
            ..Default::default()
        }))
    }

    async fn configure(
        &self,
        request: Request<proto::ConfigureRequest>,
    ) -> Result<Response<proto::ConfigureReply>, Status> {
        let epoch = request.into_inner().epoch;
        let mut state = self.0.lock();
        if epoch <= state.epoch || state.phase != i32::from(ShardState::Loaded) {
            return Err(Status::failed_precondition("Configure out of turn"));
        }
        state.epoch = epoch;
        state.seen.epochs.push(epoch);
        state.phase = ShardState::Configured.into();
        self.0.turn.send_replace(1);
        Ok(Response::new(proto::ConfigureReply::default()))
    }

    async fn meeting_point(
        &self,
        _: Request<proto::MeetingPointRequest>,
    ) -> Result<Response<proto::MeetingPointReply>, Status> {
        Ok(Response::new(proto::MeetingPointReply::default()))
    }

    async fn compile_grammar(
        &self,
        _: Request<proto::CompileGrammarRequest>,
    ) -> Result<Response<proto::CompileGrammarReply>, Status> {
        Ok(Response::new(proto::CompileGrammarReply::default()))
    }

    async fn warmup(
        &self,
        request: Request<proto::WarmupRequest>,
    ) -> Result<Response<proto::WarmupReply>, Status> {
        let request = request.into_inner();
        let most = self.0.settings.most_batch_tokens;
        if request.max_batch_tokens > most {
            return Err(Status::invalid_argument(format!("max_batch_tokens is over {most}")));
        }
        let room = self.0.settings.num_blocks;
        let num_blocks = match request.num_blocks {
            0 => room,
            asked => {
                self.0.lock().phase = ShardState::Serving.into();
                asked
            }
        };
        if num_blocks > room {
            return Err(Status::resource_exhausted("too many blocks"));
        }
        Ok(Response::new(proto::WarmupReply { num_blocks, memory: None }))
    }

    async fn prefill(
        &self,
        request: Request<proto::PrefillRequest>,
    ) -> Result<Response<proto::StepReply>, Status> {
        let step = request.into_inner();
        self.0.step(step.header, step.new, step.chunks, step.decode).await
    }

    async fn decode(
        &self,
        request: Request<proto::DecodeRequest>,
    ) -> Result<Response<proto::StepReply>, Status> {
        let step = request.into_inner();
        self.0.step(step.header, Vec::new(), Vec::new(), step.decode).await
    }

    async fn reset(
        &self,
        _: Request<proto::ResetRequest>,
    ) -> Result<Response<proto::ResetReply>, Status> {
        let mut state = self.0.lock();
        state.known.clear();
        state.phase = ShardState::Loaded.into();
        Ok(Response::new(proto::ResetReply {}))
    }
}
