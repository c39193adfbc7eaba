//! Which files of a repository a server needs: one copy of the weights and what makes text of
//! tokens.

use std::{collections::BTreeSet, fs, path::Path};

use serde::Deserialize;

use super::{HubError, listing::stays_inside};

/// Files beside the weights, whichever of them a repository has.
const TEXTS: &[&str] = &[
    "config.json",
    "params.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Further templates of a model (by the name of their use).
const TEMPLATES: &str = "additional_chat_templates/";

/// Folders of pickled weights by their usual names, in the order of preference.
const WEIGHT_INDEXES: &[&str] = &["model.safetensors.index.json", "pytorch_model.bin.index.json"];

/// Names that are shown of a repository where none fits.
const SHOWN_MAX: usize = 12;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Small files, fetched first.
    pub texts: Vec<String>,
    pub weights: Weights,
    /// The file that is the model; none: the folder is.
    pub model_file: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    Files(Vec<String>),
    /// The files that this index names; it is among the texts.
    Indexed(String),
}

/// What a person asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
    /// A file, or the quantisation of a GGUF file.
    pub file: Option<&'a str>,
}

impl Selection {
    /// `files` are all paths of the repository.
    pub fn of(files: &[&str], wish: Wish<'_>) -> Result<Self, HubError> {
        match wish.file {
            Some(file) => Self::of_file(files, wish, file),
            None => Self::of_repository(files, wish),
        }
    }

    fn of_repository(files: &[&str], wish: Wish<'_>) -> Result<Self, HubError> {
        let mut texts = texts(files);
        if let Some(weights) = tensors(files) {
            if let Weights::Indexed(index) = &weights {
                texts.push(index.clone());
            }
            return Ok(Self { texts, weights, model_file: None });
        }
        let ggufs = ggufs(files);
        match ggufs.as_slice() {
            [] => Err(HubError::NoWeights {
                repo: wish.repo.to_owned(),
                revision: wish.revision.to_owned(),
                has: shown(files),
            }),
            [only] => Self::of_gguf(only, wish),
            several => Err(ambiguous(several, wish)),
        }
    }

    fn of_file(files: &[&str], wish: Wish<'_>, file: &str) -> Result<Self, HubError> {
        if let Some(exact) = files.iter().find(|path| **path == file && is_weights(path)) {
            if exact.ends_with(".gguf") {
                return Self::of_gguf(exact, wish);
            }
            let weights = Weights::Files(vec![file.to_owned()]);
            return Ok(Self { texts: texts(files), weights, model_file: Some(file.to_owned()) });
        }
        let ggufs = ggufs(files);
        let matches: Vec<&str> =
            ggufs.iter().copied().filter(|path| answers_to(path, file)).collect();
        match matches.as_slice() {
            [] => {
                let weights: Vec<&str> =
                    files.iter().copied().filter(|path| is_weights(path)).collect();
                Err(HubError::NoFile {
                    repo: wish.repo.to_owned(),
                    revision: wish.revision.to_owned(),
                    file: file.to_owned(),
                    has: shown(&weights),
                })
            }
            [only] => Self::of_gguf(only, wish),
            [first, ..] if part_of(first).is_some() => Self::of_gguf(first, wish),
            several => Err(ambiguous(several, wish)),
        }
    }

    /// A GGUF file has everything inside.
    fn of_gguf(path: &str, wish: Wish<'_>) -> Result<Self, HubError> {
        if part_of(path).is_some() {
            return Err(HubError::SplitGguf { repo: wish.repo.to_owned(), file: path.to_owned() });
        }
        Ok(Self {
            texts: Vec::new(),
            weights: Weights::Files(vec![path.to_owned()]),
            model_file: Some(path.to_owned()),
        })
    }
}

fn texts(files: &[&str]) -> Vec<String> {
    let needed = |path: &&&str| {
        TEXTS.contains(path) || path.ends_with(".tiktoken") || path.starts_with(TEMPLATES)
    };
    files.iter().filter(needed).map(|path| (*path).to_owned()).collect()
}

/// Safetensors before pickles; of either the indexed files, else the one of the usual name, else all.
/// Only the repository's top folder counts: others hold what is for other programs.
fn tensors(files: &[&str]) -> Option<Weights> {
    let all = |fits: &dyn Fn(&str) -> bool| -> Option<Weights> {
        let found: Vec<String> = files
            .iter()
            .filter(|path| !path.contains('/') && !path.starts_with("adapter_") && fits(path))
            .map(|path| (*path).to_owned())
            .collect();
        (!found.is_empty()).then_some(Weights::Files(found))
    };
    let indexed = |name: &str| files.contains(&name).then(|| Weights::Indexed(name.to_owned()));
    indexed(WEIGHT_INDEXES[0])
        .or_else(|| all(&|path| path == "model.safetensors"))
        .or_else(|| all(&|path| path.ends_with(".safetensors")))
        .or_else(|| indexed(WEIGHT_INDEXES[1]))
        .or_else(|| all(&|path| path == "pytorch_model.bin"))
        .or_else(|| all(&|path| path.starts_with("pytorch_model") && path.ends_with(".bin")))
        .or_else(|| all(&|path| path.starts_with("consolidated.") && path.ends_with(".pth")))
        .or_else(|| all(&|path| path.ends_with(".pth") || path.ends_with(".pt")))
}

/// GGUF files that are language models (an `mmproj` file is the eye of one).
fn ggufs<'a>(files: &[&'a str]) -> Vec<&'a str> {
    let named = |path: &str| path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let model = |path: &&str| path.ends_with(".gguf") && !named(path).starts_with("mmproj");
    files.iter().copied().filter(model).collect()
}

pub fn is_weights(path: &str) -> bool {
    [".safetensors", ".gguf", ".bin", ".pth", ".pt"].iter().any(|end| path.ends_with(end))
}

/// Whether a person means this GGUF file by a name or a quantisation such as `Q4_K_M`.
fn answers_to(path: &str, wish: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let wish = wish.to_ascii_lowercase();
    let mut folders: Vec<&str> = lower.split('/').collect();
    let Some(name) = folders.pop() else { return false };
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let stem = part_of(name).map_or(stem, |whole| whole);
    let ends = stem
        .strip_suffix(wish.as_str())
        .is_some_and(|front| front.is_empty() || front.ends_with(['-', '.']));
    name == wish || ends || folders.contains(&wish.as_str())
}

/// `model` of `model-00001-of-00003.gguf`.
fn part_of(path: &str) -> Option<&str> {
    let stem = path.strip_suffix(".gguf")?;
    let (front, count) = stem.rsplit_once("-of-")?;
    let (whole, number) = front.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.chars().all(|c| c.is_ascii_digit());
    (digits(count) && digits(number)).then_some(whole)
}

fn ambiguous(several: &[&str], wish: Wish<'_>) -> HubError {
    let usual = several.iter().find(|path| answers_to(path, "Q4_K_M"));
    let example = usual.map_or_else(|| several[0].to_owned(), |_| "Q4_K_M".to_owned());
    HubError::Ambiguous { repo: wish.repo.to_owned(), example, has: shown(several) }
}

fn shown(files: &[&str]) -> String {
    match files.len() {
        0 => "no files of that kind".to_owned(),
        count if count > SHOWN_MAX => {
            format!("{} and {} more", files[..SHOWN_MAX].join(", "), count - SHOWN_MAX)
        }
        _ => files.join(", "),
    }
}

#[derive(Deserialize)]
struct IndexFile {
    weight_map: std::collections::BTreeMap<String, String>,
}

/// The weight files that an index on this machine names, each once.
pub fn indexed_files(index: &Path) -> Result<Vec<String>, HubError> {
    let malformed = |found: String| HubError::Malformed {
        url: index.display().to_string(),
        expected: "an index of weights ('weight_map')",
        found,
    };
    let text = fs::read(index).map_err(HubError::io("read", index))?;
    let index: IndexFile =
        serde_json::from_slice(&text).map_err(|cause| malformed(cause.to_string()))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|path| !stays_inside(path)) {
        Some(outside) => Err(malformed(format!("a file '{outside}'"))),
        None => Ok(files.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(files: &[&str], file: Option<&str>) -> Result<Selection, HubError> {
        Selection::of(files, Wish { repo: "o/n", revision: "main", file })
    }

    #[test]
    fn one_copy_of_the_weights_is_taken() {
        let check = |files: &[&str], want_texts: &[&str], want: Result<&[&str], &str>| {
            let got = select(files, None).unwrap();
            assert_eq!(got.texts, want_texts, "{files:?}");
            let weights = match want {
                Ok(files) => Weights::Files(files.iter().map(|f| (*f).to_owned()).collect()),
                Err(index) => Weights::Indexed(index.to_owned()),
            };
            assert_eq!(got.weights, weights, "{files:?}");
            assert_eq!(got.model_file, None);
        };
        let plain = [
            ".gitattributes",
            "README.md",
            "config.json",
            "model.safetensors",
            "onnx/model.onnx",
            "pytorch_model.bin",
            "tokenizer.json",
            "tf_model.h5",
            "flax_model.msgpack",
        ];
        check(&plain, &["config.json", "tokenizer.json"], Ok(&["model.safetensors"]));
        let mistral = [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "params.json",
        ];
        let index = "model.safetensors.index.json";
        check(&mistral, &["config.json", "params.json", index], Err(index));
        let without_index = ["a-1.safetensors", "a-2.safetensors", "adapter_model.safetensors"];
        check(&without_index, &[], Ok(&["a-1.safetensors", "a-2.safetensors"]));
        let bin = ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"];
        check(&bin, &[bin[0]], Err(bin[0]));
        check(&["pytorch_model.bin", "training_args.bin"], &[], Ok(&["pytorch_model.bin"]));
        let meta = ["consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"];
        check(&meta, &["params.json", "tokenizer.model"], Ok(&meta[..2]));
        let templates = ["additional_chat_templates/rag.jinja", "model.pth", "qwen.tiktoken"];
        check(&templates, &[templates[0], templates[2]], Ok(&["model.pth"]));
    }

    #[test]
    fn a_gguf_file_is_chosen_by_name_or_quantisation() {
        let check = |files: &[&str], file: Option<&str>, want: Result<&str, &str>| match (
            select(files, file),
            want,
        ) {
            (Ok(got), Ok(path)) => {
                assert_eq!(got.model_file.as_deref(), Some(path), "{file:?}");
                assert_eq!(got.weights, Weights::Files(vec![path.to_owned()]));
                assert!(got.texts.is_empty() || !path.ends_with(".gguf"));
            }
            (Err(error), Err(part)) => {
                assert!(error.to_string().contains(part), "{file:?}: {error}");
            }
            (got, want) => panic!("{file:?}: got {got:?}, want {want:?}"),
        };
        let quants =
            ["M.Q4_K_M.gguf", "M.Q4_K_S.gguf", "M.Q8_0.gguf", "mmproj-M.gguf", "README.md"];
        check(&quants, Some("q8_0"), Ok("M.Q8_0.gguf"));
        check(&quants, Some("Q4_K_M"), Ok("M.Q4_K_M.gguf"));
        check(&quants, Some("M.Q4_K_S.gguf"), Ok("M.Q4_K_S.gguf"));
        check(&quants, Some("K_M"), Err("no file 'K_M' at main; it has M.Q4_K_M.gguf"));
        check(&quants, Some("README.md"), Err("no file 'README.md'"));
        check(&quants, None, Err("such as o/n:Q4_K_M: M.Q4_K_M.gguf, M.Q4_K_S.gguf, M.Q8_0.gguf"));
        check(&["only.gguf", "mmproj-f16.gguf"], None, Ok("only.gguf"));
        let folders = ["BF16/m-bf16.gguf", "UD/m-UD-Q2_K_XL.gguf", "m-Q2_K_XL.gguf"];
        check(&folders, Some("bf16"), Ok("BF16/m-bf16.gguf"));
        check(&folders, Some("UD-Q2_K_XL"), Ok("UD/m-UD-Q2_K_XL.gguf"));
        check(&folders, Some("Q2_K_XL"), Err("several GGUF files"));
        check(&folders, None, Err("such as o/n:BF16/m-bf16.gguf"));
        let parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
        check(&parts, Some("Q8_0"), Err("several parts"));
        check(&["model.safetensors", "m.gguf"], Some("m.gguf"), Ok("m.gguf"));
        check(&["config.json", "a.safetensors"], Some("a.safetensors"), Ok("a.safetensors"));
        check(&["README.md", "x.onnx"], None, Err("no weights (*.safetensors"));
    }

    #[test]
    fn an_index_names_files_of_its_own_folder() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &str, want: Result<&[&str], &str>| {
            let index = folder.path().join("model.safetensors.index.json");
            fs::write(&index, text).unwrap();
            match (indexed_files(&index), want) {
                (Ok(got), Ok(want)) => assert_eq!(got, want),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (got, want) => panic!("{text}: got {got:?}, want {want:?}"),
            }
        };
        check(r#"{"weight_map": {"x": "b", "y": "a", "z": "b"}}"#, Ok(&["a", "b"]));
        check(r#"{"weight_map": {"x": "../../etc/passwd"}}"#, Err("'../../etc/passwd'"));
        check(r#"{"weights": {}}"#, Err("weight_map"));
    }
}
