//! Client, shards and network around one scheduler.

use std::collections::BTreeMap;

use rand::Rng;
use trireme_scheduler::{
    Event, FailReason, MAX_BYPASSES, NewSequence, Rejection, Scheduler, SequenceId, StepOutput,
};

use crate::rules::Rules;
use crate::shard::Shard;
use crate::workload::{Answer, Workload, answer};

/// Turns with arrivals; then the rest is drained.
const TURNS: usize = 2_500;
/// Far more turns than a drain needs, so that a livelock ends.
const DRAIN_TURNS: usize = 20_000;

/// What happened, to see that it happened at all.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub steps: u64,
    finished: u64,
    cancelled: u64,
    failed: u64,
    lost: u64,
    preempted: u64,
    refused: u64,
    bypassed: u64,
    blocked: u64,
    nonsense: u64,
    cached_tokens: u64,
}

impl Counts {
    pub fn named(&self) -> [(&'static str, u64); 10] {
        [
            ("finished", self.finished),
            ("cancelled", self.cancelled),
            ("failed", self.failed),
            ("lost", self.lost),
            ("preempted", self.preempted),
            ("refused by a full queue", self.refused),
            ("bypassed", self.bypassed),
            ("bypassed to the limit", self.blocked),
            ("refused results", self.nonsense),
            ("cached tokens", self.cached_tokens),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.finished += other.finished;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
        self.lost += other.lost;
        self.preempted += other.preempted;
        self.refused += other.refused;
        self.bypassed += other.bypassed;
        self.blocked += other.blocked;
        self.nonsense += other.nonsense;
        self.cached_tokens += other.cached_tokens;
    }
}

struct Request {
    new: NewSequence,
    answer: Answer,
    num_received: usize,
    /// The next prompt token to be scored.
    next_score: usize,
    is_running: bool,
    /// Steps before it may name an earlier sequence with its id. 0 before it is admitted.
    first_step: u64,
    /// The shards said so; the event must follow.
    has_failed: bool,
    bypasses: usize,
    /// Least first.
    rank: (i32, u64),
}

pub struct World {
    workload: Workload,
    scheduler: Scheduler,
    shard: Shard,
    rules: Rules,
    requests: BTreeMap<SequenceId, Request>,
    arrivals: u64,
    /// Since events were heard last: those to come may be about a world with one more in it.
    has_cancelled: bool,
    counts: Counts,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let workload = Workload::new(seed);
        let limits = &workload.limits;
        Self {
            scheduler: workload.scheduler(),
            shard: Shard::new(limits.num_blocks, limits.block_tokens, workload.vocab),
            rules: Rules::new(limits.clone()),
            workload,
            requests: BTreeMap::new(),
            arrivals: 0,
            has_cancelled: false,
            counts: Counts::default(),
        }
    }

    pub fn run(mut self) -> Counts {
        for _ in 0..TURNS {
            while self.workload.happens(self.workload.rates.add) {
                self.add();
            }
            if self.workload.happens(self.workload.rates.cancel) {
                self.cancel();
            }
            if self.workload.happens(self.workload.rates.reset_cache) {
                self.scheduler.reset_prefix_cache();
                self.scheduler.check_invariants();
                assert_eq!(self.scheduler.usage().blocks_cached, 0);
            }
            if self.workload.happens(self.workload.rates.lose_group) {
                self.lose_group();
            }
            self.turn();
        }
        for _ in 0..DRAIN_TURNS {
            if !self.turn() {
                self.check_drained();
                return self.counts;
            }
        }
        panic!("{} sequences never end", self.requests.len());
    }

    fn check_drained(&mut self) {
        assert!(self.requests.is_empty(), "{} sequences are stuck", self.requests.len());
        assert_eq!(self.scheduler.schedule(), None);
        let usage = self.scheduler.usage();
        assert_eq!((usage.waiting, usage.running, usage.steps_in_flight), (0, 0, 0));
        assert_eq!(usage.blocks_used, 0);
        assert_eq!(self.shard.num_known(), 0, "the shards were not told to forget");
        // Those that were cancelled before the event was polled are not heard of.
        assert!(usage.preemptions_total >= self.counts.preempted);
    }

    /// Plans a step or takes a result; false when there is nothing to do.
    fn turn(&mut self) -> bool {
        let in_flight = !self.rules.pending.is_empty();
        if in_flight && self.workload.happens(self.workload.rates.early_result) {
            self.take_result();
            return true;
        }
        let plan = self.scheduler.schedule();
        self.scheduler.check_invariants();
        // Preempted and started ones first: a plan admits what has left the queue.
        if self.workload.rng.random_bool(0.7) {
            let events = self.scheduler.poll_events();
            self.hear(events);
        }
        if let Some(plan) = plan {
            for admit in &plan.admit {
                let request = self.requests.get_mut(&admit.id).expect("a live sequence");
                request.first_step = plan.step_id;
                assert_eq!(admit.prompt_len, request.new.prompt.len());
                assert_eq!(admit.tokens[..admit.prompt_len], request.new.prompt);
                let received = &request.answer.tokens[..request.num_received];
                assert_eq!(admit.tokens[admit.prompt_len..], *received);
            }
            self.rules.take(plan, &self.shard);
            return true;
        }
        self.take_result()
    }

    fn add(&mut self) {
        // Whoever started already has not bypassed the newcomer.
        let events = self.scheduler.poll_events();
        self.hear(events);
        self.arrivals += 1;
        // Ids come back soon after they are free, as the seams allow.
        let id = self.arrivals % 128;
        let new = self.workload.request(id);
        let limits = &self.workload.limits;
        let (prompt_len, most) = (new.prompt.len(), limits.max_model_len);
        let max_len = most.min(prompt_len + new.max_new_tokens);
        let kv_tokens = prompt_len.max(max_len.saturating_sub(1));
        let fits = kv_tokens <= limits.num_blocks * limits.block_tokens;
        let has_room = prompt_len + new.max_new_tokens.min(1) <= most;
        let is_full = self.scheduler.usage().waiting >= limits.max_waiting;
        let result = self.scheduler.add(new.clone());
        self.scheduler.check_invariants();
        match result {
            Ok(()) => {}
            Err(Rejection::QueueFull { .. }) => {
                assert!(is_full);
                self.counts.refused += 1;
                return;
            }
            Err(Rejection::Duplicate(_)) => return assert!(self.requests.contains_key(&id)),
            Err(Rejection::TooLong { .. }) => return assert!(!has_room),
            Err(Rejection::NeverFits { .. }) => return assert!(!fits),
            Err(Rejection::EmptyPrompt) => unreachable!("prompts have a token"),
        }
        assert!(!is_full && fits && has_room);
        let request = Request {
            answer: answer(&new, self.workload.vocab, most),
            rank: (-new.priority, self.arrivals),
            next_score: new.score_from.unwrap_or(usize::MAX).max(1),
            new,
            num_received: 0,
            is_running: false,
            first_step: 0,
            has_failed: false,
            bypasses: 0,
        };
        assert!(self.requests.insert(id, request).is_none());
    }

    fn cancel(&mut self) {
        if self.requests.is_empty() {
            assert!(!self.scheduler.cancel(999));
            return;
        }
        let place = self.workload.rng.random_range(0..self.requests.len());
        let id = *self.requests.keys().nth(place).expect("a place within");
        assert!(self.scheduler.cancel(id));
        self.scheduler.check_invariants();
        self.requests.remove(&id);
        self.has_cancelled = true;
        self.counts.cancelled += 1;
        assert!(!self.scheduler.cancel(id));
    }

    fn lose_group(&mut self) {
        let limits = &mut self.workload.limits;
        limits.num_blocks = self.workload.rng.random_range(2..=40);
        let limits = &self.workload.limits;
        let events = self.scheduler.lose_group(limits.num_blocks);
        self.scheduler.check_invariants();
        self.shard = Shard::new(limits.num_blocks, limits.block_tokens, self.workload.vocab);
        self.rules = Rules::new(limits.clone());
        self.hear(events);
        assert!(self.requests.values().all(|request| !request.is_running));
        let stale = StepOutput { step_id: 1, ..StepOutput::default() };
        assert!(self.scheduler.apply(stale).is_err());
    }

    fn take_result(&mut self) -> bool {
        let Some(plan) = self.rules.pop() else { return false };
        let workload = &mut self.workload;
        let fail = workload.rates.fail;
        let mut output = self.shard.execute(&plan, &mut || workload.happens(fail));
        if self.workload.rng.random_bool(0.1) {
            output.tokens.reverse();
        }
        if self.workload.happens(self.workload.rates.nonsense) {
            self.refuse_nonsense(&output);
        }
        for (id, scored) in std::mem::take(&mut self.shard.scored) {
            let request = self.requests.get_mut(&id);
            if let Some(request) = request.filter(|r| (1..=plan.step_id).contains(&r.first_step)) {
                assert_eq!(scored.start, request.next_score, "{id} misses scores");
                request.next_score = scored.end;
            }
        }
        for id in &output.failed {
            let request = self.requests.get_mut(id);
            if let Some(request) = request.filter(|r| (1..=plan.step_id).contains(&r.first_step)) {
                request.has_failed = true;
            }
        }
        let events = self.scheduler.apply(output).expect("the result of the oldest step");
        self.scheduler.check_invariants();
        self.counts.steps += 1;
        self.hear(events);
        true
    }

    /// Results that no shard should give are refused and change nothing.
    fn refuse_nonsense(&mut self, output: &StepOutput) {
        let before = self.scheduler.usage();
        let mut bad = vec![StepOutput { step_id: output.step_id + 1, ..output.clone() }; 4];
        bad[1].step_id = output.step_id;
        bad[1].tokens.push((9_999, 1));
        bad[2].step_id = output.step_id;
        bad[2].failed.extend(output.tokens.iter().map(|(id, _)| *id));
        if output.tokens.is_empty() {
            bad[2].failed = vec![9_999];
        }
        bad[3].step_id = 0;
        for output in bad {
            assert!(self.scheduler.apply(output.clone()).is_err(), "{output:?}");
            self.scheduler.check_invariants();
            self.counts.nonsense += 1;
        }
        assert_eq!(before, self.scheduler.usage());
    }

    fn hear(&mut self, events: Vec<Event>) {
        for event in events {
            let id = event.id();
            assert!(self.requests.contains_key(&id), "{event:?} of a sequence that is gone");
            match event {
                Event::Started { cached_tokens, .. } => self.hear_started(id, cached_tokens),
                Event::Preempted { .. } => self.hear_preempted(id),
                Event::Token { token, .. } => {
                    let request = self.requests.get_mut(&id).expect("checked above");
                    assert!(request.is_running);
                    let expected = request.answer.tokens.get(request.num_received);
                    assert_eq!(Some(&token), expected, "token {} of {id}", request.num_received);
                    request.num_received += 1;
                }
                Event::Finished { reason, .. } => {
                    let request = self.requests.remove(&id).expect("checked above");
                    assert_eq!(request.num_received, request.answer.tokens.len());
                    assert_eq!(reason, request.answer.reason);
                    assert!(!request.has_failed);
                    assert!(request.next_score >= request.new.prompt.len(), "{id} lacks scores");
                    self.counts.finished += 1;
                    let mut conversation = request.new.prompt;
                    conversation.extend(request.answer.tokens);
                    self.workload.remember(conversation);
                }
                Event::Failed { reason, .. } => {
                    let request = self.requests.remove(&id).expect("checked above");
                    match reason {
                        FailReason::Sequence => assert!(request.has_failed),
                        FailReason::GroupLost => self.counts.lost += 1,
                    }
                    self.counts.failed += 1;
                }
            }
        }
        self.has_cancelled = false;
    }

    fn hear_started(&mut self, id: SequenceId, cached_tokens: usize) {
        let request = self.requests.get_mut(&id).expect("a live sequence");
        assert!(!request.is_running);
        assert!(cached_tokens <= request.new.prompt.len());
        request.is_running = true;
        self.counts.cached_tokens += cached_tokens as u64;
        let rank = request.rank;
        for other in self.requests.values_mut() {
            if !other.is_running && other.rank < rank {
                other.bypasses += 1;
                assert!(other.bypasses <= MAX_BYPASSES, "a sequence is starved");
                self.counts.bypassed += 1;
                self.counts.blocked += u64::from(other.bypasses == MAX_BYPASSES);
            }
        }
    }

    fn hear_preempted(&mut self, id: SequenceId) {
        let running = self.requests.values().filter(|request| request.is_running);
        let oldest = running.map(|request| request.rank).min();
        let request = self.requests.get_mut(&id).expect("a live sequence");
        assert!(request.is_running);
        let is_oldest = oldest == Some(request.rank);
        assert!(self.has_cancelled || !is_oldest, "the oldest was preempted");
        (request.is_running, request.bypasses) = (false, 0);
        self.counts.preempted += 1;
    }
}
