//! A router core over fake shards: no transport in front, real sockets behind.

use std::{path::PathBuf, sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use trireme_router::{
    api::{
        Finished, GenerateEvent, GenerateRequest, Generation, Generator, Parameters, Prompt,
        Readiness, Token,
    },
    dispatcher::{Dispatcher, DispatcherSettings, DispatcherTask},
    error::RouterError,
    front::{Front, FrontSettings},
    shard_group::GroupSettings,
    tokenizer::TextPipeline,
};

use crate::fake_shard::{FakeShard, ShardSettings};

/// Longer than any test should take; a hang becomes a failure.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct CoreSettings {
    pub tp: u32,
    pub pp: u32,
    pub num_blocks: u32,
    pub max_sequences: u32,
    pub max_waiting: usize,
    pub lag_tokens: usize,
    pub step_deadline: Duration,
    pub drain_deadline: Duration,
}

impl Default for CoreSettings {
    fn default() -> Self {
        Self {
            tp: 1,
            pp: 1,
            num_blocks: 512,
            max_sequences: 64,
            max_waiting: 256,
            lag_tokens: 1024,
            step_deadline: Duration::from_secs(20),
            drain_deadline: Duration::from_secs(20),
        }
    }
}

pub struct Core {
    folder: TempDir,
    settings: CoreSettings,
    pub shards: Vec<FakeShard>,
    pub front: Arc<Front>,
    pub shutdown: CancellationToken,
    pub task: DispatcherTask,
}

impl Core {
    /// Serving.
    pub async fn start(settings: CoreSettings, text: Option<TextPipeline>) -> Self {
        let mut core = Self::without_shards(settings, text);
        for rank in 0..core.settings.tp * core.settings.pp {
            let shard = core.new_shard(rank);
            core.shards.push(shard);
        }
        core.until(|readiness| readiness.is_ready()).await;
        core
    }

    pub fn without_shards(settings: CoreSettings, text: Option<TextPipeline>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ranks = settings.tp * settings.pp;
        let group = GroupSettings {
            sockets: (0..ranks).map(|rank| socket(&folder, rank)).collect(),
            tp: settings.tp,
            pp: settings.pp,
            instance: "test".to_owned(),
            step_deadline: settings.step_deadline,
            start_deadline: PATIENCE,
            steps_in_flight: settings.pp as usize + 1,
            max_batch_tokens: 128,
            max_mixed_tokens: 128,
            max_sequences: settings.max_sequences,
            max_model_len: Some(4096.min(settings.num_blocks * 16)),
            checkpoint_fingerprint: 0,
            vocabulary: None,
        };
        let shutdown = CancellationToken::new();
        let dispatcher_settings = DispatcherSettings {
            group,
            max_waiting: settings.max_waiting,
            lag_tokens: settings.lag_tokens,
            prefix_cache: true,
            drain_deadline: settings.drain_deadline,
            eos_token_ids: vec![2],
        };
        let decoder = text.as_ref().map(|text| text.decoder().clone());
        let (dispatcher, task) = Dispatcher::start(dispatcher_settings, decoder, shutdown.clone());
        let front = FrontSettings {
            name: "fake".to_owned(),
            tp: settings.tp,
            pp: settings.pp,
            max_sequences: settings.max_sequences,
            max_batch_tokens: 128,
            eos_token_ids: vec![2],
            grammar_checks: None,
            chat_syntax: Default::default(),
        };
        let front = Arc::new(Front::new(front, text, dispatcher));
        Self { folder, settings, shards: Vec::new(), front, shutdown, task }
    }

    /// A fresh shard at the rank's socket, as a launcher would start it.
    pub fn new_shard(&self, rank: u32) -> FakeShard {
        let CoreSettings { tp, pp, num_blocks, .. } = self.settings;
        let settings = ShardSettings { rank, tp, pp, num_blocks, most_batch_tokens: 4096 };
        FakeShard::start(&socket(&self.folder, rank), settings)
    }

    pub fn socket(&self, rank: u32) -> PathBuf {
        socket(&self.folder, rank)
    }

    pub async fn until(&self, is_so: impl Fn(&Readiness) -> bool) {
        wait("readiness", || is_so(&self.front.readiness())).await;
    }

    pub async fn generate(
        &self,
        ids: &[u32],
        max_new_tokens: u32,
    ) -> Result<Generation, RouterError> {
        let parameters =
            Parameters { max_new_tokens: Some(max_new_tokens), ..Parameters::default() };
        self.generate_with(ids, parameters).await
    }

    pub async fn generate_with(
        &self,
        ids: &[u32],
        parameters: Parameters,
    ) -> Result<Generation, RouterError> {
        let request = GenerateRequest {
            request_id: "r".to_owned(),
            prompt: Prompt::Ids(ids.to_vec()),
            parameters,
        };
        self.front.generate(request).await
    }
}

fn socket(folder: &TempDir, rank: u32) -> PathBuf {
    folder.path().join(format!("{rank}.sock"))
}

/// Polls until it is so, or panics naming what it waited for.
pub async fn wait(what: &str, is_so: impl Fn() -> bool) {
    let polling = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let so = tokio::time::timeout(PATIENCE, polling).await;
    assert!(so.is_ok(), "{what} did not come about within {PATIENCE:?}");
}

/// Reads an answer to its end.
pub async fn finish(mut generation: Generation) -> (Vec<Token>, Result<Finished, RouterError>) {
    let mut tokens = Vec::new();
    let reading = async {
        while let Some(event) = generation.events.next().await {
            match event {
                GenerateEvent::Prompt(_) => {}
                GenerateEvent::Token(token) => tokens.push(token),
                GenerateEvent::Finished(finished) => return Ok(finished),
                GenerateEvent::Failed(error) => return Err(error),
            }
        }
        panic!("the events ended without an end");
    };
    let outcome = tokio::time::timeout(PATIENCE, reading.boxed()).await.expect("an end in time");
    (tokens, outcome)
}

pub fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}
