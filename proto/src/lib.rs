//! Trireme's gRPC contracts: generated code, no logic.
//!
//! - [`generate::v1`]: the public API that clients speak to the router.
//! - [`shard::v1`]: the internal API that the router speaks to each shard process.

#![allow(clippy::all, clippy::pedantic, missing_docs)]

/// The public API.
pub mod generate {
    pub mod v1 {
        tonic::include_proto!("trireme.generate.v1");
    }
}

/// The API between router and shards.
pub mod shard {
    pub mod v1 {
        tonic::include_proto!("trireme.shard.v1");
    }
}

/// The encoded descriptors of the public API, for server reflection.
pub const GENERATE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/generate_descriptor.bin"));
