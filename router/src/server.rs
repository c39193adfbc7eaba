//! The whole router: what it listens on, what runs, and in which order it ends.

use std::{net::SocketAddr, os::unix::fs::PermissionsExt, path::Path, sync::Arc, time::Duration};

use anyhow::Context;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Router, TcpIncoming};
use trireme_checkpoint::Checkpoint;
use trireme_grammar::{CheckFacts, Vocabulary};
use trireme_proto::generate::v1::generation_server::GenerationServer;

use crate::{
    api::Generator,
    chat_syntax::ChatSyntax,
    config::{ApiKey, Config, LoadFormat},
    detokenizer::TextDecoder,
    dispatcher::Dispatcher,
    front::{Front, FrontSettings},
    grammar_check::GrammarChecks,
    grpc::{Addresses, GenerationService},
    http::{self, App, HttpConfig},
    metrics, readiness,
    tokenizer::TextPipeline,
};

/// After the drain, what is left on the wire may take this long.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// Weights of `--load-format dummy` are the shards'; the router only wants the config.
const DUMMY_SEED: u64 = 0;

/// Sockets that are bound already, so that tests and the launcher know the ports.
pub struct Listeners {
    /// None with `--control-socket-only`.
    pub http: Option<TcpListener>,
    pub grpc: Option<TcpListener>,
    pub control: Option<UnixListener>,
}

impl Listeners {
    pub async fn bind(config: &Config) -> anyhow::Result<Self> {
        let bind = |address: Option<SocketAddr>| async move {
            let Some(address) = address else { return Ok(None) };
            let bound = TcpListener::bind(address).await;
            bound.map(Some).with_context(|| format!("listen on {address}"))
        };
        Ok(Self {
            http: bind(config.http_address).await?,
            grpc: bind(config.grpc_address).await?,
            control: config.control_socket.as_deref().map(bind_control).transpose()?,
        })
    }

    fn addresses(&self) -> anyhow::Result<Addresses> {
        let address = |listener: &Option<TcpListener>| match listener {
            Some(listener) => listener.local_addr().map(|address| address.to_string()),
            None => Ok(String::new()),
        };
        Ok(Addresses { http: address(&self.http)?, grpc: address(&self.grpc)? })
    }
}

/// Only its owner may speak to it.
fn bind_control(path: &Path) -> anyhow::Result<UnixListener> {
    if path.exists() {
        std::fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("restrict {}", path.display()))?;
    Ok(listener)
}

/// What the router reads of a checkpoint.
struct ModelFacts {
    text: Option<TextPipeline>,
    eos_token_ids: Vec<u32>,
    fingerprint: u64,
}

fn read_model(config: &Config) -> anyhow::Result<ModelFacts> {
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get().div_ceil(2));
    let (checkpoint, sources) = match config.load_format {
        LoadFormat::Auto => {
            let checkpoint = Checkpoint::open(&config.model)?;
            let sources = checkpoint.text()?;
            (checkpoint, Some(sources))
        }
        LoadFormat::Dummy => {
            let checkpoint = Checkpoint::dummy(&config.model, DUMMY_SEED)?;
            // A tokenizer is welcome here, not needed.
            let sources = checkpoint.text().inspect_err(|error| {
                tracing::info!(%error, "no tokenizer; prompts are token ids");
            });
            (checkpoint, sources.ok())
        }
    };
    // Meta's own files name no end; their tokenizer does.
    let mut eos_token_ids = checkpoint.model().eos_token_ids.clone();
    if let Some(sources) = sources.as_ref().filter(|_| eos_token_ids.is_empty()) {
        eos_token_ids = sources.end_token_ids();
    }
    let pipeline = |sources| TextPipeline::new(sources, config.chat_template.clone(), workers);
    let text = sources.map(pipeline).transpose().context("--chat-template")?;
    Ok(ModelFacts { text, eos_token_ids, fingerprint: checkpoint.fingerprint() })
}

/// Serves until `shutdown`, then drains: new requests are refused while running ones finish.
///
/// # Errors
/// The model cannot be read, or the shards can never serve.
pub async fn run(
    config: Config,
    listeners: Listeners,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let config = Arc::new(config);
    let reading = config.clone();
    let model = tokio::task::spawn_blocking(move || read_model(&reading)).await??;
    let decoder = model.text.as_ref().map(|text| text.decoder().clone());
    let vocabulary = decoder
        .as_ref()
        .map(|decoder| Arc::new(decoder.vocabulary.for_grammars(&model.eos_token_ids)));
    let chat_syntax = match (&decoder, &vocabulary) {
        (Some(decoder), Some(vocabulary)) => {
            ChatSyntax::of(config.parsers, &templates(&config, decoder), vocabulary)
        }
        _ => ChatSyntax::default(),
    };
    tracing::debug!(?chat_syntax, "how the model writes calls and thought");
    let grammar_checks = vocabulary.as_ref().map(|vocabulary| grammar_checks(vocabulary));
    let grammar_checks = grammar_checks.transpose()?.map(Arc::new);
    let eos_token_ids = model.eos_token_ids.clone();
    let settings = config.dispatcher(model.fingerprint, vocabulary, eos_token_ids);
    let (dispatcher, mut looping) = Dispatcher::start(settings, decoder, shutdown);
    let readiness = dispatcher.watch_readiness();
    let front = FrontSettings {
        name: config.served_model_name.clone(),
        tp: config.group.tp,
        pp: config.group.pp,
        max_sequences: config.group.max_sequences,
        max_batch_tokens: config.group.max_batch_tokens,
        eos_token_ids: model.eos_token_ids,
        grammar_checks,
        chat_syntax,
    };
    let generator: Arc<dyn Generator> = Arc::new(Front::new(front, model.text, dispatcher));

    // The servers outlive the loop, so that a drain is seen and refusals are answered.
    let close = CancellationToken::new();
    let servers = serve(&config, listeners, generator, readiness, close.clone());
    tokio::pin!(servers);
    let outcome = tokio::select! {
        outcome = &mut looping => outcome,
        failed = &mut servers => return failed.context("a server ended"),
    };
    close.cancel();
    match tokio::time::timeout(CLOSE_LIMIT * 2, servers).await {
        Ok(closed) => closed?,
        Err(_) => tracing::warn!("connections were still open; closed"),
    }
    outcome?.context("serve from the shards")
}

/// The sources of the chat templates in use, joined.
fn templates(config: &Config, decoder: &TextDecoder) -> String {
    if let Some(given) = &config.chat_template {
        return given.clone();
    }
    let own = decoder.sources.chat_templates.iter();
    own.map(|(_, source)| source.as_str()).collect::<Vec<_>>().join("\n")
}

/// This program checks grammars too, in processes of their own.
fn grammar_checks(vocabulary: &Vocabulary) -> anyhow::Result<GrammarChecks> {
    let program = std::env::current_exe().context("find this program")?;
    Ok(GrammarChecks::new(program, CheckFacts::of(vocabulary)))
}

async fn serve(
    config: &Config,
    listeners: Listeners,
    generator: Arc<dyn Generator>,
    readiness: tokio::sync::watch::Receiver<crate::api::Readiness>,
    close: CancellationToken,
) -> anyhow::Result<()> {
    let addresses = listeners.addresses()?;
    tracing::info!(http = addresses.http, grpc = addresses.grpc, "listening");
    let service =
        |key: Option<ApiKey>| GenerationService::new(generator.clone(), addresses.clone(), key);
    let app = App::new(generator.clone(), http_config(config), metrics::install().ok());
    let web = async {
        let Some(listener) = listeners.http else { return Ok(()) };
        http::serve(listener, app, close.clone().cancelled_owned(), CLOSE_LIMIT).await
    };
    let public = grpc_routes(service(config.api_key.clone()), readiness.clone()).await?;
    let public = async {
        let Some(listener) = listeners.grpc else { return Ok(()) };
        // A token must not wait for the client's acknowledgement of the one before.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        public.serve_with_incoming_shutdown(incoming, close.clone().cancelled_owned()).await
    };
    let control = grpc_routes(service(None), readiness).await?;
    let control = async {
        let Some(listener) = listeners.control else { return Ok(()) };
        let incoming = UnixListenerStream::new(listener);
        control.serve_with_incoming_shutdown(incoming, close.clone().cancelled_owned()).await
    };
    tokio::try_join!(
        async { web.await.context("HTTP") },
        async { public.await.context("gRPC") },
        async { control.await.context("control socket") },
    )?;
    Ok(())
}

fn http_config(config: &Config) -> HttpConfig {
    let defaults = HttpConfig::default();
    HttpConfig {
        // All choices of a request are queued together.
        max_choices: defaults.max_choices.min(config.max_waiting),
        api_key: config.api_key.as_ref().map(ApiKey::reveal),
        body_limit_bytes: config.max_body_bytes,
        ..defaults
    }
}

/// The API, health and reflection (v1, and v1alpha for the clients that still ask for it).
async fn grpc_routes(
    service: GenerationService,
    readiness: tokio::sync::watch::Receiver<crate::api::Readiness>,
) -> anyhow::Result<Router> {
    let (reporter, health) = tonic_health::server::health_reporter();
    // A new reporter says "serving" of the whole server: nobody may ask before it is told.
    readiness::report(&readiness, &reporter).await;
    tokio::spawn(readiness::mirror(readiness, reporter));
    let describe = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(trireme_proto::GENERATE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Ok(tonic::transport::Server::builder()
        .add_service(health)
        .add_service(describe().build_v1().context("describe the gRPC API")?)
        .add_service(describe().build_v1alpha().context("describe the gRPC API")?)
        .add_service(GenerationServer::new(service)))
}
