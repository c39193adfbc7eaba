//! Weights and activations on the GPU.

use std::sync::Arc;

use half::bf16;

use super::{context::Context, error::CudaError, memory::Memory, tensor_map::TensorMap};

/// Weights are staged on the host in pieces of so many bytes.
const STAGE_BYTES: usize = 8 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F32,
    Bf16,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    fn append(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            Self::F32 => bytes.extend_from_slice(bytemuck::cast_slice(values)),
            Self::Bf16 => bytes.extend(
                values.iter().flat_map(|&value| bf16::from_f32(value).to_bits().to_ne_bytes()),
            ),
        }
    }
}

/// `[outputs, inputs]`, filled row by row in order.
pub struct Matrix {
    pub(super) memory: Memory,
    pub(super) element: Element,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Rows that are not on the GPU yet, the last of them before `next`.
    staged: Vec<u8>,
    next: usize,
}

impl Matrix {
    /// # Errors
    /// If the GPU has no room for it.
    pub fn new(
        context: &Arc<Context>,
        outputs: usize,
        inputs: usize,
        element: Element,
    ) -> Result<Self, CudaError> {
        let memory = Memory::new(context, outputs * inputs * element.bytes(), "weights")?;
        Ok(Self { memory, element, outputs, inputs, staged: Vec::new(), next: 0 })
    }

    pub fn bytes(&self) -> usize {
        self.outputs * self.inputs * self.element.bytes()
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Rows may come in any order; those in order are copied together.
    ///
    /// # Errors
    /// What the copy reports.
    ///
    /// # Panics
    /// If the row is not `inputs` long or is beyond the last.
    pub fn set_row(&mut self, output: usize, row: &[f32]) -> Result<(), CudaError> {
        assert!(output < self.outputs && row.len() == self.inputs, "row {output} of {}", row.len());
        if output != self.next {
            self.flush()?;
        }
        self.element.append(row, &mut self.staged);
        self.next = output + 1;
        if self.staged.len() >= STAGE_BYTES || self.next == self.outputs {
            self.flush()?;
        }
        Ok(())
    }

    /// Copies what is staged.
    ///
    /// # Errors
    /// What the copy reports.
    pub fn flush(&mut self) -> Result<(), CudaError> {
        let end = self.next * self.inputs * self.element.bytes();
        let staged = std::mem::take(&mut self.staged);
        self.memory.upload(end - staged.len(), &staged)?;
        if self.next < self.outputs {
            self.staged = staged;
            self.staged.clear();
        }
        Ok(())
    }
}

/// Values of f32: norm weights, biases, tables.
pub struct Vector {
    pub(super) memory: Memory,
    pub(super) len: usize,
}

impl Vector {
    /// # Errors
    /// If the GPU has no room for it.
    pub fn new(context: &Arc<Context>, values: &[f32]) -> Result<Self, CudaError> {
        let mut memory = Memory::new(context, size_of_val(values), "a vector")?;
        memory.upload(0, bytemuck::cast_slice(values))?;
        Ok(Self { memory, len: values.len() })
    }
}

/// Activations, `[rows, width]`.
pub struct Tensor {
    pub(super) memory: Memory,
    pub(super) element: Element,
    pub(super) rows: usize,
    pub(super) width: usize,
}

impl Tensor {
    /// # Errors
    /// If the GPU has no room for it.
    pub fn new(
        context: &Arc<Context>,
        rows: usize,
        width: usize,
        element: Element,
    ) -> Result<Self, CudaError> {
        let memory = Memory::new(context, rows * width * element.bytes(), "activations")?;
        Ok(Self { memory, element, rows, width })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn element(&self) -> Element {
        self.element
    }

    /// Where its rows lie on the GPU, of which it must have `rows`.
    ///
    /// # Errors
    /// If it has fewer.
    pub fn address(&self, what: &'static str, rows: usize) -> Result<u64, CudaError> {
        self.require(what, rows)
    }

    pub(super) fn require(&self, what: &'static str, rows: usize) -> Result<u64, CudaError> {
        if rows <= self.rows {
            return Ok(self.memory.address());
        }
        let detail = format!("{rows} rows in a tensor of {} rows", self.rows);
        Err(CudaError::Shape { what, detail })
    }
}

/// KV pages of one layer.
pub struct Pages {
    pub(super) memory: Memory,
    pub(super) element: Element,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) num_blocks: usize,
    /// Where a kernel copies them in bulk.
    pub(super) map: Option<TensorMap>,
}

impl Pages {
    /// # Errors
    /// If the GPU has no room for them.
    pub fn new(
        context: &Arc<Context>,
        num_blocks: usize,
        kv_heads: usize,
        head_dim: usize,
        element: Element,
    ) -> Result<Self, CudaError> {
        let bytes = num_blocks * Self::bytes_per_block(kv_heads, head_dim, element);
        let memory = Memory::new(context, bytes, "KV pages")?;
        let rows = num_blocks * kv_heads * 2 * crate::KvPages::BLOCK_TOKENS;
        let copied = context.is_hopper && element == Element::Bf16 && [64, 128].contains(&head_dim);
        let map = match copied && i32::try_from(rows).is_ok() {
            true => Some(TensorMap::new(&memory, rows, head_dim)?),
            false => None,
        };
        Ok(Self { memory, element, kv_heads, head_dim, num_blocks, map })
    }

    pub fn bytes_per_block(kv_heads: usize, head_dim: usize, element: Element) -> usize {
        2 * crate::KvPages::BLOCK_TOKENS * kv_heads * head_dim * element.bytes()
    }
}
