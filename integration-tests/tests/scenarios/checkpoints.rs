//! Every checkpoint of the fixtures, as the command sees it: what can be served is described, what
//! cannot is refused with the reason, and nothing is left running.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;
use trireme_integration_tests::{
    fixture,
    process::wait_until,
    server::{ServerOptions, binary},
};

/// Folders of the fixtures' `group`.
fn folders(group: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(fixture::path(group))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

fn inspect(folder: &Path, flags: &[&str]) -> Result<String> {
    let output = Command::new(binary("trireme")).arg("inspect").arg(folder).args(flags).output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.success(), "{}: {said}", folder.display());
    Ok(String::from_utf8(output.stdout)?)
}

/// What `inspect` says of a folder, in words and as JSON; returns the JSON.
fn check_inspected(folder: &Path, format: &str) -> Result<Value> {
    let (text, json) = (inspect(folder, &[])?, inspect(folder, &["--json"])?);
    let json: Value = serde_json::from_str(&json)?;
    let what = folder.display();
    ensure!(json["format"] == format, "{what} is of format {}", json["format"]);
    let size = |name: &str| {
        json[name].as_u64().filter(|size| *size > 0).with_context(|| format!("{what}: no {name}"))
    };
    let parameters = format!("parameters  {:.1} M", size("parameters")? as f64 / 1e6);
    let layers = format!("layers      {}", size("layers")?);
    let family = format!("family      {}", json["family"].as_str().context("a family")?);
    let format = format!("format      {format}");
    for part in [format, family, parameters, layers, "Plan --tp ".into(), "Possible splits".into()]
    {
        ensure!(text.contains(&part), "{what}: `{part}` is not in: {text}");
    }
    let (splits, ranks) = (json["splits"].as_array(), json["plan"]["ranks"].as_array());
    let (splits, ranks) = (splits.context("splits")?, ranks.context("the plan's ranks")?);
    ensure!(splits.iter().all(|split| split["weight_bytes_per_rank"].as_u64() > Some(0)), "{json}");
    ensure!(ranks.iter().all(|rank| rank["weight_bytes"].as_u64() > Some(0)), "{json}");
    // One line in the table for each split, under its heading and that of its columns.
    let table = text.lines().skip_while(|line| !line.starts_with("Possible splits")).skip(2);
    ensure!(splits.len() > 1 && table.count() == splits.len(), "{what}: {text}");
    Ok(json)
}

#[test]
fn every_fixture_is_inspected() -> Result<()> {
    for folder in folders("models")? {
        check_inspected(&folder, "safetensors")?;
    }
    let formats = folders("formats")?;
    ensure!(formats.len() >= 25, "{formats:?}");
    for folder in formats {
        let about: Value = serde_json::from_slice(&fs::read(folder.join("fixture.json"))?)?;
        let format = match about["format"].as_str().context("a format")? {
            "hf" => "safetensors",
            "torch_bin" => "torch",
            "meta" | "torchchat" | "stories" => "meta",
            other => other,
        };
        let json = check_inspected(&folder, format)?;
        let source = about["source_model"].as_str().context("a model")?;
        let source = fixture::path("models").join(source);
        if source.exists() {
            let source: Value = serde_json::from_str(&inspect(&source, &["--json"])?)?;
            for field in ["family", "parameters", "layers", "heads", "kv_heads", "tied_embeddings"]
            {
                let same = json[field] == source[field];
                ensure!(same, "{}: {field} is {}", folder.display(), json[field]);
            }
        }
    }
    Ok(())
}

/// A value that is no number is found where it is asked for.
#[test]
fn values_are_scanned_on_demand() -> Result<()> {
    for dir in ["nan-weight", "inf-weight"] {
        let folder = fixture::path("broken").join(dir);
        inspect(&folder, &[])?;
        let said = inspect(&folder, &["--scan-values"]).expect_err(dir).to_string();
        let name = "model.layers.1.mlp.down_proj.weight";
        ensure!(said.contains(name) && said.contains("finite"), "{dir}: {said}");
    }
    inspect(&fixture::path("broken/ok-micro"), &["--scan-values"])?;
    Ok(())
}

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    dir: String,
    good_loader: String,
    message_should_mention: Vec<String>,
}

/// Whether a process was started with `folder`.
fn is_named_by_a_process(folder: &Path) -> bool {
    let folder = folder.to_string_lossy();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .any(|command| String::from_utf8_lossy(&command).contains(&*folder))
}

/// A start is refused in the words of the first process that reads the broken part.
#[test]
fn broken_checkpoints_are_refused_and_leave_nothing() -> Result<()> {
    let Cases { cases } = fixture::json("broken/cases.json");
    ensure!(cases.len() == 48, "{} cases", cases.len());
    for case in cases.iter().filter(|case| !case.good_loader.starts_with("loads")) {
        // A place of its own tells this test's processes from others'.
        let place = TempDir::new()?;
        let folder = place.path().join(&case.dir);
        fs::create_dir(&folder)?;
        if case.dir != "empty-dir" {
            for entry in fs::read_dir(fixture::path("broken").join(&case.dir))? {
                let entry = entry?;
                fs::copy(entry.path(), folder.join(entry.file_name()))?;
            }
        }
        let (status, said) = ServerOptions::new(&folder).refused(Duration::from_secs(20))?;
        ensure!(!status.success(), "{} was accepted: {said}", case.dir);
        for word in &case.message_should_mention {
            ensure!(said.contains(word), "{}: {word:?} is not in the error: {said}", case.dir);
        }
        ensure!(!said.contains("panicked"), "{} panicked: {said}", case.dir);
        let gone = wait_until(Duration::from_secs(10), || !is_named_by_a_process(&folder));
        ensure!(gone, "{}: a process is left", case.dir);
    }
    Ok(())
}
