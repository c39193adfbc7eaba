//! ggml's quantised blocks, decoded to f32, bit-identical to its `dequantize_row_*` (ggml-quants.c).
//! candle decodes all types but Q8_0 and Q3_K: on those it takes 3.2 and 3.3 times as long as the
//! loops below (decision 005 has the figures), and Q8_0 is the commonest type there is.

use half::f16;

use crate::mapping::{self, Block};

/// Decodes whole blocks by candle, in place: `bytes` holds `values.len()` numbers.
pub(crate) fn decode<B: Block>(bytes: &[u8], values: &mut [f32]) {
    match mapping::blocks::<B>(bytes) {
        Some(blocks) => B::to_float(blocks, values),
        None => decode_copy::<B>(bytes, values),
    }
}

/// A file may align its tensors to less than the f16 or f32 of a block.
fn decode_copy<B: Block>(bytes: &[u8], values: &mut [f32]) {
    const { assert!(align_of::<B>() <= align_of::<u32>()) };
    let mut words = vec![0u32; bytes.len().div_ceil(size_of::<u32>())];
    let copy = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
    copy.copy_from_slice(bytes);
    // `DType::dequantise` gives whole blocks and the copy is aligned, so there are blocks.
    B::to_float(mapping::blocks(copy).unwrap_or_default(), values);
}

/// Decodes blocks of `B` bytes and `N` numbers one by one.
pub(crate) fn each<const B: usize, const N: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: fn(&[u8; B], &mut [f32; N]),
) {
    for (block, values) in bytes.as_chunks::<B>().0.iter().zip(values.as_chunks_mut::<N>().0) {
        decode(block, values);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// `d: f16, qs: [i8; 32]`.
pub(crate) fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (value, &byte) in values.iter_mut().zip(&block[2..]) {
        *value = f32::from(byte as i8) * scale;
    }
}

/// Where group `i` of sixteen 2-bit numbers is: first byte and shift. 128 numbers share 32 bytes.
fn quarter(i: usize) -> (usize, usize) {
    (i / 8 * 32 + i % 2 * 16, i % 8 / 2 * 2)
}

/// `hmask: [u8; 32], qs: [u8; 64], scales: [u8; 12], d: f16`: 2 low bits in `qs`, an absent mask
/// bit subtracts 4, sixteen 6-bit scales around 32.
pub(crate) fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let (mask, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half_at(block, 108);
    for (i, values) in values.chunks_exact_mut(16).enumerate() {
        let low = if i < 8 { scales[i] & 0xF } else { scales[i - 8] >> 4 };
        let high = (scales[8 + i % 4] >> (2 * (i / 4))) & 3;
        let scale = scale * (i32::from(low | (high << 4)) - 32) as f32;
        let (start, shift) = quarter(i);
        let bit = i / 2;
        for (j, value) in values.iter_mut().enumerate() {
            let low = i32::from((quants[start + j] >> shift) & 3);
            let absent = (mask[i % 2 * 16 + j] >> bit) & 1 == 0;
            *value = scale * (low - if absent { 4 } else { 0 }) as f32;
        }
    }
}
