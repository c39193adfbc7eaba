//! One rank's membership of one group, over a region.

use std::sync::Arc;
use std::time::Duration;

use crate::call::{Call, Operation};
use crate::event::{Event, Interrupted, Patience};
use crate::layout::{self, CHUNK, GroupLayout};
use crate::region::Region;
use crate::{Collective, CollectiveError};

/// What a wait gets until someone calls `set_deadline`.
const DEADLINE: Duration = Duration::from_secs(30);

/// A sleep and a wake-up cost tens of microseconds, so a wait of that order is better spun through
/// when every rank has a core of its own.
const SPIN: Duration = Duration::from_micros(40);

/// When ranks share cores, a spinning rank keeps from running the one it waits for.
const SPIN_CROWDED: Duration = Duration::from_micros(2);

pub(crate) struct Group {
    pub(crate) region: Arc<Region>,
    pub(crate) layout: GroupLayout,
    pub(crate) rank: usize,
    pub(crate) patience: Patience,
    /// Rounds this member has published; see `round.rs`.
    pub(crate) round: u32,
    /// Whether the pages of this member's slot are taken.
    pub(crate) slot_reserved: bool,
    /// For each receiver, whether the pages of the ring are taken.
    pub(crate) ring_reserved: Vec<bool>,
}

impl Group {
    /// `ranks` is the size of the world, which says how crowded the cores are.
    pub(crate) fn new(region: Arc<Region>, layout: GroupLayout, rank: usize, ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if ranks <= cores { SPIN } else { SPIN_CROWDED };
        Self {
            region,
            layout,
            rank,
            patience: Patience { spin, deadline: DEADLINE },
            round: 0,
            slot_reserved: false,
            ring_reserved: vec![false; layout.size],
        }
    }

    /// Waits until `event` has reached `target`, which `missing` is to bring about.
    pub(crate) fn wait(
        &self,
        operation: &'static str,
        event: &Event,
        target: u32,
        missing: usize,
    ) -> Result<(), CollectiveError> {
        let (rank, size) = (self.rank, self.layout.size);
        event.wait(target, self.patience, || self.region.is_aborted()).map_err(|interrupted| {
            match interrupted {
                Interrupted::Aborted => CollectiveError::Aborted { operation, rank, size },
                Interrupted::Deadline { waited } => CollectiveError::Deadline {
                    operation,
                    rank,
                    size,
                    missing,
                    waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
                },
            }
        })
    }

    /// Runs one operation. An error makes the whole world unusable, so that the peers hear of it
    /// now and not when their own deadline passes.
    fn run(
        &mut self,
        operation: &'static str,
        work: impl FnOnce(&mut Self) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        if self.region.is_aborted() {
            let (rank, size) = (self.rank, self.layout.size);
            return Err(CollectiveError::Aborted { operation, rank, size });
        }
        let outcome = work(self);
        if outcome.is_err() {
            self.region.abort();
        }
        outcome
    }

    /// A `peer` number or a length that a caller got wrong.
    pub(crate) fn require(
        &self,
        operation: &'static str,
        holds: bool,
        detail: impl FnOnce() -> String,
    ) -> Result<(), CollectiveError> {
        if holds { Ok(()) } else { Err(CollectiveError::Mismatch { operation, detail: detail() }) }
    }

    fn require_peer(&self, operation: &'static str, peer: usize) -> Result<(), CollectiveError> {
        let size = self.layout.size;
        self.require(operation, peer < size, || format!("rank {peer} of a group of {size}"))
    }

    fn gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), CollectiveError> {
        let call = Call::new(Operation::AllGather, mine.len());
        let (len, size) = (mine.len(), self.layout.size);
        self.require(call.operation.name(), all.len() == size * len, || {
            format!("{} bytes to gather {size} times {len} bytes into", all.len())
        })?;
        if size == 1 {
            all.copy_from_slice(mine);
            return Ok(());
        }
        let mut offset = 0;
        // At least one round, so that an empty call meets its peers' lengths too.
        loop {
            let part = offset..len.min(offset + CHUNK);
            let parity = self.meet(call, Some(&mine[part.clone()]))?;
            for (peer, of_peer) in all.chunks_mut(len.max(1)).enumerate() {
                let target = &mut of_peer[part.clone()];
                if peer == self.rank {
                    target.copy_from_slice(&mine[part.clone()]);
                } else {
                    self.copy_from(peer, parity, target);
                }
            }
            offset = part.end;
            if offset == len {
                return Ok(());
            }
        }
    }

    fn spread(&mut self, root: usize, data: &mut [u8]) -> Result<(), CollectiveError> {
        let call = Call { operation: Operation::Broadcast, root, len: data.len() };
        self.require_peer(call.operation.name(), root)?;
        if self.layout.size == 1 {
            return Ok(());
        }
        let mut rest = data;
        loop {
            let (part, later) = rest.split_at_mut(rest.len().min(CHUNK));
            let is_root = self.rank == root;
            let parity = self.meet(call, is_root.then_some(&*part))?;
            if !is_root {
                self.copy_from(root, parity, part);
            }
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.layout.size
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        self.run("all_reduce_sum", |group| group.reduce(data))
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), CollectiveError> {
        self.run("all_gather", |group| group.gather(mine, all))
    }

    fn broadcast(&mut self, root: usize, data: &mut [u8]) -> Result<(), CollectiveError> {
        self.run("broadcast", |group| group.spread(root, data))
    }

    fn send(&mut self, to: usize, data: &[f32]) -> Result<(), CollectiveError> {
        self.run("send", |group| {
            group.require_peer("send", to)?;
            group.post(Operation::Send, to, bytemuck::cast_slice(data))
        })
    }

    fn recv(&mut self, from: usize, data: &mut [f32]) -> Result<(), CollectiveError> {
        self.run("recv", |group| {
            group.require_peer("recv", from)?;
            group.take(Operation::Send, from, bytemuck::cast_slice_mut(data))
        })
    }

    fn send_bytes(&mut self, to: usize, data: &[u8]) -> Result<(), CollectiveError> {
        self.run("send_bytes", |group| {
            group.require_peer("send_bytes", to)?;
            group.post(Operation::SendBytes, to, data)
        })
    }

    fn recv_bytes(&mut self, from: usize, data: &mut [u8]) -> Result<(), CollectiveError> {
        self.run("recv_bytes", |group| {
            group.require_peer("recv_bytes", from)?;
            group.take(Operation::SendBytes, from, data)
        })
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.run("barrier", |group| {
            if group.layout.size == 1 {
                return Ok(());
            }
            group.meet(Call::new(Operation::Barrier, 0), None).map(|_| ())
        })
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.patience.deadline = deadline;
    }
}

impl Drop for Group {
    /// A rank that unwinds never meets its peers again: tell them. One that ends in peace does not,
    /// since slower peers may still be reading what it wrote last.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.region.abort();
        }
    }
}

impl Region {
    pub(crate) fn abort(&self) {
        self.event(layout::ABORTED).publish(1);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.event(layout::ABORTED).value() != 0
    }
}
