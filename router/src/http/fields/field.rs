//! What a request may hold: each route has a table of its fields. Bodies are filtered by the
//! tables, refusals are read off them, and the OpenAPI document is written from them.

use serde_json::{Map, Value, json};

/// A row of a table.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub form: Form,
    pub required: bool,
    /// One line for the document.
    pub meaning: &'static str,
}

/// The JSON that a field may hold; `null` is always the same as absent.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    Flag,
    Text,
    /// A string or a list of strings.
    Texts,
    /// A list of token ids.
    Ids,
    /// A whole number, both ends included.
    Whole {
        least: i64,
        most: u64,
    },
    /// A number, both ends included.
    Real {
        least: f32,
        most: f32,
    },
    Object(&'static [Field]),
    /// What no other form says, as a JSON schema.
    Shaped(fn() -> Value),
    /// Supported with this value alone, which asks for nothing.
    Fixed(fn() -> Value),
    /// Known, changes the answer, and not supported.
    Refused,
    /// Known, does not change the answer, and not looked at.
    Ignored,
}

const fn field(name: &'static str, form: Form, meaning: &'static str) -> Field {
    Field { name, form, required: false, meaning }
}

pub const fn flag(name: &'static str, meaning: &'static str) -> Field {
    field(name, Form::Flag, meaning)
}

pub const fn text(name: &'static str, meaning: &'static str) -> Field {
    field(name, Form::Text, meaning)
}

pub const fn texts(name: &'static str, meaning: &'static str) -> Field {
    field(name, Form::Texts, meaning)
}

pub const fn ids(name: &'static str, meaning: &'static str) -> Field {
    field(name, Form::Ids, meaning)
}

/// A whole number of 32 bits from `least`.
pub const fn count(name: &'static str, least: u32, meaning: &'static str) -> Field {
    whole(name, least as i64, u32::MAX as u64, meaning)
}

pub const fn whole(name: &'static str, least: i64, most: u64, meaning: &'static str) -> Field {
    field(name, Form::Whole { least, most }, meaning)
}

pub const fn real(name: &'static str, least: f32, most: f32, meaning: &'static str) -> Field {
    field(name, Form::Real { least, most }, meaning)
}

pub const fn object(name: &'static str, fields: &'static [Field], meaning: &'static str) -> Field {
    field(name, Form::Object(fields), meaning)
}

pub const fn shaped(name: &'static str, shape: fn() -> Value, meaning: &'static str) -> Field {
    field(name, Form::Shaped(shape), meaning)
}

/// A shape: any object.
pub fn object_shape() -> Value {
    json!({"type": "object"})
}

pub const fn fixed(name: &'static str, value: fn() -> Value) -> Field {
    field(name, Form::Fixed(value), "Another value is not supported (422).")
}

pub const fn refused(name: &'static str) -> Field {
    field(name, Form::Refused, "Not supported: refused (422) when it asks for something.")
}

pub const fn ignored(name: &'static str) -> Field {
    field(name, Form::Ignored, "Taken, and without effect on the answer.")
}

impl Field {
    pub const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    /// Its JSON schema.
    pub fn schema(&self) -> Value {
        let mut schema = match self.form {
            Form::Flag => json!({"type": "boolean"}),
            Form::Text => json!({"type": "string"}),
            Form::Texts => json!({"anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
            ]}),
            Form::Ids => json!({"type": "array", "items": token_id()}),
            Form::Whole { least, most } => {
                json!({"type": "integer", "minimum": least, "maximum": most})
            }
            Form::Real { least, most } => {
                // Written as decimal fractions, not as the nearest doubles of f32.
                let decimal = |bound: f32| bound.to_string().parse::<f64>().unwrap_or_default();
                json!({"type": "number", "minimum": decimal(least), "maximum": decimal(most)})
            }
            Form::Object(fields) => object_schema(&[fields]),
            Form::Shaped(shape) => shape(),
            Form::Fixed(value) => json!({"const": value()}),
            Form::Refused => json!({"enum": [null, false, "", [], {}]}),
            Form::Ignored => json!({}),
        };
        if !self.required {
            schema = or_null(schema);
        }
        schema["description"] = self.meaning.into();
        schema
    }

    /// The fields of the objects in it.
    pub fn inner(&self) -> &'static [Field] {
        match self.form {
            Form::Object(fields) => fields,
            _ => &[],
        }
    }
}

pub fn token_id() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
}

/// The schema of an object with the fields of these tables.
pub fn object_schema(tables: &[&[Field]]) -> Value {
    let fields = || tables.iter().copied().flatten();
    let properties: Map<String, Value> =
        fields().map(|field| (field.name.to_owned(), field.schema())).collect();
    let required: Vec<&str> =
        fields().filter(|field| field.required).map(|field| field.name).collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

fn or_null(schema: Value) -> Value {
    let has_any_type = schema.as_object().is_some_and(Map::is_empty);
    let is_null_known = schema.get("enum").is_some();
    if has_any_type || is_null_known {
        return schema;
    }
    match schema.get("type") {
        Some(Value::String(kind)) => {
            let kinds = json!([kind, "null"]);
            let mut schema = schema;
            schema["type"] = kinds;
            schema
        }
        _ => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}
