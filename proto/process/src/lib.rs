//! A server process among its relatives: the signals that stop it, the parent it ends with, and
//! the socket it must not leave behind.

#![forbid(unsafe_code)]

mod socket;
mod stop_signals;

use std::io;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

pub use socket::remove_socket;
pub use stop_signals::StopSignals;

/// Asks the kernel for SIGTERM when the parent dies. False when it is gone already.
///
/// A parent of several threads dies thread by thread, so the signal may come more than once.
///
/// # Errors
/// The kernel refuses.
pub fn end_with_parent() -> io::Result<bool> {
    let before = getppid();
    set_parent_process_death_signal(Some(Signal::TERM))?;
    // A parent that died before the call above sends no signal any more.
    Ok(getppid() == before)
}
