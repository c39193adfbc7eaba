//! Which blocks hold the KV of which token history.
//!
//! A tree in disguise: each cached block is a node below the block of the tokens before it. A node
//! is found by a chained hash (XXH3-128 over the parent's hash and the block's tokens, as in vLLM's
//! automatic prefix caching), but the hash is not trusted: a hit must hang below the very node that
//! was matched before it, and hold the same token ids.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_128;

/// Hash of a block's tokens below a parent's hash.
pub type BlockHash = fn(parent: u128, tokens: &[u32]) -> u128;

/// XXH3-128 over the parent's 16 bytes and the tokens, little endian.
pub(crate) fn xxh3_block(parent: u128, tokens: &[u32]) -> u128 {
    let mut bytes = Vec::with_capacity(16 + 4 * tokens.len());
    bytes.extend_from_slice(&parent.to_le_bytes());
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    xxh3_128(&bytes)
}

/// A node as seen from its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tip {
    node: u64,
    hash: u128,
}

impl Tip {
    /// Above every first block.
    pub const ROOT: Self = Self { node: 0, hash: 0 };
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Never used twice, so that a block's earlier content is not taken for its present one.
    id: u64,
    parent: u64,
    hash: u128,
}

/// What became of a block offered to the cache.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    /// The block is now cached. `displaced` was, with a parent that is gone.
    New { tip: Tip, displaced: Option<u32> },
    /// Another block holds the same history.
    Known { tip: Tip },
    /// The parent is gone, or another history has the same hash.
    Refused,
}

#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_tokens: usize,
    hash_block: BlockHash,
    next_node: u64,
    /// Only looked up, never iterated: its order is random.
    by_hash: HashMap<u128, u32>,
    /// By block.
    nodes: Vec<Option<Node>>,
    /// By block, `block_tokens` each.
    tokens: Vec<u32>,
}

impl PrefixCache {
    pub fn new(num_blocks: usize, block_tokens: usize, hash_block: BlockHash) -> Self {
        Self {
            block_tokens,
            hash_block,
            next_node: 1,
            // Growing it later would stall a step.
            by_hash: HashMap::with_capacity(num_blocks),
            nodes: vec![None; num_blocks],
            tokens: vec![0; num_blocks * block_tokens],
        }
    }

    /// Extends `hashes`, one for each full block of `tokens`, to `num_blocks` of them.
    pub fn hash_chain(&self, tokens: &[u32], hashes: &mut Vec<u128>, num_blocks: usize) {
        for block in hashes.len()..num_blocks {
            let parent = if block == 0 { Tip::ROOT.hash } else { hashes[block - 1] };
            hashes.push((self.hash_block)(parent, self.block_of(tokens, block)));
        }
    }

    fn block_of<'a>(&self, tokens: &'a [u32], block: usize) -> &'a [u32] {
        &tokens[block * self.block_tokens..(block + 1) * self.block_tokens]
    }

    fn tokens_in(&self, block: u32) -> &[u32] {
        self.block_of(&self.tokens, block as usize)
    }

    /// The block with the history of `parent`, then `tokens`.
    pub fn find(&self, parent: Tip, hash: u128, tokens: &[u32]) -> Option<(u32, Tip)> {
        let block = *self.by_hash.get(&hash)?;
        let node = self.nodes[block as usize]?;
        let same = node.parent == parent.node && self.tokens_in(block) == tokens;
        same.then_some((block, Tip { node: node.id, hash }))
    }

    fn is_present(&self, tip: Tip) -> bool {
        tip == Tip::ROOT
            || self
                .by_hash
                .get(&tip.hash)
                .and_then(|block| self.nodes[*block as usize])
                .is_some_and(|node| node.id == tip.node)
    }

    /// Offers `block`, whose KV is computed, with the history of `parent`, then `tokens`.
    pub fn enter(&mut self, parent: Tip, hash: u128, tokens: &[u32], block: u32) -> Entered {
        debug_assert!(!self.holds(block));
        if !self.is_present(parent) {
            return Entered::Refused;
        }
        if let Some((_, tip)) = self.find(parent, hash, tokens) {
            return Entered::Known { tip };
        }
        let displaced = self.by_hash.get(&hash).copied();
        if let Some(other) = displaced {
            if self.tokens_in(other) != tokens {
                return Entered::Refused;
            }
            self.forget(other);
        }
        let node = Node { id: self.next_node, parent: parent.node, hash };
        self.next_node += 1;
        self.by_hash.insert(hash, block);
        self.nodes[block as usize] = Some(node);
        let start = block as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(tokens);
        Entered::New { tip: Tip { node: node.id, hash }, displaced }
    }

    pub fn holds(&self, block: u32) -> bool {
        self.nodes[block as usize].is_some()
    }

    pub fn forget(&mut self, block: u32) {
        if let Some(node) = self.nodes[block as usize].take() {
            self.by_hash.remove(&node.hash);
        }
    }

    pub fn clear(&mut self) {
        self.by_hash.clear();
        self.nodes.fill(None);
    }

    /// Panics when the index and the nodes disagree.
    pub fn check_invariants(&self) {
        let mut count = 0;
        for (block, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            count += 1;
            let found = self.by_hash.get(&node.hash);
            assert_eq!(found, Some(&(block as u32)), "block {block} is cached but not found");
            assert!(node.id < self.next_node && node.parent < node.id);
        }
        assert_eq!(count, self.by_hash.len(), "cached hashes without a block");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every block has the same hash: only the tokens tell them apart.
    fn flat_hash(_parent: u128, _tokens: &[u32]) -> u128 {
        9
    }

    fn new_tip(entered: Entered) -> Tip {
        match entered {
            Entered::New { tip, displaced: None } => tip,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_hash_is_not_trusted() {
        let mut cache = PrefixCache::new(4, 2, flat_hash);
        let tip = new_tip(cache.enter(Tip::ROOT, 9, &[1, 2], 0));
        assert_eq!(cache.find(Tip::ROOT, 9, &[1, 2]), Some((0, tip)));
        assert_eq!(cache.find(Tip::ROOT, 9, &[1, 3]), None);
        // The same tokens below another parent are another history.
        assert_eq!(cache.find(tip, 9, &[1, 2]), None);
        assert_eq!(cache.enter(tip, 9, &[3, 4], 1), Entered::Refused);
        assert_eq!(cache.enter(Tip::ROOT, 9, &[1, 2], 1), Entered::Known { tip });
        cache.check_invariants();
    }

    #[test]
    fn a_block_without_its_parent_is_found_no_more() {
        let mut cache = PrefixCache::new(4, 2, xxh3_block);
        let mut hashes = Vec::new();
        cache.hash_chain(&[1, 2, 3, 4], &mut hashes, 2);
        let parent = new_tip(cache.enter(Tip::ROOT, hashes[0], &[1, 2], 0));
        let child = new_tip(cache.enter(parent, hashes[1], &[3, 4], 1));
        cache.forget(0);
        assert_eq!(cache.enter(parent, hashes[1], &[3, 4], 2), Entered::Refused);
        // The same history again, in other blocks: the orphan makes place.
        let parent = new_tip(cache.enter(Tip::ROOT, hashes[0], &[1, 2], 2));
        assert_eq!(cache.find(parent, hashes[1], &[3, 4]), None);
        match cache.enter(parent, hashes[1], &[3, 4], 3) {
            Entered::New { tip, displaced: Some(1) } => assert_ne!(tip, child),
            other => panic!("{other:?}"),
        }
        assert!(!cache.holds(1));
        cache.check_invariants();
    }
}
