//! Flags, and the checked configuration they become.

use std::{num::NonZeroUsize, path::PathBuf, thread};

use clap::{Parser, ValueEnum};
use trireme_checkpoint::Split;
use trireme_kernels::Storage;
use trireme_telemetry::LogFormat;

use crate::{device::cpu::WeightStore, memory::parse_size};

/// One shard of a model: serves the internal RPC on a unix socket.
#[derive(Clone, Debug, Parser)]
#[command(name = "trireme-shard", version)]
pub struct Args {
    /// Model folder or file; with `--load-format dummy` its config.json is enough
    #[arg(long)]
    pub model: PathBuf,
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,
    /// Seed of dummy weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceKind,
    /// Of the weights; auto on CPU: bf16
    #[arg(long, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Of the KV cache; auto on CPU: f32 with f32 weights, else bf16
    #[arg(long, value_enum, default_value = "auto")]
    pub kv_dtype: Dtype,
    /// Threads of this rank; default: its share of the cores
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// `stage * tp + tp_rank`
    #[arg(long, default_value_t = 0)]
    pub rank: usize,
    /// Ranks of one stage
    #[arg(long, default_value = "1")]
    pub tp: NonZeroUsize,
    /// Stages
    #[arg(long, default_value = "1")]
    pub pp: NonZeroUsize,
    /// Unix socket to listen on; made with mode 0600, removed at the end
    #[arg(long)]
    pub socket: PathBuf,
    /// Of this rank, like 512MiB; default: its share of 1 GiB, or one whole sequence if that is more,
    /// within a quarter of the available memory
    #[arg(long, value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Part of a GPU's memory that this rank may take
    #[arg(long)]
    pub gpu_memory_fraction: Option<f64>,
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormatFlag,
    /// OTLP collector (gRPC) for traces
    #[arg(long)]
    pub otlp_endpoint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    Auto,
    Dummy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    Auto,
    F32,
    Bf16,
    F16,
    Quantized,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatFlag {
    Text,
    Json,
}

impl From<LogFormatFlag> for LogFormat {
    fn from(flag: LogFormatFlag) -> Self {
        match flag {
            LogFormatFlag::Text => Self::Text,
            LogFormatFlag::Json => Self::Json,
        }
    }
}

/// Flags that cannot work together, or not in this build.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error(
        "--device cuda: this build has no CUDA; use --device cpu, or a build with the cuda feature"
    )]
    NoCuda,
    #[error("--gpu-memory-fraction {given}: must be over 0 and at most 1")]
    Fraction { given: String },
    #[error("--kv-dtype {kv}, but on GPUs the KV cache has the type of the weights, {weights}")]
    KvDtype { kv: &'static str, weights: &'static str },
    #[error("--gpu-memory-fraction {given} concerns GPUs alone; on the CPU use --kv-cache-memory")]
    NoGpu { given: String },
    #[error("--{flag} f16: weights are kept in f32 or bf16; use one of these")]
    NoF16 { flag: &'static str },
    #[error("--kv-dtype quantized: concerns weights alone; use f32 or bf16")]
    QuantizedKv,
    #[error("--dtype quantized: GPUs have no product for stored blocks; use bf16 or f32")]
    QuantizedGpu,
    #[error("--rank {rank}, but --tp {tp} and --pp {pp} make ranks 0 to {last}")]
    Rank { rank: usize, tp: usize, pp: usize, last: usize },
}

/// Who this shard is, as Info tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub rank: usize,
    pub split: Split,
    pub device: String,
    pub dtype: &'static str,
    pub kv_dtype: &'static str,
}

impl Identity {
    pub fn ranks(&self) -> usize {
        self.split.tp * self.split.pp
    }
    pub fn stage(&self) -> usize {
        self.rank / self.split.tp
    }
    /// Rank 0 of the last stage tells the router the tokens.
    pub fn answers_tokens(&self) -> bool {
        self.rank == (self.split.pp - 1) * self.split.tp
    }
}

/// What the shard runs with.
#[derive(Clone, Debug)]
pub struct Config {
    pub identity: Identity,
    pub model: PathBuf,
    pub load_format: LoadFormat,
    pub seed: u64,
    pub weights: WeightStore,
    pub kv_storage: Storage,
    pub threads: usize,
    pub socket: PathBuf,
    pub kv_cache_memory: Option<u64>,
    pub backend: Backend,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backend {
    Cpu,
    /// A GPU, of which this rank and those that share it may take a part.
    #[cfg(feature = "cuda")]
    Cuda {
        memory_fraction: f64,
    },
}

/// Of a GPU's memory, where no flag says more: the rest is for the driver and for libraries.
#[cfg(feature = "cuda")]
const MEMORY_FRACTION: f64 = 0.9;

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } => "cuda",
        }
    }
}

/// `auto` takes the CPU, as the launcher does.
fn backend(device: DeviceKind, fraction: Option<f64>) -> Result<Backend, ConfigError> {
    let given = |fraction: f64| fraction.to_string();
    if device != DeviceKind::Cuda {
        return match fraction {
            Some(fraction) => Err(ConfigError::NoGpu { given: given(fraction) }),
            None => Ok(Backend::Cpu),
        };
    }
    if let Some(fraction) = fraction.filter(|fraction| !(*fraction > 0.0 && *fraction <= 1.0)) {
        return Err(ConfigError::Fraction { given: given(fraction) });
    }
    #[cfg(feature = "cuda")]
    return Ok(Backend::Cuda { memory_fraction: fraction.unwrap_or(MEMORY_FRACTION) });
    #[cfg(not(feature = "cuda"))]
    Err(ConfigError::NoCuda)
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        let backend = backend(args.device, args.gpu_memory_fraction)?;
        let (rank, tp, pp) = (args.rank, args.tp.get(), args.pp.get());
        let ranks = tp.saturating_mul(pp);
        if rank >= ranks {
            return Err(ConfigError::Rank { rank, tp, pp, last: ranks - 1 });
        }
        let keep_blocks = args.dtype == Dtype::Quantized;
        if backend != Backend::Cpu && keep_blocks {
            return Err(ConfigError::QuantizedGpu);
        }
        let dtype = if keep_blocks { Dtype::Auto } else { args.dtype };
        let numbers = storage("dtype", dtype, Storage::Bf16)?;
        let kv_storage = storage("kv-dtype", args.kv_dtype, numbers)?;
        if backend != Backend::Cpu && kv_storage != numbers {
            return Err(ConfigError::KvDtype { kv: name(kv_storage), weights: name(numbers) });
        }
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Ok(Self {
            identity: Identity {
                rank,
                split: Split { tp, pp },
                device: backend.name().into(),
                dtype: if keep_blocks { "quantized" } else { name(numbers) },
                kv_dtype: name(kv_storage),
            },
            model: args.model,
            load_format: args.load_format,
            seed: args.seed,
            weights: WeightStore { numbers, keep_blocks },
            kv_storage,
            threads: args.threads.map_or((cores / ranks).max(1), NonZeroUsize::get),
            socket: args.socket,
            kv_cache_memory: args.kv_cache_memory,
            backend,
        })
    }
}

fn storage(flag: &'static str, dtype: Dtype, auto: Storage) -> Result<Storage, ConfigError> {
    match dtype {
        Dtype::Auto => Ok(auto),
        Dtype::F32 => Ok(Storage::F32),
        Dtype::Bf16 => Ok(Storage::Bf16),
        Dtype::F16 => Err(ConfigError::NoF16 { flag }),
        Dtype::Quantized => Err(ConfigError::QuantizedKv),
    }
}

fn name(storage: Storage) -> &'static str {
    match storage {
        Storage::F32 => "f32",
        Storage::Bf16 => "bf16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<Config, ConfigError> {
        let base = "trireme-shard --model m --socket s ";
        let args = Args::try_parse_from(format!("{base}{flags}").split_whitespace());
        Config::try_from(args.expect("flags parse"))
    }

    #[test]
    fn dtypes_follow_each_other() {
        let check = |flags: &str, dtype: &str, kv_dtype: &str| {
            let identity = parse(flags).expect(flags).identity;
            assert_eq!((identity.dtype, identity.kv_dtype), (dtype, kv_dtype), "{flags}");
        };
        check("", "bf16", "bf16");
        check("--dtype f32", "f32", "f32");
        check("--dtype bf16 --kv-dtype f32", "bf16", "f32");
        check("--dtype f32 --kv-dtype bf16", "f32", "bf16");
        check("--dtype quantized", "quantized", "bf16");
        check("--dtype quantized --kv-dtype f32", "quantized", "f32");
    }

    #[test]
    fn flags_that_cannot_work_say_why() {
        let check = |flags: &str, words: &str| {
            let error = parse(flags).expect_err(flags).to_string();
            assert!(error.contains(words), "{flags}: {error}");
        };
        #[cfg(not(feature = "cuda"))]
        check("--device cuda", "no CUDA");
        #[cfg(feature = "cuda")]
        check("--device cuda --dtype quantized", "--dtype quantized");
        check("--device cuda --gpu-memory-fraction 1.5", "at most 1");
        check("--dtype f16", "--dtype f16");
        check("--gpu-memory-fraction 0.5", "--gpu-memory-fraction 0.5");
        check("--kv-dtype f16", "--kv-dtype f16");
        check("--kv-dtype quantized", "--kv-dtype quantized");
        check("--rank 6 --tp 3 --pp 2", "ranks 0 to 5");
    }

    #[test]
    fn one_rank_answers_tokens() {
        let check = |rank: usize, answers: bool| {
            let config = parse(&format!("--tp 2 --pp 3 --rank {rank}")).expect("legal");
            assert_eq!(config.identity.answers_tokens(), answers, "rank {rank}");
        };
        (0..6).for_each(|rank| check(rank, rank == 4));
    }
}
