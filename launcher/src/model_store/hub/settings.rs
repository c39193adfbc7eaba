//! Where the Hub is, who asks, and how long it is waited for: the variables of Hugging Face's own
//! tools.

use std::{fmt, fs, path::PathBuf, time::Duration};

use super::HubError;

/// A secret: it is sent to the Hub, and printed nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// None for a blank text. A token file ends with a newline.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    pub(super) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// How long an answer is waited for, and how often it is asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// To a connection.
    pub connect: Duration,
    /// Between two reads, of the head as of the body.
    pub read: Duration,
    /// Attempts in a row without progress.
    pub attempts: u32,
    /// Before the second attempt; doubles with each further one.
    pub pause: Duration,
    /// Longest pause, and the longest `Retry-After` that is waited for.
    pub pause_max: Duration,
    /// Another process that holds a lock may go without progress for this long.
    pub lock: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            read: Duration::from_secs(10),
            attempts: 5,
            pause: Duration::from_millis(500),
            pause_max: Duration::from_secs(60),
            lock: Duration::from_secs(1800),
        }
    }
}

#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Base URL, without a slash at its end.
    pub endpoint: String,
    pub token: Option<Token>,
    /// `models--OWNER--NAME` folders, shared with Hugging Face's tools.
    pub cache: PathBuf,
    /// The variable that forbids every request.
    pub offline: Option<&'static str>,
    /// PEM file of the authorities to trust instead of Mozilla's list.
    pub certificates: Option<PathBuf>,
    pub patience: Patience,
}

/// The value of a variable of the environment that is set and not empty.
type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

impl HubSettings {
    /// `HF_ENDPOINT`; `HF_TOKEN`, else the file `HF_TOKEN_PATH` or `$HF_HOME/token` (not with
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`); `HF_HUB_CACHE` or `$HF_HOME/hub`; `HF_HUB_OFFLINE`,
    /// `TRANSFORMERS_OFFLINE`; `HF_HUB_DOWNLOAD_TIMEOUT` in seconds; `SSL_CERT_FILE`,
    /// `REQUESTS_CA_BUNDLE`. `HF_HOME` is `$XDG_CACHE_HOME/huggingface` or
    /// `~/.cache/huggingface` where it is not set.
    pub fn from_variables(variable: Variable<'_>) -> Self {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let on = |name: &&str| variable(name).is_some_and(|value| is_true(&value));
        let home = path("HF_HOME").unwrap_or_else(|| user_cache(variable).join("huggingface"));
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
        let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let implicit = !on(&"HF_HUB_DISABLE_IMPLICIT_TOKEN");
        let token = token.or_else(|| fs::read_to_string(file).ok().filter(|_| implicit));
        let read = variable("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
        let mut patience = Patience::default();
        patience.read = read.filter(|s| *s > 0).map_or(patience.read, Duration::from_secs);
        let endpoint = variable("HF_ENDPOINT");
        Self {
            endpoint: endpoint.map_or("https://huggingface.co".to_owned(), |e| {
                e.trim_end_matches('/').to_owned()
            }),
            token: token.as_deref().and_then(Token::new),
            cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().find(on),
            certificates: path("SSL_CERT_FILE").or_else(|| path("REQUESTS_CA_BUNDLE")),
            patience,
        }
    }

    /// Refuses an endpoint that is no URL before anything is asked of it.
    pub(super) fn check(&self) -> Result<(), HubError> {
        let uri: Option<ureq::http::Uri> = self.endpoint.parse().ok();
        let valid = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
        });
        match valid {
            true => Ok(()),
            false => Err(HubError::Endpoint { given: self.endpoint.clone() }),
        }
    }

    /// For a message about a refusal.
    pub(super) fn token_hint(&self) -> &'static str {
        match self.token {
            Some(_) => "the token of HF_TOKEN or of the token file was sent",
            None => "no token was sent (set HF_TOKEN, or run `hf auth login`)",
        }
    }
}

/// `$XDG_CACHE_HOME` or `~/.cache`.
pub fn user_cache(variable: Variable<'_>) -> PathBuf {
    variable("XDG_CACHE_HOME").map_or_else(
        || variable("HOME").map_or_else(std::env::temp_dir, PathBuf::from).join(".cache"),
        PathBuf::from,
    )
}

/// As Hugging Face's tools read a switch, but that an unknown word counts as "on" here: it is
/// safer to stay away from the network that someone meant to switch off.
fn is_true(value: &str) -> bool {
    !matches!(value.to_ascii_lowercase().as_str(), "0" | "false" | "no" | "off" | "n" | "f")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        HubSettings::from_variables(&|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn variables_are_those_of_hugging_face() {
        let check = |variables: &[(&str, &str)], endpoint: &str, cache: &str, offline: bool| {
            let got = settings(variables);
            assert_eq!(got.endpoint, endpoint, "{variables:?}");
            assert_eq!(got.cache, PathBuf::from(cache), "{variables:?}");
            assert_eq!(got.offline.is_some(), offline, "{variables:?}");
        };
        let hub = "https://huggingface.co";
        check(&[("HOME", "/h")], hub, "/h/.cache/huggingface/hub", false);
        check(&[("XDG_CACHE_HOME", "/x")], hub, "/x/huggingface/hub", false);
        check(&[("HF_HOME", "/hf")], hub, "/hf/hub", false);
        check(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], hub, "/c", false);
        check(&[("HF_HOME", "/"), ("HF_ENDPOINT", "http://m:1/")], "http://m:1", "/hub", false);
        check(&[("HF_HOME", "/"), ("HF_HUB_OFFLINE", "1")], hub, "/hub", true);
        check(&[("HF_HOME", "/"), ("HF_HUB_OFFLINE", "False")], hub, "/hub", false);
        check(&[("HF_HOME", "/"), ("TRANSFORMERS_OFFLINE", "yes")], hub, "/hub", true);
    }

    #[test]
    fn a_token_comes_from_a_variable_or_a_file_and_is_not_printed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let other = folder.path().join("other");
        fs::write(&other, "hf_other").unwrap();
        let home = ("HF_HOME", folder.path().to_str().unwrap());
        let check = |variables: &[(&str, &str)], want: Option<&str>| {
            let got = settings(variables);
            assert_eq!(got.token.as_ref().map(Token::secret), want, "{variables:?}");
            assert!(!format!("{got:?}").contains("hf_"), "{got:?}");
        };
        check(&[home], Some("hf_file"));
        check(&[home, ("HF_TOKEN", "hf_set")], Some("hf_set"));
        check(&[home, ("HF_TOKEN_PATH", other.to_str().unwrap())], Some("hf_other"));
        check(&[home, ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], None);
        check(&[("HF_HOME", "/nonexistent")], None);
    }
}
