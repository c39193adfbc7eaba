//! `tokenizer.ggml.model = gpt2`: byte-level BPE. `tokenizer.ggml.pre` names how text is cut before
//! (llama.cpp `llama-vocab.cpp`, `llm_tokenizer_bpe`); an unknown name is refused, since a wrong
//! cut gives other ids without a word.

use tokenizers::{models::bpe::Merges, normalizers::NFC};

use crate::{
    CheckpointError,
    tokenizer_bytes::{self, LLAMA3},
    tokenizer_gguf::{Built, GgufVocabulary},
    tokenizer_vocabulary::refuse,
};

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// GPT-2's words, with their leading space.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

/// How one value of `tokenizer.ggml.pre` cuts: each expression cuts the pieces of the one before.
struct Cut {
    expressions: &'static [&'static str],
    /// A piece that is a token is that token, whatever its merges would give.
    ignore_merges: bool,
    add_bos: bool,
    /// Canonical composition first, as the model's tokenizer.json has it.
    compose: bool,
}

impl Cut {
    const fn plain(expressions: &'static [&'static str]) -> Self {
        Self { expressions, ignore_merges: false, add_bos: false, compose: false }
    }

    fn named(pre: &str) -> Option<Self> {
        Some(match pre {
            "default" => Self::plain(&[PUNCTUATION, WORDS, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "gpt-2" | "phi-2" | "mpt" | "olmo" => Self::plain(&[WORDS]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => {
                Self::plain(&[r"\p{N}", WORDS])
            }
            "llama-bpe" | "llama3" | "llama-v3" => {
                Self { ignore_merges: true, add_bos: true, ..Self::plain(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" => Self::plain(&[LLAMA3]),
            "tekken" => Self { ignore_merges: true, add_bos: true, ..Self::plain(&[TEKKEN]) },
            "qwen2" | "deepseek-r1-qwen" => Self { compose: true, ..Self::plain(&[QWEN2]) },
            _ => return None,
        })
    }
}

pub(crate) fn build(listed: &GgufVocabulary) -> Result<Built, CheckpointError> {
    let GgufVocabulary { metadata, vocabulary } = listed;
    let pre = metadata.text(PRE)?.unwrap_or("default");
    let Some(cut) = Cut::named(pre) else {
        let expected = "one of: default, gpt-2, smollm, llama-bpe, qwen2, tekken and their aliases \
                        (others are not supported yet)";
        return Err(metadata.refuse(PRE, expected, format!("{pre:?}")));
    };
    let mut merges = Merges::new();
    for line in metadata.needed(MERGES, metadata.texts(MERGES)?)? {
        // A token of byte-level BPE spells a space as another character.
        let Some((left, right)) = line.split_once(' ') else {
            let expected = "two tokens with a space between in each entry";
            return Err(metadata.refuse(MERGES, expected, format!("{line:?}")));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = vocabulary.model(merges, |builder| builder.ignore_merges(cut.ignore_merges))?;
    let failed = |error: tokenizers::Error| refuse(metadata.path(), error);
    let mut tokenizer = tokenizer_bytes::byte_level(model, cut.expressions).map_err(failed)?;
    if cut.compose {
        tokenizer.with_normalizer(Some(NFC)).map_err(failed)?;
    }
    Ok(Built { tokenizer, add_bos: cut.add_bos })
}
