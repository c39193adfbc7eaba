//! The engine through its queue, on a tiny real model: life cycle, order, loss and recovery.

mod faults;

use std::{path::PathBuf, sync::Mutex, thread};

use trireme_checkpoint::Split;
use trireme_collectives::{World, local};
use trireme_kernels::Storage;

use super::*;
use crate::{
    config::{Backend, Config, Identity, LoadFormat},
    device::cpu::{Cpu, WeightStore},
    sampler::Sampling,
    server,
    step::{BlockUpdate, Chunk, NewSequence},
};

const PLAN: WarmupPlan =
    WarmupPlan { max_batch_tokens: 32, max_sequences: 4, max_model_len: 64, num_blocks: 8 };

fn identity(rank: usize, split: Split) -> Identity {
    Identity { rank, split, device: "cpu".into(), dtype: "f32", kv_dtype: "f32" }
}

/// An engine thread of a rank of `split` whose groups are taken from `worlds`, one an epoch.
fn start(rank: usize, split: Split, worlds: Vec<World>) -> (Handle, thread::JoinHandle<()>) {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../integration-tests/fixtures");
    let config = Config {
        identity: identity(rank, split),
        model: PathBuf::from(fixtures).join("models/smollm-like"),
        load_format: LoadFormat::Auto,
        seed: 0,
        weights: WeightStore { numbers: Storage::F32, keep_blocks: false },
        kv_storage: Storage::F32,
        threads: 1,
        socket: PathBuf::new(),
        kv_cache_memory: Some(1 << 20),
        backend: Backend::Cpu,
    };
    let (handle, commands) = Handle::new(Arc::new(Status::default()));
    let status = handle.status.clone();
    let worlds = Mutex::new(worlds);
    let join: Join<Cpu> = Box::new(move |_, _, _| {
        let world = worlds.lock().expect("one thread").pop();
        world.ok_or(CollectiveError::Mismatch { operation: "join", detail: "no world left".into() })
    });
    let engine = thread::spawn(move || {
        let runner = server::load(&config, &status).expect("load");
        Engine::new(runner, join, status).run(&commands);
    });
    (handle, engine)
}

fn single(epochs: usize) -> (Handle, thread::JoinHandle<()>) {
    start(0, Split { tp: 1, pp: 1 }, (0..epochs).flat_map(|_| local::worlds(1, 1)).collect())
}

fn configure(epoch: u64) -> Configure {
    let step_deadline = Duration::from_secs(5);
    Configure { epoch, shared_memory: String::new(), nccl_unique_ids: Vec::new(), step_deadline }
}

/// Queues a step; the answer is awaited apart, as calls in flight are.
fn send(handle: &Handle, step: Step) -> oneshot::Receiver<Result<StepOutcome, EngineError>> {
    let (reply, answer) = oneshot::channel();
    let (arrived, span) = (Instant::now(), Span::none());
    handle.send(Command::Step(StepCommand { step, arrived, span, reply })).expect("queue");
    answer
}

async fn step(handle: &Handle, step: Step) -> Result<StepOutcome, EngineError> {
    send(handle, step).await.expect("answered")
}

fn prefill(epoch: u64, id: u64) -> Step {
    Step {
        epoch,
        id,
        new: vec![NewSequence {
            id: 9,
            tokens: vec![1, 2, 3],
            prompt_len: 3,
            sampling: Ok(Sampling::default()),
            scoring: Ok(None),
        }],
        blocks: vec![BlockUpdate { sequence: 9, append: vec![5] }],
        chunks: vec![Chunk { sequence: 9, start: 0, len: 3, sample: true }],
        ..Step::default()
    }
}

fn decode(epoch: u64, id: u64) -> Step {
    Step { epoch, id, decode: vec![9], ..Step::default() }
}

async fn serve_epoch(handle: &Handle, epoch: u64) {
    serve_epoch_within(handle, epoch, Duration::from_secs(5)).await;
}

async fn serve_epoch_within(handle: &Handle, epoch: u64, step_deadline: Duration) {
    let configure = Configure { step_deadline, ..configure(epoch) };
    handle.configure(configure).await.expect("configure");
    let fits = handle
        .ask(|reply| Command::Warmup { epoch, plan: WarmupPlan { num_blocks: 0, ..PLAN }, reply })
        .await
        .expect("report");
    assert_eq!(fits.num_blocks, 16, "four sequences of 64 tokens");
    handle.ask(|reply| Command::Warmup { epoch, plan: PLAN, reply }).await.expect("warm up");
    assert!(handle.status.healthy());
}

fn finish(handle: &Handle, engine: thread::JoinHandle<()>) {
    handle.send(Command::Stop).expect("queue");
    engine.join().expect("the engine ends well");
}

#[tokio::test]
async fn an_epoch_from_configure_to_reset() {
    let (handle, engine) = single(2);
    let early = step(&handle, decode(0, 1)).await;
    assert!(matches!(early, Err(EngineError::State { .. })), "{early:?}");
    serve_epoch(&handle, 1).await;
    let first = step(&handle, prefill(1, 1)).await.expect("prefill");
    let next = step(&handle, decode(1, 2)).await.expect("decode");
    assert_eq!((first.tokens.len(), next.tokens.len()), (1, 1));
    assert!(matches!(handle.configure(configure(1)).await, Err(EngineError::Epoch { .. })));
    handle.reset(1).await.expect("reset");
    assert!(!handle.status.healthy());
    serve_epoch(&handle, 2).await;
    let again = step(&handle, prefill(2, 1)).await.expect("prefill");
    assert_eq!(again.tokens, first.tokens, "a new epoch starts from nothing");
    finish(&handle, engine);
}

#[tokio::test]
async fn steps_that_overtake_each_other_run_in_order() {
    let (handle, engine) = single(1);
    serve_epoch(&handle, 1).await;
    let (third, second) = (send(&handle, decode(1, 3)), send(&handle, decode(1, 2)));
    let foreign = step(&handle, decode(7, 4)).await;
    assert!(matches!(foreign, Err(EngineError::Epoch { given: 7, current: 1 })), "{foreign:?}");
    let gap = step(&handle, decode(1, 9)).await;
    assert!(matches!(gap, Err(EngineError::Order { given: 9, next: 1, .. })), "{gap:?}");
    step(&handle, prefill(1, 1)).await.expect("prefill");
    for (answer, id) in [(second, 2), (third, 3)] {
        let outcome = answer.await.expect("answered").expect("decode");
        assert_eq!((outcome.step_id, outcome.tokens.len()), (id, 1));
    }
    let twice = step(&handle, decode(1, 3)).await;
    assert!(matches!(twice, Err(EngineError::Order { given: 3, next: 4, .. })), "{twice:?}");
    finish(&handle, engine);
}

#[tokio::test]
async fn bad_input_fails_no_neighbour() {
    let (handle, engine) = single(1);
    serve_epoch(&handle, 1).await;
    let mut mixed = prefill(1, 1);
    mixed.decode = vec![77];
    let outcome = step(&handle, mixed).await.expect("the step runs");
    assert_eq!((outcome.tokens.len(), outcome.errors.len()), (1, 1));
    assert_eq!(outcome.errors[0].sequence, 77);
    let huge = Chunk { sequence: 9, start: 0, len: 33, sample: false };
    let refused = step(&handle, Step { chunks: vec![huge], ..decode(1, 2) }).await;
    assert!(matches!(refused, Err(EngineError::Refused(_))), "{refused:?}");
    step(&handle, decode(1, 3)).await.expect("the engine goes on");
    let plan = WarmupPlan { max_model_len: 1 << 30, ..PLAN };
    let refused = handle.ask(|reply| Command::Warmup { epoch: 1, plan, reply }).await;
    let message = refused.expect_err("too long").to_string();
    assert!(message.contains("max_model_len: 1073741824"), "{message}");
    finish(&handle, engine);
}

/// Rank 0 of two whose peer takes part in the self-test and the warm-up, and then is silent.
#[tokio::test]
async fn a_reset_frees_a_stuck_step() {
    let split = Split { tp: 2, pp: 1 };
    let mut worlds = local::worlds(2, 1);
    let peer_world = worlds.pop().expect("rank 1");
    let (handle, engine) = start(0, split, worlds);
    let (peer, peer_engine) = start(1, split, vec![peer_world]);
    let (mine, theirs) = tokio::join!(handle.configure(configure(1)), peer.configure(configure(1)));
    mine.expect("configure");
    theirs.expect("configure");
    let warmup = |reply| Command::Warmup { epoch: 1, plan: PLAN, reply };
    let (mine, theirs) = tokio::join!(handle.ask(warmup), peer.ask(warmup));
    mine.expect("warm up");
    theirs.expect("warm up");
    let stuck = send(&handle, prefill(1, 1));
    while !handle.status.step_runs() {
        tokio::task::yield_now().await;
    }
    handle.reset(1).await.expect("reset");
    let lost = stuck.await.expect("answered");
    assert!(matches!(lost, Err(EngineError::Lost(_))), "{lost:?}");
    assert_eq!(handle.status.phase().state, ShardState::Loaded);
    finish(&handle, engine);
    finish(&peer, peer_engine);
}
