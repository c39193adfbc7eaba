//! What `inspect` tells of a checkpoint.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Serialize;

use crate::{Checkpoint, Format, ModelConfig, manifest};

/// A checkpoint in figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Description {
    pub path: PathBuf,
    pub format: Format,
    pub model: ModelConfig,
    /// Numbers in the model; a tied head counts once.
    pub parameters: u64,
    /// Bytes of the tensors as stored; none of made-up weights.
    pub tensor_bytes: u64,
    pub files: Vec<FileDescription>,
    /// By the stored type's name.
    pub dtypes: BTreeMap<&'static str, DTypeDescription>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FileDescription {
    pub path: PathBuf,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DTypeDescription {
    pub tensors: usize,
    pub bytes: u64,
}

impl Checkpoint {
    /// Numbers in the model; a tied head counts once.
    pub fn parameters(&self) -> u64 {
        let tensors = manifest::tensors(self.model());
        tensors.iter().map(|spec| spec.shape.iter().map(|&size| size as u64).product::<u64>()).sum()
    }

    /// Bytes of all tensors as they are stored; 0 of made-up weights.
    pub fn tensor_bytes(&self) -> u64 {
        self.index().map_or(0, |index| index.sizes().map(|(_, bytes)| bytes).sum())
    }

    /// The checkpoint in figures.
    pub fn describe(&self) -> Description {
        let mut dtypes: BTreeMap<_, DTypeDescription> = BTreeMap::new();
        for (dtype, bytes) in self.index().into_iter().flat_map(|index| index.sizes()) {
            let entry = dtypes.entry(dtype.name()).or_default();
            entry.tensors += 1;
            entry.bytes += bytes;
        }
        let files = self.index().map(|index| index.files()).unwrap_or_default();
        let files = files.iter().map(|file| FileDescription {
            path: file.path().to_owned(),
            bytes: file.bytes().len() as u64,
        });
        Description {
            path: self.path().to_owned(),
            format: self.format(),
            model: self.model().clone(),
            parameters: self.parameters(),
            tensor_bytes: self.tensor_bytes(),
            files: files.collect(),
            dtypes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::fixture;

    #[test]
    fn figures_are_those_of_the_files() {
        let describe = |name: &str| Checkpoint::open(&fixture(name)).unwrap().describe();
        let sharded = describe("formats/hf-sharded");
        assert_eq!((sharded.format, sharded.files.len()), (Format::Safetensors, 3));
        assert_eq!(sharded.tensor_bytes, 2 * sharded.parameters);
        let sizes: u64 = sharded.files.iter().map(|file| file.bytes).sum();
        assert!(sizes > sharded.tensor_bytes && sizes < sharded.tensor_bytes + 10_000);

        // As fixture.json counts them, which leaves out the frequencies' divisors.
        let mixed = describe("formats/gguf-mixed");
        assert_eq!(mixed.parameters, sharded.parameters);
        let tensors = |name| mixed.dtypes[name].tensors;
        assert_eq!(
            [tensors("F32"), tensors("Q4_1"), tensors("Q8_0"), tensors("BF16")],
            [12, 4, 3, 3]
        );

        let dummy = Checkpoint::dummy(&fixture("models/llama3-like"), 1).unwrap().describe();
        assert_eq!((dummy.parameters, dummy.tensor_bytes), (sharded.parameters, 0));
        let json = serde_json::to_value(&mixed).unwrap();
        assert_eq!(json["format"], "gguf");
        assert_eq!(json["model"]["rope_scaling"]["rope_type"], "per_frequency");
        assert_eq!(json["dtypes"]["Q4_1"]["tensors"], 4);
    }
}
