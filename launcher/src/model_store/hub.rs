//! One file from the Hugging Face Hub, by a plain HTTPS GET.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Alias, StoreError, progress::Progress, verified_file};

/// One attempt with short deadlines, so that a machine without internet goes on to the next source
/// within seconds.
pub fn fetch(
    hub: &str,
    alias: &Alias,
    scratch: &Path,
    progress: &mut Progress,
) -> Result<PathBuf, StoreError> {
    let (repo, revision) = alias.hub;
    let url = format!("{hub}/{repo}/resolve/{revision}/{}", alias.file);
    let failed = |error: ureq::Error| StoreError::Source {
        origin: format!("Hub ({hub})"),
        detail: error.to_string(),
    };
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_resolve(Some(Duration::from_secs(3)))
        .timeout_connect(Some(Duration::from_secs(3)))
        .timeout_recv_response(Some(Duration::from_secs(10)))
        .timeout_recv_body(Some(Duration::from_secs(1800)))
        .build()
        .into();
    let mut response = agent.get(&url).call().map_err(failed)?;
    let part = scratch.join("hub.part");
    let mut body = response.body_mut().as_reader();
    verified_file::write(&mut body, &part, alias, &url, progress)?;
    Ok(part)
}
