//! Small JSON files, read whole.

use std::{fs::File, io::Read, path::Path};

use serde_json::{Map, Value};

use crate::CheckpointError;

/// Generous for an index of a hundred thousand tensors; a folder's JSON files are kilobytes.
const LARGEST_JSON_BYTES: u64 = 64 << 20;

/// The JSON object in a file.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let text = read_text(path)?;
    match serde_json::from_str(&text) {
        Ok(object) => Ok(object),
        Err(error) => Err(CheckpointError::Malformed {
            path: path.to_owned(),
            what: "content".to_owned(),
            expected: "a JSON object".to_owned(),
            found: error.to_string(),
        }),
    }
}

/// The UTF-8 text of a file of bounded size.
pub(crate) fn read_text(path: &Path) -> Result<String, CheckpointError> {
    let io = |action| {
        let path = path.to_owned();
        move |source| CheckpointError::Io { path, action, source }
    };
    let file = File::open(path).map_err(io("open the file"))?;
    let mut text = String::new();
    let read = file.take(LARGEST_JSON_BYTES + 1).read_to_string(&mut text);
    if read.map_err(io("read the file as text"))? as u64 > LARGEST_JSON_BYTES {
        return Err(CheckpointError::Malformed {
            path: path.to_owned(),
            what: "size".to_owned(),
            expected: format!("at most {LARGEST_JSON_BYTES} bytes"),
            found: "more".to_owned(),
        });
    }
    Ok(text)
}
