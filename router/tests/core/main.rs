//! The router's core against shards that can be told to fail.

mod failures;
mod fake_shard;
mod harness;
mod scoring;
mod serving;
