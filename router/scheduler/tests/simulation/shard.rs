//! A shard that is a function: its pages hold hashes of token histories.

use std::collections::BTreeMap;
use std::ops::Range;

use trireme_scheduler::{Plan, SequenceId, StepOutput};

use crate::workload::{history, sampled};

/// Nothing was ever written there.
const BLANK: u64 = 0;

pub struct Shard {
    block_tokens: usize,
    vocab: u32,
    /// By block and offset: the hash of all tokens up to the one whose KV is there.
    pages: Vec<u64>,
    known: BTreeMap<SequenceId, Known>,
    /// Prompt tokens that the last step scored.
    pub scored: Vec<(SequenceId, Range<usize>)>,
    last_step: u64,
}

struct Known {
    tokens: Vec<u32>,
    /// By position: the hash of all tokens up to it.
    histories: Vec<u64>,
    table: Vec<u32>,
    kv_len: usize,
    prompt_len: usize,
    score_from: Option<usize>,
    is_broken: bool,
}

impl Known {
    fn push(&mut self, token: u32) {
        let before = self.histories.last().copied().unwrap_or_default();
        self.histories.push(history(before, token));
        self.tokens.push(token);
    }
}

impl Shard {
    pub fn new(num_blocks: usize, block_tokens: usize, vocab: u32) -> Self {
        Self {
            block_tokens,
            vocab,
            pages: vec![BLANK; num_blocks * block_tokens],
            known: BTreeMap::new(),
            scored: Vec::new(),
            last_step: 0,
        }
    }

    pub fn num_known(&self) -> usize {
        self.known.len()
    }

    /// Panics unless `blocks` hold the KV of exactly these tokens, by steps already done.
    pub fn check_cached(&self, tokens: &[u32], blocks: &[u32]) {
        let mut hash = 0;
        for (position, token) in tokens.iter().enumerate() {
            hash = history(hash, *token);
            let page = blocks[position / self.block_tokens] as usize * self.block_tokens;
            let found = self.pages[page + position % self.block_tokens];
            assert_eq!(found, hash, "cached token {position} is not what it should be");
        }
    }

    /// Does one step. `fails` says which sequences fail alone; a broken one answers anything.
    pub fn execute(&mut self, plan: &Plan, fails: &mut dyn FnMut() -> bool) -> StepOutput {
        assert_eq!(plan.step_id, self.last_step + 1, "a gap in the steps");
        self.last_step = plan.step_id;
        self.scored.clear();
        self.prepare(plan);
        let mut output = StepOutput { step_id: plan.step_id, ..StepOutput::default() };
        let chunks = plan.chunks.iter().map(|chunk| (chunk.id, chunk.start, chunk.len));
        let chunks: Vec<_> = chunks.collect();
        let decodes = plan.decode.iter().map(|id| (*id, self.known[id].kv_len, 1));
        let work: Vec<_> = chunks.iter().copied().chain(decodes).collect();
        for (index, (id, start, len)) in work.into_iter().enumerate() {
            let samples = plan.chunks.get(index).is_none_or(|chunk| chunk.sample);
            self.advance(id, start, len);
            let token = self.sample(id, samples);
            let known = self.known.get_mut(&id).expect("a known sequence");
            if known.is_broken {
                // Whatever a shard does with a sequence that it gave up.
                match (fails(), fails()) {
                    (true, _) => output.failed.push(id),
                    (_, true) if samples => output.tokens.push((id, 7)),
                    _ => {}
                }
            } else if fails() {
                known.is_broken = true;
                output.failed.push(id);
            } else if let Some(token) = token {
                output.tokens.push((id, token));
            }
        }
        output
    }

    fn prepare(&mut self, plan: &Plan) {
        for id in &plan.drop {
            assert!(self.known.remove(id).is_some(), "drop of {id}, which is not known");
        }
        for admit in &plan.admit {
            let mut known = Known {
                tokens: Vec::new(),
                histories: Vec::new(),
                table: Vec::new(),
                kv_len: 0,
                prompt_len: admit.prompt_len,
                score_from: admit.score_from,
                is_broken: false,
            };
            admit.tokens.iter().for_each(|token| known.push(*token));
            let chunk = plan.chunks.iter().find(|chunk| chunk.id == admit.id);
            known.kv_len = chunk.expect("an admitted sequence has a chunk").start;
            assert!(self.known.insert(admit.id, known).is_none(), "{} is known", admit.id);
        }
        for (id, blocks) in &plan.blocks {
            self.known.get_mut(id).expect("blocks of a known sequence").table.extend(blocks);
        }
    }

    /// Reads every page before `start`, writes those of `len` tokens.
    fn advance(&mut self, id: SequenceId, start: usize, len: usize) {
        let known = self.known.get_mut(&id).expect("work on a known sequence");
        assert_eq!(known.kv_len, start, "{id} continues at the wrong position");
        assert!(len > 0 && start + len <= known.tokens.len(), "{id} has no such tokens");
        for (block, histories) in known.histories[..start].chunks(self.block_tokens).enumerate() {
            let page = known.table[block] as usize * self.block_tokens;
            let found = &self.pages[page..page + histories.len()];
            assert_eq!(found, histories, "{id} reads another history in its block {block}");
        }
        for position in start..start + len {
            let page = known.table[position / self.block_tokens] as usize * self.block_tokens;
            self.pages[page + position % self.block_tokens] = known.histories[position];
        }
        if let Some(from) = known.score_from {
            let scored = (start + 1).max(from)..(start + len + 1).min(known.prompt_len);
            self.scored.extend((!scored.is_empty()).then_some((id, scored)));
        }
        known.kv_len = start + len;
    }

    fn sample(&mut self, id: SequenceId, samples: bool) -> Option<u32> {
        let known = self.known.get_mut(&id).expect("a known sequence");
        assert_eq!(samples, known.kv_len == known.tokens.len(), "{id} samples at the wrong place");
        let last = known.kv_len - 1;
        let page = known.table[last / self.block_tokens] as usize * self.block_tokens;
        let token = sampled(self.pages[page + last % self.block_tokens], self.vocab);
        if samples {
            known.push(token);
        }
        samples.then_some(token)
    }
}
