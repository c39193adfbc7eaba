//! What a rank needs while it loads: its own part of the weights, and little beside. Alone in its
//! process, for what is measured is the process.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use serde_json::{Map, json};
use trireme_checkpoint::Split;
use trireme_kernels::Storage;
use trireme_shard::{
    config::{Backend, Config, Identity, LoadFormat},
    device::cpu::WeightStore,
    server,
    status::Status,
};

/// Of layers: some 10 MB of code, stacks and alignment must be little beside a rank's part.
/// `TRIREME_LOADED_MIB=2048` measures what docs/performance.md tells.
fn checkpoint_mib() -> usize {
    std::env::var("TRIREME_LOADED_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(1024)
}

/// A sparse safetensors file of bf16 zeros, of about so many MiB, beside its config; returns its
/// size.
fn write_checkpoint(folder: &Path, mib: usize) -> u64 {
    let (hidden, mlp, vocab) = (2048, 8192, 32_000);
    let layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * mlp);
    let layers = (mib << 20) / layer_bytes;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    });
    fs::write(folder.join("config.json"), config.to_string()).expect("write the config");
    let (mut header, mut end) = (Map::new(), 0);
    let mut add = |name: String, shape: &[usize]| {
        let (start, bytes) = (end, 2 * shape.iter().product::<usize>());
        end += bytes;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    };
    add("model.embed_tokens.weight".to_owned(), &[vocab, hidden]);
    for layer in 0..layers {
        let mut part = |name: &str, shape: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        };
        for name in ["q", "k", "v", "o"] {
            part(&format!("self_attn.{name}_proj"), &[hidden, hidden]);
        }
        part("mlp.gate_proj", &[mlp, hidden]);
        part("mlp.up_proj", &[mlp, hidden]);
        part("mlp.down_proj", &[hidden, mlp]);
        part("input_layernorm", &[hidden]);
        part("post_attention_layernorm", &[hidden]);
    }
    add("model.norm.weight".to_owned(), &[hidden]);
    add("lm_head.weight".to_owned(), &[vocab, hidden]);
    let header = serde_json::to_vec(&header).expect("a header");
    let mut file = File::create(folder.join("model.safetensors")).expect("create the weights");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("write the header's length");
    file.write_all(&header).expect("write the header");
    let size = (8 + header.len() + end) as u64;
    file.set_len(size).expect("make room for the weights");
    size
}

/// A figure of /proc/self/status in bytes: pages of files count like all others.
fn own_memory(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("read the process's status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a figure");
    let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    kib.parse::<u64>().expect("a number of KiB") << 10
}

/// Loads one rank; the bytes of its weights, and how far its process grew beyond `base`.
fn load(folder: &Path, split: Split, rank: usize, base: u64) -> (u64, u64) {
    // Forgets the highest mark so far (proc_pid_clear_refs(5)).
    fs::write("/proc/self/clear_refs", "5").expect("reset the highest mark");
    let identity = Identity { rank, split, device: "cpu".into(), dtype: "bf16", kv_dtype: "bf16" };
    let config = Config {
        identity,
        model: folder.to_owned(),
        load_format: LoadFormat::Auto,
        seed: 0,
        weights: WeightStore { numbers: Storage::Bf16, keep_blocks: false },
        kv_storage: Storage::Bf16,
        threads: 2,
        socket: PathBuf::new(),
        kv_cache_memory: None,
        backend: Backend::Cpu,
    };
    let status = Status::default();
    let runner = server::load(&config, &status).expect("load");
    let peak = own_memory("VmHWM").saturating_sub(base);
    let weights = status.bytes_loaded.load(std::sync::atomic::Ordering::Relaxed);
    drop(runner);
    (weights, peak)
}

#[test]
fn a_rank_holds_its_own_weights_and_little_beside() {
    let folder = tempfile::tempdir().expect("a folder");
    let base = own_memory("VmRSS");
    let size = write_checkpoint(folder.path(), checkpoint_mib());
    let mut held = 0;
    for (split, ranks) in [(Split { tp: 1, pp: 4 }, 0..4), (Split { tp: 4, pp: 1 }, 1..2)] {
        for rank in ranks {
            let (weights, peak) = load(folder.path(), split, rank, base);
            println!("{split:?} rank {rank}: weights {weights} bytes, grew by {peak} at most");
            assert!(peak >= weights, "the weights are in memory: {peak} < {weights}");
            assert!(peak < weights * 11 / 10, "{split:?} rank {rank}: {peak} for {weights}");
            held += if split.pp == 4 { weights } else { 0 };
        }
    }
    assert!(held > size * 9 / 10, "the stages hold the model: {held} of {size} bytes");
}
