//! `trireme-router`: arguments, telemetry, then [`trireme_router::server::run`].

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use tokio_util::sync::CancellationToken;
use trireme_process::{StopSignals, remove_socket};
use trireme_router::{
    config::Args,
    grammar_check::checker,
    server::{self, Listeners},
};

/// The last spans may take this long to leave.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

fn main() -> anyhow::Result<ExitCode> {
    if std::env::args_os().nth(1).is_some_and(|verb| verb == checker::VERB) {
        return checker::run();
    }
    let args = Args::parse();
    // A control socket is a launcher's; without one a person started this, and may detach from it.
    if args.control_socket.is_some() && !trireme_process::end_with_parent()? {
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (outcome, telemetry) = runtime.block_on(async {
        let telemetry = trireme_telemetry::install(
            "trireme-router",
            args.log_format.into(),
            args.otlp_endpoint.as_deref(),
        )?;
        anyhow::Ok((serve(args).await, telemetry))
    })?;
    telemetry.flush(FLUSH_LIMIT);
    // Threads that still read for nobody must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome.map(|()| ExitCode::SUCCESS)
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let config = args.into_config()?;
    let signals = StopSignals::catch()?;
    let control_socket = config.control_socket.clone();
    let shutdown = CancellationToken::new();
    let first_signal = signals.first(control_socket.clone());
    let drain = shutdown.clone();
    tokio::spawn(async move {
        first_signal.await;
        drain.cancel();
    });
    let listeners = Listeners::bind(&config).await?;
    let outcome = server::run(config, listeners, shutdown).await;
    if let Some(path) = control_socket {
        remove_socket(&path);
    }
    outcome
}
