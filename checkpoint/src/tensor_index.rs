//! Where each tensor's bytes are, under its Hugging Face name, and whether they are the tensors
//! that the family needs.

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::{
    CheckpointError, TensorSpec,
    buffers::is_buffer,
    dtype::DType,
    manifest,
    mapping::MappedFile,
    rows::{Join, Piece, RowOrder, Rows},
};

/// A tensor as its container's header describes it. `offset` counts from the file's start; the
/// bytes lie within the file.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub name: String,
    pub dtype: DType,
    /// Rows first.
    pub shape: Vec<usize>,
    pub offset: usize,
    /// Of all its numbers.
    pub bytes: usize,
    /// Numbers from a row to the next, and from a column to the next, where its numbers do not
    /// simply follow each other.
    pub strides: Option<[usize; 2]>,
}

#[derive(Debug)]
struct IndexedTensor {
    dtype: DType,
    shape: Vec<usize>,
    order: RowOrder,
    join: Join,
    /// Number of the file, and what is in it; at least one.
    pieces: Vec<(usize, StoredTensor)>,
}

/// Mapped files and the tensors in them.
#[derive(Debug)]
pub(crate) struct TensorIndex {
    /// The folder or file that the user named.
    path: PathBuf,
    files: Vec<MappedFile>,
    tensors: HashMap<String, IndexedTensor>,
    /// What the files call the tensor of a Hugging Face name, for messages.
    stored_name: fn(&str) -> String,
}

/// A tensor under its Hugging Face name.
pub(crate) type NamedTensor = (String, RowOrder, StoredTensor);

impl TensorIndex {
    /// `path` is what the user named; `stored_name` says what files of this layout call the tensor
    /// of a Hugging Face name.
    pub(crate) fn new(path: &Path, stored_name: fn(&str) -> String) -> Self {
        Self { path: path.to_owned(), files: Vec::new(), tensors: HashMap::new(), stored_name }
    }

    /// Adds a file's tensors, each under its Hugging Face name.
    pub(crate) fn add(
        &mut self,
        file: MappedFile,
        tensors: impl IntoIterator<Item = NamedTensor>,
    ) -> Result<(), CheckpointError> {
        let number = self.files.len();
        self.files.push(file);
        for (name, order, stored) in tensors {
            let (dtype, shape) = (stored.dtype, stored.shape.clone());
            let pieces = vec![(number, stored)];
            let tensor = IndexedTensor { dtype, shape, order, join: Join::Rows, pieces };
            self.insert(name, tensor)?;
        }
        Ok(())
    }

    /// Adds files that each hold a part of every tensor, in order. `specs` say what the parts
    /// make together, and so whether they lie under each other, side by side, or are copies.
    pub(crate) fn add_shards(
        &mut self,
        files: Vec<(MappedFile, Vec<NamedTensor>)>,
        specs: &[TensorSpec],
    ) -> Result<(), CheckpointError> {
        let mut shards: HashMap<String, Vec<Option<(RowOrder, StoredTensor)>>> = HashMap::new();
        let count = files.len();
        for (number, (file, tensors)) in files.into_iter().enumerate() {
            for (name, order, stored) in tensors {
                let parts = shards.entry(name.clone()).or_insert_with(|| vec![None; count]);
                if parts[number].replace((order, stored)).is_some() {
                    let path = file.path().to_owned();
                    let (first, second) = (path.clone(), path);
                    return Err(CheckpointError::DuplicateTensor { tensor: name, first, second });
                }
            }
            self.files.push(file);
        }
        let shapes: HashMap<&str, &Vec<usize>> =
            specs.iter().map(|spec| (spec.name.as_str(), &spec.shape)).collect();
        let mut shards: Vec<_> = shards.into_iter().collect();
        shards.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, parts) in shards {
            let tensor = self.join(&name, parts, shapes.get(name.as_str()).copied())?;
            self.insert(name, tensor)?;
        }
        Ok(())
    }

    /// One tensor of its parts in each file.
    fn join(
        &self,
        name: &str,
        parts: Vec<Option<(RowOrder, StoredTensor)>>,
        shape: Option<&Vec<usize>>,
    ) -> Result<IndexedTensor, CheckpointError> {
        let (mut order, mut pieces) = (RowOrder::HuggingFace, Vec::new());
        for (number, part) in parts.into_iter().enumerate() {
            let Some((part_order, stored)) = part else {
                let (path, name) = (self.files[number].path(), (self.stored_name)(name));
                let expected = "a part of the tensor in each shard".to_owned();
                return Err(refuse(path, &name, expected, "nothing".to_owned()));
            };
            order = part_order;
            pieces.push((number, stored));
        }
        let (_, first) = &pieces[0];
        let (dtype, first_shape) = (first.dtype, first.shape.clone());
        // Copies, as of norms: the first serves.
        if shape == Some(&first_shape) {
            pieces.truncate(1);
        }
        for (number, stored) in &pieces {
            if stored.dtype != dtype || stored.shape.len() != first_shape.len() {
                let path = self.files[*number].path();
                let expected = format!("{dtype} of {} dimensions", first_shape.len());
                let found = format!("{} of {}", stored.dtype, describe_shape(&stored.shape));
                return Err(refuse(path, &stored.name, expected, found));
            }
        }
        let together = |dimension: usize| {
            let sizes = pieces.iter().map(|(_, stored)| stored.shape[dimension]);
            let mut shape = first_shape.clone();
            shape[dimension] = sizes.fold(0, usize::saturating_add);
            shape
        };
        // What fits neither way is refused by `check`, with the shape that is found.
        let last = first_shape.len().saturating_sub(1);
        let side_by_side = last == 0 || shape == Some(&together(last));
        let (join, shape) = match side_by_side {
            _ if first_shape.is_empty() => (Join::Rows, Vec::new()),
            true => (Join::Columns, together(last)),
            false => (Join::Rows, together(0)),
        };
        let other = usize::from(join == Join::Rows);
        let uneven = |stored: &StoredTensor| stored.shape.get(other) != first_shape.get(other);
        if let Some((number, stored)) =
            pieces.iter().find(|(_, stored)| last == 1 && uneven(stored))
        {
            let expected =
                format!("a part like the first shard's, {}", describe_shape(&first_shape));
            let found = describe_shape(&stored.shape);
            return Err(refuse(self.files[*number].path(), &stored.name, expected, found));
        }
        Ok(IndexedTensor { dtype, shape, order, join, pieces })
    }

    fn insert(&mut self, name: String, tensor: IndexedTensor) -> Result<(), CheckpointError> {
        let path = |tensor: &IndexedTensor| self.files[tensor.pieces[0].0].path().to_owned();
        let second = path(&tensor);
        match self.tensors.insert(name.clone(), tensor) {
            None => Ok(()),
            Some(other) => {
                let (tensor, first) = (name, path(&other));
                Err(CheckpointError::DuplicateTensor { tensor, first, second })
            }
        }
    }

    pub(crate) fn files(&self) -> &[MappedFile] {
        &self.files
    }

    /// Dtype and bytes of every tensor.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (DType, u64)> {
        self.tensors.values().map(|tensor| {
            let bytes = tensor.pieces.iter().map(|(_, stored)| stored.bytes as u64).sum();
            (tensor.dtype, bytes)
        })
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Drops a tensor that the model does not read.
    pub(crate) fn remove(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Exactly the tensors of `expected` are here, with their shapes.
    pub(crate) fn check(&self, expected: &[TensorSpec]) -> Result<(), CheckpointError> {
        for TensorSpec { name, shape, .. } in expected {
            let Some(tensor) = self.tensors.get(name) else {
                let (name, found) = ((self.stored_name)(name), "nothing: the tensor is missing");
                return Err(refuse(&self.path, &name, describe_shape(shape), found.to_owned()));
            };
            if tensor.shape != *shape {
                let (path, name) = self.place_of(tensor);
                let found = describe_shape(&tensor.shape);
                return Err(refuse(path, name, describe_shape(shape), found));
            }
        }
        if self.tensors.len() == expected.len() {
            return Ok(());
        }
        let known: HashMap<_, _> = expected.iter().map(|spec| (spec.name.as_str(), ())).collect();
        let unknown = self.tensors.keys().filter(|name| !known.contains_key(name.as_str())).min();
        let name = unknown.map_or("", String::as_str);
        let (path, name) = self.place_of(&self.tensors[name]);
        let expected = "only tensors that the model reads".to_owned();
        Err(refuse(path, name, expected, "a tensor it does not have".to_owned()))
    }

    /// The first file that a tensor is in, and its name there.
    fn place_of<'a>(&'a self, tensor: &'a IndexedTensor) -> (&'a Path, &'a str) {
        let (file, stored) = &tensor.pieces[0];
        (self.files[*file].path(), &stored.name)
    }

    /// The tensor `name` as rows; a 1-D tensor is one row.
    pub(crate) fn rows(&self, name: &str, dimensions: usize) -> Result<Rows<'_>, CheckpointError> {
        let Some(tensor) = self.tensors.get(name) else {
            let expected = "a tensor of the model".to_owned();
            return Err(refuse(&self.path, name, expected, "no such tensor".to_owned()));
        };
        let &IndexedTensor { dtype, order, join, .. } = tensor;
        let shape = match tensor.shape.as_slice() {
            &[width] if dimensions == 1 => [1, width],
            &[rows, columns] if dimensions == 2 => [rows, columns],
            other => {
                let (path, name) = self.place_of(tensor);
                let expected = format!("a tensor of {dimensions} dimensions");
                return Err(refuse(path, name, expected, describe_shape(other)));
            }
        };
        let mut start = 0;
        let mut pieces = Vec::with_capacity(tensor.pieces.len());
        for (file, stored) in &tensor.pieces {
            // Pieces have as many dimensions as the whole.
            if let Some(piece) = Piece::new(&self.files[*file], stored, dimensions, start) {
                start = piece.end(join);
                pieces.push(piece);
            }
        }
        // A vector is one row: what its order says of rows is true of its numbers (`vector`).
        let order = if dimensions == 1 { RowOrder::HuggingFace } else { order };
        Ok(Rows { dtype, shape, order, join, pieces })
    }

    /// A part of a 1-D tensor.
    pub(crate) fn vector(
        &self,
        name: &str,
        range: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let rows = self.rows(name, 1)?;
        let order = self.tensors[name].order;
        let mut values = Vec::new();
        if order == RowOrder::HuggingFace {
            rows.each(0..1, range, &mut |_, row| values = row.to_vec())?;
        } else {
            rows.check_range(&(0..1), &range)?;
            let take = |row: &[f32]| range.clone().map(|i| row[order.stored(i)]).collect();
            rows.each(0..1, 0..rows.shape[1], &mut |_, row| values = take(row))?;
        }
        Ok(values)
    }

    /// Reads every value once.
    pub(crate) fn scan(&self) -> Result<(), CheckpointError> {
        let mut names: Vec<_> = self.tensors.keys().collect();
        names.sort_unstable();
        for name in names {
            let dimensions = self.tensors[name].shape.len();
            let rows = self.rows(name, dimensions)?;
            rows.each(0..rows.shape[0], 0..rows.shape[1], &mut |_, _| {})?;
        }
        Ok(())
    }
}

fn refuse(path: &Path, tensor: &str, expected: String, found: String) -> CheckpointError {
    let (path, tensor) = (path.to_owned(), tensor.to_owned());
    CheckpointError::Tensor { path, tensor, expected, found }
}

/// `shape [8, 16]`.
pub(crate) fn describe_shape(shape: &[usize]) -> String {
    format!("shape {shape:?}")
}

/// Splits off what a model does not read although its exporter wrote it: known buffers, and the
/// copy of a tied head.
pub(crate) fn drop_unread(index: &mut TensorIndex, tied: bool) {
    let names: Vec<_> = index.tensors.keys().filter(|name| is_buffer(name)).cloned().collect();
    for name in names {
        index.remove(&name);
    }
    if tied && index.contains(manifest::EMBEDDING) {
        index.remove(manifest::HEAD);
    }
}
