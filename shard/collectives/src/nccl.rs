//! Groups of GPUs through NCCL (feature `nccl`): tensors stay on their GPUs, operations are queued on
//! the stream that computes them, and a recorded step holds them too.
//!
//! An operation returns before it is done. What went wrong shows later: [`GpuGroups::check`] says it,
//! once the stream was waited for. No wait is for ever: a thread watches what is queued, and ends the
//! groups (which ends the kernels that wait for peers) when the deadline passes, when NCCL reports an
//! error or when a peer aborts the epoch.
//!
//! - `library.rs`: the functions of `libnccl`, found when they are first needed.
//! - `communicator.rs`: one group. `watch.rs`: the thread.

mod communicator;
mod library;
mod watch;

use std::time::{Duration, Instant};

use trireme_kernels::cuda::{Stream, Tensor};

use self::{communicator::Communicator, watch::Watch};
use crate::{AbortHandle, CollectiveError};

pub use library::{UniqueId, unique_ids};

/// Where a rank stands: `rank = stage * tp + tp_rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    pub tp: usize,
    pub pp: usize,
    pub rank: usize,
}

impl Seat {
    /// Ids that the groups of all ranks need: one for all ranks, one for each stage.
    pub fn ids(tp: usize, pp: usize) -> usize {
        if tp * pp == 1 { 0 } else { 1 + pp }
    }
}

/// The groups of one rank in one epoch.
pub struct GpuGroups {
    /// The ranks of this stage, where there are several.
    tensor: Option<Communicator>,
    /// All ranks, where there are several stages.
    global: Option<Communicator>,
    seat: Seat,
    watch: Watch,
}

impl GpuGroups {
    /// Joins the groups; returns when all ranks have. `ids`: [`Seat::ids`] of them, the same on every
    /// rank. The calling thread's GPU is that of `stream`.
    ///
    /// # Errors
    /// `Nccl` with what NCCL says, or if not all ranks come within `deadline`; `Aborted`.
    pub fn join(
        ids: &[UniqueId],
        seat: Seat,
        stream: &Stream,
        abort: &AbortHandle,
        deadline: Duration,
    ) -> Result<Self, CollectiveError> {
        let Seat { tp, pp, rank } = seat;
        if ids.len() != Seat::ids(tp, pp) {
            let detail = format!("{} ids for tp {tp} and pp {pp}", ids.len());
            return Err(CollectiveError::Mismatch { operation: "join", detail });
        }
        let until = Instant::now() + deadline;
        let join = |id, rank, size| Communicator::join(id, rank, size, abort, until);
        let global = if pp > 1 { Some(join(&ids[0], rank, tp * pp)?) } else { None };
        let tensor = if tp > 1 { Some(join(&ids[1 + rank / tp], rank % tp, tp)?) } else { None };
        let lines = tensor.iter().chain(&global).map(Communicator::line).collect();
        let watch = Watch::start(lines, stream, abort.clone())?;
        Ok(Self { tensor, global, seat, watch })
    }

    /// Whether ranks send to each other: with one stage they only sum.
    pub fn has_stages(&self) -> bool {
        self.global.is_some()
    }

    /// The longest that queued work may take.
    pub fn set_deadline(&mut self, deadline: Duration) {
        for group in self.tensor.iter_mut().chain(&mut self.global) {
            group.set_patience(deadline);
        }
        self.watch.set_deadline(deadline);
    }

    /// Sums the first `rows` rows over the ranks of the stage.
    ///
    /// # Errors
    /// `Mismatch` if the tensor is smaller, `Nccl` or `Aborted`.
    pub fn all_reduce_sum(
        &mut self,
        stream: &Stream,
        tensor: &mut Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        let Some(group) = &self.tensor else { return Ok(()) };
        group.all_reduce_sum(stream, tensor, rows)?;
        self.queued(stream)
    }

    /// Sends the first `rows` rows to rank `to` of all.
    ///
    /// # Errors
    /// As for [`GpuGroups::all_reduce_sum`].
    pub fn send(
        &mut self,
        stream: &Stream,
        to: usize,
        tensor: &Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        self.global("send")?.send(stream, to, tensor, rows)?;
        self.queued(stream)
    }

    /// Receives the first `rows` rows from rank `from` of all.
    ///
    /// # Errors
    /// As for [`GpuGroups::all_reduce_sum`].
    pub fn recv(
        &mut self,
        stream: &Stream,
        from: usize,
        tensor: &mut Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        self.global("recv")?.recv(stream, from, tensor, rows)?;
        self.queued(stream)
    }

    fn global(&self, operation: &'static str) -> Result<&Communicator, CollectiveError> {
        self.global.as_ref().ok_or_else(|| CollectiveError::Mismatch {
            operation,
            detail: "there is one stage: no rank to send to".into(),
        })
    }

    /// Watches what `stream` holds now; operations and replayed steps.
    ///
    /// # Errors
    /// If the GPU has failed.
    pub fn queued(&self, stream: &Stream) -> Result<(), CollectiveError> {
        if stream.is_recording() { Ok(()) } else { self.watch.queued(stream) }
    }

    /// Why operations that the stream has passed did not do what they should, if they did not.
    ///
    /// # Errors
    /// `Nccl` with the cause, or `Aborted`.
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.watch.check(self.seat.rank, self.seat.tp * self.seat.pp)
    }

    /// Ends the groups: kernels that wait for peers return. The memory goes when the steps that were
    /// recorded over them are dropped, and these groups.
    pub fn abort(&self) {
        self.watch.end_all();
    }
}
