//! Files of `torch.save`: a zip archive of a pickle and its storages (since torch 1.6), or the five
//! pickles and then storages of the releases before (`torch/serialization.py`).

use std::{collections::HashMap, io::Cursor, ops::Range, path::Path};

use zip::{CompressionMethod, ZipArchive};

use crate::{
    CheckpointError,
    buffers::is_buffer,
    mapping::MappedFile,
    pickle::Pickle,
    tensor_index::StoredTensor,
    torch_tensors::{self, TorchTensor, is_allowed, storage_widths},
};

/// First bytes of a zip archive.
pub(crate) const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
/// The number in the first of the old format's pickles.
const LEGACY_MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const LEGACY_PROTOCOL: i128 = 1001;

/// Where each storage's bytes are in the file, by its key.
type Storages = HashMap<String, Range<usize>>;

/// Reads everything but the numbers; offsets count from the start of the file.
pub(crate) fn read_tensors(file: &MappedFile) -> Result<Vec<StoredTensor>, CheckpointError> {
    let (tensors, storages) =
        if file.bytes().starts_with(ZIP_MAGIC) { read_archive(file)? } else { read_legacy(file)? };
    let mut stored = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        stored.extend(place(file.path(), tensor, &storages)?);
    }
    Ok(stored)
}

fn read_archive(file: &MappedFile) -> Result<(Vec<TorchTensor>, Storages), CheckpointError> {
    let refuse = |expected: &str, found: String| malformed(file, "zip archive", expected, found);
    let damaged = |error: zip::result::ZipError| {
        refuse("a complete one", format!("{error} (the file may be truncated)"))
    };
    let mut archive = ZipArchive::new(Cursor::new(file.bytes())).map_err(damaged)?;
    let (mut pickle, mut storages) = (None, Storages::new());
    for number in 0..archive.len() {
        let entry = archive.by_index_raw(number).map_err(damaged)?;
        let name = entry.name().map_err(damaged)?.into_owned();
        // All lies in one folder, which is named as the file once was.
        let Some((_, part)) = name.split_once('/') else { continue };
        let key = part.strip_prefix("data/");
        if key.is_none() && !matches!(part, "data.pkl" | "byteorder") {
            continue;
        }
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            let expected = format!("`{name}` stored as it is");
            return Err(refuse(&expected, "it compressed or encrypted".to_owned()));
        }
        let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
        let end = start.and_then(|start| start.checked_add(usize::try_from(entry.size()).ok()?));
        let bytes = start.zip(end).map(|(start, end)| start..end);
        let Some(bytes) = bytes.filter(|bytes| bytes.end <= file.bytes().len()) else {
            let expected = format!("`{name}` within the file's {} bytes", file.bytes().len());
            return Err(refuse(&expected, format!("{} bytes of it", entry.size())));
        };
        match key {
            Some(key) => _ = storages.insert(key.to_owned(), bytes),
            None if part == "data.pkl" => pickle = Some(bytes),
            None if file.bytes()[bytes.clone()] != *b"little" => {
                let found = String::from_utf8_lossy(&file.bytes()[bytes]).into_owned();
                return Err(refuse("little-endian numbers", format!("`{found}`")));
            }
            None => {}
        }
    }
    let Some(pickle) = pickle else {
        return Err(refuse("a `data.pkl` of torch.save", "none".to_owned()));
    };
    let pickle = Pickle::read(file.path(), &file.bytes()[pickle], is_allowed)?;
    Ok((torch_tensors::read(file.path(), &pickle)?, storages))
}

/// Pickles of a magic number, a protocol, the writer's sizes, the object and the storages' keys; then
/// for each key the storage: how many numbers, and those.
fn read_legacy(file: &MappedFile) -> Result<(Vec<TorchTensor>, Storages), CheckpointError> {
    let refuse = |found: String| {
        let expected = "a zip archive or an old file of torch.save";
        malformed(file, "file", expected, found)
    };
    let mut at = 0;
    let mut next = || {
        let pickle = Pickle::read(file.path(), &file.bytes()[at..], is_allowed)?;
        at += pickle.length;
        Ok::<_, CheckpointError>(pickle)
    };
    let magic = next()?;
    if magic.integer(magic.root) != Some(LEGACY_MAGIC) {
        return Err(refuse(format!("a pickle of {}", magic.kind(magic.root))));
    }
    let protocol = next()?;
    if protocol.integer(protocol.root) != Some(LEGACY_PROTOCOL) {
        return Err(refuse("an unknown protocol".to_owned()));
    }
    let system = next()?;
    check_byte_order(file, &system)?;
    let object = next()?;
    let keys = next()?;
    let tensors = torch_tensors::read(file.path(), &object)?;
    let widths = storage_widths(&object);
    let mut storages = Storages::new();
    for &key in keys.list(keys.root).unwrap_or_default() {
        let known = keys.key(key).and_then(|key| Some((*widths.get(&key)?, key)));
        let Some((width, key)) = known else {
            return Err(refuse("a storage that nothing lies in".to_owned()));
        };
        let count = file.bytes()[at..].first_chunk().map(|count| u64::from_le_bytes(*count));
        let start = at + 8;
        let end = count
            .and_then(|count| usize::try_from(count).ok()?.checked_mul(width)?.checked_add(start))
            .filter(|&end| end <= file.bytes().len());
        let Some(end) = end else {
            return Err(refuse(format!("storage `{key}` cut off (the file may be truncated)")));
        };
        storages.insert(key, start..end);
        at = end;
    }
    Ok((tensors, storages))
}

fn check_byte_order(file: &MappedFile, system: &Pickle) -> Result<(), CheckpointError> {
    let entries = system.dict(system.root).unwrap_or_default();
    let little = entries.iter().find(|(key, _)| system.text(*key) == Some("little_endian"));
    match little.map(|(_, value)| system.is_true(*value)) {
        Some(true) => Ok(()),
        _ => Err(malformed(file, "byte order", "little-endian numbers", "others".to_owned())),
    }
}

/// The tensor's place in the file; none for a buffer of numbers that weights cannot be of.
fn place(
    path: &Path,
    tensor: TorchTensor,
    storages: &Storages,
) -> Result<Option<StoredTensor>, CheckpointError> {
    let refuse = |expected: String, found: String| CheckpointError::Tensor {
        path: path.to_owned(),
        tensor: tensor.name.clone(),
        expected,
        found,
    };
    let Some(dtype) = tensor.kind.read_as else {
        if is_buffer(&tensor.name) {
            return Ok(None);
        }
        let expected = "dtype F64, F32, F16 or BF16".to_owned();
        return Err(refuse(expected, format!("dtype {}", tensor.kind.dtype)));
    };
    let Some(storage) = storages.get(&tensor.storage) else {
        return Err(refuse(format!("a storage `{}`", tensor.storage), "none".to_owned()));
    };
    let reach = tensor.reach().and_then(|reach| reach.checked_add(tensor.offset));
    let needed = reach.and_then(|numbers| dtype.bytes(numbers));
    let bytes = tensor.numbers().and_then(|numbers| dtype.bytes(numbers));
    let (Some(_), Some(bytes)) = (needed.filter(|needed| *needed <= storage.len()), bytes) else {
        let needed = needed.map_or("too many".to_owned(), |bytes| bytes.to_string());
        let expected = format!("{needed} bytes for shape {:?} of {dtype}", tensor.shape);
        let found = format!("{} bytes in its storage `{}`", storage.len(), tensor.storage);
        return Err(refuse(expected, found));
    };
    let strides = match *tensor.strides {
        _ if tensor.is_contiguous() => None,
        [step] => Some([0, step]),
        [row, column] => Some([row, column]),
        _ => {
            let expected = "rows that follow each other, in more than two dimensions".to_owned();
            return Err(refuse(expected, format!("strides {:?}", tensor.strides)));
        }
    };
    // The offset does not overflow: it is less than what is needed.
    let offset = storage.start + dtype.bytes(tensor.offset).unwrap_or_default();
    let (name, shape) = (tensor.name, tensor.shape);
    Ok(Some(StoredTensor { name, dtype, shape, offset, bytes, strides }))
}

fn malformed(file: &MappedFile, what: &str, expected: &str, found: String) -> CheckpointError {
    CheckpointError::Malformed {
        path: file.path().to_owned(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found,
    }
}

#[cfg(test)]
#[path = "torch_file_tests.rs"]
mod tests;
