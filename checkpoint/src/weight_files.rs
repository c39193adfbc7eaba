//! Opening a folder's weight files, safetensors or pickles: one, several, those that an index names,
//! or the numbered shards of one model.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Component, Path, PathBuf},
};

use serde_json::Value;

use crate::{
    CheckpointError,
    buffers::is_buffer,
    format::{Container, WeightFiles},
    json_file::read_object,
    mapping::MappedFile,
    safetensors,
    tensor_index::StoredTensor,
    torch_file,
};

/// Tensor names that the index promises, by file name.
type Promised = BTreeMap<String, HashSet<String>>;

/// A mapped file and the tensors in it.
pub(crate) type WeightFile = (MappedFile, Vec<StoredTensor>);

/// Maps the files and reads what is in them.
pub(crate) fn open(
    folder: &Path,
    container: Container,
    weights: &WeightFiles,
) -> Result<Vec<WeightFile>, CheckpointError> {
    let open = |path: &Path| {
        let file = MappedFile::open(path)?;
        let tensors = match container {
            Container::Safetensors => safetensors::read_header(&file)?,
            Container::Torch => torch_file::read_tensors(&file)?,
        };
        Ok::<WeightFile, CheckpointError>((file, tensors))
    };
    match weights {
        WeightFiles::Files(files) | WeightFiles::Shards(files) => {
            files.iter().map(|path| open(path)).collect()
        }
        WeightFiles::Index(path) => {
            let mut read = Vec::new();
            for (name, promised) in read_index(folder, path)? {
                let (file, tensors) = open(&folder.join(name))?;
                check_promises(&file, &tensors, &promised)?;
                read.push((file, tensors, promised));
            }
            warn_of_leftovers(folder, container, read.iter().map(|(file, _, _)| file.path()));
            // Only now: a tensor that the index puts in another file was named as missing there.
            for (file, tensors, promised) in &read {
                check_strays(file, tensors, promised)?;
            }
            Ok(read.into_iter().map(|(file, tensors, _)| (file, tensors)).collect())
        }
    }
}

/// Weight files that the index does not name belong to something else: an older download, mostly.
fn warn_of_leftovers<'a>(
    folder: &Path,
    container: Container,
    named: impl Iterator<Item = &'a Path>,
) {
    let named: HashSet<&Path> = named.collect();
    // A folder that cannot be listed has been refused before.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|it| it == container.extension()) && !named.contains(&*path)
        {
            tracing::warn!(path = %path.display(), "ignoring a weight file that the index does not name");
        }
    }
}

/// Reads `weight_map`; every file it names is inside the folder, and there.
fn read_index(folder: &Path, path: &Path) -> Result<Promised, CheckpointError> {
    let index = read_object(path)?;
    let refuse = |field: String, expected: &str, found: String| CheckpointError::Field {
        path: path.to_owned(),
        field,
        expected: expected.to_owned(),
        found,
    };
    let Some(Value::Object(map)) = index.get("weight_map") else {
        let expected = "a map from tensor names to file names";
        return Err(refuse("weight_map".to_owned(), expected, "none".to_owned()));
    };
    let mut promised = Promised::new();
    for (tensor, file) in map {
        let field = || format!("weight_map.{tensor}");
        let Some(file) = file.as_str() else {
            return Err(refuse(field(), "a file name", file.to_string()));
        };
        let inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
        if !inside || file.is_empty() {
            return Err(refuse(field(), "a file inside the model's folder", file.to_owned()));
        }
        promised.entry(file.to_owned()).or_default().insert(tensor.clone());
    }
    for file in promised.keys() {
        let path: PathBuf = folder.join(file);
        if !path.exists() {
            let (what, looked_for) = ("weight file that the index names", file.clone());
            return Err(CheckpointError::NotFound { path: folder.to_owned(), what, looked_for });
        }
    }
    Ok(promised)
}

/// The file holds the tensors that the index says it does.
fn check_promises(
    file: &MappedFile,
    tensors: &[StoredTensor],
    promised: &HashSet<String>,
) -> Result<(), CheckpointError> {
    let held: HashSet<_> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    match promised.iter().filter(|name| !held.contains(name.as_str())).min() {
        None => Ok(()),
        Some(name) => {
            let expected = "the tensor in this file, as the index says";
            Err(refuse(file, name, expected, "no such tensor"))
        }
    }
}

/// The file holds no other tensor.
fn check_strays(
    file: &MappedFile,
    tensors: &[StoredTensor],
    promised: &HashSet<String>,
) -> Result<(), CheckpointError> {
    let names = tensors.iter().map(|tensor| tensor.name.as_str());
    let stray = |name: &&str| !promised.contains(*name) && !is_buffer(name);
    match names.filter(stray).min() {
        None => Ok(()),
        Some(name) => Err(refuse(file, name, "only tensors that the index names", "another")),
    }
}

fn refuse(file: &MappedFile, tensor: &str, expected: &str, found: &str) -> CheckpointError {
    CheckpointError::Tensor {
        path: file.path().to_owned(),
        tensor: tensor.to_owned(),
        expected: expected.to_owned(),
        found: found.to_owned(),
    }
}
