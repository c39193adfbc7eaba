//! `tokenizer.ggml.model = llama`: a sentencepiece BPE vocabulary. Sentencepiece joins the pair
//! whose joined token scores best; byte-pair merges in order of that score do the same, which is
//! how transformers converts these tokenizers too (`SentencePieceExtractor`).

use std::collections::HashMap;

use tokenizers::{
    Tokenizer,
    decoders::{
        DecoderWrapper, byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders,
        strip::Strip,
    },
    models::bpe::Merges,
    normalizers::{NormalizerWrapper, Prepend, Replace, utils::Sequence as Normalizers},
};

use crate::{
    CheckpointError,
    tokenizer_gguf::{Built, TokenKind, Vocabulary},
};

const SCORES: &str = "tokenizer.ggml.scores";
/// Stands for a space.
const SPACE: &str = "\u{2581}";
/// Sentencepiece's own limit is 16 characters in Llama's vocabularies; a hostile file's longest
/// tokens must not cost the square of their length.
const LONGEST_MERGED_BYTES: usize = 1024;

pub(crate) fn build(vocabulary: &Vocabulary) -> Result<Built, CheckpointError> {
    let metadata = vocabulary.metadata;
    let failed = |error: tokenizers::Error| CheckpointError::Tokenizer {
        path: metadata.path().to_owned(),
        detail: error.to_string(),
    };
    let merges = merges(vocabulary)?;
    let unknown = vocabulary.kinds.iter().position(|kind| *kind == TokenKind::Unknown);
    let unknown = unknown.map(|id| vocabulary.tokens[id].clone());
    let model = vocabulary.model(merges, |builder| {
        let builder = builder.byte_fallback(true).fuse_unk(true);
        match unknown {
            Some(token) => builder.unk_token(token),
            None => builder,
        }
    })?;
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    if prefix {
        normalizers.push(Prepend::new(SPACE.to_owned()).into());
    }
    normalizers.push(Replace::new(" ", SPACE).map_err(failed)?.into());
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(failed)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers))).map_err(failed)?;
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(Built { tokenizer, add_bos: true })
}

/// Every pair of tokens that joins to a token, best score first; equal scores in order of id.
fn merges(vocabulary: &Vocabulary) -> Result<Merges, CheckpointError> {
    let metadata = vocabulary.metadata;
    let scores = metadata.needed(SCORES, metadata.floats(SCORES)?)?;
    if scores.len() != vocabulary.tokens.len() {
        let expected = format!("one for each of {} tokens", vocabulary.tokens.len());
        return Err(metadata.refuse(SCORES, &expected, scores.len().to_string()));
    }
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
    Ok(pairs.into_iter().map(merge).collect())
}
