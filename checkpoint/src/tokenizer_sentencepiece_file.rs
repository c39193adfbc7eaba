//! Sentencepiece's own model files (`tokenizer.model`): a protobuf message, of which the fields
//! that decide how a text is cut are read (`sentencepiece_model.proto` of google/sentencepiece).

use std::path::Path;

use prost::Message;

use crate::{
    CheckpointError,
    tokenizer_file::TokenizerFile,
    tokenizer_sentencepiece::{self, Algorithm, Rules},
    tokenizer_vocabulary::{TokenKind, Vocabulary, frame, refuse},
};

#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    text: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3", default = "1")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3", default = "1")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    treat_whitespace_as_suffix: Option<bool>,
    #[prost(int32, optional, tag = "41", default = "1")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42", default = "2")]
    eos_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5", default = "true")]
    escape_whitespaces: Option<bool>,
}

/// The tokenizer in the bytes of a model file.
pub(crate) fn read(path: &Path, bytes: &[u8]) -> Result<TokenizerFile, CheckpointError> {
    let model = Model::decode(bytes).map_err(|error| CheckpointError::Malformed {
        path: path.to_owned(),
        what: "content".to_owned(),
        expected: "a sentencepiece model".to_owned(),
        found: error.to_string(),
    })?;
    let trainer = model.trainer.unwrap_or_default();
    let normalizer = model.normalizer.unwrap_or_default();
    if trainer.treat_whitespace_as_suffix() || !normalizer.escape_whitespaces() {
        let detail = "spaces at the end of words, or not escaped, are not supported";
        return Err(refuse(path, detail));
    }
    let (mut tokens, mut scores, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
    for piece in &model.pieces {
        let kind = TokenKind::of_number(piece.kind().into());
        let kind = kind.ok_or_else(|| refuse(path, format!("piece type {}", piece.kind())))?;
        tokens.push(piece.text().to_owned());
        scores.push(f64::from(piece.score()));
        kinds.push(kind);
    }
    let rules = Rules {
        algorithm: match trainer.model_type() {
            1 => Algorithm::Unigram,
            2 => Algorithm::BytePairs,
            other => {
                let detail = format!("model type {other}; unigram (1) and BPE (2) are supported");
                return Err(refuse(path, detail));
            }
        },
        byte_fallback: kinds.contains(&TokenKind::Byte),
        dummy_prefix: normalizer.add_dummy_prefix(),
        fewest_spaces: normalizer.remove_extra_whitespaces(),
        character_map: normalizer.precompiled_charsmap(),
    };
    let vocabulary = Vocabulary { path, tokens: &tokens, kinds };
    let mut tokenizer = tokenizer_sentencepiece::build(&vocabulary, &scores, &rules)?;
    tokenizer.add_tokens(vocabulary.added()).map_err(|error| refuse(path, error))?;
    // An id of -1 says that there is no such token.
    let token = |id: i32| {
        let id = u32::try_from(id).ok()?;
        Some((tokens.get(id as usize)?.clone(), id))
    };
    let bos = token(trainer.bos_id());
    if let Some(bos) = &bos {
        let frame = frame(Some(bos), None).map_err(|error| refuse(path, error))?;
        tokenizer.with_post_processor(Some(frame));
    }
    let unknown = vocabulary.kinds.iter().position(|kind| *kind == TokenKind::Unknown);
    Ok(TokenizerFile {
        bos_token: bos.map(|(token, _)| token),
        eos_token: token(trainer.eos_id()).map(|(token, _)| token),
        unknown_token: unknown.map(|id| tokens[id].clone()),
        ..TokenizerFile::new(path, tokenizer)
    })
}
