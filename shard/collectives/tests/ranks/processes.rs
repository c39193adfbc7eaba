//! Ranks as real processes: this test binary runs itself again, once a rank.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use trireme_collectives::{CollectiveError, shared_memory};

use crate::script;

/// What a child does, as `part name tp pp rank`.
const ROLE: &str = "TRIREME_COLLECTIVES_TEST_ROLE";
const STEPS: usize = 120;
const LONG: Duration = Duration::from_secs(60);

pub fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("/trireme-test-{}-{next}", std::process::id())
}

fn object_path(name: &str) -> PathBuf {
    Path::new("/dev/shm").join(name.trim_start_matches('/'))
}

pub fn object_exists(name: &str) -> bool {
    object_path(name).exists()
}

struct Rank {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Rank {
    fn start(part: &str, name: &str, (tp, pp): (usize, usize), rank: usize) -> Self {
        let program = std::env::current_exe().expect("this test binary");
        let mut child = Command::new(program)
            .args(["--exact", "processes::as_a_child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{part} {name} {tp} {pp} {rank}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, output }
    }

    /// Reads on until the child says `line`.
    fn await_line(&mut self, line: &str) {
        let mut said = String::new();
        while self.output.read_line(&mut said).expect("readable") > 0 {
            if said.trim_end().ends_with(line) {
                return;
            }
        }
        panic!("the child ended without saying {line:?}: {said}");
    }

    fn kill(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("reaped");
    }

    /// Waits for the end; returns success and the rest of what it said.
    fn finish(mut self) -> (bool, String) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("readable");
        (self.child.wait().expect("reaped").success(), rest)
    }
}

impl Drop for Rank {
    /// A failed assertion must not leave children behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of the children, not a test of its own: without a role it has nothing to do.
#[test]
fn as_a_child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().expect("a number");
    let (part, name, plan, rank) = (words[0], words[1], (number(2), number(3)), number(4));
    let mut world = shared_memory::join(name, plan.0, plan.1, rank, LONG).expect("joined");
    assert!(!object_exists(name), "the name outlived the joining");
    if part == "script" {
        return script::run(&mut world, (plan.0 * 100 + plan.1) as u64, STEPS, plan, rank);
    }
    world.global.barrier().expect("all are here");
    match part {
        "freeze" => {
            println!("\nfrozen");
            std::thread::sleep(LONG);
        }
        "wait" => {
            world.global.set_deadline(Duration::from_millis(300));
            println!("\nended by: {}", world.global.barrier().expect_err("nobody comes"));
        }
        "patient" => {
            println!("\nended by: {}", world.global.recv(0, &mut [0.0]).expect_err("aborted"));
        }
        "aborter" => world.abort.abort(),
        other => panic!("no part {other}"),
    }
}

#[test]
fn random_programs_match_the_model() {
    for plan in [(2, 1), (3, 1), (1, 2), (2, 2), (5, 1)] {
        let name = fresh_name();
        let ranks: Vec<Rank> =
            (0..plan.0 * plan.1).map(|rank| Rank::start("script", &name, plan, rank)).collect();
        for (rank, process) in ranks.into_iter().enumerate() {
            let (success, said) = process.finish();
            assert!(success, "plan {plan:?}, rank {rank}: {said}");
        }
        assert!(!object_exists(&name));
    }
}

#[test]
fn a_killed_peer_is_named_and_leaves_nothing_behind() {
    let name = fresh_name();
    let waiting = Rank::start("wait", &name, (2, 1), 0);
    let mut frozen = Rank::start("freeze", &name, (2, 1), 1);
    frozen.await_line("frozen");
    frozen.kill();
    let (success, said) = waiting.finish();
    assert!(success, "{said}");
    assert!(said.contains("barrier on rank 0 of 2 waited"), "{said}");
    assert!(said.contains("for rank 1"), "{said}");
    assert!(!object_exists(&name));
}

#[test]
fn killing_every_rank_leaves_nothing_behind() {
    let name = fresh_name();
    let mut ranks = [0, 1].map(|rank| Rank::start("freeze", &name, (1, 2), rank));
    ranks.iter_mut().for_each(|rank| rank.await_line("frozen"));
    ranks.iter_mut().for_each(Rank::kill);
    assert!(!object_exists(&name));
}

#[test]
fn an_abort_reaches_other_processes() {
    let name = fresh_name();
    let patient = Rank::start("patient", &name, (1, 2), 1);
    let aborter = Rank::start("aborter", &name, (1, 2), 0);
    for (process, words) in [(aborter, ""), (patient, "recv on rank 1 of 2 was aborted")] {
        let (success, said) = process.finish();
        assert!(success && said.contains(words), "{said}");
    }
}

#[test]
fn joining_alone_ends_at_the_deadline_and_removes_the_object() {
    for (rank, expected) in [(0, 1), (1, 0), (2, 0)] {
        let name = fresh_name();
        let joined = shared_memory::join(&name, 3, 1, rank, Duration::from_millis(30));
        match joined.err() {
            Some(CollectiveError::Deadline { operation: "join", missing, size: 3, .. }) => {
                assert_eq!(missing, expected);
            }
            other => panic!("rank {rank}: {other:?}"),
        }
        assert!(!object_exists(&name));
    }
}

#[test]
fn a_plan_or_rank_that_cannot_be_is_refused() {
    fn check((tp, pp, rank): (usize, usize, usize), detail: &str) {
        match shared_memory::join(&fresh_name(), tp, pp, rank, LONG).err() {
            Some(CollectiveError::Mismatch { detail: found, .. }) => assert_eq!(found, detail),
            other => panic!("{detail}: {other:?}"),
        }
    }
    check((2, 1, 2), "rank 2 of 2");
    check((65, 1, 0), "tp 65 x pp 1 is not 1 to 64 ranks");
    check((0, 1, 0), "tp 0 x pp 1 is not 1 to 64 ranks");
    check((usize::MAX, 2, 0), &format!("tp {} x pp 2 is not 1 to 64 ranks", usize::MAX));
}

/// Two ranks that cannot be of one world: one of them is told why, the other one misses its peer.
#[test]
fn peers_that_do_not_fit_together_are_refused() {
    fn check(others: (usize, usize, usize), detail: &str) {
        let name = fresh_name();
        let join =
            |(tp, pp, rank)| shared_memory::join(&name, tp, pp, rank, Duration::from_secs(1)).err();
        let ended = std::thread::scope(|scope| {
            let first = scope.spawn(|| join((2, 1, 0)));
            let second = scope.spawn(|| join(others));
            [first, second].map(|thread| thread.join().expect("no panic"))
        });
        let told = |error: &Option<CollectiveError>| {
            matches!(error, Some(CollectiveError::Mismatch { detail: found, .. })
                if found.contains(detail))
        };
        assert!(ended.iter().any(told), "{detail}: {ended:?}");
        assert!(ended.iter().all(Option::is_some), "{detail}: {ended:?}");
        assert!(!object_exists(&name));
    }
    check((3, 1, 1), "do the ranks agree on tp and pp?");
    check((2, 1, 0), "rank 0 is taken by process");
}

#[test]
fn a_bad_name_is_an_error() {
    for name in ["", "/", "a/b", "..", "nul\0byte", &"x".repeat(300)] {
        let joined = shared_memory::join(name, 1, 1, 0, LONG);
        assert!(matches!(joined.err(), Some(CollectiveError::SharedMemory { .. })), "{name:?}");
    }
}

#[test]
fn an_object_that_others_can_read_is_refused() {
    let name = fresh_name();
    let path = object_path(&name);
    std::fs::write(&path, b"").expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("set");
    let joined = shared_memory::join(&name, 1, 1, 0, LONG);
    std::fs::remove_file(&path).expect("still there: it is not ours to remove");
    match joined.err() {
        Some(CollectiveError::Mismatch { detail, .. }) => assert!(detail.contains("mode 644")),
        other => panic!("{other:?}"),
    }
}
