//! `serve`: runs the service in the foreground and says where it is.

use std::{
    io::{Write, stdout},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use tokio::sync::{mpsc, watch};
use trireme_process::StopSignals;
use trireme_proto::generate::v1::InfoReply;

use crate::{
    api_key,
    cli::ServeArgs,
    config::{EngineConfig, Front},
    instance::{Instance, Voice, open_model},
    preflight,
    supervisor::Stop,
    verbs::runtime,
};

pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let drain_deadline = Duration::from_secs(u64::from(args.drain_deadline_s.get()));
    let engine = EngineConfig::new(&args.engine, drain_deadline);
    let front = Front::new(args);
    preflight::check_replicas(args.replicas)?;
    preflight::check_front(&front)?;
    preflight::check_ports(&front)?;
    let (model, checkpoint) = open_model(&args.engine.model.model, &engine)?;
    drop(checkpoint); // only looked at; the shards map it themselves
    runtime()?.block_on(async {
        let _logs = trireme_telemetry::install("trireme", args.engine.log_format.into(), None)?;
        let (instance, reach) = Instance::prepare(
            &model,
            &engine,
            Some(&front),
            args.engine.log_format,
            Voice::Service,
        )?;
        tokio::spawn(forward(StopSignals::catch()?, reach.handle.stop));
        let key = KeySource::of(front.api_key_file);
        tokio::spawn(announce(reach.handle.ready, key));
        instance.run().await
    })
}

/// Turns signals into stops until the supervisor is gone.
async fn forward(mut signals: StopSignals, stop: mpsc::Sender<Stop>) {
    signals.next().await;
    // A supervisor that is gone needs no stop.
    let _ = stop.send(Stop::Drain).await;
    loop {
        let signal = signals.next().await;
        if stop.send(Stop::Now(signal)).await.is_err() {
            return;
        }
    }
}

/// Says where the service is, once it is ready and whenever that changes.
async fn announce(mut ready: watch::Receiver<Option<InfoReply>>, key: Option<KeySource>) {
    let mut told = None;
    while ready.changed().await.is_ok() {
        let info = ready.borrow_and_update().clone();
        let Some(info) = info else { continue };
        let addresses = (info.http_address.clone(), info.grpc_address.clone());
        if told.as_ref() != Some(&addresses) {
            // A reader that left changes nothing for the service.
            let _ = stdout().write_all(banner(&info, key.as_ref()).as_bytes());
            let _ = stdout().flush();
            told = Some(addresses);
        }
    }
}

/// Where the key is, for a line that does not show it.
enum KeySource {
    File(PathBuf),
    Environment,
}

impl KeySource {
    fn of(file: Option<PathBuf>) -> Option<Self> {
        let variable = std::env::var_os(api_key::VARIABLE);
        file.map(Self::File).or_else(|| variable.map(|_| Self::Environment))
    }
}

/// Addresses, and a line that works as it is when pasted into a shell of this machine.
fn banner(info: &InfoReply, key: Option<&KeySource>) -> String {
    let header = key.map_or_else(String::new, |key| match key {
        KeySource::File(file) => {
            let file = quoted(&file.display().to_string());
            format!(" -H \"authorization: Bearer $(cat {file})\"")
        }
        KeySource::Environment => {
            format!(" -H \"authorization: Bearer ${}\"", api_key::VARIABLE)
        }
    });
    let body = serde_json::json!({
        "model": info.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 30,
    });
    format!(
        "{model} is ready: HTTP http://{http}  gRPC grpc://{grpc}\n\
         curl http://{reachable}/v1/chat/completions -H 'content-type: application/json'{header} \\\n  \
         -d {body}\n",
        model = info.model,
        http = info.http_address,
        grpc = info.grpc_address,
        reachable = reachable(&info.http_address),
        body = quoted(&body.to_string()),
    )
}

/// "Any address" is one to listen on, not one to connect to.
fn reachable(address: &str) -> String {
    match address.parse::<SocketAddr>() {
        Ok(SocketAddr::V4(v4)) if v4.ip().is_unspecified() => format!("127.0.0.1:{}", v4.port()),
        Ok(SocketAddr::V6(v6)) if v6.ip().is_unspecified() => format!("[::1]:{}", v6.port()),
        _ => address.to_owned(),
    }
}

/// One word of a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line's words as a shell reads them.
    fn words(banner: &str) -> Vec<String> {
        let line = banner.split_once('\n').unwrap().1;
        let script = line.replacen("curl", "printf '%s\\0'", 1);
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{banner}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.trim_end_matches('\0').split('\0').map(str::to_owned).collect()
    }

    #[test]
    fn the_banner_has_both_addresses_and_a_line_to_paste() {
        let folder = tempfile::tempdir().unwrap();
        let key_file = folder.path().join("it's a key");
        std::fs::write(&key_file, "secret\n").unwrap();
        let check = |model: &str, listening: &str, reachable: &str| {
            let info = InfoReply {
                model: model.to_owned(),
                http_address: listening.to_owned(),
                grpc_address: "127.0.0.1:8001".to_owned(),
                ..InfoReply::default()
            };
            let page = banner(&info, Some(&KeySource::File(key_file.clone())));
            assert!(page.contains(&format!("HTTP http://{listening} ")), "{page}");
            assert!(page.contains("grpc://127.0.0.1:8001\n"), "{page}");
            assert!(!page.contains("secret"), "{page}");
            let words = words(&page);
            assert_eq!(words[0], format!("http://{reachable}/v1/chat/completions"));
            assert!(words.contains(&"authorization: Bearer secret".to_owned()), "{words:?}");
            let body: serde_json::Value = serde_json::from_str(words.last().unwrap()).unwrap();
            assert_eq!(body["model"], model);
            assert!(!banner(&info, None).contains("Bearer"));
            let page = banner(&info, Some(&KeySource::Environment));
            assert!(page.contains("Bearer $TRIREME_API_KEY\""), "{page}");
        };
        check("m", "127.0.0.1:8000", "127.0.0.1:8000");
        check("it's \"m\"", "0.0.0.0:8000", "127.0.0.1:8000");
        check("m", "[::]:8000", "[::1]:8000");
        check("m", "[::1]:8000", "[::1]:8000");
    }
}
