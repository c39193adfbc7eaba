//! Clients that leave, keys, bounds, panics, traces, the end.

use http::{HeaderMap, Method};
use http_body_util::Full;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{HttpConfig, PATIENCE, Server, fake::TEXT};
use crate::api::Readiness;

/// Sends a request by hand, so that the connection can be dropped at will.
pub async fn open(server: &Server, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

async fn wait_for_drops(server: &Server, count: u32) {
    let dropped = server.fake.dropped.0.acquire_many(count);
    tokio::time::timeout(PATIENCE, dropped)
        .await
        .expect("generations are dropped")
        .unwrap()
        .forget();
}

/// A client that leaves while its request runs; every one of its generations is dropped.
async fn check_disconnect(path: &str, body: serde_json::Value, generations: u32) {
    let server = Server::start().await;
    let stream = open(&server, path, &body.to_string()).await;
    tokio::time::timeout(PATIENCE, server.fake.hanging.notified()).await.expect("it runs");
    assert_eq!(server.fake.dropped.0.available_permits(), 0);
    drop(stream);
    wait_for_drops(&server, generations).await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_generations() {
    let completions = "/v1/completions";
    check_disconnect(completions, json!({"prompt": "hang"}), 1).await;
    check_disconnect(completions, json!({"prompt": "hang", "stream": true}), 1).await;
    check_disconnect(completions, json!({"prompt": "hang at once", "stream": true}), 1).await;
    check_disconnect(completions, json!({"prompt": ["hang", "hang"], "n": 2}), 4).await;
    let messages = json!([{"role": "user", "content": "hang"}]);
    check_disconnect("/v1/chat/completions", json!({"messages": messages}), 1).await;
    check_disconnect("/generate_stream", json!({"inputs": "hang"}), 1).await;
}

#[tokio::test]
async fn a_refused_prompt_cancels_those_admitted_before_it() {
    let server = Server::start().await;
    let answer = server.post("/v1/completions", &json!({"prompt": ["hang", "full"]})).await;
    assert_eq!(answer.status, 429, "{answer:?}");
    wait_for_drops(&server, 1).await;
}

/// A connection that says nothing, or no more than the beginning of what HTTP/2 begins with.
#[tokio::test]
async fn silent_connections_are_closed() {
    let first_bytes_limit = std::time::Duration::from_millis(20);
    let server = Server::with(HttpConfig { first_bytes_limit, ..HttpConfig::default() }).await;
    for beginning in ["", "P", "PRI * HTTP/2.0"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(beginning.as_bytes()).await.unwrap();
        let closed = tokio::time::timeout(PATIENCE, stream.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{beginning:?}: {closed:?}");
    }
    // One that spoke in time may be silent while it waits for its answer.
    let body = r#"{"prompt": "hang", "stream": true}"#;
    let mut speaking = open(&server, "/v1/completions", body).await;
    speaking.read_exact(&mut [0; 12]).await.unwrap();
    tokio::time::sleep(first_bytes_limit * 3).await;
    assert_eq!(server.fake.dropped.0.available_permits(), 0, "it runs on");
}

#[tokio::test]
async fn events_leave_at_once() {
    let server = Server::start().await;
    let mut stream =
        open(&server, "/v1/completions", r#"{"prompt": "hang", "stream": true}"#).await;
    let mut seen = Vec::new();
    // The generation never ends, so its first event comes only if it is not held back.
    while !String::from_utf8_lossy(&seen).contains("\"text\":\"One\"") {
        let mut buffer = [0; 4096];
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await;
        let count = read.expect("an event in time").unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
}

#[tokio::test]
async fn the_key_guards_all_but_the_probes() {
    let config = HttpConfig { api_key: Some("sesame".into()), ..HttpConfig::default() };
    let server = Server::with(config).await;
    for (path, given, status) in [
        ("/v1/models", None, 401),
        ("/v1/models", Some("Bearer sesam"), 401),
        ("/v1/models", Some("Bearer sesame "), 401),
        ("/v1/models", Some("Basic sesame"), 401),
        ("/v1/models", Some("sesame"), 401),
        ("/v1/models", Some("Bearer sesame"), 200),
        ("/v1/models", Some("bearer sesame"), 200),
        ("/metrics", None, 401),
        ("/info", None, 401),
        ("/nothing", None, 401),
        ("/live", None, 200),
        ("/ready", None, 200),
        ("/health", None, 200),
        ("/docs", None, 200),
        ("/docs/swagger-ui.css", None, 200),
        ("/openapi.json", None, 200),
    ] {
        let mut request = server.request(Method::GET, path);
        if let Some(given) = given {
            request = request.header("authorization", given);
        }
        // hyper trims the blank that HTTP allows around a value; the server must see it as sent.
        let answer = server.send(request.body(Full::default()).unwrap()).await;
        let trimmed = given.is_some_and(|given| given.ends_with(' '));
        let status = if trimmed { 200 } else { status };
        assert_eq!(answer.status, status, "{path} {given:?}: {answer:?}");
        if status == 401 {
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
            assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        }
    }
}

#[tokio::test]
async fn browsers_may_call_with_a_key() {
    let config = HttpConfig { api_key: Some("sesame".into()), ..HttpConfig::default() };
    let server = Server::with(config).await;
    let preflight = server
        .request(Method::OPTIONS, "/v1/chat/completions")
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");
    let answer = server.send(preflight.body(Full::default()).unwrap()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    let allowed = answer.headers["access-control-allow-headers"].to_str().unwrap();
    assert!(allowed.contains("authorization") && allowed.contains("content-type"), "{allowed}");
    let refused = server.request(Method::GET, "/info").header("origin", "https://app.example");
    let answer = server.send(refused.body(Full::default()).unwrap()).await;
    assert_eq!(answer.status, 401);
    assert_eq!(answer.headers["access-control-allow-origin"], "*", "a script may read why");
}

#[tokio::test]
async fn one_request_too_many_is_refused_until_another_ends() {
    let config = HttpConfig { max_concurrent_requests: 1, ..HttpConfig::default() };
    let server = Server::with(config).await;
    let hanging = open(&server, "/v1/completions", r#"{"prompt": "hang", "stream": true}"#).await;
    tokio::time::timeout(PATIENCE, server.fake.hanging.notified()).await.expect("it runs");
    let answer = server.post("/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!(answer.status, 429, "{answer:?}");
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(server.get("/live").await.status, 200);
    drop(hanging);
    wait_for_drops(&server, 1).await;
    let answered = async {
        while server.post("/v1/completions", &json!({"prompt": "hi"})).await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.expect("the place is free again");
}

#[tokio::test]
async fn readiness_is_told_with_its_reason() {
    let server = Server::start().await;
    for (readiness, status, word) in [
        (Readiness::Ready, 200, "ready"),
        (Readiness::Starting("3 of 4 shards".into()), 503, "starting"),
        (Readiness::Lost("rank 1".into()), 503, "lost"),
        (Readiness::Draining, 503, "draining"),
    ] {
        *server.fake.readiness.lock().unwrap() = Some(readiness);
        for path in ["/ready", "/health"] {
            let answer = server.get(path).await;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
            assert_eq!(answer.json()["status"], word);
        }
        assert_eq!(server.get("/live").await.status, 200);
    }
}

#[tokio::test]
async fn a_request_keeps_its_id_or_gets_one() {
    let server = Server::start().await;
    let long = "x".repeat(129);
    for (given, kept) in
        [(Some("abc-1"), true), (None, false), (Some(long.as_str()), false), (Some("a b"), false)]
    {
        let mut request = server.request(Method::GET, "/live");
        let headers: &mut HeaderMap = request.headers_mut().unwrap();
        headers.remove("x-request-id");
        if let Some(given) = given {
            headers.insert("x-request-id", given.parse().unwrap());
        }
        let answer = server.send(request.body(Full::default()).unwrap()).await;
        let told = answer.headers["x-request-id"].to_str().unwrap();
        assert_eq!(Some(told) == given, kept, "{given:?}: {told}");
        assert!(kept || told.len() == 32, "{told}");
    }
}

#[tokio::test]
async fn the_drain_finishes_what_runs_and_takes_nothing_new() {
    let mut server = Server::start().await;
    let stream = open(&server, "/v1/completions", r#"{"prompt": "hang", "stream": true}"#).await;
    tokio::time::timeout(PATIENCE, server.fake.hanging.notified()).await.expect("it runs");
    assert_eq!(
        server.post("/v1/completions", &json!({"prompt": "hi"})).await.json()["choices"][0]["text"],
        TEXT
    );
    server.stop.take().unwrap().send(()).unwrap();
    let refused = async {
        while TcpStream::connect(server.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("the listener is closed");
    assert!(!server.serving.is_finished(), "a request still runs");
    drop(stream);
    wait_for_drops(&server, 1).await;
    let ended = tokio::time::timeout(PATIENCE, &mut server.serving).await;
    ended.expect("the drain ends with the last request").unwrap().unwrap();
}
