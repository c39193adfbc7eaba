//! Collective operations between the ranks of a model.
//!
//! A [`Collective`] is one rank's membership of one group: the tensor-parallel ranks of a stage, or
//! all ranks of the model (for the stage boundaries). Every operation is called by every member of
//! the group in the same order (send and recv: by the two ends), returns the same bits on every
//! rank, and ends by completion, by its deadline, or by [`AbortHandle::abort`].

//! The two backends are one implementation over a region of memory that all ranks see: [`local`]
//! maps it for the threads of a process, [`shared_memory`] for the processes of a host.
//!
//! - `region.rs`, `layout.rs`: the memory, and where things lie in it.
//! - `event.rs`: how a rank waits for another (spin, then futex; deadline; abort).
//! - `round.rs`, `reduce.rs`: all members exchange and sum. `mailbox.rs`: one rank sends to another.
//! - `group.rs`: a [`Collective`] made of these.
//! - `nccl.rs` (feature `nccl`): groups of GPUs, beside a world that carries what the host exchanges.

#![deny(unsafe_code)]

mod call;
mod event;
mod group;
mod layout;
pub mod local;
mod mailbox;
#[cfg(feature = "nccl")]
pub mod nccl;
mod reduce;
mod region;
mod round;
pub mod shared_memory;

use std::sync::Arc;
use std::time::Duration;

/// Why a collective operation did not complete. After any of these the group is unusable.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    #[error(
        "{operation} on rank {rank} of {size} waited {waited_ms} ms for rank {missing}: step deadline passed"
    )]
    Deadline { operation: &'static str, rank: usize, size: usize, missing: usize, waited_ms: u64 },
    #[error("{operation} on rank {rank} of {size} was aborted")]
    Aborted { operation: &'static str, rank: usize, size: usize },
    #[error("{operation}: {detail}")]
    Mismatch { operation: &'static str, detail: String },
    #[error("{operation} on rank {rank} of {size}, through NCCL: {detail}")]
    Nccl { operation: &'static str, rank: usize, size: usize, detail: String },
    #[error("no NCCL: {reason}; install NCCL 2.18 or newer, or name its folder in LD_LIBRARY_PATH")]
    NoNccl { reason: String },
    #[error("shared memory {name}: {source}")]
    SharedMemory { name: String, source: std::io::Error },
}

/// One rank's membership of one group.
///
/// `F` is what layers reduce and stages exchange, `B` what the sampler exchanges.
pub trait Collective<F: ?Sized = [f32], B: ?Sized = [u8]>: Send {
    /// This member's number in the group, `0 .. size`.
    fn rank(&self) -> usize;
    /// Members of the group.
    fn size(&self) -> usize;
    /// Adds `data` over all ranks, in rank order, into `data` on every rank.
    fn all_reduce_sum(&mut self, data: &mut F) -> Result<(), CollectiveError>;
    /// Gathers `mine` of every rank into `all` (`size * mine.len()`), in rank order.
    fn all_gather(&mut self, mine: &B, all: &mut B) -> Result<(), CollectiveError>;
    /// Copies `data` of rank `root` to every rank.
    fn broadcast(&mut self, root: usize, data: &mut B) -> Result<(), CollectiveError>;
    /// Sends to one rank. Returns once the data is buffered; blocks while the channel is full.
    fn send(&mut self, to: usize, data: &F) -> Result<(), CollectiveError>;
    /// Receives exactly `data.len()` floats from one rank.
    fn recv(&mut self, from: usize, data: &mut F) -> Result<(), CollectiveError>;
    /// Like [`Collective::send`], for bytes. Bytes and floats of one pair keep one order.
    fn send_bytes(&mut self, to: usize, data: &B) -> Result<(), CollectiveError>;
    /// Like [`Collective::recv`], for bytes.
    fn recv_bytes(&mut self, from: usize, data: &mut B) -> Result<(), CollectiveError>;
    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;
    /// The longest any later single wait may take.
    fn set_deadline(&mut self, deadline: Duration);
}

/// The groups one rank belongs to. Rank = stage * tp + tp_rank.
pub struct World {
    /// The tensor-parallel ranks of this stage.
    pub tensor: Box<dyn Collective>,
    /// All `tp * pp` ranks: stage boundaries and token return.
    pub global: Box<dyn Collective>,
    /// Ends every wait of this rank, from any thread, and soon those of its peers.
    pub abort: AbortHandle,
}

impl World {
    /// The world of `rank` over a region that is laid out as `layout` says.
    fn over(region: &Arc<region::Region>, layout: &layout::Layout, rank: usize) -> Self {
        let ranks = layout.global.size;
        let stage = layout.tensor[rank / layout.tensor[0].size];
        let group =
            |layout, rank| Box::new(group::Group::new(Arc::clone(region), layout, rank, ranks));
        let (aborts, looks) = (Arc::clone(region), Arc::clone(region));
        Self {
            tensor: group(stage, rank % stage.size),
            global: group(layout.global, rank),
            abort: AbortHandle::new(move || aborts.abort(), move || looks.is_aborted()),
        }
    }
}

/// Ends every present and future wait of the groups it came with, from any thread.
#[derive(Clone)]
pub struct AbortHandle {
    abort: Arc<dyn Fn() + Send + Sync>,
    is_aborted: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl AbortHandle {
    pub fn new(
        abort: impl Fn() + Send + Sync + 'static,
        is_aborted: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { abort: Arc::new(abort), is_aborted: Arc::new(is_aborted) }
    }
    pub fn abort(&self) {
        (self.abort)();
    }
    /// Whether this rank or a peer has ended them.
    pub fn is_aborted(&self) -> bool {
        (self.is_aborted)()
    }
}

impl std::fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AbortHandle")
    }
}
