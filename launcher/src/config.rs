//! What the command line means: arguments parsed once into values that cannot be wrong.

use std::{
    net::IpAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use clap::ValueEnum;
use trireme_checkpoint::Split;

use crate::{
    cli::{EngineArgs, ServeArgs},
    model_store::served_name,
};

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

impl Device {
    /// `auto` takes the CPU as long as no build computes on GPUs.
    pub fn is_cpu(self) -> bool {
        self != Self::Cuda
    }
}

/// Storage of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// The device's choice (bf16).
    Auto,
    F32,
    Bf16,
    F16,
    /// A quantised file's own blocks, where a kernel multiplies them; else bf16.
    Quantized,
}

impl Dtype {
    /// Name and bytes of one number, where `auto` means the given type.
    pub fn storage(self, auto: (&'static str, usize)) -> (&'static str, usize) {
        match self {
            Self::Auto => auto,
            Self::F32 => ("f32", 4),
            Self::Bf16 => Self::CPU_WEIGHTS,
            Self::F16 => ("f16", 2),
            // At most: blocks are smaller, and what has no kernel is bf16.
            Self::Quantized => ("quantized", 2),
        }
    }

    /// What `auto` weights are on a CPU; an `auto` KV cache is stored like the weights.
    pub const CPU_WEIGHTS: (&'static str, usize) = ("bf16", 2);
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
    /// Of a GPU's memory.
    pub gpu_memory_fraction: Option<f64>,
    pub limits: Limits,
    pub supervision: Supervision,
    pub chat_template: Option<PathBuf>,
    pub tool_call_parser: Option<String>,
    pub reasoning_parser: Option<String>,
    pub otlp_endpoint: Option<String>,
}

/// Bounds handed to the router; an absent one is the router's default.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub max_model_len: Option<NonZeroU32>,
    pub max_batch_tokens: Option<NonZeroU32>,
    pub max_mixed_tokens: Option<NonZeroU32>,
    pub max_sequences: Option<NonZeroU32>,
    pub max_waiting: Option<NonZeroU32>,
    pub steps_in_flight: Option<NonZeroU32>,
    pub no_prefix_cache: bool,
    pub step_deadline_ms: Option<NonZeroU32>,
}

impl Limits {
    /// The router's own defaults.
    pub const BATCH_TOKENS_DEFAULT: NonZeroU32 = NonZeroU32::new(512).unwrap();
    pub const SEQUENCES_DEFAULT: NonZeroU32 = NonZeroU32::new(64).unwrap();
    /// A GPU computes thousands of tokens in the time of hundreds on a CPU.
    const GPU_BATCH_TOKENS_DEFAULT: NonZeroU32 = NonZeroU32::new(8192).unwrap();
    const GPU_SEQUENCES_DEFAULT: NonZeroU32 = NonZeroU32::new(256).unwrap();
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

/// Where the router listens besides its control socket. Port 0: a free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    pub host: IpAddr,
    pub port: u16,
    pub grpc_port: u16,
}

/// The doors of the router.
#[derive(Clone, Debug)]
pub struct Front {
    /// None: it is reached by its control socket alone.
    pub listen: Option<Listen>,
    pub served_model_name: Option<String>,
    pub api_key_file: Option<PathBuf>,
    pub max_body_bytes: Option<u64>,
}

impl Front {
    /// Of an instance that serves one verb: its control socket, no ports.
    pub fn private(served_model_name: Option<String>) -> Self {
        Self { listen: None, served_model_name, api_key_file: None, max_body_bytes: None }
    }
}

impl EngineConfig {
    pub fn new(args: &EngineArgs, drain_deadline: Duration) -> Self {
        let (max_batch_tokens, sequences) = match args.device.is_cpu() {
            true => (args.max_batch_tokens, Limits::SEQUENCES_DEFAULT),
            false => (
                args.max_batch_tokens.or(Some(Limits::GPU_BATCH_TOKENS_DEFAULT)),
                Limits::GPU_SEQUENCES_DEFAULT,
            ),
        };
        Self {
            split: Split { tp: args.tp.get(), pp: args.pp.get() },
            load_format: args.load_format,
            seed: args.seed.unwrap_or(0),
            device: args.device,
            dtype: args.dtype,
            kv_dtype: args.kv_dtype,
            threads: args.threads,
            kv_cache_bytes: args.kv_cache_memory.map(|size| size.0),
            gpu_memory_fraction: args.gpu_memory_fraction,
            limits: Limits {
                max_model_len: args.max_model_len,
                max_batch_tokens,
                max_mixed_tokens: args.max_mixed_tokens,
                max_sequences: args.max_sequences.or_else(|| {
                    // A step has a token for each sequence that runs.
                    max_batch_tokens.map(|tokens| tokens.min(sequences))
                }),
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
            tool_call_parser: args.tool_call_parser.clone(),
            reasoning_parser: args.reasoning_parser.clone(),
            otlp_endpoint: args.otlp_endpoint.clone(),
        }
    }
}

impl Front {
    pub fn new(args: &ServeArgs) -> Self {
        Self {
            listen: Some(Listen { host: args.host, port: args.port, grpc_port: args.grpc_port }),
            served_model_name: args
                .served_model_name
                .clone()
                .or_else(|| Some(served_name(&args.engine.model.model))),
            api_key_file: args.api_key_file.clone(),
            max_body_bytes: args.max_body_bytes.map(|size| size.0),
        }
    }
}
