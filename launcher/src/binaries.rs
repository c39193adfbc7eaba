//! The two programs that `trireme` starts.

use std::{
    env,
    path::{Path, PathBuf},
};

#[derive(Clone, Debug)]
pub struct Binaries {
    pub shard: PathBuf,
    pub router: PathBuf,
}

#[derive(Debug, thiserror::Error)]
#[error("{name} is neither beside {beside} nor on PATH; build it with `cargo build --release`")]
pub struct MissingBinary {
    name: &'static str,
    beside: PathBuf,
}

impl Binaries {
    /// Beside this program, then on PATH.
    pub fn locate() -> Result<Self, MissingBinary> {
        let beside = env::current_exe()
            .ok()
            .and_then(|exe| exe.parent().map(Path::to_owned))
            .unwrap_or_default();
        let path = env::var_os("PATH").unwrap_or_default();
        let find = |name: &'static str| {
            std::iter::once(beside.clone())
                .chain(env::split_paths(&path))
                .map(|folder| folder.join(name))
                .find(|candidate| candidate.is_file())
                .ok_or_else(|| MissingBinary { name, beside: beside.clone() })
        };
        Ok(Self { shard: find("trireme-shard")?, router: find("trireme-router")? })
    }
}
