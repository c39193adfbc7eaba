//! The loop, and its handle. It is the sole owner of the scheduler and of every running request:
//! take commands, schedule, send steps, apply results in order, send events.

mod active;
mod engine_loop;
mod events;
mod lifecycle;
mod link;
mod scored_prompt;
mod sent_step;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::{
    api::{Constraint, Readiness},
    detokenizer::TextDecoder,
    error::RouterError,
    metrics,
    shard_group::{GrammarRanks, GroupError, GroupInfo, GroupSettings},
    validation::ValidRequest,
};
use engine_loop::EngineLoop;
pub use events::EventStream;

/// Resets on their way to the loop; one more waits.
const RESETS_WAITING: usize = 4;

/// What the loop runs with.
#[derive(Clone, Debug)]
pub struct DispatcherSettings {
    pub group: GroupSettings,
    /// Sequences in the queue, and commands on their way to the loop.
    pub max_waiting: usize,
    /// Tokens that a client may fall behind; bounds the memory of a request that nobody reads.
    pub lag_tokens: usize,
    pub prefix_cache: bool,
    pub drain_deadline: Duration,
    /// Tells `EndOfSequence` from a stop id that a client gave.
    pub eos_token_ids: Vec<u32>,
}

/// A request on its way into the loop.
struct Submission {
    request: ValidRequest,
    span: Span,
    /// Places for what the client has not read yet.
    places: usize,
    /// The events themselves, so that a caller who leaves before reading the answer cancels too.
    admitted: oneshot::Sender<Result<EventStream, RouterError>>,
}

/// Told when the prefix cache is empty.
type Reset = oneshot::Sender<Result<(), RouterError>>;

/// The loop's handle.
#[derive(Clone)]
pub struct Dispatcher {
    submissions: mpsc::Sender<Submission>,
    resets: mpsc::Sender<Reset>,
    readiness: watch::Receiver<Readiness>,
    engine: watch::Receiver<Option<GroupInfo>>,
    grammar_ranks: watch::Receiver<Option<GrammarRanks>>,
    max_waiting: usize,
    lag_tokens: usize,
}

/// Ends when the drain that `shutdown` starts is over, or when the shards can never serve.
pub type DispatcherTask = JoinHandle<Result<(), GroupError>>;

impl Dispatcher {
    /// `decoder`: `None` for a model without a tokenizer, whose answers are ids without text.
    pub fn start(
        settings: DispatcherSettings,
        decoder: Option<Arc<TextDecoder>>,
        shutdown: CancellationToken,
    ) -> (Self, DispatcherTask) {
        let (submissions, inbox) = mpsc::channel(settings.max_waiting.max(1));
        // Not bounded by itself, but each admitted request puts in at most one id.
        let (cancels, cancelled) = mpsc::unbounded_channel();
        let (resets, resetting) = mpsc::channel(RESETS_WAITING);
        let starting = Readiness::Starting("connecting to the shards".to_owned());
        let (readiness_sender, readiness) = watch::channel(starting);
        let (engine_sender, engine) = watch::channel(None);
        let (ranks_sender, grammar_ranks) = watch::channel(None);
        let (max_waiting, lag_tokens) = (settings.max_waiting, settings.lag_tokens);
        let ends = engine_loop::Ends {
            submissions: inbox,
            cancels: cancelled,
            canceller: cancels,
            resets: resetting,
            readiness: readiness_sender,
            engine: engine_sender,
            grammar_ranks: ranks_sender,
            shutdown,
        };
        let task = tokio::spawn(EngineLoop::new(settings, decoder, ends).run());
        let handle =
            Self { submissions, resets, readiness, engine, grammar_ranks, max_waiting, lag_tokens };
        (handle, task)
    }

    /// Puts a request into the queue. The error comes before any event: the queue is full, the
    /// sequence can never fit, or the server is not serving.
    pub async fn submit(
        &self,
        request: ValidRequest,
        span: Span,
    ) -> Result<EventStream, RouterError> {
        // One place is kept for the event that ends the answer.
        let places = (request.max_new_tokens as usize).min(self.lag_tokens) + 1;
        let (admitted, admission) = oneshot::channel();
        let submission = Submission { request, span, places, admitted };
        self.submissions.try_send(submission).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => overloaded(self.max_waiting),
            mpsc::error::TrySendError::Closed(_) => RouterError::ShuttingDown,
        })?;
        admission.await.map_err(|_| RouterError::ShuttingDown)?
    }

    /// Forgets the cached prefixes; what runs keeps its own.
    pub async fn reset_prefix_cache(&self) -> Result<(), RouterError> {
        let (reset, done) = oneshot::channel();
        self.resets.send(reset).await.map_err(|_| RouterError::ShuttingDown)?;
        done.await.map_err(|_| RouterError::ShuttingDown)?
    }

    /// Has the shards compile a constraint's grammar ahead of its first step. Without shards, or
    /// with some that cannot be asked, the step will.
    ///
    /// # Errors
    /// The shards will not have it.
    pub async fn compile(&self, constraint: &Constraint) -> Result<(), RouterError> {
        let ranks = self.grammar_ranks.borrow().clone();
        let Some(ranks) = ranks else { return Ok(()) };
        let field = constraint.field;
        ranks
            .compile(&constraint.grammar)
            .await
            .map_err(|why| RouterError::Invalid { field, message: format!("{field}: {why}") })
    }

    pub fn readiness(&self) -> Readiness {
        self.readiness.borrow().clone()
    }

    /// Changes of readiness, for health services.
    pub fn watch_readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.clone()
    }

    /// What the shards agreed on last; `None` before they served for the first time.
    pub fn engine(&self) -> Option<GroupInfo> {
        self.engine.borrow().clone()
    }
}

/// A full queue empties at the speed of answers; a second is the least that helps.
fn overloaded(limit: usize) -> RouterError {
    metrics::refused();
    RouterError::Overloaded { limit, retry_after_s: 1 }
}
