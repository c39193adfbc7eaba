//! The front door: HTTP and gRPC, the tokenizer, the loop over the scheduler, the fan-out to shards.

#![forbid(unsafe_code)]

pub mod answer_reader;
pub mod api;
pub mod chat_syntax;
pub mod chat_template;
pub mod config;
pub mod detokenizer;
pub mod dispatcher;
pub mod error;
pub mod front;
pub mod grammar_check;
pub mod grpc;
pub mod http;
pub mod metrics;
pub mod readiness;
pub mod reasoning;
pub mod server;
pub mod shard_group;
pub mod sse;
pub mod stack;
pub mod stop;
pub mod tokenizer;
pub mod tools;
pub mod validation;
pub mod vocabulary;
