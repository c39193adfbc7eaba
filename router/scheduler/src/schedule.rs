//! Plans the next step.

use crate::event::Event;
use crate::plan::{Admit, Chunk, InFlight, Part, Plan};
use crate::prefix_cache::Tip;
use crate::queue::{LOOK_AHEAD, MAX_BYPASSES};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, SequenceId, Slot};

/// A step while it is planned.
struct Draft {
    step_id: u64,
    tokens_left: usize,
    decode: Vec<Slot>,
    admit: Vec<Slot>,
    chunks: Vec<Part>,
    /// A running sequence lacks blocks.
    is_short: bool,
}

/// How prefills share the budget of a step.
struct Share {
    /// The second pass gives what is left to whoever comes first.
    is_first_pass: bool,
    /// A sequence that cannot end within the step got its part.
    long_served: bool,
}

impl Share {
    /// Tokens of a chunk for a sequence that lacks `missing` tokens.
    fn of(&self, missing: usize, tokens_left: usize) -> usize {
        if missing <= tokens_left || !self.is_first_pass {
            missing.min(tokens_left)
        } else if self.long_served {
            0
        } else {
            tokens_left.div_ceil(2)
        }
    }
}

/// The part of a waiting sequence's tokens that is in the prefix cache.
struct CachedPrefix {
    blocks: Vec<u32>,
    tip: Tip,
    /// Of the blocks, those that no sequence holds.
    num_unused: usize,
}

impl Scheduler {
    /// The next step, or nothing when there is no work or enough steps are in flight.
    pub fn schedule(&mut self) -> Option<Plan> {
        if self.in_flight.len() >= self.limits.max_steps_in_flight {
            return None;
        }
        self.settle_preemptions();
        let mut draft = Draft {
            step_id: self.next_step,
            tokens_left: self.limits.max_batch_tokens,
            decode: Vec::new(),
            admit: Vec::new(),
            chunks: Vec::new(),
            is_short: false,
        };
        self.plan_decodes(&mut draft);
        let mut share = Share { is_first_pass: true, long_served: false };
        self.plan_prefills(&mut draft, &mut share);
        self.plan_admissions(&mut draft, &mut share);
        if share.long_served {
            share.is_first_pass = false;
            self.plan_prefills(&mut draft, &mut share);
            self.plan_admissions(&mut draft, &mut share);
        }
        self.emit(draft)
    }

    fn plan_decodes(&mut self, draft: &mut Draft) {
        let decoding = |slot: &&Slot| self.slots[**slot].phase == Phase::Decode;
        let num_decoding = self.running.iter().filter(decoding).count();
        let most = num_decoding.div_ceil(self.limits.decode_spread()).min(draft.tokens_left);
        let can_decode = |slot: &&Slot| self.slots[**slot].can_decode(&self.limits);
        let mut able: Vec<Slot> = self.running.iter().filter(can_decode).copied().collect();
        if able.len() > most {
            // Stable: among equals, in order of rank.
            able.sort_by_key(|slot| self.slots[*slot].last_step);
        }
        draft.decode.reserve_exact(most.min(able.len()));
        for slot in able {
            if draft.decode.len() == most {
                break;
            }
            // An older one may have preempted it since.
            if !self.slots[slot].can_decode(&self.limits) {
                continue;
            }
            let end = self.slots[slot].planned + 1;
            if self.reserve(slot, end) < end {
                draft.is_short = true;
                continue;
            }
            let sequence = &mut self.slots[slot];
            sequence.planned = end;
            sequence.unknown += 1;
            sequence.steps_in_flight += 1;
            sequence.last_step = draft.step_id;
            draft.decode.push(slot);
        }
        draft.tokens_left -= draft.decode.len();
    }

    /// Chunks of sequences that run already.
    fn plan_prefills(&mut self, draft: &mut Draft, share: &mut Share) {
        if draft.tokens_left == 0 {
            return;
        }
        let prefill = |slot: &&Slot| self.slots[**slot].phase == Phase::Prefill;
        let prefilling: Vec<Slot> = self.running.iter().filter(prefill).copied().collect();
        for slot in prefilling {
            let sequence = &self.slots[slot];
            if draft.tokens_left == 0 {
                return;
            }
            if !sequence.can_prefill(&self.limits, draft.step_id) {
                continue;
            }
            let missing = sequence.tokens.len() - sequence.planned;
            let len = share.of(missing, draft.tokens_left);
            share.long_served |= len < missing;
            self.plan_chunk(draft, slot, len);
        }
    }

    /// Adds `len` tokens of a sequence to the step, or as many as there are blocks for.
    fn plan_chunk(&mut self, draft: &mut Draft, slot: Slot, len: usize) {
        let start = self.slots[slot].planned;
        let end = self.reserve(slot, start + len);
        draft.is_short |= end < start + len;
        if end <= start {
            return;
        }
        draft.tokens_left -= end - start;
        let sequence = &mut self.slots[slot];
        sequence.planned = end;
        let samples = end == sequence.tokens.len();
        if sequence.last_step == draft.step_id {
            let part = draft.chunks.iter_mut().find(|part| part.slot == slot);
            let part = part.expect("a sequence named by the step has a chunk in it");
            (part.end, part.samples) = (end, samples);
        } else {
            sequence.last_step = draft.step_id;
            sequence.steps_in_flight += 1;
            draft.chunks.push(Part { slot, id: sequence.id, start, end, samples });
        }
        if samples {
            sequence.phase = Phase::Decode;
            sequence.unknown = 1;
        }
    }

    /// Starts sequences from the queue. Nobody starts while a running sequence lacks blocks: what
    /// comes free is for those that run.
    fn plan_admissions(&mut self, draft: &mut Draft, share: &mut Share) {
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
            if len == 0 || !self.has_room(slot, &prefix, owed_blocks) {
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

    /// The longest cached prefix. The last token is always computed: it is what is sampled from.
    fn find_cached(&mut self, slot: Slot) -> CachedPrefix {
        let mut prefix = CachedPrefix { blocks: Vec::new(), tip: Tip::ROOT, num_unused: 0 };
        if !self.limits.prefix_cache {
            return prefix;
        }
        let cache = self.pool.cache();
        let sequence = &mut self.slots[slot];
        let block_tokens = self.limits.block_tokens;
        for block in 0..(sequence.tokens.len() - 1) / block_tokens {
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

    /// Turns the draft into a plan in flight. A plan of drops alone is made only when nothing is
    /// in flight: otherwise a later one will carry them.
    fn emit(&mut self, draft: Draft) -> Option<Plan> {
        let is_empty = draft.decode.is_empty() && draft.chunks.is_empty();
        if is_empty && (self.drops.is_empty() || !self.in_flight.is_empty()) {
            return None;
        }
        let mut plan = Plan {
            step_id: draft.step_id,
            drop: std::mem::take(&mut self.drops),
            ..Plan::default()
        };
        self.next_step += 1;
        for slot in draft.admit {
            let sequence = &self.slots[slot];
            let (id, prompt_len) = (sequence.id, sequence.prompt_len);
            plan.admit.push(Admit { id, tokens: sequence.tokens.clone(), prompt_len });
        }
        let mut parts = draft.chunks;
        for part in &parts {
            let Part { id, start, end, samples, .. } = *part;
            plan.chunks.push(Chunk { id, start, len: end - start, sample: samples });
            plan.blocks.extend(self.unsent_blocks(part.slot));
        }
        plan.decode.reserve_exact(draft.decode.len());
        parts.reserve_exact(draft.decode.len());
        for slot in draft.decode {
            let sequence = &self.slots[slot];
            let (id, end) = (sequence.id, sequence.planned);
            plan.decode.push(id);
            parts.push(Part { slot, id, start: end - 1, end, samples: true });
            plan.blocks.extend(self.unsent_blocks(slot));
        }
        self.in_flight.push_back(InFlight { step_id: draft.step_id, parts });
        Some(plan)
    }

    /// Blocks that the shards have not been told of.
    fn unsent_blocks(&mut self, slot: Slot) -> Option<(SequenceId, Vec<u32>)> {
        let sequence = &mut self.slots[slot];
        let unsent = sequence.blocks[sequence.blocks_sent..].to_vec();
        sequence.blocks_sent = sequence.blocks.len();
        (!unsent.is_empty()).then_some((sequence.id, unsent))
    }
}
