//! What is in a folder or file, told from its content.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{CheckpointError, torch_file::ZIP_MAGIC};

/// Container format, detected from content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Safetensors,
    /// Pickles of `torch.save` in Hugging Face's layout.
    Torch,
    /// Pickles in Meta's layout: Meta's own shards, torchchat's and llama2.c's files.
    Meta,
    Gguf,
    Dummy,
}

const LOOKED_FOR: &str = "*.safetensors.index.json, *.safetensors, pytorch_model.bin.index.json, \
                          pytorch_model*.bin, consolidated.*.pth, *.pth, *.pt, *.gguf";

/// The index that is meant where there are several.
const USUAL_INDEXES: &[&str] = &["model.safetensors.index.json", "pytorch_model.bin.index.json"];

/// The file that is the whole model where there is no index.
const USUAL_FILES: &[&str] = &["model.safetensors", "pytorch_model.bin"];

/// Where a model's parts are.
#[derive(Debug, PartialEq)]
pub(crate) enum Source {
    Weights { folder: PathBuf, container: Container, files: WeightFiles },
    Gguf(PathBuf),
}

/// What weight files are, apart from GGUF, which is a model by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    Safetensors,
    Torch,
}

impl Container {
    /// Of files that an index names.
    pub(crate) fn extension(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Torch => "bin",
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) enum WeightFiles {
    Index(PathBuf),
    /// Each holds whole tensors.
    Files(Vec<PathBuf>),
    /// Each holds a part of every tensor, in order.
    Shards(Vec<PathBuf>),
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
    let matching = |matches: &dyn Fn(&str) -> bool| -> Vec<PathBuf> {
        files.iter().filter(|path| matches(&file_name(path))).cloned().collect()
    };
    let weights = |container, files| {
        let folder = folder.to_owned();
        Ok(Source::Weights { folder, container, files })
    };
    for container in [Container::Safetensors, Container::Torch] {
        let ending = format!(".{}.index.json", container.extension());
        let indexes = matching(&|name| name.ends_with(&ending));
        if !indexes.is_empty() {
            let index = one_of(folder, "index file", indexes, USUAL_INDEXES)?;
            return weights(container, WeightFiles::Index(index));
        }
        let files = matching(&|name| match container {
            Container::Safetensors => name.ends_with(".safetensors"),
            // Others are a trainer's state.
            Container::Torch => name.starts_with("pytorch_model") && name.ends_with(".bin"),
        });
        // Beside the whole model in one file, others are the same in another form, or adapters.
        let usual = files.iter().find(|path| USUAL_FILES.contains(&&*file_name(path))).cloned();
        let files = usual.map_or(files, |usual| vec![usual]);
        if !files.is_empty() {
            return weights(container, WeightFiles::Files(files));
        }
    }
    let shards = shards(folder, &files)?;
    if !shards.is_empty() {
        return weights(Container::Torch, WeightFiles::Shards(shards));
    }
    let single = matching(&|name| name.ends_with(".pth") || name.ends_with(".pt"));
    if !single.is_empty() {
        let file = one_of(folder, "PyTorch file", single, &["model.pth", "consolidated.pth"])?;
        return weights(Container::Torch, WeightFiles::Files(vec![file]));
    }
    let gguf = matching(&|name| name.ends_with(".gguf"));
    if !gguf.is_empty() {
        return Ok(Source::Gguf(one_of(folder, "GGUF file", gguf, &[])?));
    }
    let configs = ["config.json", "params.json"];
    let configured = configs.iter().any(|config| folder.join(config).exists());
    let what = if configured { "weights" } else { "model" };
    let looked_for = LOOKED_FOR.to_owned();
    Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for })
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Meta's `consolidated.00.pth` and on, by number, without a gap. The first may be called
/// `model.pth`, as torchchat has it.
fn shards(folder: &Path, files: &[PathBuf]) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut shards = BTreeMap::new();
    for path in files {
        let name = file_name(path);
        let digits = name.strip_prefix("consolidated.").and_then(|rest| rest.strip_suffix(".pth"));
        if let Some(number) = digits.and_then(|digits| digits.parse::<usize>().ok()) {
            shards.insert(number, path.clone());
        }
    }
    let first = folder.join("model.pth");
    if !shards.is_empty() && !shards.contains_key(&0) && files.contains(&first) {
        shards.insert(0, first);
    }
    if let Some(gap) = (0..shards.len()).find(|number| !shards.contains_key(number)) {
        let (what, looked_for) = ("shard of the model", format!("consolidated.{gap:02}.pth"));
        return Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for });
    }
    Ok(shards.into_values().collect())
}

/// Several candidates are a question that only the user can answer, unless one has the usual name.
fn one_of(
    folder: &Path,
    what: &str,
    mut candidates: Vec<PathBuf>,
    usual: &[&str],
) -> Result<PathBuf, CheckpointError> {
    let usual = usual.iter().map(|name| folder.join(name));
    if let Some(usual) = usual.into_iter().find(|usual| candidates.contains(usual)) {
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
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    let files = WeightFiles::Files(vec![path.to_owned()]);
    // A zip archive, or a pickle of protocol 2 and later.
    let pickled = head.starts_with(ZIP_MAGIC) || head.starts_with(b"\x80");
    if pickled || matches!(extension, "pth" | "pt" | "bin") {
        return Ok(Source::Weights { folder, container: Container::Torch, files });
    }
    if extension == "safetensors" || head.get(8) == Some(&b'{') {
        return Ok(Source::Weights { folder, container: Container::Safetensors, files });
    }
    let format = "neither safetensors, PyTorch nor GGUF".to_owned();
    Err(CheckpointError::UnsupportedFormat { path: path.to_owned(), format })
}
