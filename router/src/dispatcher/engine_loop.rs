//! One turn after the other: see [`super`].

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use trireme_proto::shard::v1 as proto;
use trireme_scheduler::{
    Event, FailReason, FinishReason, Limits, NewSequence, Rejection, Scheduler, SequenceId,
    StepOutput,
};

use super::{
    DispatcherSettings, EventStream, Reset, Submission,
    active::{ActiveRequest, Progress},
    lifecycle::Lifecycle,
    link::{Link, LinkEvent},
    overloaded,
    sent_step::SentStep,
};
use crate::{
    api::{self, Readiness},
    detokenizer::TextDecoder,
    error::RouterError,
    metrics,
    shard_group::{
        BLOCK_TOKENS, GrammarRanks, GroupError, GroupInfo, ShardGroup, StepRequest, StepResult,
    },
    validation::ValidRequest,
};

/// Submissions taken in one turn, so that those that arrive together share a step and results
/// still get their turn.
const SUBMISSIONS_A_TURN: usize = 64;

/// The loop's ends of the handle's channels.
pub struct Ends {
    pub submissions: mpsc::Receiver<Submission>,
    pub cancels: mpsc::UnboundedReceiver<SequenceId>,
    /// The other end of `cancels`, for each answer's events.
    pub canceller: mpsc::UnboundedSender<SequenceId>,
    pub resets: mpsc::Receiver<Reset>,
    pub readiness: watch::Sender<Readiness>,
    pub engine: watch::Sender<Option<GroupInfo>>,
    pub grammar_ranks: watch::Sender<Option<GrammarRanks>>,
    pub shutdown: CancellationToken,
}

pub struct EngineLoop {
    settings: DispatcherSettings,
    decoder: Option<Arc<TextDecoder>>,
    ends: Ends,
    link: Link,
    /// `None` before the first group, whose size it depends on.
    scheduler: Option<Scheduler>,
    active: HashMap<SequenceId, ActiveRequest>,
    next_id: SequenceId,
    epoch: u64,
    /// In flight, oldest first.
    steps: VecDeque<SentStep>,
    /// While draining: when what still runs is failed.
    drain_until: Option<Instant>,
}

enum Turn {
    Submit(Submission),
    Cancel(SequenceId),
    Reset(Reset),
    Link(Result<LinkEvent, GroupError>),
    Drain,
    DrainExpired,
}

impl EngineLoop {
    pub fn new(
        settings: DispatcherSettings,
        decoder: Option<Arc<TextDecoder>>,
        ends: Ends,
    ) -> Self {
        Self {
            link: Link::first(settings.group.clone(), ends.readiness.clone()),
            settings,
            decoder,
            ends,
            scheduler: None,
            active: HashMap::new(),
            next_id: 1,
            epoch: 0,
            steps: VecDeque::new(),
            drain_until: None,
        }
    }

    /// Until a drain is over or the shards can never serve.
    pub async fn run(mut self) -> Result<(), GroupError> {
        loop {
            if self.drain_until.is_some() && self.active.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.send_steps() {
                self.lose_group(error);
            }
            self.tell_metrics();
            match self.wait().await {
                Turn::Submit(submission) => self.submit_waiting(submission),
                Turn::Cancel(id) => self.cancel(id),
                Turn::Reset(reset) => self.reset_prefix_cache(reset),
                Turn::Link(Ok(LinkEvent::Up(group))) => self.serve(group),
                Turn::Link(Ok(LinkEvent::Step(result))) => self.apply(result),
                Turn::Link(Err(error)) if error.is_fatal() => {
                    self.fail_all(|| RouterError::ShardLost);
                    return Err(error);
                }
                Turn::Link(Err(error)) => self.lose_group(error),
                Turn::Drain => self.drain(),
                Turn::DrainExpired => {
                    tracing::warn!(
                        requests = self.active.len(),
                        "drain deadline; failing the rest"
                    );
                    self.fail_all(|| RouterError::ShuttingDown);
                }
            }
        }
    }

    async fn wait(&mut self) -> Turn {
        let drain_until = self.drain_until;
        let drain_expired = async {
            match drain_until {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(submission) = self.ends.submissions.recv() => Turn::Submit(submission),
            Some(id) = self.ends.cancels.recv() => Turn::Cancel(id),
            Some(reset) = self.ends.resets.recv() => Turn::Reset(reset),
            event = self.link.next() => Turn::Link(event),
            () = self.ends.shutdown.cancelled(), if drain_until.is_none() => Turn::Drain,
            () = drain_expired => Turn::DrainExpired,
        }
    }

    fn tell_metrics(&self) {
        if let Some(scheduler) = &self.scheduler {
            metrics::usage(&scheduler.usage());
        }
        metrics::ready(self.ends.readiness.borrow().is_ready());
    }

    // Commands.

    fn submit_waiting(&mut self, first: Submission) {
        let mut next = Some(first);
        for _ in 0..SUBMISSIONS_A_TURN {
            let Some(submission) = next else { return };
            self.submit(submission);
            next = self.ends.submissions.try_recv().ok();
        }
        if let Some(submission) = next {
            self.submit(submission);
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { request, span, places, admitted } = submission;
        let id = self.next_id;
        self.next_id += 1;
        if let Err(error) = self.add(id, &request) {
            // A caller who left does not hear it.
            let _ = admitted.send(Err(error));
            return;
        }
        let (deliveries, unread) = mpsc::channel(places);
        let lifecycle = Lifecycle::queued(span);
        let decoder = self.decoder.clone();
        let canceller = self.ends.canceller.clone();
        let events = EventStream::new(id, unread, decoder.clone(), canceller);
        self.active.insert(id, ActiveRequest::new(request, lifecycle, decoder, deliveries));
        // Dropped unread, by a caller who left meanwhile, the stream cancels the request.
        let _ = admitted.send(Ok(events));
    }

    fn reset_prefix_cache(&mut self, reset: Reset) {
        let outcome = match &mut self.scheduler {
            Some(scheduler) => {
                scheduler.reset_prefix_cache();
                Ok(())
            }
            None => Err(not_started()),
        };
        // A caller who left does not hear it.
        let _ = reset.send(outcome);
    }

    fn add(&mut self, id: SequenceId, request: &ValidRequest) -> Result<(), RouterError> {
        if self.drain_until.is_some() {
            return Err(RouterError::ShuttingDown);
        }
        let Some(scheduler) = &mut self.scheduler else {
            return Err(not_started());
        };
        let parameters = &request.parameters;
        let sequence = NewSequence {
            id,
            prompt: request.prompt_ids.to_vec(),
            max_new_tokens: request.max_new_tokens as usize,
            // The shards hold an early end back, but not that of an answer that its grammar completes.
            min_new_tokens: match parameters.constraint {
                None => parameters.min_new_tokens as usize,
                Some(_) => 0,
            },
            stop_token_ids: parameters.stop_token_ids.clone(),
            priority: parameters.priority,
            score_from: parameters.prompt_scoring.map(|scoring| scoring.start as usize),
        };
        scheduler.add(sequence).map_err(refusal)
    }

    fn cancel(&mut self, id: SequenceId) {
        if let Some(request) = self.forget(id) {
            request.cancelled();
        }
    }

    /// Out of the scheduler, wherever it is; the shards hear with the next step.
    fn forget(&mut self, id: SequenceId) -> Option<ActiveRequest> {
        let request = self.active.remove(&id)?;
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.cancel(id);
        }
        Some(request)
    }

    fn drain(&mut self) {
        tracing::info!(requests = self.active.len(), "draining");
        self.ends.readiness.send_replace(Readiness::Draining);
        self.drain_until = Some(Instant::now() + self.settings.drain_deadline);
    }

    fn fail_all(&mut self, error: impl Fn() -> RouterError) {
        let ids: Vec<SequenceId> = self.active.keys().copied().collect();
        for request in ids.into_iter().filter_map(|id| self.forget(id)).collect::<Vec<_>>() {
            request.fail(error());
        }
    }

    // The group.

    fn serve(&mut self, group: Box<ShardGroup>) {
        let info = group.info().clone();
        tracing::info!(
            epoch = info.epoch,
            kv_blocks = info.num_blocks,
            max_model_len = info.max_model_len,
            "serving"
        );
        self.epoch = info.epoch;
        let num_blocks = info.num_blocks as usize;
        let events = match &mut self.scheduler {
            Some(scheduler) => scheduler.lose_group(num_blocks),
            None => {
                self.scheduler = Some(Scheduler::new(self.limits(&info)));
                Vec::new()
            }
        };
        self.ends.grammar_ranks.send_replace(Some(group.grammar_ranks()));
        self.link = Link::Serving(group);
        self.ends.engine.send_replace(Some(info));
        if self.drain_until.is_none() {
            self.ends.readiness.send_replace(Readiness::Ready);
        }
        self.deliver(events, &HashMap::new(), &[]);
    }

    fn limits(&self, info: &GroupInfo) -> Limits {
        let group = &self.settings.group;
        Limits {
            num_blocks: info.num_blocks as usize,
            block_tokens: BLOCK_TOKENS as usize,
            max_batch_tokens: group.max_batch_tokens as usize,
            max_mixed_tokens: group.max_mixed_tokens as usize,
            max_sequences: group.max_sequences as usize,
            max_waiting: self.settings.max_waiting,
            max_model_len: info.max_model_len as usize,
            stages: group.pp as usize,
            max_steps_in_flight: group.steps_in_flight,
            prefix_cache: self.settings.prefix_cache,
        }
    }

    /// Fails what had state on the shards and starts over; what waits, waits on.
    fn lose_group(&mut self, error: GroupError) {
        tracing::error!(%error, epoch = self.epoch, "the shards are lost");
        metrics::group_lost();
        if self.drain_until.is_none() {
            self.ends.readiness.send_replace(Readiness::Lost(error.to_string()));
        }
        self.steps.clear();
        self.ends.grammar_ranks.send_replace(None);
        let settings = self.settings.group.clone();
        let next = |lost| Link::again(lost, settings, self.epoch, self.ends.readiness.clone());
        let stand_in = Link::Starting(Box::pin(std::future::pending()));
        self.link = match std::mem::replace(&mut self.link, stand_in) {
            Link::Serving(group) => next(Some(group)),
            Link::Starting(_) => next(None),
        };
        let Some(scheduler) = &mut self.scheduler else { return };
        let events = scheduler.lose_group(scheduler.limits().num_blocks);
        self.deliver(events, &HashMap::new(), &[]);
    }

    // Steps.

    /// Schedules and sends until nothing is left to do or enough is in flight.
    fn send_steps(&mut self) -> Result<(), GroupError> {
        loop {
            let (Link::Serving(group), Some(scheduler)) = (&mut self.link, &mut self.scheduler)
            else {
                return Ok(());
            };
            let plan = scheduler.schedule();
            let events = scheduler.poll_events();
            let sent = match plan {
                None => Ok(false),
                Some(plan) => {
                    let step = SentStep::new(&plan, &self.active);
                    let step_id = plan.step_id;
                    let active = &self.active;
                    let request = StepRequest::new(self.epoch, plan, |id| {
                        active.get(&id).map(ActiveRequest::sequence_parameters).unwrap_or_default()
                    });
                    let sent = group.submit(step_id, &request, &step.span);
                    self.steps.push_back(step);
                    sent.map(|()| true)
                }
            };
            self.deliver(events, &HashMap::new(), &[]);
            if !sent? {
                return Ok(());
            }
        }
    }

    fn apply(&mut self, result: StepResult) {
        let (Some(step), Some(scheduler)) = (self.steps.pop_front(), &mut self.scheduler) else {
            return;
        };
        metrics::step(metrics::Step {
            duration: result.duration,
            prefill_tokens: step.prefill_tokens,
            decode_sequences: step.decode_sequences,
            grammar_wait: Duration::from_micros(result.timings.grammar_us.into()),
        });
        step.record(&result);
        let output = StepOutput {
            step_id: result.step_id,
            tokens: result.tokens.iter().map(|out| (out.sequence, out.token)).collect(),
            failed: result.errors.iter().map(|error| error.sequence).collect(),
        };
        let events = match scheduler.apply(output) {
            Ok(events) => events,
            Err(error) => return self.lose_group(GroupError::Answer(error)),
        };
        for scores in result.prompts {
            if let Some(request) = self.active.get_mut(&scores.sequence) {
                request.scored(scores);
            }
        }
        let outputs = result.tokens.into_iter().map(|out| (out.sequence, out)).collect();
        self.deliver(events, &outputs, &result.errors);
    }

    /// Turns the scheduler's events into the clients' ones.
    fn deliver(
        &mut self,
        events: Vec<Event>,
        outputs: &HashMap<SequenceId, proto::TokenOut>,
        errors: &[proto::SequenceError],
    ) {
        let mut events = events.into_iter().peekable();
        while let Some(event) = events.next() {
            match event {
                Event::Started { id, cached_tokens } => self.started(id, cached_tokens),
                Event::Token { id, token } => {
                    let ends = match events.peek() {
                        Some(Event::Finished { id: ended, reason }) if *ended == id => {
                            Some(told(*reason))
                        }
                        _ => None,
                    };
                    let known = outputs.get(&id).filter(|out| out.token == token);
                    let bare = || proto::TokenOut { sequence: id, token, ..Default::default() };
                    self.token(id, &known.cloned().unwrap_or_else(bare), ends);
                }
                Event::Finished { id, reason } => {
                    if let Some(request) = self.active.remove(&id) {
                        request.finish(told(reason), &self.settings.eos_token_ids);
                    }
                }
                Event::Failed { id, reason } => {
                    if let Some(request) = self.active.remove(&id) {
                        let error = failure(id, reason, errors, &request);
                        request.fail(error);
                    }
                }
                Event::Preempted { .. } => metrics::preempted(),
            }
        }
    }

    fn started(&mut self, id: SequenceId, cached_tokens: usize) {
        if let Some(request) = self.active.get_mut(&id) {
            request.started(cached_tokens);
        }
    }

    fn token(&mut self, id: SequenceId, out: &proto::TokenOut, ends: Option<api::FinishReason>) {
        let Some(request) = self.active.get_mut(&id) else { return };
        match request.token(out, ends) {
            Progress::Running => {}
            Progress::StopString(stop) => {
                if let Some(request) = self.forget(id) {
                    request.finish_at_stop_string(stop);
                }
            }
            Progress::Abandoned(how) => {
                if let Some(request) = self.forget(id) {
                    request.fail_abandoned(how);
                }
            }
        }
    }
}

fn not_started() -> RouterError {
    RouterError::NotReady("the shards have not started yet".to_owned())
}

fn told(reason: FinishReason) -> api::FinishReason {
    match reason {
        FinishReason::Stop => api::FinishReason::Stop,
        FinishReason::Length => api::FinishReason::Length,
    }
}

fn refusal(rejection: Rejection) -> RouterError {
    match rejection {
        Rejection::QueueFull { limit } => overloaded(limit),
        Rejection::TooLong { .. } | Rejection::EmptyPrompt | Rejection::NeverFits { .. } => {
            RouterError::Invalid { field: "prompt", message: rejection.to_string() }
        }
        Rejection::Duplicate(_) => RouterError::Internal(rejection.into()),
    }
}

fn failure(
    id: SequenceId,
    reason: FailReason,
    errors: &[proto::SequenceError],
    request: &ActiveRequest,
) -> RouterError {
    match reason {
        FailReason::GroupLost => RouterError::ShardLost,
        FailReason::Sequence => {
            let told = errors.iter().find(|error| error.sequence == id);
            let message = told.map(|error| error.message.clone()).unwrap_or_default();
            match request.constrained_by().filter(|_| told.is_some_and(|error| error.grammar)) {
                Some(field) => {
                    RouterError::Invalid { field, message: format!("{field}: {message}") }
                }
                None => RouterError::Sequence(message),
            }
        }
    }
}
