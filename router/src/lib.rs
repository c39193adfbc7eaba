//! The front door: HTTP and gRPC, the tokenizer, the loop over the scheduler, the fan-out to shards.

#![forbid(unsafe_code)]

pub mod api;
pub mod error;
pub mod front;
pub mod http;
pub mod metrics;
pub mod sse;
pub mod stack;
