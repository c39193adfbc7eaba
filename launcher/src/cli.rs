//! The command line. Each flag's doc comment is its help; each flag also reads `TRIREME_<FLAG>`.

mod load_shapes;

use std::{
    fmt,
    net::IpAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    str::FromStr,
};

use clap::{Args, Parser, Subcommand, builder::FalseyValueParser};

pub use self::load_shapes::{LoadShape, MixedShape};
use crate::{
    config::{Device, Dtype, LoadFormat, LogFormat},
    size::Size,
};

/// Serves large language models split over several devices.
#[derive(Clone, Debug, Parser)]
#[command(name = "trireme", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Verb {
    /// Serve a model over HTTP (OpenAI's API) and gRPC until stopped
    Serve(ServeArgs),
    /// Complete one prompt, printing tokens as they come
    Generate(GenerateArgs),
    /// Talk to a model
    Chat(ChatArgs),
    /// Measure the engine without HTTP
    Bench(BenchArgs),
    /// Score a model on local tasks
    Eval(EvalArgs),
    /// Fetch a model into the cache
    Download(ModelArgs),
    /// List the models that are here
    List(ListArgs),
    /// Print the path of a model that is here
    Where(ModelArgs),
    /// Remove a model from the cache
    Remove(ModelArgs),
    /// Show a model's format, shape, memory plan and possible splits
    Inspect(InspectArgs),
}

#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// A folder, a file, a Hugging Face repo id, or an alias
    #[arg(default_value = "smollm2", env = "TRIREME_MODEL")]
    pub model: String,
}

#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Ranks that share each layer (tensor parallelism)
    #[arg(long, env = "TRIREME_TP", default_value = "1", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub tp: NonZeroUsize,
    /// Stages that follow each other (pipeline parallelism)
    #[arg(long, env = "TRIREME_PP", default_value = "1", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub pp: NonZeroUsize,
    /// What to compute on
    #[arg(long, env = "TRIREME_DEVICE", default_value = "auto")]
    pub device: Device,
    /// Storage of weights
    #[arg(long, env = "TRIREME_DTYPE", default_value = "auto")]
    pub dtype: Dtype,
    /// Storage of the KV cache
    #[arg(long, env = "TRIREME_KV_DTYPE", default_value = "auto")]
    pub kv_dtype: Dtype,
    /// Threads of each rank [default: the cores, shared evenly]
    #[arg(long, env = "TRIREME_THREADS", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub threads: Option<NonZeroUsize>,
    /// Where weights come from
    #[arg(long, env = "TRIREME_LOAD_FORMAT", default_value = "auto")]
    pub load_format: LoadFormat,
    /// Seed of dummy weights, and of sampling where a verb samples
    #[arg(long, env = "TRIREME_SEED", value_name = "N")]
    pub seed: Option<u64>,
    /// Most tokens of one sequence, prompt and answer [default: the model's]
    #[arg(long, env = "TRIREME_MAX_MODEL_LEN", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_model_len: Option<NonZeroU32>,
    /// Most tokens computed in one step [default: 512; 8192 on a GPU]
    #[arg(long, env = "TRIREME_MAX_BATCH_TOKENS", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_batch_tokens: Option<NonZeroU32>,
    /// Most tokens computed in a step that decodes and has prompts [default: 1024]
    #[arg(long, env = "TRIREME_MAX_MIXED_TOKENS", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_mixed_tokens: Option<NonZeroU32>,
    /// Most sequences running at once [default: 64; 256 on a GPU]
    #[arg(long, env = "TRIREME_MAX_SEQUENCES", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_sequences: Option<NonZeroU32>,
    /// Most sequences waiting; one more is refused
    #[arg(long, env = "TRIREME_MAX_WAITING", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_waiting: Option<NonZeroU32>,
    /// Most steps sent ahead of their results [default: pp + 1]
    #[arg(long, env = "TRIREME_STEPS_IN_FLIGHT", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub steps_in_flight: Option<NonZeroU32>,
    /// Compute every prompt anew
    #[arg(long, env = "TRIREME_NO_PREFIX_CACHE", value_parser = FalseyValueParser::new())]
    pub no_prefix_cache: bool,
    /// Memory for the KV cache of each rank, such as 512MiB [default: what is free, within reason]
    #[arg(long, env = "TRIREME_KV_CACHE_MEMORY", value_name = "SIZE")]
    pub kv_cache_memory: Option<Size>,
    /// Part of a GPU's memory that a rank may take, weights and KV cache (CUDA only)
    #[arg(long, env = "TRIREME_GPU_MEMORY_FRACTION", value_name = "F")]
    pub gpu_memory_fraction: Option<f64>,
    /// A Jinja chat template instead of the model's own
    #[arg(long, env = "TRIREME_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// How the model writes calls of tools [default: auto, by chat template and vocabulary]
    #[arg(long, env = "TRIREME_TOOL_CALL_PARSER", value_name = "NAME",
        value_parser = ["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"])]
    pub tool_call_parser: Option<String>,
    /// Where the model thinks aloud [default: auto, by chat template and vocabulary]
    #[arg(long, env = "TRIREME_REASONING_PARSER", value_name = "NAME",
        value_parser = ["auto", "none", "think", "qwen3", "deepseek_r1"])]
    pub reasoning_parser: Option<String>,
    /// A step that takes longer means that the shards are lost
    #[arg(long, env = "TRIREME_STEP_DEADLINE_MS", value_name = "MS", value_parser = at_least_1::<NonZeroU32>)]
    pub step_deadline_ms: Option<NonZeroU32>,
    /// Longest wait from start to ready
    #[arg(long, env = "TRIREME_START_DEADLINE_S", default_value = "600", value_name = "S", value_parser = at_least_1::<NonZeroU32>)]
    pub start_deadline_s: NonZeroU32,
    /// A process that is silent or unwell for this long is killed and restarted
    #[arg(long, env = "TRIREME_HANG_DEADLINE_S", default_value = "30", value_name = "S", value_parser = at_least_1::<NonZeroU32>)]
    pub hang_deadline_s: NonZeroU32,
    /// Restarts of processes within ten minutes; one more ends the service
    #[arg(long, env = "TRIREME_RESTART_BUDGET", default_value = "5", value_name = "N")]
    pub restart_budget: u32,
    /// How log lines look
    #[arg(long, env = "TRIREME_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Where spans go, as OTLP over gRPC
    #[arg(long, env = "TRIREME_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Copies of the whole split; only 1 is possible yet
    #[arg(long, env = "TRIREME_REPLICAS", default_value = "1", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub replicas: NonZeroU32,
    /// Address to listen on
    #[arg(long, env = "TRIREME_HOST", default_value = "127.0.0.1", value_name = "IP")]
    pub host: IpAddr,
    /// Port of HTTP; 0 takes a free one
    #[arg(long, env = "TRIREME_PORT", default_value = "8000", value_name = "N")]
    pub port: u16,
    /// Port of gRPC; 0 takes a free one
    #[arg(long, env = "TRIREME_GRPC_PORT", default_value = "8001", value_name = "N")]
    pub grpc_port: u16,
    /// The name that clients call the model by [default: the alias, or the last part of the path]
    #[arg(long, env = "TRIREME_SERVED_MODEL_NAME", value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// A file with the key that clients must show; else TRIREME_API_KEY holds the key, if there is one
    #[arg(long, env = "TRIREME_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Largest request body, such as 2MiB
    #[arg(long, env = "TRIREME_MAX_BODY_BYTES", value_name = "SIZE")]
    pub max_body_bytes: Option<Size>,
    /// At a stop, running requests get this long to finish
    #[arg(long, env = "TRIREME_DRAIN_DEADLINE_S", default_value = "30", value_name = "S", value_parser = at_least_1::<NonZeroU32>)]
    pub drain_deadline_s: NonZeroU32,
}

/// How the next token is chosen.
#[derive(Args, Clone, Debug)]
pub struct SamplingArgs {
    /// Most tokens of the answer
    #[arg(long, env = "TRIREME_MAX_NEW_TOKENS", default_value = "200", value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub max_new_tokens: NonZeroU32,
    /// 0 takes the likeliest token each time
    #[arg(long, env = "TRIREME_TEMPERATURE", value_name = "F")]
    pub temperature: Option<f32>,
    /// Choose among the K likeliest
    #[arg(long, env = "TRIREME_TOP_K", value_name = "K")]
    pub top_k: Option<u32>,
    /// Choose among the likeliest that together have this probability
    #[arg(long, env = "TRIREME_TOP_P", value_name = "F")]
    pub top_p: Option<f32>,
    /// Make tokens that were seen less likely
    #[arg(long, env = "TRIREME_REPETITION_PENALTY", value_name = "F")]
    pub repetition_penalty: Option<f32>,
}

#[derive(Args, Clone, Debug)]
pub struct ConnectArgs {
    /// Use a running server (http://HOST:PORT or unix:PATH) instead of starting one
    #[arg(long, env = "TRIREME_CONNECT", value_name = "URL")]
    pub connect: Option<String>,
    /// With --connect: a file with the server's key; else TRIREME_API_KEY holds the key
    #[arg(long, env = "TRIREME_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// The text to go on from; `-` reads standard input
    #[arg(
        long,
        env = "TRIREME_PROMPT",
        value_name = "TEXT",
        required_unless_present = "prompt_ids"
    )]
    pub prompt: Option<String>,
    /// The prompt as token ids, such as 1,2,3; the answer is printed as ids too
    #[arg(
        long,
        env = "TRIREME_PROMPT_IDS",
        value_name = "IDS",
        value_delimiter = ',',
        conflicts_with = "prompt"
    )]
    pub prompt_ids: Vec<u32>,
    /// Send the prompt as a user's message, through the model's chat template
    #[arg(long, env = "TRIREME_CHAT", value_parser = FalseyValueParser::new(), conflicts_with = "prompt_ids")]
    pub chat: bool,
    /// A text that ends the answer; may be given several times
    #[arg(long, env = "TRIREME_STOP", value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the end-of-sequence token
    #[arg(long, env = "TRIREME_IGNORE_EOS", value_parser = FalseyValueParser::new())]
    pub ignore_eos: bool,
}

#[derive(Args, Clone, Debug)]
pub struct ChatArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// What the model is told before the talk
    #[arg(long, env = "TRIREME_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Prompt lengths whose prefill is measured
    #[arg(
        long,
        env = "TRIREME_PREFILL",
        value_delimiter = ',',
        default_value = "128,512",
        value_name = "TOKENS", value_parser = at_least_1::<NonZeroU32>)]
    pub prefill: Vec<NonZeroU32>,
    /// Numbers of sequences that decode at once
    #[arg(
        long,
        env = "TRIREME_BATCH",
        value_delimiter = ',',
        default_value = "1,4,16,64",
        value_name = "N", value_parser = at_least_1::<NonZeroU32>)]
    pub batch: Vec<NonZeroU32>,
    /// Tokens that each sequence decodes
    #[arg(long, env = "TRIREME_DECODE", default_value = "64", value_name = "TOKENS", value_parser = at_least_1::<NonZeroU32>)]
    pub decode: NonZeroU32,
    /// Load instead of the sweep: so many requests, at most so many at once, such as 100x8
    #[arg(
        long,
        env = "TRIREME_LOAD",
        value_name = "REQUESTSxCONCURRENCY",
        conflicts_with = "steps"
    )]
    pub load: Option<LoadShape>,
    /// Mixed load instead of the sweep: so many prompts of so many tokens come while the first --batch decodes, such as 8x8000
    #[arg(
        long,
        env = "TRIREME_MIXED",
        value_name = "PROMPTSxTOKENS",
        conflicts_with_all = ["steps", "load"]
    )]
    pub mixed: Option<MixedShape>,
    /// Drive the shards directly, without the router, and time single steps
    #[arg(long, env = "TRIREME_STEPS", value_parser = FalseyValueParser::new(), conflicts_with = "connect")]
    pub steps: bool,
    /// Print figures as JSON
    #[arg(long, env = "TRIREME_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

#[derive(Args, Clone, Debug)]
pub struct EvalArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Task files, one JSON object a line
    #[arg(
        long,
        env = "TRIREME_TASKS",
        value_delimiter = ',',
        required = true,
        value_name = "FILE"
    )]
    pub tasks: Vec<PathBuf>,
    /// Take the first documents of each task only
    #[arg(long, env = "TRIREME_LIMIT", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub limit: Option<NonZeroUsize>,
    /// Documents asked at once
    #[arg(long, env = "TRIREME_CONCURRENCY", default_value = "16", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub concurrency: NonZeroUsize,
    /// Write each document's answer here, one JSON object a line
    #[arg(long, env = "TRIREME_ANSWERS", value_name = "FILE")]
    pub answers: Option<PathBuf>,
    /// Print figures as JSON
    #[arg(long, env = "TRIREME_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

#[derive(Args, Clone, Debug)]
pub struct ListArgs {
    /// Print as JSON
    #[arg(long, env = "TRIREME_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

#[derive(Args, Clone, Debug)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Storage of weights in the memory plan
    #[arg(long, env = "TRIREME_DTYPE", default_value = "auto")]
    pub dtype: Dtype,
    /// Storage of the KV cache in the memory plan
    #[arg(long, env = "TRIREME_KV_DTYPE", default_value = "auto")]
    pub kv_dtype: Dtype,
    /// Show the memory plan of this split [default: the recommended one]
    #[arg(long, env = "TRIREME_TP", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub tp: Option<NonZeroUsize>,
    /// Stages of that split
    #[arg(long, env = "TRIREME_PP", value_name = "N", value_parser = at_least_1::<NonZeroUsize>)]
    pub pp: Option<NonZeroUsize>,
    /// Memory of one device: the fewest ranks that fit are recommended [default: this machine's]
    #[arg(long, env = "TRIREME_DEVICE_MEMORY", value_name = "SIZE")]
    pub device_memory: Option<Size>,
    /// Splits on up to so many ranks, at most 128
    #[arg(long, env = "TRIREME_RANKS", default_value = "8", value_name = "N", value_parser = inspected_ranks)]
    pub ranks: NonZeroUsize,
    /// With `dummy`, config.json alone is enough
    #[arg(long, env = "TRIREME_LOAD_FORMAT", default_value = "auto")]
    pub load_format: LoadFormat,
    /// Read every weight once and refuse what is not a finite number
    #[arg(long, env = "TRIREME_SCAN_VALUES", value_parser = FalseyValueParser::new())]
    pub scan_values: bool,
    /// Print as JSON
    #[arg(long, env = "TRIREME_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

/// Ranks whose splits `inspect` lists.
fn inspected_ranks(text: &str) -> Result<NonZeroUsize, String> {
    /// Every split is worked out rank by rank; the table of so many fills some pages.
    const MOST: usize = 128;
    let ranks: NonZeroUsize = at_least_1(text)?;
    if ranks.get() <= MOST { Ok(ranks) } else { Err(format!("must be at most {MOST}")) }
}

/// A number that cannot be 0, refused in words that a person understands.
fn at_least_1<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    match text.parse::<u64>() {
        Ok(0) => Err("must be at least 1".to_owned()),
        _ => text.parse().map_err(|error: T::Err| error.to_string()),
    }
}

/// The variables of all flags. Children get flags by their command line alone.
pub fn variables() -> Vec<String> {
    let command = <Cli as clap::CommandFactory>::command();
    let mut names: Vec<String> = command
        .get_subcommands()
        .flat_map(clap::Command::get_arguments)
        .filter_map(|arg| arg.get_env().map(|name| name.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn each_flag_reads_its_variable_and_is_documented() {
        let page = include_str!("../../docs/cli.md");
        for verb in Cli::command().get_subcommands() {
            assert!(page.contains(&format!("trireme {}", verb.get_name())), "{}", verb.get_name());
            for arg in verb.get_arguments() {
                let Some(long) = arg.get_long().filter(|l| !["help", "version"].contains(l)) else {
                    continue;
                };
                let variable = format!("TRIREME_{}", long.to_uppercase().replace('-', "_"));
                let env = arg.get_env().map(|e| e.to_string_lossy().into_owned());
                assert_eq!(env.as_deref(), Some(variable.as_str()), "--{long}");
                assert!(arg.get_help().is_some(), "--{long} has no help");
                assert!(page.contains(&format!("`--{long}")), "docs/cli.md lacks --{long}");
            }
        }
    }

    #[test]
    fn lines_parse_or_are_refused_with_the_flag() {
        let check = |line: &str, refused: Option<&str>| {
            let got = Cli::try_parse_from(line.split_whitespace());
            match (got, refused) {
                (Ok(_), None) => {}
                (Err(e), Some(part)) => assert!(e.to_string().contains(part), "{line}: {e}"),
                (got, want) => panic!("{line}: got {got:?}, want {want:?}"),
            }
        };
        check("trireme serve", None);
        check("trireme serve smollm2 --tp 2 --pp 2 --port 0", None);
        check("trireme serve --tp 0", Some("--tp <N>': must be at least 1"));
        check("trireme serve --tp=-1", Some("--tp"));
        check("trireme serve --threads 0", Some("--threads <N>': must be at least 1"));
        check("trireme serve --max-sequences 5000000000", Some("--max-sequences <N>': number too"));
        check("trireme bench --batch 4,0", Some("--batch <N>': must be at least 1"));
        check("trireme serve --host example", Some("--host"));
        check("trireme serve --port 70000", Some("--port"));
        check("trireme serve --kv-cache-memory lots", Some("--kv-cache-memory"));
        check("trireme generate", Some("--prompt"));
        check("trireme generate --prompt hi --prompt-ids 1,2", Some("--prompt-ids"));
        check("trireme generate --prompt-ids 1,2", None);
        check("trireme generate --prompt-ids 1,x", Some("--prompt-ids"));
        check("trireme bench --load 100x8", None);
        check("trireme bench --load 100", Some("--load"));
        check("trireme bench --load 0x8", Some("--load"));
        check("trireme bench --steps --load 1x1", Some("--steps"));
        check("trireme eval --tasks a.jsonl,b.jsonl", None);
        check("trireme eval", Some("--tasks"));
        check("trireme eval --tasks a --limit 0", Some("--limit"));
        check("trireme where", None);
        check("trireme row", Some("row"));
    }
}
