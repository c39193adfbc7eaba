use clap::Parser;
use trireme_checkpoint::Checkpoint;

use super::*;
use crate::cli::{Cli, Verb};

fn fixture(name: &str) -> ModelConfig {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures/models");
    Checkpoint::open(&root.join(name)).unwrap().model().clone()
}

fn config(flags: &str) -> (EngineConfig, Front) {
    let line = format!("trireme serve /m {flags}");
    let Verb::Serve(args) = Cli::parse_from(line.split_whitespace()).verb else {
        panic!("not serve: {line}");
    };
    let drain = std::time::Duration::from_secs(u64::from(args.drain_deadline_s.get()));
    (EngineConfig::new(&args.engine, drain), Front::new(&args))
}

fn planned(flags: &str, cores: usize, run_folder: &str) -> Result<Vec<String>, TopologyError> {
    let (engine, front) = config(flags);
    let binaries = Binaries { shard: "/bin/shard".into(), router: "/bin/router".into() };
    let processes = plan(Deployment {
        model: Path::new("/m"),
        engine: &engine,
        front: &front,
        instance: "i1",
        run_folder: Path::new(run_folder),
        binaries: &binaries,
        cores: NonZeroUsize::new(cores).unwrap(),
        gpus: 1,
    })?;
    let line = |process: ProcessSpec| {
        let words = process.args.iter().map(|word| word.to_str().unwrap());
        let words: Vec<&str> =
            std::iter::once(process.program.to_str().unwrap()).chain(words).collect();
        format!("{}: {}", process.role, words.join(" "))
    };
    Ok(processes.into_iter().map(line).collect())
}

#[test]
fn one_rank_is_one_shard_and_a_router() {
    assert_eq!(
        planned("", 2, "/r").unwrap(),
        [
            "shard 0: /bin/shard --model /m --load-format auto --seed 0 --device auto --dtype auto \
             --kv-dtype auto --threads 2 --rank 0 --tp 1 --pp 1 --socket /r/shard-0.sock --log-format json",
            "router: /bin/router --model /m --load-format auto --shard unix:/r/shard-0.sock --tp 1 --pp 1 \
             --control-socket /r/control.sock --host 127.0.0.1 --port 8000 --grpc-port 8001 \
             --served-model-name m --start-deadline-s 600 --drain-deadline-s 30 --log-format json --instance i1",
        ]
    );
}

#[test]
fn flags_reach_the_process_they_concern() {
    let check = |flags: &str, cores: usize, shard: &str, router: &str| {
        let lines = planned(flags, cores, "/r").unwrap();
        let (last, shards) = lines.split_last().unwrap();
        for (rank, line) in shards.iter().enumerate() {
            assert!(line.starts_with(&format!("shard {rank}: ")), "{line}");
            assert!(line.contains(&format!("--rank {rank} ")), "{line}");
            assert!(line.contains(shard), "{flags}: {line} lacks {shard}");
            assert!(last.contains(&format!("--shard unix:/r/shard-{rank}.sock")), "{last}");
        }
        assert_eq!(last.matches("--shard ").count(), shards.len());
        assert!(last.contains(router), "{flags}: {last} lacks {router}");
    };
    check("--tp 2 --pp 3", 2, "--threads 1 ", "--tp 2 --pp 3 ");
    check("--tp 2", 9, "--threads 4 ", "--tp 2 ");
    check("--tp 2 --threads 7", 2, "--threads 7 ", "");
    check(
        "--load-format dummy --seed 5",
        2,
        "--load-format dummy --seed 5 ",
        "--load-format dummy ",
    );
    check("--dtype f32 --kv-dtype bf16", 2, "--dtype f32 --kv-dtype bf16 ", "");
    check("--kv-cache-memory 2MiB", 2, "--kv-cache-memory 2097152 ", "");
    check(
        "--max-batch-tokens 9 --max-sequences 8",
        2,
        "",
        "--max-batch-tokens 9 --max-sequences 8 ",
    );
    check("--max-batch-tokens 9", 2, "", "--max-batch-tokens 9 --max-sequences 9 ");
    check("--max-batch-tokens 900", 2, "", "--max-batch-tokens 900 --max-sequences 64 ");
    check("--max-mixed-tokens 7", 2, "", "--max-mixed-tokens 7 ");
    check("--device cuda", 2, "", "--max-batch-tokens 8192 --max-sequences 256 ");
    check(
        "--device cuda --gpu-memory-fraction 0.5",
        2,
        "--device cuda --dtype auto --kv-dtype auto --threads 2 --rank 0 --tp 1 --pp 1 --socket /r/shard-0.sock --gpu-memory-fraction 0.5 ",
        "",
    );
    check("--max-waiting 3 --steps-in-flight 1", 2, "", "--max-waiting 3 --steps-in-flight 1 ");
    check(
        "--no-prefix-cache --step-deadline-ms 5",
        2,
        "",
        "--no-prefix-cache --step-deadline-ms 5 ",
    );
    check("--api-key-file /k --chat-template /t", 2, "", "--api-key-file /k --chat-template /t ");
    let parsers = "--tool-call-parser hermes --reasoning-parser none";
    check(parsers, 2, "", parsers);
    check("--max-body-bytes 1k --max-model-len 7", 2, "", "--max-body-bytes 1024");
    check("--host ::1 --port 0 --grpc-port 0", 2, "", "--host ::1 --port 0 --grpc-port 0 ");
    check(
        "--otlp-endpoint http://o --log-format text",
        2,
        "json --otlp-endpoint http://o",
        "json --otlp",
    );
    check("--served-model-name x", 2, "", "--served-model-name x ");
}

#[test]
fn ranks_that_share_a_gpu_are_told_apart() {
    let check = |flags: &str, gpus: usize, expected: &[&str]| {
        let (engine, front) = config(flags);
        let processes = plan(Deployment {
            model: Path::new("/m"),
            engine: &engine,
            front: &front,
            instance: "i",
            run_folder: Path::new("/r"),
            binaries: &Binaries { shard: "/s".into(), router: "/r".into() },
            cores: NonZeroUsize::MIN,
            gpus,
        });
        let variables = processes.unwrap().into_iter().flat_map(|process| process.variables);
        let found: Vec<_> = variables.map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(found, expected, "{flags} on {gpus}");
    };
    let lo = "NCCL_SOCKET_IFNAME=lo";
    check("--device cuda --tp 2", 1, &["NCCL_HOSTID=i-0", lo, "NCCL_HOSTID=i-1", lo]);
    check("--device cuda --pp 2", 0, &["NCCL_HOSTID=i-0", lo, "NCCL_HOSTID=i-1", lo]);
    check("--device cuda --tp 2", 2, &[]);
    check("--device cuda", 0, &[]);
    check("--tp 2", 0, &[]);
}

#[test]
fn a_private_instance_has_no_ports() {
    let (engine, _) = config("");
    let binaries = Binaries { shard: "/s".into(), router: "/r".into() };
    let processes = plan(Deployment {
        model: Path::new("/m"),
        engine: &engine,
        front: &Front::private(None),
        instance: "i",
        run_folder: Path::new("/r"),
        binaries: &binaries,
        cores: NonZeroUsize::MIN,
        gpus: 0,
    })
    .unwrap();
    let words: Vec<_> = processes[1].args.iter().map(|word| word.to_str().unwrap()).collect();
    let line = words.join(" ");
    assert!(line.contains("--control-socket-only") && !line.contains("port"), "{line}");
}

#[test]
fn socket_paths_fit() {
    let longest = format!("/{}", "r".repeat(MAX_SOCKET_PATH_BYTES - 1 - "/control.sock".len()));
    assert!(planned("", 1, &longest).is_ok());
    let error = planned("", 1, &format!("{longest}r")).unwrap_err().to_string();
    for part in ["108 bytes", "takes 107", "TMPDIR"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn impossible_plans_are_refused_with_the_possible_ones() {
    let check = |model: &str, flags: &str, want: Result<(), &[&str]>| {
        let (engine, _) = config(flags);
        match (super::check(&fixture(model), &engine), want) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(parts)) => {
                for part in parts {
                    assert!(error.to_string().contains(part), "{model} {flags}: {error}");
                }
            }
            (got, want) => panic!("{model} {flags}: got {got:?}, want {want:?}"),
        }
    };
    check("smollm-like", "", Ok(()));
    check("smollm-like", "--tp 2", Ok(()));
    check("smollm-like", "--tp 3 --pp 5", Ok(()));
    check("smollm-like", "--pp 6", Err(&["--tp 1 --pp 6", "5"]));
    check("smollm-like", "--tp 10", Err(&["--tp 10 --pp 1 is no legal split"]));
    check("llama3-like", "--tp 4", Ok(()));
    check("llama3-like", "--max-model-len 100000", Err(&["--max-model-len 100000"]));
    // Keys and values of two heads of 8 numbers in 4 layers: a block of 16 tokens has 2048 numbers.
    let kv = |flags: &str, want| check("llama3-like", &format!("--kv-cache-memory {flags}"), want);
    kv("4096", Ok(()));
    kv("4095", Err(&["--kv-cache-memory", "4096 bytes"]));
    kv("8192 --max-model-len 17", Ok(()));
    kv("8191 --max-model-len 17", Err(&["17 tokens", "8192 bytes", "--max-model-len"]));
    kv("4096 --max-model-len 17 --tp 2", Ok(()));
    kv("4096 --dtype f32", Err(&["8192 bytes"]));
    kv("4096 --dtype f32 --kv-dtype bf16", Ok(()));
}
