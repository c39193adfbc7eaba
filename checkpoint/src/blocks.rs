//! ggml's quantised blocks, decoded to f32 with ggml's own order of operations, so that values are
//! bit-identical to its `dequantize_row_*` (ggml-quants.c). Layouts are of ggml-common.h.

use half::f16;

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

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// `d: f16, qs: [u8; 16]`; number `j` is in the low, `j + 16` in the high nibble of byte `j`.
pub(crate) fn q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (j, byte) in block[2..].iter().enumerate() {
        values[j] = (i32::from(byte & 0xF) - 8) as f32 * scale;
        values[j + 16] = (i32::from(byte >> 4) - 8) as f32 * scale;
    }
}

/// `d: f16, m: f16, qs: [u8; 16]`.
pub(crate) fn q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (j, byte) in block[4..].iter().enumerate() {
        values[j] = f32::from(byte & 0xF) * scale + min;
        values[j + 16] = f32::from(byte >> 4) * scale + min;
    }
}

/// Fifth bits of numbers `j` and `j + 16`, in place.
fn fifth_bits(high: u32, j: usize) -> (u8, u8) {
    ((((high >> j) << 4) & 0x10) as u8, ((high >> (j + 12)) & 0x10) as u8)
}

/// `d: f16, qh: u32, qs: [u8; 16]`.
pub(crate) fn q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let (scale, high) = (half_at(block, 0), word_at(block, 2));
    for (j, byte) in block[6..].iter().enumerate() {
        let (first, second) = fifth_bits(high, j);
        values[j] = (i32::from((byte & 0xF) | first) - 16) as f32 * scale;
        values[j + 16] = (i32::from((byte >> 4) | second) - 16) as f32 * scale;
    }
}

/// `d: f16, m: f16, qh: u32, qs: [u8; 16]`.
pub(crate) fn q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let (scale, min, high) = (half_at(block, 0), half_at(block, 2), word_at(block, 4));
    for (j, byte) in block[8..].iter().enumerate() {
        let (first, second) = fifth_bits(high, j);
        values[j] = f32::from((byte & 0xF) | first) * scale + min;
        values[j + 16] = f32::from((byte >> 4) | second) * scale + min;
    }
}

/// `d: f16, qs: [i8; 32]`.
pub(crate) fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (value, &byte) in values.iter_mut().zip(&block[2..]) {
        *value = f32::from(byte as i8) * scale;
    }
}

/// `scales: [u8; 16], qs: [u8; 64], d: f16, dmin: f16`: sixteen numbers a scale, whose low nibble
/// scales and whose high nibble shifts.
pub(crate) fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (scale, min) = (half_at(block, 80), half_at(block, 82));
    for (i, values) in values.chunks_exact_mut(16).enumerate() {
        let (scale, min) = (scale * f32::from(scales[i] & 0xF), min * f32::from(scales[i] >> 4));
        let (start, shift) = quarter(i);
        for (value, quant) in values.iter_mut().zip(&quants[start..]) {
            *value = scale * f32::from((quant >> shift) & 3) - min;
        }
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

/// Scale and min number `i` of the eight that Q4_K and Q5_K pack in twelve bytes, 6 bits each.
fn scale_and_min(i: usize, packed: &[u8]) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        let (low, high) = (packed[i + 4], i - 4);
        ((low & 0xF) | ((packed[high] >> 6) << 4), (low >> 4) | ((packed[i] >> 6) << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// `d: f16, dmin: f16, scales: [u8; 12], qs: [u8; 128]`: 32 numbers a scale.
pub(crate) fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (packed, quants) = (&block[4..16], &block[16..]);
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (i, values) in values.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(i, packed);
        let (scale, min, shift) = (d * scale, dmin * min, i % 2 * 4);
        for (value, quant) in values.iter_mut().zip(&quants[i / 2 * 32..]) {
            *value = scale * f32::from((quant >> shift) & 0xF) - min;
        }
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128]`.
pub(crate) fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (packed, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (i, values) in values.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(i, packed);
        let (scale, min, shift) = (d * scale, dmin * min, i % 2 * 4);
        let quants = &quants[i / 2 * 32..];
        for (j, value) in values.iter_mut().enumerate() {
            let fifth = ((high[j] >> i) & 1) << 4;
            *value = scale * f32::from(((quants[j] >> shift) & 0xF) | fifth) - min;
        }
    }
}

/// `ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: f16`: sixteen numbers a scale.
pub(crate) fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (i, values) in values.chunks_exact_mut(32).enumerate() {
        // 128 numbers share 64 low and 32 high bytes; quarter `part` of them has its own shifts.
        let (half, part) = (i / 4, i % 4);
        let low = &low[half * 64 + part % 2 * 32..];
        let high = &high[half * 32..];
        for (j, value) in values.iter_mut().enumerate() {
            let bits = (low[j] >> (part / 2 * 4)) & 0xF | ((high[j] >> (2 * part)) & 3) << 4;
            let scale = f32::from(scales[2 * i + j / 16] as i8);
            *value = d * scale * (i32::from(bits) - 32) as f32;
        }
    }
}

/// `d: f32, qs: [i8; 256], bsums: [i16; 16]`.
pub(crate) fn q8_k(block: &[u8; 292], values: &mut [f32; 256]) {
    let scale = f32::from_bits(word_at(block, 0));
    for (value, &byte) in values.iter_mut().zip(&block[4..260]) {
        *value = scale * f32::from(byte as i8);
    }
}
