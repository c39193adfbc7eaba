//! Rotary position embedding (Su et al. 2021): the tables, from the model's scaled frequencies.

use trireme_checkpoint::{ModelConfig, Rotation};

use crate::device::Device;

/// Cosines and sines of positions, for the layers of a model.
pub struct RotaryTables<D: Device> {
    full: D::Rotary,
    /// Where layers with a sliding window rotate by other frequencies.
    sliding: Option<D::Rotary>,
}

impl<D: Device> RotaryTables<D> {
    /// Of positions `0 .. positions`.
    pub fn new(device: &D, model: &ModelConfig, positions: usize) -> Self {
        let table = |rotation: &Rotation| table(device, rotation, positions);
        Self {
            full: table(&model.rotation(positions)),
            sliding: model.sliding_rotation().as_ref().map(table),
        }
    }

    /// For a layer with such a window.
    pub fn of(&self, window: Option<usize>) -> &D::Rotary {
        match (&self.sliding, window) {
            (Some(sliding), Some(_)) => sliding,
            _ => &self.full,
        }
    }
}

/// Computed in f64 and rounded once.
fn table<D: Device>(device: &D, rotation: &Rotation, positions: usize) -> D::Rotary {
    let Rotation { inverse_frequencies: frequencies, magnitude } = rotation;
    let angles = || {
        (0..positions).flat_map(|position| {
            frequencies.iter().map(move |frequency| position as f64 * frequency)
        })
    };
    let cos = angles().map(|angle| (angle.cos() * magnitude) as f32).collect();
    let sin = angles().map(|angle| (angle.sin() * magnitude) as f32).collect();
    device.rotary(cos, sin, frequencies.len())
}
