//! Engines and requests drawn from a seed, and the answers they must get.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trireme_scheduler::{BlockHash, FinishReason, Limits, NewSequence, Scheduler, SequenceId};

/// The hash of a history, one token longer. Never 0.
pub fn history(before: u64, token: u32) -> u64 {
    let mut x = (before ^ u64::from(token)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) | 1
}

/// The token that follows a history.
pub fn sampled(history: u64, vocab: u32) -> u32 {
    ((history >> 20) % u64::from(vocab)) as u32
}

/// What a request must get when nothing goes wrong.
pub struct Answer {
    pub tokens: Vec<u32>,
    pub reason: FinishReason,
}

/// Token by token, alone, without KV.
pub fn answer(request: &NewSequence, vocab: u32, max_model_len: usize) -> Answer {
    let mut hash = request.prompt.iter().fold(0, |hash, token| history(hash, *token));
    let mut tokens = Vec::new();
    let room = max_model_len - request.prompt.len();
    while tokens.len() < request.max_new_tokens.min(room) {
        let token = sampled(hash, vocab);
        let may_stop = tokens.len() >= request.min_new_tokens;
        tokens.push(token);
        if may_stop && request.stop_token_ids.contains(&token) {
            return Answer { tokens, reason: FinishReason::Stop };
        }
        hash = history(hash, token);
    }
    Answer { tokens, reason: FinishReason::Length }
}

/// How often things happen, in thousandths of a turn.
pub struct Rates {
    pub add: u32,
    pub cancel: u32,
    pub fail: u32,
    pub lose_group: u32,
    pub reset_cache: u32,
    pub nonsense: u32,
    /// Of taking a result although another step could be planned.
    pub early_result: u32,
}

pub struct Workload {
    pub rng: StdRng,
    pub limits: Limits,
    pub rates: Rates,
    pub vocab: u32,
    hash_block: Option<BlockHash>,
    stems: Vec<Vec<u32>>,
    /// Prompts of a few tokens among the others.
    short_share: f64,
    longest_prompt: usize,
    longest_answer: usize,
    priorities: i32,
}

fn constant_hash(_parent: u128, _tokens: &[u32]) -> u128 {
    7
}

fn two_bit_hash(parent: u128, tokens: &[u32]) -> u128 {
    tokens.iter().fold(parent, |sum, token| sum + u128::from(*token)) % 4
}

impl Workload {
    pub fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let block_tokens = [1, 2, 4, 4, 16][rng.random_range(0..5)];
        let stages = rng.random_range(1..=3);
        let most_batch_tokens = [4, 24, 64][rng.random_range(0..3)];
        let most_waiting = [4, 48][rng.random_range(0..2)];
        let limits = Limits {
            num_blocks: rng.random_range(2..=40),
            block_tokens,
            max_batch_tokens: rng.random_range(1..=most_batch_tokens),
            max_mixed_tokens: rng.random_range(1..=most_batch_tokens),
            max_sequences: rng.random_range(1..=10),
            max_waiting: rng.random_range(1..=most_waiting),
            max_model_len: rng.random_range(4..=80),
            stages,
            max_steps_in_flight: [1, 2, stages + 1][rng.random_range(0..3)],
            prefix_cache: rng.random_bool(0.8),
        };
        let rarely = |rng: &mut StdRng, most| {
            if rng.random_bool(0.5) { 0 } else { rng.random_range(0..=most) }
        };
        let rates = Rates {
            add: rng.random_range(50..=600),
            cancel: rarely(&mut rng, 100),
            fail: rarely(&mut rng, 20),
            lose_group: rarely(&mut rng, 4),
            reset_cache: rarely(&mut rng, 4),
            nonsense: rarely(&mut rng, 50),
            early_result: rarely(&mut rng, 500),
        };
        let vocab = [2, 8, 1000][rng.random_range(0..3)];
        let hashes = [None, None, Some(two_bit_hash as BlockHash), Some(constant_hash)];
        Self {
            limits,
            rates,
            vocab,
            hash_block: hashes[rng.random_range(0..4)],
            stems: vec![vec![1]],
            short_share: [0.0, 0.0, 0.5, 0.95][rng.random_range(0..4)],
            longest_prompt: rng.random_range(1..=60),
            longest_answer: rng.random_range(0..=30),
            priorities: [0, 0, 2][rng.random_range(0..3)],
            rng,
        }
    }

    pub fn scheduler(&self) -> Scheduler {
        match self.hash_block {
            Some(hash_block) => Scheduler::with_block_hash(self.limits.clone(), hash_block),
            None => Scheduler::new(self.limits.clone()),
        }
    }

    pub fn happens(&mut self, thousandths: u32) -> bool {
        self.rng.random_range(0..1000) < thousandths
    }

    /// A request that mostly begins like an earlier one.
    pub fn request(&mut self, id: SequenceId) -> NewSequence {
        let rng = &mut self.rng;
        let mut prompt = self.stems[rng.random_range(0..self.stems.len())].clone();
        prompt.truncate(rng.random_range(0..=prompt.len()));
        let longest = if rng.random_bool(self.short_share) { 3 } else { self.longest_prompt };
        let len = rng.random_range(1..=longest);
        if longest == 3 {
            prompt.truncate(len);
        }
        while prompt.len() < len {
            prompt.push(rng.random_range(0..self.vocab));
        }
        if rng.random_bool(0.2) {
            self.remember(prompt.clone());
        }
        let rng = &mut self.rng;
        let score_from = rng.random_bool(0.3).then(|| rng.random_range(0..=len));
        let all_stop = [rng.random_range(0..self.vocab), rng.random_range(0..self.vocab)];
        NewSequence {
            id,
            prompt,
            max_new_tokens: rng.random_range(0..=self.longest_answer),
            min_new_tokens: [0, 0, rng.random_range(0..8)][rng.random_range(0..3)],
            stop_token_ids: all_stop[..rng.random_range(0..=2)].to_vec(),
            priority: rng.random_range(0..=self.priorities),
            score_from,
        }
    }

    /// A conversation that later requests may continue.
    pub fn remember(&mut self, tokens: Vec<u32>) {
        if self.stems.len() < 8 {
            self.stems.push(tokens);
        } else {
            let place = self.rng.random_range(0..8);
            self.stems[place] = tokens;
        }
    }
}
