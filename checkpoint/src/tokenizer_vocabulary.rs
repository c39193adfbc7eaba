//! Tokens by id with their kinds, as sentencepiece models and GGUF files list them.

use std::path::Path;

use tokenizers::{
    AddedToken,
    models::bpe::{BPE, BpeBuilder, Merges, Vocab},
    processors::template::TemplateProcessing,
};

use crate::CheckpointError;

/// The types of a sentencepiece (`sentencepiece_model.proto`), which `llama_token_type` of llama.h
/// numbers alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    pub(crate) fn of_number(number: i64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// What every tokenizer model reads.
pub(crate) struct Vocabulary<'a> {
    pub path: &'a Path,
    /// By id.
    pub tokens: &'a [String],
    pub kinds: Vec<TokenKind>,
}

impl Vocabulary<'_> {
    /// Tokens that are found in a text before it is cut, so that they stay whole. Control tokens
    /// are special: `encode` can leave their text alone.
    pub(crate) fn added(&self) -> impl Iterator<Item = AddedToken> {
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
                return Err(refuse(self.path, format!("its vocabulary has {token:?} twice")));
            }
        }
        Ok(ids)
    }

    /// A byte-pair model with these merges, or why the two do not fit together.
    pub(crate) fn model(
        &self,
        merges: Merges,
        refine: impl FnOnce(BpeBuilder) -> BpeBuilder,
    ) -> Result<BPE, CheckpointError> {
        let builder = BPE::builder().vocab_and_merges(self.ids()?, merges);
        refine(builder).build().map_err(|error| refuse(self.path, error))
    }
}

/// Why the tokenizer in a file is not taken.
pub(crate) fn refuse(path: &Path, detail: impl ToString) -> CheckpointError {
    CheckpointError::Tokenizer { path: path.to_owned(), detail: detail.to_string() }
}

/// What stands around every text that is encoded with special tokens.
pub(crate) fn frame(
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
