//! The threads of one rank: a fork-join pool for work of a few microseconds.
//!
//! A run is one bump of an epoch and one count down to zero. Workers spin for a few microseconds after
//! a run, since the next kernel follows at once, then offer their core to others, then sleep: several
//! teams (ranks) may share the cores, and an idle rank must cost nothing.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::attention::Lists;
use crate::buffer::{Buffer, Touch};

/// How long a wait keeps its core to itself, and how long it then yields before it sleeps.
const SPIN: Duration = Duration::from_micros(8);
const YIELD: Duration = Duration::from_micros(50);

type Work = dyn Fn(usize) + Sync;

/// The threads of one rank: `threads - 1` workers and the caller.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a run: callers take turns.
    turn: Mutex<()>,
    scratch: Mutex<Scratch>,
}

/// Memory that kernels keep between calls, so that the hot path allocates nothing.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) floats: Floats,
    pub(crate) lists: Lists,
}

/// Numbers without an owner between calls.
#[derive(Default)]
pub(crate) struct Floats(Option<Buffer<f32>>);

impl Floats {
    /// `len` values of unspecified content.
    pub(crate) fn take(&mut self, len: usize) -> &mut [f32] {
        if self.0.as_ref().is_none_or(|floats| floats.len() < len) {
            // The old one goes first, so that the two do not add up.
            self.0 = None;
            self.0 = Some(Buffer::zeroed(len.next_power_of_two(), Touch::Whole));
        }
        &mut self.0.as_mut().expect("filled above")[..len]
    }
}

struct Shared {
    /// Counts runs. Written by the caller, before which it fills `job`.
    epoch: AtomicU32,
    job: UnsafeCell<Option<Job>>,
    /// Workers that have not finished the current run.
    remaining: AtomicUsize,
    caller_sleeps: AtomicBool,
    worker_sleeps: Vec<AtomicBool>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// More threads than cores: a spinning wait would keep the one it waits for from running.
    crowded: bool,
}

#[derive(Clone)]
struct Job {
    work: *const Work,
    caller: Thread,
}

// SAFETY: `job` alone is not Sync. The caller writes it only while `remaining` is 0 (no worker is in a
// run), and the SeqCst bump of `epoch` makes the write visible to the workers that then read it. The
// pointer inside points to a Sync closure that outlives the run, because `run` waits for every worker.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

thread_local! {
    static IN_RUN: Cell<bool> = const { Cell::new(false) };
}

impl Team {
    /// Starts `threads - 1` workers (0 counts as 1).
    ///
    /// # Panics
    /// If the operating system refuses a thread.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            remaining: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            worker_sleeps: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            crowded: threads > cores,
        });
        let workers = (1..threads)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                thread::Builder::new()
                    .name(format!("team-{worker}"))
                    .spawn(move || shared.serve(worker))
                    .expect("the system starts a worker thread")
            })
            .collect();
        Self { shared, workers, turn: Mutex::new(()), scratch: Mutex::default() }
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work(worker)` once on every thread, `0 .. threads`, and returns when all are done.
    ///
    /// # Panics
    /// With the panic of a worker, once all are done; and when called from inside a run.
    pub fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        assert!(!IN_RUN.get(), "a run inside a run of a team would wait for itself");
        if self.workers.is_empty() {
            return as_member(|| work(0));
        }
        let _turn = lock(&self.turn);
        // SAFETY: only the lifetime changes; the workers use it before this function returns.
        let work_ptr =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Work>(work) };
        // SAFETY: `remaining` is 0 and the turn is ours, so no other thread touches `job`.
        unsafe { *self.shared.job.get() = Some(Job { work: work_ptr, caller: thread::current() }) };
        self.shared.remaining.store(self.workers.len(), SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        self.wake_sleepers();
        let own = catch_unwind(AssertUnwindSafe(|| as_member(|| work(0))));
        self.shared.wait(&self.shared.caller_sleeps, || self.shared.remaining.load(SeqCst) == 0);
        let theirs = lock(&self.shared.panic).take();
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    pub(crate) fn scratch(&self) -> MutexGuard<'_, Scratch> {
        lock(&self.scratch)
    }

    fn wake_sleepers(&self) {
        for (i, worker) in self.workers.iter().enumerate() {
            if self.shared.worker_sleeps[i + 1].load(SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its work, so it ends well.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.wait(&self.worker_sleeps[worker], || self.epoch.load(SeqCst) != seen);
            if self.stop.load(SeqCst) {
                return;
            }
            // One run at a time, each waiting for this worker: the epoch is exactly one further.
            seen = seen.wrapping_add(1);
            // SAFETY: written before the epoch that was just seen, and not again before
            // `remaining` is 0, which needs the count below.
            let job = unsafe { (*self.job.get()).clone() }.expect("a run fills the job first");
            // SAFETY: the closure lives until `run` returns, which is after the count below.
            let work = unsafe { &*job.work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| as_member(|| work(worker)))) {
                lock(&self.panic).get_or_insert(panic);
            }
            let last = self.remaining.fetch_sub(1, SeqCst) == 1;
            if last && self.caller_sleeps.load(SeqCst) {
                job.caller.unpark();
            }
        }
    }

    /// Waits until `ready`: spins, yields, then sleeps with `sleeps` set, so that the other side knows
    /// to wake it. The flag is set before `ready` is asked again, and the other side makes `ready`
    /// true before it reads the flag: one of the two sees the other (all SeqCst).
    fn wait(&self, sleeps: &AtomicBool, ready: impl Fn() -> bool) {
        let spin = if self.crowded { Duration::ZERO } else { SPIN };
        let start = Instant::now();
        let mut waited = Duration::ZERO;
        while waited < YIELD {
            for _ in 0..16 {
                if ready() {
                    return;
                }
                std::hint::spin_loop();
            }
            if waited >= spin {
                thread::yield_now();
            }
            waited = start.elapsed();
        }
        sleeps.store(true, SeqCst);
        while !ready() {
            thread::park();
        }
        sleeps.store(false, SeqCst);
    }
}

/// Marks this thread as inside a run for the length of `work`.
fn as_member(work: impl FnOnce()) {
    struct Leave(bool);
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_RUN.set(self.0);
        }
    }
    let _leave = Leave(IN_RUN.replace(true));
    work();
}

/// A panic in a kernel leaves no broken state behind: every run writes its state afresh.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of `0 .. items` that worker `worker` of `workers` takes, in multiples of `grain`.
/// The parts are in order, cover everything once, and differ by at most one grain.
///
/// # Panics
/// If `grain` is 0 or `worker` is not below `workers`.
pub fn share(items: usize, grain: usize, worker: usize, workers: usize) -> Range<usize> {
    assert!(grain > 0 && worker < workers, "grain {grain}, worker {worker} of {workers}");
    let grains = items.div_ceil(grain);
    let bound = |w: usize| (grains * w / workers * grain).min(items);
    bound(worker)..bound(worker + 1)
}

#[cfg(test)]
mod tests;
