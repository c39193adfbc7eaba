//! Keeps the processes of a service alive, and ends them in order.
//!
//! One task owns all state; processes and their watchers send it events. Shards start first, the
//! router when all of them answer. A process that dies is started again alone, within a budget; one
//! that hangs is killed first. A stop drains the router, then ends the shards.

mod child;
mod end_of_process;
mod load_progress;
mod restart_budget;
mod watcher;

#[cfg(test)]
mod tests;

use std::{fs, process::ExitStatus, time::Instant};

use rustix::process::Signal;
use tokio::sync::{mpsc, watch};
use trireme_proto::generate::v1::InfoReply;

use child::Child;
pub use child::Nursery;
use restart_budget::RestartBudget;
use watcher::Watcher;

use crate::{
    config::Supervision,
    topology::{ProcessSpec, Role},
};

#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("{role} could not be started: {detail}")]
    Spawn { role: Role, detail: String },
    #[error("{role} {end} before the service was ready; its log above says why")]
    Start { role: Role, end: String },
    #[error("not ready within --start-deadline-s {limit_s}: waiting for {missing}")]
    StartDeadline { limit_s: u64, missing: String },
    #[error("{role} {end}, and --restart-budget {limit} (restarts within ten minutes) is used up")]
    Budget { role: Role, end: String, limit: u32 },
    #[error("ended at once by signal {signal}; running requests were cut")]
    Killed { signal: i32 },
}

/// News of one life of one process.
#[derive(Debug)]
struct Event {
    role: Role,
    life: u64,
    happening: Happening,
}

#[derive(Debug)]
enum Happening {
    /// Its socket answers.
    Answers,
    /// The router serves: this is what, and where.
    Serves(Box<InfoReply>),
    Hung(String),
    Ended(ExitStatus),
}

/// How to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Finish what runs, within the drain deadline.
    Drain,
    /// SIGKILL all, because of this signal.
    Now(i32),
}

/// What the outside may know, and may ask for.
#[derive(Debug)]
pub struct Handle {
    pub stop: mpsc::Sender<Stop>,
    /// Set once the router serves, and again after it was restarted.
    pub ready: watch::Receiver<Option<InfoReply>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Starting,
    Serving,
    /// The router finishes what runs.
    Draining,
    /// All were asked to end.
    Ending,
    /// All were killed.
    Killing,
}

/// A process and what is known of it.
#[derive(Debug)]
struct Slot {
    spec: ProcessSpec,
    /// Counts starts, so that news of an earlier life is not taken for this one's.
    life: u64,
    child: Option<Child>,
    restart_at: Option<Instant>,
    answers: bool,
    /// Why we killed it.
    condemned: Option<String>,
}

pub struct Supervisor {
    slots: Vec<Slot>,
    supervision: Supervision,
    nursery: Nursery,
    budget: RestartBudget,
    stage: Stage,
    deadline: Option<Instant>,
    outcome: Result<(), SupervisorError>,
    events: mpsc::Receiver<Event>,
    news: mpsc::Sender<Event>,
    stops: mpsc::Receiver<Stop>,
    ready: watch::Sender<Option<InfoReply>>,
}

impl Supervisor {
    /// `processes`: the shards in rank order, then the router, if there is one.
    pub fn new(
        processes: Vec<ProcessSpec>,
        supervision: Supervision,
        nursery: Nursery,
    ) -> (Self, Handle) {
        let (news, events) = mpsc::channel(64);
        let (stop, stops) = mpsc::channel(8);
        let (ready, watched) = watch::channel(None);
        let slot = |spec| Slot {
            spec,
            life: 0,
            child: None,
            restart_at: None,
            answers: false,
            condemned: None,
        };
        let budget = RestartBudget::new(supervision.restart_budget, Supervision::RESTART_WINDOW);
        let supervisor = Self {
            slots: processes.into_iter().map(slot).collect(),
            deadline: Some(Instant::now() + supervision.start_deadline),
            supervision,
            nursery,
            budget,
            stage: Stage::Starting,
            outcome: Ok(()),
            events,
            news,
            stops,
            ready,
        };
        (supervisor, Handle { stop, ready: watched })
    }

    /// Runs the service to its end. Call it on a thread that outlives it (see [`Child::start`]).
    /// Dropping the future kills every process.
    pub async fn run(mut self) -> Result<(), SupervisorError> {
        for index in 0..self.slots.len() {
            if matches!(self.slots[index].spec.role, Role::Shard { .. }) {
                self.start(index);
            }
        }
        self.start_router_when_due();
        while !self.is_over() {
            let next = self.next_timer();
            tokio::select! {
                Some(event) = self.events.recv() => self.on_event(event),
                Some(stop) = self.stops.recv() => self.on_stop(stop),
                () = sleep_until(next) => self.on_timers(Instant::now()),
            }
        }
        for slot in &self.slots {
            let _ = fs::remove_file(&slot.spec.socket);
        }
        self.outcome
    }

    fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Ending | Stage::Killing)
            && self.slots.iter().all(|slot| slot.child.is_none())
    }

    fn next_timer(&self) -> Option<Instant> {
        self.slots.iter().filter_map(|slot| slot.restart_at).chain(self.deadline).min()
    }

    fn start(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.life += 1;
        (slot.restart_at, slot.answers, slot.condemned) = (None, false, None);
        let role = slot.spec.role;
        match Child::start(&slot.spec, slot.life, &self.nursery, self.news.clone()) {
            Ok((mut child, pid)) => {
                let deadline = self.supervision.hang_deadline;
                let watcher = Watcher::new(&slot.spec, slot.life, deadline, self.news.clone());
                child.watcher = tokio::spawn(watcher.run()).abort_handle();
                slot.child = Some(child);
                tracing::info!(process = %role, pid, "started");
            }
            Err(error) => {
                let detail = format!("{}: {error}", slot.spec.program.display());
                self.fail(SupervisorError::Spawn { role, detail });
            }
        }
    }

    /// The router has nothing to talk to before every shard answers.
    fn start_router_when_due(&mut self) {
        let due = |slot: &Slot| slot.child.is_none() && slot.life == 0;
        let shards_answer =
            self.slots.iter().all(|slot| slot.spec.role == Role::Router || slot.answers);
        let router = self.slots.iter().position(|slot| slot.spec.role == Role::Router && due(slot));
        if !shards_answer || self.stage != Stage::Starting {
            return;
        }
        match router {
            Some(index) => self.start(index),
            None if self.slots.iter().all(|slot| slot.spec.role != Role::Router) => {
                // Shards alone: who asked for them looks after them.
                (self.stage, self.deadline) = (Stage::Serving, None);
            }
            None => {}
        }
    }

    fn on_event(&mut self, event: Event) {
        let Some(index) = self.slots.iter().position(|slot| slot.spec.role == event.role) else {
            return;
        };
        let slot = &mut self.slots[index];
        if slot.life != event.life || slot.child.is_none() {
            return; // news of a life that is over
        }
        match event.happening {
            Happening::Answers => {
                slot.answers = true;
                self.start_router_when_due();
            }
            Happening::Serves(info) => self.on_serving(index, *info),
            Happening::Hung(reason) => {
                tracing::error!(process = %event.role, %reason, "hangs; killing it");
                slot.condemned = Some(format!("hung ({reason}) and was killed"));
                if let Some(child) = &slot.child {
                    child.signal(Signal::KILL);
                }
            }
            Happening::Ended(status) => self.on_end(index, status),
        }
    }

    fn on_serving(&mut self, router: usize, info: InfoReply) {
        keep_ports(&mut self.slots[router].spec, &info);
        if self.stage == Stage::Starting {
            self.stage = Stage::Serving;
            self.deadline = None;
        }
        self.ready.send_replace(Some(info));
    }

    fn on_end(&mut self, index: usize, status: ExitStatus) {
        let slot = &mut self.slots[index];
        slot.child = None;
        slot.answers = false;
        let _ = fs::remove_file(&slot.spec.socket);
        let role = slot.spec.role;
        let end = slot.condemned.take().unwrap_or_else(|| end_of_process::describe(status));
        match self.stage {
            // An exit by its own will at the start is a refusal: trying again changes nothing.
            Stage::Starting if status.code().is_some() => {
                self.fail(SupervisorError::Start { role, end });
            }
            Stage::Starting | Stage::Serving => self.restart(index, end),
            Stage::Draining if role == Role::Router => self.end(),
            Stage::Draining => tracing::error!(process = %role, %end, "lost while draining"),
            Stage::Ending | Stage::Killing => tracing::debug!(process = %role, %end, "ended"),
        }
    }

    fn restart(&mut self, index: usize, end: String) {
        let role = self.slots[index].spec.role;
        let now = Instant::now();
        match self.budget.take(now) {
            Some(pause) => {
                let pause_ms = pause.as_millis() as u64;
                tracing::error!(process = %role, %end, pause_ms, "lost; restarting it");
                self.slots[index].restart_at = Some(now + pause);
            }
            None => {
                let limit = self.supervision.restart_budget;
                self.fail(SupervisorError::Budget { role, end, limit });
            }
        }
    }

    fn on_stop(&mut self, stop: Stop) {
        match (stop, self.stage) {
            (Stop::Now(signal), _) => {
                self.outcome = Err(SupervisorError::Killed { signal });
                self.kill();
            }
            (Stop::Drain, Stage::Starting) => self.end(),
            (Stop::Drain, Stage::Serving) => self.drain(),
            (Stop::Drain, _) => {}
        }
    }

    fn drain(&mut self) {
        let drain_s = self.supervision.drain_deadline.as_secs();
        tracing::info!(drain_s, "stopping: running requests may finish");
        self.stage = Stage::Draining;
        // The router keeps its own deadline; ours is for a router that does not.
        let patience = self.supervision.drain_deadline + self.supervision.kill_grace;
        self.deadline = Some(Instant::now() + patience);
        self.cancel_restarts();
        let router = self.slots.iter().find(|slot| slot.spec.role == Role::Router);
        match router.and_then(|slot| slot.child.as_ref()) {
            Some(child) => child.signal(Signal::TERM),
            None => self.end(),
        }
    }

    /// Asks all that still run to end.
    fn end(&mut self) {
        self.stage = Stage::Ending;
        self.deadline = Some(Instant::now() + self.supervision.kill_grace);
        self.cancel_restarts();
        self.signal_all(Signal::TERM);
    }

    fn kill(&mut self) {
        self.stage = Stage::Killing;
        self.deadline = Some(Instant::now() + self.supervision.kill_grace);
        self.cancel_restarts();
        self.signal_all(Signal::KILL);
    }

    fn fail(&mut self, error: SupervisorError) {
        tracing::error!(%error, "giving up");
        if self.outcome.is_ok() {
            self.outcome = Err(error);
        }
        if !matches!(self.stage, Stage::Ending | Stage::Killing) {
            self.end();
        }
    }

    fn cancel_restarts(&mut self) {
        for slot in &mut self.slots {
            slot.restart_at = None;
        }
    }

    fn signal_all(&self, signal: Signal) {
        for child in self.slots.iter().filter_map(|slot| slot.child.as_ref()) {
            child.signal(signal);
        }
    }

    fn on_timers(&mut self, now: Instant) {
        for index in 0..self.slots.len() {
            if self.slots[index].restart_at.is_some_and(|due| due <= now) {
                self.start(index);
            }
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.on_deadline();
        }
    }

    fn on_deadline(&mut self) {
        match self.stage {
            Stage::Starting => {
                let missing = self.missing();
                let limit_s = self.supervision.start_deadline.as_secs();
                self.fail(SupervisorError::StartDeadline { limit_s, missing });
            }
            Stage::Draining => {
                tracing::error!("the router did not drain in time; running requests are cut");
                self.end();
            }
            Stage::Ending => self.kill(),
            // A process that survives SIGKILL hangs in the kernel; waiting longer helps no one.
            Stage::Killing => self.slots.iter_mut().for_each(|slot| slot.child = None),
            Stage::Serving => {}
        }
    }

    /// Who keeps the service from being ready.
    fn missing(&self) -> String {
        let silent = |slot: &&Slot| match slot.spec.role {
            Role::Router => slot.life > 0,
            Role::Shard { .. } => !slot.answers,
        };
        let names: Vec<_> =
            self.slots.iter().filter(silent).map(|slot| slot.spec.role.to_string()).collect();
        names.join(", ")
    }
}

/// A restarted router must be found where the first one was, also when that chose free ports.
fn keep_ports(spec: &mut ProcessSpec, info: &InfoReply) {
    for (flag, address) in [("--port", &info.http_address), ("--grpc-port", &info.grpc_address)] {
        let port = address.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok());
        let place = spec.args.iter().position(|word| word == flag).map(|at| at + 1);
        if let (Some(port), Some(place)) = (port, place)
            && let Some(value) = spec.args.get_mut(place)
            && value == "0"
        {
            *value = port.into();
        }
    }
}

/// Sleeps for ever without an instant: something else will happen.
async fn sleep_until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant.into()).await,
        None => std::future::pending().await,
    }
}
