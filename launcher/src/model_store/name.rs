//! What a person calls a model.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use super::{ALIASES, Alias, StoreError, hub::stays_inside};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelName {
    /// A folder or a file.
    Path(PathBuf),
    Alias(Alias),
    Repo(RepoName),
}

/// A repository of the Hugging Face Hub: `owner/name[@revision][:file]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoName {
    pub id: String,
    /// A branch, a tag, `refs/pr/N` or a commit.
    pub revision: String,
    /// A file of it, or a quantisation that a GGUF file's name ends with.
    pub file: Option<String>,
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        if self.revision != MAIN {
            write!(f, "@{}", self.revision)?;
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
    }
}

/// The revision that is meant where none is named.
pub const MAIN: &str = "main";

impl ModelName {
    /// An alias wins over a path of the same name (write `./smollm2` for that), an existing path
    /// over a repo id.
    pub fn parse(given: &str) -> Result<Self, StoreError> {
        let refuse = |detail: String| StoreError::Name { given: given.to_owned(), detail };
        if given.is_empty() {
            return Err(refuse("is empty".to_owned()));
        }
        if let Some(alias) = Alias::find(given) {
            return Ok(Self::Alias(alias));
        }
        let path = Path::new(given);
        let spelled_as_path = given.starts_with(['/', '.', '~']) || given.ends_with('/');
        if path.exists() {
            // Children run with the same folder, but a path in their logs should mean something.
            return Ok(Self::Path(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())));
        }
        if !spelled_as_path && let Some(repo) = repo(given) {
            return Ok(Self::Repo(repo));
        }
        if spelled_as_path || given.contains('/') || path.extension().is_some() {
            return Err(refuse("no such file or folder".to_owned()));
        }
        let known: Vec<&str> = ALIASES.iter().map(|alias| alias.name).collect();
        Err(refuse(format!(
            "is no file, folder or Hugging Face repo id (owner/name), and no alias (known: {})",
            known.join(", ")
        )))
    }
}

/// What clients call a model that was given so: an alias or a repo id is its own name, a path is
/// called by its last component without the extension of a model file.
pub fn served_name(given: &str) -> String {
    let path = match ModelName::parse(given) {
        Ok(ModelName::Alias(alias)) => return alias.name.to_owned(),
        Ok(ModelName::Repo(repo)) => return repo.id,
        Ok(ModelName::Path(path)) => path.canonicalize().unwrap_or(path),
        Err(_) => PathBuf::from(given),
    };
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else {
        return "model".to_owned();
    };
    // Folders have versions in their names: not everything behind a dot is an extension.
    let stem = [".gguf", ".safetensors"].iter().find_map(|end| name.strip_suffix(end));
    stem.filter(|stem| !stem.is_empty()).unwrap_or(&name).to_owned()
}

/// `owner/name[@revision][:file]` by the Hub's rules for names.
fn repo(given: &str) -> Option<RepoName> {
    let (repo, file) = match given.split_once(':') {
        Some((repo, file)) => (repo, Some(file)),
        None => (given, None),
    };
    let (id, revision) = repo.split_once('@').unwrap_or((repo, MAIN));
    let (owner, name) = id.split_once('/')?;
    let valid = |part: &str| {
        (1..=96).contains(&part.len())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
            && !part.contains("..")
    };
    let endings = [".gguf", ".safetensors", ".json", ".bin", ".pth", ".pt"];
    let is_id = valid(owner) && valid(name) && !endings.iter().any(|end| name.ends_with(end));
    let valid_revision = revision.split('/').all(valid);
    let valid_file = file.is_none_or(stays_inside);
    (is_id && valid_revision && valid_file).then(|| RepoName {
        id: id.to_owned(),
        revision: revision.to_owned(),
        file: file.map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_call_a_model_by_a_short_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("Tiny-1.5B.Q4_1.gguf");
        std::fs::write(&file, "").unwrap();
        let check = |given: &str, want: &str| assert_eq!(served_name(given), want, "{given}");
        check("smollm2", "smollm2");
        check("SmolLM2", "smollm2");
        check("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B");
        check("owner/name@main", "owner/name");
        check("owner/name@refs/pr/1:Q8_0", "owner/name");
        check(file.to_str().unwrap(), "Tiny-1.5B.Q4_1");
        check("/models/Llama-3.1-8B", "Llama-3.1-8B");
        check("/models/Llama-3.1-8B/", "Llama-3.1-8B");
        check("/", "model");
        let name = folder.path().canonicalize().unwrap();
        let name = name.file_name().unwrap().to_str().unwrap();
        check(&format!("{}/../{name}/.", folder.path().display()), name);
    }
}
