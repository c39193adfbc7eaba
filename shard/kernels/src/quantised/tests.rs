//! candle decodes the blocks that the products are held to.

use std::borrow::Cow;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::matmul::matmul_on;
use crate::matrix::{Matrix, Storage};
use crate::samples::{assert_same_bits, noise};
use crate::simd::Isa;
use crate::team::Team;

/// Blocks of random bytes with scales that are finite and small.
fn blocks(block: BlockType, count: usize, seed: u64) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bytes: Vec<u8> = (0..count * block.bytes()).map(|_| rng.random()).collect();
    let places: &[usize] = match block {
        BlockType::Q4_0 | BlockType::Q8_0 => &[0],
        BlockType::Q4_1 | BlockType::Q4K => &[0, 2],
        BlockType::Q6K => &[208],
    };
    for bytes in bytes.chunks_exact_mut(block.bytes()) {
        for &place in places {
            let scale = f16::from_f32(rng.random_range(-0.05..0.05));
            bytes[place..place + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

fn decoded(block: BlockType, bytes: &[u8]) -> Vec<f32> {
    let dtype = match block {
        BlockType::Q4_0 => GgmlDType::Q4_0,
        BlockType::Q4_1 => GgmlDType::Q4_1,
        BlockType::Q8_0 => GgmlDType::Q8_0,
        BlockType::Q4K => GgmlDType::Q4K,
        BlockType::Q6K => GgmlDType::Q6K,
    };
    let numbers = bytes.len() / block.bytes() * block.numbers();
    let storage = QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype).unwrap();
    let tensor = QTensor::new(storage, numbers).unwrap();
    tensor.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap()
}

/// The matrix in blocks, and decoded.
fn pair(block: BlockType, outputs: usize, inputs: usize, seed: u64) -> (Matrix, Matrix) {
    let mut quantised = Matrix::quantised(outputs, inputs, block);
    let mut dense = Matrix::new(outputs, inputs, Storage::F32);
    let bytes = blocks(block, outputs * inputs / block.numbers(), seed);
    for (output, bytes) in bytes.chunks_exact(bytes.len() / outputs).enumerate() {
        quantised.set_blocks(output, bytes);
        dense.set_row(output, &decoded(block, bytes));
    }
    (quantised, dense)
}

fn product(isa: Isa, team: &Team, x: &[f32], w: &Matrix, bias: Option<&[f32]>) -> Vec<f32> {
    let rows = x.len() / w.inputs();
    let mut out = vec![f32::NAN; rows * w.outputs()];
    matmul_on(isa, team, (x, rows), w, bias, &mut out);
    out
}

#[test]
fn rows_are_what_candle_decodes() {
    for block in BlockType::ALL {
        for outputs in [1, 33, 70] {
            let (quantised, dense) = pair(block, outputs, 512, 3);
            for output in 0..outputs {
                let [mut got, mut want] = [vec![f32::NAN; 512], vec![f32::NAN; 512]];
                quantised.row(output, &mut got);
                dense.row(output, &mut want);
                assert_same_bits(&got, &want, &format!("{block:?} row {output}"));
            }
            let ratio = quantised.bytes() as f64 / (outputs.next_multiple_of(32) * 512) as f64;
            assert!(ratio <= if block == BlockType::Q6K { 1.08 } else { 1.0625 }, "{block:?}");
        }
    }
}

/// A row is stored twice: the second time is what counts.
#[test]
fn a_row_may_be_stored_again() {
    for block in BlockType::ALL {
        let (mut quantised, _) = pair(block, 3, 256, 1);
        let bytes = blocks(block, 256 / block.numbers(), 2);
        quantised.set_blocks(1, &bytes);
        let mut got = vec![f32::NAN; 256];
        quantised.row(1, &mut got);
        assert_same_bits(&got, &decoded(block, &bytes), &format!("{block:?}"));
    }
}

/// Bit for bit, on every instruction set, for every height of the tile, however it is shared out.
#[test]
fn products_are_those_of_the_decoded_weights() {
    for block in BlockType::ALL {
        // The last is cut into slices of inputs and groups of rows.
        for (outputs, inputs) in [(1, 256), (77, 512), (300, 2304)] {
            let (quantised, dense) = pair(block, outputs, inputs, 7);
            let bias = noise(outputs, 5);
            for isa in Isa::all() {
                for (threads, rows) in [(1, 1), (2, 1), (2, 2), (1, 7), (3, 25), (2, 70)] {
                    let team = Team::new(threads);
                    let x = noise(rows * inputs, 11);
                    let got = product(isa, &team, &x, &quantised, Some(&bias));
                    let want = product(isa, &team, &x, &dense, Some(&bias));
                    let what = format!("{} {block:?} {rows}x{inputs}x{outputs}", isa.name());
                    assert_same_bits(&got, &want, &what);
                }
            }
        }
    }
}

#[test]
fn every_height_of_the_tile_is_right() {
    let team = Team::new(1);
    for block in BlockType::ALL {
        let (quantised, dense) = pair(block, 40, 256, 9);
        for isa in Isa::all() {
            for rows in 1..=26 {
                let x = noise(rows * 256, 13);
                let got = product(isa, &team, &x, &quantised, None);
                let want = product(isa, &team, &x, &dense, None);
                assert_same_bits(&got, &want, &format!("{} {block:?} {rows}", isa.name()));
            }
        }
    }
}

/// Outputs of each part where they belong, whatever surrounds them.
#[test]
fn stacked_matrices_are_one() {
    let team = Team::new(2);
    let (a, dense_a) = pair(BlockType::Q4K, 33, 256, 1);
    let (b, dense_b) = pair(BlockType::Q6K, 5, 256, 2);
    let mut c = Matrix::new(40, 256, Storage::Bf16);
    for output in 0..40 {
        c.set_row(output, &noise(256, output as u64));
    }
    let parts = [&dense_a, &dense_b, &c];
    let bias = noise(78, 4);
    let x = noise(14 * 256, 3);
    let mut want = vec![f32::NAN; 14 * 78];
    let mut first = 0;
    for part in parts {
        let bias = &bias[first..first + part.outputs()];
        let got = product(Isa::best(), &team, &x, part, Some(bias));
        for (row, got) in got.chunks_exact(part.outputs()).enumerate() {
            want[row * 78 + first..][..got.len()].copy_from_slice(got);
        }
        first += part.outputs();
    }
    let stacked = Matrix::stacked(vec![a, b, c]);
    let got = product(Isa::best(), &team, &x, &stacked, Some(&bias));
    assert_same_bits(&got, &want, "stacked");
    let [mut got, mut want] = [vec![f32::NAN; 256], vec![f32::NAN; 256]];
    stacked.row(37, &mut got);
    dense_b.row(4, &mut want);
    assert_same_bits(&got, &want, "row of the second part");
}

#[test]
#[should_panic(expected = "300 inputs are no whole blocks of 256")]
fn a_torn_block_is_refused() {
    Matrix::quantised(1, 300, BlockType::Q4K);
}

#[test]
#[should_panic(expected = "row of 3 bytes, its blocks have 36")]
fn a_short_row_is_refused() {
    Matrix::quantised(1, 64, BlockType::Q4_0).set_blocks(0, &[0; 3]);
}
