//! The front over a real socket, with a scripted generator behind it. Expected answers are what
//! the OpenAI, vLLM and text-generation-inference servers are documented to say.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use super::{App, HttpConfig, serve};
use fake::Fake;

mod benchmarks;
mod best_of;
mod conversations;
mod description;
mod errors;
pub(crate) mod fake;
mod lifecycle;
mod rules;
mod scoring;

mod shapes;
mod streams;
mod tools;
mod traces;

/// No test waits longer for what must happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server on a port of its own.
struct Server {
    address: SocketAddr,
    fake: Arc<Fake>,
    client: Client<HttpConnector, Full<Bytes>>,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<anyhow::Result<()>>,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The events of a stream; anything but `data:` lines and blank lines fails.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.headers["content-type"], "text/event-stream", "{self:?}");
        let blocks = self.text().split_terminator("\n\n");
        let data = blocks.map(|block| block.strip_prefix("data: ").expect("a data line alone"));
        data.map(|data| match data {
            "[DONE]" => json!("[DONE]"),
            data => serde_json::from_str(data).unwrap(),
        })
        .collect()
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = String::from_utf8_lossy(&self.body);
        write!(f, "{} {:?} {body}", self.status, self.headers)
    }
}

impl Server {
    async fn start() -> Self {
        Self::with(HttpConfig::default()).await
    }

    async fn with(config: HttpConfig) -> Self {
        Self::over(Fake::default(), config).await
    }

    async fn with_model_len(max_model_len: u32) -> Self {
        let fake = Fake { max_model_len: Some(max_model_len), ..Fake::default() };
        Self::over(fake, HttpConfig::default()).await
    }

    async fn over(fake: Fake, config: HttpConfig) -> Self {
        let fake = Arc::new(fake);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let app = App::new(fake.clone(), config, None);
        let serving = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.await;
            };
            serve(listener, app, shutdown, PATIENCE).await
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { address, fake, client, stop: Some(stop), serving }
    }

    fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .header("x-request-id", "test")
            .header("content-type", "application/json")
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let exchange = async {
            let response = self.client.request(request).await.expect("a response");
            let (parts, body) = response.into_parts();
            let body = body.collect().await.expect("a whole body").to_bytes();
            Answer { status: parts.status, headers: parts.headers, body }
        };
        tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time")
    }

    async fn post_bytes(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        let request = self.request(Method::POST, path).body(Full::new(body.into())).unwrap();
        self.send(request).await
    }

    async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_bytes(path, body.to_string()).await
    }

    async fn get(&self, path: &str) -> Answer {
        let request = self.request(Method::GET, path).body(Full::default()).unwrap();
        self.send(request).await
    }
}

/// Checks that `created` is a time of this century and takes it out, so that the rest can be
/// compared.
fn undated(mut body: Value) -> Value {
    if let Some(created) = body.get_mut("created") {
        assert!(created.as_u64().is_some_and(|seconds| seconds > 1_700_000_000), "{created}");
        *created = json!(0);
    }
    body
}
