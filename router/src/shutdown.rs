//! SIGTERM and SIGINT: the first drains, the second ends at once.

use std::path::Path;

use rustix::process::{getppid, set_parent_process_death_signal};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// As a shell reports a process that a signal ended.
const EXIT_INTERRUPTED: i32 = 130;

/// A token that the first signal cancels.
///
/// # Errors
/// The runtime cannot install signal handlers.
pub fn on_signals() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        next(&mut terminate, &mut interrupt).await;
        cancelled.cancel();
        next(&mut terminate, &mut interrupt).await;
        tracing::warn!("second signal; ending at once");
        std::process::exit(EXIT_INTERRUPTED);
    });
    Ok(token)
}

/// Asks the kernel for SIGTERM when the parent dies. False when it is gone already.
///
/// # Errors
/// The kernel refuses.
pub fn end_with_parent() -> std::io::Result<bool> {
    let before = getppid();
    set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    // A parent that died before the call above sends no signal any more.
    Ok(getppid() == before)
}

/// Removes a socket, and its folder when this was the last thing in it: a launcher that was killed
/// cannot do so.
pub fn remove_socket(path: &Path) {
    // Both may be gone already, and a folder that is in use stays.
    drop(std::fs::remove_file(path));
    if let Some(folder) = path.parent() {
        drop(std::fs::remove_dir(folder));
    }
}

async fn next(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
