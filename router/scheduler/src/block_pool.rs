//! KV blocks by number: who holds how many references, and which may be taken next.

use std::collections::BTreeMap;

use crate::prefix_cache::{BlockHash, Entered, PrefixCache, Tip};

/// A block is held (one reference or more), free, or unused: free for use, but still cached.
#[derive(Debug)]
pub(crate) struct BlockPool {
    cache: PrefixCache,
    references: Vec<u32>,
    free: Vec<u32>,
    /// Unused blocks by time of release: the first was used least recently.
    unused: BTreeMap<u64, u32>,
    /// By block: its key in `unused`.
    released_at: Vec<u64>,
    clock: u64,
}

impl BlockPool {
    pub fn new(num_blocks: usize, block_tokens: usize, hash_block: BlockHash) -> Self {
        let last = u32::try_from(num_blocks).expect("block numbers are 32 bits");
        Self {
            cache: PrefixCache::new(num_blocks, block_tokens, hash_block),
            references: vec![0; num_blocks],
            free: (0..last).rev().collect(),
            unused: BTreeMap::new(),
            released_at: vec![0; num_blocks],
            clock: 0,
        }
    }

    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Blocks that can be taken now.
    pub fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    pub fn num_unused(&self) -> usize {
        self.unused.len()
    }

    pub fn num_held(&self) -> usize {
        self.references.len() - self.available()
    }

    pub fn references(&self, block: u32) -> u32 {
        self.references[block as usize]
    }

    /// A block of one's own: a free one, else the unused one that was used least recently.
    pub fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.unused.pop_first()?;
                self.cache.forget(block);
                block
            }
        };
        self.references[block as usize] = 1;
        Some(block)
    }

    /// One more reference to a block that is cached.
    pub fn share(&mut self, block: u32) {
        if self.references[block as usize] == 0 {
            self.unused.remove(&self.released_at[block as usize]);
        }
        self.references[block as usize] += 1;
    }

    /// Gives back one reference to each block of a sequence. The last block is released first, so
    /// that a history is evicted from its end.
    pub fn release(&mut self, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            let references = &mut self.references[*block as usize];
            *references -= 1;
            if *references > 0 {
                continue;
            }
            if self.cache.holds(*block) {
                self.clock += 1;
                self.released_at[*block as usize] = self.clock;
                self.unused.insert(self.clock, *block);
            } else {
                self.free.push(*block);
            }
        }
    }

    /// Offers a held block to the cache; gives the place below which the next one hangs.
    pub fn enter(&mut self, parent: Tip, hash: u128, tokens: &[u32], block: u32) -> Option<Tip> {
        match self.cache.enter(parent, hash, tokens, block) {
            Entered::Known { tip } | Entered::New { tip, displaced: None } => Some(tip),
            Entered::New { tip, displaced: Some(other) } => {
                if self.references[other as usize] == 0 {
                    self.unused.remove(&self.released_at[other as usize]);
                    self.free.push(other);
                }
                Some(tip)
            }
            Entered::Refused => None,
        }
    }

    pub fn clear_cache(&mut self) {
        self.cache.clear();
        // `free` is taken from its end: the block released first still goes first.
        self.free.extend(self.unused.values().rev());
        self.unused.clear();
    }

    /// Panics unless `held`, the references by block, are the pool's, and every block is in one
    /// place only.
    pub fn check_invariants(&self, held: &[u32]) {
        self.cache.check_invariants();
        assert_eq!(self.references, held, "references do not add up");
        let mut places = vec![0u8; held.len()];
        for block in self.free.iter().chain(self.unused.values()) {
            places[*block as usize] += 1;
        }
        for (block, places) in places.iter().enumerate() {
            let expected = u8::from(held[block] == 0);
            assert_eq!(*places, expected, "block {block} is listed free {places} times");
        }
        for block in &self.free {
            assert!(!self.cache.holds(*block), "free block {block} is cached");
        }
        for (released_at, block) in &self.unused {
            assert!(self.cache.holds(*block), "unused block {block} is not cached");
            assert_eq!(self.released_at[*block as usize], *released_at);
        }
    }
}
