//! From a checkpoint to this rank's matrices: only its rows and columns are read.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use trireme_checkpoint::{Checkpoint, CheckpointError, ModelConfig, RankSlice, Split};
use trireme_kernels::HeadLayout;

use crate::{
    device::Device,
    layers::{
        attention::head_layout,
        embedding::{Embedding, Head},
        norm::RmsNorm,
    },
    stage::{Entry, Exit},
};

/// Which part of a tensor's dimension belongs to this rank.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    Heads,
    KvHeads,
    Mlp,
}

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

type Ends<D> = (Entry<D>, Exit<D>);

impl<D: Device> Weights<'_, D> {
    fn model(&self) -> &ModelConfig {
        self.checkpoint.model()
    }

    /// Loads the ends of the stage and its layers at the same time, layers over several threads.
    pub fn ends_and_layers<T: Send>(
        &self,
        layer: impl Fn(&Self, usize) -> Result<T, CheckpointError> + Sync,
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
                let layer = layer(self, index);
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
        let embedding = "model.embed_tokens.weight";
        let mut table = None;
        let entry = if slice.first_stage {
            let loaded = Arc::new(self.vocabulary(embedding)?);
            table = Some(loaded.clone());
            Entry::Tokens(Embedding::new(loaded, vocab))
        } else {
            Entry::From(self.place.rank - tp)
        };
        if !slice.last_stage {
            return Ok((entry, Exit::To(self.place.rank + tp)));
        }
        let head = match table {
            Some(table) if self.model().tied_embeddings => table,
            _ if self.model().tied_embeddings => Arc::new(self.vocabulary(embedding)?),
            _ => Arc::new(self.vocabulary("lm_head.weight")?),
        };
        Ok((entry, Exit::Logits { norm: self.norm("model.norm.weight")?, head: Head::new(head) }))
    }

    /// This rank's rows of the vocabulary.
    fn vocabulary(&self, name: &str) -> Result<D::Matrix, CheckpointError> {
        self.matrix(&[(name, self.place.slice.vocab.clone())], 0..self.model().hidden_size)
    }

    /// A vector that every rank holds whole.
    pub fn norm(&self, name: &str) -> Result<RmsNorm<D>, CheckpointError> {
        let values = self.checkpoint.vector(name, 0..self.model().hidden_size)?;
        self.count(4 * values.len());
        Ok(RmsNorm::new(D::vector(self.store, values), self.model().rms_norm_eps))
    }

    /// This rank's rows of several tensors, one under the other in one matrix.
    pub fn rows_of(&self, parts: &[(String, Part)]) -> Result<D::Matrix, CheckpointError> {
        let parts: Vec<_> =
            parts.iter().map(|(name, part)| (name.as_str(), self.range(*part))).collect();
        self.matrix(&parts, 0..self.model().hidden_size)
    }

    /// This rank's columns of a tensor whose rows are the hidden width.
    pub fn columns_of(&self, name: &str, part: Part) -> Result<D::Matrix, CheckpointError> {
        self.matrix(&[(name, 0..self.model().hidden_size)], self.range(part))
    }

    pub fn head_layout(&self) -> HeadLayout {
        head_layout(self.model(), &self.place.slice)
    }

    pub fn mlp_width(&self) -> usize {
        self.place.slice.mlp.len()
    }

    fn range(&self, part: Part) -> Range<usize> {
        let (slice, head_dim) = (&self.place.slice, self.model().head_dim);
        let heads = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        match part {
            Part::Heads => heads(&slice.heads),
            Part::KvHeads => heads(&slice.kv_heads),
            Part::Mlp => slice.mlp.clone(),
        }
    }

    fn matrix(
        &self,
        parts: &[(&str, Range<usize>)],
        columns: Range<usize>,
    ) -> Result<D::Matrix, CheckpointError> {
        let outputs = parts.iter().map(|(_, rows)| rows.len()).sum();
        let mut matrix = D::matrix(self.store, outputs, columns.len());
        let row_bytes = columns.len() * D::weight_size(self.store);
        let mut output = 0;
        for (name, rows) in parts {
            self.checkpoint.for_each_row(name, rows.clone(), columns.clone(), &mut |_, row| {
                D::set_row(&mut matrix, output, row);
                output += 1;
            })?;
            self.count(rows.len() * row_bytes);
        }
        Ok(matrix)
    }

    fn count(&self, bytes: usize) {
        self.bytes_loaded.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Bytes that [`Weights`] counts for a whole rank: what progress is measured against.
pub fn total_bytes(model: &ModelConfig, slice: &RankSlice, weight_size: usize) -> u64 {
    let heads = (2 * slice.heads.len() + 2 * slice.kv_heads.len()) * model.head_dim;
    let layer = model.hidden_size * (heads + 3 * slice.mlp.len());
    let shared = model.tied_embeddings && slice.first_stage && slice.last_stage;
    let tables = usize::from(slice.first_stage) + usize::from(slice.last_stage && !shared);
    let table = slice.vocab.len() * model.hidden_size;
    let norms = 2 * slice.layers.len() + usize::from(slice.last_stage);
    let weights = slice.layers.len() * layer + tables * table;
    (weights * weight_size + 4 * norms * model.hidden_size) as u64
}
