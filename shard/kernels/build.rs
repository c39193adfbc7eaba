//! Compiles the CUDA kernels, one fat binary a file: machine code for the architectures in use and PTX
//! for later ones. Needs `nvcc` alone: neither a GPU nor the CUDA libraries.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
};

/// Ampere (A100; A10, RTX 30), Ada (L4, RTX 40), Hopper (H100, H200).
const ARCHITECTURES: &str = "80,86,89,90a";
const SOURCES: [&str; 8] = [
    "rows",
    "linear",
    "attention_decode",
    "attention_prefill",
    "attention_prefill_hopper",
    "attention_plain",
    "sampling",
    "experts",
];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=cuda");
    for variable in ["TRIREME_CUDA_ARCHITECTURES", "CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    if env::var("TRIREME_CUDA_ARCHITECTURES").is_ok_and(|given| given == "none") {
        return without_kernels(&out);
    }
    let nvcc = nvcc();
    let failures: Vec<String> = thread::scope(|scope| {
        let compile = |source| {
            scope.spawn({
                let (nvcc, out) = (&nvcc, &out);
                move || compile(nvcc, source, out)
            })
        };
        let running: Vec<_> = SOURCES.into_iter().map(compile).collect();
        running
            .into_iter()
            .filter_map(|one| one.join().unwrap_or(Some("a thread died".into())))
            .collect()
    });
    for failure in &failures {
        println!("cargo::error={}", failure.replace('\n', " "));
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Lets the Rust code be checked where there is no nvcc: what is built so finds no kernel.
fn without_kernels(out: &Path) -> ExitCode {
    let empty = |source: &str| fs::write(out.join(format!("{source}.fatbin")), []);
    match SOURCES.into_iter().try_for_each(empty) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={}: {error}", out.display());
            ExitCode::FAILURE
        }
    }
}

/// The compiler of `CUDA_HOME` or `CUDA_PATH`, else the one on `PATH`.
fn nvcc() -> PathBuf {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let found = homes.map(|home| Path::new(&home).join("bin/nvcc")).find(|path| path.exists());
    found.unwrap_or_else(|| PathBuf::from("nvcc"))
}

/// What went wrong, if something did.
fn compile(nvcc: &Path, source: &str, out: &Path) -> Option<String> {
    let given = env::var("TRIREME_CUDA_ARCHITECTURES").unwrap_or(ARCHITECTURES.into());
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17"]);
    for architecture in given.split(',') {
        command.arg("-gencode").arg(format!("arch=compute_{architecture},code=sm_{architecture}"));
    }
    command.args(["-gencode", "arch=compute_80,code=compute_80"]);
    command.arg("-o").arg(out.join(format!("{source}.fatbin"))).arg(format!("cuda/{source}.cu"));
    match command.output() {
        Err(error) => Some(format!(
            "{}: {error}; the cuda feature needs nvcc: install a CUDA toolkit (12.4 or newer) or run \
             scripts/cuda-toolchain, and set CUDA_HOME",
            nvcc.display()
        )),
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!("{source}.cu: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
