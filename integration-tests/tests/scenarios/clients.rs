//! Real clients: the `openai`, `text-generation` and `huggingface_hub` packages, gRPC by reflection,
//! and the README's curl lines.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};
use trireme_integration_tests::{
    fixture,
    server::{Server, ServerOptions, binary},
};

/// Runs a command to its end; what it printed, or an error with what it said.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{command:?} failed: {said}{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(said)
}

/// A Python with the client packages, made beside the build once for each list of packages.
pub(crate) fn python() -> Result<PathBuf> {
    /// Two tests that find none would install into one folder.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = binary("trireme").parent().expect("a folder").join("client-python");
    let python = folder.join("bin/python");
    let marker = folder.join("packages.ok");
    let requirements = script("requirements.txt");
    let wanted = std::fs::read_to_string(&requirements)?;
    if std::fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
        .arg(requirements))?;
    std::fs::write(marker, wanted)?;
    Ok(python)
}

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn packages_of_clients_and_grpc_reflection_work() -> Result<()> {
    let python = python()?;
    let server = Server::start(&ServerOptions::new(fixture::smollm2()).split(2, 1))?;
    let said = run(Command::new(&python)
        .arg(script("openai_client.py"))
        .arg(format!("http://{}/v1", server.http)))?;
    assert!(said.contains("openai client: all good"), "{said}");
    let said =
        run(Command::new(&python).arg(script("grpc_client.py")).arg(server.grpc.to_string()))?;
    assert!(said.contains("grpc client: all good"), "{said}");
    let said = run(Command::new(&python)
        .arg(script("tgi_client.py"))
        .arg(format!("http://{}", server.http)))?;
    assert!(said.contains("tgi clients: all good"), "{said}");
    let said =
        run(Command::new(&python).arg(script("grpc_generated.py")).arg(server.grpc.to_string()))?;
    assert!(said.contains("generated grpc client: all good"), "{said}");
    Ok(())
}

/// The `curl` commands of the README, each one shell command.
fn curl_lines(readme: &str) -> Vec<String> {
    let mut commands = Vec::new();
    for block in readme.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap_or_default();
        let joined = block.replace("\\\n", " ");
        commands.extend(joined.lines().filter(|line| line.starts_with("curl")).map(str::to_owned));
    }
    commands
}

#[tokio::test(flavor = "multi_thread")]
async fn the_curl_lines_of_the_readme_work() -> Result<()> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let commands = curl_lines(&std::fs::read_to_string(readme)?);
    assert!(commands.len() >= 5, "the README shows curl: {commands:?}");
    let server = Server::start(&ServerOptions::new(fixture::smollm2()).split(2, 1))?;
    for command in commands {
        let command = command.replace("127.0.0.1:8000", &server.http.to_string());
        let command = command.replacen("curl", "curl --silent --show-error --fail-with-body", 1);
        let said = run(Command::new("sh").args(["-c", &command]))?;
        assert!(!said.is_empty(), "{command} printed nothing");
        if command.contains("capital of France") {
            assert!(said.contains("Paris") || command.contains("stream"), "{command}: {said}");
        }
    }
    Ok(())
}
