//! Which processes a service is made of, with their flags. Pure: nothing is started or opened here.

use std::{
    ffi::OsString,
    fmt,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use trireme_checkpoint::{CheckpointError, MemoryEstimate, ModelConfig};

use crate::{
    binaries::Binaries,
    config::{Dtype, EngineConfig, Front, word},
    size,
};

/// Longest path of a unix socket: `sun_path` has 108 bytes, one of them ends the string.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Tokens of one KV block, as the shards hold them.
pub const BLOCK_TOKENS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    #[error("--tp {tp} --pp {pp} is no legal split: {cause}")]
    Split { tp: usize, pp: usize, cause: CheckpointError },
    #[error(
        "socket path {path} has {given} bytes, a unix socket takes {MAX_SOCKET_PATH_BYTES}; set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
    )]
    SocketPath { path: PathBuf, given: usize },
    #[error("--max-model-len {given} is more than the {limit} positions of the model")]
    MaxModelLen { given: u32, limit: usize },
    #[error(
        "--kv-cache-memory {}: a sequence of {tokens} tokens takes {} ({need} bytes) on each rank; give at least that, or a smaller --max-model-len",
        size::display(*.given), size::display(*.need)
    )]
    KvCacheMemory { given: u64, need: u64, tokens: usize },
}

/// What a process does in the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// `rank = stage * tp + tp_rank`.
    Shard {
        rank: usize,
    },
    Router,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard { rank } => write!(f, "shard {rank}"),
            Self::Router => write!(f, "router"),
        }
    }
}

/// One process to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSpec {
    pub role: Role,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Variables that it starts with, unless the user set them.
    pub variables: Vec<(&'static str, String)>,
    /// Where it answers its RPCs; removed before each start.
    pub socket: PathBuf,
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct Deployment<'a> {
    /// Folder or file that every process opens.
    pub model: &'a Path,
    pub engine: &'a EngineConfig,
    pub front: &'a Front,
    /// Names this instance in logs and shared memory.
    pub instance: &'a str,
    /// Holds the sockets.
    pub run_folder: &'a Path,
    pub binaries: &'a Binaries,
    /// Cores of this machine.
    pub cores: NonZeroUsize,
    /// GPUs that the shards see.
    pub gpus: usize,
}

/// Refuses what cannot work, before any process is started.
pub fn check(model: &ModelConfig, engine: &EngineConfig) -> Result<(), TopologyError> {
    let split = engine.split;
    split.check(model).map_err(|cause| TopologyError::Split {
        tp: split.tp,
        pp: split.pp,
        cause,
    })?;
    let limit = model.max_position_embeddings;
    match engine.limits.max_model_len {
        Some(given) if given.get() as usize > limit => {
            return Err(TopologyError::MaxModelLen { given: given.get(), limit });
        }
        _ => {}
    }
    check_kv_memory(model, engine)
}

/// One sequence of the length asked for must fit. Without a length the router takes what fits, but
/// one block is the least.
fn check_kv_memory(model: &ModelConfig, engine: &EngineConfig) -> Result<(), TopologyError> {
    let Some(given) = engine.kv_cache_bytes else { return Ok(()) };
    let ranks = engine.split.tp * engine.split.pp;
    let slices = (0..ranks).map(|rank| engine.split.slice(model, rank));
    let (_, weight_size) = engine.dtype.storage(Dtype::CPU_WEIGHTS);
    let (_, kv_size) = engine.kv_dtype.storage(("like the weights", weight_size));
    let block_bytes = slices
        .map(|slice| MemoryEstimate::of(model, &slice, weight_size, kv_size, BLOCK_TOKENS))
        .map(|estimate| estimate.kv_bytes_per_block)
        .max()
        .unwrap_or(0);
    let tokens = engine.limits.max_model_len.map_or(BLOCK_TOKENS, |n| n.get() as usize);
    let need = block_bytes.saturating_mul(tokens.div_ceil(BLOCK_TOKENS) as u64);
    if given < need {
        return Err(TopologyError::KvCacheMemory { given, need, tokens });
    }
    Ok(())
}

/// The shards in rank order, then the router.
pub fn plan(deployment: Deployment<'_>) -> Result<Vec<ProcessSpec>, TopologyError> {
    let ranks = deployment.engine.split.tp * deployment.engine.split.pp;
    let sockets = (0..ranks)
        .map(|rank| socket(&deployment, &format!("shard-{rank}.sock")))
        .collect::<Result<Vec<_>, _>>()?;
    let mut processes: Vec<_> = sockets
        .iter()
        .enumerate()
        .map(|(rank, socket)| ProcessSpec {
            role: Role::Shard { rank },
            program: deployment.binaries.shard.clone(),
            args: shard_args(&deployment, rank, socket),
            variables: shard_variables(&deployment, rank),
            socket: socket.clone(),
        })
        .collect();
    let control = socket(&deployment, "control.sock")?;
    processes.push(ProcessSpec {
        role: Role::Router,
        program: deployment.binaries.router.clone(),
        args: router_args(&deployment, &sockets, &control),
        variables: Vec::new(),
        socket: control,
    });
    Ok(processes)
}

fn socket(deployment: &Deployment<'_>, name: &str) -> Result<PathBuf, TopologyError> {
    let path = deployment.run_folder.join(name);
    match path.as_os_str().len() {
        given if given > MAX_SOCKET_PATH_BYTES => Err(TopologyError::SocketPath { path, given }),
        _ => Ok(path),
    }
}

/// The cores shared evenly over the ranks, at least one each.
fn threads(engine: &EngineConfig, cores: NonZeroUsize) -> usize {
    let ranks = engine.split.tp * engine.split.pp;
    engine.threads.map_or_else(|| (cores.get() / ranks).max(1), NonZeroUsize::get)
}

/// Flags of a command line, in order.
struct Flags(Vec<OsString>);

impl Flags {
    fn put(&mut self, flag: &str, value: impl Into<OsString>) {
        self.0.push(flag.into());
        self.0.push(value.into());
    }
    fn put_some(&mut self, flag: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.put(flag, value.to_string());
        }
    }
    fn put_path(&mut self, flag: &str, value: Option<&PathBuf>) {
        if let Some(value) = value {
            self.put(flag, value);
        }
    }
}

fn shard_args(deployment: &Deployment<'_>, rank: usize, socket: &Path) -> Vec<OsString> {
    let engine = deployment.engine;
    let mut flags = Flags(Vec::new());
    flags.put("--model", deployment.model);
    flags.put("--load-format", word(engine.load_format));
    flags.put("--seed", engine.seed.to_string());
    flags.put("--device", word(engine.device));
    flags.put("--dtype", word(engine.dtype));
    flags.put("--kv-dtype", word(engine.kv_dtype));
    flags.put("--threads", threads(engine, deployment.cores).to_string());
    flags.put("--rank", rank.to_string());
    flags.put("--tp", engine.split.tp.to_string());
    flags.put("--pp", engine.split.pp.to_string());
    flags.put("--socket", socket);
    flags.put_some("--kv-cache-memory", engine.kv_cache_bytes);
    flags.put_some("--gpu-memory-fraction", engine.gpu_memory_fraction);
    flags.put("--log-format", "json");
    flags.put_some("--otlp-endpoint", engine.otlp_endpoint.as_ref());
    flags.0
}

/// NCCL takes ranks that share a GPU for one, unless they say that they are on different hosts; such
/// ranks reach each other through the loopback network.
fn shard_variables(deployment: &Deployment<'_>, rank: usize) -> Vec<(&'static str, String)> {
    let Deployment { engine, instance, gpus, .. } = deployment;
    let ranks = engine.split.tp * engine.split.pp;
    if engine.device.is_cpu() || ranks <= (*gpus).max(1) {
        return Vec::new();
    }
    vec![("NCCL_HOSTID", format!("{instance}-{rank}")), ("NCCL_SOCKET_IFNAME", "lo".into())]
}

fn router_args(deployment: &Deployment<'_>, shards: &[PathBuf], control: &Path) -> Vec<OsString> {
    let Deployment { engine, front, .. } = deployment;
    let limits = &engine.limits;
    let mut flags = Flags(Vec::new());
    flags.put("--model", deployment.model);
    flags.put("--load-format", word(engine.load_format));
    for shard in shards {
        let mut address = OsString::from("unix:");
        address.push(shard);
        flags.put("--shard", address);
    }
    flags.put("--tp", engine.split.tp.to_string());
    flags.put("--pp", engine.split.pp.to_string());
    flags.put("--control-socket", control);
    match front.listen {
        Some(listen) => {
            flags.put("--host", listen.host.to_string());
            flags.put("--port", listen.port.to_string());
            flags.put("--grpc-port", listen.grpc_port.to_string());
        }
        None => flags.0.push("--control-socket-only".into()),
    }
    flags.put_some("--served-model-name", front.served_model_name.as_ref());
    flags.put_some("--max-model-len", limits.max_model_len);
    flags.put_some("--max-batch-tokens", limits.max_batch_tokens);
    flags.put_some("--max-mixed-tokens", limits.max_mixed_tokens);
    flags.put_some("--max-sequences", limits.max_sequences);
    flags.put_some("--max-waiting", limits.max_waiting);
    flags.put_some("--steps-in-flight", limits.steps_in_flight);
    if limits.no_prefix_cache {
        flags.0.push("--no-prefix-cache".into());
    }
    flags.put_some("--step-deadline-ms", limits.step_deadline_ms);
    flags.put("--start-deadline-s", engine.supervision.start_deadline.as_secs().to_string());
    flags.put("--drain-deadline-s", engine.supervision.drain_deadline.as_secs().to_string());
    flags.put_path("--api-key-file", front.api_key_file.as_ref());
    flags.put_path("--chat-template", engine.chat_template.as_ref());
    flags.put_some("--tool-call-parser", engine.tool_call_parser.as_ref());
    flags.put_some("--reasoning-parser", engine.reasoning_parser.as_ref());
    flags.put("--log-format", "json");
    flags.put_some("--otlp-endpoint", engine.otlp_endpoint.as_ref());
    flags.put("--instance", deployment.instance);
    flags.put_some("--max-body-bytes", front.max_body_bytes);
    flags.0
}

#[cfg(test)]
mod tests;
