//! What is in a folder or file, told from its content.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::CheckpointError;

/// Container format, detected from content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Safetensors,
    Gguf,
    Dummy,
}

const LOOKED_FOR: &str = "*.safetensors.index.json, *.safetensors, *.gguf";

/// Where a model's parts are.
#[derive(Debug, PartialEq)]
pub(crate) enum Source {
    Safetensors { folder: PathBuf, weights: SafetensorsFiles },
    Gguf(PathBuf),
}

#[derive(Debug, PartialEq)]
pub(crate) enum SafetensorsFiles {
    Index(PathBuf),
    Files(Vec<PathBuf>),
}

/// Finds the weights in a folder, or tells what a file is.
pub(crate) fn detect(path: &Path) -> Result<Source, CheckpointError> {
    let metadata = fs::metadata(path).map_err(|source| CheckpointError::Io {
        path: path.to_owned(),
        action: "find the model",
        source,
    })?;
    if metadata.is_dir() { detect_folder(path) } else { detect_file(path) }
}

fn detect_folder(folder: &Path) -> Result<Source, CheckpointError> {
    let files = list(folder)?;
    let ending = |endings: &[&str]| -> Vec<PathBuf> {
        let matches = |path: &&PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            endings.iter().any(|ending| name.ends_with(ending))
        };
        files.iter().filter(matches).cloned().collect()
    };
    let safetensors = |weights| Ok(Source::Safetensors { folder: folder.to_owned(), weights });
    let indexes = ending(&[".safetensors.index.json"]);
    if !indexes.is_empty() {
        return safetensors(SafetensorsFiles::Index(one_of(folder, "index file", indexes)?));
    }
    let weights = ending(&[".safetensors"]);
    if !weights.is_empty() {
        return safetensors(SafetensorsFiles::Files(weights));
    }
    let gguf = ending(&[".gguf"]);
    if !gguf.is_empty() {
        return Ok(Source::Gguf(one_of(folder, "GGUF file", gguf)?));
    }
    if let Some(path) = ending(&[".bin", ".pth", ".pt"]).into_iter().next() {
        return Err(torch(&path));
    }
    let what = if folder.join("config.json").exists() { "weights" } else { "model" };
    let looked_for = LOOKED_FOR.to_owned();
    Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for })
}

/// Several candidates are a question that only the user can answer, unless one has the usual name.
fn one_of(
    folder: &Path,
    what: &str,
    mut candidates: Vec<PathBuf>,
) -> Result<PathBuf, CheckpointError> {
    let usual = folder.join("model.safetensors.index.json");
    if candidates.contains(&usual) {
        return Ok(usual);
    }
    if candidates.len() > 1 {
        let names: Vec<_> = candidates.iter().filter_map(|path| path.file_name()).collect();
        return Err(CheckpointError::Malformed {
            path: folder.to_owned(),
            what: "folder".to_owned(),
            expected: format!("one {what} (name the file instead of the folder)"),
            found: format!("{names:?}"),
        });
    }
    Ok(candidates.remove(0))
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io =
        |source| CheckpointError::Io { path: folder.to_owned(), action: "list the folder", source };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        // Not `is_file`: a dangling link to a weight file must be an error, not an absence.
        if !path.is_dir() {
            files.push(path);
        }
    }
    files.sort_unstable();
    Ok(files)
}

fn detect_file(path: &Path) -> Result<Source, CheckpointError> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(9).read_to_end(&mut head));
    read.map_err(|source| CheckpointError::Io {
        path: path.to_owned(),
        action: "read the file",
        source,
    })?;
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if head.starts_with(b"GGUF") || extension == "gguf" {
        return Ok(Source::Gguf(path.to_owned()));
    }
    // A zip archive, or a pickle of protocol 2 and later.
    if head.starts_with(b"PK\x03\x04") || head.starts_with(b"\x80") {
        return Err(torch(path));
    }
    if extension == "safetensors" || head.get(8) == Some(&b'{') {
        return Ok(Source::Safetensors {
            folder: path.parent().unwrap_or(Path::new("")).to_owned(),
            weights: SafetensorsFiles::Files(vec![path.to_owned()]),
        });
    }
    let format = "neither safetensors nor GGUF".to_owned();
    Err(CheckpointError::UnsupportedFormat { path: path.to_owned(), format })
}

fn torch(path: &Path) -> CheckpointError {
    let format = "PyTorch pickle (convert it to safetensors)".to_owned();
    CheckpointError::UnsupportedFormat { path: path.to_owned(), format }
}
