//! What must hold between any two calls. For tests.

use std::collections::BTreeMap;

use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence, Slot};

impl Scheduler {
    /// Panics when a block is leaked or shared wrongly, or a count does not add up. For tests.
    pub fn check_invariants(&self) {
        self.check_places();
        self.check_steps();
        self.check_blocks();
        for (_, sequence) in self.slots.iter() {
            self.check_sequence(sequence);
        }
    }

    /// Every sequence is in exactly one place, and each place is in order.
    fn check_places(&self) {
        let count = |phases: &[Phase]| {
            self.slots.iter().filter(|(_, sequence)| phases.contains(&sequence.phase)).count()
        };
        assert_eq!(count(&[Phase::Waiting]), self.queue.len());
        assert_eq!(count(&[Phase::Prefill, Phase::Decode]), self.running.len());
        assert_eq!(count(&[Phase::Ended]), self.leaving.len());
        assert!(self.running.len() <= self.limits.max_sequences);
        assert!(self.running.is_sorted_by_key(|slot| self.slots[*slot].rank));
        for (rank, slot) in self.queue.iter() {
            assert_eq!(self.slots[slot].rank, rank);
            assert_eq!(self.slots[slot].phase, Phase::Waiting);
        }
        assert!(self.running.iter().all(|slot| self.slots[*slot].is_running()));
        assert!(self.leaving.iter().all(|slot| self.slots[*slot].phase == Phase::Ended));
        assert_eq!(self.ids.len(), self.queue.len() + self.running.len());
        for (id, slot) in &self.ids {
            assert_eq!(self.slots[*slot].id, *id);
            assert_ne!(self.slots[*slot].phase, Phase::Ended);
        }
    }

    /// Counts kept in sequences are those of the steps in flight.
    fn check_steps(&self) {
        assert!(self.in_flight.len() <= self.limits.max_steps_in_flight);
        let mut named: BTreeMap<Slot, (usize, usize)> = BTreeMap::new();
        let first = self.next_step - self.in_flight.len() as u64;
        for (step, expected) in self.in_flight.iter().zip(first..) {
            assert_eq!(step.step_id, expected);
            for part in &step.parts {
                assert_eq!(self.slots[part.slot].id, part.id);
                let (steps, samples) = named.entry(part.slot).or_default();
                *steps += 1;
                *samples += usize::from(part.samples);
            }
        }
        for (slot, sequence) in self.slots.iter() {
            let (steps, samples) = named.get(&slot).copied().unwrap_or_default();
            assert_eq!(sequence.steps_in_flight, steps);
            assert!(steps <= self.limits.max_steps_of_sequence());
            if sequence.phase == Phase::Ended {
                assert!(steps > 0, "an ended sequence outstays its steps");
            } else {
                assert_eq!(sequence.unknown, samples);
            }
        }
    }

    /// References add up, and blocks are shared only by those with the same tokens in them.
    fn check_blocks(&self) {
        let mut held = vec![0u32; self.limits.num_blocks];
        let mut first_holder: Vec<Option<(&Sequence, usize)>> = vec![None; held.len()];
        for (_, sequence) in self.slots.iter() {
            for (index, block) in sequence.blocks.iter().enumerate() {
                held[*block as usize] += 1;
                match first_holder[*block as usize] {
                    None => first_holder[*block as usize] = Some((sequence, index)),
                    Some((other, other_index)) => {
                        assert_eq!(index, other_index, "block {block} at two positions");
                        let end = (index + 1) * self.limits.block_tokens;
                        assert!(sequence.tokens[..end] == other.tokens[..end]);
                        assert!(sequence.computed >= end && other.computed >= end);
                    }
                }
            }
        }
        self.pool.check_invariants(&held);
    }

    fn check_sequence(&self, sequence: &Sequence) {
        let known = sequence.tokens.len();
        assert!(known <= sequence.max_len);
        assert!(sequence.computed <= sequence.planned);
        assert_eq!(sequence.blocks.len(), self.limits.blocks_for(sequence.planned));
        assert!(sequence.entered * self.limits.block_tokens <= sequence.computed);
        assert!(sequence.score_from.is_none_or(|from| (1..sequence.prompt_len).contains(&from)));
        match sequence.phase {
            Phase::Waiting => {
                assert!(sequence.blocks.is_empty());
                assert_eq!(
                    (sequence.planned, sequence.unknown, sequence.steps_in_flight),
                    (0, 0, 0)
                );
            }
            Phase::Prefill => {
                assert!(sequence.planned < known && sequence.unknown == 0);
            }
            Phase::Decode => {
                assert_eq!(sequence.planned, known + sequence.unknown - 1);
                assert!(known + sequence.unknown <= sequence.max_len.max(sequence.prompt_len + 1));
            }
            Phase::Ended => {}
        }
        if sequence.is_running() {
            assert_eq!(sequence.blocks_sent, sequence.blocks.len());
        }
    }
}
