//! The process among its relatives: it ends with its parent, and on signals.

use std::{io, process};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

/// Asks the kernel for SIGTERM when the parent dies. Returns false if the parent is gone already.
pub fn end_with_parent() -> io::Result<bool> {
    let before = getppid();
    set_parent_process_death_signal(Some(Signal::TERM))?;
    // A parent that died before the call above sends no signal any more.
    Ok(getppid() == before)
}

/// Catches SIGTERM and SIGINT from now on. What it returns ends at the first of them; the second
/// ends the process at once.
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tokio::spawn(async move {
            let code = tokio::select! {
                _ = terminate.recv() => 128 + Signal::TERM.as_raw(),
                _ = interrupt.recv() => 128 + Signal::INT.as_raw(),
            };
            process::exit(code);
        });
    })
}
