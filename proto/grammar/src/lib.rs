//! What an answer must look like: grammars, their limits, and the masks they give.
//!
//! The router checks a grammar ([`check`]) before it admits a request; the last stage of the shards
//! compiles it ([`Compiler`]) and asks for the tokens that may come next ([`Matcher`]). The matching
//! itself is llguidance's (Earley parser over a derivative-based lexer). Everything here is a
//! function of grammar, vocabulary and tokens: no clock, no randomness, so that all ranks of a stage
//! agree without talking.

#![forbid(unsafe_code)]

mod cache;
mod check;
mod compiler;
mod grammar;
mod matcher;
mod thought;
mod vocabulary;

pub use cache::Cache;
pub use check::{CheckFacts, check};
pub use compiler::Compiler;
pub use grammar::{Grammar, Kind, Whitespace};
pub use matcher::{Mask, Matcher};
pub use thought::Marker;
pub use vocabulary::Vocabulary;

/// Why a grammar, or an answer under it, cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar is wrong, or asks for more than the limits allow. The text says where.
    #[error("{0}")]
    Invalid(String),
    /// There is nothing that the grammar accepts.
    #[error("no text matches it")]
    Empty,
    #[error("this shard was not told the vocabulary")]
    NoVocabulary,
    /// The answer left the grammar, or its next mask costs more than the limits allow.
    #[error("the grammar cannot go on: {0}")]
    Stuck(String),
}
