//! A request's JSON object, read field by field, so that every error names its field.

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{HeaderMap, header},
};
use futures::StreamExt;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Number, Value};

use super::{App, refusal::Refusal};
use field::{Field, Form};
use object::Object;

pub mod field;
mod object;

/// Longest wait for a whole body.
const BODY_TIMEOUT_S: u64 = 60;
/// What is read and thrown away of a body that was refused, so that its sender, still writing,
/// gets to read why.
const DISCARD_BYTES_MAX: usize = 128 << 20;
const DISCARD_TIMEOUT_S: u64 = 20;
/// A larger body is parsed beside the async workers, which others wait for.
const PARSED_INLINE_BYTES: usize = 64 << 10;
/// How much of a wrong value an error shows.
const SHOWN_CHARS: usize = 60;

/// The fields of a request. `null` counts as absent.
#[derive(Debug, Default)]
pub struct Fields(Map<String, Value>);

impl FromRequest<App> for Fields {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        let (parts, body) = request.into_parts();
        require_json(&parts.headers)?;
        require_plain(&parts.headers)?;
        let bytes = read(&parts.headers, body, app.body_limit_bytes()).await?;
        if bytes.len() <= PARSED_INLINE_BYTES {
            return Self::parse(&bytes);
        }
        let parsing = tokio::task::spawn_blocking(move || Self::parse(&bytes));
        parsing.await.map_err(|_| Refusal::panicked())?
    }
}

impl Fields {
    /// # Errors
    /// The bytes are not UTF-8, not JSON, or not an object; the message says where.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            Refusal::malformed(format!(
                "the body is not UTF-8: invalid at byte {}",
                error.valid_up_to()
            ))
        })?;
        let invalid = |error| Refusal::malformed(format!("the body is not valid JSON: {error}"));
        if text.trim_start().starts_with('{') {
            return Ok(Self(serde_json::from_str::<Object>(text).map_err(invalid)?.0));
        }
        let other: Value = serde_json::from_str(text).map_err(invalid)?;
        let shown = shown(&other);
        Err(Refusal::malformed(format!("the body must be a JSON object, this one is {shown}")))
    }

    /// An object nested in another, such as `stream_options`.
    pub fn nested(&self, name: &'static str) -> Result<Self, Refusal> {
        match self.get(name) {
            None => Ok(Self::default()),
            Some(Value::Object(map)) => Ok(Self(map.clone())),
            Some(other) => Err(must_be(name, "an object", other)),
        }
    }

    /// The field as it is, `None` when absent or null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        #[cfg(test)]
        assert!(object::is_known(name), "{name} would be skipped in a body");
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// As [`Self::get`], without a copy.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        assert!(object::is_known(name), "{name} would be skipped in a body");
        self.0.get_mut(name).map(Value::take).filter(|value| !value.is_null())
    }

    /// Whether the field was written at all, be it null.
    pub fn is_written(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn text(&self, name: &'static str) -> Result<Option<&str>, Refusal> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(must_be(name, "a string", other)),
        }
    }

    /// False when absent.
    pub fn flag(&self, name: &'static str) -> Result<bool, Refusal> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    pub fn optional_flag(&self, name: &'static str) -> Result<Option<bool>, Refusal> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(must_be(name, "true or false", other)),
        }
    }

    /// A whole number of at least `least`.
    pub fn count(&self, name: &'static str, least: u32) -> Result<Option<u32>, Refusal> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .filter(|number| *number >= least)
            .map(Some)
            .ok_or_else(|| {
                must_be(name, &format!("a whole number from {least} to {}", u32::MAX), value)
            })
    }

    /// A whole number of 64 bits.
    pub fn whole(&self, name: &'static str) -> Result<Option<i64>, Refusal> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_i64()
                .map(Some)
                .ok_or_else(|| must_be(name, "a whole number of 64 bits", value)),
        }
    }

    /// A seed: any whole number of 64 bits, signed or not.
    pub fn seed(&self, name: &'static str) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .or_else(|| value.as_i64().map(i64::cast_unsigned))
            .map(Some)
            .ok_or_else(|| must_be(name, "a whole number of 64 bits", value))
    }

    pub fn real(&self, name: &'static str) -> Result<Option<f32>, Refusal> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_number()
                .and_then(finite)
                .map(Some)
                .ok_or_else(|| must_be(name, "a finite number", value)),
        }
    }

    /// A string or a list of strings; empty when absent.
    pub fn texts(&self, name: &'static str) -> Result<Vec<String>, Refusal> {
        let wanted = "a string or a list of strings";
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text.clone()),
                    other => Err(must_be(name, wanted, other)),
                })
                .collect(),
            Some(other) => Err(must_be(name, wanted, other)),
        }
    }

    /// A list of token ids; empty when absent.
    pub fn ids(&self, name: &'static str) -> Result<Vec<u32>, Refusal> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(|item| token_id(name, item)).collect(),
            Some(other) => Err(must_be(name, "a list of token ids", other)),
        }
    }

    /// Refuses the fields of a table that this server knows of and does not support. A value that
    /// changes nothing (absent, null, false, empty, the one supported) is taken.
    pub fn refuse_unsupported(&self, table: &'static [Field]) -> Result<(), Refusal> {
        for Field { name, form, .. } in table {
            let only = match form {
                Form::Refused => None,
                Form::Fixed(value) => Some(value()),
                _ => continue,
            };
            let Some(given) = self.get(name) else { continue };
            match only {
                None if is_idle(given) => {}
                None => {
                    return Err(Refusal::unsupported(*name, format!("{name} is not supported")));
                }
                Some(only) if is_same(given, &only) => {}
                Some(only) => {
                    let given = shown(given);
                    let message = format!("{name} {given} is not supported, only {only}");
                    return Err(Refusal::unsupported(*name, message));
                }
            }
        }
        Ok(())
    }
}

/// A value as a token id of `field`.
pub fn token_id(field: &str, value: &Value) -> Result<u32, Refusal> {
    value
        .as_u64()
        .and_then(|id| u32::try_from(id).ok())
        .ok_or_else(|| must_be(field, "token ids, whole numbers from 0", value))
}

/// 400 for a value of the wrong kind or out of its range.
pub fn must_be(field: &str, wanted: &str, given: &Value) -> Refusal {
    Refusal::invalid(field, format!("{field} must be {wanted}, got {}", shown(given)))
}

/// A value as an error shows it: its beginning.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARS) {
        None => text,
        Some((cut, _)) => format!("{}…", &text[..cut]),
    }
}

/// Whether a value asks for nothing.
fn is_idle(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Equal, 1 and 1.0 included.
fn is_same(given: &Value, only: &Value) -> bool {
    match (given.as_f64(), only.as_f64()) {
        (Some(given), Some(only)) => given == only,
        _ => given == only,
    }
}

fn finite(number: &Number) -> Option<f32> {
    number.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

/// A body is read as it comes: one that says it is compressed cannot be.
fn require_plain(headers: &HeaderMap) -> Result<(), Refusal> {
    for given in headers.get_all(header::CONTENT_ENCODING) {
        if !given.as_bytes().eq_ignore_ascii_case(b"identity") {
            let given = given.to_str().unwrap_or("(not text)");
            return Err(Refusal::wrong_encoding(given));
        }
    }
    Ok(())
}

/// Absent content types are taken: `curl -d` users and old scripts send worse, and say so.
fn require_json(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(given) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let given = given.to_str().unwrap_or("(not text)");
    let media = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media == "application/json"
        || (media.starts_with("application/") && media.ends_with("+json"))
    {
        return Ok(());
    }
    Err(Refusal::wrong_media(given))
}

async fn read(headers: &HeaderMap, body: Body, limit_bytes: usize) -> Result<Bytes, Refusal> {
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > limit_bytes as u64) {
        // A client that waits for `100 Continue` has not begun to send.
        if !headers.contains_key(header::EXPECT) {
            tokio::spawn(discard(body));
        }
        return Err(Refusal::body_too_large(limit_bytes, announced));
    }
    let timeout = std::time::Duration::from_secs(BODY_TIMEOUT_S);
    match tokio::time::timeout(timeout, Limited::new(body, limit_bytes).collect()).await {
        Err(_) => Err(Refusal::slow_body(BODY_TIMEOUT_S)),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Refusal::body_too_large(limit_bytes, None))
        }
        Ok(Err(error)) => Err(Refusal::malformed(format!("the body could not be read: {error}"))),
    }
}

/// Reads and throws away, up to a bound in bytes and time.
async fn discard(body: Body) {
    let reading = async {
        let mut left = DISCARD_BYTES_MAX;
        let mut data = body.into_data_stream();
        while let Some(Ok(bytes)) = data.next().await {
            match left.checked_sub(bytes.len()) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    let _ = tokio::time::timeout(std::time::Duration::from_secs(DISCARD_TIMEOUT_S), reading).await;
}
