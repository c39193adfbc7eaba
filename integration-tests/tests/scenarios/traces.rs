//! One trace per request, from the client's `traceparent` to a span on every rank of every stage.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use serde_json::json;
use trireme_integration_tests::{
    fixture,
    otlp::{Exported, Receiver},
    server::{Server, ServerOptions},
};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

fn named<'a>(spans: &'a [Exported], name: &str) -> Vec<&'a Exported> {
    spans.iter().filter(|exported| exported.span.name == name).collect()
}

fn has_link_to(exported: &Exported, span_id: &str) -> bool {
    exported.span.links.iter().any(|link| {
        link.span_id.iter().map(|byte| format!("{byte:02x}")).collect::<String>() == span_id
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_trace_down_to_every_rank() -> Result<()> {
    let (receiver, address) = Receiver::start().await?;
    let endpoint = format!("http://{address}");
    let options = ServerOptions::new(fixture::path("models/smollm-like"))
        .split(2, 2)
        .args(&["--otlp-endpoint", &endpoint]);
    let mut server = Server::start(&options)?;
    let traceparent = format!("00-{TRACE}-{CALLER}-01");
    let request = json!({"prompt": "a b c", "max_tokens": 5, "ignore_eos": true});
    let answer = server
        .client()
        .post_with("/v1/completions", &[("traceparent", &traceparent)], &request)
        .await?;
    answer.ok();
    // Spans are flushed after the drain.
    let status = server.stop()?;
    assert!(status.success(), "{}", server.log());
    let spans = receiver.spans();

    let of_request: Vec<Exported> =
        spans.iter().filter(|exported| exported.trace_id() == TRACE).cloned().collect();
    let names: BTreeSet<&str> =
        of_request.iter().map(|exported| exported.span.name.as_str()).collect();
    for name in ["validate", "tokenize", "queue", "prefill", "decode"] {
        assert!(names.contains(name), "no span {name} in the client's trace: {names:?}");
    }
    let ids: BTreeSet<String> = of_request.iter().map(Exported::span_id).collect();
    for exported in &of_request {
        let parent = exported.parent_id();
        assert!(
            parent == CALLER || ids.contains(&parent),
            "span {} has no parent in the trace",
            exported.span.name
        );
    }
    let root = of_request.iter().find(|exported| exported.parent_id() == CALLER).expect("a root");
    let model = of_request.iter().find_map(|exported| exported.attribute("gen_ai.request.model"));
    assert!(model.is_some(), "GenAI attributes name the model");
    let usage =
        of_request.iter().find_map(|exported| exported.attribute("gen_ai.usage.output_tokens"));
    assert_eq!(usage.as_deref(), Some("5"));

    let steps = named(&spans, "step");
    let linked = steps.iter().filter(|step| {
        ids.iter().any(|id| has_link_to(step, id)) || has_link_to(step, &root.span_id())
    });
    assert!(linked.count() >= 5, "batch steps are linked to the request");
    let mut ranks = BTreeSet::new();
    for shard_step in named(&spans, "shard.step") {
        let parent = shard_step.parent_id();
        assert!(
            steps.iter().any(|step| step.span_id() == parent),
            "a shard's step hangs below the router's step"
        );
        ranks.insert(shard_step.attribute("rank").expect("a rank"));
    }
    assert_eq!(ranks.len(), 4, "a span on every rank: {ranks:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_exporter_harms_nothing() -> Result<()> {
    let options = ServerOptions::new(fixture::path("models/smollm-like"))
        .split(2, 1)
        .args(&["--otlp-endpoint", "http://127.0.0.1:9"]);
    let mut server = Server::start(&options)?;
    for _ in 0..5 {
        let answer = server
            .client()
            .post("/v1/completions", &json!({"prompt": [1, 2, 3], "max_tokens": 8}))
            .await?;
        answer.ok();
    }
    tokio::time::sleep(Duration::from_secs(7)).await;
    let status = server.stop()?;
    assert!(status.success(), "{}", server.log());
    // The router and two shards each say it once.
    let log = server.log();
    let said = log.lines().filter(|line| line.to_lowercase().contains("export")).count();
    assert!((1..=3).contains(&said), "the failure is said {said} times: {log}");
    Ok(())
}
