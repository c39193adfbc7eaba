//! Tells whether two processes opened the same checkpoint.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::Checkpoint;

impl Checkpoint {
    /// A number that differs when the model or any of its weight files does: their names, sizes and
    /// times of change, not their content, so it costs nothing. The seed of made-up weights is not in
    /// it. Equal only between builds of the same compiler.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        format!("{:?}", self.model()).hash(&mut hasher);
        for file in self.index().map(|index| index.files()).unwrap_or_default() {
            file.path().file_name().hash(&mut hasher);
            file.bytes().len().hash(&mut hasher);
            // A file that is gone since it was opened has no time, and so another fingerprint.
            fs::metadata(file.path()).and_then(|file| file.modified()).ok().hash(&mut hasher);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, time::SystemTime};

    use crate::Checkpoint;

    #[test]
    fn other_weights_have_another_fingerprint() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../integration-tests/fixtures/models/smollm-like");
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(model.join(file), folder.path().join(file)).unwrap();
        }
        let fingerprint = || Checkpoint::open(folder.path()).unwrap().fingerprint();
        let first = fingerprint();
        assert_eq!(first, fingerprint());
        // The same bytes, written again, count as others: content is not read.
        let weights = fs::File::options().write(true).open(folder.path().join("model.safetensors"));
        weights.unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_ne!(first, fingerprint());
    }
}
