//! gRPC to commands and back; no logic.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tonic::{Request, Response, Status as GrpcStatus, metadata::MetadataMap};
use tracing::{Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use trireme_proto::shard::v1::{self as proto, shard_server::Shard};

use crate::{
    config::Identity,
    engine::{Command, Configure, EngineError, Handle, StepCommand},
    grammar::{self, Grammars},
    meeting_point,
    prompt_scores::PromptScores,
    runner::{MemoryPlan, StepOutcome, StepToken, Timings, WarmupPlan},
    sampler,
    sequences::SequenceError,
    step::{MissingHeader, Step},
};

/// The shard's RPCs over the engine's queue.
pub struct Service {
    pub engine: Handle,
    pub identity: Arc<Identity>,
    pub grammars: Arc<Grammars>,
}

impl Service {
    async fn step(
        &self,
        metadata: MetadataMap,
        step: Result<Step, MissingHeader>,
    ) -> Result<Response<proto::StepReply>, GrpcStatus> {
        let step = step.map_err(|error| GrpcStatus::invalid_argument(error.to_string()))?;
        let span = self.span(&metadata, &step);
        let arrived = Instant::now();
        let outcome = self
            .engine
            .ask(|reply| Command::Step(StepCommand { step, arrived, span, reply }))
            .await
            .map_err(grpc_status)?;
        Ok(Response::new(step_reply(outcome, self.identity.answers_tokens())))
    }

    /// A span for the step under the caller's, whose context came with the call.
    fn span(&self, metadata: &MetadataMap, step: &Step) -> Span {
        let span = info_span!(
            "shard.step",
            rank = self.identity.rank,
            stage = self.identity.stage(),
            step_id = step.id,
            sequences = step.sequences(),
            tokens = step.tokens()
        );
        // Without an exporter there is no trace to continue, which is no error.
        drop(span.set_parent(trireme_telemetry::extract(metadata)));
        span
    }
}

#[tonic::async_trait]
impl Shard for Service {
    async fn info(
        &self,
        _: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::InfoReply>, GrpcStatus> {
        let (identity, status) = (&self.identity, &self.engine.status);
        let phase = status.phase();
        Ok(Response::new(proto::InfoReply {
            state: phase.state.into(),
            failure: phase.failure,
            rank: identity.rank as u32,
            tp: identity.split.tp as u32,
            pp: identity.split.pp as u32,
            pid: std::process::id(),
            device: identity.device.clone(),
            dtype: identity.dtype.to_owned(),
            kv_dtype: identity.kv_dtype.to_owned(),
            model: phase.model.as_ref().map(|model| proto::ModelShape {
                vocab_size: model.vocab_size as u32,
                layers: model.layers as u32,
                heads: model.heads as u32,
                kv_heads: model.kv_heads as u32,
                head_dim: model.head_dim as u32,
                hidden_size: model.hidden_size as u32,
                max_position_embeddings: model.max_position_embeddings as u32,
            }),
            weight_bytes: phase.weight_bytes,
            kv_bytes_per_block: phase.kv_bytes_per_block,
            weight_bytes_loaded: status.bytes_loaded.load(Ordering::Relaxed),
            weight_bytes_total: status.bytes_total.load(Ordering::Relaxed),
            epoch: phase.epoch,
            checkpoint_fingerprint: phase.fingerprint,
        }))
    }

    async fn meeting_point(
        &self,
        _: Request<proto::MeetingPointRequest>,
    ) -> Result<Response<proto::MeetingPointReply>, GrpcStatus> {
        let identity = self.identity.clone();
        // Loads a library and opens a socket.
        let point = tokio::task::spawn_blocking(move || meeting_point::make(&identity));
        let point = point.await.map_err(|error| GrpcStatus::internal(error.to_string()))?;
        let (nccl_unique_ids, problem) = match point {
            Ok(ids) => (ids, String::new()),
            Err(problem) => (Vec::new(), problem),
        };
        Ok(Response::new(proto::MeetingPointReply { nccl_unique_ids, problem }))
    }

    async fn configure(
        &self,
        request: Request<proto::ConfigureRequest>,
    ) -> Result<Response<proto::ConfigureReply>, GrpcStatus> {
        let request = request.into_inner();
        let proto::ConfigureRequest { shared_memory, nccl_unique_ids, .. } = &request;
        if shared_memory.is_empty() && self.identity.ranks() > 1 {
            return Err(GrpcStatus::invalid_argument("shared_memory: required for several ranks"));
        }
        if request.step_deadline_ms == 0 {
            return Err(GrpcStatus::invalid_argument(
                "step_deadline_ms: 0, but must be at least 1",
            ));
        }
        let vocabulary = request.vocabulary.as_ref().map(grammar::vocabulary).transpose();
        self.grammars.set_vocabulary(vocabulary.map_err(GrpcStatus::invalid_argument)?);
        let step_deadline = Duration::from_millis(request.step_deadline_ms.into());
        let configure = Configure {
            epoch: request.epoch,
            shared_memory: shared_memory.clone(),
            nccl_unique_ids: nccl_unique_ids.clone(),
            step_deadline,
        };
        let all_reduce_us = self.engine.configure(configure).await.map_err(grpc_status)?;
        Ok(Response::new(proto::ConfigureReply { all_reduce_us }))
    }

    async fn warmup(
        &self,
        request: Request<proto::WarmupRequest>,
    ) -> Result<Response<proto::WarmupReply>, GrpcStatus> {
        let request = request.into_inner();
        let epoch = request.epoch;
        let plan = WarmupPlan {
            max_batch_tokens: request.max_batch_tokens as usize,
            max_sequences: request.max_sequences as usize,
            max_model_len: request.max_model_len as usize,
            num_blocks: request.num_blocks as usize,
        };
        let memory = self
            .engine
            .ask(|reply| Command::Warmup { epoch, plan, reply })
            .await
            .map_err(grpc_status)?;
        Ok(Response::new(warmup_reply(&memory)))
    }

    async fn compile_grammar(
        &self,
        request: Request<proto::CompileGrammarRequest>,
    ) -> Result<Response<proto::CompileGrammarReply>, GrpcStatus> {
        let invalid = |error: String| GrpcStatus::invalid_argument(error);
        let wire =
            request.into_inner().grammar.ok_or_else(|| invalid("grammar: required".into()))?;
        let grammar = sampler::grammar(&wire).map_err(|error| invalid(error.to_string()))?;
        let spent = self.grammars.clone().prepare(grammar).await;
        let spent = spent.map_err(|error| invalid(error.to_string()))?;
        Ok(Response::new(proto::CompileGrammarReply { compile_us: micros(spent) }))
    }

    async fn prefill(
        &self,
        request: Request<proto::PrefillRequest>,
    ) -> Result<Response<proto::StepReply>, GrpcStatus> {
        let (metadata, _, request) = request.into_parts();
        self.step(metadata, request.try_into()).await
    }

    async fn decode(
        &self,
        request: Request<proto::DecodeRequest>,
    ) -> Result<Response<proto::StepReply>, GrpcStatus> {
        let (metadata, _, request) = request.into_parts();
        self.step(metadata, request.try_into()).await
    }

    async fn reset(
        &self,
        request: Request<proto::ResetRequest>,
    ) -> Result<Response<proto::ResetReply>, GrpcStatus> {
        self.engine.reset(request.into_inner().epoch).await.map_err(grpc_status)?;
        Ok(Response::new(proto::ResetReply {}))
    }
}

/// The one map from engine errors to gRPC.
fn grpc_status(error: EngineError) -> GrpcStatus {
    let text = error.to_string();
    match error {
        EngineError::Busy => GrpcStatus::resource_exhausted(text),
        EngineError::Stopped => GrpcStatus::unavailable(text),
        EngineError::State { .. } | EngineError::Epoch { .. } | EngineError::Order { .. } => {
            GrpcStatus::failed_precondition(text)
        }
        EngineError::Refused(_) => GrpcStatus::invalid_argument(text),
        EngineError::Lost(_) => GrpcStatus::aborted(text),
    }
}

fn warmup_reply(memory: &MemoryPlan) -> proto::WarmupReply {
    let MemoryPlan { num_blocks, weight_bytes, workspace_bytes, kv_bytes } = *memory;
    let total_bytes = weight_bytes + workspace_bytes + kv_bytes;
    let memory = proto::MemoryPlan { total_bytes, weight_bytes, workspace_bytes, kv_bytes };
    proto::WarmupReply { num_blocks, memory: Some(memory) }
}

fn step_reply(outcome: StepOutcome, answers_tokens: bool) -> proto::StepReply {
    let StepOutcome { step_id, mut tokens, mut prompts, errors, timings } = outcome;
    if !answers_tokens {
        tokens.clear();
        prompts.clear();
    }
    let error = |error: SequenceError| proto::SequenceError {
        sequence: error.sequence,
        message: error.message,
        grammar: error.grammar,
    };
    proto::StepReply {
        step_id,
        tokens: tokens.into_iter().map(token_out).collect(),
        errors: errors.into_iter().map(error).collect(),
        timings: Some(self::timings(&timings)),
        prompts: prompts.into_iter().map(prompt_scores).collect(),
    }
}

fn token_out(sampled: StepToken) -> proto::TokenOut {
    let top = |(token, logprob)| proto::TopLogprob { token, logprob };
    proto::TokenOut {
        sequence: sampled.sequence,
        token: sampled.token,
        logprob: sampled.logprob,
        top: sampled.top.into_iter().map(top).collect(),
    }
}

fn prompt_scores(prompt: PromptScores) -> proto::PromptScores {
    let PromptScores { sequence, start, scores } = prompt;
    let top = || scores.iter().flat_map(|score| &score.top);
    proto::PromptScores {
        sequence,
        start: start as u32,
        logprobs: scores.iter().map(|score| score.logprob).collect(),
        ranks: scores.iter().map(|score| score.rank).collect(),
        top_tokens: top().map(|(token, _)| *token).collect(),
        top_logprobs: top().map(|(_, logprob)| *logprob).collect(),
    }
}

fn timings(timings: &Timings) -> proto::Timings {
    proto::Timings {
        wait_us: micros(timings.wait),
        forward_us: micros(timings.forward),
        collective_us: micros(timings.collective),
        sample_us: micros(timings.sample),
        grammar_us: micros(timings.grammar),
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
