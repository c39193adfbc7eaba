//! What a rank does when its own work goes wrong: a panic, a step that never ends, a NaN.

use std::{
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::net::UnixListener;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use trireme_collectives::Collective;

use super::*;
use crate::service::Service;

const NONE: u8 = 0;
const PANIC: u8 = 1;
const STALL: u8 = 2;
const NAN: u8 = 3;

/// Goes wrong once, when told to.
#[derive(Clone)]
struct Fault {
    kind: Arc<AtomicU8>,
    /// Passed when the stalled call may go on.
    gate: Arc<Barrier>,
}

impl Fault {
    fn new() -> Self {
        Self { kind: Arc::new(AtomicU8::new(NONE)), gate: Arc::new(Barrier::new(2)) }
    }

    fn arm(&self, kind: u8) {
        self.kind.store(kind, Ordering::SeqCst);
    }

    fn takes(&self, kind: u8) -> bool {
        self.kind.compare_exchange(kind, NONE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Puts itself into the groups of a world.
    fn into_world(self, world: World) -> World {
        let World { tensor, global, abort } = world;
        let faulty = |inner| Box::new(Faulty { inner, fault: self.clone() });
        World { tensor: faulty(tensor), global: faulty(global), abort }
    }
}

struct Faulty {
    inner: Box<dyn Collective>,
    fault: Fault,
}

type Done = Result<(), CollectiveError>;

impl Collective for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Done {
        assert!(!self.fault.takes(PANIC), "a defect of the engine");
        if self.fault.takes(STALL) {
            self.fault.gate.wait();
        }
        self.inner.all_reduce_sum(data)
    }
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Done {
        self.inner.all_gather(mine, all)
    }
    fn broadcast(&mut self, root: usize, data: &mut [u8]) -> Done {
        self.inner.broadcast(root, data)
    }
    fn send(&mut self, to: usize, data: &[f32]) -> Done {
        self.inner.send(to, data)
    }
    /// Poisons the first row of what comes from the stage before.
    fn recv(&mut self, from: usize, data: &mut [f32]) -> Done {
        self.inner.recv(from, data)?;
        if self.fault.takes(NAN) {
            data[0] = f32::NAN;
        }
        Ok(())
    }
    fn send_bytes(&mut self, to: usize, data: &[u8]) -> Done {
        self.inner.send_bytes(to, data)
    }
    fn recv_bytes(&mut self, from: usize, data: &mut [u8]) -> Done {
        self.inner.recv_bytes(from, data)
    }
    fn barrier(&mut self) -> Done {
        self.inner.barrier()
    }
    fn set_deadline(&mut self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }
}

fn faulty_single(epochs: usize) -> (Fault, Handle, thread::JoinHandle<()>) {
    let fault = Fault::new();
    let worlds = (0..epochs).flat_map(|_| local::worlds(1, 1));
    let worlds = worlds.map(|world| fault.clone().into_world(world)).collect();
    let (handle, engine) = start(0, Split { tp: 1, pp: 1 }, worlds);
    (fault, handle, engine)
}

#[tokio::test]
async fn a_panic_fails_the_shard_until_an_epoch_begins() {
    let (fault, handle, engine) = faulty_single(3);
    serve_epoch(&handle, 1).await;
    let first = step(&handle, prefill(1, 1)).await.expect("prefill");
    for (epoch, resets) in [(1, true), (2, false)] {
        fault.arm(PANIC);
        let next = if epoch == 1 { decode(1, 2) } else { prefill(epoch, 1) };
        let lost = step(&handle, next).await.expect_err("the step panics").to_string();
        assert!(lost.contains("the engine panicked: a defect of the engine"), "{lost}");
        let phase = handle.status.phase();
        assert_eq!((phase.state, handle.status.healthy()), (ShardState::Failed, false));
        assert!(phase.failure.contains("a defect of the engine"), "{}", phase.failure);
        assert!(!handle.status.step_runs());
        let refused = step(&handle, decode(epoch, 3)).await;
        assert!(matches!(refused, Err(EngineError::Lost(_))), "{refused:?}");
        // A Reset leads out, and so does the Configure of a new epoch.
        if resets {
            handle.reset(epoch).await.expect("reset");
            assert_eq!(handle.status.phase().failure, "");
        }
        serve_epoch(&handle, epoch + 1).await;
    }
    let again = step(&handle, prefill(3, 1)).await.expect("prefill");
    assert_eq!(again.tokens, first.tokens, "the weights are as they were");
    finish(&handle, engine);
}

/// A client of the shard's gRPC server over the engine of `handle`.
async fn serve_health(handle: &Handle, socket: &Path) -> HealthClient<Channel> {
    let identity = Arc::new(identity(0, Split { tp: 1, pp: 1 }));
    let service = Service { engine: handle.clone(), identity, grammars: Arc::default() };
    let listener = UnixListener::bind(socket).expect("bind");
    tokio::spawn(server::listen(listener, service));
    let address = format!("unix:{}", socket.display());
    let channel = Endpoint::from_shared(address).expect("an address").connect().await;
    HealthClient::new(channel.expect("connect"))
}

/// Asks until health is `wanted`.
async fn becomes(health: &mut HealthClient<Channel>, wanted: ServingStatus) {
    let ask = async {
        loop {
            let request = HealthCheckRequest { service: "trireme.shard.v1.Shard".into() };
            let answer = health.check(request).await.map(|answer| answer.into_inner().status());
            match answer {
                Ok(status) if status == wanted => return,
                // Not registered yet: the server has only just begun.
                Ok(_) | Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let end = tokio::time::timeout(Duration::from_secs(30), ask).await;
    assert!(end.is_ok(), "health did not become {wanted:?}");
}

#[tokio::test]
async fn health_tells_of_a_step_over_its_deadline() {
    let (fault, handle, engine) = faulty_single(1);
    serve_epoch_within(&handle, 1, Duration::from_millis(50)).await;
    fault.arm(STALL);
    let stuck = send(&handle, prefill(1, 1));
    let folder = tempfile::tempdir().expect("a folder");
    let mut health = serve_health(&handle, &folder.path().join("socket")).await;
    becomes(&mut health, ServingStatus::NotServing).await;
    assert!(handle.status.step_runs(), "it is the step that is late");
    assert_eq!(handle.status.phase().state, ShardState::Serving, "nothing has failed");
    tokio::task::spawn_blocking(move || fault.gate.wait()).await.expect("the step goes on");
    stuck.await.expect("answered").expect("late, but well");
    becomes(&mut health, ServingStatus::Serving).await;
    finish(&handle, engine);
}

/// Prefills sequences 9 and 10.
fn prefill_two() -> Step {
    let mut two = prefill(1, 1);
    two.new.push(NewSequence { id: 10, tokens: vec![4, 5, 6], ..two.new[0].clone() });
    two.blocks.push(BlockUpdate { sequence: 10, append: vec![6] });
    two.chunks.push(Chunk { sequence: 10, start: 0, len: 3, sample: true });
    two
}

/// Two stages run `steps`, in which the first row that stage 1 receives for step `poisoned` is NaN.
/// Returns the last stage's outcomes.
async fn on_two_stages(steps: &[Step], poisoned: Option<u64>) -> Vec<StepOutcome> {
    let split = Split { tp: 1, pp: 2 };
    let fault = Fault::new();
    let mut worlds = local::worlds(1, 2);
    let last_world = fault.clone().into_world(worlds.pop().expect("stage 1"));
    let (first, first_engine) = start(0, split, worlds);
    let (last, last_engine) = start(1, split, vec![last_world]);
    let (a, b) = tokio::join!(first.configure(configure(1)), last.configure(configure(1)));
    a.and(b).expect("configure");
    let warmup = |reply| Command::Warmup { epoch: 1, plan: PLAN, reply };
    let (a, b) = tokio::join!(first.ask(warmup), last.ask(warmup));
    a.and(b).expect("warm up");
    let mut outcomes = Vec::new();
    for next in steps {
        if poisoned == Some(next.id) {
            fault.arm(NAN);
        }
        let (a, b) = tokio::join!(step(&first, next.clone()), step(&last, next.clone()));
        assert_eq!(a.expect("stage 0").errors, []);
        outcomes.push(b.expect("stage 1"));
    }
    assert!(first.status.healthy() && last.status.healthy());
    finish(&first, first_engine);
    finish(&last, last_engine);
    outcomes
}

#[tokio::test]
async fn a_nan_on_a_later_stage_is_its_sequences_error_alone() {
    let two = |id| Step { decode: vec![9, 10], ..decode(1, id) };
    let rest = |id| Step { decode: vec![10], drop: vec![9], ..decode(1, id) };
    let steps = [prefill_two(), two(2), rest(3), rest(4)];
    let well = on_two_stages(&steps, None).await;
    let ill = on_two_stages(&steps, Some(2)).await;
    for (step, (well, ill)) in steps.iter().zip(well.iter().zip(&ill)) {
        assert_eq!((well.step_id, ill.step_id), (step.id, step.id));
        let of_ten = |outcome: &StepOutcome| {
            outcome.tokens.iter().find(|token| token.sequence == 10).cloned()
        };
        assert!(of_ten(well).is_some());
        assert_eq!(of_ten(ill), of_ten(well), "the neighbour's tokens, step {}", step.id);
        let poisoned = step.id == 2;
        assert_eq!(ill.errors.len(), usize::from(poisoned), "{:?}", ill.errors);
        if poisoned {
            assert_eq!((ill.errors[0].sequence, ill.tokens.len()), (9, 1));
            assert!(ill.errors[0].message.contains("NaN"), "{:?}", ill.errors);
        }
    }
}
