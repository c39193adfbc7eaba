//! One process per device: it holds its slice of a model, takes ordered steps, returns tokens.
//!
//! # Layout
//! - [`config`]: flags, parsed once. [`server`]: socket, signals, the life of the process.
//! - [`service`]: gRPC to commands and back. [`engine`]: the one thread that owns everything below.
//! - [`runner`]: one step from request to tokens, over [`sequences`], [`batch`], [`models`] and the sampler.
//! - [`models`] read like the paper; [`layers`] know how a model is split; [`device`] is the seam to the hardware.

#![forbid(unsafe_code)]

pub mod batch;
pub mod config;
pub mod device;
pub mod engine;
pub mod grammar;
pub mod in_flight;
pub mod layer_weights;
pub mod layers;
pub mod meeting_point;
pub mod memory;
pub mod models;
pub mod prompt_scores;
pub mod runner;
pub mod sampler;
pub mod self_test;
pub mod sequence;
pub mod sequences;
pub mod server;
pub mod service;
pub mod stage;
pub mod status;
pub mod step;
pub mod token_return;
pub mod weights;
