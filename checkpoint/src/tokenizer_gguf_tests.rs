use std::{fs, path::Path};

use tokenizers::Tokenizer;

use super::*;
use crate::{
    Checkpoint,
    fixtures::{fixture, own_fixture},
    gguf_metadata::Value,
    text::tests::check_cases,
};

#[test]
fn tokenizers_of_gguf_files_match_the_reference() {
    for (file, cases, bos, eos) in [
        ("formats/gguf-f16", "bpe-llama3", "<|begin_of_text|>", "<|end_of_text|>"),
        ("formats/gguf-f16-smollm", "bpe-smollm", "<|im_start|>", "<|im_end|>"),
    ] {
        let checkpoint = Checkpoint::open(&fixture(file)).unwrap();
        let text = checkpoint.text().unwrap();
        check_cases(&text, cases);
        assert_eq!(text.bos_token.as_deref(), Some(bos));
        assert_eq!(text.eos_token.as_deref(), Some(eos));
        assert_eq!(text.chat_templates.len(), 1);
    }
}

/// The metadata that a converter writes for a byte-level tokenizer of another format.
fn converted(name: &str, pre: &str) -> Metadata {
    let folder = fixture(&format!("tokenizers/{name}"));
    let source = TextSources::from_folder(&folder, 1 << 18).unwrap().tokenizer;
    let model = serde_json::to_value(source.get_model()).unwrap();
    let mut tokens: Vec<(u32, String)> =
        source.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    assert!(tokens.iter().zip(0..).all(|((id, _), place)| *id == place), "ids without gaps");
    let added = source.get_added_tokens_decoder();
    let kind = |id: &u32| match added.get(id) {
        Some(token) if token.special => 3,
        Some(_) => 4,
        None => 1,
    };
    let kinds = tokens.iter().map(|(id, _)| kind(id)).collect();
    let merge = |merge: &serde_json::Value| {
        format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap())
    };
    let merges = model["merges"].as_array().unwrap().iter().map(merge).collect();
    let mut metadata = Metadata::new(Path::new("model.gguf"));
    for (key, value) in [
        (MODEL, Value::Text("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Value::Text(pre.to_owned())),
        (TOKENS, Value::Texts(tokens.into_iter().map(|(_, token)| token).collect())),
        (TYPES, Value::Integers(kinds)),
        ("tokenizer.ggml.merges", Value::Texts(merges)),
        ("tokenizer.ggml.bos_token_id", Value::Integer(1)),
    ] {
        assert!(!metadata.insert(key.to_owned(), value));
    }
    metadata
}

#[test]
fn pre_tokenizers_match_the_reference() {
    for (name, pre) in [
        ("bpe-qwen2", "qwen2"),
        ("bpe-smollm", "smollm"),
        ("bpe-llama3", "llama-bpe"),
        ("tekken", "tekken"),
        ("smollm2", "smollm"),
    ] {
        let mut metadata = converted(name, pre);
        if name == "bpe-llama3" {
            metadata.insert("tokenizer.ggml.bos_token_id".to_owned(), Value::Integer(500));
        }
        check_cases(&from_metadata(&metadata, 1 << 17).unwrap(), name);
    }
}

#[derive(serde::Deserialize)]
struct Sentencepiece {
    tokens: Vec<String>,
    scores: Vec<f64>,
    kinds: Vec<i64>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

fn sentencepiece() -> Sentencepiece {
    let text = fs::read_to_string(own_fixture("sentencepiece.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Metadata of a small file, with `changes` made; none removes a key.
fn metadata(changes: &[(&str, Option<Value>)]) -> Metadata {
    let Sentencepiece { tokens, scores, kinds, .. } = sentencepiece();
    let mut values = vec![
        (MODEL, Value::Text("llama".to_owned())),
        (TOKENS, Value::Texts(tokens)),
        (TYPES, Value::Integers(kinds)),
        ("tokenizer.ggml.scores", Value::Floats(scores)),
        ("tokenizer.ggml.bos_token_id", Value::Integer(1)),
        ("tokenizer.ggml.eos_token_id", Value::Integer(2)),
    ];
    for (key, value) in changes {
        values.retain(|(other, _)| other != key);
        values.extend(value.clone().map(|value| (*key, value)));
    }
    let mut metadata = Metadata::new(Path::new("model.gguf"));
    for (key, value) in values {
        assert!(!metadata.insert(key.to_owned(), value));
    }
    metadata
}

fn ids(tokenizer: &Tokenizer, text: &str, add_special: bool) -> Vec<u32> {
    tokenizer.encode_fast(text, add_special).unwrap().get_ids().to_vec()
}

#[test]
fn sentencepiece_vocabularies_give_its_ids() {
    let text = from_metadata(&metadata(&[]), 600).unwrap();
    for Case { text: source, ids: expected, decoded } in sentencepiece().cases {
        let found = text.encode(&source, false, true).unwrap();
        assert_eq!(found, expected, "{source:?}");
        assert_eq!(text.tokenizer.decode(&found, true).unwrap(), decoded);
        let framed = text.encode(&source, true, true).unwrap();
        assert_eq!(framed, [&[1], expected.as_slice()].concat(), "a begin token is the default");
    }
    let hello = ids(&text.tokenizer, "Hello world", false);
    let special = [hello.clone(), vec![2]].concat();
    assert_eq!(text.encode("Hello world</s>", false, true).unwrap(), special);
    let plain = text.encode("Hello world</s>", false, false).unwrap();
    assert!(plain.starts_with(&hello[..hello.len() - 1]) && !plain.contains(&2), "{plain:?}");
}

#[test]
fn switches_are_honoured() {
    for (changes, expected) in [
        (&[][..], [true, false]),
        (&[("tokenizer.ggml.add_bos_token", Some(Value::Bool(false)))][..], [false, false]),
        (&[("tokenizer.ggml.add_eos_token", Some(Value::Bool(true)))][..], [true, true]),
        (&[("tokenizer.ggml.bos_token_id", None)][..], [false, false]),
    ] {
        let text = from_metadata(&metadata(changes), 600).unwrap();
        let found = ids(&text.tokenizer, "Hello", true);
        let ends = [found.first() == Some(&1), found.last() == Some(&2)];
        assert_eq!(ends, expected, "{changes:?}");
    }
    let no_prefix = ("tokenizer.ggml.add_space_prefix", Some(Value::Bool(false)));
    let text = from_metadata(&metadata(&[no_prefix]), 600).unwrap();
    let found = ids(&text.tokenizer, " Hello", false);
    let default = from_metadata(&metadata(&[]), 600).unwrap();
    assert_eq!(found, ids(&default.tokenizer, "Hello", false));
    assert_eq!(text.tokenizer.decode(&found, true).unwrap(), " Hello");

    let source = |text: &str| Some(Value::Text(text.to_owned()));
    let names = Some(Value::Texts(vec!["tool_use".to_owned()]));
    let templates = [
        ("tokenizer.chat_template", source("A")),
        ("tokenizer.chat_templates", names),
        ("tokenizer.chat_template.tool_use", source("B")),
    ];
    let text = from_metadata(&metadata(&templates), 600).unwrap();
    let expected = [("default", "A"), ("tool_use", "B")];
    let expected = expected.map(|(name, source)| (name.to_owned(), source.to_owned()));
    assert_eq!(text.chat_templates, expected);
}

#[test]
fn bad_tokenizer_metadata_is_refused() {
    let text = |text: &str| Some(Value::Text(text.to_owned()));
    let texts = |list: &[&str]| Some(Value::Texts(list.iter().map(|&s| s.to_owned()).collect()));
    let two_scores = ("tokenizer.ggml.scores", Some(Value::Floats(vec![0.0; 2])));
    let bytes = |key: &'static str, value| [(MODEL, text("gpt2")), (key, value)];
    for (changes, parts) in [
        (vec![(MODEL, None)], [MODEL, "tokenizer"]),
        (vec![(MODEL, text("bert"))], [MODEL, "bert"]),
        (vec![(TOKENS, None)], [TOKENS, "nothing"]),
        (vec![(TOKENS, text("a"))], [TOKENS, "list of texts"]),
        (vec![(TYPES, Some(Value::Integers(vec![1])))], [TYPES, "600"]),
        (vec![(TYPES, Some(Value::Integers(vec![7; 600])))], [TYPES, "7"]),
        (vec![("tokenizer.ggml.scores", None)], ["tokenizer.ggml.scores", "nothing"]),
        (vec![("tokenizer.ggml.bos_token_id", Some(Value::Integer(600)))], ["bos_token_id", "600"]),
        (vec![(TYPES, None), (TOKENS, texts(&["a", "a"])), two_scores], ["model.gguf", "twice"]),
        (bytes("tokenizer.ggml.pre", text("frob")).to_vec(), ["tokenizer.ggml.pre", "frob"]),
        (bytes("tokenizer.ggml.merges", None).to_vec(), ["tokenizer.ggml.merges", "nothing"]),
        (bytes("tokenizer.ggml.merges", texts(&["ab"])).to_vec(), ["tokenizer.ggml.merges", "ab"]),
        (bytes("tokenizer.ggml.merges", texts(&["qqq zzz"])).to_vec(), ["model.gguf", "qqq"]),
        (
            vec![("tokenizer.chat_templates", texts(&["x"]))],
            ["tokenizer.chat_template.x", "nothing"],
        ),
    ] {
        let result = from_metadata(&metadata(&changes), 600).map(|_| ());
        let message = result.expect_err(parts[1]).to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    }
    let result = from_metadata(&metadata(&[]), 599).map(|_| ());
    assert!(result.unwrap_err().to_string().contains("vocab_size is 599"));
}
