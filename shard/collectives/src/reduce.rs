//! The sum of one vector a rank, always added in rank order: addition of floats is not associative,
//! and every rank must hold the same bits.

/// Floats summed at a time: the running sum stays in the first-level cache.
const BLOCK: usize = 1024;

/// Replaces `data`, the vector of `rank`, by the sum over all `size` ranks. `of_rank` gives the
/// others' vectors, as long as `data`.
pub(crate) fn sum_in_rank_order<'a>(
    data: &mut [f32],
    size: usize,
    rank: usize,
    of_rank: impl Fn(usize) -> &'a [f32],
) {
    if size == 2 {
        // a + b is b + a.
        return add(data, of_rank(1 - rank));
    }
    let mut sum = [0.0f32; BLOCK];
    let mut start = 0;
    for block in data.chunks_mut(BLOCK) {
        let range = start..start + block.len();
        let sum = &mut sum[..block.len()];
        for member in 0..size {
            let part = if member == rank { &*block } else { &of_rank(member)[range.clone()] };
            if member == 0 {
                sum.copy_from_slice(part);
            } else {
                add(sum, part);
            }
        }
        block.copy_from_slice(sum);
        start = range.end;
    }
}

fn add(sum: &mut [f32], part: &[f32]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}
