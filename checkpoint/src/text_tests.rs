use std::{fs, path::Path};

use serde_json::Value;

use super::*;
use crate::{Checkpoint, fixtures::fixture};

/// Complaints about the cases of a folder's `cases.json`, whatever built the tokenizer.
fn complaints(text: &TextSources, folder: &Path) -> Vec<String> {
    let cases = fs::read_to_string(folder.join("cases.json")).unwrap();
    let cases: Value = serde_json::from_str(&cases).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    // Libraries other than `tokenizers` take what spells a special token for text.
    let parses = cases["reference"].as_str().unwrap().starts_with("tokenizers ");
    let mut complaints = Vec::new();
    let mut checked = 0;
    for case in cases["cases"].as_array().unwrap() {
        let source = case["text"].as_str().unwrap();
        let mut complain = |key, found: String, expected: &Value| {
            complaints.push(format!("{} {key}: {found}, expected {expected}", case["name"]));
        };
        for (key, add_special, parse_special) in [
            ("ids", false, parses),
            ("ids_with_special", true, true),
            ("ids_with_bos", true, false),
            ("ids_specials_as_text", false, false),
            ("ids_special_parsed", false, true),
        ] {
            let Some(expected) = case.get(key) else { continue };
            let found = text.encode(source, add_special, parse_special).unwrap();
            if found != ids(expected) {
                complain(key, format!("{found:?}"), expected);
            }
            checked += 1;
        }
        let encoded = ids(&case["ids"]);
        for (key, skip) in [("decoded", false), ("decoded_skip_special", true)] {
            let Some(expected) = case.get(key) else { continue };
            let found = text.tokenizer.decode(&encoded, skip).unwrap();
            if found != expected.as_str().unwrap() {
                complain(key, found, expected);
            }
            checked += 1;
        }
    }
    // How many characters stand for broken bytes may differ between libraries.
    let one = |text: &str| text.split('\u{FFFD}').filter(|part| !part.is_empty()).count();
    for case in cases["id_sequences"].as_array().unwrap() {
        let (found, expected) =
            (text.tokenizer.decode(&ids(&case["ids"]), false), &case["decoded"]);
        let (found, expected) = (found.unwrap(), expected.as_str().unwrap());
        if one(&found) != one(expected) || found.chars().last() != expected.chars().last() {
            complaints.push(format!("{}: {found:?}, expected {expected:?}", case["name"]));
        }
    }
    assert!(checked > 70, "{}: only {checked} values were compared", folder.display());
    complaints
}

pub(crate) fn check_cases(text: &TextSources, name: &str) {
    let complaints = complaints(text, &fixture(&format!("tokenizers/{name}")));
    assert!(complaints.is_empty(), "{name}:\n{}", complaints.join("\n"));
}

#[test]
fn tokenizers_of_folders_match_the_reference() {
    for (name, vocab_size, special) in [
        ("smollm2", 49152, Some("<|im_start|>")),
        ("bpe-gemma", 512, Some("<bos>")),
        ("bpe-llama2", 512, Some("<s>")),
        ("bpe-llama3", 512, Some("<|begin_of_text|>")),
        ("bpe-qwen2", 512, None),
        ("bpe-smollm", 512, Some("<|im_start|>")),
        ("sentencepiece", 512, Some("<s>")),
        ("tekken", 1530, Some("<s>")),
        ("tiktoken", 856, Some("<|begin_of_text|>")),
        ("unigram", 620, Some("<s>")),
    ] {
        let folder = fixture(&format!("tokenizers/{name}"));
        let text = TextSources::from_folder(&folder, vocab_size).unwrap();
        check_cases(&text, name);
        assert_eq!(text.bos_token.as_deref(), special, "{name}");
        let error = TextSources::from_folder(&folder, vocab_size - 1).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("vocab_size"), "{error}");
    }
}

/// `TRIREME_TOKENIZERS` names a folder of more such folders than the repository can hold.
#[test]
fn further_tokenizers_match_the_reference() {
    let Some(root) = std::env::var_os("TRIREME_TOKENIZERS") else { return };
    let mut differing = 0;
    for folder in fs::read_dir(root).unwrap() {
        let folder = folder.unwrap().path();
        let text = TextSources::from_folder(&folder, 1 << 18).unwrap();
        let complaints = complaints(&text, &folder);
        println!("{}: {}", folder.display(), complaints.len());
        complaints.iter().take(5).for_each(|complaint| println!("{complaint}"));
        differing += complaints.len();
    }
    assert_eq!(differing, 0);
}

/// A copy of smollm-like's tokenizer folder with `files` written over it.
fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let source = fixture("models/smollm-like").join(name);
        fs::copy(source, folder.path().join(name)).unwrap();
    }
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
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
    let map = r#"{"eos_token": "</s>", "pad_token": "<pad>", "unk_token": {"content": "<unk>"}}"#;
    let folder = folder_with(&[
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", map),
        ("chat_template.jinja", "C"),
        ("additional_chat_templates/rag.jinja", "D"),
        ("additional_chat_templates/README.md", "no template"),
    ]);
    let text = TextSources::from_folder(folder.path(), 512).unwrap();
    assert_eq!((text.bos_token.as_deref(), text.eos_token), (Some("<s>"), None));
    let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    assert_eq!(text.chat_templates, pairs(&[("tool_use", "B"), ("default", "C"), ("rag", "D")]));
    assert_eq!(text.special_tokens, pairs(&[("unk_token", "<unk>"), ("pad_token", "<pad>")]));
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

/// A folder with another tokenizer's file under `name`, changed from its text by `change`.
fn folder_of(source: &str, name: &str, change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(fixture("tokenizers").join(source)).unwrap();
    fs::write(folder.path().join(name), change(text)).unwrap();
    folder
}

#[test]
fn formats_are_told_from_the_content() {
    for (source, name, vocab_size) in [
        ("tiktoken/tokenizer.model", "tokenizer.json", 856),
        ("tekken/tekken.json", "tokenizer.model.v11", 1530),
        ("bpe-llama2/tokenizer.json", "tekken.json", 512),
    ] {
        let folder = folder_of(source, name, |text| text);
        let text = TextSources::from_folder(folder.path(), vocab_size).unwrap();
        check_cases(&text, source.split('/').next().unwrap());
    }
}

#[test]
fn a_config_completes_formats_that_lack_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("tokenizers/sentencepiece/tokenizer.model");
    fs::copy(model, folder.path().join("tokenizer.model")).unwrap();
    let open = |config: &str| {
        fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        TextSources::from_folder(folder.path(), 520)
    };
    let framed = |config: &str| open(config).unwrap().encode("a", true, true).unwrap();
    assert_eq!(framed("{}").first(), Some(&1));
    assert_ne!(framed(r#"{"add_bos_token": false}"#).first(), Some(&1));
    assert_eq!(framed(r#"{"add_eos_token": true}"#).last(), Some(&2));
    let token = |id: u32, content: &str| {
        format!(
            r#"{{"added_tokens_decoder": {{"{id}": {{"content": "{content}", "lstrip": false,
            "rstrip": false, "single_word": false, "normalized": false, "special": true}}}}}}"#
        )
    };
    let added = open(&token(512, "<|user|>")).unwrap();
    assert!(added.encode("a<|user|>", false, true).unwrap().contains(&512));
    assert!(!added.encode("a<|user|>", false, false).unwrap().contains(&512));
    for (config, part) in [
        (token(513, "<|user|>"), "513"),
        (r#"{"added_tokens_decoder": []}"#.to_owned(), "added_tokens_decoder"),
        (r#"{"add_bos_token": 1}"#.to_owned(), "add_bos_token"),
    ] {
        let message = open(&config).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(part), "{config}: {message}");
    }
}

#[test]
fn llama3s_own_format_knows_its_ends_and_its_turns() {
    let text = TextSources::from_folder(&fixture("tokenizers/tiktoken"), 856).unwrap();
    assert_eq!(text.end_token_ids(), [601, 609]);
    assert_eq!(text.chat_templates.len(), 1);
    assert!(text.control_tokens().contains(&"<|reserved_special_token_250|>".to_owned()));
}

#[test]
fn damaged_tokenizers_are_refused() {
    let check = |folder: tempfile::TempDir, part: &str| {
        let message = TextSources::from_folder(folder.path(), 4096).map(|_| ()).unwrap_err();
        assert!(message.to_string().contains(part), "{part}: {message}");
    };
    let tiktoken = |change: fn(String) -> String, part| {
        check(folder_of("tiktoken/tokenizer.model", "tokenizer.model", change), part);
    };
    tiktoken(|text| text.replace(" 17\n", " 18\n"), "line 18");
    tiktoken(|text| text.replace("EQ== 17\n", "AA== 17\n"), "a token twice");
    tiktoken(|text| text.lines().take(9).collect::<Vec<_>>().join("\n"), "no token for the byte 9");
    tiktoken(|_| "%%% 0".to_owned(), "neither");
    tiktoken(|_| "\nabc".to_owned(), "sentencepiece model");
    let tekken = |change: fn(String) -> String, part| {
        check(folder_of("tekken/tekken.json", "tekken.json", change), part);
    };
    tekken(|text| text.replace("\"rank\": 7,", "\"rank\": 8,"), "vocab[7]");
    tekken(|text| text.replace("1530", "15300"), "default_vocab_size");
    tekken(
        |text| text.replace("special_tokens\": 30", "special_tokens\": 3"),
        "special_tokens is 3",
    );
    tekken(|text| text.replace("[^\\\\r", "([^\\\\r"), "tekken.json");
    tekken(|text| text[..5000].to_owned(), "Tekken vocabulary");
    check(tempfile::tempdir().unwrap(), "looked for tokenizer.json, tekken.json");
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
