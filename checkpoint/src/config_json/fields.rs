//! Typed access to a JSON object's fields.

use std::path::Path;

use serde_json::{Map, Value};

use crate::CheckpointError;

/// One object of a config; null counts as absent.
pub(crate) struct Fields<'a> {
    pub path: &'a Path,
    pub object: &'a Map<String, Value>,
    /// The field that holds the object, for messages; empty for the config itself.
    pub prefix: &'static str,
}

impl<'a> Fields<'a> {
    /// The config itself.
    pub fn of(path: &'a Path, object: &'a Map<String, Value>) -> Self {
        Self { path, object, prefix: "" }
    }

    fn full_name(&self, field: &str) -> String {
        match self.prefix {
            "" => field.to_owned(),
            prefix => format!("{prefix}.{field}"),
        }
    }

    pub fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    pub fn refuse(
        &self,
        field: &str,
        expected: impl ToString,
        found: impl serde::Serialize,
    ) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: self.full_name(field),
            expected: expected.to_string(),
            found: serde_json::to_string(&found).unwrap_or_else(|_| "a value".to_owned()),
        }
    }

    pub fn absent(&self, field: &str, expected: &str) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: self.full_name(field),
            expected: expected.to_owned(),
            found: "nothing".to_owned(),
        }
    }

    pub fn optional_size(&self, field: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) => Ok(Some(size)),
            None => Err(self.refuse(field, "a whole number", value)),
        }
    }

    pub fn size(&self, field: &str) -> Result<usize, CheckpointError> {
        self.optional_size(field)?.ok_or_else(|| self.absent(field, "a whole number"))
    }

    pub fn optional_number(&self, field: &str) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refuse(field, "a number", value))
    }

    pub fn number(&self, field: &str) -> Result<f64, CheckpointError> {
        self.optional_number(field)?.ok_or_else(|| self.absent(field, "a number"))
    }

    pub fn factor(&self, field: &str) -> Result<f64, CheckpointError> {
        let value = self.number(field)?;
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.refuse(field, "a positive number", value))
        }
    }

    pub fn optional_bool(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.refuse(field, "true or false", value))
    }

    /// A token id or a list of them.
    pub fn ids(&self, field: &str) -> Result<Vec<u32>, CheckpointError> {
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.refuse(field, "a token id or a list of token ids", value))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }

    /// A list of numbers, `count` of them, each positive.
    pub fn factors(&self, field: &str, count: usize) -> Result<Vec<f64>, CheckpointError> {
        let expected = format!("a list of {count} positive numbers");
        let Some(value) = self.get(field) else { return Err(self.absent(field, &expected)) };
        let numbers = value.as_array().and_then(|list| {
            let numbers = list.iter().map(|item| item.as_f64().filter(|&item| item > 0.0));
            numbers.collect::<Option<Vec<f64>>>()
        });
        match numbers {
            Some(numbers) if numbers.len() == count => Ok(numbers),
            Some(numbers) => {
                Err(self.refuse(field, expected, format!("{} numbers", numbers.len())))
            }
            None => Err(self.refuse(field, expected, "something else")),
        }
    }

    /// The object in `field`, if it is there.
    pub fn nested(&self, field: &'static str) -> Result<Option<Fields<'_>>, CheckpointError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                Ok(Some(Fields { path: self.path, object, prefix: field }))
            }
            Some(other) => Err(self.refuse(field, "an object or null", other)),
        }
    }
}
