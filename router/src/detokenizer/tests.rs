use std::{fs, path::PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;

use super::*;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures")
}

fn decoder(tokenizer: Tokenizer) -> Arc<TextDecoder> {
    let size = tokenizer.get_vocab_size(true);
    Arc::new(TextDecoder::new(TextSources::new(tokenizer, size)))
}

/// The pieces that come out, the last of which is what was held back.
fn stream(decoder: &Arc<TextDecoder>, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(decoder.clone(), skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
    pieces.push(detokenizer.finish());
    pieces
}

/// Pieces join to the text of all ids, and none shows a broken character that the text has not.
fn check(decoder: &Arc<TextDecoder>, ids: &[u32], expect: &str, name: &str) {
    let pieces = stream(decoder, ids, false);
    assert_eq!(pieces.concat(), expect, "{name}: {pieces:?}");
    let count = |text: &str| text.matches(REPLACEMENT).count();
    let broken: usize = pieces.iter().map(|piece| count(piece)).sum();
    assert_eq!(broken, count(expect), "{name}");
    let skipped = stream(decoder, ids, true).concat();
    let whole = decoder.sources.tokenizer.decode(ids, true).unwrap();
    assert_eq!(skipped, whole, "{name} without special tokens");
}

fn ids_of(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn streams_what_the_reference_decodes() {
    let mut cases = 0;
    for folder in fs::read_dir(fixtures().join("tokenizers")).unwrap() {
        let folder = folder.unwrap().path();
        if !folder.join("tokenizer.json").exists() {
            continue;
        }
        let decoder = decoder(Tokenizer::from_file(folder.join("tokenizer.json")).unwrap());
        let golden = fs::read(folder.join("cases.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let Some(decoded) = case["decoded"].as_str() else { continue };
            let name = format!("{} {}", folder.display(), case["name"]);
            check(&decoder, &ids_of(&case["ids"]), decoded, &name);
            cases += 1;
        }
        for case in golden["id_sequences"].as_array().into_iter().flatten() {
            let ids = ids_of(&case["ids"]);
            let whole = decoder.sources.tokenizer.decode(&ids, false).unwrap();
            check(&decoder, &ids, &whole, &format!("{} {case}", folder.display()));
            cases += 1;
        }
    }
    assert!(cases > 50, "{cases} cases");
}

/// A tokenizer of the sentencepiece kind: `▁` for spaces, bytes spelled, first space stripped.
fn sentencepiece_like() -> Arc<TextDecoder> {
    let mut vocab = serde_json::Map::new();
    for token in ["<unk>", "<s>", "</s>", "▁", "▁a", "b", "▁é", "!"] {
        vocab.insert(token.to_owned(), vocab.len().into());
    }
    for byte in 0..=255_u8 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    let special = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let json = serde_json::json!({
        "version": "1.0",
        "added_tokens": [special(1, "<s>"), special(2, "</s>")],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>",
            "byte_fallback": true}
    });
    decoder(Tokenizer::from_bytes(json.to_string()).unwrap())
}

#[test]
fn keeps_spaces_and_joins_spelled_bytes() {
    let decoder = sentencepiece_like();
    let byte = |byte: u8| 8 + u32::from(byte);
    let snow: Vec<u32> = "雪".bytes().map(byte).collect();
    let check = |ids: &[u32], expect: &str| check(&decoder, ids, expect, &format!("{ids:?}"));
    check(&[4, 5, 4], "ab a");
    check(&[3, 4, 4], " a a");
    check(&[4, 2, 4, 6], "a</s> a é");
    check(&[4, snow[0], snow[1], snow[2], 7], "a雪!");
    check(&[snow[0], snow[1], 4], "\u{FFFD}\u{FFFD} a");
    check(&[4, snow[0], snow[1]], "a\u{FFFD}\u{FFFD}");
    check(&[4, byte(0xF0), 5, byte(0x9F)], "a\u{FFFD}b\u{FFFD}");
}

#[test]
fn a_special_token_does_not_eat_the_space_after_it() {
    let decoder = sentencepiece_like();
    assert_eq!(stream(&decoder, &[4, 2, 4], true), ["a", "", " a", ""]);
}

/// Every way of cutting some awkward bytes into ids: as `String::from_utf8_lossy` reads them whole.
#[test]
fn bytes_are_replaced_as_in_one_go() {
    let texts: [&[u8]; 7] = [
        "a😀é雪".as_bytes(),
        b"\xF0\x9F\x98",
        b"\xF0\x9F\x98a\xE9",
        b"\xFF\xFE\x80\x80",
        b"\xE2\x82\xE2\x82\xAC",
        b"\xED\xA0\x80\xED\xB0\x80",
        b"\xC0\xAF\xF5\x90\x80\x80\xF4",
    ];
    for bytes in texts {
        for cuts in 0..1_u32 << (bytes.len() - 1) {
            let mut pending = Vec::new();
            let mut text = String::new();
            for (at, byte) in bytes.iter().enumerate() {
                pending.push(*byte);
                if cuts >> at & 1 == 1 {
                    text.push_str(&take_whole_characters(&mut pending));
                    assert!(pending.len() < 4);
                }
            }
            text.push_str(&take_whole_characters(&mut pending));
            text.push_str(&String::from_utf8_lossy(&pending));
            assert_eq!(text, String::from_utf8_lossy(bytes), "{bytes:?} cut by {cuts:b}");
        }
    }
}
