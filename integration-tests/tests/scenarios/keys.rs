//! A server with a key: who may call, and which process knows the key.

use anyhow::Result;
use serde_json::json;
use trireme_integration_tests::{
    fixture,
    process::Process,
    server::{Server, ServerOptions},
};

const KEY: &str = "open-sesame-7";

/// Whether the key stands in the environment or on the command line that a process was started with.
fn knows_key(process: &Process) -> Result<bool> {
    let environment = std::fs::read(format!("/proc/{}/environ", process.pid))?;
    let has_key = |bytes: &[u8]| bytes.windows(KEY.len()).any(|part| part == KEY.as_bytes());
    assert!(!process.argv.iter().any(|word| has_key(word.as_bytes())), "{:?}", process.argv);
    Ok(has_key(&environment))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_the_environment_guards_and_reaches_the_router_alone() -> Result<()> {
    let mut options = ServerOptions::new(fixture::path("models/smollm-like"));
    options.env.push(("TRIREME_API_KEY".to_owned(), KEY.to_owned()));
    let server = Server::start(&options)?;
    let client = server.client();
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &body).await?.status, 401);
    let bearer = format!("Bearer {KEY}");
    let shown = [("authorization", bearer.as_str())];
    client.post_with("/v1/completions", &shown, &body).await?.ok();
    assert_eq!(client.get("/ready").await?.status, 200);
    assert!(knows_key(&server.router())?);
    for shard in server.shards() {
        assert!(!knows_key(&shard)?, "a shard needs no key");
    }
    assert!(!server.log().contains(KEY));
    Ok(())
}
