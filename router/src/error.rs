//! The one map from what went wrong to what a client sees.

/// Every error a client can meet.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// 400: a field is wrong. Names the field, the limit and the value.
    #[error("{message}")]
    Invalid { field: &'static str, message: String },
    /// 401.
    #[error("missing or wrong API key")]
    Unauthorized,
    /// 404.
    #[error("model {given:?} is not served here; {served:?} is")]
    ModelNotFound { given: String, served: String },
    /// 422: understood, not supported.
    #[error("{message}")]
    Unsupported { field: &'static str, message: String },
    /// 429, with Retry-After.
    #[error("{limit} requests are waiting, the limit")]
    Overloaded { limit: usize, retry_after_s: u64 },
    /// 503.
    #[error("the server is not ready: {0}")]
    NotReady(String),
    /// 503 before the head, an error event after it.
    #[error("the shards running this request were lost")]
    ShardLost,
    /// An error event; the client reads slower than the model writes, by more than the buffer.
    #[error("the client fell {limit} tokens behind, the limit")]
    SlowReader { limit: usize },
    /// 500 for one sequence.
    #[error("the shards failed this request: {0}")]
    Sequence(String),
    /// 503 while draining.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// 500. The cause is logged, not shown.
    #[error("internal error")]
    Internal(#[source] anyhow::Error),
}
