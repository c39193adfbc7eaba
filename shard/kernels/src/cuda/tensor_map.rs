//! What the copy engine of Hopper is told of memory that it copies from.

use cudarc::driver::sys;

use super::{
    error::{CudaError, check},
    memory::Memory,
};

/// Memory as rows of bf16, copied in boxes of 16 rows of 64, whose 16-byte pieces land permuted as
/// `cuda/wgmma.cuh` wants them. Names an address: whoever keeps it keeps the memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct TensorMap(sys::CUtensorMap);

/// Values of a box: its rows, and columns of 128 bytes.
const BOX: [u32; 2] = [64, 16];

impl TensorMap {
    /// # Errors
    /// If `memory` does not hold so many rows, or the driver refuses the shape.
    pub(super) fn new(memory: &Memory, rows: usize, width: usize) -> Result<Self, CudaError> {
        memory.require(0, rows * width * 2)?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (lengths, pitch) = ([width as u64, rows as u64], [width as u64 * 2]);
        let steps = [1u32; 2];
        // SAFETY: plain inputs of the ranks given, and a plain output.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                memory.address() as *mut _,
                lengths.as_ptr(),
                pitch.as_ptr(),
                BOX.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(Self(map))
    }
}
