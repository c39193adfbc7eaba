//! Prompts are scored as the reference scores them, whatever the split, the batch, the chunks, the
//! prefix cache and the pages left: the contract that lm_eval's `local-completions` relies on.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};
use trireme_integration_tests::{
    client::{Client, Metrics},
    fixture,
    server::{Server, ServerOptions, binary},
};

/// Of a logprob; sums may be off by it for each token, as lm_eval's own models are among each other.
const TOLERANCE: f64 = 2e-4;

#[derive(Debug, Deserialize)]
struct Reference {
    bos_token_id: u32,
    pairs: Vec<Pair>,
    rolling: Vec<Text>,
}

#[derive(Debug, Deserialize)]
struct Pair {
    context_ids: Vec<u32>,
    continuation_ids: Vec<u32>,
    token_logprobs: Vec<f64>,
    is_greedy: bool,
}

#[derive(Debug, Deserialize)]
struct Text {
    ids: Vec<u32>,
    token_logprobs: Vec<f64>,
}

/// Ids to be scored from `start` on, and what must come of it.
struct Case {
    ids: Vec<u32>,
    start: usize,
    logprobs: Vec<f64>,
    is_greedy: Option<bool>,
}

fn cases() -> Vec<Case> {
    let reference: Reference = fixture::json("smollm2/loglikelihood.json");
    let pairs = reference.pairs.into_iter().map(|pair| Case {
        start: pair.context_ids.len(),
        ids: [pair.context_ids, pair.continuation_ids].concat(),
        logprobs: pair.token_logprobs,
        is_greedy: Some(pair.is_greedy),
    });
    let texts = reference.rolling.into_iter().map(|text| Case {
        ids: [vec![reference.bos_token_id], text.ids].concat(),
        start: 1,
        logprobs: text.token_logprobs,
        is_greedy: None,
    });
    pairs.chain(texts).collect()
}

/// One choice as lm_eval reads it: the logprobs of all ids, and whether each was the best.
fn read(choice: &Value, ids: usize, generated: usize) -> (Vec<f64>, Vec<bool>) {
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().expect("token_logprobs");
    let tops = choice["logprobs"]["top_logprobs"].as_array().expect("top_logprobs");
    let arrays = ["tokens", "text_offset"].map(|name| choice["logprobs"][name].as_array());
    for length in
        [logprobs.len(), tops.len()].into_iter().chain(arrays.map(|a| a.map_or(0, Vec::len)))
    {
        assert_eq!(length, ids + generated, "one entry for each id and each generated token");
    }
    assert!(logprobs[0].is_null() && tops[0].is_null(), "the first token has no score");
    let numbers: Vec<f64> = logprobs[1..].iter().map(|x| x.as_f64().expect("a number")).collect();
    let best = numbers.iter().zip(&tops[1..]).map(|(own, top)| {
        let top = top.as_object().expect("a map");
        let values = top.values().map(|value| value.as_f64().expect("a number"));
        *own == values.fold(f64::NEG_INFINITY, f64::max)
    });
    let best = best.collect();
    (numbers, best)
}

fn body(prompts: &[&[u32]], generated: usize) -> Value {
    json!({
        "model": "m", "prompt": prompts, "temperature": 0, "max_tokens": generated, "logprobs": 1,
        "seed": 1234, "echo": true,
    })
}

/// Scores prompts in one request.
async fn score(client: &Client, cases: &[Case], generated: usize) -> Result<Vec<Vec<f64>>> {
    let prompts: Vec<&[u32]> = cases.iter().map(|case| case.ids.as_slice()).collect();
    let answer = client.post("/v1/completions", &body(&prompts, generated)).await?.ok();
    let choices = answer["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), cases.len());
    let mut all = Vec::new();
    for (index, (case, choice)) in cases.iter().zip(choices).enumerate() {
        assert_eq!(choice["index"], index, "choices are in the order of prompts");
        let (logprobs, best) = read(choice, case.ids.len(), generated);
        let scored = case.start - 1..case.ids.len() - 1;
        for (found, expected) in logprobs[scored.clone()].iter().zip(&case.logprobs) {
            let off = (found - expected).abs();
            assert!(off <= TOLERANCE, "prompt {index}: {found} is off by {off:e}");
        }
        if let Some(is_greedy) = case.is_greedy {
            assert_eq!(best[scored].iter().all(|best| *best), is_greedy, "prompt {index}");
        }
        all.push(logprobs[..case.ids.len() - 1].to_vec());
    }
    Ok(all)
}

fn start(tp: usize, pp: usize, args: &[&str]) -> Result<Server> {
    let options = ServerOptions::new(fixture::smollm2()).split(tp, pp).args(&[
        "--dtype",
        "f32",
        "--served-model-name",
        "m",
    ]);
    Server::start(&options.args(args))
}

/// All at once, again with the cache warm, and one by one: the same floats each time.
async fn check(tp: usize, pp: usize, args: &[&str]) -> Result<Metrics> {
    let cases = cases();
    let server = start(tp, pp, args)?;
    let client = server.client();
    let together = score(&client, &cases, 1).await?;
    assert_eq!(score(&client, &cases, 0).await?, together, "a warm cache, nothing generated");
    for (case, expected) in cases.iter().zip(&together).take(8) {
        let alone = score(&client, std::slice::from_ref(case), 1).await?;
        assert_eq!(&alone[0], expected, "neighbours change nothing");
    }
    Metrics::of(&client).await
}

#[tokio::test(flavor = "multi_thread")]
async fn scores_are_the_references_in_every_split() -> Result<()> {
    for (tp, pp) in [(1, 1), (3, 2)] {
        check(tp, pp, &[]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn small_chunks_and_few_pages_change_no_score() -> Result<()> {
    // 16 tokens a step cut every text; 48 pages do not hold the 25 prompts and their neighbours.
    let few = ["--max-batch-tokens", "16", "--max-model-len", "128", "--kv-cache-memory", "16MiB"];
    check(2, 1, &few).await?;
    Ok(())
}

/// The part of a prompt that need not be scored comes from the cache, and changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_of_scoring_uses_the_cache() -> Result<()> {
    let server = start(1, 2, &[])?;
    let client = server.client();
    let text = cases().pop().expect("a rolling text");
    let whole = score(&client, std::slice::from_ref(&text), 1).await?.remove(0);
    let start = text.ids.len() - 4;
    let mut body = body(&[&text.ids], 1);
    body["logprob_start_len"] = json!(start);
    let answer = client.post("/v1/completions", &body).await?.ok();
    let hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    assert!(hit as usize >= (start - 1) / 16 * 16 && hit > 0, "{hit} tokens came from the cache");
    let logprobs = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("logprobs");
    assert_eq!(logprobs.len(), text.ids.len() + 1);
    assert!(logprobs[..start].iter().all(Value::is_null));
    let tail: Vec<f64> = logprobs[start..text.ids.len()].iter().filter_map(Value::as_f64).collect();
    assert_eq!(tail, whole[start - 1..]);
    Ok(())
}

/// What a client may send beside: text, a stop at the generated token, a prompt of the whole window.
#[tokio::test(flavor = "multi_thread")]
async fn the_rest_of_the_contract() -> Result<()> {
    let server = start(2, 1, &["--max-model-len", "64"])?;
    let client = server.client();
    let text = "The capital of France is Paris";
    let tokens = client.post("/tokenize", &json!({"prompt": text})).await?.ok();
    let ids: Vec<u32> = serde_json::from_value(tokens["tokens"].clone())?;
    let ask = async |prompt: Value, more: &[(&str, Value)]| {
        let mut body = body(&[], 1);
        body["prompt"] = prompt;
        for (name, value) in more {
            body[*name] = value.clone();
        }
        anyhow::Ok(client.post("/v1/completions", &body).await?.ok()["choices"][0].clone())
    };
    let by_ids = ask(json!(ids), &[]).await?;
    let by_text = ask(json!(text), &[]).await?;
    assert_eq!(by_ids["logprobs"], by_text["logprobs"]);
    let offsets = by_text["logprobs"]["text_offset"].as_array().expect("text_offset");
    assert_eq!(offsets.last(), Some(&json!(text.chars().count())), "where the answer begins");

    // The generated token ends the answer, and is there all the same.
    let first = ask(json!(ids), &[("return_token_ids", json!(true))]).await?;
    let stop = first["token_ids"][0].clone();
    let stopped = ask(json!(ids), &[("stop_token_ids", json!([stop]))]).await?;
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["logprobs"], by_ids["logprobs"]);

    // The window less one, and the whole window where nothing is generated.
    let long: Vec<u32> = ids.iter().cycle().take(64).copied().collect();
    let most = ask(json!(long[..63]), &[]).await?;
    read(&most, 63, 1);
    let whole = ask(json!(long), &[("max_tokens", json!(0))]).await?;
    read(&whole, 64, 0);
    let mut refused = body(&[&long], 1);
    refused["max_tokens"] = json!(1);
    assert_eq!(client.post("/v1/completions", &refused).await?.status, 400);
    Ok(())
}

/// `trireme eval` through the running server agrees with the reference.
#[tokio::test(flavor = "multi_thread")]
async fn eval_computes_the_references_figures() -> Result<()> {
    let reference: Value = fixture::json("smollm2/loglikelihood.json");
    let folder = tempfile::TempDir::with_prefix("tri")?;
    let write = |name: &str, documents: Vec<Value>| {
        let lines: Vec<String> = documents.iter().map(Value::to_string).collect();
        let path = folder.path().join(name);
        std::fs::write(&path, lines.join("\n")).map(|()| path)
    };
    let pairs = reference["pairs"].as_array().expect("pairs");
    let pair =
        |pair: &Value| json!({"context": pair["context"], "continuation": pair["continuation"]});
    let pairs_file = write("pairs.jsonl", pairs.iter().map(pair).collect())?;
    let texts = reference["rolling"].as_array().expect("rolling");
    let texts_file =
        write("texts.jsonl", texts.iter().map(|text| json!({"text": text["text"]})).collect())?;
    let prompt = json!({
        "prompt": "The capital of France is", "until": ["."], "max_new_tokens": 8, "target": "Paris",
    });
    let prompts_file = write("prompts.jsonl", vec![prompt])?;

    let server = start(1, 1, &[])?;
    let tasks = [pairs_file, texts_file, prompts_file].map(|path| path.display().to_string());
    let output = std::process::Command::new(binary("trireme"))
        .args(["eval", "--json", "--connect", &format!("http://{}", server.grpc)])
        .args(["--tasks", &tasks.join(",")])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let metric = |task: usize, name: &str| {
        report["tasks"][task]["metrics"][name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {report}"))
    };
    let sum = |list: &[Value]| list.iter().filter_map(|each| each["logprob"].as_f64()).sum::<f64>();
    let greedy = pairs.iter().filter(|pair| pair["is_greedy"] == true).count();
    assert_eq!(metric(0, "acc"), greedy as f64 / pairs.len() as f64);
    let perplexity = (-sum(pairs) / pairs.len() as f64).exp();
    let off = (metric(0, "perplexity") / perplexity - 1.0).abs();
    assert!(off < 1e-3, "perplexity is off by {off:e}");
    let bytes: usize = texts.iter().filter_map(|text| text["text"].as_str()).map(str::len).sum();
    let bits = -sum(texts) / bytes as f64 / std::f64::consts::LN_2;
    let off = (metric(1, "bits_per_byte") - bits).abs();
    assert!(off < 1e-4, "bits_per_byte is off by {off:e}");
    assert_eq!(metric(2, "exact_match"), 1.0, "{report}");
    Ok(())
}
