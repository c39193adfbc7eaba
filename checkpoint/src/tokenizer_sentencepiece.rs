//! Tokenizers of sentencepiece vocabularies, from its own model files and from GGUF.
//!
//! Byte pairs: sentencepiece joins the pair whose joined token scores best; byte-pair merges in
//! order of that score do the same, which is how transformers converts these tokenizers too
//! (`SentencePieceExtractor`). Unigram: the likeliest cut (Kudo, arXiv:1804.10959).

use std::collections::HashMap;

use tokenizers::{
    Tokenizer,
    decoders::{
        DecoderWrapper, byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders,
        strip::Strip,
    },
    models::{bpe::Merges, unigram::Unigram},
    normalizers::{
        NormalizerWrapper, Precompiled, Prepend, Replace, replace::ReplacePattern,
        utils::Sequence as Normalizers,
    },
};

use crate::{
    CheckpointError,
    tokenizer_vocabulary::{TokenKind, Vocabulary, refuse},
};

/// Stands for a space.
const SPACE: &str = "\u{2581}";
/// Sentencepiece's own limit is 16 characters in Llama's vocabularies; a hostile file's longest
/// tokens must not cost the square of their length.
const LONGEST_MERGED_BYTES: usize = 1024;
/// Far below any sum of real scores, so that no text is read as a token it only spells.
const NEVER: f64 = 10_000.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    BytePairs,
    Unigram,
}

/// How a vocabulary is used (`TrainerSpec` and `NormalizerSpec`).
pub(crate) struct Rules<'a> {
    pub algorithm: Algorithm,
    /// Characters without a token become their bytes.
    pub byte_fallback: bool,
    /// A text begins with a space, which decoding takes away.
    pub dummy_prefix: bool,
    /// No spaces around a text, and one at a time inside.
    pub fewest_spaces: bool,
    /// Replacements of characters, compiled by sentencepiece; empty for none.
    pub character_map: &'a [u8],
}

/// `scores` has one entry for each token.
pub(crate) fn build(
    vocabulary: &Vocabulary,
    scores: &[f64],
    rules: &Rules,
) -> Result<Tokenizer, CheckpointError> {
    let failed = |error: tokenizers::Error| refuse(vocabulary.path, error);
    let mut tokenizer = match rules.algorithm {
        Algorithm::BytePairs => byte_pairs(vocabulary, scores, rules)?,
        Algorithm::Unigram => unigram(vocabulary, scores, rules)?,
    };
    let normalizers = normalizers(vocabulary, rules)?;
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers))).map_err(failed)?;
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(failed)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if rules.dummy_prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(tokenizer)
}

fn normalizers(
    vocabulary: &Vocabulary,
    rules: &Rules,
) -> Result<Vec<NormalizerWrapper>, CheckpointError> {
    let failed = |error: tokenizers::Error| refuse(vocabulary.path, error);
    let expression = |expression: &str, content: &str| {
        Replace::new(ReplacePattern::Regex(expression.to_owned()), content).map_err(failed)
    };
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if !rules.character_map.is_empty() {
        let map = Precompiled::from(rules.character_map);
        steps.push(map.map_err(|error| refuse(vocabulary.path, error))?.into());
    }
    if rules.fewest_spaces {
        steps.push(expression("^ +| +$", "")?.into());
        steps.push(expression(" {2,}", " ")?.into());
    }
    if rules.dummy_prefix {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(failed)?.into());
    Ok(steps)
}

fn unknown(vocabulary: &Vocabulary) -> Option<usize> {
    vocabulary.kinds.iter().position(|kind| *kind == TokenKind::Unknown)
}

fn byte_pairs(
    vocabulary: &Vocabulary,
    scores: &[f64],
    rules: &Rules,
) -> Result<Tokenizer, CheckpointError> {
    let merges = merges(vocabulary, scores);
    let unknown = unknown(vocabulary).map(|id| vocabulary.tokens[id].clone());
    let model = vocabulary.model(merges, |builder| {
        let builder = builder.byte_fallback(rules.byte_fallback).fuse_unk(true);
        match unknown {
            Some(token) => builder.unk_token(token),
            None => builder,
        }
    })?;
    Ok(Tokenizer::new(model))
}

fn unigram(
    vocabulary: &Vocabulary,
    scores: &[f64],
    rules: &Rules,
) -> Result<Tokenizer, CheckpointError> {
    let joins = |kind: TokenKind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
    let known = || scores.iter().zip(&vocabulary.kinds).filter(|(_, kind)| joins(**kind));
    let least = known().map(|(score, _)| *score).fold(0.0, f64::min);
    // Control tokens and bytes have the best score there is in the file, but stand for no text.
    let score = |id: usize| match joins(vocabulary.kinds[id]) {
        true => scores[id],
        false => least - NEVER,
    };
    let tokens = vocabulary.tokens.iter().enumerate();
    let tokens = tokens.map(|(id, token)| (token.clone(), score(id))).collect();
    let model = Unigram::from(tokens, unknown(vocabulary), rules.byte_fallback);
    Ok(Tokenizer::new(model.map_err(|error| refuse(vocabulary.path, error))?))
}

/// Every pair of tokens that joins to a token, best score first; equal scores in order of id.
fn merges(vocabulary: &Vocabulary, scores: &[f64]) -> Merges {
    // Control tokens and bytes are never the result or a part of joining text.
    let joins = |kind: TokenKind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
    let entries = || vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
    let parts: HashMap<&str, usize> = entries()
        .filter(|(_, (_, kind))| joins(**kind))
        .map(|(id, (token, _))| (token.as_str(), id))
        .collect();
    let mut pairs = Vec::new();
    for (&token, &id) in &parts {
        if token.len() > LONGEST_MERGED_BYTES {
            continue;
        }
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if let (Some(&left_id), Some(&right_id)) = (parts.get(left), parts.get(right)) {
                pairs.push((scores[id], id, left_id, right_id, left, right));
            }
        }
    }
    // NaN sorts somewhere, and always at the same place.
    pairs.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    let merge =
        |(_, _, _, _, left, right): (_, _, _, _, &str, &str)| (left.to_owned(), right.to_owned());
    pairs.into_iter().map(merge).collect()
}
