//! The safetensors container (https://github.com/huggingface/safetensors, "Format"): an 8-byte
//! little-endian header length, a JSON header, the data. Read strictly: every byte of the data
//! belongs to exactly one tensor.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::{
    CheckpointError,
    dtype::DType,
    mapping::MappedFile,
    tensor_index::{StoredTensor, describe_shape},
};

/// The reference implementation's own limit.
const LARGEST_HEADER_BYTES: u64 = 100_000_000;

/// Reads and checks the header; offsets in the result count from the start of the file.
pub(crate) fn read_header(file: &MappedFile) -> Result<Vec<StoredTensor>, CheckpointError> {
    let bytes = file.bytes();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(malformed(
            file,
            "file",
            "a header of 8 bytes or more",
            format!("{} bytes", bytes.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    let most = LARGEST_HEADER_BYTES.min(rest.len() as u64);
    if length > most {
        let found = format!("{length} bytes");
        return Err(malformed(
            file,
            "length of the header",
            &format!("at most {most} bytes"),
            found,
        ));
    }
    let (header, data) = rest.split_at(length as usize);
    let header: Header = serde_json::from_slice(header).map_err(|error| {
        malformed(file, "header", "a JSON object of tensors", error.to_string())
    })?;
    let mut tensors = Vec::with_capacity(header.0.len());
    for (name, value) in header.0 {
        if name != "__metadata__" {
            tensors.push(entry(file, name, &value, 8 + length as usize)?);
        }
    }
    check_layout(file, &tensors, 8 + length as usize, data.len())?;
    Ok(tensors)
}

fn entry(
    file: &MappedFile,
    name: String,
    value: &Value,
    data_start: usize,
) -> Result<StoredTensor, CheckpointError> {
    let refuse = |expected: &str, found: String| CheckpointError::Tensor {
        path: file.path().to_owned(),
        tensor: name.clone(),
        expected: expected.to_owned(),
        found,
    };
    let dtype = match value.get("dtype").and_then(Value::as_str) {
        Some("F32") => DType::F32,
        Some("F16") => DType::F16,
        Some("BF16") => DType::BF16,
        found => {
            let found = format!("dtype {}", found.unwrap_or("none"));
            return Err(refuse("dtype F32, F16 or BF16", found));
        }
    };
    let numbers = |field: &str| -> Option<Vec<usize>> {
        let list = value.get(field)?.as_array()?.iter();
        list.map(|item| item.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    };
    let shape = numbers("shape").ok_or_else(|| refuse("a shape", "none".to_owned()))?;
    let Some([begin, end]) =
        numbers("data_offsets").and_then(|pair| <[usize; 2]>::try_from(pair).ok())
    else {
        return Err(refuse("two data_offsets", "none".to_owned()));
    };
    let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
    let needed = count.and_then(|count| dtype.bytes(count));
    if begin > end || needed != Some(end - begin) {
        let needed = needed.map_or("too many".to_owned(), |bytes| bytes.to_string());
        let expected = format!("{needed} bytes for {} of {dtype}", describe_shape(&shape));
        return Err(refuse(&expected, format!("data_offsets [{begin}, {end}]")));
    }
    let Some(offset) = data_start.checked_add(begin) else {
        return Err(refuse("data_offsets in the file", format!("[{begin}, {end}]")));
    };
    Ok(StoredTensor { name, dtype, shape, offset, bytes: end - begin })
}

/// Tensors follow each other without gap or overlap, from the header's end to the file's end.
fn check_layout(
    file: &MappedFile,
    tensors: &[StoredTensor],
    data_start: usize,
    data_bytes: usize,
) -> Result<(), CheckpointError> {
    let mut order: Vec<&StoredTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut next = data_start;
    for tensor in order {
        let begin = tensor.offset - data_start;
        let end = begin.saturating_add(tensor.bytes);
        let refuse = |expected: String, found: String| CheckpointError::Tensor {
            path: file.path().to_owned(),
            tensor: tensor.name.clone(),
            expected,
            found,
        };
        if end > data_bytes {
            let expected = format!("data_offsets within the file's {data_bytes} bytes of data");
            return Err(refuse(expected, format!("[{begin}, {end}] (the file may be truncated)")));
        }
        if tensor.offset != next {
            let expected = format!("data_offsets that begin at {}", next - data_start);
            return Err(refuse(expected, format!("{begin}: tensors overlap or leave a gap")));
        }
        next += tensor.bytes;
    }
    if next - data_start != data_bytes {
        let expected = format!("{} bytes, as the header says", next - data_start);
        return Err(malformed(file, "data", &expected, format!("{data_bytes} bytes")));
    }
    Ok(())
}

fn malformed(file: &MappedFile, what: &str, expected: &str, found: String) -> CheckpointError {
    CheckpointError::Malformed {
        path: file.path().to_owned(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found,
    }
}

/// The header's entries in file order. A JSON map would silently keep the last of two equal names.
struct Header(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map of tensor names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Header(entries))
    }
}
