//! Every way a checkpoint can be refused.

use std::{io, path::PathBuf};

use crate::split::Split;

/// Why a checkpoint, or a request to it, is refused. Each message names the file, the tensor or
/// field, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },

    #[error("{path}: no {what} found; looked for {looked_for}", path = path.display())]
    NotFound { path: PathBuf, what: &'static str, looked_for: String },

    #[error("{path}: format not supported yet: {format}", path = path.display())]
    UnsupportedFormat { path: PathBuf, format: String },

    /// The container itself (header, index, metadata) is damaged.
    #[error("{path}: {what}: expected {expected}, found {found}", path = path.display())]
    Malformed { path: PathBuf, what: String, expected: String, found: String },

    /// A field of config.json, of the tokenizer files or of GGUF metadata.
    #[error("{path}: field `{field}`: expected {expected}, found {found}", path = path.display())]
    Field { path: PathBuf, field: String, expected: String, found: String },

    #[error("{path}: tensor `{tensor}`: expected {expected}, found {found}", path = path.display())]
    Tensor { path: PathBuf, tensor: String, expected: String, found: String },

    #[error(
        "tensor `{tensor}` is defined twice: in {first} and in {second}",
        first = first.display(), second = second.display()
    )]
    DuplicateTensor { tensor: String, first: PathBuf, second: PathBuf },

    #[error("{path}: tokenizer refused: {detail}", path = path.display())]
    Tokenizer { path: PathBuf, detail: String },

    #[error("text of {bytes} bytes cannot be encoded: {detail}")]
    Encode { bytes: usize, detail: String },

    #[error("tp {tp} x pp {pp} cannot run this model: {reason}; plans that can: {plans}",
        tp = split.tp, pp = split.pp, plans = Split::list(legal))]
    Split { split: Split, reason: String, legal: Vec<Split> },
}
