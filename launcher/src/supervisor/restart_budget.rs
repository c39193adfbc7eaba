//! How often dead processes are started again before it is called off.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Pause before the first restart of a window; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// At most `limit` restarts within any `window`.
#[derive(Debug)]
pub struct RestartBudget {
    limit: u32,
    window: Duration,
    taken: VecDeque<Instant>,
}

impl RestartBudget {
    pub fn new(limit: u32, window: Duration) -> Self {
        Self { limit, window, taken: VecDeque::new() }
    }

    /// Takes one restart: how long to pause before it, or nothing when the budget is used up.
    pub fn take(&mut self, now: Instant) -> Option<Duration> {
        while self.taken.front().is_some_and(|then| now.duration_since(*then) >= self.window) {
            self.taken.pop_front();
        }
        let taken = self.taken.len() as u32;
        if taken >= self.limit {
            return None;
        }
        self.taken.push_back(now);
        Some(FIRST_PAUSE.saturating_mul(1 << taken.min(16)).min(LONGEST_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_are_paid_from_a_window() {
        let start = Instant::now();
        let check = |limit: u32, at_s: &[u64], want_ms: &[Option<u64>]| {
            let mut budget = RestartBudget::new(limit, Duration::from_secs(100));
            let got: Vec<_> = at_s
                .iter()
                .map(|s| budget.take(start + Duration::from_secs(*s)))
                .map(|pause| pause.map(|p| p.as_millis() as u64))
                .collect();
            assert_eq!(got, want_ms, "limit {limit}, at {at_s:?}");
        };
        check(0, &[0], &[None]);
        check(2, &[0, 1, 2], &[Some(100), Some(200), None]);
        check(2, &[0, 1, 100, 101], &[Some(100), Some(200), Some(200), Some(200)]);
        check(1, &[0, 99, 100], &[Some(100), None, Some(100)]);
        check(9, &[0; 9], &[100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000].map(Some));
    }
}
