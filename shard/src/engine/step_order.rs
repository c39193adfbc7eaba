//! Steps in strict order. Unary calls may overtake each other on one HTTP/2 connection, so a step
//! that is a little early waits for its predecessors; anything else out of order is refused.

use std::collections::BTreeMap;

use super::EngineError;

pub enum Offer<T> {
    Run(T),
    Held,
    Refused(T, EngineError),
}

/// Orders steps `1, 2, …` of one epoch.
pub struct StepOrder<T> {
    next: u64,
    /// The router has at most this many steps in flight: `pp + 1`.
    window: u64,
    early: BTreeMap<u64, T>,
}

impl<T> StepOrder<T> {
    pub fn new(pp: usize) -> Self {
        Self { next: 1, window: pp as u64 + 1, early: BTreeMap::new() }
    }

    pub fn next(&self) -> u64 {
        self.next
    }

    pub fn holds_none(&self) -> bool {
        self.early.is_empty()
    }

    pub fn offer(&mut self, id: u64, step: T) -> Offer<T> {
        let refuse = |step, problem| {
            Offer::Refused(step, EngineError::Order { given: id, next: self.next, problem })
        };
        if id < self.next || self.early.contains_key(&id) {
            return refuse(step, "came twice");
        }
        if id - self.next > self.window {
            return refuse(step, "leaves a gap beyond the steps in flight");
        }
        if id > self.next {
            self.early.insert(id, step);
            return Offer::Held;
        }
        self.next += 1;
        Offer::Run(step)
    }

    /// The held step whose predecessor has run.
    pub fn take_next(&mut self) -> Option<T> {
        let step = self.early.remove(&self.next)?;
        self.next += 1;
        Some(step)
    }

    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.early).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offers `ids` to one stage with two steps in flight; returns what ran, and what was refused.
    fn check(ids: &[u64], ran: &[u64], refused: &[u64]) {
        let mut order = StepOrder::new(1);
        let (mut did_run, mut were_refused) = (Vec::new(), Vec::new());
        for &id in ids {
            match order.offer(id, id) {
                Offer::Run(id) => did_run.push(id),
                Offer::Held => {}
                Offer::Refused(id, _) => were_refused.push(id),
            }
            if did_run.last() == Some(&id) {
                while let Some(id) = order.take_next() {
                    did_run.push(id);
                }
            }
        }
        assert_eq!((did_run.as_slice(), were_refused.as_slice()), (ran, refused), "{ids:?}");
    }

    #[test]
    fn steps_run_in_order() {
        check(&[1, 2, 3], &[1, 2, 3], &[]);
        check(&[2, 1, 3], &[1, 2, 3], &[]);
        check(&[3, 2, 1], &[1, 2, 3], &[]);
        check(&[1, 3, 3, 2], &[1, 2, 3], &[3]);
        check(&[1, 1, 2], &[1, 2], &[1]);
        check(&[4, 1], &[1], &[4]);
        check(&[0, 1], &[1], &[0]);
        check(&[u64::MAX, 1], &[1], &[u64::MAX]);
    }
}
