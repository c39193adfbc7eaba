//! A body as an object of the fields that some route reads. What no route reads is skipped where it
//! stands, so that a large unknown value costs its reading and no memory.

use std::{borrow::Cow, collections::HashSet, fmt, sync::LazyLock};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};

use super::field::{Field, Form};
use crate::http;

/// Every field that is read or refused by name, of bodies and of objects in them.
static KNOWN: LazyLock<HashSet<&'static str>> = LazyLock::new(|| {
    let mut known = HashSet::new();
    let mut tables: Vec<&[Field]> = http::TABLES.to_vec();
    while let Some(table) = tables.pop() {
        for field in table.iter().filter(|field| !matches!(field.form, Form::Ignored)) {
            known.insert(field.name);
            tables.push(field.inner());
        }
    }
    known
});

pub fn is_known(name: &str) -> bool {
    KNOWN.contains(name)
}

/// The known fields of an object.
pub struct Object(pub Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KnownFields)
    }
}

struct KnownFields;

impl<'de> Visitor<'de> for KnownFields {
    type Value = Object;

    fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object, A::Error> {
        let mut known = Map::new();
        while let Some(name) = entries.next_key::<Cow<str>>()? {
            if is_known(&name) {
                known.insert(name.into_owned(), entries.next_value()?);
            } else {
                entries.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Object(known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: &str) {
        let object: Object = serde_json::from_str(body).unwrap();
        assert_eq!(Value::Object(object.0).to_string(), expected, "{body}");
    }

    #[test]
    fn unknown_fields_are_skipped() {
        check(r#"{}"#, "{}");
        check(r#"{"x": [[{}, 1e999]], "n": 2, "y": {"n": 3}}"#, r#"{"n":2}"#);
        check(r#"{"stop": {"x": 1}, "n": 1, "n": 2}"#, r#"{"stop":{"x":1},"n":2}"#);
        // A name with an escape is the same name.
        check(r#"{"\u006e": 5}"#, r#"{"n":5}"#);
    }
}
