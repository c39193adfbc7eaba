//! A file that is kept only when its size and digest are right.

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
};

use sha2::{Digest, Sha256};

use super::{Alias, StoreError, progress::Progress};

/// Copies `from` to `path`, at most one byte more than the alias says, and checks its SHA-256.
pub fn write(
    from: &mut dyn Read,
    path: &Path,
    alias: &Alias,
    origin: &str,
    progress: &mut Progress,
) -> Result<(), StoreError> {
    let mut file = File::create(path).map_err(StoreError::io(path))?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut total: u64 = 0;
    progress.start(alias.bytes);
    // An endless answer must not fill the disk.
    let mut from = from.take(alias.bytes + 1);
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => {
                let detail = format!("broke off after {total} bytes: {e}");
                return Err(StoreError::Source { origin: origin.to_owned(), detail });
            }
        };
        digest.update(&buffer[..read]);
        file.write_all(&buffer[..read]).map_err(StoreError::io(path))?;
        total += read as u64;
        progress.at(total);
    }
    if total != alias.bytes {
        let more = if total > alias.bytes { "at least " } else { "" };
        let detail = format!("has {more}{total} bytes, want {}", alias.bytes);
        return Err(StoreError::Source { origin: origin.to_owned(), detail });
    }
    let got = format!("{:x}", digest.finalize());
    if got != alias.sha256 {
        let origin = origin.to_owned();
        return Err(StoreError::Digest { origin, got, want: alias.sha256.to_owned() });
    }
    // The rename that follows must not survive a power cut that the data does not.
    file.sync_all().map_err(StoreError::io(path))?;
    progress.done();
    Ok(())
}
