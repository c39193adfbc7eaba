//! The one thread that owns device, model, caches, sequences and groups. It takes commands from a
//! bounded queue and answers each; a failure marks the shard failed until a reset.

mod step_order;

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tracing::{Span, error, info};
use trireme_collectives::CollectiveError;
use trireme_proto::shard::v1::ShardState;

use self::step_order::{Offer, StepOrder};
use crate::{
    device::Device,
    runner::{MemoryPlan, RunError, Runner, StepOutcome, WarmupPlan},
    self_test::{self, SelfTestError},
    status::Status,
    step::Step,
    weights::Place,
};

/// Commands waiting for the engine: more than the router's steps in flight, and a Reset behind them.
const QUEUE: usize = 64;
/// How long a new epoch waits for all ranks to join.
const JOIN_DEADLINE: Duration = Duration::from_secs(60);

/// How often the engine looks whether the step in flight is over, while it waits for the next.
const LOOK_INTERVAL: Duration = Duration::from_micros(20);

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the shard has {QUEUE} commands waiting already")]
    Busy,
    #[error("the shard is stopping")]
    Stopped,
    #[error("{command} needs state {needed}, but the shard is {found}")]
    State { command: &'static str, needed: &'static str, found: String },
    #[error("epoch: {given}, but this shard is in epoch {current}")]
    Epoch { given: u64, current: u64 },
    #[error("step_id: {given} {problem}; next is {next}")]
    Order { given: u64, next: u64, problem: &'static str },
    #[error("the step was refused: {0}")]
    Refused(RunError),
    #[error("the group is lost: {0}")]
    Lost(String),
}

/// How an epoch's groups are joined.
#[derive(Clone, Debug)]
pub struct Configure {
    pub epoch: u64,
    /// Name of the shared-memory object; not used by a single rank.
    pub shared_memory: String,
    /// Of the groups that GPUs join; none: they exchange through shared memory.
    pub nccl_unique_ids: Vec<Vec<u8>>,
    pub step_deadline: Duration,
}

pub struct StepCommand {
    pub step: Step,
    pub arrived: Instant,
    pub span: Span,
    pub reply: Reply<StepOutcome>,
}

/// A step in flight, whose answer is waited for.
struct Waiting {
    wait: Duration,
    span: Span,
    reply: Reply<StepOutcome>,
}

impl Waiting {
    fn answer(self, result: Result<StepOutcome, EngineError>) {
        let result = result.map(|mut outcome| {
            outcome.timings.wait = self.wait;
            outcome
        });
        answer(self.reply, result);
    }
}

pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

pub enum Command {
    /// Answers the mean latency of an all-reduce, in µs.
    Configure(Configure, Reply<f64>),
    Warmup {
        epoch: u64,
        plan: WarmupPlan,
        reply: Reply<MemoryPlan>,
    },
    Step(StepCommand),
    Reset {
        epoch: u64,
        reply: Reply<()>,
    },
    Stop,
}

/// The sending end of the engine's queue.
#[derive(Clone)]
pub struct Handle {
    commands: SyncSender<Command>,
    pub status: Arc<Status>,
}

impl Handle {
    pub fn new(status: Arc<Status>) -> (Self, Receiver<Command>) {
        let (commands, receiver) = sync_channel(QUEUE);
        (Self { commands, status }, receiver)
    }

    /// Queues a command, or refuses at once.
    pub fn send(&self, command: Command) -> Result<(), EngineError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => EngineError::Busy,
            TrySendError::Disconnected(_) => EngineError::Stopped,
        })
    }

    /// Queues a command and waits for its answer.
    pub async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.unwrap_or(Err(EngineError::Stopped))
    }

    /// Starts an epoch. One that was never reset ends here, even where a step of it is stuck.
    pub async fn configure(&self, configure: Configure) -> Result<f64, EngineError> {
        let phase = self.status.phase();
        if let Some(abort) = phase.abort.filter(|_| configure.epoch > phase.epoch) {
            abort.abort();
        }
        self.ask(|reply| Command::Configure(configure, reply)).await
    }

    /// Ends the epoch, even where a step is stuck waiting for another rank.
    pub async fn reset(&self, epoch: u64) -> Result<(), EngineError> {
        let phase = self.status.phase();
        if epoch < phase.epoch {
            return Err(EngineError::Epoch { given: epoch, current: phase.epoch });
        }
        if let Some(abort) = phase.abort {
            abort.abort();
        }
        self.ask(|reply| Command::Reset { epoch, reply }).await
    }
}

/// Joins the groups of an epoch within a deadline: how is the device's business.
pub type Join<D> = Box<
    dyn Fn(&Configure, &Place, Duration) -> Result<<D as Device>::World, CollectiveError> + Send,
>;

pub struct Engine<D: Device> {
    runner: Runner<D>,
    join: Join<D>,
    status: Arc<Status>,
    order: StepOrder<StepCommand>,
    /// For the steps in flight, the oldest first.
    waiting: VecDeque<Waiting>,
}

impl<D: Device> Engine<D> {
    /// Takes a loaded runner; the shard is now waiting for Configure.
    pub fn new(runner: Runner<D>, join: Join<D>, status: Arc<Status>) -> Self {
        let order = StepOrder::new(runner.place.split.pp);
        status.change(|phase| {
            phase.state = ShardState::Loaded;
            phase.kv_bytes_per_block = runner.kv_bytes_per_block();
        });
        Self { runner, join, status, order, waiting: VecDeque::new() }
    }

    /// Works until [`Command::Stop`], or until nobody can send any more.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let command = if !self.waiting.is_empty() {
                commands.recv_timeout(LOOK_INTERVAL)
            } else if self.order.holds_none() {
                commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                commands.recv_timeout(self.status.phase().step_deadline)
            };
            match command {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) if !self.waiting.is_empty() => {
                    if let Ok(true) = self.guard(|engine| Ok(engine.runner.is_over())) {
                        self.finish_oldest();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let next = self.order.next();
                    self.lose(format!("step {next} never came, though later ones did"));
                }
            }
        }
    }

    fn handle(&mut self, command: Command) {
        if !matches!(command, Command::Step(_)) {
            self.finish_all();
        }
        match command {
            Command::Configure(configure, reply) => {
                let result = self.guard(|engine| engine.configure(&configure));
                answer(reply, result);
            }
            Command::Warmup { epoch, plan, reply } => {
                let result = self.guard(|engine| engine.warmup(epoch, &plan));
                answer(reply, result);
            }
            Command::Step(command) => self.take_step(command),
            Command::Reset { epoch, reply } => {
                let result = self.guard(|engine| engine.reset(epoch));
                answer(reply, result);
            }
            Command::Stop => {}
        }
    }

    /// Does one piece of work; a panic or a lost group fails the shard, other errors do not.
    fn guard<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        // What a panic may leave half-changed (groups, caches, sequences) is dropped by the reset
        // that alone leads out of the failed state; weights are never changed.
        let result = catch_unwind(AssertUnwindSafe(|| work(self)))
            .unwrap_or_else(|panic| Err(EngineError::Lost(panic_message(&*panic))));
        if let Err(EngineError::Lost(cause)) = &result {
            self.lose(cause.clone());
        }
        result
    }

    fn lose(&mut self, cause: String) {
        let phase = self.status.phase();
        if phase.state != ShardState::Failed {
            error!(epoch = phase.epoch, cause, "the group is lost");
        }
        if let Some(abort) = phase.abort {
            abort.abort();
        }
        for waiting in self.waiting.drain(..) {
            answer(waiting.reply, Err(EngineError::Lost(cause.clone())));
        }
        for held in self.order.drain() {
            answer(held.reply, Err(EngineError::Lost(cause.clone())));
        }
        self.status.fail(cause);
    }

    fn configure(&mut self, configure: &Configure) -> Result<f64, EngineError> {
        let current = self.status.phase().epoch;
        if configure.epoch <= current {
            return Err(EngineError::Epoch { given: configure.epoch, current });
        }
        self.clear(configure.epoch);
        let lost = |error: CollectiveError| EngineError::Lost(error.to_string());
        let world = (self.join)(configure, &self.runner.place, JOIN_DEADLINE).map_err(lost)?;
        let abort = D::abort_handle(&world);
        self.status.change(|phase| {
            phase.step_deadline = configure.step_deadline;
            phase.abort = Some(abort);
        });
        self.runner.device.join(world).map_err(lost)?;
        self.runner.device.set_deadline(configure.step_deadline).map_err(lost)?;
        let Runner { device, place, model, .. } = &mut self.runner;
        let latency_us =
            self_test::run(device, place, model.hidden_size).map_err(|error| match error {
                SelfTestError::Collective(error) => lost(error),
                wrong @ SelfTestError::Wrong { .. } => EngineError::Lost(wrong.to_string()),
            })?;
        self.status.change(|phase| phase.state = ShardState::Configured);
        info!(epoch = configure.epoch, all_reduce_us = latency_us, "group proven");
        Ok(latency_us)
    }

    fn warmup(&mut self, epoch: u64, plan: &WarmupPlan) -> Result<MemoryPlan, EngineError> {
        self.check("Warmup", epoch, &[ShardState::Configured, ShardState::Serving])?;
        let memory = self.runner.warmup(plan).map_err(run_error)?;
        if plan.num_blocks > 0 {
            self.order = StepOrder::new(self.runner.place.split.pp);
            self.status.change(|phase| phase.state = ShardState::Serving);
        }
        info!(epoch, ?plan, ?memory, "warm-up");
        Ok(memory)
    }

    fn reset(&mut self, epoch: u64) -> Result<(), EngineError> {
        let current = self.status.phase().epoch;
        // A later epoch than this rank has heard of ends too: its Configure may still be on the way.
        if epoch < current {
            return Err(EngineError::Epoch { given: epoch, current });
        }
        self.clear(epoch);
        info!(epoch, "reset");
        Ok(())
    }

    /// Back to loaded weights and nothing else, at the door of `epoch`.
    fn clear(&mut self, epoch: u64) {
        for held in self.order.drain() {
            answer(held.reply, Err(EngineError::Lost("the epoch was reset".into())));
        }
        self.order = StepOrder::new(self.runner.place.split.pp);
        self.runner.reset();
        self.status.step_ends();
        self.status.change(|phase| {
            phase.state = ShardState::Loaded;
            phase.failure.clear();
            phase.epoch = epoch;
            phase.abort = None;
        });
    }

    fn check(
        &self,
        command: &'static str,
        epoch: u64,
        states: &[ShardState],
    ) -> Result<(), EngineError> {
        let phase = self.status.phase();
        if phase.state == ShardState::Failed {
            return Err(EngineError::Lost(phase.failure));
        }
        if epoch != phase.epoch {
            error!(command, given = epoch, current = phase.epoch, "foreign epoch");
            return Err(EngineError::Epoch { given: epoch, current: phase.epoch });
        }
        if !states.contains(&phase.state) {
            let needed = states.first().map_or("", ShardState::as_str_name);
            let found = phase.state.as_str_name().to_owned();
            return Err(EngineError::State { command, needed, found });
        }
        Ok(())
    }

    /// Runs the step if it is next, and those that were waiting for it; holds it if it is early.
    fn take_step(&mut self, command: StepCommand) {
        if let Err(error) = self.check("Step", command.step.epoch, &[ShardState::Serving]) {
            return answer(command.reply, Err(error));
        }
        let mut next = match self.order.offer(command.step.id, command) {
            Offer::Run(command) => Some(command),
            Offer::Held => None,
            Offer::Refused(command, error) => {
                error!(%error, "step out of order");
                return answer(command.reply, Err(error));
            }
        };
        while let Some(command) = next {
            self.run_step(command);
            next = self.order.take_next();
        }
    }

    /// Begins a step, then finishes the one before it: the device has work while this one's tokens go
    /// their way.
    fn run_step(&mut self, command: StepCommand) {
        let StepCommand { step, arrived, span, reply } = command;
        if !self.runner.can_overlap(&step) {
            self.finish_all();
        }
        let waiting = Waiting { wait: arrived.elapsed(), span, reply };
        if self.waiting.is_empty() {
            self.status.step_starts();
        }
        let begun = waiting
            .span
            .in_scope(|| self.guard(|engine| engine.runner.begin(step).map_err(run_error)));
        match begun.transpose() {
            None => self.waiting.push_back(waiting),
            Some(result) => {
                self.finish_all();
                self.status.step_ends();
                waiting.answer(result);
            }
        }
        while self.waiting.len() > 1 {
            self.finish_oldest();
        }
    }

    fn finish_all(&mut self) {
        while !self.waiting.is_empty() {
            self.finish_oldest();
        }
    }

    fn finish_oldest(&mut self) {
        let result = self.guard(|engine| Ok(engine.runner.finish()));
        // Where the group is lost, all have been answered.
        let Some(waiting) = self.waiting.pop_front() else { return };
        self.status.step_ends();
        if !self.waiting.is_empty() {
            self.status.step_starts();
        }
        let span = waiting.span.clone();
        span.in_scope(|| waiting.answer(result));
    }
}

fn run_error(error: RunError) -> EngineError {
    match error {
        RunError::Collective(error) => EngineError::Lost(error.to_string()),
        refused => EngineError::Refused(refused),
    }
}

/// The caller may have gone; then nobody needs the answer.
fn answer<T>(reply: Reply<T>, result: Result<T, EngineError>) {
    drop(reply.send(result));
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    format!("the engine panicked: {}", text.unwrap_or_else(|| "no message".into()))
}

#[cfg(test)]
mod tests;
