//! Mistral's `tekken.json`: tokens in tiktoken's order behind a block of control tokens
//! (`mistral_common/tokens/tokenizers/tekken.py`).

use std::path::Path;

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use tokenizers::AddedToken;

use crate::{
    CheckpointError,
    tokenizer_bytes::from_ranks,
    tokenizer_file::TokenizerFile,
    tokenizer_vocabulary::{frame, refuse},
};

const BEGIN: &str = "<s>";
const END: &str = "</s>";
const UNKNOWN: &str = "<unk>";

/// The control tokens of files that do not list theirs (up to version v7).
const CONTROL_TOKENS: [&str; 20] = [
    UNKNOWN,
    BEGIN,
    END,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// More than any model has; a file's number must not make as many strings as it likes.
const CONTROL_TOKENS_MOST: usize = 1 << 16;

#[derive(Deserialize)]
struct Tekken {
    config: Config,
    vocab: Vec<Token>,
    special_tokens: Option<Vec<ControlToken>>,
}

#[derive(Deserialize)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct Token {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct ControlToken {
    rank: usize,
    token_str: String,
    #[serde(default = "yes")]
    is_control: bool,
}

fn yes() -> bool {
    true
}

/// Whether JSON text is of this format; its first tokens stand near its beginning.
pub(crate) fn is_tekken(text: &str) -> bool {
    let head = text.char_indices().nth(1 << 16).map_or(text, |(end, _)| &text[..end]);
    head.contains("\"token_bytes\"")
}

/// The tokenizer in the text of a file.
pub(crate) fn read(path: &Path, text: &str) -> Result<TokenizerFile, CheckpointError> {
    let tekken: Tekken =
        serde_json::from_str(text).map_err(|error| CheckpointError::Malformed {
            path: path.to_owned(),
            what: "content".to_owned(),
            expected: "a Tekken vocabulary".to_owned(),
            found: error.to_string(),
        })?;
    let control = control_tokens(path, &tekken)?;
    let size = tekken.config.default_vocab_size.checked_sub(control.len());
    let size = size.filter(|size| *size <= tekken.vocab.len()).ok_or_else(|| {
        let (field, size) = ("config.default_vocab_size", tekken.config.default_vocab_size);
        let (least, most) = (control.len(), control.len() + tekken.vocab.len());
        refuse(path, format!("{field} is {size}, expected {least} to {most}"))
    })?;
    let mut tokens = Vec::with_capacity(size);
    for (place, token) in tekken.vocab.iter().take(size).enumerate() {
        let bytes = BASE64.decode(&token.token_bytes).ok().filter(|_| token.rank == place);
        tokens.push(bytes.ok_or_else(|| {
            let (rank, bytes) = (token.rank, &token.token_bytes);
            refuse(path, format!("vocab[{place}]: rank {rank}, token_bytes {bytes:?}"))
        })?);
    }
    let names: Vec<String> = control.iter().map(|token| token.token_str.clone()).collect();
    let mut tokenizer = from_ranks(path, &tokens, &names, &tekken.config.pattern)?;
    let added = control
        .iter()
        .map(|token| AddedToken::from(token.token_str.clone(), token.is_control).normalized(false));
    tokenizer.add_tokens(added).map_err(|error| refuse(path, error))?;
    let named = |name: &str| names.iter().any(|token| token == name).then(|| name.to_owned());
    if let Some(id) = names.iter().position(|token| token == BEGIN) {
        let begin = (BEGIN.to_owned(), id as u32);
        let frame = frame(Some(&begin), None).map_err(|error| refuse(path, error))?;
        tokenizer.with_post_processor(Some(frame));
    }
    Ok(TokenizerFile {
        bos_token: named(BEGIN),
        eos_token: named(END),
        unknown_token: named(UNKNOWN),
        ..TokenizerFile::new(path, tokenizer)
    })
}

/// In order of id: those that the file or its version names, then fillers.
fn control_tokens(path: &Path, tekken: &Tekken) -> Result<Vec<ControlToken>, CheckpointError> {
    let count = tekken.config.default_num_special_tokens;
    let token =
        |(rank, name): (usize, String)| ControlToken { rank, token_str: name, is_control: true };
    let mut tokens: Vec<ControlToken> = Vec::new();
    match &tekken.special_tokens {
        Some(listed) => {
            for (place, ControlToken { rank, token_str, is_control }) in listed.iter().enumerate() {
                if *rank != place {
                    let detail = format!("special_tokens[{place}] has rank {rank}");
                    return Err(refuse(path, detail));
                }
                let (rank, token_str, is_control) = (*rank, token_str.clone(), *is_control);
                tokens.push(ControlToken { rank, token_str, is_control });
            }
        }
        None => {
            let named = CONTROL_TOKENS.iter().map(|name| (*name).to_owned());
            tokens.extend(named.enumerate().map(token));
        }
    }
    if !(tokens.len()..=CONTROL_TOKENS_MOST).contains(&count) {
        let (field, least) = ("config.default_num_special_tokens", tokens.len());
        let detail = format!("{field} is {count}, expected {least} to {CONTROL_TOKENS_MOST}");
        return Err(refuse(path, detail));
    }
    tokens.extend((tokens.len()..count).map(|rank| token((rank, format!("<SPECIAL_{rank}>")))));
    Ok(tokens)
}
