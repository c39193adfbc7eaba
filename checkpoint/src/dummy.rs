//! Made-up weights: a counter-based generator, so that a value depends on its seed and place alone
//! and a tensor is the same however it is sliced.

use std::ops::Range;

/// Standard deviation of the weights, as of a freshly initialised Llama.
const DEVIATION: f32 = 0.02;

/// The row `row` of matrix `name`, columns `cols`, written to `values`: uniform around 0 with
/// standard deviation 0.02.
pub(crate) fn fill_row(seed: u64, name: &str, row: usize, cols: Range<usize>, values: &mut [f32]) {
    // A uniform variable on [-w, w] deviates by w / sqrt(3).
    const STEP: f32 = DEVIATION * 1.732_050_8 / 8_388_608.0;
    let key = mix(mix(seed ^ name_hash(name)).wrapping_add(row as u64));
    let (low, high) = (key as u32, (key >> 32) as u32);
    // Columns are below 2^24, so 32 bits count them; 24 random bits fill an f32's mantissa. All
    // arithmetic wraps, so that it runs on whole vectors.
    let first = cols.start as u32;
    for (value, i) in values.iter_mut().zip(0u32..) {
        let counter = first.wrapping_add(i).wrapping_mul(0x9E37_79B9);
        let bits = mix32((counter ^ low).wrapping_add(high)) >> 8;
        *value = (bits as i32).wrapping_sub(8_388_608) as f32 * STEP;
    }
}

/// FNV-1a: the name's key must not depend on the process or its version.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A 32-bit bijection with low bias (C. Wellons, "lowbias32").
fn mix32(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(seed: u64, name: &str, row: usize, cols: Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; cols.len()];
        fill_row(seed, name, row, cols, &mut values);
        values
    }

    #[test]
    fn values_depend_on_their_place_alone() {
        let whole = row(7, "a", 3, 0..1000);
        assert_eq!(whole[100..900], row(7, "a", 3, 100..900));
        for other in [row(8, "a", 3, 0..1000), row(7, "b", 3, 0..1000), row(7, "a", 4, 0..1000)] {
            let equal = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(equal < 5, "{equal} of 1000 values are the same");
        }
    }

    #[test]
    fn values_are_spread_as_promised() {
        let values: Vec<f32> = (0..100).flat_map(|i| row(1, "w", i, 0..1000)).collect();
        let count = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        let square = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / count;
        assert!(mean.abs() < 3e-4, "mean {mean}");
        assert!((square.sqrt() - 0.02).abs() < 2e-4, "deviation {}", square.sqrt());
        assert!(values.iter().all(|v| v.abs() <= 0.0347));
    }
}
