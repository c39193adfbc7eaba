//! SIGINT and SIGTERM: the first asks, the second insists.

use std::{io, path::PathBuf};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::remove_socket;

/// A shell reports a process that a signal ended as this much above the signal's number.
const EXIT_SIGNALLED: i32 = 128;

/// While this lives, the two signals no longer end the process by themselves.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// # Errors
    /// The runtime cannot install signal handlers.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// The number of the next signal.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }

    /// Resolves at the first signal. The second ends the process at once; `socket` goes with it.
    pub async fn first(mut self, socket: Option<PathBuf>) {
        self.next().await;
        tokio::spawn(async move {
            let signal = self.next().await;
            tracing::warn!(signal, "second signal; ending at once");
            if let Some(socket) = socket {
                remove_socket(&socket);
            }
            std::process::exit(EXIT_SIGNALLED + signal);
        });
    }
}
