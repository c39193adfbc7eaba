//! The public gRPC API, `trireme.generate.v1`: wire to [`crate::api`] and back, nothing else.

mod deadline;
mod status;
#[cfg(test)]
mod tests;
mod wire;

use std::{pin::Pin, sync::Arc};

use futures::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status, metadata::MetadataMap};
use tracing::{Instrument, Span};
use trireme_proto::generate::v1::{self as proto, generation_server};

use deadline::Deadline;

use crate::{
    api::{GenerateEvent, GenerateRequest, Generation, Generator},
    config::ApiKey,
    error::RouterError,
};

/// Where the servers listen, as bound.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    pub http: String,
    pub grpc: String,
}

/// The service over any generator.
#[derive(Clone)]
pub struct GenerationService {
    generator: Arc<dyn Generator>,
    addresses: Addresses,
    /// `None`: open, as on the control socket.
    api_key: Option<ApiKey>,
}

type Events = Pin<Box<dyn Stream<Item = Result<proto::GenerateEvent, Status>> + Send>>;

impl GenerationService {
    pub fn new(
        generator: Arc<dyn Generator>,
        addresses: Addresses,
        api_key: Option<ApiKey>,
    ) -> Self {
        Self { generator, addresses, api_key }
    }

    /// `authorization: Bearer KEY`, as over HTTP.
    fn authorize(&self, metadata: &MetadataMap) -> Result<(), RouterError> {
        let Some(key) = &self.api_key else { return Ok(()) };
        let given = metadata.get("authorization").map(|value| value.as_bytes());
        let given = given.and_then(|value| {
            let (scheme, key) = value.split_at_checked(b"Bearer ".len())?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
        });
        match given.is_some_and(|given| key.matches(given)) {
            true => Ok(()),
            false => Err(RouterError::Unauthorized),
        }
    }

    /// The request's span, below the caller's if it sent a trace context.
    async fn start(
        &self,
        request: Request<Result<GenerateRequest, RouterError>>,
    ) -> Result<(Generation, Span), RouterError> {
        self.authorize(request.metadata())?;
        let span = tracing::info_span!("grpc", rpc.system = "grpc");
        trireme_telemetry::set_parent(&span, trireme_telemetry::extract(request.metadata()));
        let request = request.into_inner()?;
        let generation = self.generator.generate(request).instrument(span.clone()).await?;
        Ok((generation, span))
    }

    fn generation(
        &self,
        request: Request<proto::GenerateRequest>,
    ) -> Request<Result<GenerateRequest, RouterError>> {
        let served = self.generator.model().name;
        request.map(|request| wire::request(request, &served))
    }

    /// The whole answer.
    async fn answer(
        &self,
        request: Request<proto::GenerateRequest>,
    ) -> Result<Response<proto::GenerateReply>, Status> {
        let (mut generation, _span) = self.start(self.generation(request)).await?;
        let mut tokens = Vec::new();
        while let Some(event) = generation.events.next().await {
            match event {
                // Not asked for.
                GenerateEvent::Prompt(_) => {}
                GenerateEvent::Token(token) => tokens.push(wire::token(token)),
                GenerateEvent::Finished(finished) => {
                    return Ok(Response::new(proto::GenerateReply {
                        request_id: generation.request_id,
                        text: finished.text,
                        tokens,
                        finish_reason: wire::reason(finished.reason).into(),
                        usage: Some(wire::usage(finished.usage)),
                    }));
                }
                GenerateEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Status::internal("the answer ended without an event that ends it"))
    }
}

impl GenerationService {
    /// The prompt's scores; dropping it cancels the work.
    async fn scores(
        &self,
        request: Request<proto::ScoreRequest>,
    ) -> Result<Response<proto::ScoreReply>, Status> {
        let served = self.generator.model().name;
        let request = request.map(|request| wire::scoring_request(request, &served));
        let (mut generation, _span) = self.start(request).await?;
        let mut tokens = Vec::new();
        while let Some(event) = generation.events.next().await {
            match event {
                GenerateEvent::Prompt(prompt) => {
                    tokens = prompt.into_iter().map(wire::scored_token).collect();
                }
                GenerateEvent::Token(_) => {}
                GenerateEvent::Finished(finished) => {
                    return Ok(Response::new(proto::ScoreReply {
                        request_id: generation.request_id,
                        tokens,
                        usage: Some(wire::usage(finished.usage)),
                    }));
                }
                GenerateEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(Status::internal("the scores ended without an event that ends them"))
    }
}

#[tonic::async_trait]
impl generation_server::Generation for GenerationService {
    type GenerateStreamStream = Events;

    async fn generate(
        &self,
        request: Request<proto::GenerateRequest>,
    ) -> Result<Response<proto::GenerateReply>, Status> {
        let deadline = Deadline::of(request.metadata());
        deadline.cut(self.answer(request)).await?
    }

    async fn generate_stream(
        &self,
        request: Request<proto::GenerateRequest>,
    ) -> Result<Response<Events>, Status> {
        let deadline = Deadline::of(request.metadata());
        let (generation, span) = deadline.cut(self.start(self.generation(request))).await??;
        let request_id: Arc<str> = generation.request_id.into();
        // The span lives as long as the stream; a client that leaves drops both.
        let state = Some((generation.events, span));
        let events = stream::unfold(state, move |state| {
            let request_id = request_id.clone();
            async move {
                let (mut events, span) = state?;
                match deadline.cut(events.next()).await {
                    Ok(Some(event)) => {
                        let event = wire::event(event, &request_id).map_err(Status::from);
                        Some((event, Some((events, span))))
                    }
                    Ok(None) => None,
                    Err(expired) => Some((Err(expired), None)),
                }
            }
        });
        Ok(Response::new(events.boxed()))
    }

    async fn score(
        &self,
        request: Request<proto::ScoreRequest>,
    ) -> Result<Response<proto::ScoreReply>, Status> {
        let deadline = Deadline::of(request.metadata());
        deadline.cut(self.scores(request)).await?
    }

    async fn tokenize(
        &self,
        request: Request<proto::TokenizeRequest>,
    ) -> Result<Response<proto::TokenizeReply>, Status> {
        self.authorize(request.metadata())?;
        let request = request.into_inner();
        let ids = self.generator.encode(request.text, request.add_special_tokens).await?;
        Ok(Response::new(proto::TokenizeReply { ids }))
    }

    async fn info(
        &self,
        request: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::InfoReply>, Status> {
        self.authorize(request.metadata())?;
        let model = self.generator.model();
        let tokens = self.generator.tokenizer_info().unwrap_or_default();
        let token = |name: &str| tokens[name].as_str().unwrap_or_default().to_owned();
        Ok(Response::new(proto::InfoReply {
            model: model.name,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tp: model.tp,
            pp: model.pp,
            dtype: model.dtype,
            max_model_len: model.max_model_len,
            max_sequences: model.max_sequences,
            max_batch_tokens: model.max_batch_tokens,
            kv_blocks: model.kv_blocks,
            kv_block_tokens: model.kv_block_tokens,
            http_address: self.addresses.http.clone(),
            grpc_address: self.addresses.grpc.clone(),
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
        }))
    }

    /// Open to all, as health checks are.
    async fn health(
        &self,
        _request: Request<proto::HealthRequest>,
    ) -> Result<Response<proto::HealthReply>, Status> {
        let ready = self.generator.readiness().is_ready();
        Ok(Response::new(proto::HealthReply { live: true, ready }))
    }
}
