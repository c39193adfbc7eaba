//! Where the reference fixtures are, and what they expect.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// A path below `integration-tests/fixtures`.
pub fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(relative)
}

/// A JSON fixture.
pub fn json<T: serde::de::DeserializeOwned>(relative: &str) -> T {
    let path = path(relative);
    let text = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("read fixture {}: {error}", path.display()));
    serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("parse fixture {}: {error}", path.display()))
}

/// The real model of the goldens. `make test` fetches it and sets the variable.
///
/// Panics without it: a test that needs the model must not pass by skipping.
pub fn smollm2() -> PathBuf {
    let path = std::env::var_os("TRIREME_SMOLLM2").expect(
        "TRIREME_SMOLLM2 is not set: run `make test`, or set it to `trireme where smollm2`",
    );
    PathBuf::from(path)
}

/// Expected values of one model (`expected.json`, `smollm2/generation.json`).
#[derive(Debug, Deserialize)]
pub struct Expected {
    pub vocab_size: u32,
    pub eos_token_ids: Vec<u32>,
    pub prompts: Vec<ExpectedPrompt>,
    #[serde(default)]
    pub texts: Vec<ExpectedText>,
}

#[derive(Debug, Deserialize)]
pub struct ExpectedPrompt {
    pub name: String,
    pub ids: Vec<u32>,
    pub greedy: ExpectedGreedy,
}

#[derive(Debug, Deserialize)]
pub struct ExpectedText {
    pub name: String,
    #[serde(default)]
    pub text: Option<String>,
    #[serde(default)]
    pub messages: Option<serde_json::Value>,
    pub ids: Vec<u32>,
    pub greedy: ExpectedGreedy,
    #[serde(default)]
    pub greedy_text: Option<String>,
}

/// A greedy continuation that ignores end-of-sequence ids.
#[derive(Debug, Deserialize)]
pub struct ExpectedGreedy {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f64>,
    pub margins: Vec<f64>,
}
