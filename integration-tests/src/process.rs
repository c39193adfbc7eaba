//! A look at processes through /proc, and signals to them.

use std::{fs, path::Path, time::Duration};

use rustix::process::{Pid, Signal};

/// One process of a server.
#[derive(Clone, Debug)]
pub struct Process {
    pub pid: u32,
    /// Arguments, the program's name first.
    pub argv: Vec<String>,
}

impl Process {
    pub fn name(&self) -> &str {
        let program = self.argv.first().map(String::as_str).unwrap_or_default();
        Path::new(program).file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The value after `flag` on the command line.
    pub fn flag(&self, flag: &str) -> Option<&str> {
        let at = self.argv.iter().position(|argument| argument == flag)?;
        self.argv.get(at + 1).map(String::as_str)
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid as i32).expect("a pid is not zero");
        // A process that has just ended needs no signal.
        let _ = rustix::process::kill_process(pid, signal);
    }

    pub fn is_alive(&self) -> bool {
        // A zombie has ended: only its parent has not looked yet.
        match fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => !matches!(state(&stat), Some('Z' | 'X')),
            Err(_) => false,
        }
    }

    pub fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, |entries| entries.count())
    }

    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid)).map_or(0, |entries| entries.count())
    }

    /// Proportional set size in bytes: shared pages are counted once over all processes.
    pub fn resident_bytes(&self) -> u64 {
        let rollup =
            fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid)).unwrap_or_default();
        rollup
            .lines()
            .find_map(|line| line.strip_prefix("Pss:"))
            .and_then(|rest| rest.trim().strip_suffix(" kB"))
            .and_then(|kib| kib.trim().parse::<u64>().ok())
            .map_or(0, |kib| kib * 1024)
    }
}

/// The state letter of /proc/PID/stat: it follows the name, which may hold anything but ends in ')'.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// All living processes below `root`, in order of pid.
pub fn descendants(root: u32) -> Vec<Process> {
    let mut found = Vec::new();
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{parent}/task")) else { continue };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for pid in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
                parents.push(pid);
                found.push(Process { pid, argv: argv(pid) });
            }
        }
    }
    found.sort_by_key(|process| process.pid);
    found.dedup_by_key(|process| process.pid);
    found.retain(Process::is_alive);
    found
}

fn argv(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes
        .split(|&byte| byte == 0)
        .filter(|argument| !argument.is_empty())
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect()
}

/// Polls until `done`, for at most `limit`; says whether it came true.
pub fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = std::time::Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if std::time::Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
