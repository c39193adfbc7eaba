//! The cache is shared with Hugging Face's own client: each reads what the other fetched. Passes
//! over the client, and says so, where PyPI cannot be reached.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::{Bench, noise, repo, server::HubServer};

/// The client in a venv beside the build, made once; none where it cannot be had.
fn client() -> Option<PathBuf> {
    let build = Path::new(env!("CARGO_BIN_EXE_trireme")).parent()?;
    let folder = build.join("huggingface-python");
    let python = folder.join("bin/python");
    let marker = folder.join("packages.ok");
    if !marker.exists() {
        let venv = Command::new("python3").args(["-m", "venv"]).arg(&folder).status();
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let install = || Command::new(&python).args(pip).arg("huggingface_hub").status();
        if !venv.is_ok_and(|s| s.success()) || !install().is_ok_and(|s| s.success()) {
            return None;
        }
        std::fs::write(marker, "").ok()?;
    }
    Some(python)
}

fn run(python: &Path, what: &str, bench: &Bench, offline: &str) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hub/huggingface_client.py");
    let output = Command::new(python)
        .arg(script)
        .arg(what)
        .env("HF_ENDPOINT", &bench.hub.settings.endpoint)
        .env("HF_HUB_CACHE", bench.cache())
        .env("HF_HUB_OFFLINE", offline)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said.trim().to_owned()
}

#[test]
fn hugging_faces_client_shares_the_cache() {
    let Some(python) = client() else {
        eprintln!("passed over: huggingface_hub cannot be installed here");
        return;
    };
    let files = [
        ("README.md", b"read me".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", noise(300_000, 1)),
        ("tokenizer.json", b"{\"version\": \"1.0\"}".to_vec()),
    ];
    let server = HubServer::start(&files);
    let bench = Bench::new(&server);
    let ours = bench.fetch("org/model").unwrap();
    assert_eq!(Path::new(&run(&python, "reads", &bench, "1")), ours);

    let bench = Bench::new(&server);
    let theirs = run(&python, "writes", &bench, "0");
    server.state().seen.clear();
    assert_eq!(bench.fetch("org/model").unwrap(), Path::new(&theirs));
    let listed = bench.hub.list().unwrap();
    assert_eq!((listed.len(), listed[0].missing.as_deref()), (1, None), "{listed:?}");
    assert!(server.state().seen.is_empty());
    bench.hub.remove(&repo("org/model")).unwrap();
    assert!(bench.hub.list().unwrap().is_empty());
}
