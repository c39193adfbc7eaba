//! `expected.json` of the fixtures.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

pub struct Expected {
    pub prompts: Vec<Prompt>,
}

pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    pub last_logits: Vec<f64>,
    /// Entry 0 is not a number.
    pub token_logprobs: Vec<f64>,
    /// For the position after each token, the likeliest tokens with their logprobs; may be absent.
    pub top: Vec<Vec<(u32, f64)>>,
    pub greedy_ids: Vec<u32>,
    pub greedy_logprobs: Vec<f64>,
}

impl Expected {
    /// The numbers of a checkpoint folder or file: its own, or those its fixture.json points to.
    pub fn beside(checkpoint: &Path) -> Self {
        let folder = if checkpoint.is_dir() {
            checkpoint
        } else {
            checkpoint.parent().expect("a file is in a folder")
        };
        let own = folder.join("expected.json");
        if own.exists() {
            return Self::read(&own);
        }
        let fixture = read(&folder.join("fixture.json"));
        Self::read(&folder.join(fixture["expected"].as_str().expect("expected: a path")))
    }

    /// The model whose values a format's folder holds, if it holds a model's.
    pub fn source(folder: &Path) -> Option<PathBuf> {
        let fixture = read(&folder.join("fixture.json"));
        let expected = folder.join(fixture["expected"].as_str().expect("expected: a path"));
        let model = expected.parent().expect("a file is in a folder");
        (model != folder).then(|| model.to_owned())
    }

    pub fn read(path: &Path) -> Self {
        let value = read(path);
        let prompts = value["prompts"].as_array().expect("prompts");
        Self { prompts: prompts.iter().map(prompt).collect() }
    }
}

fn read(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn prompt(value: &Value) -> Prompt {
    Prompt {
        name: value["name"].as_str().expect("name").to_owned(),
        ids: ids(&value["ids"]),
        last_logits: value.get("last_logits").map(numbers).unwrap_or_default(),
        token_logprobs: numbers(&value["token_logprobs"]),
        top: value.get("top5").map(top).unwrap_or_default(),
        greedy_ids: ids(&value["greedy"]["ids"]),
        greedy_logprobs: numbers(&value["greedy"]["logprobs"]),
    }
}

fn top(value: &Value) -> Vec<Vec<(u32, f64)>> {
    serde_json::from_value(value.clone()).expect("top5: lists of [id, logprob]")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().expect("numbers").iter();
    numbers.map(|number| number.as_f64().unwrap_or(f64::NAN)).collect()
}
