//! The file of a folder that holds the tokenizer, in whatever format: its content tells.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tokenizers::Tokenizer;

use crate::{
    CheckpointError, tokenizer_sentencepiece_file, tokenizer_tekken, tokenizer_tiktoken,
    tokenizer_vocabulary::refuse,
};

/// Usual names, the first found is read. What is in a file is told from its content.
const NAMES: [&str; 6] = [
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
];
/// Mistral numbers its files (`tokenizer.model.v3`).
const NUMBERED: &str = "tokenizer.model.v";
/// Several times the largest vocabulary there is.
const LARGEST_BYTES: u64 = 256 << 20;

/// A tokenizer as its file gives it, with what the file itself says of its special tokens.
pub(crate) struct TokenizerFile {
    pub path: PathBuf,
    pub tokenizer: Tokenizer,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub unknown_token: Option<String>,
    /// Further tokens that end an answer.
    pub end_tokens: Vec<String>,
    pub chat_template: Option<String>,
}

impl TokenizerFile {
    /// Nothing is known of special tokens.
    pub(crate) fn new(path: &Path, tokenizer: Tokenizer) -> Self {
        Self {
            path: path.to_owned(),
            tokenizer,
            bos_token: None,
            eos_token: None,
            unknown_token: None,
            end_tokens: Vec::new(),
            chat_template: None,
        }
    }

    /// Finds and reads the tokenizer of a folder.
    pub(crate) fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let Some(path) = find(folder) else {
            let (what, looked_for) = ("tokenizer", format!("{}, {NUMBERED}*", NAMES.join(", ")));
            return Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for });
        };
        let io = |action| {
            let path = path.clone();
            move |source| CheckpointError::Io { path, action, source }
        };
        let size = fs::metadata(&path).map_err(io("find the tokenizer"))?.len();
        if size > LARGEST_BYTES {
            return Err(refuse(&path, format!("{size} bytes, at most {LARGEST_BYTES} are read")));
        }
        let bytes = fs::read(&path).map_err(io("read the tokenizer"))?;
        Self::read(&path, &bytes)
    }

    fn read(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        // A protobuf message of this kind begins with the tag of its first piece, a line feed,
        // and is not text for long.
        match std::str::from_utf8(bytes) {
            Ok(text) if text.trim_start().starts_with('{') => {
                match tokenizer_tekken::is_tekken(text) {
                    true => tokenizer_tekken::read(path, text),
                    false => {
                        let tokenizer = Tokenizer::from_bytes(bytes);
                        Ok(Self::new(path, tokenizer.map_err(|error| refuse(path, error))?))
                    }
                }
            }
            Ok(text) if tokenizer_tiktoken::is_tiktoken(text) => {
                tokenizer_tiktoken::read(path, text)
            }
            _ if bytes.first() == Some(&b'\n') => tokenizer_sentencepiece_file::read(path, bytes),
            _ => {
                let format =
                    "neither tokenizer.json, Tekken, tiktoken nor sentencepiece".to_owned();
                Err(CheckpointError::UnsupportedFormat { path: path.to_owned(), format })
            }
        }
    }
}

fn find(folder: &Path) -> Option<PathBuf> {
    let usual = NAMES.iter().map(|name| folder.join(name)).find(|path| path.exists());
    usual.or_else(|| {
        let files = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let is_numbered = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(NUMBERED))
        };
        // The newest one, as v11 after v3.
        files.filter(is_numbered).max_by_key(|path| (path.as_os_str().len(), path.clone()))
    })
}
