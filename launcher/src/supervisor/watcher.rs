//! Asks one process, over and over, whether it is well.

use std::time::{Duration, Instant};

use tokio::{sync::mpsc, time::timeout};
use tonic::transport::Channel;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use trireme_proto::{
    generate::v1 as generate,
    shard::v1::{self as shard, ShardState},
};

use super::{Event, Happening, load_progress::LoadProgress};
use crate::{
    rpc,
    topology::{ProcessSpec, Role},
};

/// Between two questions: until the first good answer, and after it.
const EAGER_INTERVAL: Duration = Duration::from_millis(30);
const CALM_INTERVAL: Duration = Duration::from_secs(1);
/// A question without an answer for so long counts as no answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What a process said about itself.
#[derive(Debug)]
enum Answer {
    /// Alive, and on its way or serving.
    Well(Option<Happening>),
    Unwell(String),
}

pub struct Watcher {
    role: Role,
    life: u64,
    channel: Channel,
    hang_deadline: Duration,
    events: mpsc::Sender<Event>,
    /// While the weights are read.
    loading: Option<LoadProgress>,
}

impl Watcher {
    /// Watches life number `life` of a process.
    pub fn new(
        spec: &ProcessSpec,
        life: u64,
        hang_deadline: Duration,
        events: mpsc::Sender<Event>,
    ) -> Self {
        let channel = rpc::unix(&spec.socket);
        let is_shard = matches!(spec.role, Role::Shard { .. });
        let loading = is_shard.then(|| LoadProgress::new(spec.role));
        Self { role: spec.role, life, channel, hang_deadline, events, loading }
    }

    /// Ends when the process hangs; the supervisor ends it before when the process is gone.
    pub async fn run(mut self) {
        let mut unwell_since: Option<Instant> = None;
        let mut told = false;
        loop {
            let answer = match timeout(ANSWER_TIMEOUT, self.ask()).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(status)) => Answer::Unwell(format!("no answer: {}", status.message())),
                Err(_) => Answer::Unwell(format!("no answer for {} s", ANSWER_TIMEOUT.as_secs())),
            };
            match answer {
                Answer::Well(happening) => {
                    unwell_since = None;
                    if let Some(happening) = happening.filter(|_| !told) {
                        told = true;
                        self.tell(happening).await;
                    }
                }
                Answer::Unwell(reason) => {
                    let since = *unwell_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.hang_deadline {
                        self.tell(Happening::Hung(reason)).await;
                        return;
                    }
                }
            }
            let calm = told && self.loading.is_none();
            tokio::time::sleep(if calm { CALM_INTERVAL } else { EAGER_INTERVAL }).await;
        }
    }

    async fn tell(&self, happening: Happening) {
        let event = Event { role: self.role, life: self.life, happening };
        // A supervisor that is gone needs no news.
        let _ = self.events.send(event).await;
    }

    async fn ask(&mut self) -> Result<Answer, tonic::Status> {
        let mut health = HealthClient::new(self.channel.clone());
        let reply = health.check(HealthCheckRequest { service: String::new() }).await?;
        let serving = reply.into_inner().status() == ServingStatus::Serving;
        match self.role {
            Role::Shard { .. } if serving => {
                self.loading = None;
                Ok(Answer::Well(Some(Happening::Answers)))
            }
            Role::Shard { .. } => self.ask_shard().await,
            Role::Router if serving => self.ask_router().await,
            // The router waits for shards; whether those are well is asked of them.
            Role::Router => Ok(Answer::Well(None)),
        }
    }

    /// A shard that does not serve may be on its way there.
    async fn ask_shard(&mut self) -> Result<Answer, tonic::Status> {
        let mut client = shard::shard_client::ShardClient::new(self.channel.clone());
        let info = client.info(shard::InfoRequest {}).await?.into_inner();
        match info.state() {
            ShardState::Loading => {
                if let Some(progress) = &mut self.loading {
                    progress.at(info.weight_bytes_loaded, info.weight_bytes_total);
                }
                Ok(Answer::Well(Some(Happening::Answers)))
            }
            ShardState::Loaded | ShardState::Configured => {
                self.loading = None;
                Ok(Answer::Well(Some(Happening::Answers)))
            }
            state => {
                let state = state.as_str_name().trim_start_matches("SHARD_STATE_").to_lowercase();
                Ok(Answer::Unwell(format!("not serving ({state}): {}", info.failure)))
            }
        }
    }

    async fn ask_router(&mut self) -> Result<Answer, tonic::Status> {
        let mut client = generate::generation_client::GenerationClient::new(self.channel.clone());
        let info = client.info(generate::InfoRequest {}).await?.into_inner();
        Ok(Answer::Well(Some(Happening::Serves(Box::new(info)))))
    }
}
