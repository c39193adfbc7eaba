//! The scheduler's state, its commands and its figures.

use std::collections::BTreeMap;

use crate::block_pool::BlockPool;
use crate::event::{Event, FailReason};
use crate::limits::Limits;
use crate::plan::StepsInFlight;
use crate::prefix_cache::{BlockHash, xxh3_block};
use crate::queue::{Queue, Rejection};
use crate::sequence::{NewSequence, Phase, Sequence, SequenceId, Slot, Slots};
use crate::usage::Usage;

pub struct Scheduler {
    pub(crate) limits: Limits,
    hash_block: BlockHash,
    pub(crate) slots: Slots,
    /// Slots of the sequences the caller knows.
    pub(crate) ids: BTreeMap<SequenceId, Slot>,
    pub(crate) queue: Queue,
    /// Prefill and Decode, in order of rank.
    pub(crate) running: Vec<Slot>,
    /// Ended, but named by a step in flight.
    pub(crate) leaving: Vec<Slot>,
    pub(crate) pool: BlockPool,
    pub(crate) in_flight: StepsInFlight,
    pub(crate) next_step: u64,
    /// Blocks that running sequences could not get when the last step was planned.
    pub(crate) lacking_blocks: usize,
    /// Sequences that the next plan tells the shards to forget.
    pub(crate) drops: Vec<SequenceId>,
    pub(crate) events: Vec<Event>,
    arrivals: u64,
    pub(crate) prefix_lookup_tokens: u64,
    pub(crate) prefix_hit_tokens: u64,
    pub(crate) preemptions: u64,
}

impl Scheduler {
    /// Panics when [`Limits::check`] refuses the limits.
    pub fn new(limits: Limits) -> Self {
        Self::with_block_hash(limits, xxh3_block)
    }

    /// With another hash for the prefix cache; a bad one costs hits, never a wrong token.
    pub fn with_block_hash(limits: Limits, hash_block: BlockHash) -> Self {
        if let Err(error) = limits.check() {
            panic!("{error}");
        }
        Self {
            pool: BlockPool::new(limits.num_blocks, limits.block_tokens, hash_block),
            limits,
            hash_block,
            slots: Slots::default(),
            ids: BTreeMap::new(),
            queue: Queue::default(),
            running: Vec::new(),
            leaving: Vec::new(),
            in_flight: StepsInFlight::new(),
            next_step: 1,
            lacking_blocks: 0,
            drops: Vec::new(),
            events: Vec::new(),
            arrivals: 0,
            prefix_lookup_tokens: 0,
            prefix_hit_tokens: 0,
            preemptions: 0,
        }
    }

    // Commands.

    /// Puts a sequence into the queue, or says why it can never run or not now.
    pub fn add(&mut self, sequence: NewSequence) -> Result<(), Rejection> {
        let limits = &self.limits;
        let prompt_len = sequence.prompt.len();
        if prompt_len == 0 {
            return Err(Rejection::EmptyPrompt);
        }
        if self.ids.contains_key(&sequence.id) {
            return Err(Rejection::Duplicate(sequence.id));
        }
        // A prompt that is only computed needs no room for an answer.
        if prompt_len + sequence.max_new_tokens.min(1) > limits.max_model_len {
            return Err(Rejection::TooLong { given: prompt_len, limit: limits.max_model_len });
        }
        let max_len = prompt_len.saturating_add(sequence.max_new_tokens).min(limits.max_model_len);
        if !self.ever_fits(prompt_len, max_len) {
            let limit = limits.num_blocks * limits.block_tokens;
            return Err(Rejection::NeverFits { given: max_len, limit });
        }
        if self.queue.len() >= limits.max_waiting {
            return Err(Rejection::QueueFull { limit: limits.max_waiting });
        }
        let id = sequence.id;
        let sequence = Sequence::new(sequence, self.arrivals, max_len);
        self.arrivals += 1;
        let rank = sequence.rank;
        let slot = self.slots.insert(sequence);
        self.ids.insert(id, slot);
        self.queue.insert(rank, slot);
        Ok(())
    }

    /// Whether the sequence could finish if it had every block.
    fn ever_fits(&self, prompt_len: usize, max_len: usize) -> bool {
        let most = Sequence::most_kv_tokens(prompt_len, max_len);
        self.limits.blocks_for(most) <= self.limits.num_blocks
    }

    /// Forgets a sequence wherever it is (client left, stop string found). No event follows.
    /// False when it is not known.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(&slot) = self.ids.get(&id) else { return false };
        self.events.retain(|event| event.id() != id);
        if self.slots[slot].phase == Phase::Waiting {
            self.forget_waiting(slot);
        } else {
            self.end(slot);
        }
        true
    }

    /// The shards are gone: steps in flight, KV and cache are lost. Sequences with state on the
    /// shards fail, as do waiting ones that can never fit into `num_blocks`; the other waiting
    /// ones wait on. Plans start again from step 1 on `num_blocks` blocks.
    pub fn lose_group(&mut self, num_blocks: usize) -> Vec<Event> {
        let mut events = std::mem::take(&mut self.events);
        self.limits.num_blocks = num_blocks;
        self.pool = BlockPool::new(num_blocks, self.limits.block_tokens, self.hash_block);
        self.in_flight.clear();
        self.next_step = 1;
        self.lacking_blocks = 0;
        self.drops.clear();
        for slot in std::mem::take(&mut self.leaving) {
            self.slots.remove(slot);
        }
        let mut fail = |id| events.push(Event::Failed { id, reason: FailReason::GroupLost });
        for slot in std::mem::take(&mut self.running) {
            fail(self.slots[slot].id);
            self.ids.remove(&self.slots[slot].id);
            self.slots.remove(slot);
        }
        let waiting: Vec<Slot> = self.queue.iter().map(|(_, slot)| slot).collect();
        for slot in waiting {
            let sequence = &self.slots[slot];
            if !self.ever_fits(sequence.prompt_len, sequence.max_len) {
                fail(sequence.id);
                self.forget_waiting(slot);
            }
        }
        events
    }

    /// Forgets every cached prefix. What runs keeps its blocks, but enters none of them any more.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.clear_cache();
        for slot in &self.running {
            self.slots[*slot].tip = None;
        }
    }

    // Ways out of the scheduler.

    fn forget_waiting(&mut self, slot: Slot) {
        self.queue.remove(self.slots[slot].rank);
        self.ids.remove(&self.slots[slot].id);
        self.slots.remove(slot);
    }

    /// A running sequence is over: the caller knows it no more, the shards are told with the next
    /// plan, and its blocks return when no step in flight names it.
    pub(crate) fn end(&mut self, slot: Slot) {
        let sequence = &mut self.slots[slot];
        debug_assert!(sequence.is_running());
        sequence.phase = Phase::Ended;
        let (id, is_named) = (sequence.id, sequence.steps_in_flight > 0);
        self.ids.remove(&id);
        self.drops.push(id);
        self.running.retain(|other| *other != slot);
        if is_named {
            self.leaving.push(slot);
        } else {
            self.pool.release(&self.slots[slot].blocks);
            self.slots.remove(slot);
        }
    }

    // Figures.

    pub fn usage(&self) -> Usage {
        Usage {
            waiting: self.queue.len(),
            running: self.running.len(),
            steps_in_flight: self.in_flight.len(),
            blocks_total: self.limits.num_blocks,
            blocks_used: self.pool.num_held(),
            blocks_cached: self.pool.num_unused(),
            prefix_lookup_tokens_total: self.prefix_lookup_tokens,
            prefix_hit_tokens_total: self.prefix_hit_tokens,
            preemptions_total: self.preemptions,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }
}
