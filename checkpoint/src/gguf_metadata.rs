//! Typed access to GGUF metadata.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use crate::CheckpointError;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    /// Booleans too, as 0 and 1.
    Integers(Vec<i64>),
    Floats(Vec<f64>),
}

impl Value {
    /// For messages: a list of a hundred thousand tokens is not printed.
    fn describe(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
            Self::Texts(list) => format!("a list of {} texts", list.len()),
            Self::Integers(list) => format!("a list of {} integers", list.len()),
            Self::Floats(list) => format!("a list of {} floats", list.len()),
        }
    }
}

/// The keys of one file. A getter gives none for an absent key, an error for one of another type.
#[derive(Debug)]
pub(crate) struct Metadata {
    path: PathBuf,
    values: HashMap<String, Value>,
}

impl Metadata {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), values: HashMap::new() }
    }

    /// True if the key was there already.
    pub(crate) fn insert(&mut self, key: String, value: Value) -> bool {
        self.values.insert(key, value).is_some()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.typed(key, "a text", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<&[String]>, CheckpointError> {
        self.typed(key, "a list of texts", |value| match value {
            Value::Texts(list) => Some(list.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn integers(&self, key: &str) -> Result<Option<&[i64]>, CheckpointError> {
        self.typed(key, "a list of integers", |value| match value {
            Value::Integers(list) => Some(list.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Option<&[f64]>, CheckpointError> {
        self.typed(key, "a list of floats", |value| match value {
            Value::Floats(list) => Some(list.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, "a number", |value| match value {
            Value::Float(value) => Some(*value),
            Value::Integer(value) => Some(*value as f64),
            _ => None,
        })
    }

    /// A whole number, or a list of equal ones (one for each layer).
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        self.typed(key, "a whole number, the same for all layers", |value| match value {
            Value::Integer(value) => usize::try_from(*value).ok(),
            Value::Integers(list) if list.windows(2).all(|pair| pair[0] == pair[1]) => {
                list.first().and_then(|value| usize::try_from(*value).ok())
            }
            _ => None,
        })
    }

    pub(crate) fn id(&self, key: &str) -> Result<Option<u32>, CheckpointError> {
        self.typed(key, "a token id", |value| match value {
            Value::Integer(value) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    /// The value, or an error that says the key is needed.
    pub(crate) fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.refuse(key, "a value", "nothing".to_owned()))
    }

    pub(crate) fn refuse(&self, key: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.clone(),
            field: key.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(typed) => Ok(Some(typed)),
                None => Err(self.refuse(key, expected, value.describe())),
            },
        }
    }
}
