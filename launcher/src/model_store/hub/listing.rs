//! What a repository has at a revision.

use serde::Deserialize;
use ureq::http::{HeaderMap, header};

use super::{
    HubError,
    client::{Client, Subject},
};
use crate::model_store::progress::Progress;

/// Bytes of the Hub's answer; the largest repositories have some ten thousand files.
const LISTING_BYTES_MAX: u64 = 64 << 20;

/// A commit and its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub commit: String,
    pub files: Vec<ListedFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// Relative, with slashes.
    pub path: String,
    /// Bytes and identity, where the listing has them.
    pub identity: Option<Identity>,
}

/// What a file's content is, before it is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name among the blobs: plain letters and digits.
    pub etag: String,
    pub bytes: u64,
    pub digest: Option<Digest>,
}

/// A digest in lower-case hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Digest {
    /// Of a file that git-lfs or Xet stores.
    Sha256(String),
    /// Git's name of a blob: SHA-1 of `blob LENGTH\0` and the content.
    GitSha1(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ModelAnswer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    pub fn fetch(
        client: &Client<'_>,
        about: Subject<'_>,
        progress: &mut Progress,
    ) -> Result<Self, HubError> {
        let revision = about.revision.replace('/', "%2F");
        let base = client.url(&format!("api/models/{}/revision/", about.repo));
        let url = format!("{base}{revision}?blobs=true");
        let text = client.text(&url, about, LISTING_BYTES_MAX, progress)?;
        let malformed =
            |expected, found: String| HubError::Malformed { url: url.clone(), expected, found };
        let answer: ModelAnswer = serde_json::from_slice(&text)
            .map_err(|cause| malformed("the Hub's JSON about a model", cause.to_string()))?;
        if !is_hex(&answer.sha, 40) {
            return Err(malformed("a commit in 'sha'", answer.sha));
        }
        let mut files = Vec::with_capacity(answer.siblings.len());
        for sibling in answer.siblings {
            if !stays_inside(&sibling.rfilename) {
                return Err(malformed("a relative path in 'rfilename'", sibling.rfilename));
            }
            files.push(sibling.into());
        }
        Ok(Self { commit: answer.sha, files })
    }

    pub fn file(&self, path: &str) -> Option<&ListedFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

impl From<Sibling> for ListedFile {
    fn from(sibling: Sibling) -> Self {
        let identity = match (sibling.lfs, sibling.blob_id, sibling.size) {
            (Some(lfs), ..) if is_hex(&lfs.sha256, 64) => Some(Identity {
                etag: lfs.sha256.clone(),
                bytes: lfs.size,
                digest: Some(Digest::Sha256(lfs.sha256)),
            }),
            (None, Some(id), Some(bytes)) if is_hex(&id, 40) => {
                Some(Identity { etag: id.clone(), bytes, digest: Some(Digest::GitSha1(id)) })
            }
            _ => None,
        };
        Self { path: sibling.rfilename, identity }
    }
}

impl Identity {
    /// From the headers of a file's address, for a Hub whose listing says too little.
    pub fn fetch(
        client: &Client<'_>,
        url: &str,
        about: Subject<'_>,
        progress: &mut Progress,
    ) -> Result<Self, HubError> {
        let enough = |headers: &HeaderMap| etag(headers).is_some() && bytes(headers).is_some();
        let headers = client.head(url, about, enough, progress)?;
        let malformed = |expected, found: &str| HubError::Malformed {
            url: url.to_owned(),
            expected,
            found: found.to_owned(),
        };
        let (name, linked) = etag(&headers).ok_or_else(|| malformed("an ETag", "none"))?;
        let bytes = bytes(&headers).ok_or_else(|| malformed("the file's size", "none"))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 128 || !name.chars().all(plain) {
            return Err(malformed("an ETag that can name a file", name));
        }
        // Only the Hub's own header promises that the tag is a digest of the content.
        let digest =
            (linked && is_hex(name, 64)).then(|| Digest::Sha256(name.to_ascii_lowercase()));
        Ok(Self { etag: name.to_owned(), bytes, digest })
    }
}

/// The tag without its quotes, and whether it is the one of the file behind a pointer.
fn etag(headers: &HeaderMap) -> Option<(&str, bool)> {
    let tag = |name: &str| {
        let text = headers.get(name)?.to_str().ok()?;
        Some(text.trim().trim_start_matches("W/").trim_matches('"'))
    };
    match tag("x-linked-etag") {
        Some(linked) => Some((linked, true)),
        None => Some((tag(header::ETAG.as_str())?, false)),
    }
}

fn bytes(headers: &HeaderMap) -> Option<u64> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse().ok();
    number("x-linked-size").or_else(|| number(header::CONTENT_LENGTH.as_str()))
}

pub fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
}

/// Whether a path of the other side names a file below the folder that it is put in.
pub fn stays_inside(path: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    path.split('/').all(plain)
}
