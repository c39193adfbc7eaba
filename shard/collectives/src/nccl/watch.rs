//! The thread that ends groups whose work does not end by itself.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use trireme_kernels::cuda::{CudaError, Event, Stream};

use super::communicator::Line;
use crate::{AbortHandle, CollectiveError};

/// What queued work gets until someone calls `set_deadline`.
const DEADLINE: Duration = Duration::from_secs(30);
/// Between two looks at queued work.
const LOOK: Duration = Duration::from_millis(5);
/// How long an end may take once nothing holds the groups.
const END: Duration = Duration::from_secs(5);

struct State {
    deadline: Duration,
    /// Work is queued up to `Shared::end`, and has to be over by then.
    until: Option<Instant>,
    failure: Option<String>,
    closed: bool,
    ends: Vec<thread::JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    lines: Vec<Arc<Line>>,
    /// Behind the newest work.
    end: Event,
    abort: AbortHandle,
}

pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

fn gpu(error: &CudaError) -> CollectiveError {
    CollectiveError::Mismatch { operation: "watch", detail: error.to_string() }
}

impl Watch {
    pub(super) fn start(
        lines: Vec<Arc<Line>>,
        stream: &Stream,
        abort: AbortHandle,
    ) -> Result<Self, CollectiveError> {
        let state = State {
            deadline: DEADLINE,
            until: None,
            failure: None,
            closed: false,
            ends: Vec::new(),
        };
        let end = Event::new(stream).map_err(|error| gpu(&error))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            lines,
            end,
            abort,
        });
        let watching = shared.clone();
        let thread = thread::Builder::new()
            .name("nccl-watch".into())
            .spawn(move || watching.run())
            .map_err(|error| CollectiveError::Mismatch {
                operation: "watch",
                detail: error.to_string(),
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn set_deadline(&self, deadline: Duration) {
        self.shared.state().deadline = deadline;
    }

    /// The deadline runs anew from here, for all that the stream holds.
    pub(super) fn queued(&self, stream: &Stream) -> Result<(), CollectiveError> {
        let mut state = self.shared.state();
        self.shared.end.record(stream).map_err(|error| gpu(&error))?;
        state.until = Some(Instant::now() + state.deadline);
        self.shared.changed.notify_one();
        Ok(())
    }

    pub(super) fn check(&self, rank: usize, size: usize) -> Result<(), CollectiveError> {
        let operation = "step";
        match self.shared.state().failure.clone() {
            Some(detail) => Err(CollectiveError::Nccl { operation, rank, size, detail }),
            None if self.shared.abort.is_aborted() => {
                Err(CollectiveError::Aborted { operation, rank, size })
            }
            None => Ok(()),
        }
    }

    pub(super) fn end_all(&self) {
        self.shared.end_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.state();
        while !state.closed {
            let Some(until) = state.until else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if let Some(failure) = self.failure(until, state.deadline) {
                state.failure.get_or_insert(failure);
                state.until = None;
                drop(state);
                self.abort.abort();
                self.end_all();
                state = self.state();
                continue;
            }
            if self.end.is_over() {
                state.until = None;
                continue;
            }
            let woken = self.changed.wait_timeout(state, LOOK);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Why what is queued must be given up, if it must.
    fn failure(&self, until: Instant, deadline: Duration) -> Option<String> {
        if self.abort.is_aborted() {
            return Some("the epoch was aborted".into());
        }
        if let Some(error) = self.lines.iter().find_map(|line| line.failure()) {
            return Some(error.to_string());
        }
        let late = Instant::now() >= until && !self.end.is_over();
        late.then(|| {
            let ms = deadline.as_millis();
            format!("not over after {ms} ms: a peer is stuck or gone (step deadline passed)")
        })
    }

    fn end_all(&self) {
        let ends: Vec<_> = self.lines.iter().filter_map(|line| line.end()).collect();
        self.state().ends.extend(ends);
    }
}

impl Drop for Watch {
    /// Nothing recorded may hold the groups any more.
    fn drop(&mut self) {
        self.shared.end_all();
        self.shared.state().closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        let patience = Instant::now() + END;
        let ends = std::mem::take(&mut self.shared.state().ends);
        while !ends.iter().all(thread::JoinHandle::is_finished) && Instant::now() < patience {
            thread::sleep(LOOK);
        }
    }
}
