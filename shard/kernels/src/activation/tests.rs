use super::*;
use crate::samples::{assert_same_bits, distance, noise};

fn reference(gate_up: &[f32], width: usize) -> Vec<f32> {
    let row = |row: &[f32]| -> Vec<f32> {
        let (gate, up) = row.split_at(width);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        gate.iter().zip(up).map(|(g, u)| (silu(f64::from(*g)) * f64::from(*u)) as f32).collect()
    };
    gate_up.chunks_exact(2 * width).flat_map(row).collect()
}

fn check(isa: Isa, team: &Team, rows: usize, width: usize) {
    let gate_up: Vec<f32> = noise(rows * 2 * width, 8).iter().map(|x| x * 9.0).collect();
    let mut out = vec![f32::NAN; rows * width];
    silu_mul_on(isa, team, &gate_up, width, &mut out);
    // Values reach 81.
    assert!(distance(&out, &reference(&gate_up, width)) < 4e-5, "{} {rows} x {width}", isa.name());
    let mut alone = vec![f32::NAN; rows * width];
    for (x, out) in gate_up.chunks_exact(2 * width).zip(alone.chunks_exact_mut(width)) {
        silu_mul_on(isa, &Team::new(1), x, width, out);
    }
    assert_same_bits(&out, &alone, isa.name());
}

#[test]
fn agrees_with_f64_whatever_the_batch() {
    for threads in [1, 2, 3] {
        let team = Team::new(threads);
        for isa in Isa::all() {
            for (rows, width) in [(1, 1), (1, 16), (3, 33), (9, 1536), (2, 8191)] {
                check(isa, &team, rows, width);
            }
        }
    }
}

#[test]
fn extreme_gates_saturate() {
    for isa in Isa::all() {
        let mut out = [f32::NAN; 4];
        let gate_up = [-1000.0, 1000.0, -0.0, f32::NAN, 2.0, 2.0, 2.0, 2.0];
        silu_mul_on(isa, &Team::new(1), &gate_up, 4, &mut out);
        assert!(out[0].abs() < 1e-30 && out[1] == 2000.0 && out[2] == 0.0 && out[3].is_nan());
    }
}
