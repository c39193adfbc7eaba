//! One running service: model, plan, run folder, log and supervisor put together.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context;
use trireme_checkpoint::{Checkpoint, CheckpointError};

use crate::{
    binaries::Binaries,
    child_log::ChildLog,
    cli,
    config::{EngineConfig, Front, LoadFormat, LogFormat},
    gpus,
    model_store::{ModelName, ModelStore},
    preflight,
    run_folder::RunFolder,
    supervisor::{Handle, Nursery, Supervisor},
    topology::{self, Deployment, Role},
};

/// The last lines of children get this long to be written.
const LOG_PATIENCE: Duration = Duration::from_secs(2);

/// How much an instance says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    /// Everything, as a service does.
    Service,
    /// Warnings and errors: the verb itself has the floor.
    Quiet,
}

/// A service that was found possible; [`Instance::run`] starts it.
pub struct Instance {
    supervisor: Supervisor,
    log_writer: JoinHandle<()>,
    folder: RunFolder,
}

/// What a started instance can be reached by.
#[derive(Debug)]
pub struct Reach {
    pub handle: Handle,
    /// The router's control socket.
    pub control: PathBuf,
    /// The shards' sockets in rank order.
    pub shards: Vec<PathBuf>,
    /// Names the instance; shared memory of its ranks starts with it.
    pub instance: String,
}

/// Finds the model, fetching it when needed, and opens it as the shards will: what is wrong with it
/// is said before anything is started.
pub fn open_model(name: &str, engine: &EngineConfig) -> anyhow::Result<(PathBuf, Checkpoint)> {
    preflight::check_engine(engine)?;
    let path = ModelStore::from_environment().fetch(&ModelName::parse(name)?)?;
    let checkpoint = open_checkpoint(&path, engine.load_format, engine.seed)?;
    topology::check(checkpoint.model(), engine)?;
    Ok((path, checkpoint))
}

/// Opens a checkpoint the way the shards will.
pub fn open_checkpoint(
    path: &Path,
    load_format: LoadFormat,
    seed: u64,
) -> Result<Checkpoint, CheckpointError> {
    match load_format {
        LoadFormat::Auto => Checkpoint::open(path),
        LoadFormat::Dummy if path.is_dir() => Checkpoint::dummy(&path.join("config.json"), seed),
        LoadFormat::Dummy => Checkpoint::dummy(path, seed),
    }
}

impl Instance {
    /// Refuses what cannot work; starts nothing yet. Without a front there is no router either:
    /// who asks so drives the shards.
    pub fn prepare(
        model: &Path,
        engine: &EngineConfig,
        front: Option<&Front>,
        log_format: LogFormat,
        voice: Voice,
    ) -> anyhow::Result<(Self, Reach)> {
        let binaries = Binaries::locate()?;
        let folder = RunFolder::create()
            .context("make a run folder (in $XDG_RUNTIME_DIR, else $TMPDIR, else /tmp)")?;
        let mut processes = topology::plan(Deployment {
            model,
            engine,
            front: front.unwrap_or(&Front::private(None)),
            instance: folder.instance(),
            run_folder: folder.path(),
            binaries: &binaries,
            cores: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            gpus: gpus::visible(),
        })?;
        let sockets = |router: bool| {
            let of_kind = processes.iter().filter(move |p| (p.role == Role::Router) == router);
            of_kind.map(|spec| spec.socket.clone()).collect::<Vec<_>>()
        };
        let shards = sockets(false);
        let control = sockets(true).pop().context("a plan has a router")?;
        processes.retain(|spec| front.is_some() || spec.role != Role::Router);
        let (log, log_writer) = ChildLog::start(log_format, std::io::stderr())?;
        let user_filters = std::env::var_os(trireme_telemetry::LOG_VARIABLE).is_some();
        let quiet = voice == Voice::Quiet && !user_filters;
        let nursery = Nursery {
            log,
            hidden_variables: cli::variables(),
            log_filter: quiet.then_some("warn"),
        };
        let (supervisor, handle) = Supervisor::new(processes, engine.supervision.clone(), nursery);
        let instance = folder.instance().to_owned();
        let reach = Reach { handle, control, shards, instance };
        Ok((Self { supervisor, log_writer, folder }, reach))
    }

    /// Runs to the end of the service, and leaves nothing behind. Call it on the main thread.
    pub async fn run(self) -> anyhow::Result<()> {
        let outcome = self.supervisor.run().await;
        let patience = Instant::now() + LOG_PATIENCE;
        while !self.log_writer.is_finished() && Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(self.folder);
        Ok(outcome?)
    }
}
