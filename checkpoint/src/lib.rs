//! What a model folder or file *is*: its format, its config, its tensors, its text sources, its
//! memory, and the splits (TP × PP) it can run in.
//!
//! Data flows one way: `format` finds the files, the container's reader (`safetensors`, `torch_file`,
//! `gguf`) lists what is stored, `layout` names it in Hugging Face's terms, `manifest` says what the
//! family needs, `tensor_index` holds the two against each other, `rows` reads. `split` and `memory` need the config alone.

#![deny(unsafe_code)] // `mapping` has the exceptions.

mod blocks;
#[cfg(test)]
mod broken_tests;
mod buffers;
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
mod fused;
mod gguf;
mod gguf_config;
mod gguf_metadata;
mod gguf_model;
mod json_file;
mod layer_config;
mod layout;
mod manifest;
mod mapping;
mod memory;
mod meta_params;
mod pickle;
mod rope;
mod rows;
mod safetensors;
mod split;
mod tensor_index;
mod text;
mod text_folder;
mod text_segments;
mod tokenizer_bytes;
mod tokenizer_file;
mod tokenizer_gguf;
mod tokenizer_gguf_bytes;
mod tokenizer_sentencepiece;
mod tokenizer_sentencepiece_file;
mod tokenizer_tekken;
mod tokenizer_tiktoken;
mod tokenizer_vocabulary;
mod torch_file;
mod torch_tensors;
mod weight_files;

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
pub use text_segments::{Placed, Segment};
