//! What can go wrong between this machine, the Hub and its cache.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::size;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("model '{name}' is not here ({cache}); `trireme download {name}` fetches it")]
    NotHere { name: String, cache: PathBuf },
    #[error(
        "model '{name}' is here in part only: {missing} is missing in {snapshot}; \
         `trireme download {name}` goes on where it stopped"
    )]
    InPart { name: String, missing: String, snapshot: PathBuf },
    #[error("model '{name}' cannot be fetched: {variable} switches the Hub off")]
    Offline { name: String, variable: &'static str },
    #[error("HF_ENDPOINT '{given}' is not an http:// or https:// URL")]
    Endpoint { given: String },
    #[error("{path}: is no list of certificates in PEM ({cause})")]
    Certificates { path: PathBuf, cause: String },
    #[error("{url}: the Hub says {status} ({said}); {token}")]
    Refused { url: String, status: u16, said: String, token: &'static str },
    #[error(
        "'{repo}' is gated: the Hub says {status} ({said}); ask for access at {page}, then set HF_TOKEN; {token}"
    )]
    Gated { repo: String, status: u16, said: String, page: String, token: &'static str },
    #[error(
        "the Hub ({endpoint}) has no model '{repo}', or it is private ({status}, {said}); {token}"
    )]
    NoRepo { repo: String, endpoint: String, status: u16, said: String, token: &'static str },
    #[error("'{repo}' has no revision '{revision}' ({said})")]
    NoRevision { repo: String, revision: String, said: String },
    #[error("'{repo}' has no file '{file}' at {revision}; it has {has}")]
    NoFile { repo: String, revision: String, file: String, has: String },
    #[error("'{repo}' has several GGUF files; name one, such as {repo}:{example}: {has}")]
    Ambiguous { repo: String, example: String, has: String },
    #[error(
        "'{repo}:{file}' is one of several parts of a GGUF file; merge them (split files are not supported)"
    )]
    SplitGguf { repo: String, file: String },
    #[error(
        "'{repo}' at {revision} has no weights (*.safetensors, *.bin, *.pth, *.gguf); it has {has}"
    )]
    NoWeights { repo: String, revision: String, has: String },
    #[error(
        "{url}: the Hub says 429, too many requests{}{}",
        gave_up(*.attempts),
        .retry_after_s.map_or_else(String::new, |s| format!("; it asks to wait {s} s"))
    )]
    TooMany { url: String, attempts: u32, retry_after_s: Option<u64> },
    #[error("{url}: the Hub says {status} ({said}){}", gave_up(*.attempts))]
    Server { url: String, status: u16, said: String, attempts: u32 },
    #[error("{url}: the Hub says {status} ({said})")]
    Status { url: String, status: u16, said: String },
    #[error("{url}: no answer: {cause}{}", gave_up(*.attempts))]
    Unreachable { url: String, attempts: u32, cause: String },
    #[error("{url}: broke off after {got} of {want} bytes: {cause}{}", gave_up(*.attempts))]
    BrokenOff { url: String, got: u64, want: u64, attempts: u32, cause: String },
    #[error("{url}: want {expected}, got {found}")]
    Malformed { url: String, expected: &'static str, found: String },
    #[error("{url}: the file has {want} bytes, the answer {got} or more")]
    Length { url: String, got: u64, want: u64 },
    #[error("{url}: {kind} is {got}, want {want}")]
    Digest { url: String, kind: &'static str, got: String, want: String },
    #[error(
        "{path}: {} needed, {} free on this disk", size::display(*.needed_bytes), size::display(*.free_bytes)
    )]
    Space { path: PathBuf, needed_bytes: u64, free_bytes: u64 },
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path}: another process holds this lock and has made no progress for {waited_s} s")]
    Locked { path: PathBuf, waited_s: u64 },
    #[error("model '{name}' is being fetched by another process ({lock} is held)")]
    InUse { name: String, lock: PathBuf },
}

impl HubError {
    pub fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// The Hub could not be asked: what is in the cache may still do.
    pub fn is_outage(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Server { .. } | Self::TooMany { .. })
    }
}

/// The end of a message once every attempt was used.
fn gave_up(attempts: u32) -> String {
    if attempts > 1 { format!("; gave up after {attempts} attempts") } else { String::new() }
}
