//! Under load with clients that vanish: nothing leaks, nothing stalls.

use std::time::Duration;

use anyhow::Result;
use futures::future::join_all;
use serde_json::json;
use trireme_integration_tests::{
    client::{Client, Metrics},
    fixture,
    server::{Server, ServerOptions},
};

/// One of the clients: every fourth leaves in the middle.
async fn chat(server: &Server, number: usize) -> Result<bool> {
    // A client of its own has a connection of its own.
    let client = server.client();
    let words: Vec<u32> = (0..20 + number % 60).map(|i| (7 * i + number) as u32 % 500).collect();
    let request = json!({
        "prompt": words, "max_tokens": 40, "ignore_eos": true, "stream": true, "seed": number,
    });
    let mut stream = client.stream("/v1/completions", &request).await?;
    let leaves_after = (number % 4 == 3).then_some(number % 17);
    let mut events = 0;
    while let Some(data) = stream.next().await? {
        if data == "[DONE]" {
            break;
        }
        let event: serde_json::Value = serde_json::from_str(&data)?;
        assert!(event.get("error").is_none(), "client {number}: {event}");
        events += 1;
        if leaves_after.is_some_and(|limit| events > limit) {
            return Ok(false);
        }
    }
    assert!(events >= 40, "client {number} got {events} events");
    Ok(true)
}

async fn wait_for_idle(client: &Client) -> Result<()> {
    for _ in 0..500 {
        let metrics = Metrics::of(client).await?;
        let held =
            ["trireme_running_sequences", "trireme_queue_sequences", "trireme_kv_blocks_used"];
        let busy: f64 = held.iter().map(|name| metrics.get(name)).sum();
        if busy == 0.0 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("sequences or blocks are still held");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_streams_with_vanishing_clients_leak_nothing() -> Result<()> {
    let options = ServerOptions::new(fixture::path("models/smollm-like"))
        .split(2, 1)
        .args(&["--max-waiting", "300"]);
    let server = Server::start(&options)?;
    let client = server.client();
    // A first round brings every pool and cache to its size.
    for round in 0..3 {
        let results = join_all((0..200).map(|number| chat(&server, number))).await;
        let finished = results.into_iter().collect::<Result<Vec<bool>>>()?;
        assert_eq!(finished.iter().filter(|&&done| done).count(), 150, "round {round}");
        wait_for_idle(&client).await?;
    }
    let router = server.router();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (files, threads) = (router.open_files(), router.threads());
    for _ in 0..3 {
        for result in join_all((0..200).map(|number| chat(&server, number))).await {
            result?;
        }
        wait_for_idle(&client).await?;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (files_after, threads_after) = (router.open_files(), router.threads());
    assert!(files_after <= files + 4, "open files grew from {files} to {files_after}");
    assert!(threads_after <= threads + 2, "threads grew from {threads} to {threads_after}");
    assert!(!server.log().contains("panicked"), "{}", server.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_is_refused_at_the_door() -> Result<()> {
    let options = ServerOptions::new(fixture::path("models/smollm-like")).args(&[
        "--max-sequences",
        "2",
        "--max-waiting",
        "4",
    ]);
    let server = Server::start(&options)?;
    let request = json!({"prompt": [3, 4, 5], "max_tokens": 200, "ignore_eos": true});
    let answers = join_all((0..40).map(|_| {
        let client = server.client();
        let request = request.clone();
        async move { client.post("/v1/completions", &request).await }
    }))
    .await;
    let mut refused = 0;
    for answer in answers {
        let answer = answer?;
        match answer.status.as_u16() {
            200 => assert_eq!(answer.json()["usage"]["completion_tokens"], 200),
            429 => {
                refused += 1;
                assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
            }
            other => panic!("status {other}: {answer:?}"),
        }
    }
    assert!(refused > 0 && refused < 40, "{refused} of 40 were refused");
    Ok(())
}
