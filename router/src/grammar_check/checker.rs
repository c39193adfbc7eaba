//! The checker: reads one grammar, limits itself, says what it found, ends.

use std::{
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    process::{ExitCode, ExitStatus},
    thread,
    time::Duration,
};

use rustix::{
    process::{Resource, Rlimit, setrlimit},
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};
use trireme_grammar::{CheckFacts, Grammar, check};

/// The first argument that makes this program a checker.
pub const VERB: &str = "check-grammar";
pub const TOO_SLOW: &str = "it takes over 250 ms of processor time to compile, the limit";
const TOO_LARGE: &str = "it takes over 1 GiB of memory to compile, the limit";

const CPU_LIMIT: Duration = Duration::from_millis(250);
const CPU_POLL: Duration = Duration::from_millis(10);
const MEMORY_BYTES: u64 = 1 << 30;
/// As the shards' compiling threads have.
const STACK_BYTES: usize = 16 << 20;
/// Ended by its own watch on the time.
const EXIT_SLOW: i32 = 7;

#[derive(Serialize)]
pub struct Order<'a> {
    pub grammar: &'a Grammar,
    pub facts: &'a CheckFacts,
}

#[derive(Deserialize)]
struct Given {
    grammar: Grammar,
    facts: CheckFacts,
}

#[derive(Serialize, Deserialize)]
pub struct Verdict {
    pub refused: Option<String>,
}

/// The whole life of a checker.
pub fn run() -> anyhow::Result<ExitCode> {
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::As, limit(MEMORY_BYTES))?;
    setrlimit(Resource::Core, limit(0))?;
    let mut order = Vec::new();
    std::io::stdin().read_to_end(&mut order)?;
    let Given { grammar, facts } = serde_json::from_slice(&order)?;
    thread::spawn(watch_time);
    let work = thread::Builder::new().stack_size(STACK_BYTES);
    let verdict = work.spawn(move || check(&grammar, &facts))?.join();
    let refused = match verdict {
        Ok(verdict) => verdict.err().map(|error| error.to_string()),
        Err(_) => Some("the compiler failed on it".to_owned()),
    };
    std::io::stdout().write_all(&serde_json::to_vec(&Verdict { refused })?)?;
    Ok(ExitCode::SUCCESS)
}

/// Counts what this process used, not what others left it waiting for.
fn watch_time() {
    loop {
        thread::sleep(CPU_POLL);
        let used = clock_gettime(ClockId::ProcessCPUTime);
        let used = Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec as u32);
        if used > CPU_LIMIT {
            std::process::exit(EXIT_SLOW);
        }
    }
}

/// Why a checker said nothing.
pub fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(EXIT_SLOW), _) => TOO_SLOW.to_owned(),
        // An allocation that fails, or a stack that ends, ends the process.
        (None, Some(_)) => TOO_LARGE.to_owned(),
        _ => "the compiler failed on it".to_owned(),
    }
}
