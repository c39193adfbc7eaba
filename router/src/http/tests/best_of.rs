//! `best_of`: the likeliest of several answers, on both APIs.

use serde_json::{Value, json};

use super::Server;

#[tokio::test]
async fn completions_tell_the_likeliest_candidates() {
    let server = Server::start().await;
    let body = json!({
        "prompt": ["ranked", "hi"], "n": 2, "best_of": 5, "max_tokens": 1, "seed": 11, "logprobs": 0,
    });
    let answer = server.post("/v1/completions", &body).await.json();
    let seeds: Vec<u64> = server.fake.take_requests()[..5]
        .iter()
        .map(|request| {
            assert!(request.parameters.logprobs, "they are compared by them");
            request.parameters.seed.unwrap() % 97
        })
        .collect();
    let mut best: Vec<f64> = seeds.iter().map(|seed| -(1.0 + *seed as f64)).collect();
    best.sort_by(|a, b| b.total_cmp(a));
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let told = |index: usize| choices[index]["logprobs"]["token_logprobs"][0].as_f64().unwrap();
    assert_eq!([told(0), told(1)], best[..2]);
    assert_eq!([told(2), told(3)].map(|logprob| logprob as f32), [-0.1, -0.1]);
    // Every candidate was generated, each prompt read once.
    assert_eq!(answer["usage"]["completion_tokens"], 10);
    assert_eq!(answer["usage"]["prompt_tokens"], 8);

    let plain = json!({"prompt": "ranked", "best_of": 3, "max_tokens": 1});
    let answer = server.post("/v1/completions", &plain).await.json();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null, "not asked for");
    let streamed = json!({"prompt": "ranked", "best_of": 3, "stream": true});
    assert_eq!(server.post("/v1/completions", &streamed).await.status, 400);
}

#[tokio::test]
async fn tgi_tells_the_likeliest_and_then_the_others() {
    let server = Server::start().await;
    let parameters = json!({
        "best_of": 4, "do_sample": true, "seed": 11, "max_new_tokens": 1, "details": true,
    });
    let body = json!({"inputs": "ranked", "parameters": parameters});
    let answer = server.post("/generate", &body).await.json();
    let best = &answer["details"];
    let others = best["best_of_sequences"].as_array().unwrap();
    let logprobs: Vec<f64> = std::iter::once(best)
        .chain(others)
        .map(|sequence| sequence["tokens"][0]["logprob"].as_f64().unwrap())
        .collect();
    assert_eq!(logprobs.len(), 4);
    assert!(logprobs.is_sorted_by(|a, b| a > b), "{logprobs:?}");
    for sequence in others {
        assert_eq!(sequence["generated_text"], "One");
        assert_eq!(sequence["finish_reason"], "length");
        assert_eq!(
            -sequence["tokens"][0]["logprob"].as_f64().unwrap(),
            1.0 + (sequence["seed"].as_u64().unwrap() % 97) as f64
        );
    }
    let streamed = server.post("/generate_stream", &body).await;
    assert_eq!(streamed.status, 422, "{streamed:?}");
    assert!(streamed.json()["error"].as_str().unwrap().contains("best_of 4 cannot be streamed"));
}
