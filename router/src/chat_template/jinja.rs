//! The Jinja environment of Hugging Face templates.

use std::{error::Error as _, fmt::Write as _};

use chrono::NaiveDateTime;
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    tests,
    value::{Kwargs, Rest},
};

use super::{TemplateError, python};

/// `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods and spellings, and the
/// functions that transformers adds.
pub fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    // Fails only for delimiters that clash; these are the default ones.
    environment.set_syntax(syntax.unwrap_or_default());
    environment.set_fuel(Some(fuel));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| {
        write!(out, "{}", python::display(value)).map_err(Error::from)
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: Value| python::display(&value));
    environment.add_function("raise_exception", raise_exception);
    // Jinja2's undefined value can be gone through, and has nothing in it; `none` cannot.
    environment.add_test("iterable", |value: Value| {
        value.is_undefined() || (!value.is_none() && tests::is_iterable(&value))
    });
    environment
}

/// A source with what minijinja reads otherwise written so that it reads it as Jinja2 does:
/// `{% generation %}` marks the assistant's words for training and renders as if it were not there;
/// the line break after `{% raw %}` stays.
pub fn as_jinja2_reads(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut is_raw = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(len) = tag.find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let inner = &tag[2..len - 2];
        rest = &tag[len..];
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" if !is_raw => {
                let _ = write!(out, "{{%{}%}}", inner.replace("generation", "if true"));
            }
            "endgeneration" if !is_raw => {
                let _ = write!(out, "{{%{}%}}", inner.replace("endgeneration", "endif"));
            }
            "raw" if !is_raw => {
                is_raw = true;
                out.push_str(&tag[..len]);
                if rest.starts_with('\n') && !inner.ends_with('-') {
                    out.push('\n');
                }
            }
            name => {
                is_raw &= name != "endraw";
                out.push_str(&tag[..len]);
            }
        }
    }
    out + rest
}

/// The message of `raise_exception`, kept apart from the engine's own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

/// Tells what the template said from what went wrong in it.
pub fn failure(error: Error) -> TemplateError {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        source = cause.source();
    }
    TemplateError::Engine(error.to_string())
}

/// `strftime_now(format)` at a fixed time.
pub fn strftime_now(now: NaiveDateTime) -> Value {
    Value::from_function(move |format: String| {
        let mut text = String::new();
        // chrono reports a format it does not know when it writes.
        write!(text, "{}", now.format(&format)).map_err(|_| {
            let detail = format!("strftime_now does not know the format {format:?}");
            Error::new(ErrorKind::InvalidOperation, detail)
        })?;
        Ok::<_, Error>(text)
    })
}

/// Python's `json.dumps(value, ensure_ascii=False)` with its keywords.
fn to_json(value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut style = python::JsonStyle {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..python::JsonStyle::default()
    };
    let indent = match kwargs.get::<Option<usize>>("indent")? {
        Some(indent) => Some(indent),
        None => positional.first().and_then(|value| usize::try_from(value.clone()).ok()),
    };
    // Python drops the space after an item's comma when every item has its own line.
    if indent.is_some() {
        style.item_separator = ",".to_owned();
    }
    style.indent = indent;
    if let Some(separators) = kwargs.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = separators.as_slice() else {
            let detail = "tojson: separators must be two strings";
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        };
        (style.item_separator, style.key_separator) = (item.clone(), key.clone());
    }
    kwargs.assert_all_used()?;
    python::to_json(&value, &style).map(Value::from_safe_string)
}
