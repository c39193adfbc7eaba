//! Children are shell scripts; the sockets they would serve are served by the test.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};
use tonic_health::ServingStatus;
use trireme_proto::generate::v1::{
    self as generate,
    generation_server::{Generation, GenerationServer},
};

use super::*;
use crate::{child_log::ChildLog, config::LogFormat};

/// Writes its life and its end to the journal; goes on until asked to end.
const HONEST: &str = "trap 'echo term $0 >> journal; exit 0' TERM; echo start $0 >> journal; \
                      echo hello from $0; while :; do sleep 0.02; done";
const DEAF: &str = "trap '' TERM; echo start $0 >> journal; while :; do sleep 0.02; done";
/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);
impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct FakeRouter;
#[tonic::async_trait]
impl Generation for FakeRouter {
    type GenerateStreamStream = tokio_stream::Empty<Result<generate::GenerateEvent, Status>>;
    async fn info(&self, _: Request<generate::InfoRequest>) -> Result<Response<InfoReply>, Status> {
        let http_address = "127.0.0.1:4321".to_owned();
        Ok(Response::new(InfoReply { http_address, ..InfoReply::default() }))
    }
    async fn generate(
        &self,
        _: Request<generate::GenerateRequest>,
    ) -> Result<Response<generate::GenerateReply>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
    async fn generate_stream(
        &self,
        _: Request<generate::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
    async fn score(
        &self,
        _: Request<generate::ScoreRequest>,
    ) -> Result<Response<generate::ScoreReply>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
    async fn tokenize(
        &self,
        _: Request<generate::TokenizeRequest>,
    ) -> Result<Response<generate::TokenizeReply>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
    async fn health(
        &self,
        _: Request<generate::HealthRequest>,
    ) -> Result<Response<generate::HealthReply>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
}

/// Serves a socket, again whenever it was removed (the supervisor does so at each start and end).
async fn serve_socket(path: PathBuf, status: watch::Receiver<ServingStatus>) {
    let mut server = tokio::spawn(async {});
    loop {
        if !path.exists() {
            server.abort();
            let (reporter, health) = tonic_health::server::health_reporter();
            let listener = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
            let mut status = status.clone();
            let serve = Server::builder()
                .add_service(health)
                .add_service(GenerationServer::new(FakeRouter))
                .serve_with_incoming(listener);
            server = tokio::spawn(async move {
                let report = async {
                    loop {
                        let now = *status.borrow_and_update();
                        reporter.set_service_status("", now).await;
                        if status.changed().await.is_err() {
                            std::future::pending::<()>().await;
                        }
                    }
                };
                tokio::select! { _ = serve => {}, () = report => {} }
            });
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A supervised service of scripts.
struct Scene {
    folder: TempDir,
    page: Page,
    health: BTreeMap<String, watch::Sender<ServingStatus>>,
    stop: mpsc::Sender<Stop>,
    ready: watch::Receiver<Option<InfoReply>>,
    run: tokio::task::JoinHandle<Result<(), SupervisorError>>,
}

impl Scene {
    fn start(scripts: &[&str], supervision: Supervision) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let last = scripts.len() - 1;
        let mut health = BTreeMap::new();
        let spec = |(index, script): (usize, &&str)| {
            let role = if index == last { Role::Router } else { Role::Shard { rank: index } };
            let name = role.to_string().replace(' ', "-");
            let socket = folder.path().join(format!("{name}.sock"));
            let (sender, receiver) = watch::channel(ServingStatus::Serving);
            health.insert(name.clone(), sender);
            tokio::spawn(serve_socket(socket.clone(), receiver));
            let script = format!("cd {}; {script}", folder.path().display());
            let args = ["-c", &script, &name].map(Into::into).to_vec();
            ProcessSpec { role, program: "/bin/sh".into(), args, variables: Vec::new(), socket }
        };
        let processes: Vec<_> = scripts.iter().enumerate().map(spec).collect();
        let page = Page::default();
        let (log, _writer) = ChildLog::start(LogFormat::Text, page.clone()).unwrap();
        let nursery = Nursery { log, hidden_variables: Vec::new(), log_filter: None };
        let (supervisor, handle) = Supervisor::new(processes, supervision, nursery);
        let run = tokio::spawn(supervisor.run());
        Self { folder, page, health, stop: handle.stop, ready: handle.ready, run }
    }

    fn journal(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.path().join("journal")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn count(&self, line: &str) -> usize {
        self.journal().iter().filter(|entry| *entry == line).count()
    }

    async fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "{what} never came; journal {:?}", self.journal());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn until_ready(&self) {
        self.until("ready", |scene| scene.ready.borrow().is_some()).await;
    }

    async fn outcome(self) -> Result<(), SupervisorError> {
        tokio::time::timeout(PATIENCE, self.run).await.expect("the supervisor ends").unwrap()
    }
}

fn supervision() -> Supervision {
    Supervision {
        restart_budget: 2,
        hang_deadline: Duration::from_secs(30),
        start_deadline: PATIENCE,
        drain_deadline: Duration::from_secs(30),
        kill_grace: Duration::from_secs(30),
    }
}

/// Processes whose command line has this text.
fn running(text: &Path) -> usize {
    let text = text.to_str().unwrap();
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(text))
        .count()
}

#[tokio::test]
async fn a_service_starts_and_drains_in_order() {
    let scene = Scene::start(&[HONEST, HONEST, HONEST], supervision());
    scene.until_ready().await;
    scene.until("all start", |scene| scene.journal().len() == 3).await;
    assert_eq!(scene.ready.borrow().as_ref().unwrap().http_address, "127.0.0.1:4321");
    assert_eq!(scene.journal()[2], "start router", "the router comes last");
    scene
        .until("output", |scene| {
            let page = scene.page.0.lock().unwrap();
            let page = String::from_utf8_lossy(&page);
            page.contains("shard 1: hello from shard-1\n")
                && page.contains("router: hello from router\n")
        })
        .await;
    scene.stop.send(Stop::Drain).await.unwrap();
    let folder = scene.folder.path().to_owned();
    scene.until("the router's end", |scene| scene.count("term router") == 1).await;
    scene.until("the shards' end", |scene| scene.journal().len() == 6).await;
    let lines = scene.journal();
    let place = |line: &str| lines.iter().position(|entry| entry == line);
    assert!(place("term router") < place("term shard-0"), "{lines:?}");
    assert!(place("term router") < place("term shard-1"), "{lines:?}");
    scene.outcome().await.unwrap();
    assert_eq!(running(&folder), 0);
}

#[tokio::test]
async fn a_dead_process_is_restarted_alone() {
    for victim in ["shard-0", "router"] {
        let once = HONEST.replace(
            "while :",
            &format!("[ $0 = {victim} ] && [ ! -e died ] && {{ while [ ! -e now ]; do sleep 0.01; done; touch died; kill -9 $$; }}; while :"),
        );
        let scene = Scene::start(&[&once, &once, &once], supervision());
        scene.until_ready().await;
        fs::write(scene.folder.path().join("now"), "").unwrap();
        let start = format!("start {victim}");
        scene.until("a second life", |scene| scene.count(&start) == 2).await;
        let others = ["shard-0", "shard-1", "router"].into_iter().filter(|name| *name != victim);
        for other in others {
            assert_eq!(scene.count(&format!("start {other}")), 1, "{other} was restarted too");
        }
        scene.stop.send(Stop::Drain).await.unwrap();
        scene.outcome().await.unwrap();
    }
}

#[tokio::test]
async fn failures_are_told_apart() {
    let check = async |scripts: &[&str], change: fn(&mut Supervision), parts: &[&str]| {
        let mut supervision = supervision();
        change(&mut supervision);
        let scene = Scene::start(scripts, supervision);
        let folder = scene.folder.path().to_owned();
        let error = scene.outcome().await.unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{scripts:?}: {error}");
        }
        assert_eq!(running(&folder), 0, "{scripts:?} left processes");
    };
    let same = |_: &mut Supervision| {};
    check(&["exit 3", HONEST], same, &["shard 0", "code 3", "before the service was ready"]).await;
    check(&[HONEST, "exit 0"], same, &["router", "code 0"]).await;
    check(&[HONEST, "kill -9 $$", HONEST], same, &["shard 1", "SIGKILL", "--restart-budget 2"])
        .await;
    check(&["kill -7 $$", HONEST], |s| s.restart_budget = 0, &["SIGBUS", "/dev/shm", "budget 0"])
        .await;
    check(&[DEAF, "exit 4"], |s| s.kill_grace = Duration::from_millis(100), &["router", "code 4"])
        .await;
}

#[tokio::test]
async fn an_unwell_shard_is_killed_and_restarted() {
    let mut supervision = supervision();
    supervision.hang_deadline = Duration::from_millis(50);
    let scene = Scene::start(&[DEAF, HONEST], supervision);
    scene.until_ready().await;
    scene.health["shard-0"].send_replace(ServingStatus::NotServing);
    scene.until("a second life", |scene| scene.count("start shard-0") == 2).await;
    scene.health["shard-0"].send_replace(ServingStatus::Serving);
    assert_eq!(scene.count("start router"), 1);
    scene.stop.send(Stop::Now(15)).await.unwrap();
    let error = scene.outcome().await.unwrap_err();
    assert!(matches!(error, SupervisorError::Killed { signal: 15 }), "{error}");
}

#[tokio::test]
async fn a_router_that_is_not_ready_is_waited_for_until_the_deadline() {
    let mut supervision = supervision();
    supervision.start_deadline = Duration::from_millis(400);
    supervision.hang_deadline = Duration::from_millis(50);
    let scene = Scene::start(&[HONEST, HONEST], supervision);
    scene.health["router"].send_replace(ServingStatus::NotServing);
    let error = scene.outcome().await.unwrap_err().to_string();
    assert!(error.contains("waiting for router"), "{error}");
}

#[tokio::test]
async fn a_second_signal_kills_the_deaf() {
    let scene = Scene::start(&[DEAF, DEAF], supervision());
    let folder = scene.folder.path().to_owned();
    scene.until_ready().await;
    scene.until("both start", |scene| scene.journal().len() == 2).await;
    scene.stop.send(Stop::Drain).await.unwrap();
    scene.stop.send(Stop::Now(2)).await.unwrap();
    let error = scene.outcome().await.unwrap_err();
    assert!(matches!(error, SupervisorError::Killed { signal: 2 }), "{error}");
    assert_eq!(running(&folder), 0);
}

#[tokio::test]
async fn a_dropped_supervisor_leaves_no_process() {
    let scene = Scene::start(&[DEAF, DEAF], supervision());
    scene.until_ready().await;
    scene.until("both start", |scene| scene.journal().len() == 2).await;
    scene.run.abort();
    scene.until("their end", |scene| running(scene.folder.path()) == 0).await;
}

#[test]
fn a_restarted_router_keeps_its_ports() {
    let check = |args: &str, http: &str, grpc: &str, want: &str| {
        let mut spec = ProcessSpec {
            role: Role::Router,
            program: "r".into(),
            args: args.split(' ').map(Into::into).collect(),
            variables: Vec::new(),
            socket: "s".into(),
        };
        let info = InfoReply {
            http_address: http.to_owned(),
            grpc_address: grpc.to_owned(),
            ..InfoReply::default()
        };
        keep_ports(&mut spec, &info);
        let words: Vec<_> = spec.args.iter().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(words.join(" "), want);
    };
    check("--port 0 --grpc-port 0", "127.0.0.1:81", "[::1]:82", "--port 81 --grpc-port 82");
    check("--port 80 --grpc-port 0", "h:80", "h:82", "--port 80 --grpc-port 82");
    check("--port 0", "", "", "--port 0");
    check("--tp 1", "h:1", "h:2", "--tp 1");
}
