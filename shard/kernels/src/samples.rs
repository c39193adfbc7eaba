//! Numbers for tests.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::matrix::{Matrix, Storage};

/// `len` values in `-1 .. 1`, the same for the same seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A matrix of noise.
pub(crate) fn matrix(outputs: usize, inputs: usize, storage: Storage, seed: u64) -> Matrix {
    let mut w = Matrix::new(outputs, inputs, storage);
    for output in 0..outputs {
        w.set_row(output, &noise(inputs, seed + output as u64));
    }
    w
}

/// The rows of a matrix, as stored.
pub(crate) fn dense(w: &Matrix) -> Vec<f32> {
    let mut all = vec![f32::NAN; w.outputs() * w.inputs()];
    for (output, row) in all.chunks_exact_mut(w.inputs().max(1)).enumerate() {
        w.row(output, row);
    }
    all
}

/// Largest difference; a NaN counts as infinite.
pub(crate) fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let each = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    each.fold(0.0, |most, x| if x.is_nan() { f32::INFINITY } else { most.max(x) })
}

/// Panics where two results differ in any bit.
pub(crate) fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: {got} for {want} at {i}");
    }
}
