//! A dead or hung shard: a typed error in time, and serving again without a restart of the router.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use trireme_integration_tests::{
    client::EventStream,
    fixture,
    server::{Server, ServerOptions},
};

const STEP_DEADLINE: Duration = Duration::from_secs(3);

/// What the server does at the moment of the blow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    Idle,
    Prefill,
    Decode,
}

fn start(tp: usize, pp: usize) -> Result<Server> {
    // A small step budget makes a long prompt's prefill last.
    let options = ServerOptions::new(fixture::smollm2()).split(tp, pp).args(&[
        "--dtype",
        "f32",
        "--max-batch-tokens",
        "64",
        "--no-prefix-cache",
        "--step-deadline-ms",
        "3000",
    ]);
    Server::start(&options)
}

fn request(prompt_tokens: usize) -> Value {
    let prompt: Vec<u32> = (0..prompt_tokens as u32).map(|i| 100 + i % 5_000).collect();
    json!({"prompt": prompt, "max_tokens": 1500, "ignore_eos": true, "temperature": 0, "stream": true})
}

/// Reads a stream to its end; the error event, if one came.
async fn error_of(stream: &mut EventStream) -> Result<Option<Value>> {
    while let Some(data) = stream.next().await? {
        if data == "[DONE]" {
            continue;
        }
        let event: Value = serde_json::from_str(&data)?;
        if event.get("error").is_some() {
            return Ok(Some(event["error"].clone()));
        }
    }
    Ok(None)
}

/// Polls `/ready` until it is `status`.
async fn wait_for_ready(server: &Server, status: u16, limit: Duration) -> Result<Duration> {
    let client = server.client();
    let start = Instant::now();
    loop {
        if client.get("/ready").await.is_ok_and(|answer| answer.status == status) {
            return Ok(start.elapsed());
        }
        if start.elapsed() > limit {
            bail!("/ready is not {status} after {limit:?}: {}", server.log());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub async fn check(server: &Server, rank: usize, signal: Signal, phase: Phase) -> Result<()> {
    let name = format!("{signal:?} of rank {rank} in {phase:?}");
    let client = server.client();
    let router = server.router().pid;
    let hit = || server.shards()[rank].signal(signal);
    let limit = if signal == Signal::KILL { Duration::from_secs(2) } else { STEP_DEADLINE * 2 };
    match phase {
        Phase::Idle => hit(),
        Phase::Prefill => {
            let body = request(6_000);
            let answer = tokio::spawn({
                let client = client.clone();
                async move { client.post("/v1/completions", &with_stream(body, false)).await }
            });
            tokio::time::sleep(Duration::from_millis(300)).await;
            hit();
            let blow = Instant::now();
            let answer = answer.await??;
            assert_eq!(answer.status, 503, "{name}: {:?}", answer);
            assert_eq!(answer.json()["error"]["code"], "shard_lost", "{name}: {:?}", answer);
            assert!(blow.elapsed() < limit, "{name}: the error took {:?}", blow.elapsed());
        }
        Phase::Decode => {
            let mut stream = client.stream("/v1/completions", &request(16)).await?;
            for _ in 0..5 {
                stream.next().await?;
            }
            hit();
            let blow = Instant::now();
            let error = error_of(&mut stream).await?;
            assert!(blow.elapsed() < limit, "{name}: the error took {:?}", blow.elapsed());
            let error =
                error.unwrap_or_else(|| panic!("{name}: the stream ended without an error"));
            assert_eq!(error["code"], "shard_lost", "{name}: {error}");
        }
    }
    if phase == Phase::Idle && signal == Signal::KILL {
        wait_for_ready(server, 503, Duration::from_secs(1)).await?;
    }
    if phase == Phase::Idle && signal == Signal::STOP {
        // An idle shard that hangs is found by its health, or by the first step.
        let answer = client.post("/v1/completions", &with_stream(request(4), false)).await?;
        assert!(answer.status == 503 || answer.status == 200, "{name}: {answer:?}");
    }
    wait_for_ready(server, 200, Duration::from_secs(30)).await?;
    let answer =
        client.post("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 4})).await?;
    assert_eq!(answer.ok()["usage"]["completion_tokens"], 4, "{name}: serving again");
    assert_eq!(server.router().pid, router, "{name}: the router was not restarted");
    Ok(())
}

fn with_stream(mut body: Value, stream: bool) -> Value {
    body["stream"] = stream.into();
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_shard_is_replaced() -> Result<()> {
    let server = start(2, 1)?;
    check(&server, 1, Signal::KILL, Phase::Decode).await?;
    check(&server, 0, Signal::KILL, Phase::Prefill).await?;
    check(&server, 1, Signal::KILL, Phase::Idle).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_stage_is_replaced() -> Result<()> {
    let server = start(1, 2)?;
    check(&server, 0, Signal::KILL, Phase::Decode).await?;
    check(&server, 1, Signal::KILL, Phase::Prefill).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_shard_is_replaced() -> Result<()> {
    let server = start(2, 1)?;
    check(&server, 1, Signal::STOP, Phase::Decode).await?;
    check(&server, 0, Signal::STOP, Phase::Prefill).await?;
    check(&server, 0, Signal::STOP, Phase::Idle).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_dies_again_and_again_ends_the_server() -> Result<()> {
    let options = ServerOptions::new(fixture::path("models/smollm-like"))
        .split(2, 1)
        .args(&["--restart-budget", "1"]);
    let mut server = Server::start(&options)?;
    for _ in 0..2 {
        if let Some(shard) = server.shards().first() {
            shard.signal(Signal::KILL);
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    let status = server.wait(Duration::from_secs(20))?;
    assert!(!status.success(), "the budget is spent: {}", server.log());
    assert!(server.log().contains("restart"), "{}", server.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_does_not_come_back_with_other_weights() -> Result<()> {
    let model = fixture::path("models/smollm-like");
    let copy = tempfile::tempdir()?;
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(model.join(file), copy.path().join(file))?;
    }
    let options = ServerOptions::new(copy.path()).split(2, 1).args(&["--restart-budget", "2"]);
    let mut server = Server::start(&options)?;
    // The same names and shapes; a half-new model would answer with nonsense.
    let weights = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&weights)?;
    std::fs::remove_file(&weights)?;
    std::fs::write(&weights, bytes)?;
    server.shards()[1].signal(Signal::KILL);
    let status = server.wait(Duration::from_secs(60))?;
    assert!(!status.success(), "served a mixture: {}", server.log());
    assert!(server.log().contains("weight files"), "{}", server.log());
    Ok(())
}
