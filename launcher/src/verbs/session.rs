//! A server for the length of one verb: one that runs already, or an instance of our own.

use std::{pin::pin, time::Duration};

use anyhow::bail;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use tracing_subscriber::filter::LevelFilter;
use trireme_proto::generate::v1::InfoReply;

use crate::{
    api_key::ApiKey,
    cli::{ConnectArgs, EngineArgs},
    config::{EngineConfig, Front, LogFormat},
    instance::{Instance, Reach, Voice, open_model},
    model_store::served_name,
    rpc::{self, Connection},
    supervisor::{Stop, SupervisorError},
    verbs::runtime,
};

/// At the end of a verb nothing should be running; what does gets this long.
const DRAIN_DEADLINE: Duration = Duration::from_secs(1);

/// Whose Ctrl-C is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// It ends the verb.
    Ends,
    /// The verb has a use of its own for it.
    IsTheVerbs,
}

/// The engine of a verb's own instance.
pub fn engine(args: &EngineArgs) -> EngineConfig {
    EngineConfig::new(args, DRAIN_DEADLINE)
}

/// Runs `work` on the gRPC channel of a server that is ready.
pub fn with_server(
    args: &EngineArgs,
    engine: &EngineConfig,
    connect: &ConnectArgs,
    interrupt: Interrupt,
    work: impl AsyncFnOnce(Connection) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if let Some(address) = connect.connect.as_deref() {
        let key = ApiKey::given(connect.api_key_file.as_deref())?;
        return runtime()?.block_on(async {
            listen_to_logs(args.log_format)?;
            work(rpc::connect(address, key.as_ref()).await?).await
        });
    }
    let (model, checkpoint) = open_model(&args.model.model, engine)?;
    drop(checkpoint); // only looked at; the shards map it themselves
    runtime()?.block_on(async {
        listen_to_logs(args.log_format)?;
        let front = Front::private(Some(served_name(&args.model.model)));
        let (instance, reach) =
            Instance::prepare(&model, engine, Some(&front), args.log_format, Voice::Quiet)?;
        let Reach { handle, control, .. } = reach;
        let ready = handle.ready;
        let work = async move {
            until_ready(ready).await;
            work(rpc::keyless(rpc::unix(&control))).await
        };
        beside(instance, handle.stop, interrupt, work).await
    })
}

/// Runs `work` while the instance runs, then stops the instance.
pub async fn beside(
    instance: Instance,
    stop: tokio::sync::mpsc::Sender<Stop>,
    interrupt: Interrupt,
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let mut run = pin!(instance.run());
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupted = match interrupt {
        Interrupt::Ends => Some(signal(SignalKind::interrupt())?),
        Interrupt::IsTheVerbs => None,
    };
    let outcome = tokio::select! {
        ended = &mut run => {
            ended?;
            bail!("the engine ended by itself");
        }
        outcome = work => outcome,
        _ = terminate.recv() => Err(killed(SignalKind::terminate())),
        () = next(interrupted.as_mut()) => Err(killed(SignalKind::interrupt())),
    };
    let _ = stop.send(Stop::Drain).await;
    let mut second = signal(SignalKind::interrupt())?;
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            _ = second.recv() => {
                let _ = stop.send(Stop::Now(SignalKind::interrupt().as_raw_value())).await;
            }
        }
    };
    outcome.and(ended)
}

fn killed(kind: SignalKind) -> anyhow::Error {
    SupervisorError::Killed { signal: kind.as_raw_value() }.into()
}

async fn next(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Waits until the server is ready; for ever when it ends before, since its own end says why.
async fn until_ready(mut ready: watch::Receiver<Option<InfoReply>>) {
    if ready.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The verb has the floor: only warnings are logged, unless the user asked for more.
pub fn listen_to_logs(format: LogFormat) -> anyhow::Result<()> {
    if tracing::dispatcher::has_been_set() {
        return Ok(()); // a verb that runs one instance after another
    }
    if std::env::var_os(trireme_telemetry::LOG_VARIABLE).is_some() {
        drop(trireme_telemetry::install("trireme", format.into(), None)?);
        return Ok(());
    }
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_max_level(LevelFilter::ERROR);
    match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|error| anyhow::anyhow!("install the log: {error}"))
}
