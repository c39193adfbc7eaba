use std::{fs, path::PathBuf};

use rand::{Rng, SeedableRng, rngs::StdRng};
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
    let skipped = stream(decoder, ids, true).concat();
    let whole = decoder.sources.tokenizer.decode(ids, true).unwrap();
    assert_eq!(skipped, whole, "{name} without special tokens");
}

fn ids_of(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Every tokenizer of the fixtures, in whatever format.
fn every_tokenizer() -> Vec<(PathBuf, Arc<TextDecoder>)> {
    let folders = fs::read_dir(fixtures().join("tokenizers")).unwrap();
    let folders = folders.map(|folder| folder.unwrap().path());
    let open = |folder: PathBuf| {
        let sources = TextSources::from_folder(&folder, 1 << 17).unwrap();
        (folder, Arc::new(TextDecoder::new(sources)))
    };
    let all: Vec<_> = folders.map(open).collect();
    assert!(all.len() >= 10);
    all
}

#[test]
fn streams_what_the_reference_decodes() {
    for (folder, decoder) in every_tokenizer() {
        let golden = fs::read(folder.join("cases.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() > 30);
        for case in cases {
            let name = format!("{} {}", folder.display(), case["name"]);
            check(&decoder, &ids_of(&case["ids"]), case["decoded"].as_str().unwrap(), &name);
        }
        for case in golden["id_sequences"].as_array().unwrap() {
            let (ids, decoded) = (ids_of(&case["ids"]), case["decoded"].as_str().unwrap());
            check(&decoder, &ids, decoded, &format!("{} {case}", folder.display()));
        }
    }
}

/// Text of awkward characters and of the tokenizer's own spellings.
fn random_text(random: &mut StdRng, control: &[String]) -> String {
    const PARTS: [&str; 16] = [
        " ",
        "  ",
        "\n",
        "\t",
        "a",
        "the",
        "é",
        "e\u{301}",
        "雪",
        "🍕",
        "👩\u{200D}🚀",
        "1",
        "!",
        "▁",
        "<0x0A>",
        "\u{FFFD}",
    ];
    let mut text = String::new();
    for _ in 0..random.random_range(0..40) {
        match random.random_range(0..10) {
            0 if !control.is_empty() => text += &control[random.random_range(0..control.len())],
            1..=3 => text.extend(char::from_u32(random.random_range(0..0x11_0000))),
            _ => text += PARTS[random.random_range(0..PARTS.len())],
        }
    }
    text
}

/// SmolLM2's vocabulary, for one, lacks some bytes, and texts with them do not come back.
fn knows_all_bytes(decoder: &TextDecoder) -> bool {
    let ids = 0..decoder.vocabulary.size();
    let single = ids.filter_map(|id| match decoder.vocabulary.bytes(id) {
        [byte] => Some(*byte),
        _ => None,
    });
    decoder.vocabulary.joining() == Joining::Bytes
        && single.collect::<std::collections::HashSet<u8>>().len() == 256
}

/// Streamed or whole, with and without special tokens, and cut anywhere: the same text.
#[test]
fn random_texts_stream_as_they_decode() {
    for (folder, decoder) in every_tokenizer() {
        let mut random = StdRng::seed_from_u64(7);
        let control = decoder.sources.control_tokens();
        for round in 0..200 {
            let text = random_text(&mut random, &control);
            let parse_special = round % 2 == 0;
            let ids = decoder.sources.encode(&text, false, parse_special).unwrap();
            let whole = decoder.sources.tokenizer.decode(&ids, false).unwrap();
            check(&decoder, &ids, &whole, &format!("{} {text:?}", folder.display()));
            if knows_all_bytes(&decoder) && !parse_special {
                let composed = decoder.sources.tokenizer.get_normalizer().is_some();
                assert!(composed || whole == text, "{} {text:?}: {whole:?}", folder.display());
            }
            let known = decoder.vocabulary.size();
            let any: Vec<u32> = (0..30).map(|_| random.random_range(0..known + 2)).collect();
            check_any(&decoder, &any, &folder.display().to_string());
        }
    }
}

/// Any ids, be they what no text encodes to: pieces are whole characters, and what decoding takes
/// for broken as a whole is broken in part at most.
fn check_any(decoder: &Arc<TextDecoder>, ids: &[u32], name: &str) {
    let streamed = stream(decoder, ids, false).concat();
    let whole = decoder.sources.tokenizer.decode(ids, false).unwrap();
    if decoder.vocabulary.joining() == Joining::Bytes {
        assert_eq!(streamed, whole, "{name}: {ids:?}");
    }
    let broken = |text: &str| text.matches(REPLACEMENT).count();
    assert!(broken(&streamed) <= broken(&whole), "{name}: {ids:?}: {streamed:?}, {whole:?}");
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
    // A whole character stays one before bytes that are none, as in sentencepiece itself.
    let cut = [4, snow[0], snow[1], snow[2], snow[0], snow[1]];
    assert_eq!(stream(&decoder, &cut, false).concat(), "a雪\u{FFFD}\u{FFFD}");
}

/// A decoder that only the tokenizer knows how to run.
#[test]
fn a_window_keeps_what_depends_on_neighbours() {
    let json = serde_json::json!({
        "version": "1.0",
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "▁a": 1, "b": 2, "▁": 3, "é": 4}}
    });
    let decoder = decoder(Tokenizer::from_bytes(json.to_string()).unwrap());
    assert_eq!(decoder.vocabulary.joining(), Joining::Unknown);
    for ids in [&[1, 2, 1][..], &[3, 1, 4, 3, 3, 2], &[2, 1], &[1, 99, 1], &[]] {
        let whole = decoder.sources.tokenizer.decode(ids, false).unwrap();
        check(&decoder, ids, &whole, &format!("{ids:?}"));
    }
}

#[test]
fn a_special_token_does_not_eat_the_space_after_it() {
    let decoder = sentencepiece_like();
    assert_eq!(stream(&decoder, &[4, 2, 4], true), ["a", "", " a", ""]);
    assert_eq!(stream(&decoder, &[2, 4, 4], true), ["", "a", " a", ""]);
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
                    text.push_str(&take_whole_characters(&mut pending, Broken::ByCharacter));
                    assert!(pending.len() < 4);
                }
            }
            text.push_str(&take_whole_characters(&mut pending, Broken::ByCharacter));
            text.push_str(&String::from_utf8_lossy(&pending));
            assert_eq!(text, String::from_utf8_lossy(bytes), "{bytes:?} cut by {cuts:b}");
        }
    }
}
