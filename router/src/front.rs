//! The real [`Generator`](crate::api::Generator): validation, tokenizer and dispatcher in a row.

/// Serves requests from one group of shards.
pub struct Front {}
