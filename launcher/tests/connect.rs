//! The verbs that talk to a server, run as a user runs them, against a scripted one.

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, transport::Server};
use trireme_proto::generate::v1::{
    self as generate, FinishReason, Finished, GenerateEvent, GenerateRequest, Token, Usage,
    generate_event::Event,
    generate_request::Prompt,
    generation_server::{Generation, GenerationServer},
};

/// Answers with its prompt's last word, a letter at a time; the last letter is held back until the
/// finish, as a router may hold text. Ids are answered with `max_new_tokens` ids.
#[derive(Clone, Default)]
struct Echo {
    requests: Arc<Mutex<Vec<GenerateRequest>>>,
    /// What was shown as a key.
    keys: Arc<Mutex<Vec<String>>>,
}

impl Echo {
    fn events(request: &GenerateRequest) -> Result<Vec<Event>, Status> {
        let parameters = request.parameters.clone().unwrap_or_default();
        let text = match request.prompt.as_ref() {
            Some(Prompt::Text(text)) => text.clone(),
            Some(Prompt::Messages(messages)) => {
                messages.messages.last().map(|m| m.content.clone()).unwrap_or_default()
            }
            Some(Prompt::Ids(_)) => {
                let count = parameters.max_new_tokens.unwrap_or(1);
                let token = |id| Event::Token(Token { id, ..Token::default() });
                let events = (100..100 + count).map(token);
                return Ok(events.chain([Event::Finished(Finished::default())]).collect());
            }
            None => return Err(Status::invalid_argument("no prompt")),
        };
        if text.contains("refuse") {
            return Err(Status::invalid_argument("prompt has 9 tokens, the limit is 8"));
        }
        let word = text.split_whitespace().last().unwrap_or_default().to_owned();
        let last = word.chars().count().saturating_sub(1);
        let token = |(place, letter): (usize, char)| {
            let text = if place < last { letter.to_string() } else { String::new() };
            Event::Token(Token { id: 1, text, ..Token::default() })
        };
        let usage = Some(Usage { prompt_tokens: 3, ..Usage::default() });
        let mut events: Vec<_> = word.chars().enumerate().map(token).collect();
        let finish_reason = FinishReason::Stop.into();
        events.push(Event::Finished(Finished {
            text: word,
            finish_reason,
            usage,
            ..Finished::default()
        }));
        Ok(events)
    }
}

#[tonic::async_trait]
impl Generation for Echo {
    type GenerateStreamStream = ReceiverStream<Result<GenerateEvent, Status>>;

    async fn generate_stream(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        if let Some(key) = request.metadata().get("authorization") {
            let key = key.to_str().map_err(|_| Status::unauthenticated("no text"))?.to_owned();
            self.keys.lock().unwrap().push(key);
        }
        let request = request.into_inner();
        let events = Self::events(&request)?;
        self.requests.lock().unwrap().push(request);
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            for event in events {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if sender.send(Ok(GenerateEvent { event: Some(event) })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
    async fn info(
        &self,
        _: Request<generate::InfoRequest>,
    ) -> Result<Response<generate::InfoReply>, Status> {
        let model = "echo".to_owned();
        Ok(Response::new(generate::InfoReply { model, tp: 2, pp: 1, ..Default::default() }))
    }
    async fn generate(
        &self,
        _: Request<GenerateRequest>,
    ) -> Result<Response<generate::GenerateReply>, Status> {
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

struct Scene {
    folder: TempDir,
    echo: Echo,
}

impl Scene {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let echo = Echo::default();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        tokio::spawn(
            Server::builder()
                .add_service(GenerationServer::new(echo.clone()))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        Self { folder, echo }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `trireme` with a connection to the server and this standard input.
    async fn trireme(&self, words: &[&str], input: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
        command
            .args(words)
            .arg("--connect")
            .arg(format!("unix:{}", self.path("s").display()))
            .current_dir(self.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = input.to_owned();
        let wait = tokio::task::spawn_blocking(move || {
            child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
            child.wait_with_output().unwrap()
        });
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect("an end").unwrap()
    }

    /// Runs and compares: standard output whole, standard error in part.
    async fn check(&self, words: &[&str], input: &str, want: (i32, &str, &str)) {
        let (code, out, part) = want;
        let output = self.trireme(words, input).await;
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), out, "{words:?}: {error}");
        assert!(error.contains(part), "{words:?}: {error}");
        assert_eq!(output.status.code(), Some(code), "{words:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn generate_prints_the_answer_whole() {
    let scene = Scene::start();
    let sum = "(3 prompt tokens), 6 tokens";
    scene
        .check(&["generate", "--prompt", "say ahoy, é"], "", (0, "é\n", "1 tokens, no speed"))
        .await;
    scene.check(&["generate", "--prompt", "say rowers"], "", (0, "rowers\n", sum)).await;
    scene.check(&["generate", "--prompt", "-"], "say rowers", (0, "rowers\n", sum)).await;
    scene.check(&["generate", "--chat", "--prompt", "say rowers"], "", (0, "rowers\n", sum)).await;
    let ids = ["generate", "--prompt-ids", "1,2", "--max-new-tokens", "3"];
    scene.check(&ids, "", (0, "100 101 102 \n", "3 tokens")).await;
    scene.check(&["generate", "--prompt", "refuse"], "", (1, "", "the limit is 8")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_key_of_a_file_is_shown() {
    let scene = Scene::start();
    std::fs::write(scene.path("key"), "sesame\n").unwrap();
    scene.check(&["generate", "--prompt", "a", "--api-key-file", "key"], "", (0, "a\n", "")).await;
    scene.check(&["generate", "--prompt", "a"], "", (0, "a\n", "")).await;
    assert_eq!(*scene.echo.keys.lock().unwrap(), ["Bearer sesame"]);
    std::fs::write(scene.path("key"), " \n").unwrap();
    let empty = ["generate", "--prompt", "a", "--api-key-file", "key"];
    scene.check(&empty, "", (2, "", "--api-key-file key: the key is empty")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn chat_over_a_pipe_remembers_and_saves() {
    let scene = Scene::start();
    let lines = "say one\nrefuse this\n/nonsense\n\nsay two\n/save talk.json\n/save no/such/folder\n\
                 /reset\nsay three\n/exit\nnot read\n";
    let want = (0, "one\ntwo\nthree\n", "no command '/nonsense'");
    scene.check(&["chat", "--system", "brief"], lines, want).await;
    let saved = std::fs::read_to_string(scene.path("talk.json")).unwrap();
    let saved: Vec<serde_json::Value> = serde_json::from_str(&saved).unwrap();
    let said: Vec<_> = saved.iter().map(|m| m["content"].as_str().unwrap()).collect();
    assert_eq!(said, ["brief", "say one", "one", "say two", "two"], "refusals are forgotten");
    let requests = scene.echo.requests.lock().unwrap();
    let lengths = requests.iter().map(|request| match &request.prompt {
        Some(Prompt::Messages(messages)) => messages.messages.len(),
        other => panic!("not messages: {other:?}"),
    });
    assert_eq!(lengths.collect::<Vec<_>>(), [2, 4, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn chat_ends_with_its_input() {
    Scene::start().check(&["chat"], "say one", (0, "one\n", "")).await;
    Scene::start().check(&["chat"], "", (0, "", "")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bench_reports_every_case() {
    let scene = Scene::start();
    let sizes = ["--json", "--prefill", "8,16", "--batch", "1,3", "--decode", "5"];
    let report = async |more: &[&str]| {
        let output = scene.trireme(&[&["bench"], &sizes[..], more].concat(), "").await;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        serde_json::from_slice::<Vec<serde_json::Value>>(&output.stdout).unwrap()
    };
    let rows = report(&[]).await;
    let cases: Vec<_> = rows.iter().map(|row| row["case"].as_str().unwrap_or("-")).collect();
    assert_eq!(cases, ["-", "prefill", "prefill", "decode", "decode"]);
    assert_eq!((rows[0]["model"].as_str(), rows[0]["tp"].as_u64()), (Some("echo"), Some(2)));
    assert!(rows[1]["ttft_ms_p50"].as_f64().unwrap() >= 1.0, "the server waits 1 ms: {}", rows[1]);
    assert!(rows[3]["inter_token_ms_p50"].as_f64().unwrap() > 0.0, "{}", rows[3]);
    let rows = report(&["--load", "7x3"]).await;
    assert_eq!(rows[1]["case"], "load");
    assert_eq!((&rows[1]["requests"], &rows[1]["failed"]), (&7.into(), &0.into()));
    let prompts: Vec<_> =
        scene.echo.requests.lock().unwrap().iter().map(|r| r.prompt.clone()).collect();
    // 1 warm-up, 2 × 5 prefills, 1 + 3 decodes, then the load.
    assert_eq!(prompts.len(), 1 + 10 + 4 + 7);
    for (place, prompt) in prompts[..15].iter().enumerate() {
        assert!(
            !prompts[..place].contains(prompt),
            "a prompt came twice: a prefix cache would know it"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_address_without_a_server_is_refused() {
    let check = |address: &str, part: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_trireme"))
            .args(["generate", "--prompt", "x", "--connect", address])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(part), "{address}: {error}");
    };
    check("unix:/nonexistent/s", "no such socket");
    check("http://127.0.0.1:9", "no gRPC server answers");
    check("127.0.0.1:9", "no gRPC server answers");
    check("https://127.0.0.1:9", "scheme 'https'");
    check("http://", "--connect");
}
