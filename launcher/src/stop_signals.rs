//! SIGINT and SIGTERM: the first asks, the second insists.

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use crate::supervisor::Stop;

pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// From here on these signals no longer end the program by themselves.
    pub fn catch() -> std::io::Result<Self> {
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

    /// Turns signals into stops until the supervisor is gone.
    pub async fn forward(mut self, stop: mpsc::Sender<Stop>) {
        self.next().await;
        let _ = stop.send(Stop::Drain).await;
        loop {
            let signal = self.next().await;
            if stop.send(Stop::Now(signal)).await.is_err() {
                return;
            }
        }
    }
}
