//! The key that guards a server: from a file or from the environment, never from a command line.

use std::{env, ffi::OsString, fmt, fs, path::Path};

use tonic::metadata::{Ascii, MetadataValue};

use crate::preflight::Refusal;

/// Holds the key itself where no file is given. Only the router's process gets to see it.
pub const VARIABLE: &str = "TRIREME_API_KEY";
const FLAG: &str = "--api-key-file";

/// A key that no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// What the user gave; a file wins.
    ///
    /// # Errors
    /// The file cannot be read, or the key is empty, which would let everybody in.
    pub fn given(file: Option<&Path>) -> Result<Option<Self>, Refusal> {
        Self::read(file, env::var_os(VARIABLE))
    }

    fn read(file: Option<&Path>, variable: Option<OsString>) -> Result<Option<Self>, Refusal> {
        if let Some(path) = file {
            let refuse = |reason: &str| Refusal::Value {
                flag: FLAG,
                given: path.display().to_string(),
                reason: reason.to_owned(),
            };
            let text = fs::read_to_string(path).map_err(|error| refuse(&error.to_string()))?;
            return Self::parse(&text).map(Some).map_err(refuse);
        }
        let Some(text) = variable else { return Ok(None) };
        let key = Self::parse(&text.to_string_lossy());
        // Its value is not shown: it is the key.
        key.map(Some).map_err(|reason| Refusal::Secret { variable: VARIABLE, reason })
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        let key = text.trim();
        if key.is_empty() {
            return Err("the key is empty");
        }
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("the key has characters other than visible ASCII");
        }
        Ok(Self(key.to_owned()))
    }

    /// The value of an `authorization` header; none would be an error of [`Self::given`].
    pub fn bearer(&self) -> Option<MetadataValue<Ascii>> {
        let mut value: MetadataValue<Ascii> = format!("Bearer {}", self.0).parse().ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ApiKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(file: Option<&str>, variable: Option<&str>, expected: Result<Option<&str>, &str>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        if let Some(text) = file {
            fs::write(&path, text).unwrap();
        }
        let given = ApiKey::read(file.map(|_| &*path), variable.map(Into::into));
        match (given, expected) {
            (Ok(key), Ok(expected)) => assert_eq!(key.map(|key| key.0).as_deref(), expected),
            (Err(refusal), Err(part)) => {
                let message = refusal.to_string();
                assert!(message.contains(part), "{message}");
            }
            (given, expected) => panic!("{file:?} {variable:?}: {given:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_key_comes_from_a_file_or_the_environment() {
        check(None, None, Ok(None));
        check(Some("a\n"), None, Ok(Some("a")));
        check(None, Some("b"), Ok(Some("b")));
        check(Some("a"), Some("b"), Ok(Some("a")));
        check(Some(" \n"), Some("b"), Err("--api-key-file"));
        check(None, Some(""), Err("TRIREME_API_KEY"));
        check(None, Some("two words"), Err("visible ASCII"));
    }

    #[test]
    fn a_key_stays_out_of_logs() {
        let key = ApiKey("secret".into());
        assert_eq!(format!("{key:?} {:?}", key.bearer().unwrap()), "ApiKey(..) Sensitive");
    }
}
