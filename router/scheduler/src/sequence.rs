//! One sequence: what is asked for, what is known, planned and computed of it.

use std::cmp::Reverse;
use std::ops::{Index, IndexMut};

use crate::limits::Limits;
use crate::prefix_cache::Tip;

/// Identifies a sequence; chosen by the caller, never reused while the sequence lives.
pub type SequenceId = u64;

/// A request for the scheduler. Sampling is the caller's and travels beside it.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    /// With 0 the prompt is computed, no token is reported, and the sequence ends by length.
    pub max_new_tokens: usize,
    /// Before this many generated tokens, `stop_token_ids` do not end the sequence.
    pub min_new_tokens: usize,
    /// End-of-sequence ids and stop ids; empty to ignore them.
    pub stop_token_ids: Vec<u32>,
    /// Higher runs first; equal ones in order of arrival. Strict: a lower one waits for as long as
    /// higher ones keep coming and fit.
    pub priority: i32,
    /// Prompt tokens from here on are scored: their logprobs come with the step that computes the
    /// token before them, so none of those is taken from the prefix cache.
    pub score_from: Option<usize>,
}

/// Order of service: the least goes first, the greatest is preempted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    priority: Reverse<i32>,
    arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue, without state on the shards.
    Waiting,
    /// Admitted; some known tokens are not planned yet.
    Prefill,
    /// Every known token but the last is planned; advances token by token.
    Decode,
    /// Over for the caller; kept until no step in flight names it.
    Ended,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub rank: Rank,
    pub phase: Phase,
    /// Prompt and every generated token known so far.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// The first prompt token whose score is wanted and not known; nothing when there is none.
    pub score_from: Option<usize>,
    /// Most tokens, prompt and answer.
    pub max_len: usize,
    min_new_tokens: usize,
    stop_token_ids: Vec<u32>,

    /// KV blocks in order of position.
    pub blocks: Vec<u32>,
    /// How many of `blocks` the shards have been told.
    pub blocks_sent: usize,
    /// Tokens whose KV is computed once every step in flight is done.
    pub planned: usize,
    /// Tokens whose KV is known to be computed.
    pub computed: usize,
    /// Tokens sampled by steps in flight.
    pub unknown: usize,
    pub steps_in_flight: usize,
    /// The step that named it last; 0 for none.
    pub last_step: u64,
    /// To be preempted as soon as no step in flight names it.
    pub yielding: bool,
    /// Sequences of greater rank that started while this one waited.
    pub bypasses: usize,

    /// Hashes of the full known blocks, as far as they were asked for.
    pub hashes: Vec<u128>,
    /// Leading blocks that are in the prefix cache, by this sequence or another.
    pub entered: usize,
    /// Where the next block hangs in the cache; nothing when it cannot be entered any more.
    pub tip: Option<Tip>,
}

impl Sequence {
    pub fn new(new: NewSequence, arrival: u64, max_len: usize) -> Self {
        // The first token has no distribution before it.
        let score_from = new.score_from.map(|from| from.max(1));
        Self {
            id: new.id,
            rank: Rank { priority: Reverse(new.priority), arrival },
            phase: Phase::Waiting,
            prompt_len: new.prompt.len(),
            score_from: score_from.filter(|from| *from < new.prompt.len()),
            tokens: new.prompt,
            max_len,
            min_new_tokens: new.min_new_tokens,
            stop_token_ids: new.stop_token_ids,
            blocks: Vec::new(),
            blocks_sent: 0,
            planned: 0,
            computed: 0,
            unknown: 0,
            steps_in_flight: 0,
            last_step: 0,
            yielding: false,
            bypasses: 0,
            hashes: Vec::new(),
            entered: 0,
            tip: Some(Tip::ROOT),
        }
    }

    /// Most tokens that ever have KV: the last one of an answer is never an input.
    pub fn most_kv_tokens(prompt_len: usize, max_len: usize) -> usize {
        prompt_len.max(max_len - 1)
    }

    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Prefill | Phase::Decode)
    }

    /// One more token may be planned: not beyond the length limit, nor too far ahead of results.
    pub fn can_decode(&self, limits: &Limits) -> bool {
        self.phase == Phase::Decode
            && !self.yielding
            && self.tokens.len() + self.unknown < self.max_len
            && self.steps_in_flight < limits.max_steps_of_sequence()
    }

    /// More of its known tokens may be planned, in a chunk of step `step` or longer in that one.
    pub fn can_prefill(&self, limits: &Limits, step: u64) -> bool {
        self.phase == Phase::Prefill
            && !self.yielding
            && self.planned < self.tokens.len()
            && (self.last_step == step || self.steps_in_flight < limits.max_steps_of_sequence())
    }

    /// Whether `token`, the newest one, ends the sequence.
    pub fn stops_at(&self, token: u32) -> bool {
        let before = self.tokens.len() - 1 - self.prompt_len;
        before >= self.min_new_tokens && self.stop_token_ids.contains(&token)
    }

    /// Leading tokens that may come from the prefix cache. The last token is always computed: it is
    /// what is sampled from. So is every token that scores the one after it.
    pub fn cacheable_tokens(&self) -> usize {
        self.score_from.unwrap_or(self.tokens.len()).min(self.tokens.len()) - 1
    }

    /// The first `end` tokens are computed, and those they foretell are scored.
    pub fn take_computed(&mut self, end: usize) {
        self.computed = end;
        let prompt_len = self.prompt_len;
        let unscored = |from: usize| from.max(end + 1);
        self.score_from = self.score_from.map(unscored).filter(|from| *from < prompt_len);
    }

    /// Back to what it was in the queue, tokens kept.
    pub fn forget_kv(&mut self) {
        self.phase = Phase::Waiting;
        self.blocks.clear();
        self.blocks_sent = 0;
        self.planned = 0;
        self.computed = 0;
        self.last_step = 0;
        self.yielding = false;
        self.bypasses = 0;
        self.entered = 0;
        self.tip = Some(Tip::ROOT);
    }
}

pub(crate) type Slot = usize;

/// Sequences by slot. A slot outlives its id: an ended sequence keeps it while steps name it.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    sequences: Vec<Option<Sequence>>,
    free: Vec<Slot>,
}

impl Slots {
    pub fn insert(&mut self, sequence: Sequence) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.sequences[slot] = Some(sequence);
            return slot;
        }
        self.sequences.push(Some(sequence));
        self.sequences.len() - 1
    }

    pub fn remove(&mut self, slot: Slot) {
        debug_assert!(self.sequences[slot].is_some());
        self.sequences[slot] = None;
        self.free.push(slot);
    }

    pub fn iter(&self) -> impl Iterator<Item = (Slot, &Sequence)> {
        self.sequences.iter().enumerate().filter_map(|(slot, s)| Some((slot, s.as_ref()?)))
    }
}

impl Index<Slot> for Slots {
    type Output = Sequence;
    fn index(&self, slot: Slot) -> &Sequence {
        self.sequences[slot].as_ref().expect("a slot in use holds a sequence")
    }
}

impl IndexMut<Slot> for Slots {
    fn index_mut(&mut self, slot: Slot) -> &mut Sequence {
        self.sequences[slot].as_mut().expect("a slot in use holds a sequence")
    }
}
