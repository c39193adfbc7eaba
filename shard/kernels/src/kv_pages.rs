//! Keys and values of past tokens, in pages (Kwon et al. 2023, arXiv:2309.06180).

use half::bf16;

use crate::buffer::Buffer;
use crate::matmul::tile::Element;
use crate::matrix::Storage;
use crate::simd::LANES;

/// The KV pages of one layer: `num_blocks` blocks of [`KvPages::BLOCK_TOKENS`] tokens. Zero at
/// first, and resident only where tokens were written.
pub struct KvPages {
    geometry: Geometry,
    num_blocks: usize,
    data: PageData,
}

pub(crate) enum PageData {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
}

/// Where a number lies; the layouts are in the crate's documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Elements of K, and of V, of one head in one block.
    k_len: usize,
    v_len: usize,
}

impl KvPages {
    /// One token for each lane: the scores of a block are one vector.
    pub const BLOCK_TOKENS: usize = LANES;

    pub fn new(num_blocks: usize, kv_heads: usize, head_dim: usize, storage: Storage) -> Self {
        let geometry = Geometry::new(kv_heads, head_dim, storage);
        let len = num_blocks * geometry.block_len();
        let data = match storage {
            Storage::F32 => PageData::F32(Buffer::sparse(len)),
            Storage::Bf16 => PageData::Bf16(Buffer::sparse(len)),
        };
        Self { geometry, num_blocks, data }
    }

    /// Memory of one block of one layer, padding included.
    pub fn bytes_per_block(kv_heads: usize, head_dim: usize, storage: Storage) -> usize {
        Geometry::new(kv_heads, head_dim, storage).block_len() * storage.bytes()
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(crate) fn data(&self) -> &PageData {
        &self.data
    }

    pub(crate) fn data_mut(&mut self) -> &mut PageData {
        &mut self.data
    }

    /// # Panics
    /// If the layout is not that of the pages, or a table names a block that is not there, or has too
    /// few for its context.
    pub(crate) fn check_table(&self, context_len: usize, blocks: &[u32]) {
        let needed = context_len.div_ceil(Self::BLOCK_TOKENS);
        assert!(blocks.len() >= needed, "{} blocks for {context_len} tokens", blocks.len());
        let highest = blocks[..needed].iter().max().map_or(0, |&block| block as usize);
        assert!(needed == 0 || highest < self.num_blocks, "block {highest} of {}", self.num_blocks);
    }
}

/// Dimensions of V: whole pairs of vectors, as the widest tile takes them.
pub(crate) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(2 * LANES)
}

impl Geometry {
    fn new(kv_heads: usize, head_dim: usize, storage: Storage) -> Self {
        let rows = match storage {
            Storage::F32 => f32::padded(head_dim),
            Storage::Bf16 => bf16::padded(head_dim),
        };
        let k_len = rows * KvPages::BLOCK_TOKENS;
        let v_len = padded(head_dim) * KvPages::BLOCK_TOKENS;
        Self { kv_heads, head_dim, k_len, v_len }
    }

    fn block_len(&self) -> usize {
        self.kv_heads * (self.k_len + self.v_len)
    }

    /// Where K of `head` in `block` starts: `[head_dim][16 tokens]`, pairs along the dimensions.
    #[inline(always)]
    pub(crate) fn k_page(&self, block: usize, head: usize) -> usize {
        (block * self.kv_heads + head) * (self.k_len + self.v_len)
    }

    /// Where V starts: `[head_dim / 16][16 tokens][16]`, pairs along the tokens.
    #[inline(always)]
    pub(crate) fn v_page(&self, block: usize, head: usize) -> usize {
        self.k_page(block, head) + self.k_len
    }

    #[inline(always)]
    pub(crate) fn k_offset<E: Element>(token: usize, dim: usize) -> usize {
        (dim / E::PAIR * LANES + token) * E::PAIR + dim % E::PAIR
    }

    #[inline(always)]
    pub(crate) fn v_offset<E: Element>(token: usize, dim: usize) -> usize {
        let panel = dim / LANES * LANES * KvPages::BLOCK_TOKENS;
        panel + (token / E::PAIR * LANES + dim % LANES) * E::PAIR + token % E::PAIR
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn check<E: Element>(blocks: usize, heads: usize, head_dim: usize, storage: Storage) {
        let geometry = KvPages::new(blocks, heads, head_dim, storage).geometry();
        let mut seen = HashSet::new();
        for (block, head) in (0..blocks).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for (token, dim) in (0..16).flat_map(|t| (0..head_dim).map(move |d| (t, d))) {
                seen.insert(geometry.k_page(block, head) + Geometry::k_offset::<E>(token, dim));
                seen.insert(geometry.v_page(block, head) + Geometry::v_offset::<E>(token, dim));
            }
        }
        assert_eq!(seen.len(), blocks * heads * head_dim * 16 * 2, "places are distinct");
        assert!(seen.iter().all(|&place| place < blocks * geometry.block_len()));
    }

    #[test]
    fn every_number_has_its_own_place() {
        for (blocks, heads, head_dim) in [(2, 1, 64), (3, 2, 17), (1, 3, 8), (2, 2, 80)] {
            check::<f32>(blocks, heads, head_dim, Storage::F32);
            check::<bf16>(blocks, heads, head_dim, Storage::Bf16);
        }
    }

    #[test]
    fn usual_heads_waste_nothing() {
        assert_eq!(KvPages::bytes_per_block(8, 128, Storage::Bf16), 2 * 8 * 128 * 16 * 2);
        assert_eq!(KvPages::bytes_per_block(3, 64, Storage::F32), 2 * 3 * 64 * 16 * 4);
    }
}
