//! The numbers are right: greedy tokens and raw logprobs against the reference, in every split.

use anyhow::Result;
use futures::future::try_join_all;
use serde_json::{Value, json};
use trireme_integration_tests::{
    client::{Client, Metrics},
    fixture::{self, Expected, ExpectedGreedy},
    server::{Server, ServerOptions},
};

/// A greedy step whose best two logits are closer than this may fall either way.
const TIE: f64 = 1e-3;

/// Compares one answer of `/v1/completions` with the reference.
fn check(name: &str, answer: &Value, expected: &ExpectedGreedy, tolerance: f64) {
    let choice = &answer["choices"][0];
    let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone())
        .unwrap_or_else(|error| panic!("{name}: token_ids: {error} in {answer}"));
    let logprobs: Vec<f64> = serde_json::from_value(choice["logprobs"]["token_logprobs"].clone())
        .unwrap_or_else(|error| panic!("{name}: token_logprobs: {error} in {answer}"));
    assert_eq!(ids.len(), expected.ids.len(), "{name}: number of tokens");
    for (step, (&id, &expected_id)) in ids.iter().zip(&expected.ids).enumerate() {
        if id != expected_id {
            let margin = expected.margins[step];
            assert!(
                margin < TIE,
                "{name}: step {step} is {id}, not {expected_id}, margin {margin}"
            );
            return;
        }
        let difference = (logprobs[step] - expected.logprobs[step]).abs();
        assert!(difference <= tolerance, "{name}: step {step}: logprob is off by {difference:e}");
    }
}

fn body(ids: &[u32], new_tokens: usize) -> Value {
    json!({
        "prompt": ids, "max_tokens": new_tokens, "temperature": 0, "logprobs": 1,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// All prompts at once: one batch of unequal lengths, joined and left at different times.
pub async fn check_together(
    client: &Client,
    name: &str,
    expected: &Expected,
    tolerance: f64,
) -> Result<()> {
    let requests = expected.prompts.iter().map(|prompt| async move {
        let request = body(&prompt.ids, prompt.greedy.ids.len());
        let answer = client.post("/v1/completions", &request).await?;
        check(&format!("{name} {}", prompt.name), &answer.ok(), &prompt.greedy, tolerance);
        anyhow::Ok(())
    });
    try_join_all(requests).await?;
    Ok(())
}

/// One prompt after another: what a batch gives must be what a single run gives.
async fn check_alone(
    client: &Client,
    name: &str,
    expected: &Expected,
    tolerance: f64,
) -> Result<()> {
    for prompt in &expected.prompts {
        let request = body(&prompt.ids, prompt.greedy.ids.len());
        let answer = client.post("/v1/completions", &request).await?;
        check(&format!("{name} {} alone", prompt.name), &answer.ok(), &prompt.greedy, tolerance);
    }
    Ok(())
}

/// Serves SmolLM2 and checks every prompt; the figures of `/metrics` after that.
async fn check_smollm2(tp: usize, pp: usize, args: &[&str]) -> Result<Metrics> {
    let expected: Expected = fixture::json("smollm2/generation.json");
    let options =
        ServerOptions::new(fixture::smollm2()).split(tp, pp).args(&["--dtype", "f32"]).args(args);
    let server = Server::start(&options)?;
    let name = format!("smollm2 tp {tp} pp {pp} {args:?}");
    check_together(&server.client(), &name, &expected, 2e-3).await?;
    if (tp, pp) == (1, 1) {
        check_alone(&server.client(), &name, &expected, 2e-3).await?;
    }
    Metrics::of(&server.client()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn smollm2_equals_the_reference_in_every_split() -> Result<()> {
    for (tp, pp) in [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (1, 5)] {
        check_smollm2(tp, pp, &[]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn smollm2_survives_small_chunks() -> Result<()> {
    // 32 tokens a step cut every longer prompt in chunks.
    check_smollm2(2, 1, &["--max-batch-tokens", "32"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn smollm2_survives_preemption() -> Result<()> {
    // Few pages: sequences are thrown out and computed again.
    let few_pages = ["--kv-cache-memory", "16MiB", "--max-model-len", "512"];
    let metrics = check_smollm2(1, 2, &few_pages).await?;
    assert!(metrics.get("trireme_preemptions_total") > 0.0, "the pages were enough: {metrics:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn small_models_equal_the_reference_in_every_container_and_split() -> Result<()> {
    let cases = [
        ("models/llama3-like", "models/llama3-like", [(1, 1), (2, 1), (3, 2)]),
        ("models/smollm-like", "models/smollm-like", [(1, 1), (3, 1), (2, 5)]),
        ("formats/gguf-f16-smollm", "models/smollm-like", [(2, 1), (1, 5), (4, 1)]),
        ("formats/gguf-f32", "models/llama3-like", [(1, 1), (4, 1), (1, 2)]),
        ("formats/hf-sharded", "models/llama3-like", [(2, 2), (1, 1), (8, 1)]),
    ];
    for (model, reference, splits) in cases {
        let expected: Expected = fixture::json(&format!("{reference}/expected.json"));
        for (tp, pp) in splits {
            let options =
                ServerOptions::new(fixture::path(model)).split(tp, pp).args(&["--dtype", "f32"]);
            let server = Server::start(&options)?;
            let name = format!("{model} tp {tp} pp {pp}");
            check_together(&server.client(), &name, &expected, 2e-4).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_hit_changes_nothing() -> Result<()> {
    let expected: Expected = fixture::json("smollm2/generation.json");
    let options = ServerOptions::new(fixture::smollm2()).split(2, 1).args(&["--dtype", "f32"]);
    let server = Server::start(&options)?;
    let client = server.client();
    let longest = expected.prompts.iter().max_by_key(|prompt| prompt.ids.len()).expect("prompts");
    let request = body(&longest.ids, longest.greedy.ids.len());
    let mut cached = Vec::new();
    for round in 0..2 {
        let answer = client.post("/v1/completions", &request).await?.ok();
        check(&format!("round {round}"), &answer, &longest.greedy, 2e-3);
        cached.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64());
    }
    assert_eq!(cached[0], Some(0), "a cold cache");
    assert!(cached[1] >= Some(16), "the second run finds the prefix: {cached:?}");
    // The answer is cached too: prompt and answer together are the prefix of the next turn.
    let mut turn = longest.ids.clone();
    turn.extend(&longest.greedy.ids);
    let answer = client.post("/v1/completions", &body(&turn, 1)).await?.ok();
    let hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    let full_blocks = (turn.len() - 1) / 16 * 16;
    assert!(hit as usize >= full_blocks - 16, "{hit} of {full_blocks} tokens were cached");
    Ok(())
}
