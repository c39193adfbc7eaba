//! Many requests, so many at a time.

use std::time::Instant;

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::{
    figures::{gaps_ms, ms, percentile},
    sweep::Bench,
};
use crate::cli::LoadShape;

pub async fn run(bench: &Bench<'_>, shape: LoadShape) -> anyhow::Result<Value> {
    let (requests, concurrency) = (shape.requests.get(), shape.concurrency.get());
    let prompt_tokens = bench.args.prefill.first().map_or(128, |tokens| tokens.get());
    let new_tokens = bench.args.decode.get();
    let mut prompts = bench.prompts();
    let start = Instant::now();
    let outcomes: Vec<_> = stream::iter(0..requests)
        .map(|_| bench.request(prompts.next(prompt_tokens as usize), new_tokens))
        .buffer_unordered(concurrency)
        .collect()
        .await;
    let wall_s = start.elapsed().as_secs_f64();
    let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let first_failure = failed.into_iter().filter_map(Result::err).collect::<Vec<_>>();
    let times: Vec<_> = done.into_iter().filter_map(Result::ok).collect();
    let ttft_ms: Vec<f64> =
        times.iter().filter_map(|times| times.first()).map(|first| ms(*first)).collect();
    let tokens: usize = times.iter().map(Vec::len).sum();
    let gaps = gaps_ms(&times);
    Ok(json!({
        "case": "load", "requests": requests, "concurrency": concurrency,
        "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
        "failed": first_failure.len(), "first_failure": first_failure.first().map(ToString::to_string),
        "wall_s": wall_s, "requests_per_s": times.len() as f64 / wall_s,
        "output_tokens_per_s": tokens as f64 / wall_s,
        "ttft_ms_p50": percentile(&ttft_ms, 50.0), "ttft_ms_p99": percentile(&ttft_ms, 99.0),
        "inter_token_ms_p50": percentile(&gaps, 50.0), "inter_token_ms_p99": percentile(&gaps, 99.0),
    }))
}
