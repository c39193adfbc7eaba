//! Every broken checkpoint of the fixtures is refused with a message that names what is wrong.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use crate::{Checkpoint, CheckpointError, OpenOptions, fixtures::fixture};

#[derive(serde::Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    dir: String,
    what: String,
    good_loader: String,
    message_should_mention: Vec<String>,
}

/// What a server does with a checkpoint before it serves.
fn load(path: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open_with(path, OpenOptions { scan_values: true })?;
    checkpoint.text().map(|_| ())
}

/// Further words of the message, where cases.json asks for none or for the file alone.
fn also_mentions(dir: &str) -> &'static [&'static str] {
    match dir {
        "truncated-data" => &["truncated"],
        "truncated-header" | "header-length-huge" => &["length of the header", "at most"],
        "header-not-json" => &["header", "JSON"],
        "zero-bytes" => &["empty file"],
        "lfs-pointer" => &["Git LFS pointer"],
        "offsets-overlap" => &["overlap"],
        "integer-dtype" => &["F32, F16 or BF16"],
        "nan-weight" => &["NaN", "finite"],
        "inf-weight" => &["inf", "finite"],
        "unknown-architecture" => &["architectures", "LlamaForCausalLM"],
        "unknown-rope-type" => &["rope_scaling.rope_type", "llama3"],
        "unknown-activation" => &["hidden_act", "silu"],
        "config-not-json" => &["line", "column"],
        "config-missing-field" => &["nothing"],
        "no-weights" => &["weights", "*.safetensors", "*.gguf"],
        "empty-dir" => &["model", "*.safetensors", "*.gguf"],
        "no-tokenizer" => &["tokenizer.json"],
        "tokenizer-too-large" => &["319", "300", "tokenizer.json"],
        "evil-pickle-zip" => &["model.pth", "posix.system", "not allowed"],
        "evil-pickle-eval" => &["model.pth", "__builtin__.eval", "not allowed"],
        "evil-pickle-legacy" => &["posix.system", "not allowed"],
        "pth-truncated" => &["zip archive", "truncated"],
        "pth-storage-too-small" => &["[16, 24]", "in its storage"],
        "pth-missing-key" => &["layers.1.attention.wq.weight", "missing"],
        "gguf-bad-magic" => &["magic", "GGUF", "GGML"],
        "gguf-version-1" => &["version", "2 or 3", "found 1"],
        "gguf-no-metadata" => &["general.architecture"],
        "gguf-huge-count" => &["number of tensors", "1125899906842624"],
        "gguf-huge-string" => &["metadata key", "1125899906842624"],
        _ => &[],
    }
}

fn check(case: &Case) {
    let folder = fixture("broken").join(&case.dir);
    let empty = tempfile::tempdir().unwrap();
    // Git keeps no empty folder.
    let folder = if case.dir == "empty-dir" { empty.path() } else { folder.as_path() };
    let start = Instant::now();
    let result = load(folder);
    assert!(start.elapsed() < Duration::from_secs(1), "{} took {:?}", case.dir, start.elapsed());
    if case.good_loader.starts_with("loads") {
        assert!(result.is_ok(), "{}: {:?}", case.dir, result.err());
        return;
    }
    let Err(error) = result else { panic!("{} was loaded: {}", case.dir, case.what) };
    let message = error.to_string();
    let named = case.message_should_mention.iter().map(String::as_str);
    for part in named.chain(also_mentions(&case.dir).iter().copied()) {
        assert!(message.contains(part), "{}: `{part}` is not in: {message}", case.dir);
    }
}

#[test]
fn broken_checkpoints_are_refused_and_named() {
    let text = fs::read_to_string(fixture("broken/cases.json")).unwrap();
    let Cases { cases } = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 48);
    cases.iter().for_each(check);
}

/// Without a scan, a value that is no number is refused by who reads it, and only there.
#[test]
fn values_are_checked_as_they_are_read() {
    for dir in ["nan-weight", "inf-weight"] {
        let checkpoint = Checkpoint::open(&fixture("broken").join(dir)).unwrap();
        let name = "model.layers.1.mlp.down_proj.weight";
        let read = |name: &str| checkpoint.for_each_row(name, 0..16, 0..24, &mut |_, _| {});
        let stored = checkpoint.for_each_stored_row(name, 0..16, 0..24, &mut |_, _| {});
        for error in [read(name).unwrap_err(), stored.unwrap_err()] {
            assert!(error.to_string().contains(name), "{error}");
        }
        read("model.layers.0.mlp.down_proj.weight").unwrap();
    }
}

/// A safetensors file of `header` and `data` bytes of zeros, beside ok-micro's config.
fn open_header(header: &str, data: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let config = "broken/ok-micro/config.json";
    fs::copy(fixture(config), folder.path().join("config.json")).unwrap();
    let length = (header.len() as u64).to_le_bytes();
    let bytes = [&length, header.as_bytes(), &vec![0; data]].concat();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    load(folder.path()).unwrap_err().to_string()
}

#[test]
fn hostile_safetensors_headers_are_refused() {
    let huge = u64::MAX;
    for (header, parts) in [
        ("[]".to_owned(), ["model.safetensors", "map"]),
        (r#"{"w": 1}"#.to_owned(), ["`w`", "dtype"]),
        (
            r#"{"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}"#.to_owned(),
            ["`w`", "F8_E4M3"],
        ),
        (
            r#"{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}"#.to_owned(),
            ["`w`", "shape"],
        ),
        (
            r#"{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}"#.to_owned(),
            ["`w`", "[4, 0]"],
        ),
        (
            r#"{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}"#.to_owned(),
            ["`w`", "data_offsets"],
        ),
        (
            format!(
                r#"{{"w": {{"dtype": "F32", "shape": [{huge}, {huge}], "data_offsets": [0, 4]}}}}"#
            ),
            ["`w`", "too many"],
        ),
        (
            format!(
                r#"{{"w": {{"dtype": "F32", "shape": [0], "data_offsets": [{huge}, {huge}]}}}}"#
            ),
            ["`w`", "data_offsets"],
        ),
        (
            r#"{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
             "w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}"#
                .to_owned(),
            ["`w`", "twice"],
        ),
        (
            r#"{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#.to_owned(),
            ["data", "8 bytes"],
        ),
        ("{}".to_owned(), ["data", "8 bytes"]),
    ] {
        let message = open_header(&header, 8);
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    }
    assert!(open_header("{}", 0).contains("model.embed_tokens.weight"), "nothing is there");
}

/// What the safetensors library alone lets through: two equal entries, of which it keeps one, and
/// sizes whose sum overflows, on which it panics where overflow is checked.
#[test]
fn safetensors_headers_that_the_library_takes_are_refused() {
    let entry = r#""w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}"#;
    let size = (1u64 << 61) - 4;
    let tensors = (0..9).map(|i| {
        let offsets = [i * size, (i + 1).min(8) * size + i / 8 * 24];
        let count = (offsets[1] - offsets[0]) / 4;
        format!(r#""w{i}": {{"dtype": "F32", "shape": [{count}], "data_offsets": {offsets:?}}}"#)
    });
    let sums = format!("{{{}}}", tensors.collect::<Vec<_>>().join(", "));
    for (header, parts) in [
        (format!("{{{entry}, {entry}}}"), ["`w`", "twice"]),
        (sums, ["`w0`", "within the file's 8 bytes"]),
    ] {
        let message = open_header(&header, 8);
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    }
}

/// A safetensors file with one more tensor of zeros, f32 and of `shape`.
fn with_tensor(file: &[u8], name: &str, shape: &[usize]) -> Vec<u8> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (header, data) = file[8..].split_at(length);
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(header).unwrap();
    let bytes = 4 * shape.iter().product::<usize>();
    let offsets = [data.len(), data.len() + bytes];
    let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
    header.insert(name.to_owned(), entry);
    let header = serde_json::to_vec(&header).unwrap();
    let length = (header.len() as u64).to_le_bytes();
    [&length, header.as_slice(), data, &vec![0; bytes]].concat()
}

#[test]
fn what_no_model_reads_is_dropped() {
    let inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq";
    for (model, tensor, shape, loads) in [
        ("models/smollm-like", inv_freq, [8, 1], true),
        ("models/llama3-like", inv_freq, [4, 1], true),
        // A tied head is the embedding, whatever else the file holds under its name.
        ("models/smollm-like", "lm_head.weight", [512, 144], true),
        ("models/smollm-like", "lm_head.bias", [512, 1], false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json"] {
            fs::copy(fixture(model).join(file), folder.path().join(file)).unwrap();
        }
        let file = fs::read(fixture(model).join("model.safetensors")).unwrap();
        let file = with_tensor(&file, tensor, &shape);
        fs::write(folder.path().join("model.safetensors"), file).unwrap();
        match load(folder.path()) {
            Ok(()) => assert!(loads, "{tensor} of {model}"),
            Err(error) => assert!(!loads && error.to_string().contains(tensor), "{error}"),
        }
    }
}

/// A counter-based stream of numbers below `end`.
fn numbers(seed: u64, end: usize) -> impl Iterator<Item = usize> {
    (0u64..).map(move |i| {
        let z = (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z ^ (z >> 32)) % end as u64) as usize
    })
}

/// Whatever the bytes say, the answer is a checkpoint or an error: no panic, no endless loop.
#[test]
fn damaged_bytes_never_panic() {
    for (source, name, from_end, least) in [
        ("broken/ok-micro/model.safetensors", "model.safetensors", false, 100),
        ("formats/gguf-f16/llama3-like.F16.gguf", "model.gguf", false, 100),
        ("broken/ok-micro/config.json", "config.json", false, 100),
        ("formats/torchchat-single/model.pth", "model.pth", false, 100),
        // The archive's list of files.
        ("formats/torchchat-single/model.pth", "model.pth", true, 30),
        ("broken/legacy-torch-format/model.pth", "model.pth", false, 100),
        ("formats/torchchat-single/params.json", "params.json", false, 100),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(fixture("broken/ok-micro").join(file), folder.path().join(file)).unwrap();
        }
        let old = "broken/legacy-torch-format";
        let meta = if source.starts_with(old) { old } else { "formats/torchchat-single" };
        for file in ["params.json", "model.pth"] {
            fs::copy(fixture(meta).join(file), folder.path().join(file)).unwrap();
        }
        let path = folder.path().join(name);
        let bytes = fs::read(fixture(source)).unwrap();
        let opened = match name {
            "config.json" => folder.path().to_owned(),
            "params.json" => folder.path().join("model.pth"),
            _ => path.clone(),
        };
        fs::write(&path, &bytes).unwrap();
        load(&opened).unwrap_or_else(|error| panic!("{name} is sound: {error}"));
        let mut refused = 0;
        for seed in 0..300 {
            let mut damaged = bytes.clone();
            // Headers are what a reader believes; weights are any bytes.
            let reach = bytes.len().min(1200);
            let places = numbers(seed, reach).zip(numbers(!seed, 256));
            for (place, value) in places.take(1 + seed as usize % 3) {
                let place = if from_end { bytes.len() - 1 - place } else { place };
                damaged[place] = value as u8;
            }
            fs::write(&path, damaged).unwrap();
            refused += usize::from(load(&opened).is_err());
        }
        assert!(refused > least, "{source}: {refused} of 300 were refused");
    }
}

#[test]
fn a_safetensors_file_cut_anywhere_is_refused() {
    let bytes = fs::read(fixture("broken/ok-micro/model.safetensors")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture("broken/ok-micro/config.json"), folder.path().join("config.json")).unwrap();
    let path = folder.path().join("model.safetensors");
    for length in (0..bytes.len()).step_by(97).chain(0..20) {
        fs::write(&path, &bytes[..length]).unwrap();
        let message = load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("model.safetensors"), "{length}: {message}");
    }
}

/// The same weights in another form, or an adapter, beside the whole model.
#[test]
fn the_usual_file_is_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(fixture("broken/ok-micro").join(file), folder.path().join(file)).unwrap();
    }
    for other in ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"] {
        fs::write(folder.path().join(other), "not read").unwrap();
    }
    load(folder.path()).unwrap();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(load(folder.path()).is_err());
}

#[test]
fn other_files_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    for (name, content, part) in [
        ("a.bin", &b"PK\x03\x04"[..], "zip archive"),
        ("b.pt", b"\x80\x02}", "truncated"),
        ("c.pth", b"\x80\x02}.", "a pickle of a dict"),
        ("d.onnx", b"\x08\x07\x12\x07pytorch", "neither safetensors, PyTorch nor GGUF"),
        ("e", b"", "neither safetensors, PyTorch nor GGUF"),
        ("f.safetensors", b"", "empty file"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        // A config, so that what is refused is the file.
        fs::copy(fixture("broken/ok-micro/config.json"), folder.path().join("config.json"))
            .unwrap();
        let message = load(&path).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains(name), "{name}: {message}");
    }
    let message = load(&folder.path().join("absent")).unwrap_err().to_string();
    assert!(message.contains("absent"), "{message}");
}
