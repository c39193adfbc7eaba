//! What a model folder or file *is*: its format, its config, its tensors, its text sources, its
//! memory, and the splits (TP × PP) it can run in.
//!
//! Data flows one way: `format` finds the files, the container's reader (`safetensors`, `gguf`)
//! lists what is stored, `manifest` says what the family needs, `tensor_index` holds the two
//! against each other, `checkpoint` hands out rows. `split` and `memory` need the config alone.

#![deny(unsafe_code)] // `mapping` has the exceptions.

mod blocks;
#[cfg(test)]
mod broken_tests;
mod checkpoint;
mod config;
mod config_json;
mod description;
mod dtype;
mod dummy;
mod error;
mod family;
mod fingerprint;
#[cfg(test)]
mod fixtures;
mod format;
mod gguf;
mod gguf_metadata;
mod gguf_model;
mod json_file;
mod layer_config;
mod manifest;
mod mapping;
mod memory;
mod rope;
mod safetensors;
mod safetensors_index;
mod split;
mod tensor_index;
mod text;
mod tokenizer_bytes;
mod tokenizer_gguf;
mod tokenizer_sentencepiece;

pub use checkpoint::{Checkpoint, OpenOptions};
pub use config::ModelConfig;
pub use description::{DTypeDescription, Description, FileDescription};
pub use dtype::DType;
pub use error::CheckpointError;
pub use family::Family;
pub use format::Format;
pub use layer_config::{Activation, ExpertConfig, LayerConfig, Multipliers, SlidingWindow};
pub use manifest::{Part, RankNumbers, TensorSpec};
pub use memory::MemoryEstimate;
pub use rope::{RopeScaling, Rotation};
pub use split::{RankSlice, Split};
pub use text::TextSources;
