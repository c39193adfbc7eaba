//! Answers under a grammar: valid at any temperature, on any split, whatever else runs.

use anyhow::Result;
use futures::future::try_join_all;
use serde_json::{Value, json};
use trireme_integration_tests::{
    client::Metrics,
    fixture,
    server::{Server, ServerOptions},
};

use crate::clients::{python, run, script};

fn tiny() -> ServerOptions {
    ServerOptions::new(fixture::path("models/smollm-like"))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_schemas_hold_at_temperature_1() -> Result<()> {
    let python = python()?;
    let server = Server::start(&tiny().split(2, 2))?;
    let said = run(std::process::Command::new(&python)
        .arg(script("structured_client.py"))
        .arg(format!("http://{}/v1", server.http)))?;
    assert!(said.contains("200 answers valid"), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_package_calls_tools_and_parses_models() -> Result<()> {
    let python = python()?;
    let template = script("hermes_template.jinja");
    let template = template.to_string_lossy();
    let options = ServerOptions::new(fixture::smollm2()).split(2, 1);
    let server = Server::start(&options.args(&["--chat-template", &template]))?;
    let said = run(std::process::Command::new(&python)
        .arg(script("tools_client.py"))
        .arg(format!("http://{}/v1", server.http)))?;
    assert!(said.contains("tools client: all good"), "{said}");
    Ok(())
}

/// The choices of one request: text, finish reason, token ids.
async fn complete(server: &Server, extra: &Value) -> Result<Vec<Value>> {
    let mut body = json!({"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 1, "seed": 11});
    let fields = extra.as_object().expect("an object");
    body.as_object_mut().expect("an object").extend(fields.clone());
    let answer = server.client().post("/v1/completions", &body).await?;
    assert_eq!(answer.status, 200, "{extra}: {:?}", answer.body);
    let answer = answer.json();
    Ok(answer["choices"].as_array().cloned().unwrap_or_default())
}

/// Every choice's text is one of `texts` and ends by itself.
async fn check(server: &Server, extra: Value, texts: &[&str]) -> Result<()> {
    for choice in complete(server, &extra).await? {
        let text = choice["text"].as_str().unwrap_or_default();
        assert!(texts.contains(&text), "{extra}: {text:?}");
        assert_eq!(choice["finish_reason"], "stop", "{extra}: {choice}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_grammar_holds_beside_every_parameter() -> Result<()> {
    // Few blocks, so that sequences are preempted and their grammars made anew.
    let server = Server::start(&tiny().split(2, 1).args(&["--max-sequences", "16"]))?;
    let choice = json!(["yes", "no", "may.be"]);
    let texts = &["yes", "no", "may.be"];
    check(&server, json!({"guided_choice": choice}), texts).await?;
    check(&server, json!({"structured_outputs": {"choice": choice}, "n": 12}), texts).await?;
    check(&server, json!({"guided_choice": choice, "min_tokens": 50}), texts).await?;
    check(&server, json!({"guided_choice": choice, "temperature": 0}), texts).await?;
    let narrow = json!({"guided_choice": choice, "top_k": 1, "top_p": 0.1, "min_p": 0.5});
    check(&server, narrow, texts).await?;
    check(&server, json!({"guided_regex": "^(ab){3}c?$"}), &["ababab", "abababc"]).await?;
    let lark = "start: greeting \"!\"\ngreeting: \"hi\" | \"hey\"";
    check(&server, json!({"guided_grammar": lark}), &["hi!", "hey!"]).await?;
    let stop = json!({"guided_regex": "a{5}b{5}", "stop": ["ab"]});
    check(&server, stop, &["aaaa"]).await?;
    // The forbidden tokens' logits are the likeliest: the logprobs are those of the raw model.
    let told = complete(&server, &json!({"guided_choice": choice, "logprobs": 3})).await?;
    let logprobs = &told[0]["logprobs"];
    for (own, top) in logprobs["token_logprobs"]
        .as_array()
        .into_iter()
        .flatten()
        .zip(logprobs["top_logprobs"].as_array().into_iter().flatten())
    {
        let best = top.as_object().into_iter().flatten().filter_map(|(_, value)| value.as_f64());
        let best = best.fold(f64::NEG_INFINITY, f64::max);
        assert!(own.as_f64().is_some_and(|own| own <= best), "{logprobs}");
    }
    let tgi = json!({"inputs": "a", "parameters": {
        "grammar": {"type": "regex", "value": "[xyz]{3}"}, "temperature": 1.0, "seed": 3,
    }});
    let answer = server.client().post("/generate", &tgi).await?.json();
    let text = answer["generated_text"].as_str().unwrap_or_default();
    assert!(text.len() == 3 && text.chars().all(|c| "xyz".contains(c)), "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_seed_gives_the_same_answer_through_preemption() -> Result<()> {
    // 24 blocks of 16 tokens for 8 answers of 100 and more.
    let roomy = Server::start(&tiny())?;
    let body = |seed: u64| {
        let regex = "([a-f]{3}-){24}[0-9]{4}";
        json!({"guided_regex": regex, "seed": seed, "max_tokens": 150})
    };
    let mut alone = Vec::new();
    for seed in 0..8 {
        alone.push(complete(&roomy, &body(seed)).await?[0]["text"].clone());
    }
    drop(roomy);
    let tight =
        Server::start(&tiny().args(&["--kv-cache-memory", "552960", "--max-model-len", "256"]))?;
    let bodies: Vec<Value> = (0..8).map(body).collect();
    let together = try_join_all(bodies.iter().map(|body| complete(&tight, body))).await?;
    let together: Vec<Value> =
        together.into_iter().map(|choices| choices[0]["text"].clone()).collect();
    assert_eq!(together, alone);
    for text in &alone {
        let text = text.as_str().unwrap_or_default();
        assert!(text.len() == 100 && text.ends_with(|c: char| c.is_ascii_digit()), "{text}");
    }
    let metrics = Metrics::of(&tight.client()).await?;
    assert!(metrics.get("trireme_preemptions_total") > 0.0, "nothing was preempted");
    Ok(())
}
