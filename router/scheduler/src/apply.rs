//! Takes the result of the oldest step in flight.

use crate::event::{Event, FailReason, FinishReason};
use crate::plan::{InFlight, Part, StepOutput};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, SequenceId, Slot};

/// An answer that does not belong to the plan. The shards are not what they should be; treat it as
/// a lost group. Nothing was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error("a result for step {given}, but no step is in flight")]
    NoStep { given: u64 },
    #[error("a result for step {given}, but step {expected} is the oldest in flight")]
    WrongStep { given: u64, expected: u64 },
    #[error("step {step} has no token of sequence {id}")]
    MissingToken { step: u64, id: SequenceId },
    #[error("step {step} answers for sequence {id}, which was not asked to sample in it")]
    Unexpected { step: u64, id: SequenceId },
    #[error("step {step} answers twice for sequence {id}")]
    Twice { step: u64, id: SequenceId },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Nothing was sampled, or nobody waits for it any more.
    None,
    Token(u32),
    Failed,
}

impl Scheduler {
    /// Takes the result of the oldest step in flight. Events of an earlier `schedule` that were not
    /// polled come first.
    pub fn apply(&mut self, output: StepOutput) -> Result<Vec<Event>, ApplyError> {
        let given = output.step_id;
        let step = self.in_flight.front().ok_or(ApplyError::NoStep { given })?;
        if step.step_id != given {
            return Err(ApplyError::WrongStep { given, expected: step.step_id });
        }
        let answers = self.match_answers(step, &output)?;
        let step = self.in_flight.pop_front().expect("the step that was matched");
        let mut events = std::mem::take(&mut self.events);
        events.reserve(output.tokens.len());
        for (part, answer) in step.parts.iter().zip(answers) {
            self.apply_part(part, answer, &mut events);
        }
        Ok(events)
    }

    /// Events that `schedule` gave rise to (started, preempted), oldest first.
    pub fn poll_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// One answer for each part of the step, in its order. What the shards say about a sequence
    /// that has ended meanwhile does not matter, not even its absence: it may have failed there.
    fn match_answers(&self, step: &InFlight, out: &StepOutput) -> Result<Vec<Answer>, ApplyError> {
        let tokens = out.tokens.iter().map(|(id, token)| (*id, Answer::Token(*token)));
        let failed = out.failed.iter().map(|id| (*id, Answer::Failed));
        let mut given: Vec<(SequenceId, Answer)> = tokens.chain(failed).collect();
        given.sort_unstable_by_key(|(id, _)| *id);
        let step_id = step.step_id;
        if let Some(pair) = given.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(ApplyError::Twice { step: step_id, id: pair[0].0 });
        }
        let mut num_matched = 0;
        let mut answers = Vec::with_capacity(step.parts.len());
        for part in &step.parts {
            let found = given.binary_search_by_key(&part.id, |(id, _)| *id);
            let answer = found.map_or(Answer::None, |index| given[index].1);
            num_matched += usize::from(found.is_ok());
            if self.slots[part.slot].phase == Phase::Ended {
                answers.push(Answer::None);
                continue;
            }
            match (answer, part.samples) {
                (Answer::None, true) => {
                    return Err(ApplyError::MissingToken { step: step_id, id: part.id });
                }
                (Answer::Token(_), false) => {
                    return Err(ApplyError::Unexpected { step: step_id, id: part.id });
                }
                _ => answers.push(answer),
            }
        }
        if num_matched < given.len() {
            let is_part = |id: SequenceId| step.parts.iter().any(|part| part.id == id);
            let stranger = given.iter().find(|(id, _)| !is_part(*id));
            let id = stranger.map_or(0, |(id, _)| *id);
            return Err(ApplyError::Unexpected { step: step_id, id });
        }
        Ok(answers)
    }

    fn apply_part(&mut self, part: &Part, answer: Answer, events: &mut Vec<Event>) {
        let sequence = &mut self.slots[part.slot];
        sequence.steps_in_flight -= 1;
        if sequence.phase == Phase::Ended {
            if sequence.steps_in_flight == 0 {
                self.leave(part.slot);
            }
            return;
        }
        if answer == Answer::Failed {
            events.push(Event::Failed { id: part.id, reason: FailReason::Sequence });
            self.end(part.slot);
            return;
        }
        sequence.take_computed(part.end);
        self.enter_computed(part.slot);
        if let Answer::Token(token) = answer {
            self.take_token(part.slot, token, events);
        }
    }

    fn take_token(&mut self, slot: Slot, token: u32, events: &mut Vec<Event>) {
        let sequence = &mut self.slots[slot];
        let id = sequence.id;
        sequence.unknown -= 1;
        let mut reason = None;
        if sequence.tokens.len() < sequence.max_len {
            sequence.tokens.push(token);
            events.push(Event::Token { id, token });
            if sequence.stops_at(token) {
                reason = Some(FinishReason::Stop);
            }
        }
        if reason.is_none() && sequence.tokens.len() >= sequence.max_len {
            reason = Some(FinishReason::Length);
        }
        if let Some(reason) = reason {
            events.push(Event::Finished { id, reason });
            self.end(slot);
        }
    }

    /// An ended sequence that no step names any more gives its blocks back.
    fn leave(&mut self, slot: Slot) {
        self.leaving.retain(|other| *other != slot);
        self.pool.release(&self.slots[slot].blocks);
        self.slots.remove(slot);
    }

    /// Enters the blocks that are full and computed into the prefix cache.
    fn enter_computed(&mut self, slot: Slot) {
        if !self.limits.prefix_cache {
            return;
        }
        let sequence = &mut self.slots[slot];
        let block_tokens = self.limits.block_tokens;
        let num_full = sequence.computed / block_tokens;
        while sequence.entered < num_full {
            let Some(tip) = sequence.tip else { return };
            let block = sequence.entered;
            self.pool.cache().hash_chain(&sequence.tokens, &mut sequence.hashes, block + 1);
            let tokens = &sequence.tokens[block * block_tokens..(block + 1) * block_tokens];
            let hash = sequence.hashes[block];
            sequence.tip = self.pool.enter(tip, hash, tokens, sequence.blocks[block]);
            sequence.entered += 1;
        }
    }
}
