//! How the rows and inputs of a product are cut.

use std::ops::Range;

/// Inputs of one slice at most: 768 rows of a panel of `f32` are 96 KiB.
const SLICE_INPUTS: usize = 768;
/// Packed activations that stay in the L2 cache (1 MiB on the CPUs we know, 512 KiB on some) while
/// panels pass beside them.
const GROUP_BYTES: usize = 384 * 1024;

pub(super) struct Plan {
    rows: usize,
    inputs: usize,
    blocks: usize,
    blocks_per_group: usize,
    slices: usize,
    /// Inputs that are not torn apart.
    unit: usize,
}

impl Plan {
    /// `tile_rows`: the most rows of a block.
    pub(super) fn new(rows: usize, inputs: usize, tile_rows: usize, unit: usize) -> Self {
        let blocks = rows.div_ceil(tile_rows);
        let slices = inputs.div_ceil(SLICE_INPUTS).max(1);
        let block_bytes = tile_rows * inputs.div_ceil(slices).max(1) * size_of::<f32>();
        let blocks_per_group = (GROUP_BYTES / block_bytes).max(1);
        Self { rows, inputs, blocks, blocks_per_group, slices, unit }
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Blocks differ by at most one row: no tail of a single row that would waste a pass.
    #[inline(always)]
    pub(super) fn rows_of(&self, block: usize) -> Range<usize> {
        block * self.rows / self.blocks..(block + 1) * self.rows / self.blocks
    }

    /// Groups of blocks.
    #[inline(always)]
    pub(super) fn groups(&self) -> usize {
        self.blocks.div_ceil(self.blocks_per_group)
    }

    /// Groups are as even as blocks allow.
    #[inline(always)]
    pub(super) fn blocks_of(&self, group: usize) -> Range<usize> {
        let (blocks, groups) = (self.blocks, self.groups());
        group * blocks / groups..(group + 1) * blocks / groups
    }

    /// Slices of inputs, evenly, at whole units. One, empty, if there are none.
    pub(super) fn slices(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (inputs, slices, unit) = (self.inputs, self.slices, self.unit);
        let border =
            move |i: usize| if i == slices { inputs } else { i * inputs / slices / unit * unit };
        (0..slices).map(move |slice| border(slice)..border(slice + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_cover(parts: impl Iterator<Item = Range<usize>>, all: usize) {
        let mut next = 0;
        for part in parts {
            assert_eq!(part.start, next);
            next = part.end;
        }
        assert_eq!(next, all);
    }

    #[test]
    fn every_cut_covers_everything_once() {
        for tile_rows in [4, 6, 12] {
            for (rows, inputs, unit) in [
                (1, 1, 2),
                (2, 0, 2),
                (13, 577, 2),
                (25, 769, 2),
                (512, 1536, 32),
                (7, 14336, 256),
                (2000, 4097, 2),
                (3, 1024, 256),
            ] {
                let plan = Plan::new(rows, inputs, tile_rows, unit);
                check_cover((0..plan.blocks()).map(|block| plan.rows_of(block)), rows);
                check_cover((0..plan.groups()).map(|group| plan.blocks_of(group)), plan.blocks());
                check_cover(plan.slices(), inputs);
                let heights = (0..plan.blocks()).map(|block| plan.rows_of(block).len());
                assert!(heights.clone().max() <= heights.min().map(|least| least + 1));
                assert!(
                    (0..plan.blocks()).all(|b| (1..=tile_rows).contains(&plan.rows_of(b).len()))
                );
                assert!(plan.slices().all(|slice| slice.start % unit == 0));
                assert!(plan.slices().all(|slice| slice.len() < SLICE_INPUTS + unit));
            }
        }
    }
}
