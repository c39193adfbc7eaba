//! Arguments to a checked configuration, once, at the edge.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use subtle::ConstantTimeEq;
use trireme_grammar::Vocabulary;
use trireme_telemetry::LogFormat;

use crate::{
    chat_syntax::{Parser, Parsers},
    dispatcher::DispatcherSettings,
    reasoning::Thinking,
    shard_group::GroupSettings,
    tools::ToolSyntax,
};

/// Tokens that a client may fall behind before it is dropped: minutes of reading, under a megabyte.
const LAG_TOKENS: usize = 4096;

/// Holds the key itself where no file is given: a command line would show it.
const API_KEY_VARIABLE: &str = "TRIREME_API_KEY";

/// Most requests running at once, where the step has room for that many tokens.
const SEQUENCES_DEFAULT: u32 = 64;

/// Serves one model over HTTP and gRPC from shards that run already.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "trireme-router", version, about)]
pub struct Args {
    /// Model folder or file; the router reads its tokenizer, chat template and config.
    #[arg(long, env = "TRIREME_MODEL", value_name = "PATH")]
    pub model: PathBuf,
    /// `dummy`: only the config is read, and prompts are token ids.
    #[arg(long, env = "TRIREME_LOAD_FORMAT", value_enum, default_value = "auto")]
    pub load_format: LoadFormat,
    /// Socket of a shard, `unix:PATH`; one for each rank, in rank order.
    #[arg(long = "shard", required = true, value_name = "unix:PATH")]
    pub shards: Vec<String>,
    /// Ranks of a stage.
    #[arg(long, env = "TRIREME_TP", default_value_t = 1, value_name = "N")]
    pub tp: u32,
    /// Stages.
    #[arg(long, env = "TRIREME_PP", default_value_t = 1, value_name = "N")]
    pub pp: u32,
    #[arg(long, env = "TRIREME_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// HTTP port; 0 takes a free one.
    #[arg(long, env = "TRIREME_PORT", default_value_t = 8000)]
    pub port: u16,
    /// gRPC port; 0 takes a free one.
    #[arg(long, env = "TRIREME_GRPC_PORT", default_value_t = 8001)]
    pub grpc_port: u16,
    /// Unix socket (mode 0600) on which the gRPC API is served too, without an API key.
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// Listen on the control socket and nowhere else: no HTTP, no ports.
    #[arg(
        long,
        requires = "control_socket",
        conflicts_with_all = ["host", "port", "grpc_port", "api_key_file", "max_body_bytes"]
    )]
    pub control_socket_only: bool,
    /// Name of the model in the APIs; by default the last part of its path, without a model file's extension.
    #[arg(long, env = "TRIREME_SERVED_MODEL_NAME", value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Most tokens of prompt and answer together; by default what model and KV memory allow.
    #[arg(long, env = "TRIREME_MAX_MODEL_LEN", value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// Most tokens computed in one step.
    #[arg(long, env = "TRIREME_MAX_BATCH_TOKENS", default_value_t = 512, value_name = "TOKENS")]
    pub max_batch_tokens: u32,
    /// Most tokens computed in a step that decodes and has prompts; prompts get a quarter at least.
    #[arg(long, env = "TRIREME_MAX_MIXED_TOKENS", default_value_t = 1024, value_name = "TOKENS")]
    pub max_mixed_tokens: u32,
    /// Most requests running at once; 64, or --max-batch-tokens when that is less.
    #[arg(long, env = "TRIREME_MAX_SEQUENCES", value_name = "N")]
    pub max_sequences: Option<u32>,
    /// Most requests waiting; one more is refused with 429.
    #[arg(long, env = "TRIREME_MAX_WAITING", default_value_t = 1024, value_name = "N")]
    pub max_waiting: usize,
    /// Steps sent before the oldest is answered; by default pp + 1.
    #[arg(long, env = "TRIREME_STEPS_IN_FLIGHT", value_name = "N")]
    pub steps_in_flight: Option<usize>,
    /// Compute every prompt from its start.
    #[arg(long, env = "TRIREME_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// A step that takes longer is a lost group.
    #[arg(long, env = "TRIREME_STEP_DEADLINE_MS", default_value_t = 30_000, value_name = "MS")]
    pub step_deadline_ms: u32,
    /// The shards must serve for the first time within this.
    #[arg(long, env = "TRIREME_START_DEADLINE_S", default_value_t = 600, value_name = "S")]
    pub start_deadline_s: u64,
    /// At shutdown, running requests may take this long to finish.
    #[arg(long, env = "TRIREME_DRAIN_DEADLINE_S", default_value_t = 30, value_name = "S")]
    pub drain_deadline_s: u64,
    /// File that holds the API key; else TRIREME_API_KEY holds it. Without either the APIs are
    /// open.
    #[arg(long, env = "TRIREME_API_KEY_FILE", value_name = "PATH")]
    pub api_key_file: Option<PathBuf>,
    /// Jinja chat template that replaces the model's own.
    #[arg(long, env = "TRIREME_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// How the model writes calls of tools: auto (by chat template and vocabulary), none, hermes,
    /// llama3_json, mistral or pythonic.
    #[arg(long, env = "TRIREME_TOOL_CALL_PARSER", default_value = "auto", value_name = "NAME")]
    pub tool_call_parser: Parser<ToolSyntax>,
    /// Where the model thinks aloud: auto, none, think (where `<think>` opens it) or deepseek_r1
    /// (from the start of each answer).
    #[arg(long, env = "TRIREME_REASONING_PARSER", default_value = "auto", value_name = "NAME")]
    pub reasoning_parser: Parser<Thinking>,
    #[arg(long, env = "TRIREME_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogStyle,
    /// Collector of traces (OTLP over gRPC).
    #[arg(long, env = "TRIREME_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Names this server among others of the host; by default its process id.
    #[arg(long, value_name = "NAME")]
    pub instance: Option<String>,
    /// Most bytes of a request body; 2 MiB, or 16 bytes for each token of --max-model-len when that
    /// is more.
    #[arg(long, env = "TRIREME_MAX_BODY_BYTES", value_name = "BYTES")]
    pub max_body_bytes: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFormat {
    Auto,
    Dummy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogStyle {
    Text,
    Json,
}

impl From<LogStyle> for LogFormat {
    fn from(style: LogStyle) -> Self {
        match style {
            LogStyle::Text => Self::Text,
            LogStyle::Json => Self::Json,
        }
    }
}

/// A key that no log shows and no comparison leaks.
#[derive(Clone)]
pub struct ApiKey(Arc<[u8]>);

impl ApiKey {
    /// `None` for an empty key, which would let everybody in.
    pub fn new(key: &str) -> Option<Self> {
        let key = key.trim();
        (!key.is_empty()).then(|| Self(key.as_bytes().into()))
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("--api-key-file {}", path.display()))?;
        Self::new(&text).with_context(|| format!("--api-key-file {} is empty", path.display()))
    }

    /// `None` where the variable is not set.
    fn of_environment() -> anyhow::Result<Option<Self>> {
        let Some(text) = std::env::var_os(API_KEY_VARIABLE) else { return Ok(None) };
        let text = text.to_str().with_context(|| format!("{API_KEY_VARIABLE} is not UTF-8"))?;
        Self::new(text).with_context(|| format!("{API_KEY_VARIABLE} is empty")).map(Some)
    }

    /// The key itself, for a holder that guards it as well.
    pub fn reveal(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// In time that does not depend on where they differ.
    pub fn matches(&self, given: &[u8]) -> bool {
        self.0.ct_eq(given).into()
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ApiKey(..)")
    }
}

/// All that a router needs to run, checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub model: PathBuf,
    pub load_format: LoadFormat,
    pub served_model_name: String,
    /// Both are none where the control socket is the only door.
    pub http_address: Option<SocketAddr>,
    pub grpc_address: Option<SocketAddr>,
    pub control_socket: Option<PathBuf>,
    pub group: GroupSettings,
    pub max_waiting: usize,
    pub prefix_cache: bool,
    pub drain_deadline: Duration,
    pub api_key: Option<ApiKey>,
    /// The template's text.
    pub chat_template: Option<String>,
    pub parsers: Parsers,
    pub max_body_bytes: Option<usize>,
}

impl Args {
    /// Reads the files that arguments name and checks what depends on several of them.
    pub fn into_config(self) -> anyhow::Result<Config> {
        let ranks = u64::from(self.tp) * u64::from(self.pp);
        let given = self.shards.len() as u64;
        ensure!(self.tp > 0, "--tp must be at least 1, not 0");
        ensure!(self.pp > 0, "--pp must be at least 1, not 0");
        ensure!(
            given == ranks,
            "--shard must be given {ranks} times for --tp {} --pp {}, not {given} times",
            self.tp,
            self.pp
        );
        let at_least_1 = [
            ("--max-batch-tokens", self.max_batch_tokens as usize),
            ("--max-mixed-tokens", self.max_mixed_tokens as usize),
            ("--max-sequences", self.max_sequences() as usize),
            ("--max-waiting", self.max_waiting),
            ("--steps-in-flight", self.steps_in_flight.unwrap_or(1)),
            ("--step-deadline-ms", self.step_deadline_ms as usize),
            ("--max-body-bytes", self.max_body_bytes.unwrap_or(1)),
        ];
        for (name, value) in at_least_1 {
            ensure!(value > 0, "{name} must be at least 1, not 0");
        }
        if let Some(tokens @ 0..2) = self.max_model_len {
            bail!("--max-model-len must be at least 2, not {tokens}");
        }
        if self.max_sequences() > self.max_batch_tokens {
            bail!(
                "--max-sequences {} is over --max-batch-tokens {}: a step has one token for each",
                self.max_sequences(),
                self.max_batch_tokens
            );
        }
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path)
                .with_context(|| format!("--chat-template {}", path.display()))
        };
        let listen = |port| (!self.control_socket_only).then(|| (self.host, port).into());
        Ok(Config {
            served_model_name: self.served_model_name.clone().unwrap_or_else(|| self.name()),
            http_address: listen(self.port),
            grpc_address: listen(self.grpc_port),
            group: self.group()?,
            max_waiting: self.max_waiting,
            prefix_cache: !self.no_prefix_cache,
            drain_deadline: Duration::from_secs(self.drain_deadline_s),
            api_key: match self.api_key_file.as_deref() {
                Some(file) => Some(ApiKey::read(file)?),
                None => ApiKey::of_environment()?,
            },
            chat_template: self.chat_template.as_ref().map(read).transpose()?,
            parsers: Parsers { tools: self.tool_call_parser, thinking: self.reasoning_parser },
            max_body_bytes: self.max_body_bytes,
            control_socket: self.control_socket,
            load_format: self.load_format,
            model: self.model,
        })
    }

    fn name(&self) -> String {
        let Some(name) = self.model.file_name().map(|name| name.to_string_lossy()) else {
            return "model".to_owned();
        };
        // Folders have versions in their names: not everything behind a dot is an extension.
        let stem = [".gguf", ".safetensors"].iter().find_map(|end| name.strip_suffix(end));
        stem.filter(|stem| !stem.is_empty()).unwrap_or(&name).to_owned()
    }

    fn max_sequences(&self) -> u32 {
        self.max_sequences.unwrap_or(SEQUENCES_DEFAULT.min(self.max_batch_tokens))
    }

    fn group(&self) -> anyhow::Result<GroupSettings> {
        let socket = |address: &String| match address.strip_prefix("unix:") {
            Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
            _ => bail!("--shard must be unix:PATH, not {address:?}"),
        };
        let instance = self.instance.clone().unwrap_or_else(|| std::process::id().to_string());
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        ensure!(
            (1..=64).contains(&instance.len()) && instance.chars().all(is_plain),
            "--instance must be 1 to 64 letters, digits, '-', '_' or '.', not {instance:?}"
        );
        Ok(GroupSettings {
            sockets: self.shards.iter().map(socket).collect::<anyhow::Result<_>>()?,
            tp: self.tp,
            pp: self.pp,
            instance,
            step_deadline: Duration::from_millis(self.step_deadline_ms.into()),
            start_deadline: Duration::from_secs(self.start_deadline_s),
            steps_in_flight: self.steps_in_flight.unwrap_or(self.pp as usize + 1),
            max_batch_tokens: self.max_batch_tokens,
            max_mixed_tokens: self.max_mixed_tokens,
            max_sequences: self.max_sequences(),
            max_model_len: self.max_model_len,
            checkpoint_fingerprint: 0,
            vocabulary: None,
        })
    }
}

impl Config {
    /// `checkpoint_fingerprint`, `vocabulary` and `eos_token_ids` are the model's.
    pub fn dispatcher(
        &self,
        checkpoint_fingerprint: u64,
        vocabulary: Option<Arc<Vocabulary>>,
        eos_token_ids: Vec<u32>,
    ) -> DispatcherSettings {
        DispatcherSettings {
            group: GroupSettings { checkpoint_fingerprint, vocabulary, ..self.group.clone() },
            max_waiting: self.max_waiting,
            lag_tokens: LAG_TOKENS,
            prefix_cache: self.prefix_cache,
            drain_deadline: self.drain_deadline,
            eos_token_ids,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn config(args: &[&str]) -> Result<Config, String> {
        let args = ["trireme-router", "--model", "/m/name"].iter().chain(args);
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        args.into_config().map_err(|error| error.to_string())
    }

    fn check_refused(args: &[&str], expect: &str) {
        let error = config(args).unwrap_err();
        assert!(error.contains(expect), "{error}");
    }

    #[test]
    fn refuses_what_cannot_work() {
        check_refused(&[], "--shard");
        check_refused(&["--shard", "tcp:1"], "must be unix:PATH, not \"tcp:1\"");
        check_refused(&["--shard", "unix:/a", "--tp", "2"], "2 times");
        check_refused(&["--shard", "unix:/a", "--tp", "0"], "--tp must be at least 1");
        check_refused(&["--shard", "unix:/a", "--max-model-len", "1"], "at least 2, not 1");
        let more_sequences_than_tokens = ["--max-batch-tokens", "8", "--max-sequences", "9"];
        check_refused(
            &[&["--shard", "unix:/a"], &more_sequences_than_tokens[..]].concat(),
            "--max-sequences 9 is over --max-batch-tokens 8",
        );
        check_refused(&["--shard", "unix:/a", "--instance", "a/b"], "--instance");
        check_refused(&["--shard", "unix:/a", "--control-socket-only"], "--control-socket <PATH>");
        let doors = ["--shard", "unix:/a", "--control-socket", "/c", "--control-socket-only"];
        check_refused(&[&doors[..], &["--port", "1"]].concat(), "'--port <PORT>'");
        let only = config(&doors).unwrap();
        assert_eq!((only.http_address, only.grpc_address), (None, None));
        check_refused(&["--shard", "unix:/a", "--api-key-file", "/nope"], "--api-key-file /nope");
    }

    #[test]
    fn defaults_follow_the_contract() {
        let config = config(&["--shard", "unix:/a", "--shard", "unix:/b", "--pp", "2"]).unwrap();
        assert_eq!(config.served_model_name, "name");
        assert_eq!(config.group.steps_in_flight, 3);
        assert_eq!(config.group.sockets, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert_eq!(config.group.max_batch_tokens, 512);
        assert_eq!(config.group.max_mixed_tokens, 1024);
        assert_eq!(config.group.max_sequences, 64);
        assert!(config.prefix_cache);
        assert_eq!(config.http_address, Some("127.0.0.1:8000".parse().unwrap()));
    }

    #[test]
    fn sequences_follow_a_small_token_budget() {
        let config = config(&["--shard", "unix:/a", "--max-batch-tokens", "32"]).unwrap();
        assert_eq!(config.group.max_sequences, 32);
    }

    #[test]
    fn keys_stay_out_of_logs() {
        let key = ApiKey::new(" secret\n").unwrap();
        assert!(key.matches(b"secret") && !key.matches(b"secreT") && !key.matches(b""));
        assert_eq!(format!("{key:?}"), "ApiKey(..)");
        assert!(ApiKey::new(" \n").is_none());
    }
}
