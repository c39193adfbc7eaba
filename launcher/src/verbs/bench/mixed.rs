//! Long prompts that come while others decode: how long these wait for their next token.

use std::time::Duration;

use anyhow::{bail, ensure};
use serde_json::{Value, json};

use super::{
    figures::{gaps_ms, ms, percentile},
    sweep::{Bench, DECODE_PROMPT_TOKENS},
};
use crate::cli::MixedShape;

/// After so long all sequences of the batch decode.
const LEAD: Duration = Duration::from_secs(1);

pub async fn run(bench: &Bench<'_>, shape: MixedShape) -> anyhow::Result<Value> {
    let Some(sequences) = bench.args.batch.first().map(|sequences| sequences.get()) else {
        bail!("--mixed needs a --batch to decode");
    };
    let mut prompts = bench.prompts();
    let short = (0..sequences).map(|_| prompts.next(DECODE_PROMPT_TOKENS)).collect();
    let long = (0..shape.prompts.get()).map(|_| prompts.next(shape.tokens.get())).collect();
    let arrivals = async {
        tokio::time::sleep(LEAD).await;
        bench.batch(long, 1).await
    };
    let (decodes, arrivals) =
        futures::future::try_join(bench.batch(short, bench.args.decode.get()), arrivals).await?;
    let first_tokens: Vec<Duration> = arrivals.iter().flatten().copied().collect();
    let end = LEAD + first_tokens.iter().max().copied().unwrap_or_default();
    let outlast = decodes.iter().all(|times| times.last().is_some_and(|last| *last >= end));
    ensure!(outlast, "the batch ended before the prompts were computed: more --decode tokens");
    let inside = |times: &Vec<Duration>| -> Vec<Duration> {
        times.iter().copied().filter(|time| (LEAD..=end).contains(time)).collect()
    };
    let gaps = gaps_ms(&decodes.iter().map(inside).collect::<Vec<_>>());
    let ttft_ms: Vec<f64> = first_tokens.iter().map(|first| ms(*first)).collect();
    let prompt_tokens = shape.prompts.get() * shape.tokens.get();
    Ok(json!({
        "case": "mixed", "sequences": sequences,
        "prompts": shape.prompts, "prompt_tokens": shape.tokens,
        "inter_token_ms_p50": percentile(&gaps, 50.0),
        "inter_token_ms_p99": percentile(&gaps, 99.0),
        "inter_token_ms_max": percentile(&gaps, 100.0),
        "ttft_ms_p50": percentile(&ttft_ms, 50.0), "ttft_ms_max": percentile(&ttft_ms, 100.0),
        "prompt_tokens_per_s": prompt_tokens as f64 / (end - LEAD).as_secs_f64(),
    }))
}
