//! The life of the process: listen, load, serve, stop.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering, mpsc::Receiver},
    thread,
    time::Duration,
};

use anyhow::Context;
use tokio::{net::UnixListener, sync::oneshot, time};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic_health::{ServingStatus, server::HealthReporter};
use tracing::{info, warn};
#[cfg(feature = "cuda")]
use trireme_checkpoint::Split;
use trireme_checkpoint::{Checkpoint, CheckpointError, DType};
#[cfg(feature = "cuda")]
use trireme_collectives::nccl::Seat;
use trireme_collectives::{CollectiveError, World, local, shared_memory};
#[cfg(feature = "cuda")]
use trireme_kernels::{Storage, cuda};
use trireme_process::{StopSignals, remove_socket};
use trireme_proto::shard::v1::{ShardState, shard_server::ShardServer};

use crate::{
    config::{Backend, Config, LoadFormat},
    device::{
        Device,
        cpu::{Cpu, block_type},
    },
    engine::{Command, Configure, Engine, EngineError, Handle, Join},
    grammar::Grammars,
    models::Model,
    runner::{Loaded, Runner},
    service::Service,
    status::Status,
    weights::{Place, Weights, total_bytes},
};
#[cfg(feature = "cuda")]
use crate::{
    device::cuda::{Cuda, CudaStore, GpuWorld},
    meeting_point,
};

/// Prompts of 128k tokens with their block tables are far below this.
const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// How often health is compared with the running step's deadline.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);
/// How long open calls, then the running step, may take to end after a stop signal.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Why the shard ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("load the model")]
    Load(#[source] anyhow::Error),
    #[error("serve")]
    Serve(#[source] anyhow::Error),
}

/// Serves until a stop signal or a load failure.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    // Before there is a socket: a signal from here on removes it.
    let signals = StopSignals::catch().map_err(|error| ServeError::Serve(error.into()))?;
    let socket = Socket::bind(&config.socket)
        .with_context(|| format!("listen on {}", config.socket.display()))
        .map_err(ServeError::Serve)?;
    let (engine, commands) = Handle::new(Arc::new(Status::default()));
    let grammars = Arc::new(Grammars::default());
    let identity = Arc::new(config.identity.clone());
    let service = Service { engine: engine.clone(), identity, grammars: grammars.clone() };
    let socket_path = config.socket.clone();
    let (loaded, load_result) = oneshot::channel();
    let (stopped, engine_end) = oneshot::channel::<()>();
    let status = engine.status.clone();
    thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            run_engine(&config, &status, grammars, &commands, loaded);
            drop(stopped);
        })
        .map_err(|error| ServeError::Serve(error.into()))?;
    let result = tokio::select! {
        result = listen(socket.listener, service) => result.map_err(ServeError::Serve),
        failure = load_failure(load_result) => Err(ServeError::Load(failure)),
        () = signals.first(Some(socket_path)) => Ok(()),
    };
    stop(&engine, engine_end).await;
    drop(socket.file);
    result
}

/// Lets the engine finish what it has, then ends its waits.
async fn stop(engine: &Handle, mut engine_end: oneshot::Receiver<()>) {
    info!("stopping");
    if engine.status.phase().state == ShardState::Loading {
        return; // nothing runs that could be finished, and the engine takes no orders yet
    }
    if let Err(error @ EngineError::Busy) = engine.send(Command::Stop) {
        // Then the running step ends by the abort below, and the engine with the process.
        warn!(%error, "stop");
    }
    if time::timeout(STOP_GRACE, &mut engine_end).await.is_ok() {
        return;
    }
    if let Some(abort) = engine.status.phase().abort {
        abort.abort();
    }
    if time::timeout(STOP_GRACE, &mut engine_end).await.is_err() {
        warn!("the engine did not end in time");
    }
}

/// Answers gRPC on a socket, health included.
pub(crate) async fn listen(listener: UnixListener, service: Service) -> anyhow::Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    // A new reporter says "serving" of the whole server: nobody may ask before it is told.
    reporter.set_service_status("", ServingStatus::NotServing).await;
    tokio::spawn(report_health(reporter, service.engine.status.clone()));
    let shard = ShardServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Server::builder()
        .add_service(health)
        .add_service(shard)
        .serve_with_incoming(UnixListenerStream::new(listener))
        .await
        .context("serve gRPC")
}

/// Keeps health in step with the engine, without asking its thread.
async fn report_health(reporter: HealthReporter, status: Arc<Status>) {
    let mut phase = status.subscribe();
    loop {
        let serving =
            if status.healthy() { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", serving).await;
        reporter.set_service_status("trireme.shard.v1.Shard", serving).await;
        // A stuck step changes no phase: look again after a while.
        if let Ok(Err(_)) = time::timeout(HEALTH_INTERVAL, phase.changed()).await {
            return;
        }
    }
}

/// Resolves only if loading fails.
async fn load_failure(load_result: oneshot::Receiver<Result<(), LoadError>>) -> anyhow::Error {
    match load_result.await {
        Ok(Ok(())) => std::future::pending().await,
        Ok(Err(error)) => error.into(),
        Err(_) => anyhow::anyhow!("the engine thread ended while loading"),
    }
}

/// Why a rank has no weights.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[cfg(feature = "cuda")]
    #[error(
        "the weights of this rank take {needed} bytes, but {free} are free on the GPU: use more ranks"
    )]
    Room { needed: u64, free: u64 },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] trireme_kernels::cuda::CudaError),
}

/// The engine thread: load, then take commands.
fn run_engine(
    config: &Config,
    status: &Arc<Status>,
    grammars: Arc<Grammars>,
    commands: &Receiver<Command>,
    loaded: oneshot::Sender<Result<(), LoadError>>,
) {
    match config.backend {
        Backend::Cpu => {
            drive(load(config, status), Box::new(join), status, grammars, commands, loaded);
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda { memory_fraction } => {
            let runner = load_cuda(config, status, memory_fraction);
            drive(runner, Box::new(join_gpus), status, grammars, commands, loaded);
        }
    }
}

fn drive<D: Device>(
    runner: Result<Runner<D>, LoadError>,
    join: Join<D>,
    status: &Arc<Status>,
    grammars: Arc<Grammars>,
    commands: &Receiver<Command>,
    loaded: oneshot::Sender<Result<(), LoadError>>,
) {
    match runner {
        Ok(mut runner) => {
            runner.share_grammars(grammars);
            let engine = Engine::new(runner, join, status.clone());
            drop(loaded.send(Ok(())));
            engine.run(commands);
        }
        Err(error) => {
            status.fail(error.to_string());
            drop(loaded.send(Err(error)));
        }
    }
}

/// Reads this rank's weights onto the CPU.
pub fn load(config: &Config, status: &Status) -> Result<Runner<Cpu>, LoadError> {
    let device = || Ok(Cpu::new(config.threads, config.kv_storage));
    load_on(config, status, &config.weights, |_| Ok(()), device)
}

/// Reads this rank's weights onto its GPU: ranks take those of the host in turn.
#[cfg(feature = "cuda")]
pub fn load_cuda(
    config: &Config,
    status: &Status,
    memory_fraction: f64,
) -> Result<Runner<Cuda>, LoadError> {
    let gpus = cuda::gpu_count()?.max(1);
    let context = cuda::Context::open(config.identity.rank % gpus)?;
    info!(gpu = context.ordinal(), name = context.name(), "GPU opened");
    let element = match config.weights.numbers {
        Storage::F32 => cuda::Element::F32,
        Storage::Bf16 => cuda::Element::Bf16,
    };
    let free = context.memory()?.0 as u64;
    let room = |needed| if needed > free { Err(LoadError::Room { needed, free }) } else { Ok(()) };
    let store = CudaStore { context, element };
    let device = || Ok(Cuda::new(&store, memory_fraction, config.threads)?);
    load_on(config, status, &store, room, device)
}

fn load_on<D: Device>(
    config: &Config,
    status: &Status,
    store: &D::Store,
    room: impl FnOnce(u64) -> Result<(), LoadError>,
    device: impl FnOnce() -> Result<D, LoadError>,
) -> Result<Runner<D>, LoadError> {
    let checkpoint = match config.load_format {
        LoadFormat::Auto => Checkpoint::open(&config.model)?,
        LoadFormat::Dummy => Checkpoint::dummy(&config.model, config.seed)?,
    };
    let model = checkpoint.model().clone();
    config.identity.split.check(&model)?;
    let place = Place::new(&model, config.identity.split, config.identity.rank);
    let weight_size = D::weight_size(store);
    let total = total_bytes(&model, &place.slice, weight_size);
    room(total)?;
    status.bytes_total.store(total, Ordering::Relaxed);
    status.change(|phase| {
        phase.model = Some(model.clone());
        phase.fingerprint = checkpoint.fingerprint();
    });
    let weights = Weights::<D> {
        checkpoint: &checkpoint,
        place: &place,
        store,
        threads: config.threads,
        bytes_loaded: &status.bytes_loaded,
    };
    if config.weights.keep_blocks {
        tell_blocks(&checkpoint);
    }
    let layers = Model::load(&weights)?;
    let weight_bytes = status.bytes_loaded.load(Ordering::Relaxed);
    // Blocks are smaller than the numbers that the total was made of.
    status.bytes_total.store(weight_bytes, Ordering::Relaxed);
    status.change(|phase| phase.weight_bytes = weight_bytes);
    info!(weight_bytes, layers = ?place.slice.layers, rank = place.rank, "weights loaded");
    let device = device()?;
    let kv_memory = config.kv_cache_memory;
    Ok(Runner::new(Loaded { device, place, model, layers, weight_bytes, kv_memory }))
}

/// Says which of the stored types stay as they are.
fn tell_blocks(checkpoint: &Checkpoint) {
    for dtype in DType::ALL {
        let Some(tally) = checkpoint.describe().dtypes.get(dtype.name()).copied() else { continue };
        let tensors = tally.tensors;
        if block_type(dtype).is_some() {
            info!(%dtype, tensors, "blocks are kept as they are stored");
        } else if dtype.block_len() > 1 {
            warn!(%dtype, tensors, "no kernel multiplies these blocks: they become bf16");
        }
    }
}

/// The groups of an epoch: one rank needs nobody, several share memory.
fn join(
    configure: &Configure,
    place: &Place,
    deadline: Duration,
) -> Result<World, CollectiveError> {
    let (tp, pp) = (place.split.tp, place.split.pp);
    if place.ranks() == 1 {
        let world = local::worlds(1, 1).pop();
        return world.ok_or(CollectiveError::Mismatch {
            operation: "join",
            detail: "a world of one rank has no rank".into(),
        });
    }
    shared_memory::join(&configure.shared_memory, tp, pp, place.rank, deadline)
}

/// The same with what the GPUs of several ranks meet by.
#[cfg(feature = "cuda")]
fn join_gpus(
    configure: &Configure,
    place: &Place,
    deadline: Duration,
) -> Result<GpuWorld, CollectiveError> {
    let mismatch = |detail| CollectiveError::Mismatch { operation: "join", detail };
    let ids = meeting_point::parse(&configure.nccl_unique_ids).map_err(mismatch)?;
    let Split { tp, pp } = place.split;
    let seat = Seat { tp, pp, rank: place.rank };
    Ok(GpuWorld { hosts: join(configure, place, deadline)?, seat, ids })
}

/// The listening socket and its file.
struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

impl Socket {
    fn bind(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        let file = SocketFile(path.to_owned());
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, file })
    }
}

/// A socket that a killed predecessor left behind; anything else at that path stays.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is no socket"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes the socket at the end, and its folder if nothing else is in it.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        remove_socket(&self.0);
    }
}
