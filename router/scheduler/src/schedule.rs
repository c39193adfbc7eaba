//! Plans the next step.

use crate::plan::{Admit, Chunk, InFlight, Part, Plan};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, SequenceId, Slot};

/// A step while it is planned.
pub(crate) struct Draft {
    step_id: u64,
    pub tokens_left: usize,
    decode: Vec<Slot>,
    pub admit: Vec<Slot>,
    chunks: Vec<Part>,
    /// A running sequence lacks blocks.
    pub is_short: bool,
}

/// How prefills share the budget of a step.
pub(crate) struct Share {
    /// The second pass gives what is left to whoever comes first.
    is_first_pass: bool,
    /// A sequence that cannot end within the step got its part.
    pub long_served: bool,
}

impl Share {
    /// Tokens of a chunk for a sequence that lacks `missing` tokens.
    pub fn of(&self, missing: usize, tokens_left: usize) -> usize {
        if missing <= tokens_left || !self.is_first_pass {
            missing.min(tokens_left)
        } else if self.long_served {
            0
        } else {
            tokens_left.div_ceil(2)
        }
    }
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
        draft.tokens_left = draft.tokens_left.min(self.limits.tokens_beside(draft.decode.len()));
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
    pub(crate) fn plan_chunk(&mut self, draft: &mut Draft, slot: Slot, len: usize) {
        let start = self.slots[slot].planned;
        let end = self.reserve(slot, start + len);
        draft.is_short |= end < start + len;
        if end <= start {
            return;
        }
        draft.tokens_left -= end - start;
        let sequence = &mut self.slots[slot];
        sequence.planned = end;
        if self.limits.prefix_cache {
            let num_full = end / self.limits.block_tokens;
            self.pool.cache().hash_chain(&sequence.tokens, &mut sequence.hashes, num_full);
        }
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
            plan.admit.push(Admit {
                id: sequence.id,
                tokens: sequence.tokens.clone(),
                prompt_len: sequence.prompt_len,
                score_from: sequence.score_from,
            });
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
