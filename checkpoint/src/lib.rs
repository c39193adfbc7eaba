//! What a model folder or file *is*: its format, its config, its tensors, its text sources, its
//! memory, and the splits (TP × PP) it can run in.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

/// Every way a checkpoint can be refused. Each message names the file, the tensor or field, what
/// was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: {detail}")]
    Invalid { path: PathBuf, detail: String },
}

/// Container format, detected from content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Safetensors,
    Gguf,
    Dummy,
}

/// Architecture family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
}

/// A typed model description, whatever the container said it in.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The head is the embedding.
    pub tied_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// From config.json and generation_config.json together.
    pub eos_token_ids: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
}

impl ModelConfig {
    /// Rotary inverse frequencies after scaling, `head_dim / 2` of them.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        unimplemented!("seam")
    }
}

/// An opened checkpoint: headers read and checked strictly, data memory-mapped.
pub struct Checkpoint {}

impl Checkpoint {
    /// Opens a folder or a file. Every tensor the family needs is there with its shape, and none else.
    pub fn open(_path: &Path) -> Result<Self, CheckpointError> {
        unimplemented!("seam")
    }
    /// Only the config is real; values are seeded random, the same however they are sliced.
    pub fn dummy(_config: &Path, _seed: u64) -> Result<Self, CheckpointError> {
        unimplemented!("seam")
    }
    pub fn format(&self) -> Format {
        unimplemented!("seam")
    }
    pub fn model(&self) -> &ModelConfig {
        unimplemented!("seam")
    }
    /// Calls `row(i, values)` for rows `rows` of the 2-D tensor `name` (Hugging Face name and row
    /// order, e.g. `model.layers.0.self_attn.q_proj.weight`), columns `cols`, dequantised to f32.
    pub fn for_each_row(
        &self,
        _name: &str,
        _rows: Range<usize>,
        _cols: Range<usize>,
        _row: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), CheckpointError> {
        unimplemented!("seam")
    }
    /// A 1-D tensor, or a part of it.
    pub fn vector(&self, _name: &str, _range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        unimplemented!("seam")
    }
    pub fn text(&self) -> Result<TextSources, CheckpointError> {
        unimplemented!("seam")
    }
}

/// What turns text to ids and back, and conversations to text.
pub struct TextSources {
    pub tokenizer: tokenizers::Tokenizer,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    /// `(name, source)`; the unnamed one is "default".
    pub chat_templates: Vec<(String, String)>,
    pub vocab_size: usize,
}

/// How a model is split: `tp` ranks a stage, `pp` stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    pub tp: usize,
    pub pp: usize,
}

/// What one rank holds. Heads and KV heads are whole; a KV head is replicated where TP exceeds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSlice {
    pub stage: usize,
    pub tp_rank: usize,
    pub layers: Range<usize>,
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    /// Columns of the MLP's inner width.
    pub mlp: Range<usize>,
    /// Rows of embedding and head.
    pub vocab: Range<usize>,
    pub first_stage: bool,
    pub last_stage: bool,
}

impl Split {
    /// Refused with the splits that can work on as many or fewer devices.
    pub fn check(&self, _model: &ModelConfig) -> Result<(), CheckpointError> {
        unimplemented!("seam")
    }
    /// What rank `stage * tp + tp_rank` holds.
    pub fn slice(&self, _model: &ModelConfig, _rank: usize) -> RankSlice {
        unimplemented!("seam")
    }
    /// All splits of `model` on exactly `devices` ranks.
    pub fn legal(_model: &ModelConfig, _devices: usize) -> Vec<Split> {
        unimplemented!("seam")
    }
}

/// Memory arithmetic of one rank, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    pub weight_bytes: u64,
    pub kv_bytes_per_block: u64,
}

impl MemoryEstimate {
    /// `weight_size` and `kv_size`: bytes of one number. Blocks hold `block_tokens` tokens.
    pub fn of(
        _model: &ModelConfig,
        _slice: &RankSlice,
        _weight_size: usize,
        _kv_size: usize,
        _block_tokens: usize,
    ) -> Self {
        unimplemented!("seam")
    }
}
