//! A plain HTTP client: one request, one answer, or a stream of server-sent events.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail};
use http_body_util::{BodyExt, Full};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::{Bytes, Incoming},
};
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// No single answer may take longer: a hang fails the test instead of hanging it.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    pool: Pool<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error} in an answer {}: {}", self.status, String::from_utf8_lossy(&self.body))
        })
    }

    /// The answer as JSON; panics unless it is a success.
    pub fn ok(&self) -> Value {
        assert!(
            self.status.is_success(),
            "answer {}: {}",
            self.status,
            String::from_utf8_lossy(&self.body)
        );
        self.json()
    }
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, pool: Pool::builder(TokioExecutor::new()).build_http() }
    }

    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.send(self.request(Method::GET, path, &[], Bytes::new())?).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.post_bytes(path, Bytes::from(body.to_string())).await
    }

    pub async fn post_bytes(&self, path: &str, body: Bytes) -> Result<Answer> {
        self.send(self.request(Method::POST, path, &[], body)?).await
    }

    pub async fn post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Result<Answer> {
        self.send(self.request(Method::POST, path, headers, Bytes::from(body.to_string()))?).await
    }

    /// Starts a stream; dropping it closes the connection.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<EventStream> {
        let request = self.request(Method::POST, path, &[], Bytes::from(body.to_string()))?;
        let response = tokio::time::timeout(ANSWER_LIMIT, self.pool.request(request))
            .await
            .context("no response head in time")??;
        if !response.status().is_success() {
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            bail!("stream refused with {status}: {}", String::from_utf8_lossy(&body));
        }
        Ok(EventStream { body: response.into_body(), buffer: Vec::new() })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answer> {
        let answer = async {
            let response = self.pool.request(request).await?;
            let (head, body) = response.into_parts();
            let body = body.collect().await?.to_bytes();
            anyhow::Ok(Answer { status: head.status, headers: head.headers, body })
        };
        tokio::time::timeout(ANSWER_LIMIT, answer).await.context("no answer in time")?
    }
}

/// The figures of `/metrics` at one moment.
#[derive(Debug)]
pub struct Metrics {
    text: String,
}

impl Metrics {
    pub async fn of(client: &Client) -> Result<Self> {
        let answer = client.get("/metrics").await?;
        Ok(Self { text: String::from_utf8(answer.body.to_vec())? })
    }

    /// A metric without labels; panics when there is none of that name.
    pub fn get(&self, name: &str) -> f64 {
        self.text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .and_then(|value| value.trim().parse().ok())
            .unwrap_or_else(|| panic!("no metric {name} in {}", self.text))
    }
}

/// A stream of server-sent events.
pub struct EventStream {
    body: Incoming,
    buffer: Vec<u8>,
}

impl EventStream {
    /// The data of the next event, `[DONE]` included; `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(event) = self.take_event() {
                return Ok(Some(event));
            }
            let frame = tokio::time::timeout(ANSWER_LIMIT, self.body.frame())
                .await
                .context("no event in time")?;
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    if let Some(data) = frame?.data_ref() {
                        self.buffer.extend_from_slice(data);
                    }
                }
            }
        }
    }

    /// Every event up to the end, `[DONE]` excluded, parsed.
    pub async fn collect(&mut self) -> Result<Vec<Value>> {
        let mut events = Vec::new();
        while let Some(data) = self.next().await? {
            if data != "[DONE]" {
                events.push(serde_json::from_str(&data).context("event is not JSON")?);
            }
        }
        Ok(events)
    }

    fn take_event(&mut self) -> Option<String> {
        loop {
            let end = self.buffer.windows(2).position(|pair| pair == b"\n\n")?;
            let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&event);
            let data: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim).collect();
            if !data.is_empty() {
                return Some(data.join("\n"));
            }
        }
    }
}
