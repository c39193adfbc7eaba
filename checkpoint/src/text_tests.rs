use std::fs;

use super::*;
use crate::{Checkpoint, fixtures::fixture};

/// Every case of a fixture's `cases.json`, whatever built the tokenizer.
pub(crate) fn check_cases(text: &TextSources, name: &str) {
    let path = fixture(&format!("tokenizers/{name}/cases.json"));
    let cases: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let mut checked = 0;
    for case in cases["cases"].as_array().unwrap() {
        let source = case["text"].as_str().unwrap();
        let what = format!("{name}: {}", case["name"]);
        for (key, add_special, parse_special) in [
            ("ids", false, true),
            ("ids_with_special", true, true),
            ("ids_specials_as_text", false, false),
        ] {
            let Some(expected) = case.get(key) else { continue };
            let found = text.encode(source, add_special, parse_special).unwrap();
            assert_eq!(found, ids(expected), "{what}, {key}");
            checked += 1;
        }
        let encoded = ids(&case["ids"]);
        for (key, skip) in [("decoded", false), ("decoded_skip_special", true)] {
            let Some(expected) = case.get(key) else { continue };
            let found = text.tokenizer.decode(&encoded, skip).unwrap();
            assert_eq!(found, expected.as_str().unwrap(), "{what}, {key}");
            checked += 1;
        }
    }
    assert!(checked > 90, "{name}: only {checked} values were compared");
}

#[test]
fn tokenizers_of_folders_match_the_reference() {
    for (name, vocab_size, special) in [
        ("smollm2", 49152, Some("<|im_start|>")),
        ("bpe-llama3", 512, Some("<|begin_of_text|>")),
        ("bpe-smollm", 512, Some("<|im_start|>")),
    ] {
        let text = TextSources::from_folder(&fixture(&format!("tokenizers/{name}")), vocab_size);
        let text = text.unwrap();
        check_cases(&text, name);
        assert_eq!(text.bos_token.as_deref(), special, "{name}");
    }
}

/// A copy of smollm-like's tokenizer folder with `files` written over it.
fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let source = fixture("models/smollm-like").join(name);
        fs::copy(source, folder.path().join(name)).unwrap();
    }
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

#[test]
fn templates_and_tokens_are_read_in_every_spelling() {
    let checkpoint = Checkpoint::open(&fixture("models/smollm-like")).unwrap();
    let text = checkpoint.text().unwrap();
    assert_eq!(text.eos_token.as_deref(), Some("<|im_end|>"));
    assert_eq!(text.chat_templates.len(), 1);
    assert_eq!(text.chat_templates[0].0, "default");

    let config = r#"{"bos_token": {"content": "<s>"}, "eos_token": null, "chat_template":
        [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}"#;
    let template = ("chat_template.jinja", "C");
    let folder = folder_with(&[("tokenizer_config.json", config), template]);
    let text = TextSources::from_folder(folder.path(), 512).unwrap();
    assert_eq!((text.bos_token.as_deref(), text.eos_token), (Some("<s>"), None));
    let expected = [("tool_use", "B"), ("default", "C")];
    let expected = expected.map(|(name, source)| (name.to_owned(), source.to_owned()));
    assert_eq!(text.chat_templates, expected);
}

#[test]
fn bad_text_files_are_refused() {
    for (file, content, parts) in [
        ("tokenizer.json", "{", &["tokenizer.json"][..]),
        ("tokenizer.json", "{}", &["tokenizer.json"]),
        ("tokenizer_config.json", "[]", &["tokenizer_config.json", "JSON object"]),
        ("tokenizer_config.json", r#"{"bos_token": 3}"#, &["bos_token", "3"]),
        ("tokenizer_config.json", r#"{"chat_template": 3}"#, &["chat_template", "3"]),
        ("tokenizer_config.json", r#"{"chat_template": [{"name": "x"}]}"#, &["chat_template", "x"]),
    ] {
        let folder = folder_with(&[(file, content)]);
        let result = TextSources::from_folder(folder.path(), 512);
        let message = result.map(|_| ()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{content}: {message}");
    }
}

/// Long runs are where cutting by regular expressions and merging could stall or lose text.
#[test]
fn long_runs_come_back_whole() {
    for name in ["smollm2", "bpe-llama3"] {
        let folder = fixture(&format!("tokenizers/{name}"));
        let text = TextSources::from_folder(&folder, 49152).unwrap();
        for piece in [" ", "\n", " \n", "a", "!", "7", "é", " x", "<|im_end|>", "<|"] {
            let source = piece.repeat(30_000);
            for parse_special in [false, true] {
                let ids = text.encode(&source, false, parse_special).unwrap();
                let decoded = text.tokenizer.decode(&ids, false).unwrap();
                assert!(decoded == source, "{name}: {piece:?} x 30000");
            }
        }
    }
}
