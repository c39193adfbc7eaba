//! One file of the Hub as a blob of the cache: fetched in parts, checked, then named.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use ureq::{
    Body,
    http::{Response, StatusCode, header},
};

use super::{
    HubError,
    client::{Client, Failure, Subject},
    listing::{Digest, Identity},
};
use crate::model_store::progress::Progress;

/// Progress that makes a further row of attempts worth it.
const PROGRESS_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 1 << 18;

pub struct Blob<'a> {
    pub url: &'a str,
    pub identity: &'a Identity,
    /// Its name once it is whole and right.
    pub path: PathBuf,
}

/// What of the file is on the disk, and the digest of just that.
struct Partial {
    file: File,
    path: PathBuf,
    bytes: u64,
    hasher: Hasher,
    /// Some of it was here before this attempt.
    resumed: bool,
}

enum Hasher {
    Sha256(Sha256),
    GitSha1(Sha1),
    None,
}

impl Blob<'_> {
    /// The name of what is on its way. Under the blob's lock nobody else writes to it.
    pub fn partial_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".incomplete");
        name.into()
    }

    /// Fetches what is missing. The caller holds the blob's lock.
    pub fn fetch(
        &self,
        client: &Client<'_>,
        about: Subject<'_>,
        progress: &mut Progress,
    ) -> Result<(), HubError> {
        let mut attempts = 0;
        loop {
            let before = self.partial_bytes();
            let failure = match self.attempt(client, about, progress) {
                Ok(partial) => match self.finish(partial) {
                    Ok(()) => return Ok(()),
                    Err(failure) => failure,
                },
                Err(failure) => failure,
            };
            let gained = self.partial_bytes().saturating_sub(before);
            attempts = if gained >= PROGRESS_BYTES { 1 } else { attempts + 1 };
            client.pause(failure, attempts, progress)?;
        }
    }

    pub fn partial_bytes(&self) -> u64 {
        fs::metadata(self.partial_path()).map_or(0, |metadata| metadata.len())
    }

    fn attempt(
        &self,
        client: &Client<'_>,
        about: Subject<'_>,
        progress: &mut Progress,
    ) -> Result<Partial, Failure> {
        let mut partial = self.open()?;
        progress.at(partial.bytes);
        let want = self.identity.bytes;
        if partial.bytes == want {
            return Ok(partial);
        }
        let mut response = client.get(self.url, partial.bytes, about)?;
        if !self.continues(&response, partial.bytes)? {
            partial.restart(self.identity)?;
        }
        let mut body = response.body_mut().as_reader().take(want - partial.bytes + 1);
        let mut buffer = vec![0; BUFFER_BYTES];
        let cause = loop {
            match body.read(&mut buffer) {
                Ok(0) => break "the connection ended".to_owned(),
                Ok(read) => {
                    partial.append(&buffer[..read])?;
                    progress.at(partial.bytes);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break e.to_string(),
            }
        };
        let got = partial.bytes;
        if got == want {
            return Ok(partial);
        }
        let url = self.url.to_owned();
        if got > want {
            partial.discard()?;
            return Err(HubError::Length { url, got, want }.into());
        }
        let error = HubError::BrokenOff { url, got, want, attempts: 1, cause };
        Err(Failure::Passing { error, after: None })
    }

    fn open(&self) -> Result<Partial, HubError> {
        let path = self.partial_path();
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(HubError::io("open", &path))?;
        let mut hasher = Hasher::of(self.identity);
        let mut bytes = file.metadata().map_err(HubError::io("look at", &path))?.len();
        if bytes > self.identity.bytes {
            file.set_len(0).map_err(HubError::io("empty", &path))?;
            bytes = 0;
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match file.read(&mut buffer).map_err(HubError::io("read", &path))? {
                0 => break,
                read => hasher.update(&buffer[..read]),
            }
        }
        Ok(Partial { file, path, bytes, hasher, resumed: bytes > 0 })
    }

    /// Whether an answer begins where the file on the disk ends; 200 begins at 0. A length that
    /// is not the file's is another file's: the page of a hotel's network.
    fn continues(&self, response: &Response<Body>, from: u64) -> Result<bool, HubError> {
        if response.status() != StatusCode::PARTIAL_CONTENT {
            let length = response.headers().get(header::CONTENT_LENGTH);
            let got = length.and_then(|value| value.to_str().ok()?.parse().ok());
            let (got, want) = (got.unwrap_or(self.identity.bytes), self.identity.bytes);
            return match got == want {
                true => Ok(from == 0),
                false => Err(HubError::Length { url: self.url.to_owned(), got, want }),
            };
        }
        let range = response.headers().get(header::CONTENT_RANGE);
        let found = range.and_then(|value| value.to_str().ok()).unwrap_or("none").to_owned();
        let (start, total) = (format!("bytes {from}-"), format!("/{}", self.identity.bytes));
        if found.starts_with(&start) && (found.ends_with(&total) || found.ends_with("/*")) {
            return Ok(true);
        }
        let expected = "a Content-Range of the rest of the file";
        Err(HubError::Malformed { url: self.url.to_owned(), expected, found })
    }

    fn finish(&self, partial: Partial) -> Result<(), Failure> {
        let resumed = partial.resumed;
        let mismatch = partial.hasher.mismatch(self.identity);
        if let Some((kind, got, want)) = mismatch {
            fs::remove_file(&partial.path).map_err(HubError::io("remove", &partial.path))?;
            let error = HubError::Digest { url: self.url.to_owned(), kind, got, want };
            // The part that was here before may be at fault.
            return Err(match resumed {
                true => Failure::Passing { error, after: None },
                false => Failure::Final(error),
            });
        }
        // The name must not survive a power cut that the data does not.
        partial.file.sync_all().map_err(HubError::io("write", &partial.path))?;
        fs::rename(&partial.path, &self.path).map_err(HubError::io("name", &self.path))?;
        Ok(())
    }
}

impl Partial {
    fn append(&mut self, data: &[u8]) -> Result<(), HubError> {
        self.file.write_all(data).map_err(HubError::io("write", &self.path))?;
        self.hasher.update(data);
        self.bytes += data.len() as u64;
        Ok(())
    }

    fn restart(&mut self, identity: &Identity) -> Result<(), HubError> {
        self.file.set_len(0).map_err(HubError::io("empty", &self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(HubError::io("empty", &self.path))?;
        self.hasher = Hasher::of(identity);
        self.bytes = 0;
        self.resumed = false;
        Ok(())
    }

    fn discard(self) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(HubError::io("remove", &self.path))
    }
}

impl Hasher {
    fn of(identity: &Identity) -> Self {
        match identity.digest {
            Some(Digest::Sha256(_)) => Self::Sha256(Sha256::new()),
            Some(Digest::GitSha1(_)) => {
                let head = format!("blob {}\0", identity.bytes);
                Self::GitSha1(Sha1::new_with_prefix(head))
            }
            None => Self::None,
        }
    }

    fn update(&mut self, data: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(data),
            Self::GitSha1(hasher) => hasher.update(data),
            Self::None => {}
        }
    }

    /// Kind, what was found and what was expected, where they differ.
    fn mismatch(self, identity: &Identity) -> Option<(&'static str, String, String)> {
        let (kind, got) = match self {
            Self::Sha256(hasher) => ("SHA-256", format!("{:x}", hasher.finalize())),
            Self::GitSha1(hasher) => ("git's SHA-1", format!("{:x}", hasher.finalize())),
            Self::None => return None,
        };
        let want = match &identity.digest {
            Some(Digest::Sha256(want) | Digest::GitSha1(want)) => want.clone(),
            None => return None,
        };
        (got != want).then_some((kind, got, want))
    }
}

/// Bytes that this process may still write to the disk of a folder.
pub fn free_bytes(folder: &Path) -> Result<u64, HubError> {
    let stat = rustix::fs::statvfs(folder)
        .map_err(|cause| HubError::io("look at the disk of", folder)(cause.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
