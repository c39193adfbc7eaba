//! One rank: its connection, the lane that carries its steps in order, and the watch on its life.

use std::{path::Path, sync::Arc, sync::OnceLock, time::Duration};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesOrdered};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::mpsc, task::AbortHandle};
use tonic::{
    Request, Status, Streaming,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_client::HealthClient};
use tracing::Span;
use trireme_proto::shard::v1::{self as proto, shard_client::ShardClient};

use super::{GroupError, wire::StepRequest};

/// A step that admits a full house of long prompts stays well below this.
const MAX_MESSAGE_BYTES: usize = 256 << 20;
/// HTTP/2 windows; one step should never wait for a window update.
const WINDOW_BYTES: u32 = 16 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub type Client = ShardClient<Channel>;

/// A connection to one shard process.
#[derive(Clone)]
pub struct Connection {
    pub rank: usize,
    pub client: Client,
    health: HealthClient<Channel>,
    /// Who listens at the other end, as the kernel says.
    peer_pid: Arc<OnceLock<i32>>,
}

impl Connection {
    pub async fn open(rank: usize, socket: &Path) -> Result<Self, GroupError> {
        let peer_pid = Arc::new(OnceLock::new());
        let seen = peer_pid.clone();
        let path = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let (path, seen) = (path.clone(), seen.clone());
            async move {
                let stream = UnixStream::connect(path).await?;
                if let Some(pid) = stream.peer_cred().ok().and_then(|peer| peer.pid()) {
                    let _ = seen.set(pid);
                }
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        });
        let channel = Endpoint::from_static("http://shard")
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .connect_with_connector(connector)
            .await
            .map_err(|error| GroupError::Unreachable {
                rank,
                detail: format!("{}: {:#}", socket.display(), anyhow::Error::from(error)),
            })?;
        let client = ShardClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self { rank, client, health: HealthClient::new(channel), peer_pid })
    }

    /// One call with a time limit, its failure named.
    pub async fn call<T>(
        &self,
        name: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, GroupError> {
        let rank = self.rank;
        match tokio::time::timeout(limit, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(GroupError::Call { rank, call: name, status: Box::new(status) }),
            Err(_) => {
                let limit_ms = limit.as_millis() as u64;
                Err(GroupError::Slow { rank, call: name, limit_ms })
            }
        }
    }

    pub async fn info(&self, limit: Duration) -> Result<proto::InfoReply, GroupError> {
        let mut client = self.client.clone();
        self.call("Info", limit, client.info(proto::InfoRequest {})).await
    }

    pub async fn reset(&self, epoch: u64, limit: Duration) -> Result<(), GroupError> {
        let mut client = self.client.clone();
        self.call("Reset", limit, client.reset(proto::ResetRequest { epoch })).await?;
        Ok(())
    }

    /// A stream that breaks as soon as the process dies.
    pub async fn watch(&self) -> Result<Streaming<HealthCheckResponse>, GroupError> {
        let mut health = self.health.clone();
        let request = HealthCheckRequest { service: String::new() };
        self.call("health Watch", CONNECT_TIMEOUT, health.watch(request)).await
    }

    /// Whether `pid` is the process at the other end, so that a signal to it hits nobody else.
    pub fn is_peer(&self, pid: u32) -> bool {
        pid > 1 && self.peer_pid.get().is_some_and(|peer| *peer as u32 == pid)
    }
}

/// What a rank has to tell, in the order of its steps.
pub enum RankEvent {
    Reply(Box<proto::StepReply>),
    Refused { call: &'static str, status: Box<Status> },
    Gone(String),
}

struct RankStep {
    request: StepRequest,
    span: Span,
}

/// The sending end of a rank's lane. Dropping it ends the lane and the calls in it.
pub struct Rank {
    pub connection: Connection,
    pub pid: u32,
    steps: mpsc::Sender<RankStep>,
    task: AbortHandle,
}

impl Rank {
    pub fn start(
        connection: Connection,
        pid: u32,
        watch: Streaming<HealthCheckResponse>,
        steps_in_flight: usize,
        events: mpsc::Sender<(usize, RankEvent)>,
    ) -> Self {
        let (steps, inbox) = mpsc::channel(steps_in_flight);
        let lane = Lane {
            rank: connection.rank,
            client: connection.client.clone(),
            inbox,
            watch,
            calls: FuturesOrdered::new(),
            events,
        };
        let task = tokio::spawn(lane.run()).abort_handle();
        Self { connection, pid, steps, task }
    }

    pub fn send(&self, request: StepRequest, span: Span) -> Result<(), GroupError> {
        let rank = self.connection.rank;
        self.steps.try_send(RankStep { request, span }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => GroupError::Protocol {
                rank,
                detail: "more steps were sent than may be in flight".to_owned(),
            },
            mpsc::error::TrySendError::Closed(_) => {
                GroupError::Gone { rank, detail: "its task ended".to_owned() }
            }
        })
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Call = BoxFuture<'static, Result<tonic::Response<proto::StepReply>, (&'static str, Status)>>;

/// Sends a rank's steps in order over one connection and hands back the replies in order.
struct Lane {
    rank: usize,
    client: Client,
    inbox: mpsc::Receiver<RankStep>,
    watch: Streaming<HealthCheckResponse>,
    calls: FuturesOrdered<Call>,
    events: mpsc::Sender<(usize, RankEvent)>,
}

impl Lane {
    async fn run(mut self) {
        loop {
            // Biased: a new call is polled, and so sent, before the next one is made. That keeps
            // the steps in order on the wire.
            let event = tokio::select! {
                biased;
                Some(reply) = self.calls.next() => match reply {
                    Ok(reply) => RankEvent::Reply(Box::new(reply.into_inner())),
                    Err((call, status)) => RankEvent::Refused { call, status: Box::new(status) },
                },
                health = self.watch.message() => match health {
                    Ok(Some(_)) => continue,
                    Ok(None) => RankEvent::Gone("it ended the health watch".to_owned()),
                    Err(status) => RankEvent::Gone(status.message().to_owned()),
                },
                step = self.inbox.recv() => match step {
                    Some(step) => {
                        self.calls.push_back(call(self.client.clone(), step));
                        continue;
                    }
                    None => return,
                },
            };
            let over = !matches!(event, RankEvent::Reply(_));
            if self.events.send((self.rank, event)).await.is_err() || over {
                return;
            }
        }
    }
}

fn call(mut client: Client, step: RankStep) -> Call {
    match step.request {
        StepRequest::Prefill(message) => {
            let request = traced(message, &step.span);
            async move { client.prefill(request).await.map_err(|status| ("Prefill", status)) }
                .boxed()
        }
        StepRequest::Decode(message) => {
            let request = traced(message, &step.span);
            async move { client.decode(request).await.map_err(|status| ("Decode", status)) }.boxed()
        }
    }
}

/// The step's span travels as W3C trace context.
fn traced<T>(message: T, span: &Span) -> Request<T> {
    let mut request = Request::new(message);
    span.in_scope(|| trireme_telemetry::inject(request.metadata_mut()));
    request
}
