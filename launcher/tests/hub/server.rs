//! A Hub on the loopback: <https://huggingface.co/docs/hub/api>, as far as a download goes. Large
//! files are redirected to a second port, as the real one redirects to its storage hosts.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use sha1::{Digest, Sha1};
use sha2::Sha256;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const NEXT_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Files from this size on are stored on the other host.
const LARGE: usize = 100_000;

/// What goes wrong with one answer.
#[derive(Clone, Debug)]
pub enum Fault {
    Status(u16, &'static [(&'static str, &'static str)], &'static str),
    /// The connection is closed after so many bytes of the body.
    CutAt(usize),
    /// Nothing comes after so many bytes of the body, for so long.
    StallAt(usize, Duration),
    /// The body has bytes that are not the file's.
    Changed,
    ChangedAndCutAt(usize),
    /// More bytes than the file has, and a head that admits it.
    Longer,
    IgnoreRange,
    WrongRange,
    /// A captive portal's page.
    Html,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
    /// It came to the host of large files.
    pub storage: bool,
}

pub struct State {
    pub files: BTreeMap<String, Vec<u8>>,
    pub commit: &'static str,
    /// Sizes and digests are in the listing.
    pub detailed: bool,
    /// Without this token the Hub knows no model.
    pub token: Option<&'static str>,
    /// Each is used once, by the first request of that method whose path has this part.
    pub faults: Vec<(&'static str, &'static str, Fault)>,
    pub seen: Vec<Seen>,
}

pub struct HubServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl HubServer {
    /// A Hub with the repository `org/model`. The threads end with the process.
    pub fn start(files: &[(&str, Vec<u8>)]) -> Self {
        let files = files.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.clone()));
        let state = Arc::new(Mutex::new(State {
            files: files.collect(),
            commit: COMMIT,
            detailed: true,
            token: None,
            faults: Vec::new(),
            seen: Vec::new(),
        }));
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let storage = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = hub.local_addr().unwrap();
        let storage_address = storage.local_addr().unwrap();
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let state = Arc::clone(&state);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    thread::spawn(move || answer(stream, &state, storage_address, is_storage));
                }
            });
        }
        Self { address, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn fault(&self, method: &'static str, path: &'static str, fault: Fault) {
        self.state().faults.push((method, path, fault));
    }

    /// Requests for files' content so far.
    pub fn downloads(&self) -> Vec<Seen> {
        let is_file = |seen: &&Seen| seen.method == "GET" && !seen.path.starts_with("/api/");
        self.state().seen.iter().filter(is_file).cloned().collect()
    }
}

fn read_request(stream: &TcpStream, storage: bool) -> Option<Seen> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut seen = Seen { method, path, authorization: None, range: None, storage };
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => seen.authorization = Some(value.trim().to_owned()),
            "range" => seen.range = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    Some(seen)
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn new(status: u16, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Self {
        let headers = headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        Self { status, headers: headers.collect(), body: body.into() }
    }

    fn refusal(status: u16, code: &str) -> Self {
        Self::new(status, &[("X-Error-Code", code), ("X-Error-Message", code)], "")
    }
}

fn answer(mut stream: TcpStream, state: &Mutex<State>, storage_at: SocketAddr, storage: bool) {
    let Some(seen) = read_request(&stream, storage) else { return };
    let (answer, fault) = {
        let mut state = state.lock().unwrap();
        let place = state.faults.iter().position(|(method, path, _)| {
            *method == seen.method
                && seen.path.contains(path)
                && storage == path.starts_with("/lfs")
        });
        let fault = place.map(|place| state.faults.remove(place).2);
        state.seen.push(seen.clone());
        (route(&seen, &state, storage_at, fault.as_ref()), fault)
    };
    let mut head = format!("HTTP/1.1 {} x\r\nConnection: close\r\n", answer.status);
    if !answer.headers.iter().any(|(name, _)| name == "Content-Length") {
        head += &format!("Content-Length: {}\r\n", answer.body.len());
    }
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let _ = stream.write_all((head + "\r\n").as_bytes());
    if seen.method == "HEAD" {
        return;
    }
    let body = &answer.body;
    // The other side may leave at any time: that is no fault of the test's.
    let _ = match fault {
        Some(Fault::CutAt(bytes) | Fault::ChangedAndCutAt(bytes)) => {
            stream.write_all(&body[..bytes.min(body.len())])
        }
        Some(Fault::StallAt(bytes, pause)) => {
            let _ = stream.write_all(&body[..bytes.min(body.len())]);
            thread::sleep(pause);
            Ok(())
        }
        _ => stream.write_all(body),
    };
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = stream.read(&mut [0; 64]);
}

fn route(seen: &Seen, state: &State, storage_at: SocketAddr, fault: Option<&Fault>) -> Answer {
    match fault {
        Some(Fault::Status(status, headers, body)) => return Answer::new(*status, headers, *body),
        Some(Fault::Html) => return Answer::new(200, &[], "<html>Log in to this network</html>"),
        _ => {}
    }
    let path = seen.path.split('?').next().unwrap().replace("%20", " ").replace("%2F", "/");
    if seen.storage {
        let name = path.trim_start_matches("/lfs/");
        let file = state.files.values().find(|bytes| sha256(bytes) == name);
        return file.map_or_else(|| Answer::new(403, &[], "expired"), |b| content(b, seen, fault));
    }
    let authorized = state
        .token
        .is_none_or(|token| seen.authorization.as_deref() == Some(&format!("Bearer {token}")));
    if !authorized || !path.contains("org/model") {
        return Answer::refusal(
            if seen.authorization.is_some() { 404 } else { 401 },
            "RepoNotFound",
        );
    }
    if let Some(rest) = path.strip_prefix("/api/models/org/model") {
        return api(rest, &seen.path, state);
    }
    let Some((revision, name)) =
        path.strip_prefix("/org/model/resolve/").and_then(|rest| rest.split_once('/'))
    else {
        return Answer::refusal(404, "RepoNotFound");
    };
    if !known(revision, state) {
        return Answer::refusal(404, "RevisionNotFound");
    }
    let Some(bytes) = state.files.get(name) else {
        return Answer::refusal(404, "EntryNotFound");
    };
    let etag = format!("\"{}\"", etag(bytes));
    let size = bytes.len().to_string();
    if bytes.len() < LARGE {
        let mut answer = content(bytes, seen, fault);
        answer.headers.push(("ETag".to_owned(), etag));
        answer.headers.push(("X-Repo-Commit".to_owned(), state.commit.to_owned()));
        return answer;
    }
    let location = format!("http://{storage_at}/lfs/{}?signature=secret", sha256(bytes));
    let headers = [
        ("Location", location.as_str()),
        ("X-Linked-Etag", etag.as_str()),
        ("X-Linked-Size", size.as_str()),
        ("X-Repo-Commit", state.commit),
    ];
    Answer::new(302, &headers, "moved")
}

fn known(revision: &str, state: &State) -> bool {
    revision == state.commit || ["main", "refs/pr/1"].contains(&revision)
}

fn api(rest: &str, query: &str, state: &State) -> Answer {
    if let Some(revision) = rest.strip_prefix("/tree/") {
        let files = state.files.iter().map(|(path, bytes)| {
            let mut file =
                json!({"type": "file", "path": path, "size": bytes.len(), "oid": git_sha1(bytes)});
            if bytes.len() >= LARGE {
                file["lfs"] =
                    json!({"oid": sha256(bytes), "size": bytes.len(), "pointerSize": 134});
            }
            file
        });
        assert_eq!(revision, state.commit);
        return Answer::new(200, &[], Value::from_iter(files).to_string());
    }
    let revision = rest.strip_prefix("/revision/").unwrap_or("main");
    if !known(revision, state) {
        return Answer::refusal(404, "RevisionNotFound");
    }
    let siblings = state.files.iter().map(|(path, bytes)| {
        let mut file = json!({"rfilename": path});
        if state.detailed && query.contains("blobs=true") {
            file["size"] = json!(bytes.len());
            file["blobId"] = json!(git_sha1(bytes));
            if bytes.len() >= LARGE {
                file["lfs"] = json!({"sha256": sha256(bytes), "size": bytes.len()});
            }
        }
        file
    });
    let body = json!({
        "id": "org/model", "sha": state.commit, "private": false, "tags": [], "downloads": 0,
        "likes": 0, "siblings": Value::from_iter(siblings),
    });
    Answer::new(200, &[("Content-Type", "application/json")], body.to_string())
}

fn content(bytes: &[u8], seen: &Seen, fault: Option<&Fault>) -> Answer {
    let from = seen
        .range
        .as_deref()
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let mut bytes = bytes.to_vec();
    match fault {
        Some(Fault::Changed | Fault::ChangedAndCutAt(_)) => bytes[0] ^= 1,
        Some(Fault::Longer) => bytes.extend([0; 10]),
        _ => {}
    }
    match from {
        Some(from) if !matches!(fault, Some(Fault::IgnoreRange)) => {
            let start = if matches!(fault, Some(Fault::WrongRange)) { 0 } else { from };
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            Answer::new(206, &[("Content-Range", &range)], bytes[start..].to_vec())
        }
        _ => Answer {
            status: 200,
            headers: vec![("Content-Length".to_owned(), bytes.len().to_string())],
            body: bytes,
        },
    }
}

pub fn etag(bytes: &[u8]) -> String {
    if bytes.len() >= LARGE { sha256(bytes) } else { git_sha1(bytes) }
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn git_sha1(bytes: &[u8]) -> String {
    let head = format!("blob {}\0", bytes.len());
    format!("{:x}", Sha1::new_with_prefix(head).chain_update(bytes).finalize())
}
