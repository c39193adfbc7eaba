//! One tensor, row by row, wherever its numbers lie: in one file or several, one after the other or
//! with strides, in Hugging Face order or not.

use std::{ops::Range, path::Path};

use crate::{
    CheckpointError,
    dtype::DType,
    mapping::MappedFile,
    tensor_index::{StoredTensor, describe_shape},
};

/// Pages of a map that were read are given back in parts of this size, so that a rank that reads
/// its weights into memory does not hold them twice.
const RELEASED_BYTES: usize = 1 << 20;

/// How rows in the file relate to rows in Hugging Face order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::HuggingFace => row,
            Self::MetaHeads { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }

    /// Rows in the file that hold at least the rows `rows`.
    fn covering(self, rows: Range<usize>) -> Range<usize> {
        match self {
            Self::HuggingFace => rows,
            Self::MetaHeads { head_dim } => {
                rows.start / head_dim * head_dim..rows.end.next_multiple_of(head_dim)
            }
        }
    }
}

/// How the pieces of a tensor are put together; one piece is either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// One under the other.
    Rows,
    /// Side by side.
    Columns,
}

/// A piece of a tensor as rows; a 1-D tensor is one row.
pub(crate) struct Piece<'a> {
    file: &'a MappedFile,
    stored: &'a StoredTensor,
    rows: usize,
    columns: usize,
    /// Its first row or column in the whole tensor.
    start: usize,
}

impl<'a> Piece<'a> {
    /// None where the tensor has not as many dimensions.
    pub(crate) fn new(
        file: &'a MappedFile,
        stored: &'a StoredTensor,
        dimensions: usize,
        start: usize,
    ) -> Option<Self> {
        let (rows, columns) = match *stored.shape.as_slice() {
            [width] if dimensions == 1 => (1, width),
            [rows, columns] if dimensions == 2 => (rows, columns),
            _ => return None,
        };
        Some(Self { file, stored, rows, columns, start })
    }

    /// What the next piece starts at.
    pub(crate) fn end(&self, join: Join) -> usize {
        self.start + if join == Join::Rows { self.rows } else { self.columns }
    }

    fn bytes_of(&self, numbers: usize) -> usize {
        numbers / self.stored.dtype.block_len() * self.stored.dtype.block_bytes()
    }

    fn strides(&self) -> [usize; 2] {
        self.stored.strides.unwrap_or([self.columns, 1])
    }

    /// Bytes of whole blocks `cols` of a row, if they lie one after the other. Places were checked
    /// against the file by the container's reader, ranges by `Rows`.
    fn in_place(&self, row: usize, cols: &Range<usize>) -> Option<&'a [u8]> {
        let [row_stride, column_stride] = self.strides();
        let start = self.stored.offset + self.bytes_of(row * row_stride);
        let bytes = start + self.bytes_of(cols.start)..start + self.bytes_of(cols.end);
        (column_stride == 1).then(|| &self.file.bytes()[bytes])
    }

    fn gather(&self, row: usize, cols: &Range<usize>, into: &mut Vec<u8>) {
        if let Some(bytes) = self.in_place(row, cols) {
            into.extend_from_slice(bytes);
            return;
        }
        let [row_stride, column_stride] = self.strides();
        let width = self.stored.dtype.block_bytes();
        for column in cols.clone() {
            let number = row * row_stride + column * column_stride;
            let start = self.stored.offset + number * width;
            into.extend_from_slice(&self.file.bytes()[start..start + width]);
        }
    }

    /// Gives back the memory of rows that lie one after the other.
    fn release(&self, rows: Range<usize>) {
        let rows = rows.start.min(self.rows)..rows.end.min(self.rows);
        if self.stored.strides.is_none() && !rows.is_empty() {
            let start = self.stored.offset + self.bytes_of(rows.start * self.columns);
            self.file.release(start..start + self.bytes_of(rows.len() * self.columns));
        }
    }
}

/// Takes the number of a row and its stored bytes.
type Visitor<'a> = dyn FnMut(usize, &[u8]) -> Result<(), CheckpointError> + 'a;

/// One tensor, row by row.
pub(crate) struct Rows<'a> {
    pub dtype: DType,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    pub order: RowOrder,
    pub join: Join,
    /// At least one.
    pub pieces: Vec<Piece<'a>>,
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
        let wanted = cols.start - covering.start..cols.end - covering.start;
        self.visit(rows, &covering, &mut |number, bytes| {
            self.dtype.dequantise(bytes, &mut values);
            self.check_finite(number, &values)?;
            row(number, &values[wanted.clone()]);
            Ok(())
        })
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
            return Err(self.refuse(0, expected, format!("{cols:?}")));
        }
        let mut values = vec![0f32; cols.len()];
        self.visit(rows, &cols, &mut |number, bytes| {
            self.dtype.dequantise(bytes, &mut values);
            self.check_finite(number, &values)?;
            row(number, bytes);
            Ok(())
        })
    }

    fn visit(
        &self,
        rows: Range<usize>,
        cols: &Range<usize>,
        row: &mut Visitor,
    ) -> Result<(), CheckpointError> {
        let row_bytes = self.dtype.bytes(self.shape[1]).unwrap_or(0).max(1);
        let part = (RELEASED_BYTES / row_bytes).max(1);
        let mut gathered = Vec::new();
        let mut next = rows.start;
        while next < rows.end {
            let numbers = next..rows.end.min(next + part);
            for number in numbers.clone() {
                row(number, self.row_bytes(number, cols, &mut gathered))?;
            }
            next = numbers.end;
            self.release(numbers);
        }
        Ok(())
    }

    /// The piece that holds the row or column `at` of the file's order.
    fn piece_at(&self, at: usize) -> usize {
        self.pieces.partition_point(|piece| piece.start <= at).saturating_sub(1)
    }

    /// Bytes of whole blocks `cols` of a row: in place, else put together in `gathered`.
    fn row_bytes<'b>(
        &'b self,
        row: usize,
        cols: &Range<usize>,
        gathered: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let row = self.order.stored(row);
        let (first, row) = match self.join {
            Join::Rows => {
                let piece = self.piece_at(row);
                (piece, row - self.pieces[piece].start)
            }
            Join::Columns => (self.piece_at(cols.start), row),
        };
        let columns_before = |piece: &Piece| if self.join == Join::Rows { 0 } else { piece.start };
        let start = columns_before(&self.pieces[first]);
        if cols.end <= start + self.pieces[first].columns {
            let cols = cols.start - start..cols.end - start;
            if let Some(bytes) = self.pieces[first].in_place(row, &cols) {
                return bytes;
            }
        }
        gathered.clear();
        for piece in &self.pieces[first..] {
            let start = columns_before(piece);
            let end = cols.end.min(start + piece.columns);
            if cols.end <= start {
                break;
            }
            piece.gather(row, &(cols.start.max(start) - start..end - start), gathered);
            if self.join == Join::Rows {
                break;
            }
        }
        gathered
    }

    fn release(&self, rows: Range<usize>) {
        let rows = self.order.covering(rows);
        for piece in &self.pieces {
            let start = if self.join == Join::Rows { piece.start } else { 0 };
            piece.release(rows.start.saturating_sub(start)..rows.end.saturating_sub(start));
        }
    }

    pub(crate) fn check_range(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Result<(), CheckpointError> {
        let inside = |range: &Range<usize>, end| range.start <= range.end && range.end <= end;
        if inside(rows, self.shape[0]) && inside(cols, self.shape[1]) {
            return Ok(());
        }
        let expected = format!("rows and columns within {}", describe_shape(&self.shape));
        Err(self.refuse(0, expected, format!("rows {rows:?}, columns {cols:?}")))
    }

    /// A model with a weight that is no number would stream garbage; who reads it says so.
    fn check_finite(&self, row: usize, values: &[f32]) -> Result<(), CheckpointError> {
        const INFINITY: u32 = f32::INFINITY.to_bits();
        let largest = values.iter().fold(0, |most, value| most.max(value.to_bits() << 1));
        if largest < INFINITY << 1 {
            return Ok(());
        }
        let value = values.iter().find(|value| !value.is_finite()).unwrap_or(&f32::NAN);
        let piece = match self.join {
            Join::Rows => self.piece_at(self.order.stored(row)),
            Join::Columns => 0,
        };
        Err(self.refuse(piece, "finite values".to_owned(), format!("{value} in row {row}")))
    }

    /// Names a piece's file, and the tensor as it is called there.
    fn refuse(&self, piece: usize, expected: String, found: String) -> CheckpointError {
        let piece = &self.pieces[piece];
        let (path, tensor): (&Path, _) = (piece.file.path(), &piece.stored.name);
        CheckpointError::Tensor { path: path.to_owned(), tensor: tensor.clone(), expected, found }
    }
}
