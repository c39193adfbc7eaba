//! What is refused before any process is started, besides impossible splits (see
//! [`crate::topology::check`]): flags that cannot work, files that cannot be read, ports in use.

use std::{
    fs, io,
    net::{IpAddr, TcpListener},
    num::NonZeroU32,
    path::Path,
};

use crate::{
    api_key::ApiKey,
    config::{Dtype, EngineConfig, Front, Limits},
};

/// Beyond these a value is a slip of the hand: buffers grow with the first two.
const BATCH_TOKENS_MAX: u64 = 1 << 18;
const SEQUENCES_MAX: u64 = 1 << 16;
const WAITING_MAX: u64 = 1 << 20;
const STEPS_IN_FLIGHT_MAX: u64 = 64;
const THREADS_MAX: u64 = 1024;

#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{flag} {given} is over the limit of {limit}")]
    OverLimit { flag: &'static str, given: u64, limit: u64 },
    #[error("{flag} {given}: {reason}")]
    Value { flag: &'static str, given: String, reason: String },
    #[error("{variable}: {reason}")]
    Secret { variable: &'static str, reason: &'static str },
    #[error("{flag} {port}: cannot listen on {host}: {reason}")]
    Port { flag: &'static str, port: u16, host: IpAddr, reason: String },
}

fn refuse(flag: &'static str, given: impl ToString, reason: &str) -> Result<(), Refusal> {
    Err(Refusal::Value { flag, given: given.to_string(), reason: reason.to_owned() })
}

/// Flags of the engine that can work on no model. Cheap: called before a model is fetched.
pub fn check_engine(engine: &EngineConfig) -> Result<(), Refusal> {
    check_limits(engine)?;
    for (flag, dtype) in [("--dtype", engine.dtype), ("--kv-dtype", engine.kv_dtype)] {
        if dtype == Dtype::F16 && engine.device.is_cpu() {
            refuse(flag, "f16", "the CPU computes in f32 and bf16; use one of these")?;
        }
    }
    if engine.kv_dtype == Dtype::Quantized {
        refuse("--kv-dtype", "quantized", "concerns weights alone; use f32 or bf16")?;
    }
    if let Some(fraction) = engine.gpu_memory_fraction {
        if engine.device.is_cpu() {
            let reason = "concerns GPUs alone; on the CPU give --kv-cache-memory SIZE";
            refuse("--gpu-memory-fraction", fraction, reason)?;
        }
        if !(fraction > 0.0 && fraction <= 1.0) {
            refuse("--gpu-memory-fraction", fraction, "must be over 0 and at most 1")?;
        }
    }
    if let (Some(bytes), Some(total), true) =
        (engine.kv_cache_bytes, memory_bytes(), engine.device.is_cpu())
    {
        let ranks = (engine.split.tp as u64).saturating_mul(engine.split.pp as u64);
        let all_ranks = bytes.saturating_mul(ranks);
        if all_ranks > total {
            return Err(Refusal::OverLimit {
                flag: "--kv-cache-memory (of all ranks)",
                given: all_ranks,
                limit: total,
            });
        }
    }
    engine.chat_template.as_deref().map_or(Ok(()), |path| check_text("--chat-template", path))
}

fn check_limits(engine: &EngineConfig) -> Result<(), Refusal> {
    let limits = &engine.limits;
    let number = |value: Option<NonZeroU32>| value.map(|n| u64::from(n.get()));
    for (flag, given, limit) in [
        ("--max-batch-tokens", number(limits.max_batch_tokens), BATCH_TOKENS_MAX),
        ("--max-sequences", number(limits.max_sequences), SEQUENCES_MAX),
        ("--max-waiting", number(limits.max_waiting), WAITING_MAX),
        ("--steps-in-flight", number(limits.steps_in_flight), STEPS_IN_FLIGHT_MAX),
        ("--threads", engine.threads.map(|n| n.get() as u64), THREADS_MAX),
    ] {
        match given {
            Some(given) if given > limit => return Err(Refusal::OverLimit { flag, given, limit }),
            _ => {}
        }
    }
    if let Some(tokens) = limits.max_model_len.filter(|tokens| tokens.get() < 2) {
        refuse("--max-model-len", tokens, "must be at least 2: a prompt and its answer")?;
    }
    let batch = limits.max_batch_tokens.unwrap_or(Limits::BATCH_TOKENS_DEFAULT);
    if let Some(sequences) = limits.max_sequences.filter(|sequences| *sequences > batch) {
        let reason = format!("more than --max-batch-tokens {batch}; a step has a token for each");
        refuse("--max-sequences", sequences, &reason)?;
    }
    Ok(())
}

/// One copy of the split is all that one router serves yet.
pub fn check_replicas(replicas: NonZeroU32) -> Result<(), Refusal> {
    match replicas.get() {
        1 => Ok(()),
        given => refuse(
            "--replicas",
            given,
            "only 1 is possible yet; start one service for each, behind a load balancer",
        ),
    }
}

/// The key of the router's doors.
pub fn check_front(front: &Front) -> Result<(), Refusal> {
    ApiKey::given(front.api_key_file.as_deref()).map(drop)
}

fn check_text(flag: &'static str, path: &Path) -> Result<(), Refusal> {
    match fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => refuse(flag, path.display(), "the file is empty"),
        Ok(_) => Ok(()),
        Err(error) => refuse(flag, path.display(), &error.to_string()),
    }
}

/// Takes both ports for a moment: a taken one must be told by its flag, not by a router that dies.
pub fn check_ports(front: &Front) -> Result<(), Refusal> {
    let Some(listen) = front.listen else { return Ok(()) };
    let ports = [("--port", listen.port), ("--grpc-port", listen.grpc_port)];
    let taken = ports.map(|(flag, port)| {
        TcpListener::bind((listen.host, port)).map_err(|error| {
            let reason = match error.kind() {
                io::ErrorKind::AddrInUse if listen.port == listen.grpc_port => {
                    "--port and --grpc-port must differ".to_owned()
                }
                io::ErrorKind::AddrInUse => format!(
                    "the port is in use; stop who uses it, or choose another with {flag} (0 takes a free one)"
                ),
                _ => error.to_string(),
            };
            Refusal::Port { flag, port, host: listen.host, reason }
        })
    });
    taken.into_iter().try_for_each(|bound| bound.map(drop))
}

/// Of this machine; none where the kernel does not tell.
pub fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn parse(flags: &str) -> (EngineConfig, Front) {
        let line = format!("trireme serve /m {flags}");
        let Verb::Serve(args) = Cli::parse_from(line.split_whitespace()).verb else {
            panic!("not serve: {line}");
        };
        (EngineConfig::new(&args.engine, Duration::ZERO), Front::new(&args))
    }

    /// `parts`: of the refusal; none where there is none.
    fn check(flags: &str, parts: &[&str]) {
        let (engine, front) = parse(flags);
        let refusals = [check_engine(&engine), check_front(&front), check_ports(&front)];
        let got = refusals.into_iter().collect::<Result<Vec<()>, _>>();
        let said = got.as_ref().err().map(ToString::to_string).unwrap_or_default();
        assert_eq!(got.is_err(), !parts.is_empty(), "{flags}: {said}");
        for part in parts {
            assert!(said.contains(part), "{flags}: {said} lacks {part}");
        }
    }

    #[test]
    fn flags_that_cannot_work_are_refused() {
        let check = |flags: &str, parts: &[&str]| {
            check(&format!("--port 0 --grpc-port 0 {flags}"), parts);
        };
        check("", &[]);
        check("--max-batch-tokens 8", &[]);
        check("--max-batch-tokens 8 --max-sequences 8", &[]);
        check(
            "--max-batch-tokens 8 --max-sequences 9",
            &["--max-sequences 9:", "--max-batch-tokens 8;"],
        );
        check("--max-sequences 513", &["--max-sequences 513:", "--max-batch-tokens 512;"]);
        check("--max-batch-tokens 999999999", &["--max-batch-tokens 999999999", "262144"]);
        check("--max-sequences 999999", &["--max-sequences 999999 is over the limit of 65536"]);
        check("--max-waiting 4000000000", &["--max-waiting", "1048576"]);
        check("--steps-in-flight 65", &["--steps-in-flight 65", "64"]);
        check("--threads 5000", &["--threads 5000", "1024"]);
        check("--max-model-len 1", &["--max-model-len 1", "at least 2"]);
        check("--dtype f16", &["--dtype f16", "f32 and bf16"]);
        check("--device cpu --kv-dtype f16", &["--kv-dtype f16"]);
        check("--dtype quantized", &[]);
        check("--kv-dtype quantized", &["--kv-dtype quantized", "weights alone"]);
        check("--device cuda --dtype f16", &[]);
        check("--gpu-memory-fraction 0.5", &["--gpu-memory-fraction 0.5", "--kv-cache-memory"]);
        check("--device cuda --gpu-memory-fraction 0.5", &[]);
        check("--device cuda --gpu-memory-fraction 1.5", &["--gpu-memory-fraction 1.5", "most 1"]);
        check("--device cuda --gpu-memory-fraction NaN", &["at most 1"]);
        check("--kv-cache-memory 7000T", &["--kv-cache-memory"]);
        check("--chat-template /no/such", &["--chat-template /no/such", "No such file"]);
        check("--api-key-file /no/such", &["--api-key-file /no/such", "No such file"]);
        check("--api-key-file /dev/null", &["--api-key-file /dev/null", "empty"]);
    }

    #[test]
    fn ports_in_use_are_refused_by_their_flag() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        check(
            &format!("--port {port} --grpc-port 0"),
            &[&format!("--port {port}: cannot listen on 127.0.0.1"), "in use"],
        );
        check(
            &format!("--port 0 --grpc-port {port}"),
            &[&format!("--grpc-port {port}: cannot listen"), "in use"],
        );
        drop(taken);
        check(&format!("--port {port} --grpc-port {port}"), &["--grpc-port", "must differ"]);
        check("--host 192.0.2.1 --port 0 --grpc-port 0", &["--port 0", "192.0.2.1"]);
    }
}
