//! Compiles the contracts without protoc: protox parses them, tonic-prost-build writes the code.

use std::{env, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protos = ["proto/trireme/generate/v1/generate.proto", "proto/trireme/shard/v1/shard.proto"];
    for proto in protos {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(protos, ["proto"])?;
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    // Clients are told of their own API alone.
    let public = protox::compile(&protos[..1], ["proto"])?;
    let encoded = prost::Message::encode_to_vec(&public);
    fs::write(out_dir.join("generate_descriptor.bin"), encoded)?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
