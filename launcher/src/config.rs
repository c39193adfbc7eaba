//! What the command line means: arguments parsed once into values that cannot be wrong.

use std::{
    net::{IpAddr, Ipv4Addr},
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use clap::ValueEnum;
use trireme_checkpoint::Split;

use crate::cli::{EngineArgs, ServeArgs};

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// What the folder or file holds.
    Auto,
    /// Seeded random values; only config.json is read, prompts are token ids.
    Dummy,
}

/// What the shards compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The best there is.
    Auto,
    Cpu,
    Cuda,
}

/// Storage of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// The device's choice (bf16).
    Auto,
    F32,
    Bf16,
    F16,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

impl From<LogFormat> for trireme_telemetry::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

/// The word that stands for a value on a command line.
pub fn word<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

/// Everything about the engine: shards and the loop above them.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub split: Split,
    pub load_format: LoadFormat,
    /// Of the random weights of [`LoadFormat::Dummy`].
    pub seed: u64,
    pub device: Device,
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    /// Threads of each rank; none: the cores shared evenly.
    pub threads: Option<NonZeroUsize>,
    pub kv_cache_bytes: Option<u64>,
    pub limits: Limits,
    pub supervision: Supervision,
    pub chat_template: Option<PathBuf>,
    pub otlp_endpoint: Option<String>,
}

/// Bounds handed to the router; an absent one is the router's default.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub max_model_len: Option<NonZeroU32>,
    pub max_batch_tokens: Option<NonZeroU32>,
    pub max_sequences: Option<NonZeroU32>,
    pub max_waiting: Option<NonZeroU32>,
    pub steps_in_flight: Option<NonZeroU32>,
    pub no_prefix_cache: bool,
    pub step_deadline_ms: Option<NonZeroU32>,
}

/// How long the supervisor waits for what, and how often it tries again.
#[derive(Clone, Debug)]
pub struct Supervision {
    /// Restarts allowed within [`Supervision::RESTART_WINDOW`].
    pub restart_budget: u32,
    /// A process that does not answer, or answers that it cannot serve, for this long is killed.
    pub hang_deadline: Duration,
    /// From start to ready.
    pub start_deadline: Duration,
    /// The router finishes running requests within this time at a stop.
    pub drain_deadline: Duration,
    /// A process that was asked to end gets this long before SIGKILL.
    pub kill_grace: Duration,
}

impl Supervision {
    pub const RESTART_WINDOW: Duration = Duration::from_secs(600);
}

/// The doors of the router.
#[derive(Clone, Debug)]
pub struct Front {
    pub host: IpAddr,
    /// 0: a free one.
    pub port: u16,
    pub grpc_port: u16,
    pub served_model_name: Option<String>,
    pub api_key_file: Option<PathBuf>,
    pub max_body_bytes: Option<u64>,
}

impl Front {
    /// Of an instance that is reached by its control socket. The router always listens on TCP too:
    /// on free ports of this machine, then, so that any number of instances get along.
    pub fn private() -> Self {
        Self {
            host: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            grpc_port: 0,
            served_model_name: None,
            api_key_file: None,
            max_body_bytes: None,
        }
    }
}

impl EngineConfig {
    pub fn new(args: &EngineArgs, drain_deadline: Duration) -> Self {
        Self {
            split: Split { tp: args.tp.get(), pp: args.pp.get() },
            load_format: args.load_format,
            seed: args.seed.unwrap_or(0),
            device: args.device,
            dtype: args.dtype,
            kv_dtype: args.kv_dtype,
            threads: args.threads,
            kv_cache_bytes: args.kv_cache_memory.map(|size| size.0),
            limits: Limits {
                max_model_len: args.max_model_len,
                max_batch_tokens: args.max_batch_tokens,
                max_sequences: args.max_sequences,
                max_waiting: args.max_waiting,
                steps_in_flight: args.steps_in_flight,
                no_prefix_cache: args.no_prefix_cache,
                step_deadline_ms: args.step_deadline_ms,
            },
            supervision: Supervision {
                restart_budget: args.restart_budget,
                hang_deadline: Duration::from_secs(u64::from(args.hang_deadline_s.get())),
                start_deadline: Duration::from_secs(u64::from(args.start_deadline_s.get())),
                drain_deadline,
                kill_grace: Duration::from_secs(5),
            },
            chat_template: args.chat_template.clone(),
            otlp_endpoint: args.otlp_endpoint.clone(),
        }
    }
}

impl Front {
    pub fn new(args: &ServeArgs) -> Self {
        Self {
            host: args.host,
            port: args.port,
            grpc_port: args.grpc_port,
            served_model_name: args
                .served_model_name
                .clone()
                .or_else(|| Some(args.engine.model.model.clone())),
            api_key_file: args.api_key_file.clone(),
            max_body_bytes: args.max_body_bytes.map(|size| size.0),
        }
    }
}
