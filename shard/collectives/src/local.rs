//! Groups of threads in this process, for tests and for a single rank.

use std::sync::Arc;

use crate::World;
use crate::layout::{Layout, RANKS_MAX};
use crate::region::Region;

/// The worlds of `tp * pp` ranks, in rank order; each is moved to its own thread.
///
/// # Panics
/// If `tp * pp` is not in `1 ..= 64`, or if the process is out of address space.
pub fn worlds(tp: usize, pp: usize) -> Vec<World> {
    let ranks = tp.saturating_mul(pp);
    assert!((1..=RANKS_MAX).contains(&ranks), "tp {tp} x pp {pp} is not 1 to {RANKS_MAX} ranks");
    let layout = Layout::new(tp, pp);
    let region = Region::anonymous(layout.len).expect("address space for the ranks' buffers");
    let region = Arc::new(region);
    (0..ranks).map(|rank| World::over(&region, &layout, rank)).collect()
}
