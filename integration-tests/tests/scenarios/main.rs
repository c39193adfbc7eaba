//! Scenarios against real processes: a launcher, a router, and shards.
//!
//! One server runs at a time, so that deadlines mean something on two cores.

mod alive;
mod bad_input;
mod checkpoints;
mod clients;
mod golden;
mod gpu;
mod hostile_grammars;
mod keys;
mod lifecycle;
mod scoring;
mod shard_loss;
mod structured;
mod traces;
