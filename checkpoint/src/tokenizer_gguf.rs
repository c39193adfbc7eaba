//! A tokenizer built from GGUF metadata (`tokenizer.ggml.*`, ggml `docs/gguf.md`), giving the ids
//! that llama.cpp and the model's own tokenizer.json give.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::{
    CheckpointError, TextSources,
    gguf::read_header,
    gguf_metadata::Metadata,
    mapping::MappedFile,
    tokenizer_gguf_bytes,
    tokenizer_sentencepiece::{self, Algorithm, Rules},
    tokenizer_vocabulary::{TokenKind, Vocabulary, frame, refuse},
};

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const TEMPLATE: &str = "tokenizer.chat_template";

/// The tokens of a file, and the file for what else is asked of it.
pub(crate) struct GgufVocabulary<'a> {
    pub metadata: &'a Metadata,
    pub vocabulary: Vocabulary<'a>,
}

/// A tokenizer before its special tokens, with the model's defaults.
pub(crate) struct Built {
    pub tokenizer: Tokenizer,
    pub add_bos: bool,
}

/// Reads the tokenizer and the templates of a GGUF file.
pub(crate) fn open(path: &Path, vocab_size: usize) -> Result<TextSources, CheckpointError> {
    let file = MappedFile::open(path)?;
    from_metadata(&read_header(&file)?.metadata, vocab_size)
}

fn from_metadata(metadata: &Metadata, vocab_size: usize) -> Result<TextSources, CheckpointError> {
    let path = metadata.path();
    let Some(model) = metadata.text(MODEL)? else {
        let (what, looked_for) = ("tokenizer", MODEL.to_owned());
        return Err(CheckpointError::NotFound { path: path.to_owned(), what, looked_for });
    };
    let listed = GgufVocabulary::read(metadata)?;
    let Built { mut tokenizer, add_bos } = match model {
        "gpt2" => tokenizer_gguf_bytes::build(&listed)?,
        "llama" => sentencepiece(&listed)?,
        other => {
            let expected = "one of: gpt2, llama (others are not supported yet)";
            return Err(metadata.refuse(MODEL, expected, format!("{other:?}")));
        }
    };
    let failed = |error: tokenizers::Error| refuse(path, error);
    tokenizer.add_tokens(listed.vocabulary.added()).map_err(failed)?;
    let bos = listed.token_of("tokenizer.ggml.bos_token_id")?;
    let eos = listed.token_of("tokenizer.ggml.eos_token_id")?;
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
    let add_eos = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let before = bos.as_ref().filter(|_| add_bos);
    let after = eos.as_ref().filter(|_| add_eos);
    if before.is_some() || after.is_some() {
        tokenizer.with_post_processor(Some(frame(before, after).map_err(failed)?));
    }
    let mut text = TextSources::new(tokenizer, vocab_size);
    text.check_vocabulary(path)?;
    text.bos_token = bos.map(|(token, _)| token);
    text.eos_token = eos.map(|(token, _)| token);
    for (name, key) in [("unk_token", "unknown_token_id"), ("pad_token", "padding_token_id")] {
        if let Some((token, _)) = listed.token_of(&format!("tokenizer.ggml.{key}"))? {
            text.special_tokens.push((name.to_owned(), token));
        }
    }
    add_templates(&mut text, metadata)?;
    Ok(text)
}

/// `tokenizer.ggml.model = llama`: a sentencepiece BPE vocabulary with byte fallback.
fn sentencepiece(listed: &GgufVocabulary) -> Result<Built, CheckpointError> {
    let metadata = listed.metadata;
    let scores = metadata.needed(SCORES, metadata.floats(SCORES)?)?;
    let tokens = listed.vocabulary.tokens.len();
    if scores.len() != tokens {
        let expected = format!("one for each of {tokens} tokens");
        return Err(metadata.refuse(SCORES, &expected, scores.len().to_string()));
    }
    let rules = Rules {
        algorithm: Algorithm::BytePairs,
        byte_fallback: true,
        dummy_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        fewest_spaces: metadata.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
        character_map: &[],
    };
    let tokenizer = tokenizer_sentencepiece::build(&listed.vocabulary, scores, &rules)?;
    Ok(Built { tokenizer, add_bos: true })
}

/// `tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for the names listed.
fn add_templates(text: &mut TextSources, metadata: &Metadata) -> Result<(), CheckpointError> {
    if let Some(source) = metadata.text(TEMPLATE)? {
        text.set_template("default", source.to_owned());
    }
    for name in metadata.texts("tokenizer.chat_templates")?.unwrap_or_default() {
        let key = format!("{TEMPLATE}.{name}");
        let source = metadata.needed(&key, metadata.text(&key)?)?;
        text.set_template(name, source.to_owned());
    }
    Ok(())
}

impl<'a> GgufVocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, CheckpointError> {
        let tokens = metadata.needed(TOKENS, metadata.texts(TOKENS)?)?;
        let kinds = match metadata.integers(TYPES)? {
            None => vec![TokenKind::Normal; tokens.len()],
            Some(types) if types.len() != tokens.len() => {
                let expected = format!("one for each of {} tokens", tokens.len());
                return Err(metadata.refuse(TYPES, &expected, types.len().to_string()));
            }
            Some(types) => {
                let refuse =
                    |number: i64| metadata.refuse(TYPES, "token types 1 to 6", number.to_string());
                let kind = |number: &i64| TokenKind::of_number(*number).ok_or(refuse(*number));
                types.iter().map(kind).collect::<Result<_, _>>()?
            }
        };
        Ok(Self { metadata, vocabulary: Vocabulary { path: metadata.path(), tokens, kinds } })
    }

    /// The token, with its id, that a key names by id.
    fn token_of(&self, key: &str) -> Result<Option<(String, u32)>, CheckpointError> {
        let Some(id) = self.metadata.id(key)? else { return Ok(None) };
        let tokens = self.vocabulary.tokens;
        match tokens.get(id as usize) {
            Some(token) => Ok(Some((token.clone(), id))),
            None => {
                let expected = format!("an id below the {} tokens", tokens.len());
                Err(self.metadata.refuse(key, &expected, id.to_string()))
            }
        }
    }
}

#[cfg(test)]
#[path = "tokenizer_gguf_tests.rs"]
mod tests;
