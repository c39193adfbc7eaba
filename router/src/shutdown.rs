//! SIGTERM and SIGINT: the first drains, the second ends at once.

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

async fn next(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
