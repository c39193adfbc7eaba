//! What a GPU exchanges with those of other ranks: tensors through NCCL, or through the host where there
//! is none; tokens and what the sampler needs through the host.

use std::time::{Duration, Instant};

use tracing::{info, warn};
use trireme_collectives::{
    CollectiveError, World,
    nccl::{GpuGroups, Seat, UniqueId},
};
use trireme_kernels::cuda::Tensor;

use super::{Cuda, done};

/// How long the ranks of an epoch may take to meet.
const JOIN_DEADLINE: Duration = Duration::from_secs(60);

/// One rank's place in an epoch.
pub struct GpuWorld {
    pub hosts: World,
    pub seat: Seat,
    /// Of NCCL's groups; none: tensors go through the host.
    pub ids: Vec<UniqueId>,
}

impl Cuda {
    /// Enters the groups of an epoch.
    pub(super) fn enter(&mut self, world: GpuWorld) -> Result<(), CollectiveError> {
        let GpuWorld { hosts, seat, ids } = world;
        done(self.stream.bind());
        let abort = hosts.abort.clone();
        self.hosts.join(hosts);
        if seat.tp * seat.pp == 1 {
            return Ok(());
        }
        if ids.is_empty() {
            warn!("tensors go from rank to rank through the host's memory: there is no NCCL");
            return Ok(());
        }
        let start = Instant::now();
        let groups = GpuGroups::join(&ids, seat, &self.stream, &abort, JOIN_DEADLINE)?;
        self.groups = Some(groups);
        info!(ms = start.elapsed().as_millis(), "joined the GPUs of all ranks through NCCL");
        Ok(())
    }

    /// Leaves the groups, however far the GPU is with what was queued.
    pub(super) fn depart(&mut self) {
        if let Some(groups) = &self.groups {
            groups.abort();
            // A kernel that waited for a peer ends now; another failure shows at the next use.
            drop(self.stream.synchronize());
        }
        // Recorded steps hold the groups.
        self.ready = None;
        self.groups = None;
        self.hosts.leave();
    }

    /// Whether a step of all ranks can be recorded.
    pub(super) fn records(&self) -> bool {
        let alone = self.hosts.is_alone();
        !self.expertise.is_used && (alone || self.groups.is_some())
    }

    /// Looks after what was queued, from here to its end.
    pub(super) fn watch_queued(&self) -> Result<(), CollectiveError> {
        self.groups.as_ref().map_or(Ok(()), |groups| groups.queued(&self.stream))
    }

    /// Whether all that the stream has passed is worth anything.
    pub(super) fn check_groups(&self) -> Result<(), CollectiveError> {
        self.groups.as_ref().map_or(Ok(()), GpuGroups::check)
    }

    pub(super) fn limit_waits(&mut self, deadline: Duration) -> Result<(), CollectiveError> {
        if let Some(groups) = &mut self.groups {
            groups.set_deadline(deadline);
        }
        self.hosts.set_deadline(deadline)
    }

    pub(super) fn sum(&mut self, x: &mut Tensor, rows: usize) -> Result<(), CollectiveError> {
        if self.hosts.tensor_ranks() == 1 {
            return Ok(());
        }
        let rows = self.padded(rows);
        if let Some(groups) = &mut self.groups {
            return groups.all_reduce_sum(&self.stream, x, rows);
        }
        self.hosts.run(|world| {
            let mut values = done(self.stream.read_rows(x, 0..rows));
            world.tensor.all_reduce_sum(&mut values)?;
            done(self.stream.write(x, &values));
            Ok(())
        })
    }

    pub(super) fn pass_on(
        &mut self,
        to: usize,
        x: &Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        let rows = self.padded(rows);
        if let Some(groups) = self.groups.as_mut().filter(|groups| groups.has_stages()) {
            return groups.send(&self.stream, to, x, rows);
        }
        self.hosts.run(|world| {
            let values = done(self.stream.read_rows(x, 0..rows));
            world.global.send(to, &values)
        })
    }

    pub(super) fn take_over(
        &mut self,
        from: usize,
        x: &mut Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        let rows = self.padded(rows);
        if let Some(groups) = self.groups.as_mut().filter(|groups| groups.has_stages()) {
            return groups.recv(&self.stream, from, x, rows);
        }
        self.hosts.run(|world| {
            let mut values = vec![0.0; rows * x.width()];
            world.global.recv(from, &mut values)?;
            done(self.stream.write(x, &values));
            Ok(())
        })
    }
}
