//! The text sources of a Hugging Face folder: a tokenizer in any format, tokenizer_config.json,
//! special_tokens_map.json, chat_template.jinja and additional_chat_templates/.

use std::{fs, path::Path};

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use crate::{
    CheckpointError, TextSources,
    json_file::{read_object, read_text},
    tokenizer_file::TokenizerFile,
    tokenizer_vocabulary::{frame, refuse as refuse_tokenizer},
};

/// What transformers gives to templates beside `bos_token` and `eos_token`.
const NAMED_TOKENS: [&str; 5] = ["unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl TextSources {
    /// What lies in `folder`, for a model with `vocab_size` embeddings.
    ///
    /// # Errors
    /// No tokenizer, one that cannot be read, or one with ids beyond `vocab_size`.
    pub fn from_folder(folder: &Path, vocab_size: usize) -> Result<Self, CheckpointError> {
        let mut file = TokenizerFile::open(folder)?;
        let config_path = folder.join("tokenizer_config.json");
        let config = match config_path.exists() {
            true => read_object(&config_path)?,
            false => Map::new(),
        };
        if file.path.extension().is_none_or(|extension| extension != "json") {
            complete(&mut file, &config_path, &config)?;
        }
        let mut text = Self::new(file.tokenizer, vocab_size);
        text.check_vocabulary(&file.path)?;
        text.bos_token = file.bos_token;
        text.eos_token = file.eos_token;
        text.end_tokens = file.end_tokens;
        text.special_tokens.extend(file.unknown_token.map(|token| ("unk_token".to_owned(), token)));
        text.chat_templates.extend(file.chat_template.map(|source| ("default".to_owned(), source)));
        let map_path = folder.join("special_tokens_map.json");
        if map_path.exists() {
            text.name_tokens(&map_path, &read_object(&map_path)?)?;
        }
        // The config is the newer file and has the last word.
        text.name_tokens(&config_path, &config)?;
        for (name, source) in templates(&config_path, &config)? {
            text.set_template(&name, source);
        }
        text.add_template_files(folder)?;
        Ok(text)
    }

    fn name_tokens(
        &mut self,
        path: &Path,
        fields: &Map<String, Value>,
    ) -> Result<(), CheckpointError> {
        // An explicit null says that there is none.
        if fields.contains_key("bos_token") {
            self.bos_token = token(path, fields, "bos_token")?;
        }
        if fields.contains_key("eos_token") {
            self.eos_token = token(path, fields, "eos_token")?;
        }
        for name in NAMED_TOKENS {
            if let Some(token) = token(path, fields, name)? {
                self.special_tokens.retain(|(other, _)| other != name);
                self.special_tokens.push((name.to_owned(), token));
            }
        }
        Ok(())
    }

    /// A template in a file of its own replaces the one in the config, as transformers has it.
    fn add_template_files(&mut self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            self.set_template("default", read_text(&path)?);
        }
        let Ok(entries) = fs::read_dir(folder.join("additional_chat_templates")) else {
            return Ok(());
        };
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort_unstable();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|end| end == "jinja")) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            self.set_template(&name, read_text(path)?);
        }
        Ok(())
    }
}

/// What a tokenizer.json says itself, and the config says for other formats: further tokens, and
/// what is put around a text.
fn complete(
    file: &mut TokenizerFile,
    path: &Path,
    config: &Map<String, Value>,
) -> Result<(), CheckpointError> {
    add_tokens(&mut file.tokenizer, path, config)?;
    let flag = |field| match config.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(*flag)),
        Some(other) => Err(refuse(path, field, "true or false", other)),
    };
    let (add_bos, add_eos) = (flag("add_bos_token")?, flag("add_eos_token")?);
    if add_bos.is_none() && add_eos.is_none() {
        return Ok(());
    }
    let named = |field, otherwise: &Option<String>| {
        let name = token(path, config, field)?.or_else(|| otherwise.clone());
        Ok(name.and_then(|name| Some((file.tokenizer.token_to_id(&name)?, name))))
    };
    let bos = named("bos_token", &file.bos_token)?.map(|(id, name)| (name, id));
    let eos = named("eos_token", &file.eos_token)?.map(|(id, name)| (name, id));
    let before = bos.as_ref().filter(|_| add_bos.unwrap_or(true));
    let after = eos.as_ref().filter(|_| add_eos.unwrap_or(false));
    let frame = match before.is_some() || after.is_some() {
        true => Some(frame(before, after).map_err(|error| refuse_tokenizer(&file.path, error))?),
        false => None,
    };
    file.tokenizer.with_post_processor(frame);
    Ok(())
}

/// `added_tokens_decoder`: tokens by id, behind those of the vocabulary or names for them.
fn add_tokens(
    tokenizer: &mut Tokenizer,
    path: &Path,
    config: &Map<String, Value>,
) -> Result<(), CheckpointError> {
    const FIELD: &str = "added_tokens_decoder";
    let expected = "an object from token ids to tokens";
    let entries = match config.get(FIELD) {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(refuse(path, FIELD, expected, other)),
    };
    let mut tokens = Vec::new();
    for (id, value) in entries {
        let id: u32 = id.parse().map_err(|_| refuse(path, FIELD, expected, &id.as_str().into()))?;
        let token: AddedToken = serde_json::from_value(value.clone())
            .map_err(|_| refuse(path, FIELD, "a token with content and flags", value))?;
        tokens.push((id, token));
    }
    tokens.sort_by_key(|(id, _)| *id);
    for (id, token) in tokens {
        let content = token.content.clone();
        tokenizer.add_tokens([token]).map_err(|error| refuse_tokenizer(path, error))?;
        let found = tokenizer.token_to_id(&content);
        if found != Some(id) {
            let detail = format!("{FIELD} has {content:?} at {id}, its place is {found:?}");
            return Err(refuse_tokenizer(path, detail));
        }
    }
    Ok(())
}

fn refuse(path: &Path, field: &str, expected: &str, found: &Value) -> CheckpointError {
    CheckpointError::Field {
        path: path.to_owned(),
        field: field.to_owned(),
        expected: expected.to_owned(),
        found: found.to_string(),
    }
}

/// A token written as a string or as an object with its `content`.
fn token(
    path: &Path,
    config: &Map<String, Value>,
    field: &str,
) -> Result<Option<String>, CheckpointError> {
    let Some(value) = config.get(field).filter(|value| !value.is_null()) else { return Ok(None) };
    let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
    let expected = "a token as a string, or an object with its content";
    text.map(|text| Some(text.to_owned())).ok_or_else(|| refuse(path, field, expected, value))
}

/// `chat_template`: one source, or a list of `{name, template}`.
fn templates(
    path: &Path,
    config: &Map<String, Value>,
) -> Result<Vec<(String, String)>, CheckpointError> {
    let expected = "a template, or a list of objects with name and template";
    let named = |value: &Value| {
        let part = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        match (part("name"), part("template")) {
            (Some(name), Some(template)) => Ok((name, template)),
            _ => Err(refuse(path, "chat_template", expected, value)),
        }
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(source)) => Ok(vec![("default".to_owned(), source.clone())]),
        Some(Value::Array(list)) => list.iter().map(named).collect(),
        Some(other) => Err(refuse(path, "chat_template", expected, other)),
    }
}
