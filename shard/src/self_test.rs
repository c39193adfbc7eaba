//! Proves the groups of a new epoch before they carry a model: values, order, and latency.

use std::time::Instant;

use trireme_collectives::CollectiveError;

use crate::{device::Device, weights::Place};

/// All-reduces timed; the mean is reported.
const ROUNDS: usize = 20;

#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error("self-test: {operation} gave {found}, expected {expected}; the group is not sound")]
    Wrong { operation: &'static str, found: String, expected: String },
}

/// Runs on every rank at once. Returns the mean latency of an all-reduce of `width` floats, in µs.
pub fn run<D: Device>(device: &mut D, place: &Place, width: usize) -> Result<f64, SelfTestError> {
    let latency_us = all_reduce(device, place, width)?;
    ring(device, place, width)?;
    device.take_collective_time();
    Ok(latency_us)
}

fn all_reduce<D: Device>(
    device: &mut D,
    place: &Place,
    width: usize,
) -> Result<f64, SelfTestError> {
    let (tp, tp_rank) = (place.split.tp, place.slice.tp_rank);
    let mut buffer = device.buffer(1, width);
    let mine = |index: usize, rank: usize| ((rank + 1) * (index % 97 + 1)) as f32;
    let values: Vec<f32> = (0..width).map(|index| mine(index, tp_rank)).collect();
    device.write(&mut buffer, &values);
    device.all_reduce(&mut buffer, 1)?;
    for (index, found) in device.read(&buffer, 1).into_iter().enumerate() {
        // Small whole numbers: exact in f32 in any order.
        let expected: f32 = (0..tp).map(|rank| mine(index, rank)).sum();
        check("all_reduce", found, expected)?;
    }
    device.write(&mut buffer, &vec![0.0; width]);
    let start = Instant::now();
    for _ in 0..ROUNDS {
        device.all_reduce(&mut buffer, 1)?;
    }
    // What is queued on a GPU is not done yet.
    device.read(&buffer, 1);
    Ok(start.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64)
}

/// Every rank sends floats and bytes to the next one and checks what comes from the one before.
fn ring<D: Device>(device: &mut D, place: &Place, width: usize) -> Result<(), SelfTestError> {
    let (ranks, rank) = (place.ranks(), place.rank);
    if ranks == 1 {
        return Ok(());
    }
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut buffer = device.buffer(1, width);
    device.write(&mut buffer, &vec![rank as f32; width]);
    let mut found = device.buffer(1, width);
    let mut tokens = [0; 2];
    // A GPU's send may wait for its receiver: not all ranks may send first.
    for sends in [rank.is_multiple_of(2), !rank.is_multiple_of(2)] {
        if sends {
            device.send(next, &buffer, 1)?;
            device.send_tokens(next, &[rank as u32, !(rank as u32)])?;
        } else {
            device.recv(previous, &mut found, 1)?;
            device.recv_tokens(previous, &mut tokens)?;
        }
    }
    for found in device.read(&found, 1) {
        check("send", found, previous as f32)?;
    }
    check("send_bytes", tokens, [previous as u32, !(previous as u32)])
}

fn check<T: PartialEq + std::fmt::Debug>(
    operation: &'static str,
    found: T,
    expected: T,
) -> Result<(), SelfTestError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
    Err(SelfTestError::Wrong { operation, found, expected })
}
