//! Where the reference fixtures are (tests only).

use std::path::{Path, PathBuf};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures").join(name)
}
