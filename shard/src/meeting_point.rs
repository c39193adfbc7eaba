//! What the ranks of an epoch find each other by, besides the name of a shared-memory object.

use crate::config::Identity;
#[cfg(feature = "cuda")]
use trireme_collectives::nccl::{Seat, UniqueId, unique_ids};

/// NCCL's ids of an epoch's groups; empty where ranks need none. The error says why GPUs have none.
#[cfg(feature = "cuda")]
pub fn make(identity: &Identity) -> Result<Vec<Vec<u8>>, String> {
    let Identity { split, device, .. } = identity;
    let count = if device == "cuda" { Seat::ids(split.tp, split.pp) } else { 0 };
    if count == 0 {
        return Ok(Vec::new());
    }
    let ids = unique_ids(count).map_err(|error| error.to_string())?;
    Ok(ids.iter().map(|id| id.as_bytes().to_vec()).collect())
}

/// CPUs need none.
#[cfg(not(feature = "cuda"))]
pub fn make(_identity: &Identity) -> Result<Vec<Vec<u8>>, String> {
    Ok(Vec::new())
}

/// The ids of a Configure.
#[cfg(feature = "cuda")]
pub fn parse(ids: &[Vec<u8>]) -> Result<Vec<UniqueId>, String> {
    let one = |id: &Vec<u8>| {
        UniqueId::from_bytes(id).ok_or_else(|| {
            format!("nccl_unique_ids: {} bytes, but {} make one", id.len(), UniqueId::LEN)
        })
    };
    ids.iter().map(one).collect()
}
