//! What the rest of the process may know of the engine without asking its thread.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::sync::watch;
use trireme_checkpoint::ModelConfig;
use trireme_collectives::AbortHandle;
use trireme_proto::shard::v1::ShardState;

/// Changes rarely; published by the engine thread.
#[derive(Clone, Debug)]
pub struct Phase {
    pub state: ShardState,
    pub failure: String,
    pub epoch: u64,
    /// A step that takes longer is stuck.
    pub step_deadline: Duration,
    /// Ends every wait of the current epoch's groups.
    pub abort: Option<AbortHandle>,
    /// Known once the checkpoint is open.
    pub model: Option<ModelConfig>,
    pub fingerprint: u64,
    pub weight_bytes: u64,
    pub kv_bytes_per_block: u64,
}

/// Written by the engine thread and by loading threads, read by anyone.
#[derive(Debug)]
pub struct Status {
    phase: watch::Sender<Phase>,
    pub bytes_loaded: AtomicU64,
    pub bytes_total: AtomicU64,
    start: Instant,
    /// Microseconds from `start` to the start of the running step; 0: none runs.
    step_started_us: AtomicU64,
}

impl Default for Status {
    fn default() -> Self {
        let phase = Phase {
            state: ShardState::Loading,
            failure: String::new(),
            epoch: 0,
            step_deadline: Duration::MAX,
            abort: None,
            model: None,
            fingerprint: 0,
            weight_bytes: 0,
            kv_bytes_per_block: 0,
        };
        Self {
            phase: watch::Sender::new(phase),
            bytes_loaded: AtomicU64::new(0),
            bytes_total: AtomicU64::new(0),
            start: Instant::now(),
            step_started_us: AtomicU64::new(0),
        }
    }
}

impl Status {
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    pub fn subscribe(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    pub fn change(&self, change: impl FnOnce(&mut Phase)) {
        self.phase.send_modify(change);
    }

    /// A failure sticks, and the first one is the cause.
    pub fn fail(&self, failure: String) {
        self.change(|phase| {
            if phase.state != ShardState::Failed {
                phase.failure = failure;
                phase.state = ShardState::Failed;
            }
        });
    }

    pub fn step_starts(&self) {
        let now = self.start.elapsed().as_micros() as u64;
        self.step_started_us.store(now.max(1), Ordering::Relaxed);
    }

    pub fn step_ends(&self) {
        self.step_started_us.store(0, Ordering::Relaxed);
    }

    pub fn step_runs(&self) -> bool {
        self.step_started_us.load(Ordering::Relaxed) != 0
    }

    /// Serving, and the running step is within its deadline.
    pub fn healthy(&self) -> bool {
        let phase = self.phase.borrow();
        let started_us = self.step_started_us.load(Ordering::Relaxed);
        let stuck = started_us != 0
            && self.start.elapsed().saturating_sub(Duration::from_micros(started_us))
                > phase.step_deadline;
        phase.state == ShardState::Serving && !stuck
    }
}
