//! The end of a lost group: hung ranks are killed, the others forget the epoch.

use std::time::Duration;

use futures::future::join_all;
use rustix::process::{Pid, Signal, kill_process};

use super::{
    GroupError, ShardGroup,
    rank::{Connection, Rank},
};

/// `Info` is answered off the device thread at once by every live process.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
const RESET_LIMIT: Duration = Duration::from_secs(5);

impl ShardGroup {
    /// Ends the epoch on every rank that still answers and kills those that hang, so that their
    /// supervisor replaces them. Takes a few seconds at most.
    pub async fn end(self) {
        let epoch = self.info.epoch;
        join_all(self.ranks.iter().map(|rank| end(rank, epoch))).await;
    }
}

async fn end(rank: &Rank, epoch: u64) {
    let connection = &rank.connection;
    let outcome = match connection.info(PROBE_LIMIT).await {
        Ok(_) => connection.reset(epoch, RESET_LIMIT).await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => {}
        Err(error @ GroupError::Slow { .. }) => kill(connection, rank.pid, &error),
        // Dead, or alive and refusing: the next start sees which.
        Err(error) => tracing::info!(rank = connection.rank, %error, "rank was not reset"),
    }
}

/// A process that does not answer on its control threads cannot be reasoned with.
fn kill(connection: &Connection, pid: u32, error: &GroupError) {
    let rank = connection.rank;
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(target) = target.filter(|_| connection.is_peer(pid)) else {
        tracing::error!(rank, pid, %error, "rank hangs; its pid is not known to be on this host");
        return;
    };
    match kill_process(target, Signal::KILL) {
        Ok(()) => tracing::error!(rank, pid, %error, "rank hangs; killed"),
        Err(errno) => tracing::error!(rank, pid, %error, %errno, "rank hangs; cannot be killed"),
    }
}
