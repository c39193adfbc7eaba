//! Starts sequences from the queue.

use crate::event::Event;
use crate::prefix_cache::Tip;
use crate::queue::{LOOK_AHEAD, MAX_BYPASSES};
use crate::schedule::{Draft, Share};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Slot};

/// The part of a waiting sequence's tokens that is in the prefix cache.
struct CachedPrefix {
    blocks: Vec<u32>,
    tip: Tip,
    /// Of the blocks, those that no sequence holds.
    num_unused: usize,
}

impl Scheduler {
    /// Starts sequences from the queue. Nobody starts while a running sequence lacks blocks: what
    /// comes free is for those that run.
    pub(crate) fn plan_admissions(&mut self, draft: &mut Draft, share: &mut Share) {
        if self.queue.is_empty() || draft.tokens_left == 0 || !self.may_admit(draft) {
            return;
        }
        let mut owed_blocks = self.blocks_owed();
        if self.pool.available() <= owed_blocks + self.spare_blocks() {
            return;
        }
        let waiting: Vec<Slot> = self.queue.iter().map(|(_, slot)| slot).take(LOOK_AHEAD).collect();
        let mut passed: Vec<Slot> = Vec::new();
        for slot in waiting {
            if draft.tokens_left == 0 || !self.may_admit(draft) {
                return;
            }
            let prefix = self.find_cached(slot);
            let missing =
                self.slots[slot].tokens.len() - prefix.blocks.len() * self.limits.block_tokens;
            let len = share.of(missing, draft.tokens_left);
            let may_start = len > 0
                && self.has_room(slot, &prefix, owed_blocks)
                && !self.is_being_computed(slot, &prefix);
            if !may_start {
                if self.slots[slot].bypasses >= MAX_BYPASSES {
                    return;
                }
                passed.push(slot);
                continue;
            }
            share.long_served |= len < missing;
            self.admit(draft, slot, prefix);
            self.plan_chunk(draft, slot, len);
            owed_blocks = self.blocks_owed();
            for slot in &passed {
                self.slots[*slot].bypasses += 1;
            }
            if passed.iter().any(|slot| self.slots[*slot].bypasses >= MAX_BYPASSES) {
                return;
            }
        }
    }

    fn may_admit(&self, draft: &Draft) -> bool {
        !draft.is_short
            && self.running.len() < self.limits.max_sequences
            && !self.running.iter().any(|slot| self.slots[*slot].yielding)
    }

    /// Blocks that running sequences still need for the tokens they were admitted with.
    fn blocks_owed(&self) -> usize {
        let owed = |slot: &Slot| {
            let sequence = &self.slots[*slot];
            let need = self.limits.blocks_for(sequence.tokens.len());
            need.saturating_sub(sequence.blocks.len())
        };
        self.running.iter().map(owed).sum()
    }

    /// Whether all known tokens of a waiting sequence can get blocks, with some to spare for those
    /// that run.
    fn has_room(&self, slot: Slot, prefix: &CachedPrefix, owed_blocks: usize) -> bool {
        let blocks = self.limits.blocks_for(self.slots[slot].tokens.len());
        let need = blocks - prefix.blocks.len() + prefix.num_unused;
        self.pool.available() >= need + owed_blocks + self.spare_blocks()
    }

    fn spare_blocks(&self) -> usize {
        if self.running.is_empty() { 0 } else { self.limits.headroom_blocks() }
    }

    /// The longest cached prefix of the tokens that may come from the cache.
    fn find_cached(&mut self, slot: Slot) -> CachedPrefix {
        let mut prefix = CachedPrefix { blocks: Vec::new(), tip: Tip::ROOT, num_unused: 0 };
        if !self.limits.prefix_cache {
            return prefix;
        }
        let cache = self.pool.cache();
        let sequence = &mut self.slots[slot];
        let block_tokens = self.limits.block_tokens;
        for block in 0..sequence.cacheable_tokens() / block_tokens {
            cache.hash_chain(&sequence.tokens, &mut sequence.hashes, block + 1);
            let tokens = &sequence.tokens[block * block_tokens..(block + 1) * block_tokens];
            let Some((found, tip)) = cache.find(prefix.tip, sequence.hashes[block], tokens) else {
                break;
            };
            prefix.tip = tip;
            prefix.num_unused += usize::from(self.pool.references(found) == 0);
            prefix.blocks.push(found);
        }
        prefix
    }

    /// Whether a running sequence has the better half of what this one lacks in a step in flight,
    /// or in the one being planned: then that is soon in the cache, and waiting is cheaper than
    /// computing it twice. A wrong guess costs a wait for those steps, so hashes do.
    fn is_being_computed(&mut self, slot: Slot, prefix: &CachedPrefix) -> bool {
        let block_tokens = self.limits.block_tokens;
        let num_cached = prefix.blocks.len();
        let num_usable = self.slots[slot].cacheable_tokens() / block_tokens;
        if !self.limits.prefix_cache || num_cached == num_usable {
            return false;
        }
        let cache = self.pool.cache();
        let sequence = &mut self.slots[slot];
        cache.hash_chain(&sequence.tokens, &mut sequence.hashes, num_usable);
        let sequence = &self.slots[slot];
        let hashes = &sequence.hashes[..num_usable];
        let most_shared = |other: &Slot| {
            let other = &self.slots[*other];
            let num_planned = other.hashes.len().min(other.planned / block_tokens);
            if other.entered >= num_planned || other.tip.is_none() {
                return 0;
            }
            let planned = &other.hashes[..num_planned];
            planned.iter().zip(hashes).take_while(|(one, other)| one == other).count()
        };
        let num_shared = self.running.iter().map(most_shared).max().unwrap_or(0);
        let missing = sequence.tokens.len() - num_cached * block_tokens;
        2 * num_shared.saturating_sub(num_cached) * block_tokens >= missing
    }

    /// From the queue to the running, on its cached prefix.
    fn admit(&mut self, draft: &mut Draft, slot: Slot, prefix: CachedPrefix) {
        for block in &prefix.blocks {
            self.pool.share(*block);
        }
        let sequence = &mut self.slots[slot];
        let cached_tokens = prefix.blocks.len() * self.limits.block_tokens;
        if self.limits.prefix_cache {
            self.prefix_lookup_tokens += sequence.tokens.len() as u64;
            self.prefix_hit_tokens += cached_tokens as u64;
        }
        sequence.phase = Phase::Prefill;
        sequence.planned = cached_tokens;
        sequence.computed = cached_tokens;
        sequence.entered = prefix.blocks.len();
        sequence.tip = Some(prefix.tip);
        sequence.blocks = prefix.blocks;
        let (id, rank) = (sequence.id, sequence.rank);
        let cached_tokens = cached_tokens.min(sequence.prompt_len);
        self.events.push(Event::Started { id, cached_tokens });
        self.queue.remove(rank);
        let place = self.running.partition_point(|other| self.slots[*other].rank < rank);
        self.running.insert(place, slot);
        draft.admit.push(slot);
    }
}
