//! Byte-level BPE: what its files have in common.

use std::{collections::HashMap, path::Path};

use tokenizers::{
    Tokenizer,
    models::bpe::{BPE, Merges, Vocab},
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
    tokenizer::SplitDelimiterBehavior,
};

use crate::{CheckpointError, tokenizer_vocabulary::refuse};

/// How Llama 3 cuts a text.
pub(crate) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// A hostile file's longest tokens must not cost the square of their length; real ones have 128 bytes.
const LONGEST_MERGED_BYTES: usize = 1024;

/// A tokenizer that cuts with each expression in turn, then joins bytes.
pub(crate) fn byte_level(model: BPE, expressions: &[&str]) -> Result<Tokenizer, tokenizers::Error> {
    let mut steps = Vec::new();
    for &expression in expressions {
        let pattern = SplitPattern::Regex(expression.to_owned());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

/// A tokenizer as tiktoken has it: tokens in the order in which their parts join, and a piece that
/// is a token is that token. `tokens` is by rank; `other` tokens have the ids before them.
pub(crate) fn from_ranks(
    path: &Path,
    tokens: &[Vec<u8>],
    other: &[String],
    expression: &str,
) -> Result<Tokenizer, CheckpointError> {
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    if ranks.len() != tokens.len() {
        return Err(refuse(path, "its vocabulary has a token twice"));
    }
    for byte in 0..=255u8 {
        if !ranks.contains_key([byte].as_slice()) {
            return Err(refuse(path, format!("its vocabulary has no token for the byte {byte}")));
        }
    }
    let stand_ins = stand_ins();
    let spell =
        |bytes: &[u8]| -> String { bytes.iter().map(|byte| stand_ins[*byte as usize]).collect() };
    let mut pairs = Vec::new();
    for (rank, token) in
        tokens.iter().enumerate().filter(|(_, token)| token.len() <= LONGEST_MERGED_BYTES)
    {
        for (left, right) in (1..token.len()).map(|cut| token.split_at(cut)) {
            if let (Some(&left), Some(&right)) = (ranks.get(left), ranks.get(right)) {
                pairs.push((rank, left, right));
            }
        }
    }
    pairs.sort_unstable();
    let merge =
        |(_, left, right): (usize, usize, usize)| (spell(&tokens[left]), spell(&tokens[right]));
    let merges: Merges = pairs.into_iter().map(merge).collect();
    let spelled = tokens.iter().map(|token| spell(token));
    let mut vocab = Vocab::default();
    for (id, token) in (0u32..).zip(other.iter().cloned().chain(spelled)) {
        if vocab.insert(token.clone(), id).is_some() {
            return Err(refuse(path, format!("its vocabulary has {token:?} twice")));
        }
    }
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build();
    let model = model.map_err(|error| refuse(path, error))?;
    byte_level(model, &[expression]).map_err(|error| refuse(path, error))
}

/// GPT-2's printable stand-ins for bytes (`bytes_to_unicode` in OpenAI's encoder.py): visible
/// Latin-1 stands for itself, the rest is counted up from U+0100.
fn stand_ins() -> [char; 256] {
    let mut hidden = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        visible @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => visible as char,
        _ => hidden.next().unwrap_or_default(),
    })
}
