//! House rules that a machine can keep: dependency direction, file sizes, file names, `unsafe`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Lines a Rust file may have.
const FILE_LINES_MAX: usize = 500;
/// Lines a `main.rs` may have: a page.
const MAIN_LINES_MAX: usize = 60;
/// Lines a model file may have: it reads like the paper.
const MODEL_LINES_MAX: usize = 200;

/// Which workspace crates each crate may depend on. What is not listed is forbidden.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("proto/telemetry", &[]),
    ("proto/grammar", &[]),
    ("proto/process", &[]),
    ("checkpoint", &[]),
    ("router/scheduler", &[]),
    (
        "router",
        &[
            "trireme-checkpoint",
            "trireme-grammar",
            "trireme-process",
            "trireme-proto",
            "trireme-scheduler",
            "trireme-telemetry",
        ],
    ),
    ("shard/kernels", &[]),
    ("shard/collectives", &["trireme-kernels"]),
    (
        "shard",
        &[
            "trireme-checkpoint",
            "trireme-collectives",
            "trireme-grammar",
            "trireme-kernels",
            "trireme-process",
            "trireme-proto",
            "trireme-telemetry",
        ],
    ),
    ("launcher", &["trireme-checkpoint", "trireme-process", "trireme-proto", "trireme-telemetry"]),
];

/// What the scheduler must not be able to do: it sees no clock, socket, thread pool or tensor.
const SCHEDULER_FORBIDDEN: &[&str] =
    &["tokio", "tonic", "candle-core", "axum", "tracing", "rustix"];

/// Where `unsafe` may stand.
const UNSAFE_ALLOWED: &[&str] = &["shard/kernels/", "shard/collectives/", "checkpoint/src/"];

/// Names that say nothing about what a file holds.
const EMPTY_NAMES: &[&str] =
    &["utils.rs", "util.rs", "common.rs", "types.rs", "helpers.rs", "misc.rs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace root").to_path_buf()
}

/// Every Rust file of the workspace with its path from the root, in order.
fn rust_files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("read a source folder") {
            let path = entry.expect("read a folder entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let relative = path.strip_prefix(root()).expect("below the root");
                let text = fs::read_to_string(&path).expect("read a source file");
                files.insert(relative.to_string_lossy().into_owned(), text);
            }
        }
    }
    assert!(files.len() > 20, "found only {} Rust files: is the root right?", files.len());
    files
}

fn fail_with(rule: &str, breaches: Vec<String>) {
    assert!(breaches.is_empty(), "{rule}:\n  {}", breaches.join("\n  "));
}

/// The `[dependencies]` names of one manifest (not dev-dependencies: tests may look wider).
fn dependencies(folder: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("a manifest");
    let mut inside = false;
    let mut names = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[dependencies]" || line.ends_with(".dependencies]");
        } else if inside && !line.trim_start().starts_with('#') {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            if !name.is_empty() {
                names.push(name.to_owned());
            }
        }
    }
    names
}

#[test]
fn dependencies_point_one_way() {
    let mut breaches = Vec::new();
    for (folder, allowed) in MAY_DEPEND_ON {
        for name in dependencies(folder) {
            if name.starts_with("trireme-") && !allowed.contains(&name.as_str()) {
                breaches.push(format!("{folder} depends on {name}"));
            }
        }
    }
    fail_with("a crate depends on one it must not know", breaches);
}

#[test]
fn the_scheduler_is_pure() {
    let breaches = dependencies("router/scheduler")
        .into_iter()
        .filter(|name| SCHEDULER_FORBIDDEN.contains(&name.as_str()))
        .collect();
    fail_with("the scheduler is a state machine and does no I/O", breaches);
}

#[test]
fn files_stay_short() {
    let mut breaches = Vec::new();
    for (path, text) in rust_files() {
        let lines = text.lines().count();
        let limit = if path.ends_with("src/main.rs") {
            MAIN_LINES_MAX
        } else if path.contains("/models/") {
            MODEL_LINES_MAX
        } else {
            FILE_LINES_MAX
        };
        if lines > limit {
            breaches.push(format!("{path}: {lines} lines, limit {limit}"));
        }
    }
    fail_with("a file holds one concept", breaches);
}

#[test]
fn file_names_are_nouns_of_the_domain() {
    let breaches = rust_files()
        .into_keys()
        .filter(|path| EMPTY_NAMES.iter().any(|name| path.ends_with(&format!("/{name}"))))
        .collect();
    fail_with("a file name says what the file holds", breaches);
}

/// Words of the code part of a line.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
}

#[test]
fn unsafe_stays_where_it_may_stand() {
    let mut breaches = Vec::new();
    for (path, text) in rust_files() {
        if UNSAFE_ALLOWED.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            // Split so that this test does not find itself.
            if words(line).any(|word| word == concat!("un", "safe")) {
                breaches.push(format!("{path}:{}", number + 1));
            }
        }
    }
    fail_with("only kernels, collectives and checkpoint hold it", breaches);
}

#[test]
fn nothing_is_unfinished_or_skipped() {
    let marks = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("#[ig", "nore]"),
        concat!("FIX", "ME"),
    ];
    let mut breaches = Vec::new();
    for (path, text) in rust_files() {
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) {
                breaches.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    fail_with("finished code only", breaches);
}

#[test]
fn models_never_mention_a_rank() {
    let mut breaches = Vec::new();
    for (path, text) in rust_files() {
        if !path.starts_with("shard/src/models/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            if words(line).any(|word| word == "rank" || word == "tp") {
                breaches.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    fail_with("parallelism lives in the layers", breaches);
}
