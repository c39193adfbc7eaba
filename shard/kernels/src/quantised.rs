//! Weights in ggml's blocks, as a GGUF file stores them, packed for streaming.
//!
//! Layouts are those of `block_q4_0` and its like in ggml-common.h; values are bit-equal to its
//! `dequantize_row_*`: numbers are small integers, and a value is `number * scale` or
//! `number * scale ± offset`, each operation rounded to f32.

use half::f16;

use crate::buffer::{Buffer, Touch};
use crate::matrix::PANEL;

/// The types that are multiplied without being decoded first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
}

impl BlockType {
    pub const ALL: [Self; 5] = [Self::Q4_0, Self::Q4_1, Self::Q8_0, Self::Q4K, Self::Q6K];

    /// Numbers of one block.
    pub fn numbers(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Numbers that share a scale.
    pub(crate) fn group(self) -> usize {
        if self == Self::Q6K { 16 } else { 32 }
    }

    fn has_nibbles(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q4K)
    }

    /// f16 scales of one block: the scale of its numbers, and that of the offsets.
    fn scales(self) -> usize {
        if matches!(self, Self::Q4_1 | Self::Q4K) { 2 } else { 1 }
    }

    /// Bytes of one group that multiply the scales of its block.
    fn factors(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 0,
            Self::Q4K => 2,
            Self::Q6K => 1,
        }
    }
}

/// One block, taken apart: its numbers, f16 scales and the factors of its groups.
struct Parts {
    numbers: [i8; 256],
    scales: [f16; 2],
    factors: [i8; 16],
}

/// The panels of a matrix. For each panel of 32 outputs:
/// * `numbers`: `[inputs][32]` bytes, or `[inputs / 2][32]` with the even input in the low nibble;
/// * `scales`: `[blocks][scales of a block][32]`;
/// * `factors`: `[groups][factors of a group][32]`.
pub(crate) struct QuantisedPanels {
    pub(crate) block: BlockType,
    pub(crate) inputs: usize,
    pub(crate) numbers: Buffer<u8>,
    pub(crate) scales: Buffer<f16>,
    pub(crate) factors: Buffer<i8>,
}

impl QuantisedPanels {
    pub(crate) fn new(outputs: usize, inputs: usize, block: BlockType) -> Self {
        let unit = block.numbers();
        assert!(inputs.is_multiple_of(unit), "{inputs} inputs are no whole blocks of {unit}");
        let rows = outputs.next_multiple_of(PANEL);
        let numbers = rows * inputs / if block.has_nibbles() { 2 } else { 1 };
        let scales = rows * inputs / unit * block.scales();
        let factors = rows * inputs / block.group() * block.factors();
        Self {
            block,
            inputs,
            numbers: Buffer::zeroed(numbers, Touch::Whole),
            scales: Buffer::zeroed(scales, Touch::Whole),
            factors: Buffer::zeroed(factors, Touch::Whole),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val::<[u8]>(&self.numbers)
            + size_of_val::<[f16]>(&self.scales)
            + size_of_val::<[i8]>(&self.factors)
    }

    /// Places of one panel: (numbers, scales, factors).
    pub(crate) fn strides(&self) -> (usize, usize, usize) {
        let block = self.block;
        let per_byte = if block.has_nibbles() { 2 } else { 1 };
        (
            PANEL * self.inputs / per_byte,
            PANEL * self.inputs / block.numbers() * block.scales(),
            PANEL * self.inputs / block.group() * block.factors(),
        )
    }

    /// Stores the blocks of one output row.
    pub(crate) fn set_row(&mut self, output: usize, row: &[u8]) {
        let block = self.block;
        let want = self.inputs / block.numbers() * block.bytes();
        assert!(row.len() == want, "row of {} bytes, its blocks have {want}", row.len());
        let (panel, lane) = (output / PANEL, output % PANEL);
        let (numbers, scales, factors) = self.strides();
        let (numbers, scales, factors) = (panel * numbers, panel * scales, panel * factors);
        let groups = block.numbers() / block.group() * block.factors();
        for (i, bytes) in row.chunks_exact(block.bytes()).enumerate() {
            let parts = Parts::of(block, bytes);
            for (k, &number) in parts.numbers[..block.numbers()].iter().enumerate() {
                let input = i * block.numbers() + k;
                if block.has_nibbles() {
                    let slot = &mut self.numbers[numbers + input / 2 * PANEL + lane];
                    let shift = input % 2 * 4;
                    *slot = (*slot & !(0xF << shift)) | ((number as u8) << shift);
                } else {
                    self.numbers[numbers + input * PANEL + lane] = number as u8;
                }
            }
            for (k, &scale) in parts.scales[..block.scales()].iter().enumerate() {
                self.scales[scales + (i * block.scales() + k) * PANEL + lane] = scale;
            }
            for (k, &factor) in parts.factors[..groups].iter().enumerate() {
                self.factors[factors + (i * groups + k) * PANEL + lane] = factor;
            }
        }
    }

    /// The values of one output row.
    pub(crate) fn row(&self, output: usize, row: &mut [f32]) {
        let block = self.block;
        let (panel, lane) = (output / PANEL, output % PANEL);
        let (numbers, scales, factors) = self.strides();
        let numbers = &self.numbers[panel * numbers..];
        let scale_of = |i: usize, k: usize| {
            self.scales[panel * scales + (i * block.scales() + k) * PANEL + lane].to_f32()
        };
        let factor_of = |group: usize, k: usize| {
            let place = (group * block.factors() + k) * PANEL + lane;
            f32::from(self.factors[panel * factors + place])
        };
        for (group, values) in row.chunks_exact_mut(block.group()).enumerate() {
            let i = group * block.group() / block.numbers();
            let scale = scale_of(i, 0);
            let (scale, offset) = match block {
                BlockType::Q4_0 | BlockType::Q8_0 => (scale, 0.0),
                BlockType::Q4_1 => (scale, scale_of(i, 1)),
                BlockType::Q4K => {
                    (scale * factor_of(group, 0), scale_of(i, 1) * factor_of(group, 1))
                }
                BlockType::Q6K => (scale * factor_of(group, 0), 0.0),
            };
            for (k, value) in values.iter_mut().enumerate() {
                let input = group * block.group() + k;
                let number = if block.has_nibbles() {
                    let byte = numbers[input / 2 * PANEL + lane];
                    f32::from(byte >> (input % 2 * 4) & 0xF)
                } else {
                    f32::from(numbers[input * PANEL + lane] as i8)
                };
                *value = match block {
                    BlockType::Q4_0 => (number - 8.0) * scale,
                    BlockType::Q8_0 | BlockType::Q6K => number * scale,
                    BlockType::Q4_1 => number * scale + offset,
                    BlockType::Q4K => number * scale - offset,
                };
            }
        }
    }
}

impl Parts {
    fn of(block: BlockType, bytes: &[u8]) -> Self {
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut parts = Self { numbers: [0; 256], scales: [f16::ZERO; 2], factors: [0; 16] };
        match block {
            BlockType::Q4_0 | BlockType::Q4_1 => {
                let start = 2 * block.scales();
                for (k, &byte) in bytes[start..].iter().enumerate() {
                    parts.numbers[k] = (byte & 0xF) as i8;
                    parts.numbers[k + 16] = (byte >> 4) as i8;
                }
                parts.scales = [half(0), half(start - 2)];
            }
            BlockType::Q8_0 => {
                for (number, &byte) in parts.numbers.iter_mut().zip(&bytes[2..]) {
                    *number = byte as i8;
                }
                parts.scales[0] = half(0);
            }
            BlockType::Q4K => {
                parts.scales = [half(0), half(2)];
                for (group, factors) in parts.factors.chunks_exact_mut(2).enumerate() {
                    factors.copy_from_slice(&q4_k_factors(&bytes[4..16], group));
                }
                for (k, &byte) in bytes[16..].iter().enumerate() {
                    let place = k / 32 * 64 + k % 32;
                    parts.numbers[place] = (byte & 0xF) as i8;
                    parts.numbers[place + 32] = (byte >> 4) as i8;
                }
            }
            BlockType::Q6K => {
                let (low, high) = (&bytes[..128], &bytes[128..192]);
                for (k, number) in parts.numbers.iter_mut().enumerate() {
                    // 128 numbers share 64 bytes of low and 32 of high bits.
                    let (half, quarter, l) = (k / 128, k % 128 / 32, k % 32);
                    let nibble = low[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 0xF;
                    let pair = high[half * 32 + l] >> (2 * quarter) & 3;
                    *number = (nibble | pair << 4) as i8 - 32;
                }
                for (factor, &byte) in parts.factors.iter_mut().zip(&bytes[192..208]) {
                    *factor = byte as i8;
                }
                parts.scales[0] = half(208);
            }
        }
        parts
    }
}

/// Six bits each for the scale and the offset of a group, twelve bytes for eight groups.
fn q4_k_factors(bytes: &[u8], group: usize) -> [i8; 2] {
    let (scale, offset) = if group < 4 {
        (bytes[group] & 63, bytes[group + 4] & 63)
    } else {
        let low = bytes[group + 4];
        (low & 0xF | bytes[group - 4] >> 6 << 4, low >> 4 | bytes[group] >> 6 << 4)
    };
    [scale as i8, offset as i8]
}

#[cfg(test)]
mod tests;
