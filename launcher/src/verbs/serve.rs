//! `serve`: runs the service in the foreground and says where it is.

use std::{
    io::{Write, stdout},
    time::Duration,
};

use tokio::sync::watch;
use trireme_proto::generate::v1::InfoReply;

use crate::{
    cli::ServeArgs,
    config::{EngineConfig, Front},
    instance::{Instance, Voice, open_model},
    stop_signals::StopSignals,
    verbs::runtime,
};

pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let drain_deadline = Duration::from_secs(u64::from(args.drain_deadline_s.get()));
    let engine = EngineConfig::new(&args.engine, drain_deadline);
    let front = Front::new(args);
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
        tokio::spawn(StopSignals::catch()?.forward(reach.handle.stop));
        tokio::spawn(announce(reach.handle.ready, args.api_key_file.is_some()));
        instance.run().await
    })
}

/// Says where the service is, once it is ready and whenever that changes.
async fn announce(mut ready: watch::Receiver<Option<InfoReply>>, key: bool) {
    let mut told = None;
    while ready.changed().await.is_ok() {
        let info = ready.borrow_and_update().clone();
        let Some(info) = info else { continue };
        let addresses = (info.http_address.clone(), info.grpc_address.clone());
        if told.as_ref() != Some(&addresses) {
            // A reader that left changes nothing for the service.
            let _ = stdout().write_all(banner(&info, key).as_bytes());
            let _ = stdout().flush();
            told = Some(addresses);
        }
    }
}

fn banner(info: &InfoReply, key: bool) -> String {
    let header = if key { " -H \"authorization: Bearer $KEY\"" } else { "" };
    format!(
        "{model} is ready: HTTP http://{http}  gRPC grpc://{grpc}\n\
         curl http://{http}/v1/chat/completions -H 'content-type: application/json'{header} \\\n  \
         -d '{{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}], \"max_tokens\": 30}}'\n",
        model = info.model,
        http = info.http_address,
        grpc = info.grpc_address,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_banner_has_both_addresses_and_a_line_to_paste() {
        let info = InfoReply {
            model: "m".to_owned(),
            http_address: "127.0.0.1:8000".to_owned(),
            grpc_address: "127.0.0.1:8001".to_owned(),
            ..InfoReply::default()
        };
        let words = |key| banner(&info, key);
        for part in [
            "http://127.0.0.1:8000 ",
            "grpc://127.0.0.1:8001\n",
            "curl http://127.0.0.1:8000/v1/chat",
        ] {
            assert!(words(false).contains(part), "{}", words(false));
        }
        assert!(!words(false).contains("Bearer") && words(true).contains("Bearer $KEY"));
        let body = words(false);
        let body = body.split("-d '").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["model"], "m");
    }
}
