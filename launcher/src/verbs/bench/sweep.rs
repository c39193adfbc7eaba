//! Prefill of single prompts, then decoding at several batch sizes.

use std::{
    num::NonZeroU32,
    time::{Duration, Instant},
};

use serde_json::json;
use trireme_proto::generate::v1::{
    GenerateRequest, Parameters, TokenIds, generate_request::Prompt,
};

use super::{
    Report,
    figures::{gaps_ms, ms, percentile, steady_tokens_per_s},
    prompts::Prompts,
};
use crate::{
    answer::{Incoming, Print},
    cli::BenchArgs,
    rpc::Connection,
};

/// Prompts of the decode sweep: short, so that decoding is what is measured.
pub const DECODE_PROMPT_TOKENS: usize = 16;
/// Each prefill length is measured so often; the median counts.
const PREFILL_RUNS: usize = 5;

pub struct Bench<'a> {
    pub channel: Connection,
    pub args: &'a BenchArgs,
}

impl Bench<'_> {
    pub fn prompts(&self) -> Prompts {
        Prompts::new(self.args.engine.seed.unwrap_or(0))
    }

    /// Times of the tokens of one request, from its sending.
    pub async fn request(&self, ids: Vec<u32>, tokens: u32) -> anyhow::Result<Vec<Duration>> {
        let parameters =
            Parameters { max_new_tokens: Some(tokens), ignore_eos: true, ..Parameters::default() };
        let request = GenerateRequest {
            prompt: Some(Prompt::Ids(TokenIds { ids })),
            parameters: Some(parameters),
            ..GenerateRequest::default()
        };
        let mut nowhere = std::io::sink();
        let mut incoming = Incoming::new(&mut nowhere, Print::Nothing);
        incoming.receive(self.channel.clone(), request).await?;
        Ok(incoming.answer.token_times)
    }

    /// Requests at once; token times from their common start.
    pub async fn batch(
        &self,
        prompts: Vec<Vec<u32>>,
        tokens: u32,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        let start = Instant::now();
        let one = async |ids: Vec<u32>| {
            let sent = start.elapsed();
            let times = self.request(ids, tokens).await?;
            anyhow::Ok(times.into_iter().map(|time| sent + time).collect())
        };
        futures::future::try_join_all(prompts.into_iter().map(one)).await
    }
}

pub async fn run(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let mut prompts = bench.prompts();
    // The first request pays for what is made on first use.
    bench.request(prompts.next(DECODE_PROMPT_TOKENS), 4).await?;
    for tokens in &bench.args.prefill {
        let mut ttft_ms = Vec::new();
        for _ in 0..PREFILL_RUNS {
            let times = bench.request(prompts.next(tokens.get() as usize), 1).await?;
            ttft_ms.extend(times.first().map(|first| ms(*first)));
        }
        let median_ms = percentile(&ttft_ms, 50.0);
        report.row(json!({
            "case": "prefill", "prompt_tokens": tokens,
            "ttft_ms_p50": median_ms, "ttft_ms_max": percentile(&ttft_ms, 100.0),
            "tokens_per_s": f64::from(tokens.get()) / median_ms * 1e3,
        }))?;
    }
    for sequences in &bench.args.batch {
        report.row(decode(bench, &mut prompts, *sequences).await?.row(bench.args))?;
    }
    Ok(())
}

/// How fast so many sequences decode at once.
pub struct Decode {
    sequences: NonZeroU32,
    pub inter_token_ms_p50: f64,
    inter_token_ms_p99: f64,
    /// None: they never all ran at once.
    tokens_per_s: Option<f64>,
}

impl Decode {
    fn row(&self, args: &BenchArgs) -> serde_json::Value {
        json!({
            "case": "decode", "sequences": self.sequences, "prompt_tokens": DECODE_PROMPT_TOKENS,
            "new_tokens": args.decode,
            "inter_token_ms_p50": self.inter_token_ms_p50,
            "inter_token_ms_p99": self.inter_token_ms_p99,
            "tokens_per_s": self.tokens_per_s,
        })
    }
}

/// All batches, without the prefill.
pub async fn decode_all(bench: &Bench<'_>) -> anyhow::Result<Vec<Decode>> {
    let mut prompts = bench.prompts();
    bench.request(prompts.next(DECODE_PROMPT_TOKENS), 4).await?;
    let mut all = Vec::new();
    for sequences in &bench.args.batch {
        all.push(decode(bench, &mut prompts, *sequences).await?);
    }
    Ok(all)
}

async fn decode(
    bench: &Bench<'_>,
    prompts: &mut Prompts,
    sequences: NonZeroU32,
) -> anyhow::Result<Decode> {
    let prompts = (0..sequences.get()).map(|_| prompts.next(DECODE_PROMPT_TOKENS)).collect();
    let times = bench.batch(prompts, bench.args.decode.get()).await?;
    let gaps = gaps_ms(&times);
    Ok(Decode {
        sequences,
        inter_token_ms_p50: percentile(&gaps, 50.0),
        inter_token_ms_p99: percentile(&gaps, 99.0),
        tokens_per_s: steady_tokens_per_s(&times),
    })
}
