//! From a checkpoint to this rank's matrices: only its rows and columns are read.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use tracing::info;
use trireme_checkpoint::{
    Checkpoint, CheckpointError, DType, ModelConfig, RankNumbers, RankSlice, Split,
};

use crate::{
    device::Device,
    layer_weights::LayerWeights,
    layers::{
        embedding::{Embedding, Head},
        norm::RmsNorm,
    },
    stage::{Entry, Exit},
};

/// What a rank is, among the others.
#[derive(Clone, Debug)]
pub struct Place {
    pub split: Split,
    /// `stage * tp + tp_rank`.
    pub rank: usize,
    pub slice: RankSlice,
}

impl Place {
    pub fn new(model: &ModelConfig, split: Split, rank: usize) -> Self {
        Self { split, rank, slice: split.slice(model, rank) }
    }
    pub fn ranks(&self) -> usize {
        self.split.tp * self.split.pp
    }
}

/// Reads the tensors that a model names.
pub struct Weights<'a, D: Device> {
    pub checkpoint: &'a Checkpoint,
    pub place: &'a Place,
    pub store: &'a D::Store,
    /// Threads that read and convert at once.
    pub threads: usize,
    /// Counts bytes as they become resident.
    pub bytes_loaded: &'a AtomicU64,
}

/// A tensor's name, and the rows and columns of it that this rank holds.
type Part<'a> = (&'a str, Range<usize>, Range<usize>);

type Ends<D> = (Entry<D>, Exit<D>);

impl<D: Device> Weights<'_, D> {
    pub fn model(&self) -> &ModelConfig {
        self.checkpoint.model()
    }

    /// Loads the ends of the stage and its layers at the same time, layers over several threads.
    pub fn ends_and_layers<T: Send>(
        &self,
        layer: impl Fn(&LayerWeights<'_, D>) -> Result<T, CheckpointError> + Sync,
    ) -> Result<(Ends<D>, Vec<T>), CheckpointError> {
        let range = self.place.slice.layers.clone();
        let next = AtomicUsize::new(range.start);
        let loaded = Mutex::new(Vec::with_capacity(range.len()));
        let take_layers = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= range.end {
                    return;
                }
                let layer = layer(&LayerWeights::new(self, index));
                loaded.lock().unwrap_or_else(PoisonError::into_inner).push((index, layer));
            }
        };
        let ends = thread::scope(|scope| {
            for _ in 1..self.threads {
                scope.spawn(take_layers);
            }
            let ends = self.ends();
            take_layers();
            ends
        })?;
        let mut loaded = loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
        loaded.sort_by_key(|(index, _)| *index);
        let layers = loaded.into_iter().map(|(_, layer)| layer).collect::<Result<_, _>>()?;
        Ok((ends, layers))
    }

    fn ends(&self) -> Result<Ends<D>, CheckpointError> {
        let (slice, tp) = (&self.place.slice, self.place.split.tp);
        let vocab = slice.vocab.start as u32..slice.vocab.end as u32;
        let multipliers = &self.model().multipliers;
        let embedding = "model.embed_tokens.weight";
        let mut table = None;
        let entry = if slice.first_stage {
            let loaded = Arc::new(self.matrix(&[embedding])?);
            table = Some(loaded.clone());
            Entry::Tokens(Embedding::new(loaded, vocab, multipliers.embedding))
        } else {
            Entry::From(self.place.rank - tp)
        };
        if !slice.last_stage {
            return Ok((entry, Exit::To(self.place.rank + tp)));
        }
        let head = match table {
            Some(table) if self.model().tied_embeddings => table,
            _ => Arc::new(self.matrix(&["lm_head.weight"])?),
        };
        let norm = self.norm("model.norm.weight")?;
        Ok((entry, Exit::Logits { norm, head: Head::new(head, multipliers.logits) }))
    }

    /// A norm, which every rank holds whole.
    pub fn norm(&self, name: &str) -> Result<RmsNorm<D>, CheckpointError> {
        Ok(RmsNorm::new(self.norm_vector(name)?, self.model().rms_norm_eps))
    }

    /// What a norm multiplies by.
    pub fn norm_vector(&self, name: &str) -> Result<D::Vector, CheckpointError> {
        let mut values = self.vector(name)?;
        if self.model().layer.norms_add_one {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(D::vector(self.store, values))
    }

    /// This rank's parts of several biases, one after the other; none if the model has no such
    /// tensors, or this rank has no part of them.
    pub fn bias(&self, names: &[String]) -> Result<Option<D::Vector>, CheckpointError> {
        if !names.iter().all(|name| self.checkpoint.has(name)) {
            return Ok(None);
        }
        let mut values = Vec::new();
        for name in names {
            values.extend(self.vector(name)?);
        }
        Ok((!values.is_empty()).then(|| D::vector(self.store, values)))
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let spec = self.checkpoint.tensor(name)?;
        let range = self.place.slice.part(self.model(), spec.rows, spec.shape[0]);
        let values = self.checkpoint.vector(name, range)?;
        self.count(4 * values.len());
        Ok(values)
    }

    /// This rank's parts of several tensors, one under the other in one matrix.
    pub fn matrix(&self, names: &[&str]) -> Result<D::Matrix, CheckpointError> {
        let (model, slice) = (self.model(), &self.place.slice);
        let mut parts = Vec::with_capacity(names.len());
        for &name in names {
            let spec = self.checkpoint.tensor(name)?;
            let rows = slice.part(model, spec.rows, spec.shape[0]);
            let columns = slice.part(model, spec.columns, spec.shape[1]);
            parts.push((name, rows, columns));
        }
        // Neighbours that are stored alike are one matrix: fewer products.
        let mut kinds = Vec::with_capacity(parts.len());
        for part in &parts {
            kinds.push(self.kept_blocks(part)?);
        }
        let mut matrices = Vec::new();
        let mut rest = parts.as_slice();
        for alike in kinds.chunk_by(|a, b| a == b) {
            let (these, others) = rest.split_at(alike.len());
            matrices.push(match alike[0] {
                Some(dtype) => self.block_matrix(these, dtype)?,
                None => self.number_matrix(these)?,
            });
            rest = others;
        }
        Ok(match matrices.len() {
            1 => matrices.remove(0),
            _ => D::stacked(matrices),
        })
    }

    /// The type whose blocks of this part are kept as they are; none: it becomes numbers.
    fn kept_blocks(&self, (name, _, columns): &Part<'_>) -> Result<Option<DType>, CheckpointError> {
        let dtype = self.checkpoint.dtype(name)?;
        if D::block_matrix(self.store, 0, 0, dtype).is_none() {
            return Ok(None);
        }
        let block = dtype.block_len();
        let whole = columns.start.is_multiple_of(block) && columns.end.is_multiple_of(block);
        if !whole {
            info!(
                tensor = name,
                ?columns,
                block,
                rank = self.place.rank,
                "the split tears blocks of {dtype}: this rank's part becomes numbers"
            );
        }
        Ok(whole.then_some(dtype))
    }

    fn block_matrix(&self, parts: &[Part<'_>], dtype: DType) -> Result<D::Matrix, CheckpointError> {
        let (outputs, inputs) = shape(parts);
        let mut matrix = match D::block_matrix(self.store, outputs, inputs, dtype) {
            Some(matrix) => matrix,
            None => return self.number_matrix(parts),
        };
        let mut output = 0;
        for (name, rows, columns) in parts {
            let (rows, columns) = (rows.clone(), columns.clone());
            self.checkpoint.for_each_stored_row(name, rows, columns, &mut |_, blocks| {
                D::set_blocks(&mut matrix, output, blocks);
                output += 1;
            })?;
        }
        self.count(D::matrix_bytes(&matrix));
        Ok(matrix)
    }

    fn number_matrix(&self, parts: &[Part<'_>]) -> Result<D::Matrix, CheckpointError> {
        let (outputs, inputs) = shape(parts);
        let mut matrix = D::matrix(self.store, outputs, inputs);
        let row_bytes = inputs * D::weight_size(self.store);
        let mut output = 0;
        for (name, rows, columns) in parts {
            let height = rows.len();
            let (rows, columns) = (rows.clone(), columns.clone());
            self.checkpoint.for_each_row(name, rows, columns, &mut |_, row| {
                D::set_row(&mut matrix, output, row);
                output += 1;
            })?;
            self.count(height * row_bytes);
        }
        D::finish(&mut matrix);
        Ok(matrix)
    }

    fn count(&self, bytes: usize) {
        self.bytes_loaded.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

fn shape(parts: &[Part<'_>]) -> (usize, usize) {
    let outputs = parts.iter().map(|(_, rows, _)| rows.len()).sum();
    (outputs, parts.first().map_or(0, |(_, _, columns)| columns.len()))
}

/// Bytes that [`Weights`] counts for a whole rank that keeps no blocks: what progress is measured
/// against.
pub fn total_bytes(model: &ModelConfig, slice: &RankSlice, weight_size: usize) -> u64 {
    let numbers = RankNumbers::of(model, slice);
    numbers.matrices * weight_size as u64 + 4 * numbers.vectors
}
