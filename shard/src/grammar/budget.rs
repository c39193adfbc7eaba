//! What the masks of a grammar may cost.
//!
//! Limits inside the matcher bound the steps of one mask, but not what a step takes: an ambiguous
//! grammar can need seconds. Processor time is what the other sequences of a step lose, so that is
//! what counts, for all answers under the grammar together. Ranks may find different times: a row
//! whose mask is missing on one of them is given up by all.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use trireme_grammar::GrammarError;

/// To begin with: enough for the first masks of a large schema.
const START: Duration = Duration::from_millis(100);
/// More with each mask; most take less than a tenth of it.
const EACH: Duration = Duration::from_millis(2);

/// Processor time that is left to a grammar's masks.
pub struct Budget {
    left_us: AtomicI64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left_us: AtomicI64::new(START.as_micros() as i64) }
    }
}

impl Budget {
    /// # Errors
    /// Nothing is left.
    pub fn check(&self) -> Result<(), GrammarError> {
        if self.left_us.load(Relaxed) > 0 {
            return Ok(());
        }
        let (start, each) = (START.as_millis(), EACH.as_millis());
        let limit = format!("over {start} ms and {each} ms a token");
        Err(GrammarError::Stuck(format!("to find the possible tokens takes too long: {limit}")))
    }

    /// Runs one mask's `work` on this thread and takes its cost.
    ///
    /// # Errors
    /// Those of `work`, or nothing is left before or after it.
    pub fn spend<T>(
        &self,
        work: impl FnOnce() -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        self.check()?;
        let start = processor_time();
        let result = work();
        let spent = processor_time().saturating_sub(start);
        let change = EACH.as_micros() as i64 - spent.as_micros() as i64;
        self.left_us.fetch_add(change, Relaxed);
        self.check()?;
        result
    }
}

/// Of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burn(time: Duration) {
        let start = processor_time();
        while processor_time() - start < time {
            std::hint::spin_loop();
        }
    }

    /// Whether `masks` of `cost` each can be had.
    fn check(masks: usize, cost: Duration, expected: bool) {
        let budget = Budget::default();
        let mask = || {
            budget.spend(|| {
                burn(cost);
                Ok(())
            })
        };
        assert_eq!((0..masks).all(|_| mask().is_ok()), expected, "{masks} of {cost:?}");
        // Whoever comes later finds it as it was left.
        assert_eq!(budget.check().is_ok(), expected);
    }

    #[test]
    fn many_cheap_masks_and_a_few_dear_ones_can_be_had() {
        check(200, Duration::from_micros(50), true);
        check(2, Duration::from_millis(30), true);
        check(1, Duration::from_millis(110), false);
        check(12, Duration::from_millis(12), false);
    }

    #[test]
    fn waiting_costs_nothing() {
        let budget = Budget::default();
        let asleep = budget.spend(|| {
            std::thread::sleep(START + EACH * 2);
            Ok(())
        });
        assert_eq!(asleep, Ok(()));
    }
}
