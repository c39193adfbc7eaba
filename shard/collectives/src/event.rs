//! A counter in shared memory that one rank advances and others wait for: a brief spin, then a
//! futex.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::thread::futex;

/// How long a sleeper goes without looking at the abort flag and the deadline.
const SLICE: Duration = Duration::from_millis(20);

/// Looks between two looks at the clock while spinning.
const SPINS_PER_CLOCK_READ: u32 = 32;

/// How long a spin keeps the core before it offers it to others at every turn.
const SPIN_ALONE: Duration = Duration::from_micros(4);

/// A 32-bit counter (it may wrap) on its own cache line.
///
/// No wake-up is lost: [`Event::publish`] writes `value` and then reads `sleepers`, a waiter writes
/// `sleepers` and then reads `value`, all sequentially consistent. So either the publisher sees the
/// sleeper and wakes it, or the waiter sees the new value; and between the waiter's read and its
/// sleep the kernel compares `value` once more, under the lock that the wake takes.
///
/// `SeqCst` includes release and acquire: what a rank wrote before `publish(v)` is visible to a rank
/// that saw `v`.
#[repr(C, align(64))]
pub(crate) struct Event {
    value: AtomicU32,
    /// Ranks that may be asleep. One killed in its sleep is counted for ever, which costs its peers
    /// a needless system call and nothing else.
    sleepers: AtomicU32,
}

/// Why a wait ended without its event.
pub(crate) enum Interrupted {
    Deadline { waited: Duration },
    Aborted,
}

/// How one wait behaves.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// Burn the core this long before sleeping: about what a sleep and a wake-up cost.
    pub(crate) spin: Duration,
    /// Give up after this long.
    pub(crate) deadline: Duration,
}

impl Event {
    pub(crate) fn value(&self) -> u32 {
        self.value.load(SeqCst)
    }

    /// Sets the counter and wakes everyone who waits for it.
    pub(crate) fn publish(&self, value: u32) {
        self.value.store(value, SeqCst);
        self.wake();
    }

    /// Adds one, for counters that several ranks advance.
    pub(crate) fn increment(&self) {
        self.value.fetch_add(1, SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.sleepers.load(SeqCst) != 0 {
            // Not PRIVATE: the sleepers may be in other processes. An error would mean that the
            // address is bad, which a live reference rules out.
            let _ = futex::wake(&self.value, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Waits until the counter has reached `target` (or passed it, across a wrap).
    pub(crate) fn wait(
        &self,
        target: u32,
        patience: Patience,
        aborted: impl Fn() -> bool,
    ) -> Result<(), Interrupted> {
        let reached = |value: u32| value.wrapping_sub(target).cast_signed() >= 0;
        if reached(self.value()) {
            return Ok(());
        }
        let start = Instant::now();
        loop {
            let spun = start.elapsed();
            if spun >= patience.spin {
                break;
            }
            if spun >= SPIN_ALONE {
                // The one waited for may be queued behind this very spin.
                std::thread::yield_now();
            }
            for _ in 0..SPINS_PER_CLOCK_READ {
                if reached(self.value()) {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        self.sleepers.fetch_add(1, SeqCst);
        let outcome = self.sleep(reached, start, patience.deadline, aborted);
        self.sleepers.fetch_sub(1, SeqCst);
        outcome
    }

    fn sleep(
        &self,
        reached: impl Fn(u32) -> bool,
        start: Instant,
        deadline: Duration,
        aborted: impl Fn() -> bool,
    ) -> Result<(), Interrupted> {
        loop {
            let value = self.value();
            if reached(value) {
                return Ok(());
            }
            // After the value: an operation that completed before an abort still completes.
            if aborted() {
                return Err(Interrupted::Aborted);
            }
            let waited = start.elapsed();
            let Some(left) = deadline.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(Interrupted::Deadline { waited });
            };
            let slice = left.min(SLICE);
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(slice.subsec_nanos()) };
            // Woken, timed out, interrupted by a signal, or the value moved on: look again.
            let _ = futex::wait(&self.value, futex::Flags::empty(), value, Some(&timeout));
        }
    }
}
