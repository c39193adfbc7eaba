use super::*;
use crate::samples::{assert_same_bits, distance, noise};

fn check(isa: Isa, team: &Team, rows: usize, width: usize) {
    let (mut residual, delta) = (noise(rows * width, 1), noise(rows * width, 2));
    let weight = noise(width, 3);
    let eps = 1e-5;
    let reference = |x: &[f32]| -> Vec<f32> {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(&weight).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32).collect()
    };
    let name = isa.name();
    let mut out = vec![f32::NAN; rows * width];
    rms_norm_on(isa, team, &residual, &weight, eps, &mut out);
    let want: Vec<f32> = residual.chunks_exact(width).flat_map(reference).collect();
    assert!(distance(&out, &want) < 2e-6, "{name} {rows} x {width}");

    let sum: Vec<f32> = residual.iter().zip(&delta).map(|(a, b)| a + b).collect();
    let mut out = vec![f32::NAN; rows * width];
    add_rms_norm_on(isa, team, (&mut residual, &delta), &weight, eps, &mut out);
    assert_eq!(residual, sum);
    let want: Vec<f32> = sum.chunks_exact(width).flat_map(reference).collect();
    assert!(distance(&out, &want) < 2e-6, "{name} {rows} x {width} after adding");
}

#[test]
fn agrees_with_f64() {
    let team = Team::new(3);
    for isa in Isa::all() {
        for (rows, width) in [(0, 8), (1, 1), (1, 17), (3, 64), (5, 576), (40, 579), (7, 4096)] {
            check(isa, &team, rows, width);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_the_threads() {
    let (rows, width) = (50, 577);
    let (x, weight) = (noise(rows * width, 4), noise(width, 5));
    for isa in Isa::all() {
        let mut alone = vec![f32::NAN; rows * width];
        for (x, out) in x.chunks_exact(width).zip(alone.chunks_exact_mut(width)) {
            rms_norm_on(isa, &Team::new(1), x, &weight, 1e-6, out);
        }
        for threads in [1, 2, 5] {
            let mut out = vec![f32::NAN; rows * width];
            rms_norm_on(isa, &Team::new(threads), &x, &weight, 1e-6, &mut out);
            assert_same_bits(&out, &alone, isa.name());
        }
    }
}

#[test]
fn heads_are_normalised_in_place() {
    let layout = HeadLayout { heads: 3, kv_heads: 2, head_dim: 24, kv_of_head: vec![0, 0, 1] };
    let (rows, dim, width) = (70, layout.head_dim, layout.row_len());
    let qkv = noise(rows * width, 6);
    let (query, key) = (noise(dim, 7), noise(dim, 8));
    for (isa, threads) in Isa::all().into_iter().flat_map(|isa| [1, 3].map(|it| (isa, it))) {
        let mut found = qkv.clone();
        let team = Team::new(threads);
        rms_norm_heads_on(isa, &team, &mut found, &layout, (&query, &key), 1e-6);
        let mut expected = qkv.clone();
        for (head, x) in expected.chunks_exact_mut(dim).enumerate() {
            let weight = match head % (width / dim) {
                0..3 => &query,
                3..5 => &key,
                _ => continue,
            };
            let alone = x.to_vec();
            rms_norm_on(isa, &Team::new(1), &alone, weight, 1e-6, x);
        }
        assert_same_bits(&found, &expected, isa.name());
    }
}

#[test]
#[should_panic(expected = "7 values are not rows of 4")]
fn a_wrong_shape_is_refused() {
    rms_norm(&Team::new(1), &[0.0; 7], &[0.0; 4], 1e-5, &mut [0.0; 7]);
}
