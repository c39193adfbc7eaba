//! Blocks for a running sequence, if need be from a younger one.

use crate::event::Event;
use crate::scheduler::Scheduler;
use crate::sequence::Slot;

impl Scheduler {
    /// Gives a sequence blocks for its first `end` tokens, as far as there are any. Returns how
    /// many of those tokens have blocks now.
    pub(crate) fn reserve(&mut self, slot: Slot, end: usize) -> usize {
        let have = self.slots[slot].blocks.len();
        let need = self.limits.blocks_for(end).saturating_sub(have);
        if need > self.pool.available() {
            self.make_room(slot, need);
        }
        for _ in 0..need {
            let Some(block) = self.pool.take() else { break };
            self.slots[slot].blocks.push(block);
        }
        self.lacking_blocks += have + need - self.slots[slot].blocks.len();
        end.min(self.slots[slot].blocks.len() * self.limits.block_tokens)
    }

    /// Preempts sequences of greater rank than `slot`, the greatest first, until `need` blocks are
    /// free or will be once steps in flight are done.
    fn make_room(&mut self, slot: Slot, need: usize) {
        let rank = self.slots[slot].rank;
        let mut coming = self.blocks_coming();
        while self.pool.available() + coming < need {
            let youngest = self.running.iter().rev().find(|other| !self.slots[**other].yielding);
            let Some(&victim) = youngest else { return };
            if self.slots[victim].rank <= rank {
                return;
            }
            if self.slots[victim].steps_in_flight == 0 {
                self.preempt(victim);
            } else {
                self.slots[victim].yielding = true;
                coming += self.blocks_alone(victim);
            }
        }
    }

    /// Blocks that only sequences on their way out hold.
    fn blocks_coming(&self) -> usize {
        let yielding = self.running.iter().filter(|slot| self.slots[**slot].yielding);
        self.leaving.iter().chain(yielding).map(|slot| self.blocks_alone(*slot)).sum()
    }

    /// Blocks that only this sequence holds.
    fn blocks_alone(&self, slot: Slot) -> usize {
        let blocks = &self.slots[slot].blocks;
        blocks.iter().filter(|block| self.pool.references(**block) == 1).count()
    }

    /// Preempts those that were asked to yield and that no step names any more; lets them run on if
    /// what they were asked for came free otherwise. The oldest never yields: who asked is gone.
    pub(crate) fn settle_preemptions(&mut self) {
        let lacking = std::mem::take(&mut self.lacking_blocks);
        let is_enough = self.pool.available() >= lacking;
        let yielding = |slot: &&Slot| self.slots[**slot].yielding;
        let yielding: Vec<Slot> = self.running.iter().filter(yielding).copied().collect();
        for slot in yielding {
            if is_enough || self.running[0] == slot {
                self.slots[slot].yielding = false;
            } else if self.slots[slot].steps_in_flight == 0 {
                self.preempt(slot);
            }
        }
    }

    fn preempt(&mut self, slot: Slot) {
        self.running.retain(|other| *other != slot);
        let sequence = &mut self.slots[slot];
        debug_assert!(sequence.steps_in_flight == 0 && sequence.unknown == 0);
        self.pool.release(&sequence.blocks);
        sequence.forget_kv();
        self.queue.insert(sequence.rank, slot);
        self.drops.push(sequence.id);
        self.events.push(Event::Preempted { id: sequence.id });
        self.preemptions += 1;
    }
}
