//! Where each tensor's bytes are, under its Hugging Face name, and whether they are the tensors
//! that the family needs.

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::{CheckpointError, TensorSpec, dtype::DType, manifest, mapping::MappedFile};

/// A tensor as its container's header describes it. `offset` counts from the file's start; the
/// bytes lie within the file.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub name: String,
    pub dtype: DType,
    /// Rows first.
    pub shape: Vec<usize>,
    pub offset: usize,
    pub bytes: usize,
}

/// How rows in the file relate to rows in Hugging Face order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowOrder {
    HuggingFace,
    /// Q and K of Meta and GGUF: within a head, rotary pairs lie side by side, where Hugging Face
    /// keeps first halves and second halves.
    MetaHeads {
        head_dim: usize,
    },
}

impl RowOrder {
    /// The row in the file of row `row` in Hugging Face order.
    fn stored(self, row: usize) -> usize {
        match self {
            Self::HuggingFace => row,
            Self::MetaHeads { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct IndexedTensor {
    file: usize,
    stored: StoredTensor,
    order: RowOrder,
}

/// Mapped files and the tensors in them.
#[derive(Debug)]
pub(crate) struct TensorIndex {
    /// The folder or file that the user named.
    path: PathBuf,
    files: Vec<MappedFile>,
    tensors: HashMap<String, IndexedTensor>,
}

impl TensorIndex {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), files: Vec::new(), tensors: HashMap::new() }
    }

    /// Adds a file's tensors, each under its Hugging Face name.
    pub(crate) fn add(
        &mut self,
        file: MappedFile,
        tensors: impl IntoIterator<Item = (String, RowOrder, StoredTensor)>,
    ) -> Result<(), CheckpointError> {
        let number = self.files.len();
        self.files.push(file);
        for (name, order, stored) in tensors {
            let tensor = IndexedTensor { file: number, stored, order };
            if let Some(other) = self.tensors.insert(name.clone(), tensor) {
                return Err(CheckpointError::DuplicateTensor {
                    tensor: name,
                    first: self.files[other.file].path().to_owned(),
                    second: self.files[number].path().to_owned(),
                });
            }
        }
        Ok(())
    }

    pub(crate) fn files(&self) -> &[MappedFile] {
        &self.files
    }

    /// Dtype and bytes of every tensor.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (DType, u64)> {
        self.tensors.values().map(|tensor| (tensor.stored.dtype, tensor.stored.bytes as u64))
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
                let found = "nothing: the tensor is missing".to_owned();
                return Err(self.refuse(&self.path, name, describe_shape(shape), found));
            };
            if tensor.stored.shape != *shape {
                let path = self.files[tensor.file].path();
                let found = describe_shape(&tensor.stored.shape);
                return Err(self.refuse(path, name, describe_shape(shape), found));
            }
        }
        if self.tensors.len() == expected.len() {
            return Ok(());
        }
        let known: HashMap<_, _> = expected.iter().map(|spec| (spec.name.as_str(), ())).collect();
        let unknown = self.tensors.keys().filter(|name| !known.contains_key(name.as_str())).min();
        let name = unknown.map_or("", String::as_str);
        let tensor = &self.tensors[name];
        let (path, name) = (self.files[tensor.file].path(), &tensor.stored.name);
        let expected = "only tensors that the model reads".to_owned();
        Err(self.refuse(path, name, expected, "a tensor it does not have".to_owned()))
    }

    fn refuse(
        &self,
        path: &Path,
        tensor: &str,
        expected: String,
        found: String,
    ) -> CheckpointError {
        CheckpointError::Tensor {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            expected,
            found,
        }
    }

    /// The tensor `name` as rows; a 1-D tensor is one row.
    pub(crate) fn rows(&self, name: &str, dimensions: usize) -> Result<Rows<'_>, CheckpointError> {
        let Some(tensor) = self.tensors.get(name) else {
            let expected = "a tensor of the model".to_owned();
            return Err(self.refuse(&self.path, name, expected, "no such tensor".to_owned()));
        };
        let file = &self.files[tensor.file];
        let shape = match tensor.stored.shape.as_slice() {
            &[width] if dimensions == 1 => [1, width],
            &[rows, columns] if dimensions == 2 => [rows, columns],
            other => {
                let expected = format!("a tensor of {dimensions} dimensions");
                return Err(self.refuse(file.path(), name, expected, describe_shape(other)));
            }
        };
        let start = tensor.stored.offset;
        Ok(Rows {
            path: file.path(),
            name: tensor.stored.name.as_str(),
            dtype: tensor.stored.dtype,
            shape,
            order: tensor.order,
            bytes: &file.bytes()[start..start + tensor.stored.bytes],
        })
    }

    /// Reads every value once.
    pub(crate) fn scan(&self) -> Result<(), CheckpointError> {
        let mut names: Vec<_> = self.tensors.keys().collect();
        names.sort_unstable();
        for name in names {
            let dimensions = self.tensors[name].stored.shape.len();
            let rows = self.rows(name, dimensions)?;
            rows.each(0..rows.shape[0], 0..rows.shape[1], &mut |_, _| {})?;
        }
        Ok(())
    }
}

/// One tensor, row by row.
pub(crate) struct Rows<'a> {
    path: &'a Path,
    /// The name in the file, for messages.
    name: &'a str,
    pub dtype: DType,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    order: RowOrder,
    bytes: &'a [u8],
}

impl Rows<'_> {
    /// Calls `row(i, values)` with columns `cols` of each row of `rows`, as f32.
    pub(crate) fn each(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        row: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), CheckpointError> {
        self.check_range(&rows, &cols)?;
        let block = self.dtype.block_len();
        // Whole blocks are decoded, even where the columns begin or end inside one.
        let covering = cols.start / block * block..cols.end.next_multiple_of(block);
        let mut values = vec![0f32; covering.len()];
        for number in rows {
            self.dtype.dequantise(self.row_bytes(number, &covering), &mut values);
            self.check_finite(number, &values)?;
            row(number, &values[cols.start - covering.start..cols.end - covering.start]);
        }
        Ok(())
    }

    /// Calls `row(i, bytes)` with the stored bytes of columns `cols` of each row of `rows`.
    pub(crate) fn each_stored(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        row: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        self.check_range(&rows, &cols)?;
        let block = self.dtype.block_len();
        if !cols.start.is_multiple_of(block) || !cols.end.is_multiple_of(block) {
            let expected = format!("columns at multiples of {block}, the block of {}", self.dtype);
            return Err(self.refuse(expected, format!("{cols:?}")));
        }
        let mut values = vec![0f32; cols.len()];
        for number in rows {
            let bytes = self.row_bytes(number, &cols);
            self.dtype.dequantise(bytes, &mut values);
            self.check_finite(number, &values)?;
            row(number, bytes);
        }
        Ok(())
    }

    /// Bytes of whole blocks `cols` of a row. Ranges were checked, and the tensor's bytes are its
    /// shape's (both by the container's reader).
    fn row_bytes(&self, row: usize, cols: &Range<usize>) -> &[u8] {
        let bytes_of = |columns| columns / self.dtype.block_len() * self.dtype.block_bytes();
        let start = self.order.stored(row) * bytes_of(self.shape[1]);
        &self.bytes[start + bytes_of(cols.start)..start + bytes_of(cols.end)]
    }

    fn check_range(&self, rows: &Range<usize>, cols: &Range<usize>) -> Result<(), CheckpointError> {
        let inside = |range: &Range<usize>, end| range.start <= range.end && range.end <= end;
        if inside(rows, self.shape[0]) && inside(cols, self.shape[1]) {
            return Ok(());
        }
        let expected = format!("rows and columns within {}", describe_shape(&self.shape));
        Err(self.refuse(expected, format!("rows {rows:?}, columns {cols:?}")))
    }

    /// A model with a weight that is no number would stream garbage; who reads it says so.
    fn check_finite(&self, row: usize, values: &[f32]) -> Result<(), CheckpointError> {
        const INFINITY: u32 = f32::INFINITY.to_bits();
        let largest = values.iter().fold(0, |most, value| most.max(value.to_bits() << 1));
        if largest < INFINITY << 1 {
            return Ok(());
        }
        let value = values.iter().find(|value| !value.is_finite()).unwrap_or(&f32::NAN);
        Err(self.refuse("finite values".to_owned(), format!("{value} in row {row}")))
    }

    fn refuse(&self, expected: String, found: String) -> CheckpointError {
        let (path, tensor) = (self.path.to_owned(), self.name.to_owned());
        CheckpointError::Tensor { path, tensor, expected, found }
    }
}

/// `shape [8, 16]`.
pub(crate) fn describe_shape(shape: &[usize]) -> String {
    format!("shape {shape:?}")
}

/// Splits off what a model does not read although its exporter wrote it: known buffers, and the
/// copy of a tied head.
pub(crate) fn drop_unread(index: &mut TensorIndex, tied: bool) {
    let names: Vec<_> =
        index.tensors.keys().filter(|name| manifest::is_droppable(name)).cloned().collect();
    for name in names {
        index.remove(&name);
    }
    if tied && index.contains(manifest::EMBEDDING) {
        index.remove(manifest::HEAD);
    }
}
