use super::*;
use crate::matrix::Storage;
use crate::samples::{assert_same_bits, dense, matrix, noise};

const STORAGES: [Storage; 2] = [Storage::F32, Storage::Bf16];

fn product(isa: Isa, team: &Team, x: &[f32], w: &Matrix, bias: Option<&[f32]>) -> Vec<f32> {
    let rows = x.len() / w.inputs();
    let mut out = vec![f32::NAN; rows * w.outputs()];
    matmul_on(isa, team, (x, rows), w, bias, &mut out);
    out
}

/// Against sums in f64. Tolerance: half an ulp a step, as a random walk, of the sum of magnitudes.
fn check(isa: Isa, team: &Team, rows: usize, w: &Matrix, bias: Option<&[f32]>) {
    let (outputs, inputs) = (w.outputs(), w.inputs());
    let x = noise(rows * inputs, 77);
    let weights = dense(w);
    let got = product(isa, team, &x, w, bias);
    for (i, got) in got.iter().enumerate() {
        let (row, output) = (i / outputs, i % outputs);
        let bias = bias.map_or(0.0, |bias| f64::from(bias[output]));
        let x = &x[row * inputs..(row + 1) * inputs];
        let w = &weights[output * inputs..(output + 1) * inputs];
        let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (want, size) =
            terms.fold((bias, bias.abs()), |(sum, size), t| (sum + t, size + t.abs()));
        let tolerance = 6e-8 * ((inputs as f64).sqrt() + 2.0) * size;
        let error = (f64::from(*got) - want).abs();
        assert!(error <= tolerance, "{} {rows}x{inputs}x{outputs} at {i}: {error}", isa.name());
    }
}

#[test]
fn agrees_with_f64_on_odd_shapes() {
    let team = Team::new(2);
    for isa in Isa::all() {
        for storage in STORAGES {
            for (outputs, inputs) in [(1, 1), (31, 7), (32, 64), (33, 65), (160, 96), (200, 1601)] {
                let w = matrix(outputs, inputs, storage, 3);
                let bias = noise(outputs, 5);
                for rows in [1, 2, 3, 7, 12, 13, 25] {
                    check(isa, &team, rows, &w, None);
                    check(isa, &team, rows, &w, Some(&bias));
                }
            }
        }
    }
}

#[test]
fn every_height_of_the_tile_is_right() {
    let team = Team::new(1);
    for isa in Isa::all() {
        for storage in STORAGES {
            let w = matrix(40, 37, storage, 9);
            for rows in 1..=26 {
                check(isa, &team, rows, &w, None);
            }
        }
    }
}

/// A row alone on one thread is the measure; everything else must give the same bits.
fn check_invariance(isa: Isa, outputs: usize, inputs: usize, storage: Storage) {
    let w = matrix(outputs, inputs, storage, 21);
    let bias = noise(outputs, 22);
    let x = noise(70 * inputs, 23);
    let one = Team::new(1);
    let alone: Vec<f32> =
        x.chunks_exact(inputs).flat_map(|x| product(isa, &one, x, &w, Some(&bias))).collect();
    for threads in [1, 2, 3, 5] {
        let team = Team::new(threads);
        for rows in [1, 2, 5, 13, 70] {
            let got = product(isa, &team, &x[..rows * inputs], &w, Some(&bias));
            let what = format!("{} {storage:?} {threads} threads, {rows} rows", isa.name());
            assert_same_bits(&got, &alone[..rows * outputs], &what);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_the_threads() {
    for isa in Isa::all() {
        for storage in STORAGES {
            // The second is cut into slices of inputs and groups of rows.
            for (outputs, inputs) in [(300, 129), (77, 2307)] {
                check_invariance(isa, outputs, inputs, storage);
            }
        }
    }
}

#[test]
fn empty_shapes_are_fine() {
    let team = Team::new(2);
    for (rows, inputs, outputs) in [(0, 4, 4), (3, 4, 0), (0, 0, 0)] {
        let w = Matrix::new(outputs, inputs, Storage::F32);
        matmul(&team, &vec![0.0; rows * inputs], rows, &w, None, &mut []);
    }
    // A sum over nothing is the bias.
    for rows in [1, 3] {
        let mut out = vec![f32::NAN; rows * 2];
        let w = Matrix::new(2, 0, Storage::Bf16);
        matmul(&team, &[], rows, &w, Some(&[4.0, 5.0]), &mut out);
        assert_eq!(out, [4.0, 5.0].repeat(rows));
    }
}

#[test]
#[should_panic(expected = "x has 7 values, not 2 rows of 4")]
fn a_wrong_shape_is_refused() {
    let w = Matrix::new(3, 4, Storage::F32);
    matmul(&Team::new(1), &[0.0; 7], 2, &w, None, &mut [0.0; 6]);
}
