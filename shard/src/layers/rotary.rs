//! Rotary position embedding (Su et al. 2021): the tables, from the model's scaled frequencies.

use trireme_checkpoint::ModelConfig;

use crate::device::Device;

/// Cosines and sines of positions `0 .. positions`, computed in f64 and rounded once.
pub fn table<D: Device>(device: &D, model: &ModelConfig, positions: usize) -> D::Rotary {
    let frequencies = model.inverse_frequencies();
    let angles = || {
        (0..positions).flat_map(|position| {
            frequencies.iter().map(move |frequency| position as f64 * frequency)
        })
    };
    let cos = angles().map(|angle| angle.cos() as f32).collect();
    let sin = angles().map(|angle| angle.sin() as f32).collect();
    device.rotary(cos, sin, frequencies.len())
}
