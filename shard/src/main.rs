//! `trireme-shard`: one process per device.

#![forbid(unsafe_code)]

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use tracing::error;
use trireme_shard::{
    config::{Args, Config},
    server::{self, ServeError},
};
use trireme_telemetry::Service;

/// Exit codes beside 0 (stopped as asked), 1 (failed) and 2 (flags do not parse).
const EXIT_CONFIG: u8 = 3;
const EXIT_LOAD: u8 = 4;
const EXIT_ORPHAN: u8 = 5;

const FLUSH_DEADLINE: Duration = Duration::from_secs(2);

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let service = Service { rank: u32::try_from(args.rank).ok(), ..Service::from("trireme-shard") };
    // One worker beside the engine's thread; the exporter needs it while the main thread flushes.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (code, telemetry) = runtime.block_on(async {
        let endpoint = args.otlp_endpoint.as_deref();
        let telemetry = trireme_telemetry::install(service, args.log_format.into(), endpoint)?;
        anyhow::Ok((run(args).await, telemetry))
    })?;
    telemetry.flush(FLUSH_DEADLINE);
    Ok(code)
}

async fn run(args: Args) -> ExitCode {
    match trireme_process::end_with_parent() {
        Ok(true) => {}
        Ok(false) => return fail(EXIT_ORPHAN, &anyhow::anyhow!("the parent process has ended")),
        Err(error) => return fail(1, &error.into()),
    }
    let config = match Config::try_from(args) {
        Ok(config) => config,
        Err(error) => return fail(EXIT_CONFIG, &error.into()),
    };
    match server::serve(config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ ServeError::Load(_)) => fail(EXIT_LOAD, &error.into()),
        Err(error @ ServeError::Serve(_)) => fail(1, &error.into()),
    }
}

/// Says once why the process ends, with all causes.
fn fail(code: u8, error: &anyhow::Error) -> ExitCode {
    error!("{error:#}");
    ExitCode::from(code)
}
