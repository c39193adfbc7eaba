//! Requests to the Hub: redirects, the token, refusals, and another attempt where one may help.

use std::{io::Read, thread, time::Duration};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::{
    Agent, Body,
    http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::{HubError, HubSettings, Patience};
use crate::model_store::progress::Progress;

/// Redirects of one request.
const HOPS_MAX: u32 = 8;
/// Bytes of an error's body that are looked at.
const SAID_MAX: u64 = 4096;
/// RFC 3986's unreserved characters stay as they are.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// An attempt that failed.
#[derive(Debug)]
pub enum Failure {
    /// Another attempt would end in the same way.
    Final(HubError),
    /// It may pass; the Hub may have said when.
    Passing { error: HubError, after: Option<Duration> },
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

/// What a request is about: whatever is refused is refused in its name.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
}

pub struct Client<'a> {
    agent: Agent,
    settings: &'a HubSettings,
    patience: Patience,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a HubSettings, patience: Patience) -> Result<Self, HubError> {
        settings.check()?;
        let mut tls = TlsConfig::builder();
        if let Some(path) = &settings.certificates {
            tls = tls.root_certs(certificates(path)?);
        }
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            // Redirects are followed here: the token must not go along to another host.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_recv_response(Some(patience.read))
            .timeout_per_read(Some(patience.read))
            .user_agent(concat!("trireme/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(Self { agent, settings, patience })
    }

    /// `{endpoint}/{path}` with the path's odd characters encoded.
    pub fn url(&self, path: &str) -> String {
        format!("{}/{}", self.settings.endpoint, encoded(path))
    }

    /// A whole small answer, at most `bytes_max`.
    pub fn text(
        &self,
        url: &str,
        about: Subject<'_>,
        bytes_max: u64,
        progress: &mut Progress,
    ) -> Result<Vec<u8>, HubError> {
        self.patiently(progress, || {
            let mut response = self.get(url, 0, about)?;
            let mut text = Vec::new();
            let body = response.body_mut().as_reader();
            match body.take(bytes_max + 1).read_to_end(&mut text) {
                Ok(_) if text.len() as u64 > bytes_max => {
                    Err(Failure::Final(HubError::Malformed {
                        url: url.to_owned(),
                        expected: "a short answer",
                        found: format!("more than {bytes_max} bytes"),
                    }))
                }
                Ok(_) => Ok(text),
                Err(cause) => Err(self.no_answer(url, cause.to_string())),
            }
        })
    }

    /// The headers of every hop until `enough` of them were seen, or the last one.
    pub fn head(
        &self,
        url: &str,
        about: Subject<'_>,
        enough: impl Fn(&HeaderMap) -> bool,
        progress: &mut Progress,
    ) -> Result<HeaderMap, HubError> {
        self.patiently(progress, || {
            let mut seen = HeaderMap::new();
            self.follow(Method::HEAD, url, 0, about, |response| {
                for (name, value) in response.headers() {
                    // A hop's own length says nothing about the file behind the next one.
                    let own = name == header::CONTENT_LENGTH && response.status().is_redirection();
                    if !own && !seen.contains_key(name) {
                        seen.insert(name, value.clone());
                    }
                }
                enough(&seen)
            })?;
            Ok(seen)
        })
    }

    /// A file's bytes from an offset on, if the other side grants it: 206 else 200.
    pub fn get(&self, url: &str, from: u64, about: Subject<'_>) -> Result<Response<Body>, Failure> {
        self.follow(Method::GET, url, from, about, |_| false)
    }

    /// Attempts until one does, or one fails for good, or they are used up.
    pub fn patiently<T>(
        &self,
        progress: &mut Progress,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut attempts = 0;
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(failure) => {
                    attempts += 1;
                    self.pause(failure, attempts, progress)?;
                }
            }
        }
    }

    /// Waits before the next attempt, or gives the error that ends them.
    pub fn pause(
        &self,
        failure: Failure,
        attempts: u32,
        progress: &mut Progress,
    ) -> Result<(), HubError> {
        let (error, after) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { error, after } => (error, after),
        };
        let patience = &self.patience;
        let doubled = patience.pause.saturating_mul(1 << (attempts - 1).min(16));
        let pause = after.unwrap_or(doubled.min(patience.pause_max));
        if attempts >= patience.attempts || pause > patience.pause_max {
            return Err(counted(error, attempts));
        }
        progress.say(&format!("{error}; next attempt in {:.1} s", pause.as_secs_f64()));
        thread::sleep(pause);
        Ok(())
    }

    fn follow(
        &self,
        method: Method,
        url: &str,
        from: u64,
        about: Subject<'_>,
        mut enough: impl FnMut(&Response<Body>) -> bool,
    ) -> Result<Response<Body>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=HOPS_MAX {
            let request =
                self.request(&method, &url, from).map_err(|cause| HubError::Malformed {
                    url: url.clone(),
                    expected: "a URL",
                    found: cause.to_string(),
                })?;
            let response =
                self.agent.run(request).map_err(|cause| self.no_answer(&url, cause.to_string()))?;
            if !response.status().is_success() && !response.status().is_redirection() {
                return Err(self.refusal(&url, response, about));
            }
            if enough(&response) || !response.status().is_redirection() {
                return Ok(response);
            }
            url = target(&url, response.headers())?;
        }
        let found = format!("more than {HOPS_MAX} redirects");
        Err(HubError::Malformed { url, expected: "a file", found }.into())
    }

    fn request(
        &self,
        method: &Method,
        url: &str,
        from: u64,
    ) -> Result<Request<()>, ureq::http::Error> {
        let mut request = Request::builder()
            .method(method.clone())
            .uri(url)
            .header(header::ACCEPT_ENCODING, "identity"); // sizes and ranges are the file's own
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        let own = origin(url).is_some_and(|o| origin(&self.settings.endpoint) == Some(o));
        if let (true, Some(token)) = (own, &self.settings.token) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.secret()));
        }
        request.body(())
    }

    fn no_answer(&self, url: &str, cause: String) -> Failure {
        let error = HubError::Unreachable { url: without_query(url), attempts: 1, cause };
        Failure::Passing { error, after: None }
    }

    fn refusal(&self, url: &str, mut response: Response<Body>, about: Subject<'_>) -> Failure {
        let status = response.status();
        let header = |name: &str| {
            let value = response.headers().get(name)?;
            value.to_str().ok().map(str::to_owned)
        };
        let (code, message) = (header("x-error-code"), header("x-error-message"));
        let retry_after_s = header("retry-after").and_then(|text| text.trim().parse().ok());
        let said = message.or_else(|| code.clone()).unwrap_or_else(|| body_text(&mut response));
        let (repo, revision) = (about.repo.to_owned(), about.revision.to_owned());
        let url = without_query(url);
        let own = origin(&url) == origin(&self.settings.endpoint);
        let token = self.settings.token_hint();
        let endpoint = self.settings.endpoint.clone();
        let code_n = status.as_u16();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let error = HubError::TooMany { url, attempts: 1, retry_after_s };
            return Failure::Passing { error, after: retry_after_s.map(Duration::from_secs) };
        }
        if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT {
            let error = HubError::Server { url, status: code_n, said, attempts: 1 };
            return Failure::Passing { error, after: retry_after_s.map(Duration::from_secs) };
        }
        if !own {
            // A signed link of the storage host ran out: the next attempt gets a fresh one.
            let error = HubError::Server { url, status: code_n, said, attempts: 1 };
            return Failure::Passing { error, after: None };
        }
        Failure::Final(match (code_n, code.as_deref()) {
            (_, Some("GatedRepo")) => HubError::Gated {
                page: format!("{endpoint}/{repo}"),
                status: code_n,
                repo,
                said,
                token,
            },
            (_, Some("RevisionNotFound")) => HubError::NoRevision { repo, revision, said },
            (_, Some("RepoNotFound")) | (404, None) => {
                HubError::NoRepo { repo, endpoint, status: code_n, said, token }
            }
            (401 | 403, _) => HubError::Refused { url, status: code_n, said, token },
            _ => HubError::Status { url, status: code_n, said },
        })
    }
}

/// The path of a URL with odd characters encoded; slashes stay.
pub fn encoded(path: &str) -> String {
    utf8_percent_encode(path, ENCODED).to_string()
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// Where a redirect leads (RFC 9110 section 10.2.2, but for paths relative to a folder).
fn target(from: &str, headers: &HeaderMap) -> Result<String, HubError> {
    let malformed = |found: &str| HubError::Malformed {
        url: without_query(from),
        expected: "a redirect to a URL",
        found: without_query(found),
    };
    let location = headers.get(header::LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| malformed("no Location"))?;
    let (scheme, rest) = from.split_once("://").ok_or_else(|| malformed(from))?;
    let host = rest.split('/').next().unwrap_or(rest);
    if location.starts_with("http://") || location.starts_with("https://") {
        Ok(location.to_owned())
    } else if location.starts_with("//") {
        Ok(format!("{scheme}:{location}"))
    } else if location.starts_with('/') {
        Ok(format!("{scheme}://{host}{location}"))
    } else {
        Err(malformed(location))
    }
}

/// A signed link's query is a key to the file: it stays out of messages.
fn without_query(url: &str) -> String {
    url.split('?').next().unwrap_or(url).to_owned()
}

/// The first line of an error's body, if it is one for a person.
fn body_text(response: &mut Response<Body>) -> String {
    let status = response.status();
    let mut text = Vec::new();
    let _ = response.body_mut().as_reader().take(SAID_MAX).read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().next().unwrap_or_default().trim();
    let reason = status.canonical_reason().unwrap_or("no reason given");
    let plain = !line.is_empty() && !line.starts_with('<') && !line.contains(char::is_control);
    if plain { line.chars().take(200).collect() } else { reason.to_owned() }
}

/// The error with the number of attempts that led to it.
fn counted(mut error: HubError, count: u32) -> HubError {
    if let HubError::TooMany { attempts, .. }
    | HubError::Server { attempts, .. }
    | HubError::Unreachable { attempts, .. }
    | HubError::BrokenOff { attempts, .. } = &mut error
    {
        *attempts = count;
    }
    error
}

fn certificates(path: &std::path::Path) -> Result<RootCerts, HubError> {
    let pem = std::fs::read(path).map_err(HubError::io("read", path))?;
    let failed = |cause: String| HubError::Certificates { path: path.to_owned(), cause };
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| failed(e.to_string()))? {
            certificates.push(certificate);
        }
    }
    match certificates.is_empty() {
        true => Err(failed("none in it".to_owned())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}
