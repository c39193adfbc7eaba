//! A tokenizer built from GGUF metadata (`tokenizer.ggml.*`, ggml `docs/gguf.md`), giving the ids
//! that llama.cpp and the model's own tokenizer.json give.

use std::path::Path;

use tokenizers::{
    AddedToken, Tokenizer,
    models::bpe::{BPE, BpeBuilder, Merges, Vocab},
    processors::template::TemplateProcessing,
};

use crate::{
    CheckpointError, TextSources, gguf::read_header, gguf_metadata::Metadata, mapping::MappedFile,
    tokenizer_bytes, tokenizer_sentencepiece,
};

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const TEMPLATE: &str = "tokenizer.chat_template";

/// `llama_token_type` of llama.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// What every tokenizer model reads.
pub(crate) struct Vocabulary<'a> {
    pub metadata: &'a Metadata,
    /// By id.
    pub tokens: &'a [String],
    pub kinds: Vec<TokenKind>,
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
    let vocabulary = Vocabulary::read(metadata)?;
    let Built { mut tokenizer, add_bos } = match model {
        "gpt2" => tokenizer_bytes::build(&vocabulary)?,
        "llama" => tokenizer_sentencepiece::build(&vocabulary)?,
        other => {
            let expected = "one of: gpt2, llama (others are not supported yet)";
            return Err(metadata.refuse(MODEL, expected, format!("{other:?}")));
        }
    };
    let failed = |error: tokenizers::Error| CheckpointError::Tokenizer {
        path: path.to_owned(),
        detail: error.to_string(),
    };
    tokenizer.add_tokens(vocabulary.added()).map_err(failed)?;
    let bos = vocabulary.token_of("tokenizer.ggml.bos_token_id")?;
    let eos = vocabulary.token_of("tokenizer.ggml.eos_token_id")?;
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
    add_templates(&mut text, metadata)?;
    Ok(text)
}

/// What stands around every text that is encoded with special tokens.
fn frame(
    before: Option<&(String, u32)>,
    after: Option<&(String, u32)>,
) -> Result<TemplateProcessing, tokenizers::Error> {
    let pieces = |sequence: &str, type_id: usize| -> Vec<String> {
        let special = |token: Option<&(String, u32)>| {
            token.map(|(token, _)| format!("{token}:{type_id}")).into_iter()
        };
        let sequence = format!("{sequence}:{type_id}");
        special(before).chain([sequence]).chain(special(after)).collect()
    };
    let special: Vec<_> = before.into_iter().chain(after).cloned().collect();
    let (single, pair) = (pieces("$A", 0), [pieces("$A", 0), pieces("$B", 1)].concat());
    let mut builder = TemplateProcessing::builder();
    builder.try_single(single)?.try_pair(pair)?.special_tokens(special);
    Ok(builder.build()?)
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

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, CheckpointError> {
        let tokens = metadata.needed(TOKENS, metadata.texts(TOKENS)?)?;
        let Some(types) = metadata.integers(TYPES)? else {
            let kinds = vec![TokenKind::Normal; tokens.len()];
            return Ok(Self { metadata, tokens, kinds });
        };
        if types.len() != tokens.len() {
            let expected = format!("one for each of {} tokens", tokens.len());
            return Err(metadata.refuse(TYPES, &expected, types.len().to_string()));
        }
        let kind = |&number: &i64| match number {
            1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            other => Err(metadata.refuse(TYPES, "token types 1 to 6", other.to_string())),
        };
        let kinds = types.iter().map(kind).collect::<Result<_, _>>()?;
        Ok(Self { metadata, tokens, kinds })
    }

    /// Tokens that are found in a text before it is cut, so that they stay whole. Control tokens
    /// are special: `encode` can leave their text alone.
    fn added(&self) -> impl Iterator<Item = AddedToken> {
        self.tokens.iter().zip(&self.kinds).filter_map(|(token, kind)| {
            let special = match kind {
                TokenKind::Control | TokenKind::Unknown => true,
                TokenKind::UserDefined => false,
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => return None,
            };
            let token = Some(token).filter(|token| !token.is_empty())?;
            Some(AddedToken::from(token.clone(), special).normalized(false))
        })
    }

    /// Ids by token; each token has one id.
    pub(crate) fn ids(&self) -> Result<Vocab, CheckpointError> {
        let mut ids = Vocab::default();
        for (id, token) in (0u32..).zip(self.tokens) {
            if ids.insert(token.clone(), id).is_some() {
                return Err(self.metadata.refuse(
                    TOKENS,
                    "each token once",
                    format!("{token:?} twice"),
                ));
            }
        }
        Ok(ids)
    }

    /// The token, with its id, that a key names by id.
    fn token_of(&self, key: &str) -> Result<Option<(String, u32)>, CheckpointError> {
        let Some(id) = self.metadata.id(key)? else { return Ok(None) };
        match self.tokens.get(id as usize) {
            Some(token) => Ok(Some((token.clone(), id))),
            None => {
                let expected = format!("an id below the {} tokens", self.tokens.len());
                Err(self.metadata.refuse(key, &expected, id.to_string()))
            }
        }
    }

    /// A byte-pair model with these merges, or why the two do not fit together.
    pub(crate) fn model(
        &self,
        merges: Merges,
        refine: impl FnOnce(BpeBuilder) -> BpeBuilder,
    ) -> Result<BPE, CheckpointError> {
        let builder = BPE::builder().vocab_and_merges(self.ids()?, merges);
        refine(builder).build().map_err(|error| CheckpointError::Tokenizer {
            path: self.metadata.path().to_owned(),
            detail: error.to_string(),
        })
    }
}

#[cfg(test)]
#[path = "tokenizer_gguf_tests.rs"]
mod tests;
