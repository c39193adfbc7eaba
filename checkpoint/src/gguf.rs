//! The GGUF container, versions 2 and 3 (ggml `docs/gguf.md`): header, metadata, tensor list,
//! aligned data; all little-endian. Every count and length is held against the bytes that are left
//! before anything is allocated, so a hostile file costs no more memory than its own size does.
//!
//! candle decodes the blocks, but its header reader (`gguf_file`) is not used: a tensor of a type
//! that it does not know fails the header without being named, a key or tensor that is there twice
//! replaces the first, tensors may overlap, an alignment of 0 is a division by zero, version 1 is
//! read as if it were sound, and tensors are loaded whole, where a rank needs some rows of them.

use std::collections::HashSet;

use crate::{
    CheckpointError, DType,
    gguf_metadata::{Metadata, Value},
    mapping::MappedFile,
    tensor_index::StoredTensor,
};

const DEFAULT_ALIGNMENT: u64 = 32;
const LARGEST_ALIGNMENT: u64 = 1 << 20;
/// `GGML_MAX_DIMS`.
const MOST_DIMENSIONS: u32 = 4;
/// Longest allowed key: `docs/gguf.md` says 2^16 - 1.
const LONGEST_KEY: u64 = (1 << 16) - 1;

/// Metadata and tensors, offsets counted from the start of the file, all within it.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<StoredTensor>,
}

/// Reads and checks everything before the data.
pub(crate) fn read_header(file: &MappedFile) -> Result<Header, CheckpointError> {
    let mut cursor = Cursor { file, at: 0 };
    let magic = cursor.array::<4>("magic")?;
    if &magic != b"GGUF" {
        let found = format!("{:?}", String::from_utf8_lossy(&magic));
        return Err(cursor.refuse("magic", "\"GGUF\"", found));
    }
    let version = cursor.u32("version")?;
    if !matches!(version, 2 | 3) {
        let found = match version.swap_bytes() {
            2 | 3 => "a big-endian file (convert it to little-endian)".to_owned(),
            _ => version.to_string(),
        };
        return Err(cursor.refuse("version", "2 or 3", found));
    }
    // The shortest tensor entry: empty name, no dimension, type, offset; the shortest key: empty,
    // type, one byte.
    let tensor_count = cursor.count("number of tensors", 8 + 4 + 4 + 8)?;
    let key_count = cursor.count("number of metadata keys", 8 + 4 + 1)?;
    let mut metadata = Metadata::new(file.path());
    for _ in 0..key_count {
        let key = cursor.key()?;
        let kind = cursor.u32(&key)?;
        let value = cursor.value(kind, &key)?;
        if metadata.insert(key.clone(), value) {
            return Err(cursor.refuse(&key, "each metadata key once", "it twice".to_owned()));
        }
    }
    let mut listed = Vec::new();
    for _ in 0..tensor_count {
        listed.push(cursor.tensor()?);
    }
    let alignment = alignment(&cursor, &metadata)?;
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let tensors = place(file, listed, data_start, alignment)?;
    Ok(Header { metadata, tensors })
}

fn alignment(cursor: &Cursor, metadata: &Metadata) -> Result<u64, CheckpointError> {
    let key = "general.alignment";
    let alignment = metadata.size(key)?.map_or(DEFAULT_ALIGNMENT, |size| size as u64);
    if alignment.is_power_of_two() && alignment <= LARGEST_ALIGNMENT {
        return Ok(alignment);
    }
    let expected = format!("a power of two up to {LARGEST_ALIGNMENT}");
    Err(cursor.refuse(key, &expected, alignment.to_string()))
}

/// A tensor as listed: its `offset` still counts from the start of the data.
struct Listed {
    tensor: StoredTensor,
    offset: u64,
}

/// Turns offsets into places in the file; no tensor reaches out of it or into another.
fn place(
    file: &MappedFile,
    listed: Vec<Listed>,
    data_start: u64,
    alignment: u64,
) -> Result<Vec<StoredTensor>, CheckpointError> {
    let size = file.bytes().len() as u64;
    let mut names = HashSet::new();
    let mut tensors = Vec::with_capacity(listed.len());
    for Listed { mut tensor, offset } in listed {
        let refuse = |expected: String, found: String| CheckpointError::Tensor {
            path: file.path().to_owned(),
            tensor: tensor.name.clone(),
            expected,
            found,
        };
        if !names.insert(tensor.name.clone()) {
            return Err(refuse("each tensor once".to_owned(), "it twice".to_owned()));
        }
        if !offset.is_multiple_of(alignment) {
            let expected = format!("an offset that is a multiple of {alignment}");
            return Err(refuse(expected, offset.to_string()));
        }
        let start = data_start.saturating_add(offset);
        if start.saturating_add(tensor.bytes as u64) > size {
            let expected = format!("data within the file's {size} bytes");
            let found = format!("{} bytes from {start} (the file may be truncated)", tensor.bytes);
            return Err(refuse(expected, found));
        }
        tensor.offset = start as usize;
        tensors.push(tensor);
    }
    let mut order: Vec<&StoredTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(CheckpointError::Tensor {
                path: file.path().to_owned(),
                tensor: pair[1].name.clone(),
                expected: "bytes of its own".to_owned(),
                found: format!("bytes that belong to `{}`", pair[0].name),
            });
        }
    }
    Ok(tensors)
}

/// Reads forward through the file; running past its end is an error that says what was read.
struct Cursor<'a> {
    file: &'a MappedFile,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn refuse(&self, what: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Malformed {
            path: self.file.path().to_owned(),
            what: what.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }

    fn left(&self) -> u64 {
        (self.file.bytes().len() - self.at) as u64
    }

    fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8], CheckpointError> {
        if length > self.left() {
            let expected = format!("{length} bytes at {}", self.at);
            let found = format!("{} left in the file (it may be truncated)", self.left());
            return Err(self.refuse(what, &expected, found));
        }
        let start = self.at;
        self.at += length as usize;
        Ok(&self.file.bytes()[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64, what)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of entries, each of at least `entry_bytes` of the bytes left.
    fn count(&mut self, what: &str, entry_bytes: u64) -> Result<u64, CheckpointError> {
        let count = self.u64(what)?;
        let most = self.left() / entry_bytes;
        if count > most {
            let expected = format!("at most {most}, which the file has room for");
            return Err(self.refuse(what, &expected, count.to_string()));
        }
        Ok(count)
    }

    fn string(&mut self, what: &str) -> Result<String, CheckpointError> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(self.refuse(what, "UTF-8 text", error.to_string())),
        }
    }

    fn key(&mut self) -> Result<String, CheckpointError> {
        let what = "metadata key";
        let key = self.string(what)?;
        if key.len() as u64 > LONGEST_KEY {
            let expected = format!("at most {LONGEST_KEY} bytes");
            return Err(self.refuse(what, &expected, key.len().to_string()));
        }
        Ok(key)
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value, CheckpointError> {
        Ok(match kind {
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            7 => Value::Bool(self.array::<1>(key)? != [0]),
            8 => Value::Text(self.string(key)?),
            9 => self.list(key)?,
            _ => Value::Integer(self.integer(kind, key)?),
        })
    }

    fn integer(&mut self, kind: u32, key: &str) -> Result<i128, CheckpointError> {
        Ok(match kind {
            0 => i128::from(u8::from_le_bytes(self.array(key)?)),
            1 => i128::from(i8::from_le_bytes(self.array(key)?)),
            2 => i128::from(u16::from_le_bytes(self.array(key)?)),
            3 => i128::from(i16::from_le_bytes(self.array(key)?)),
            4 => i128::from(u32::from_le_bytes(self.array(key)?)),
            5 => i128::from(i32::from_le_bytes(self.array(key)?)),
            10 => i128::from(u64::from_le_bytes(self.array(key)?)),
            11 => i128::from(i64::from_le_bytes(self.array(key)?)),
            _ => {
                let found = format!("type {kind}");
                return Err(self.refuse(key, "a value of types 0 to 12", found));
            }
        })
    }

    /// Lists grow as they are read: the claimed count alone reserves nothing.
    fn list(&mut self, key: &str) -> Result<Value, CheckpointError> {
        let kind = self.u32(key)?;
        let entry_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            _ => 8,
        };
        let count = self.count(key, entry_bytes)?;
        match kind {
            8 => (0..count).map(|_| self.string(key)).collect::<Result<_, _>>().map(Value::Texts),
            6 => {
                let float = |_| self.array(key).map(|bytes| f64::from(f32::from_le_bytes(bytes)));
                (0..count).map(float).collect::<Result<_, _>>().map(Value::Floats)
            }
            12 => {
                let float = |_| self.array(key).map(f64::from_le_bytes);
                (0..count).map(float).collect::<Result<_, _>>().map(Value::Floats)
            }
            9 => Err(self.refuse(key, "no list of lists", "one".to_owned())),
            _ => {
                let kind = if kind == 7 { 0 } else { kind };
                let mut list = Vec::new();
                for _ in 0..count {
                    let value = self.integer(kind, key)?;
                    let Ok(value) = i64::try_from(value) else {
                        return Err(self.refuse(key, "integers below 2^63", value.to_string()));
                    };
                    list.push(value);
                }
                Ok(Value::Integers(list))
            }
        }
    }

    fn tensor(&mut self) -> Result<Listed, CheckpointError> {
        let what = "tensor list";
        let name = self.string(what)?;
        let refuse = |expected: &str, found: String| CheckpointError::Tensor {
            path: self.file.path().to_owned(),
            tensor: name.clone(),
            expected: expected.to_owned(),
            found,
        };
        let dimensions = self.u32(what)?;
        if dimensions == 0 || dimensions > MOST_DIMENSIONS {
            let expected = format!("1 to {MOST_DIMENSIONS} dimensions");
            return Err(refuse(&expected, dimensions.to_string()));
        }
        // ggml lists the innermost dimension first.
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = self.u64(what)?;
            shape.insert(0, usize::try_from(size).unwrap_or(usize::MAX));
        }
        let kind = self.u32(what)?;
        let offset = self.u64(what)?;
        let Some(dtype) = DType::from_ggml(kind) else {
            let names: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
            let expected = format!("one of the types {}", names.join(", "));
            return Err(refuse(&expected, format!("ggml type {kind}")));
        };
        let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        let row = shape[shape.len() - 1];
        let bytes = count.filter(|_| dtype.bytes(row).is_some()).and_then(|n| dtype.bytes(n));
        let Some(bytes) = bytes else {
            let expected = format!("rows of whole blocks of {} {dtype}", dtype.block_len());
            return Err(refuse(&expected, format!("shape {shape:?}")));
        };
        let tensor = StoredTensor { name, dtype, shape, offset: 0, bytes, strides: None };
        Ok(Listed { tensor, offset })
    }
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
pub(crate) mod tests;
