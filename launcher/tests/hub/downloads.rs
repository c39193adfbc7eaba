//! What is fetched, what is not, and where it lies afterwards.

use std::{fs, thread};

use trireme_launcher::model_store::HubError;

use super::{
    Bench, noise, repo,
    server::{COMMIT, HubServer, NEXT_COMMIT, etag},
};

const INDEX: &str = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

fn indexed() -> HubServer {
    HubServer::start(&[
        ("README.md", b"read me".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("consolidated.safetensors", noise(200_000, 9)),
        ("model-1.safetensors", noise(300_000, 1)),
        ("model-2.safetensors", noise(150_000, 2)),
        ("model.safetensors.index.json", INDEX.as_bytes().to_vec()),
        ("onnx/model.onnx", noise(5000, 3)),
        ("pytorch_model.bin", noise(5000, 4)),
        ("tokenizer.json", b"{\"version\": \"1.0\"}".to_vec()),
    ])
}

#[test]
fn only_what_is_needed_comes_and_lies_as_hugging_face_lays_it() {
    for detailed in [true, false] {
        let server = indexed();
        server.state().detailed = detailed;
        let bench = Bench::new(&server);
        let path = bench.fetch("org/model").unwrap();
        assert!(path.ends_with(format!("models--org--model/snapshots/{COMMIT}")), "{path:?}");
        let snapshot = format!("snapshots/{COMMIT}");
        let files = [
            "config.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        assert_eq!(bench.names(&snapshot), files, "detailed: {detailed}");
        let state = server.state();
        for file in files {
            let bytes = &state.files[file];
            assert_eq!(&fs::read(path.join(file)).unwrap(), bytes, "{file}");
            let link = fs::read_link(path.join(file)).unwrap();
            assert_eq!(link.to_str().unwrap(), format!("../../blobs/{}", etag(bytes)), "{file}");
        }
        drop(state);
        assert_eq!(bench.names("blobs").len(), 5);
        let reference = bench.cache().join("models--org--model/refs/main");
        assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
        // What is here is neither asked for nor fetched again.
        server.state().seen.clear();
        assert_eq!(bench.fetch("org/model").unwrap(), path);
        assert_eq!(bench.fetch(&format!("org/model@{COMMIT}")).unwrap(), path);
        assert!(server.state().seen.is_empty());
    }
}

#[test]
fn a_file_that_is_here_is_not_fetched_again_for_a_new_commit() {
    let server = indexed();
    let bench = Bench::new(&server);
    let old = bench.fetch("org/model").unwrap();
    {
        let mut state = server.state();
        state.commit = NEXT_COMMIT;
        state.files.insert("model-2.safetensors".to_owned(), noise(150_000, 22));
        state.seen.clear();
    }
    assert_eq!(bench.fetch("org/model").unwrap(), old, "serve takes what is here");
    assert!(server.state().seen.is_empty());
    let new = bench.hub.refresh(&repo("org/model")).unwrap();
    assert!(new.ends_with(NEXT_COMMIT), "{new:?}");
    let paths: Vec<_> = server.downloads().into_iter().map(|seen| seen.path).collect();
    assert_eq!(paths.len(), 2, "{paths:?}"); // the Hub's redirect, then the storage host
    assert!(paths[0].contains("model-2.safetensors"), "{paths:?}");
    assert_eq!(bench.fetch("org/model").unwrap(), new);
    assert!(old.join("model-1.safetensors").exists());
}

#[test]
fn a_gguf_file_comes_alone() {
    let server = HubServer::start(&[
        ("config.json", b"{}".to_vec()),
        ("m 1.Q4_K_M.gguf", noise(120_000, 1)),
        ("m 1.Q8_0.gguf", noise(110_000, 2)),
    ]);
    let bench = Bench::new(&server);
    let check = |name: &str, want: Result<&str, &str>| match (bench.fetch(name), want) {
        (Ok(path), Ok(end)) => {
            assert!(path.ends_with(end), "{name}: {path:?}");
            let bytes = fs::read(&path).unwrap();
            assert_eq!(bytes, server.state().files[path.file_name().unwrap().to_str().unwrap()]);
        }
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{name}: {error}"),
        (got, want) => panic!("{name}: got {got:?}, want {want:?}"),
    };
    check("org/model", Err("such as org/model:Q4_K_M: m 1.Q4_K_M.gguf, m 1.Q8_0.gguf"));
    check("org/model:Q2_K", Err("no file 'Q2_K'"));
    check("org/model@refs/pr/1:q8_0", Ok("m 1.Q8_0.gguf"));
    assert_eq!(bench.names("blobs").len(), 1);
    assert_eq!(bench.names("refs/refs/pr"), ["1"]);
    check("org/model:m 1.Q4_K_M.gguf", Ok("m 1.Q4_K_M.gguf"));
    check("org/model:Q8_0", Ok("m 1.Q8_0.gguf"));
    check("org/model", Err("several GGUF files"));
}

#[test]
fn the_token_stays_with_the_hub() {
    let server = indexed();
    server.state().token = Some("hf_right");
    let check = |token: Option<&str>, want: Result<(), &str>| {
        let bench = Bench::new(&server);
        let bench = match token {
            Some(token) => bench.with_token(token),
            None => bench,
        };
        match (bench.fetch("org/model"), want) {
            (Ok(_), Ok(())) => {}
            (Err(error), Err(part)) => {
                let error = error.to_string();
                assert!(error.contains(part) && !error.contains("hf_wrong"), "{error}");
            }
            (got, want) => panic!("{token:?}: got {got:?}, want {want:?}"),
        }
    };
    check(None, Err("no token was sent"));
    check(Some("hf_wrong"), Err("has no model 'org/model', or it is private (404"));
    server.state().seen.clear();
    check(Some("hf_right"), Ok(()));
    let state = server.state();
    let (storage, hub): (Vec<_>, Vec<_>) = state.seen.iter().partition(|seen| seen.storage);
    assert_eq!(storage.len(), 2, "two large files");
    assert!(storage.iter().all(|seen| seen.authorization.is_none()), "{storage:?}");
    assert!(hub.iter().all(|seen| seen.authorization.is_some()), "{hub:?}");
}

#[test]
fn offline_means_no_request() {
    let server = indexed();
    let mut bench = Bench::new(&server);
    bench.hub.settings.offline = Some("HF_HUB_OFFLINE");
    let error = bench.fetch("org/model").unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
    assert!(error.to_string().contains("HF_HUB_OFFLINE switches the Hub off"), "{error}");
    assert!(server.state().seen.is_empty());
    bench.hub.settings.offline = None;
    let path = bench.fetch("org/model").unwrap();
    bench.hub.settings.offline = Some("HF_HUB_OFFLINE");
    server.state().seen.clear();
    assert_eq!(bench.fetch("org/model").unwrap(), path);
    assert_eq!(bench.hub.refresh(&repo("org/model")).unwrap(), path);
    assert!(server.state().seen.is_empty());
}

#[test]
fn downloads_of_one_model_at_once_fetch_each_file_once() {
    let server = indexed();
    let bench = Bench::new(&server);
    thread::scope(|scope| {
        let fetch = || bench.fetch("org/model").unwrap();
        let others: Vec<_> = (0..4).map(|_| scope.spawn(fetch)).collect();
        let paths: Vec<_> = others.into_iter().map(|other| other.join().unwrap()).collect();
        assert!(paths.iter().all(|path| *path == paths[0]), "{paths:?}");
    });
    let mut paths: Vec<_> = server.downloads().into_iter().map(|seen| seen.path).collect();
    let count = paths.len();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), count, "a file was fetched twice: {paths:?}");
    assert!(bench.names(".fetching").is_empty());
}
