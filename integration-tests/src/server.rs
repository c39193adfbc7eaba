//! A real `trireme serve` with its router and shards, on ports of its own.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    client::Client,
    process::{Process, descendants, wait_until},
};

/// From the start of `trireme serve` to its line that says it is ready.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// The folder of the release binaries: tests run from `target/release/deps`.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("the folder of the build").to_path_buf();
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is missing: `cargo build --release --workspace --bins` first, as `make test` does",
        path.display()
    );
    path
}

/// What to serve and how.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    pub model: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
}

impl ServerOptions {
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), ..Self::default() }
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    pub fn split(self, tp: usize, pp: usize) -> Self {
        self.args(&["--tp", &tp.to_string(), "--pp", &pp.to_string()])
    }

    /// One way for all: the command that starts this server.
    fn command(&self, runtime: &Path) -> Command {
        let mut command = Command::new(binary("trireme"));
        command.arg("serve").arg(&self.model);
        command.args(["--port", "0", "--grpc-port", "0"]).args(&self.args);
        command.env("XDG_RUNTIME_DIR", runtime);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a start that must be refused: its exit status and what it said.
    pub fn refused(&self, limit: Duration) -> Result<(ExitStatus, String)> {
        let runtime = TempDir::with_prefix("tri")?;
        let log = runtime.path().join("log");
        let mut child = self
            .command(runtime.path())
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::options().append(true).open(&log)?)
            .spawn()?;
        let ended = wait_until(limit, || matches!(child.try_wait(), Ok(Some(_))));
        if !ended {
            child.kill()?;
            child.wait()?;
            bail!("still running after {limit:?}: {}", std::fs::read_to_string(&log)?);
        }
        Ok((child.wait()?, std::fs::read_to_string(&log)?))
    }
}

/// Whose turn it is: one server at a time, so that a deadline means something on two cores.
static TURN: Mutex<()> = Mutex::new(());

/// A running server. Dropping it kills it.
pub struct Server {
    _turn: Option<MutexGuard<'static, ()>>,
    child: Child,
    runtime: TempDir,
    log: PathBuf,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
}

impl Server {
    /// Starts a server and waits until it says that it is ready.
    pub fn start(options: &ServerOptions) -> Result<Self> {
        // A test that failed with a server in its hands has killed that server.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut server = Self::start_beside(options)?;
        server._turn = Some(turn);
        Ok(server)
    }

    /// Starts a server beside the one that has its turn.
    pub fn start_beside(options: &ServerOptions) -> Result<Self> {
        let runtime = TempDir::with_prefix("tri").context("make a run folder")?;
        let log = runtime.path().join("log");
        let mut child = options
            .command(runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .context("start trireme")?;
        let stdout = child.stdout.take().context("stdout of trireme")?;
        let mut server = Self {
            _turn: None,
            child,
            runtime,
            log,
            http: ([0, 0, 0, 0], 0).into(),
            grpc: ([0, 0, 0, 0], 0).into(),
        };
        match read_addresses(stdout) {
            Ok((http, grpc)) => {
                server.http = http;
                server.grpc = grpc;
                Ok(server)
            }
            Err(error) => Err(error.context(server.log())),
        }
    }

    pub fn client(&self) -> Client {
        Client::new(self.http)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the launcher and its children have logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn run_folder(&self) -> &Path {
        self.runtime.path()
    }

    pub fn processes(&self) -> Vec<Process> {
        descendants(self.pid())
    }

    pub fn router(&self) -> Process {
        self.processes()
            .into_iter()
            .find(|process| process.name() == "trireme-router")
            .expect("a router runs")
    }

    /// The shards, in order of rank.
    pub fn shards(&self) -> Vec<Process> {
        let mut shards: Vec<Process> = self
            .processes()
            .into_iter()
            .filter(|process| process.name() == "trireme-shard")
            .collect();
        shards.sort_by_key(|shard| shard.flag("--rank").and_then(|rank| rank.parse::<u32>().ok()));
        shards
    }

    pub fn signal(&self, signal: Signal) {
        Process { pid: self.pid(), argv: Vec::new() }.signal(signal);
    }

    /// Waits for the launcher to end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        if wait_until(limit, || matches!(self.child.try_wait(), Ok(Some(_)))) {
            return Ok(self.child.wait()?);
        }
        bail!("trireme still runs after {limit:?}: {}", self.log())
    }

    /// SIGTERM, then the end.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM);
        self.wait(Duration::from_secs(40))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        #[expect(clippy::print_stderr, reason = "a failed test shows what its server said")]
        if std::thread::panicking() {
            eprintln!("--- log of the server\n{}\n---", self.log());
        }
        let children = self.processes();
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Children end with their parent; a stopped one needs help.
        wait_until(Duration::from_secs(2), || children.iter().all(|child| !child.is_alive()));
        for child in children.iter().filter(|child| child.is_alive()) {
            child.signal(Signal::KILL);
        }
    }
}

/// Reads stdout until both addresses are told, then keeps draining it.
fn read_addresses(stdout: impl std::io::Read + Send + 'static) -> Result<(SocketAddr, SocketAddr)> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // Nobody listens any more once the addresses are known.
            let _ = send.send(line);
        }
    });
    let deadline = std::time::Instant::now() + READY_LIMIT;
    let (mut http, mut grpc) = (None, None);
    let mut said = String::new();
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let Ok(line) = receive.recv_timeout(left) else {
            bail!("trireme ended or did not get ready within {READY_LIMIT:?}; it said: {said}");
        };
        for word in line.split_whitespace() {
            let address = |word: &str| -> Option<SocketAddr> {
                let rest = word.strip_prefix("http://").or_else(|| word.strip_prefix("grpc://"))?;
                rest.split('/').next()?.parse().ok()
            };
            if word.starts_with("http://") && http.is_none() {
                http = address(word);
            }
            if word.starts_with("grpc://") && grpc.is_none() {
                grpc = address(word);
            }
        }
        if let (Some(http), Some(grpc)) = (http, grpc) {
            return Ok((http, grpc));
        }
        said.push_str(&line);
        said.push('\n');
    }
}
