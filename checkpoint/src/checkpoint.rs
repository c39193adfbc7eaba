//! An opened checkpoint: its model, its weights by rows, its text sources.

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::{
    CheckpointError, DType, Format, ModelConfig, TensorSpec, TextSources, config_json, dummy,
    format::{Container, Source, WeightFiles, detect},
    gguf_model,
    layout::{Layout, MetaTensors},
    manifest, meta_params,
    tensor_index::{TensorIndex, describe_shape, drop_unread},
    tokenizer_gguf, weight_files,
};

/// How strictly a checkpoint is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Read every value once and refuse NaN and infinities. Without it they are refused when read.
    pub scan_values: bool,
}

/// An opened checkpoint: headers read and checked strictly, data memory-mapped. A file must not be
/// changed while it is open.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    model: ModelConfig,
    /// The tensors of the model, by name.
    specs: HashMap<String, TensorSpec>,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Stored(Format, TensorIndex),
    Dummy { seed: u64 },
}

impl Checkpoint {
    /// Opens a folder or a file. Every tensor the family needs is there with its shape, and none else.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_with(path, OpenOptions::default())
    }

    /// As `open`, with options.
    pub fn open_with(path: &Path, options: OpenOptions) -> Result<Self, CheckpointError> {
        let checkpoint = match detect(path)? {
            Source::Weights { folder, container, files } => {
                Self::from_weights(folder, container, &files)?
            }
            Source::Gguf(path) => {
                let (model, index) = gguf_model::open(&path)?;
                let specs = manifest::tensors(&model);
                let index = checked(index, &model, &specs)?;
                Self::new(path, model, specs, Weights::Stored(Format::Gguf, index))
            }
        };
        if let (true, Some(index)) = (options.scan_values, checkpoint.index()) {
            index.scan()?;
        }
        Ok(checkpoint)
    }

    fn from_weights(
        folder: PathBuf,
        container: Container,
        files: &WeightFiles,
    ) -> Result<Self, CheckpointError> {
        let mut opened = weight_files::open(&folder, container, files)?;
        let layout = Layout::of(&opened);
        let model = match layout {
            Layout::HuggingFace => config_json::read(&config_in(&folder)?)?,
            Layout::Meta => {
                let first = opened.first().map_or(folder.as_path(), |(file, _)| file.path());
                meta_params::read(&folder, first, &MetaTensors::of(&opened))?
            }
        };
        let mut named = Vec::with_capacity(opened.len());
        for mut file in opened.drain(..) {
            let tensors = layout.name(&mut file, &model)?;
            named.push((file.0, tensors));
        }
        let specs = manifest::tensors(&model);
        let mut index = TensorIndex::new(&folder, layout.stored_name());
        match files {
            WeightFiles::Shards(_) => index.add_shards(named, &specs)?,
            WeightFiles::Index(_) | WeightFiles::Files(_) => {
                for (file, tensors) in named {
                    index.add(file, tensors)?;
                }
            }
        }
        let format = match (container, layout) {
            (Container::Safetensors, _) => Format::Safetensors,
            (Container::Torch, Layout::HuggingFace) => Format::Torch,
            (Container::Torch, Layout::Meta) => Format::Meta,
        };
        let weights = Weights::Stored(format, checked(index, &model, &specs)?);
        Ok(Self::new(folder, model, specs, weights))
    }

    /// Only the config is real; values are seeded random, the same however they are sliced.
    /// `config` is a config.json or a folder with one.
    pub fn dummy(config: &Path, seed: u64) -> Result<Self, CheckpointError> {
        let config = if config.is_dir() { config_in(config)? } else { config.to_owned() };
        let model = config_json::read(&config)?;
        let specs = manifest::tensors(&model);
        let path = config.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Self::new(path, model, specs, Weights::Dummy { seed }))
    }

    fn new(path: PathBuf, model: ModelConfig, specs: Vec<TensorSpec>, weights: Weights) -> Self {
        let specs = specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        Self { path, model, specs, weights }
    }

    pub fn format(&self) -> Format {
        match &self.weights {
            Weights::Stored(format, _) => *format,
            Weights::Dummy { .. } => Format::Dummy,
        }
    }

    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// How the numbers of a tensor are stored; made-up weights are F32.
    pub fn dtype(&self, name: &str) -> Result<DType, CheckpointError> {
        let shape = self.shape(name)?;
        match self.index() {
            Some(index) => Ok(index.rows(self.stored_name(name), shape.len())?.dtype),
            None => Ok(DType::F32),
        }
    }

    /// Shape of a tensor, and how ranks share it.
    pub fn tensor(&self, name: &str) -> Result<&TensorSpec, CheckpointError> {
        let spec = self.specs.get(self.stored_name(name));
        spec.ok_or_else(|| self.refuse(name, "a tensor of the model", "no such tensor".to_owned()))
    }

    /// Whether the model has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.specs.contains_key(self.stored_name(name))
    }

    /// Shape of a tensor, rows first.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>, CheckpointError> {
        Ok(self.tensor(name)?.shape.clone())
    }

    /// Calls `row(i, values)` for rows `rows` of the 2-D tensor `name` (Hugging Face name and row
    /// order, e.g. `model.layers.0.self_attn.q_proj.weight`), columns `cols`, dequantised to f32.
    /// `i` is the row's number in the whole tensor, ascending from `rows.start`. A tied head is
    /// read as `lm_head.weight` too.
    ///
    /// # Errors
    /// No such tensor, a range beyond its shape, or a value that is not finite.
    pub fn for_each_row(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        row: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), CheckpointError> {
        let name = self.stored_name(name);
        match &self.weights {
            Weights::Stored(_, index) => index.rows(name, 2)?.each(rows, cols, row),
            Weights::Dummy { seed } => {
                self.check_dummy(name, 2, &rows, &cols)?;
                let mut values = vec![0f32; cols.len()];
                for number in rows {
                    dummy::fill_row(*seed, name, number, cols.clone(), &mut values);
                    row(number, &values);
                }
                Ok(())
            }
        }
    }

    /// As `for_each_row`, but the bytes as they are stored (little-endian numbers of `dtype(name)`,
    /// or whole ggml blocks), for loading without a detour over f32.
    ///
    /// # Errors
    /// As `for_each_row`, and columns that cut a block.
    pub fn for_each_stored_row(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        row: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        match self.index() {
            Some(index) => index.rows(self.stored_name(name), 2)?.each_stored(rows, cols, row),
            None => {
                let mut bytes = Vec::new();
                self.for_each_row(name, rows, cols, &mut |number, values| {
                    bytes.clear();
                    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    row(number, &bytes);
                })
            }
        }
    }

    /// A 1-D tensor, or a part of it.
    pub fn vector(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        match &self.weights {
            Weights::Stored(_, index) => index.vector(name, range),
            Weights::Dummy { .. } => {
                self.check_dummy(name, 1, &(0..1), &range)?;
                // A norm that leaves the scale as it is, a bias that adds nothing.
                let is_zero = name.ends_with(".bias") || self.model.layer.norms_add_one;
                Ok(vec![if is_zero { 0.0 } else { 1.0 }; range.len()])
            }
        }
    }

    /// Tokenizer and chat templates, beside the weights.
    pub fn text(&self) -> Result<TextSources, CheckpointError> {
        match &self.weights {
            Weights::Stored(Format::Gguf, _) => {
                tokenizer_gguf::open(&self.path, self.model.vocab_size)
            }
            _ => TextSources::from_folder(&self.path, self.model.vocab_size),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn index(&self) -> Option<&TensorIndex> {
        match &self.weights {
            Weights::Stored(_, index) => Some(index),
            Weights::Dummy { .. } => None,
        }
    }

    /// A tied head is stored as the embedding.
    fn stored_name<'a>(&self, name: &'a str) -> &'a str {
        let tied = name == manifest::HEAD && self.model.tied_embeddings;
        if tied { manifest::EMBEDDING } else { name }
    }

    fn check_dummy(
        &self,
        name: &str,
        dimensions: usize,
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Result<(), CheckpointError> {
        let shape = self.shape(name)?;
        if shape.len() != dimensions {
            let expected = format!("a tensor of {dimensions} dimensions");
            return Err(self.refuse(name, &expected, describe_shape(&shape)));
        }
        let height = if dimensions == 1 { 1 } else { shape[0] };
        let inside = |range: &Range<usize>, end| range.start <= range.end && range.end <= end;
        if inside(rows, height) && inside(cols, shape[dimensions - 1]) {
            return Ok(());
        }
        let expected = format!("rows and columns within {}", describe_shape(&shape));
        Err(self.refuse(name, &expected, format!("rows {rows:?}, columns {cols:?}")))
    }

    fn refuse(&self, tensor: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.path.clone(),
            tensor: tensor.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }
}

/// The index without what the model does not read, and with all that it does.
fn checked(
    mut index: TensorIndex,
    model: &ModelConfig,
    specs: &[TensorSpec],
) -> Result<TensorIndex, CheckpointError> {
    drop_unread(&mut index, model.tied_embeddings);
    index.check(specs)?;
    Ok(index)
}

fn config_in(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let config = folder.join("config.json");
    if config.exists() {
        return Ok(config);
    }
    let (what, looked_for) = ("model config", "config.json".to_owned());
    Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for })
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
pub(crate) mod tests;
