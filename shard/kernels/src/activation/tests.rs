use super::*;
use crate::samples::{assert_same_bits, distance, noise};

const BOTH: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let u = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
    }
}

fn reference(activation: Activation, gate_up: &[f32], width: usize) -> Vec<f32> {
    let row = |row: &[f32]| -> Vec<f32> {
        let (gate, up) = row.split_at(width);
        let value = |g: f32, u: f32| (activate(activation, g.into()) * f64::from(u)) as f32;
        gate.iter().zip(up).map(|(&g, &u)| value(g, u)).collect()
    };
    gate_up.chunks_exact(2 * width).flat_map(row).collect()
}

fn check(isa: Isa, team: &Team, activation: Activation, rows: usize, width: usize) {
    let gate_up: Vec<f32> = noise(rows * 2 * width, 8).iter().map(|x| x * 9.0).collect();
    let mut out = vec![f32::NAN; rows * width];
    gate_mul_on(isa, team, activation, &gate_up, width, &mut out);
    // Values reach 81.
    let what = format!("{} {activation:?} {rows} x {width}", isa.name());
    assert!(distance(&out, &reference(activation, &gate_up, width)) < 4e-5, "{what}");
    let mut alone = vec![f32::NAN; rows * width];
    for (x, out) in gate_up.chunks_exact(2 * width).zip(alone.chunks_exact_mut(width)) {
        gate_mul_on(isa, &Team::new(1), activation, x, width, out);
    }
    assert_same_bits(&out, &alone, &what);
}

#[test]
fn agrees_with_f64_whatever_the_batch() {
    for threads in [1, 2, 3] {
        let team = Team::new(threads);
        for isa in Isa::all() {
            for (rows, width) in [(1, 1), (1, 16), (3, 33), (9, 1536), (2, 8191)] {
                for activation in BOTH {
                    check(isa, &team, activation, rows, width);
                }
            }
        }
    }
}

#[test]
fn extreme_gates_saturate() {
    for (isa, activation) in Isa::all().into_iter().flat_map(|isa| BOTH.map(|it| (isa, it))) {
        let mut out = [f32::NAN; 4];
        let gate_up = [-1000.0, 1000.0, -0.0, f32::NAN, 2.0, 2.0, 2.0, 2.0];
        gate_mul_on(isa, &Team::new(1), activation, &gate_up, 4, &mut out);
        assert!(out[0].abs() < 1e-30 && out[1] == 2000.0 && out[2] == 0.0 && out[3].is_nan());
    }
}
