//! Ranks on NVIDIA GPUs: what they say, and what is left of one that is lost. Needs a GPU and binaries
//! with the `cuda` feature: `make test-gpu` runs these, several ranks sharing a GPU where there is one.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::process::Signal;
use trireme_integration_tests::{
    fixture::{self, Expected},
    server::{Server, ServerOptions},
};

use crate::{
    golden::check_together,
    shard_loss::{self, Phase},
};

const CUDA: [&str; 6] = ["--device", "cuda", "--dtype", "f32", "--max-sequences", "8"];
const MIB: u64 = 1 << 20;

fn start(model: &str, tp: usize, pp: usize, args: &[&str]) -> Result<Server> {
    let path = if model == "smollm2" { fixture::smollm2() } else { fixture::path(model) };
    let server = Server::start(&ServerOptions::new(path).split(tp, pp).args(&CUDA).args(args))?;
    let several = server.log().contains("through NCCL");
    assert_eq!(several, tp * pp > 1, "{model} tp {tp} pp {pp}: {}", server.log());
    Ok(server)
}

/// Bytes in use on all GPUs.
fn used_bytes() -> Result<u64> {
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi").args(query).output().context("run nvidia-smi")?;
    let text = String::from_utf8(output.stdout)?;
    let mib = text.lines().map(|line| line.trim().parse::<u64>());
    Ok(mib.sum::<Result<u64, _>>().with_context(|| text.clone())? * MIB)
}

async fn check_split(model: &str, tp: usize, pp: usize) -> Result<()> {
    let reference = match model {
        "smollm2" => "smollm2/generation.json".to_owned(),
        model => format!("{model}/expected.json"),
    };
    let expected: Expected = fixture::json(&reference);
    let server = start(model, tp, pp, &[])?;
    check_together(&server.client(), &format!("{model} tp {tp} pp {pp}"), &expected, 2e-3).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a GPU"]
async fn ranks_on_gpus_equal_the_reference() -> Result<()> {
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        check_split("smollm2", tp, pp).await?;
        check_split("models/mixtral-like", tp, pp).await?;
    }
    check_split("models/llama3-like", 2, 2).await
}

/// The others end their wait within the step deadline, the group answers again, and no memory is kept.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a GPU"]
async fn lost_ranks_on_gpus_are_replaced() -> Result<()> {
    let before = used_bytes()?;
    for (tp, pp, cases) in [
        (2, 1, [(1, Signal::KILL), (0, Signal::STOP)]),
        (1, 2, [(0, Signal::KILL), (1, Signal::STOP)]),
    ] {
        let args = ["--max-batch-tokens", "64", "--no-prefix-cache", "--step-deadline-ms", "3000"];
        let server = start("smollm2", tp, pp, &args)?;
        let serving = used_bytes()?;
        for (rank, signal) in cases {
            for phase in [Phase::Decode, Phase::Prefill] {
                shard_loss::check(&server, rank, signal, phase).await?;
                let used = used_bytes()?;
                let name = format!("tp {tp} pp {pp}, {signal:?} of rank {rank} in {phase:?}");
                assert!(
                    used.abs_diff(serving) < 64 * MIB,
                    "{name}: {used} bytes, {serving} before"
                );
            }
        }
        drop(server);
        let end = Instant::now();
        while used_bytes()? > before && end.elapsed() < Duration::from_secs(10) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(used_bytes()? <= before, "tp {tp} pp {pp}: {} bytes are left", used_bytes()?);
    }
    Ok(())
}
