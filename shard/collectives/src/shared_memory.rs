//! Groups of processes on this host, over one POSIX shared-memory object.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::shm;

use crate::event::{Interrupted, Patience};
use crate::layout::{self, Layout, RANKS_MAX};
use crate::region::Region;
use crate::{CollectiveError, World};

/// Joins the object `name` (made by whoever comes first), waits for all ranks until `deadline`, then
/// rank 0 unlinks the name. When this returns `Ok` on any rank, the name is gone, so that not even
/// `SIGKILL` leaves an object behind; a rank that gives up waiting removes it too.
///
/// `name` has no slash (one in front is allowed), at most 255 bytes, and is used once: a new epoch
/// takes a new name.
///
/// # Errors
/// `Mismatch` for a bad `tp`, `pp` or `rank`, a rank that is taken, an object of another user, or
/// peers with another plan; `Deadline` with the missing rank; `SharedMemory` for the system's errors.
pub fn join(
    name: &str,
    tp: usize,
    pp: usize,
    rank: usize,
    deadline: Duration,
) -> Result<World, CollectiveError> {
    let start = Instant::now();
    let ranks = tp.saturating_mul(pp);
    require((1..=RANKS_MAX).contains(&ranks), || {
        format!("tp {tp} x pp {pp} is not 1 to {RANKS_MAX} ranks")
    })?;
    require(rank < ranks, || format!("rank {rank} of {ranks}"))?;
    let layout = Layout::new(tp, pp);
    let system = |source| CollectiveError::SharedMemory { name: name.to_owned(), source };

    let object = open(name).map_err(|errno| system(errno.into()))?;
    size(&object, name, layout.len, start + deadline)?;
    let region = Region::shared(object, layout.len, name).map_err(system)?;
    region.reserve(0..layout.tensor[0].slot(0).start)?;
    claim(&region, layout::shape(tp, pp), rank)?;

    let meeting = Meeting { region: &region, rank, ranks, start, deadline };
    let met = meeting.hold(name);
    if met.is_err() {
        region.abort();
        unlink(name).map_err(system)?;
    }
    met?;
    Ok(World::over(&Arc::new(region), &layout, rank))
}

fn require(holds: bool, detail: impl FnOnce() -> String) -> Result<(), CollectiveError> {
    if holds {
        Ok(())
    } else {
        Err(CollectiveError::Mismatch { operation: "join", detail: detail() })
    }
}

fn open(name: &str) -> Result<OwnedFd, Errno> {
    // /dev/shm is open to all users: do not follow a link that someone laid there.
    let no_follow = shm::OFlags::from_bits_retain(rustix::fs::OFlags::NOFOLLOW.bits());
    let flags = shm::OFlags::CREATE | shm::OFlags::RDWR | no_follow;
    shm::open(name, flags, Mode::RUSR | Mode::WUSR)
}

fn unlink(name: &str) -> io::Result<()> {
    match shm::unlink(name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Gives a fresh object its length; refuses one of another length or another user.
fn size(object: &OwnedFd, name: &str, len: usize, until: Instant) -> Result<(), CollectiveError> {
    let system = |errno: Errno| CollectiveError::SharedMemory {
        name: name.to_owned(),
        source: errno.into(),
    };
    // Under a lock, so that ranks with different plans cannot each see an empty object and then
    // shrink it under each other. The lock goes with the process, so it cannot be left behind.
    while let Err(errno) = rustix::fs::flock(object, FlockOperation::NonBlockingLockExclusive) {
        if errno != Errno::WOULDBLOCK || Instant::now() >= until {
            return Err(system(errno));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let stat = rustix::fs::fstat(object).map_err(system)?;
    let (user, mode) = (rustix::process::geteuid().as_raw(), stat.st_mode & 0o777);
    require(stat.st_uid == user && mode & 0o077 == 0, || {
        format!("{name} belongs to user {} with mode {mode:o}, not to {user} alone", stat.st_uid)
    })?;
    let there = usize::try_from(stat.st_size).unwrap_or(usize::MAX);
    require(there == 0 || there == len, || {
        format!("{name} has {there} bytes, this plan needs {len}: do the ranks agree on tp and pp?")
    })?;
    if there == 0 {
        rustix::fs::ftruncate(object, len as u64).map_err(system)?;
    }
    rustix::fs::flock(object, FlockOperation::Unlock).map_err(system)
}

/// Enters this rank into the region.
fn claim(region: &Region, shape: u64, rank: usize) -> Result<(), CollectiveError> {
    let found = region.number(layout::SHAPE).compare_exchange(0, shape, SeqCst, SeqCst);
    require(found.is_ok() || found == Err(shape), || {
        format!("the peers' plan or build is another: {found:x?}, here {shape:x}")
    })?;
    let pid = u64::from(std::process::id());
    let taken = region.number(layout::claim(rank)).compare_exchange(0, pid, SeqCst, SeqCst);
    require(taken.is_ok(), || format!("rank {rank} is taken by process {taken:?}"))?;
    region.event(layout::JOINED).increment();
    Ok(())
}

/// The wait for the other ranks.
struct Meeting<'a> {
    region: &'a Region,
    rank: usize,
    ranks: usize,
    start: Instant,
    deadline: Duration,
}

impl Meeting<'_> {
    fn hold(&self, name: &str) -> Result<(), CollectiveError> {
        self.wait(layout::JOINED, self.ranks as u32)?;
        if self.rank != 0 {
            return self.wait(layout::UNLINKED, 1);
        }
        unlink(name)
            .map_err(|source| CollectiveError::SharedMemory { name: name.to_owned(), source })?;
        self.region.event(layout::UNLINKED).publish(1);
        Ok(())
    }

    fn wait(&self, event: usize, target: u32) -> Result<(), CollectiveError> {
        let (rank, size) = (self.rank, self.ranks);
        let deadline = self.deadline.saturating_sub(self.start.elapsed());
        let patience = Patience { spin: Duration::ZERO, deadline };
        let aborted = || self.region.is_aborted();
        self.region.event(event).wait(target, patience, aborted).map_err(|interrupted| {
            match interrupted {
                Interrupted::Aborted => CollectiveError::Aborted { operation: "join", rank, size },
                Interrupted::Deadline { .. } => CollectiveError::Deadline {
                    operation: "join",
                    rank,
                    size,
                    missing: self.first_missing(),
                    waited_ms: u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX),
                },
            }
        })
    }

    /// The first rank that has not joined; rank 0 if all have and its unlinking is what is missing.
    fn first_missing(&self) -> usize {
        (0..self.ranks)
            .find(|&rank| self.region.number(layout::claim(rank)).load(SeqCst) == 0)
            .unwrap_or(0)
    }
}
