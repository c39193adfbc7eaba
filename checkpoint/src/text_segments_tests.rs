use tokenizers::{
    AddedToken,
    models::bpe::{BPE, Vocab},
    pre_tokenizers::metaspace::{Metaspace, PrependScheme},
};

use super::*;
use crate::fixtures::fixture;

fn text(content: &str) -> Segment {
    Segment::Text(content.to_owned())
}

fn special(content: &str) -> Segment {
    Segment::Special(content.to_owned())
}

const FOLDERS: [&str; 10] = [
    "smollm2",
    "bpe-gemma",
    "bpe-llama2",
    "bpe-llama3",
    "bpe-qwen2",
    "bpe-smollm",
    "sentencepiece",
    "tekken",
    "tiktoken",
    "unigram",
];

/// The whole's ids where no text spells a control token, and the special token's id once for each
/// that is meant, whatever the texts spell.
#[test]
fn segments_are_encoded_as_one_text() {
    for name in FOLDERS {
        let folder = fixture(&format!("tokenizers/{name}"));
        let sources = TextSources::from_folder(&folder, 1 << 18).unwrap();
        let control = sources.control_tokens();
        let token = control.iter().min_by_key(|token| token.len()).unwrap();
        let id = sources.tokenizer.token_to_id(token).unwrap();
        for parts in [
            ["Hello", " world\n", "!"],
            [" a", "b ", "  "],
            ["", "\n\n", "\u{100000}é"],
            ["user", "雪 x", "\u{100000}\u{100001}"],
        ] {
            let [a, b, c] = parts;
            let segments = [text(a), special(token), text(b), special(token), text(c)];
            let whole = sources.encode(&format!("{a}{token}{b}{token}{c}"), false, true).unwrap();
            assert_eq!(sources.encode_segments(&segments).unwrap(), whole, "{name} {parts:?}");
            let spelling =
                [text(a), text(token), special(token), text(&format!("{b}{token}")), text(c)];
            let ids = sources.encode_segments(&spelling).unwrap();
            assert_eq!(ids.iter().filter(|found| **found == id).count(), 1, "{name} {parts:?}");
            let cut = [
                text(a),
                text(&token[..1]),
                text(&token[1..]),
                special(token),
                text(&format!("{b}{token}{c}")),
            ];
            assert_eq!(sources.encode_segments(&cut).unwrap(), ids, "{name} {parts:?}");
        }
    }
}

/// A word, `<x>` as a special token whose id leaves a gap, `<t>` as one that is text, and what
/// `refine` makes of `<x>`.
fn words(refine: impl FnOnce(AddedToken) -> AddedToken) -> TextSources {
    let tokens = ["▁", "a", "<", "x", ">", "t", "▁a", "<|u|>"];
    let mut vocab: Vec<(String, u32)> =
        tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
    vocab.push(("<x>".to_owned(), 12));
    let vocab: Vocab = vocab.into_iter().collect();
    let merges = vec![("▁".to_owned(), "a".to_owned())];
    let model = BPE::builder().vocab_and_merges(vocab, merges).build().unwrap();
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::First, false)));
    let token = refine(AddedToken::from("<x>", true));
    let plain = AddedToken::from("<t>", false).normalized(false);
    let role = AddedToken::from("<|u|>", false).normalized(false);
    tokenizer.add_tokens([token, plain, role]).unwrap();
    TextSources::new(tokenizer, 16)
}

#[test]
fn borders_and_flags_are_those_of_the_whole_text() {
    let check = |sources: &TextSources, segments: &[Segment], expected: &[u32]| {
        assert_eq!(sources.encode_segments(segments).unwrap(), expected, "{segments:?}");
    };
    let plain = words(|token| token);
    let added = plain.tokenizer.token_to_id("<t>").unwrap();
    // A first piece alone gets the leading space; ids behind a gap are not mistaken.
    check(&plain, &[text("a"), special("<x>"), text("a")], &[6, 12, 1]);
    check(&plain, &[special("<x>"), text("a a")], &[12, 1, 6]);
    check(&plain, &[text("a<t>"), special("<x>")], &[6, added, 12]);
    // What spells a special token, or has its form, is text; what spells another token is not.
    check(&plain, &[text("a<x><t>"), special("<x>")], &[6, 2, 3, 4, added, 12]);
    assert!(plain.control_tokens().contains(&"<|u|>".to_owned()));
    check(&plain, &[special("<|u|>"), text("a")], &[7, 1]);
    let ids = plain.encode_segments(&[text("a<|u|>")]).unwrap();
    assert!(!ids.contains(&7), "{ids:?}");
    let strips = words(|token| token.lstrip(true).rstrip(true));
    check(&strips, &[text("a "), special("<x>"), text("  a")], &[6, 12, 1]);
}

#[test]
fn a_text_of_every_private_character_is_refused() {
    let all: String = LEADS.collect();
    let error = words(|token| token).encode_segments(&[text(&all), special("<x>")]).unwrap_err();
    assert!(error.to_string().contains("private-use"), "{error}");
}
