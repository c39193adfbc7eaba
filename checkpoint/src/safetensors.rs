//! The safetensors container (https://github.com/huggingface/safetensors, "Format"): an 8-byte
//! little-endian header length, a JSON header, the data. Read strictly: every byte of the data
//! belongs to exactly one tensor. The safetensors library reads entries (`TensorInfo`) and checks
//! the layout (`Metadata`); decision 005 says why its `read_metadata` does not read the header.

use std::{collections::HashMap, fmt};

use safetensors::{
    Dtype, SafeTensorError,
    tensor::{Metadata, TensorInfo},
};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
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
    let data_start = 8 + length as usize;
    let (mut infos, mut tensors) = (Vec::new(), Vec::new());
    for (name, value) in header.0 {
        if name != "__metadata__" {
            let (info, dtype) = entry(file, &name, &value, data.len())?;
            let (begin, end) = info.data_offsets;
            let (shape, offset) = (info.shape.clone(), data_start + begin);
            infos.push((name.clone(), info));
            tensors.push(StoredTensor {
                name,
                dtype,
                shape,
                offset,
                bytes: end - begin,
                strides: None,
            });
        }
    }
    check_layout(file, infos, data.len())?;
    Ok(tensors)
}

/// One entry of the header. Its offsets are within the data, so that no sum of them overflows.
fn entry(
    file: &MappedFile,
    name: &str,
    value: &Value,
    data_bytes: usize,
) -> Result<(TensorInfo, DType), CheckpointError> {
    let info = TensorInfo::deserialize(value).map_err(|error| {
        let dtype = value.get("dtype").map_or("none".to_owned(), Value::to_string);
        let expected = "dtype F64, F32, F16 or BF16, a shape and two data_offsets".to_owned();
        refuse(file, name, expected, format!("dtype {dtype}: {error}"))
    })?;
    let dtype = match info.dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        other => {
            let expected = "dtype F64, F32, F16 or BF16".to_owned();
            return Err(refuse(file, name, expected, format!("dtype {other}")));
        }
    };
    let (begin, end) = info.data_offsets;
    let count = info.shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
    let needed = count.and_then(|count| dtype.bytes(count));
    if begin > end || needed != Some(end - begin) {
        let needed = needed.map_or("too many".to_owned(), |bytes| bytes.to_string());
        let expected = format!("{needed} bytes for {} of {dtype}", describe_shape(&info.shape));
        return Err(refuse(file, name, expected, format!("data_offsets [{begin}, {end}]")));
    }
    if end > data_bytes {
        let expected = format!("data_offsets within the file's {data_bytes} bytes of data");
        let found = format!("[{begin}, {end}] (the file may be truncated)");
        return Err(refuse(file, name, expected, found));
    }
    Ok((info, dtype))
}

/// Every name is there once, and tensors follow each other without gap or overlap, from the
/// header's end to the file's end.
fn check_layout(
    file: &MappedFile,
    mut infos: Vec<(String, TensorInfo)>,
    data_bytes: usize,
) -> Result<(), CheckpointError> {
    infos.sort_by_key(|(_, info)| info.data_offsets);
    let (mut begins, mut next) = (HashMap::new(), 0);
    for (name, info) in &infos {
        let (begin, end) = info.data_offsets;
        if begins.insert(name.clone(), (begin, next)).is_some() {
            return Err(refuse(file, name, "each tensor once".to_owned(), "it twice".to_owned()));
        }
        next = end;
    }
    let metadata = Metadata::new(None, infos).map_err(|error| match error {
        SafeTensorError::InvalidOffset(name) => {
            let (begin, next) = begins.get(&name).copied().unwrap_or_default();
            let expected = format!("data_offsets that begin at {next}");
            refuse(file, &name, expected, format!("{begin}: tensors overlap or leave a gap"))
        }
        other => malformed(file, "header", "a valid list of tensors", other.to_string()),
    })?;
    let described = metadata.data_len();
    if described != data_bytes {
        let expected = format!("{described} bytes, as the header says");
        return Err(malformed(file, "data", &expected, format!("{data_bytes} bytes")));
    }
    Ok(())
}

fn refuse(file: &MappedFile, tensor: &str, expected: String, found: String) -> CheckpointError {
    let (path, tensor) = (file.path().to_owned(), tensor.to_owned());
    CheckpointError::Tensor { path, tensor, expected, found }
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

impl<'de> Deserialize<'de> for Header {
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
