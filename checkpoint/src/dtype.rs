//! Stored number types, and how a row of them becomes f32.

use std::fmt;

use candle_core::quantized::k_quants;
use half::{f16, slice::HalfFloatSliceExt};

use crate::blocks;

/// How a tensor's numbers are stored. The quantised types are ggml's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl DType {
    pub const ALL: [Self; 15] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
    ];

    /// ggml's number of the type (`enum ggml_type` of ggml.h).
    pub(crate) fn from_ggml(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            15 => Self::Q8K,
            28 => Self::F64,
            30 => Self::BF16,
            _ => return None,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Q8K => "Q8_K",
        }
    }

    /// Numbers in a block; a row holds whole blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F64 | Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Q8K => 256,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Q8K => 292,
        }
    }

    /// Bytes of `count` numbers; none where they are no whole blocks or the product overflows.
    pub(crate) fn bytes(self, count: usize) -> Option<usize> {
        if !count.is_multiple_of(self.block_len()) {
            return None;
        }
        (count / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Decodes whole blocks, exactly: `bytes` holds `values.len()` numbers.
    pub(crate) fn dequantise(self, bytes: &[u8], values: &mut [f32]) {
        debug_assert_eq!(self.bytes(values.len()), Some(bytes.len()));
        match self {
            // The one type of which a decoded number may be rounded.
            Self::F64 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f64::from_le_bytes(*bytes) as f32;
                }
            }
            Self::F32 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            Self::BF16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            Self::F16 => halves(bytes, values),
            Self::Q4_0 => blocks::decode::<k_quants::BlockQ4_0>(bytes, values),
            Self::Q4_1 => blocks::decode::<k_quants::BlockQ4_1>(bytes, values),
            Self::Q5_0 => blocks::decode::<k_quants::BlockQ5_0>(bytes, values),
            Self::Q5_1 => blocks::decode::<k_quants::BlockQ5_1>(bytes, values),
            Self::Q8_0 => blocks::each(bytes, values, blocks::q8_0),
            Self::Q2K => blocks::decode::<k_quants::BlockQ2K>(bytes, values),
            Self::Q3K => blocks::each(bytes, values, blocks::q3_k),
            Self::Q4K => blocks::decode::<k_quants::BlockQ4K>(bytes, values),
            Self::Q5K => blocks::decode::<k_quants::BlockQ5K>(bytes, values),
            Self::Q6K => blocks::decode::<k_quants::BlockQ6K>(bytes, values),
            Self::Q8K => blocks::decode::<k_quants::BlockQ8K>(bytes, values),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `half` converts slices with the CPU's own instruction, single values in software.
fn halves(bytes: &[u8], values: &mut [f32]) {
    const CHUNK: usize = 1024;
    let mut staged = [f16::ZERO; CHUNK];
    for (values, bytes) in values.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let staged = &mut staged[..values.len()];
        for (half, bytes) in staged.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        staged.convert_to_f32_slice(values);
    }
}
