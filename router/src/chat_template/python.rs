//! Values spelled as Python spells them: `str`, `repr` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use super::rendered::MARKERS;

/// `str(value)`; an undefined one is empty, as in Jinja.
pub fn display(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> =
                value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect();
            match (value.is_tuple(), items.len()) {
                (true, 1) => format!("({},)", items[0]),
                (true, _) => format!("({})", items.join(", ")),
                _ => format!("[{}]", items.join(", ")),
            }
        }
        ValueKind::Map => {
            let entry = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&item))
            };
            let entries: Vec<String> = value.try_iter().into_iter().flatten().map(entry).collect();
            format!("{{{}}}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

/// Shortest digits that read back; an exponent from 1e16 and below 1e-4.
fn float_repr(float: f64) -> String {
    if !float.is_finite() {
        let text = if float.is_nan() { "nan" } else { "inf" };
        return if float < 0.0 { format!("-{text}") } else { text.to_owned() };
    }
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{float:?}")
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => out.extend(['\\', quote]),
            _ if character.is_control() => {
                let _ = write!(out, "\\x{:02x}", character as u32);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
    out
}

/// The keywords of `json.dumps`.
#[derive(Clone, Debug)]
pub struct JsonStyle {
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// `json.dumps(value)`.
pub fn to_json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let refuse = |detail: String| Error::new(ErrorKind::BadSerialization, detail);
    if value.is_undefined() {
        return Err(refuse("Object of type Undefined is not JSON serializable".to_owned()));
    }
    let parsed = serde_json::to_value(value).map_err(|error| refuse(error.to_string()))?;
    let mut out = String::new();
    write_json(&parsed, style, 1, &mut out);
    Ok(out)
}

fn write_json(value: &serde_json::Value, style: &JsonStyle, depth: usize, out: &mut String) {
    use serde_json::Value as Json;
    match value {
        Json::Null | Json::Bool(_) => out.push_str(&value.to_string()),
        Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => out.push_str(&float_repr(float)),
            None => out.push_str(&number.to_string()),
        },
        Json::String(text) => write_string(text, style.ensure_ascii, out),
        Json::Array(items) => {
            let write = |item: &&Json, out: &mut String| write_json(item, style, depth + 1, out);
            write_items(items.iter(), "[]", (style, depth), write, out);
        }
        Json::Object(entries) => {
            let mut entries: Vec<_> = entries.iter().collect();
            if style.sort_keys {
                entries.sort_by_key(|(key, _)| *key);
            }
            let write = |(key, item): &(&String, &Json), out: &mut String| {
                write_string(key, style.ensure_ascii, out);
                out.push_str(&style.key_separator);
                write_json(item, style, depth + 1, out);
            };
            write_items(entries.into_iter(), "{}", (style, depth), write, out);
        }
    }
}

fn write_items<T>(
    items: impl ExactSizeIterator<Item = T>,
    brackets: &str,
    (style, depth): (&JsonStyle, usize),
    write: impl Fn(&T, &mut String),
    out: &mut String,
) {
    let (open, close) = brackets.split_at(1);
    let is_empty = items.len() == 0;
    let new_line = |depth: usize, out: &mut String| {
        if let Some(indent) = style.indent.filter(|_| !is_empty) {
            out.push('\n');
            out.push_str(&" ".repeat(indent * depth));
        }
    };
    out.push_str(open);
    for (number, item) in items.enumerate() {
        if number > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(depth, out);
        write(&item, out);
    }
    new_line(depth - 1, out);
    out.push_str(close);
}

fn write_string(text: &str, ensure_ascii: bool, out: &mut String) {
    let quoted = serde_json::Value::from(text).to_string();
    if !ensure_ascii {
        out.push_str(&quoted);
        return;
    }
    for character in quoted.chars() {
        // A marker has to come out as it went in.
        if character.is_ascii() || MARKERS.contains(&character) {
            out.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
}
