//! Starting, draining, and leaving nothing behind.

use std::{fs, time::Duration};

use anyhow::Result;
use rustix::process::Signal;
use serde_json::json;
use trireme_integration_tests::{
    fixture,
    process::{Process, wait_until},
    server::{Server, ServerOptions},
};

fn options() -> ServerOptions {
    ServerOptions::new(fixture::path("models/smollm-like")).split(2, 1)
}

/// Shared-memory objects of Trireme on this machine.
fn shared_memory() -> Vec<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("trireme"))
        .collect()
}

/// Everything below the run folder but the log.
fn leftovers(server: &Server) -> Vec<String> {
    let mut left = Vec::new();
    let mut folders = vec![server.run_folder().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path.clone());
            }
            if !path.ends_with("log") {
                left.push(path.display().to_string());
            }
        }
    }
    left
}

fn check_nothing_left(server: &Server, children: &[Process]) {
    let gone =
        wait_until(Duration::from_secs(10), || children.iter().all(|child| !child.is_alive()));
    assert!(gone, "children outlive the launcher: {children:?}");
    assert_eq!(shared_memory(), Vec::<String>::new(), "shared memory is left");
    let sockets: Vec<String> =
        leftovers(server).into_iter().filter(|path| path.ends_with(".sock")).collect();
    assert_eq!(sockets, Vec::<String>::new(), "sockets are left");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_and_leaves_nothing() -> Result<()> {
    let mut server = Server::start(&options())?;
    let children = server.processes();
    assert_eq!(children.len(), 3, "a router and two shards: {children:?}");
    let client = server.client();
    let request =
        json!({"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut stream = client.stream("/v1/completions", &request).await?;
    stream.next().await?;
    server.signal(Signal::TERM);
    // The stream that runs is finished, not cut.
    let rest = stream.collect().await?;
    assert!(rest.len() >= 399, "the drained stream has {} more events", rest.len());
    assert!(rest.iter().all(|event| event.get("error").is_none()), "{:?}", rest.last());
    let status = server.wait(Duration::from_secs(20))?;
    assert!(status.success(), "exit after a drain: {status}; {}", server.log());
    check_nothing_left(&server, &children);
    assert_eq!(leftovers(&server), Vec::<String>::new(), "the run folder is removed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once() -> Result<()> {
    let mut server = Server::start(&options())?;
    let children = server.processes();
    let request =
        json!({"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut stream = server.client().stream("/v1/completions", &request).await?;
    stream.next().await?;
    server.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    server.signal(Signal::TERM);
    server.wait(Duration::from_secs(3))?;
    check_nothing_left(&server, &children);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_launcher_leaves_no_orphan() -> Result<()> {
    let mut server = Server::start(&options())?;
    let children = server.processes();
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(3))?;
    check_nothing_left(&server, &children);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_launcher_that_signals_twice_leaves_no_orphan() -> Result<()> {
    let mut server = Server::start(&options())?;
    let children = server.processes();
    server.signal(Signal::KILL);
    // The kernel may tell of a parent's end once for each of the parent's threads.
    for _ in 0..20 {
        children.iter().for_each(|child| child.signal(Signal::TERM));
        std::thread::sleep(Duration::from_millis(1));
    }
    server.wait(Duration::from_secs(3))?;
    check_nothing_left(&server, &children);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_share_a_machine() -> Result<()> {
    // The second start is by hand: `Server` runs one at a time.
    let first = Server::start(&options())?;
    let second = Server::start_beside(&options())?;
    assert_ne!(first.http, second.http);
    for server in [&first, &second] {
        let answer = server
            .client()
            .post("/v1/completions", &json!({"prompt": [1, 2], "max_tokens": 4}))
            .await?;
        assert_eq!(answer.ok()["usage"]["completion_tokens"], 4);
    }
    Ok(())
}
