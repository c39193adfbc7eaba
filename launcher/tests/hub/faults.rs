//! What goes wrong on the way: what passes is tried again, what does not is named.

use std::{
    fs,
    net::TcpListener,
    time::{Duration, Instant},
};

use super::{
    Bench, noise,
    server::{COMMIT, Fault, HubServer, etag},
};

const LARGE: &str = "model.safetensors";
/// More than what makes a further row of attempts worth it.
const BYTES: usize = 3 << 20;

fn server() -> HubServer {
    HubServer::start(&[("config.json", b"{}".to_vec()), (LARGE, noise(BYTES, 7))])
}

/// The model comes after all, and its content is right. The ranges that the storage host was asked
/// for are given back.
fn comes(faults: &[(&'static str, &'static str, Fault)], about: &str) -> Vec<Option<String>> {
    let server = server();
    let mut bench = Bench::new(&server);
    bench.hub.settings.patience.read = Duration::from_millis(400);
    server.state().faults.extend_from_slice(faults);
    let path = bench.fetch("org/model").unwrap_or_else(|error| panic!("{about}: {error}"));
    assert!(server.state().faults.is_empty(), "{about}: not all was met");
    assert_eq!(fs::read(path.join(LARGE)).unwrap(), noise(BYTES, 7), "{about}");
    assert_eq!(bench.names("blobs").len(), 2, "{about}: something is left over");
    server.downloads().into_iter().filter(|seen| seen.storage).map(|seen| seen.range).collect()
}

#[test]
fn what_passes_is_tried_again() {
    let busy = |after| Fault::Status(429, after, "slow down");
    let check = |about: &str, faults: &[_], want: &[Option<&str>]| {
        let got = comes(faults, about);
        let got: Vec<_> = got.iter().map(Option::as_deref).collect();
        assert_eq!(got, want, "{about}");
    };
    let get = "GET";
    let from = |at: usize| format!("bytes={at}-");
    let (half, more) = (from(BYTES / 2), from(BYTES / 2 + 1000));
    check("cut", &[(get, "/lfs", Fault::CutAt(BYTES / 2))], &[None, Some(&half)]);
    check(
        "cut twice",
        &[(get, "/lfs", Fault::CutAt(BYTES / 2)), (get, "/lfs", Fault::CutAt(1000))],
        &[None, Some(&half), Some(&more)],
    );
    let stall = Fault::StallAt(BYTES / 2, Duration::from_secs(3));
    check("stall", &[(get, "/lfs", stall)], &[None, Some(&half)]);
    check(
        "range ignored",
        &[(get, "/lfs", Fault::CutAt(BYTES / 2)), (get, "/lfs", Fault::IgnoreRange)],
        &[None, Some(&half)],
    );
    check("busy listing", &[(get, "/api", busy(&[]))], &[None]);
    check("cut listing", &[(get, "/api", Fault::CutAt(20))], &[None]);
    check("broken storage", &[(get, "/lfs", Fault::Status(503, &[], ""))], &[None, None]);
    check("link ran out", &[(get, "/lfs", Fault::Status(403, &[], "expired"))], &[None, None]);
    // The first part was bad, which shows at the end: it all comes again.
    let bad_then_cut = [(get, "/lfs", Fault::ChangedAndCutAt(BYTES / 2))];
    check("changed part", &bad_then_cut, &[None, Some(&half), None]);
}

#[test]
fn the_hub_is_waited_for_as_long_as_it_asks() {
    let start = Instant::now();
    comes(&[("GET", "/api", Fault::Status(429, &[("Retry-After", "1")], ""))], "retry after");
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn what_does_not_pass_is_named() {
    let check = |faults: &[(&'static str, &'static str, Fault)], want: &str| {
        let server = server();
        let bench = Bench::new(&server);
        server.state().faults.extend_from_slice(faults);
        let error = bench.fetch("org/model").unwrap_err().to_string();
        assert!(error.contains(want), "want '{want}', got: {error}");
        assert!(!error.contains("signature=secret"), "{error}");
        assert!(bench.hub.find(&super::repo("org/model")).is_err(), "{want}");
        assert!(bench.names("refs").is_empty(), "{want}");
        // The next one is well, whatever was left behind.
        let path = bench.fetch("org/model").unwrap();
        assert_eq!(fs::read(path.join(LARGE)).unwrap(), noise(BYTES, 7), "{want}");
    };
    let api = |status, headers, body| ("GET", "/api", Fault::Status(status, headers, body));
    let gated = &[("X-Error-Code", "GatedRepo"), ("X-Error-Message", "ask for it")];
    check(&[api(403, gated, "")], "'org/model' is gated: the Hub says 403 (ask for it)");
    check(&[api(403, &[], "not you")], "the Hub says 403 (not you); no token was sent");
    check(&[api(401, &[], "who are you")], "the Hub says 401 (who are you)");
    check(&[api(404, &[("X-Error-Code", "RepoNotFound")], "")], "has no model 'org/model'");
    check(&[api(418, &[], "<b>tea</b>")], "the Hub says 418 (I'm a teapot)");
    check(&[api(429, &[("Retry-After", "3600")], "")], "it asks to wait 3600 s");
    let broken = || api(503, &[], "down for repair");
    let gave_up = "the Hub says 503 (down for repair); gave up after 3 attempts";
    check(&[broken(), broken(), broken()], gave_up);
    check(&[("GET", "/api", Fault::Html)], "want the Hub's JSON about a model");
    let lfs = |fault| ("GET", "/lfs", fault);
    check(&[lfs(Fault::Changed)], "SHA-256 is");
    check(&[lfs(Fault::Longer)], "the file has 3145728 bytes, the answer 3145738");
    check(&[("GET", "/config.json", Fault::Changed)], "git's SHA-1 is");
    check(&[lfs(Fault::CutAt(9)), lfs(Fault::WrongRange)], "want a Content-Range of the rest");
    let cut = || lfs(Fault::CutAt(1000));
    check(&[cut(), cut(), cut()], "broke off after 3000 of 3145728 bytes");
    check(&[lfs(Fault::Html)], "the file has 3145728 bytes, the answer 35 or more");
}

#[test]
fn what_is_asked_for_must_be_there() {
    let server = server();
    let bench = Bench::new(&server);
    let check = |name: &str, want: &str| {
        let error = bench.fetch(name).unwrap_err().to_string();
        assert!(error.contains(want), "{name}: {error}");
        assert!(bench.names("refs").is_empty());
    };
    check("org/model@v2", "has no revision 'v2'");
    check("org/other", "has no model 'org/other'");
    check("org/model:Q4_K_M", "no file 'Q4_K_M' at main; it has model.safetensors");
    server.state().files.remove(LARGE);
    check("org/model", "no weights (*.safetensors");
    let index = "model.safetensors.index.json";
    let text = r#"{"weight_map": {"a": "gone.safetensors"}}"#;
    server.state().files.insert(index.to_owned(), text.into());
    check("org/model", "no file 'gone.safetensors'");
    server.state().files.insert(index.to_owned(), r#"{"weight_map": {"a": "../../x"}}"#.into());
    server.state().commit = super::server::NEXT_COMMIT;
    check("org/model", "an index of weights");
    server.state().files.insert("../../evil".to_owned(), b"x".to_vec());
    check("org/model", "a relative path in 'rfilename'");
}

#[test]
fn an_interrupted_download_goes_on_where_it_stopped() {
    let server = server();
    let bench = Bench::new(&server);
    let blob = bench.cache().join("models--org--model/blobs").join(etag(&noise(BYTES, 7)));
    let partial = blob.with_extension("incomplete");
    let put = |bytes: &[u8]| {
        let _ = fs::remove_dir_all(bench.cache());
        fs::create_dir_all(partial.parent().unwrap()).unwrap();
        fs::write(&partial, bytes).unwrap();
        server.state().seen.clear();
        bench.fetch("org/model").unwrap();
        assert_eq!(fs::read(&blob).unwrap(), noise(BYTES, 7));
        assert!(!partial.exists());
        let storage = server.downloads().into_iter().filter(|seen| seen.storage);
        storage.map(|seen| seen.range).collect::<Vec<_>>()
    };
    let content = noise(BYTES, 7);
    assert_eq!(put(&content[..1234]), [Some("bytes=1234-".to_owned())]);
    assert_eq!(put(&content), [] as [Option<String>; 0], "all was there but the name");
    assert_eq!(put(&noise(BYTES + 5, 7)), [None], "longer than the file");
    // Bytes of another file: noticed at the end, and fetched anew.
    assert_eq!(put(&noise(1234, 8)), [Some("bytes=1234-".to_owned()), None]);
}

#[test]
fn a_snapshot_that_lacks_a_file_is_no_model() {
    let index = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;
    let server = HubServer::start(&[
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.into()),
        ("1.safetensors", noise(5000, 1)),
        ("2.safetensors", noise(5000, 2)),
    ]);
    let bench = Bench::new(&server);
    let gone = || Fault::Status(404, &[("X-Error-Code", "EntryNotFound")], "");
    server.fault("GET", "2.safetensors", gone());
    let error = bench.fetch("org/model").unwrap_err().to_string();
    assert!(error.contains("404 (EntryNotFound)"), "{error}");
    let check = |name: &str, want: &str| {
        let error = bench.hub.find(&super::repo(name)).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    };
    check("org/model", "is not here");
    check(&format!("org/model@{COMMIT}"), "2.safetensors is missing");
    let listed = bench.hub.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].missing.as_deref(), Some("2.safetensors"));
    server.state().seen.clear();
    bench.fetch("org/model").unwrap();
    assert_eq!(server.downloads().len(), 1, "what is here is not fetched again");
    assert_eq!(bench.hub.list().unwrap()[0].missing, None);
}

#[test]
fn a_hub_that_is_away_is_named_and_what_is_here_does() {
    let server = server();
    let mut bench = Bench::new(&server);
    let path = bench.fetch("org/model").unwrap();
    // A port that is bound and closed again: nobody listens there.
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    bench.hub.settings.endpoint = format!("http://{dead}");
    assert_eq!(bench.hub.refresh(&super::repo("org/model")).unwrap(), path);
    let error = bench.fetch("org/model@refs/pr/1").unwrap_err().to_string();
    assert!(error.contains(&dead.to_string()) && error.contains("after 3 attempts"), "{error}");
    bench.hub.settings.endpoint = "huggingface.co".to_owned();
    let error = bench.fetch("org/model@v3").unwrap_err().to_string();
    assert!(error.contains("HF_ENDPOINT 'huggingface.co' is not"), "{error}");
}
