//! Rows on their way to an expert and back.

use std::{ops::Range, sync::Arc};

use cudarc::driver::sys;

use super::{
    context::Context,
    error::{CudaError, check},
    memory::Memory,
    operations::{per_row, per_value, require},
    stream::Stream,
    tensor::{Element, Tensor},
};

/// Rows of a tensor, each with what the answer to it counts.
pub struct WeightedRows {
    rows: Memory,
    weights: Memory,
    capacity: usize,
    len: usize,
    /// One more than the largest.
    end: usize,
}

impl WeightedRows {
    /// # Errors
    /// If the GPU has no room for it.
    pub fn new(context: &Arc<Context>, capacity: usize) -> Result<Self, CudaError> {
        Ok(Self {
            rows: Memory::new(context, 4 * capacity, "experts")?,
            weights: Memory::new(context, 4 * capacity, "experts")?,
            capacity,
            len: 0,
            end: 0,
        })
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Takes other rows; returns when they are on the GPU. No queued work may still read the ones before.
    ///
    /// # Errors
    /// If there are more than the capacity, or the copy fails.
    pub fn fill(&mut self, rows: &[u32], weights: &[f32]) -> Result<(), CudaError> {
        let fits = rows.len() == weights.len() && rows.len() <= self.capacity;
        require("experts", fits, || format!("{} rows of {}", rows.len(), self.capacity))?;
        self.rows.upload(0, bytemuck::cast_slice(rows))?;
        self.weights.upload(0, bytemuck::cast_slice(weights))?;
        self.len = rows.len();
        self.end = rows.iter().max().map_or(0, |&row| row as usize + 1);
        Ok(())
    }

    /// Where the rows and weights from `start` on lie.
    fn at(&self, start: usize) -> (u64, u64) {
        (self.rows.address() + 4 * start as u64, self.weights.address() + 4 * start as u64)
    }
}

impl Stream {
    /// `out[i] = x[rows[range][i]]`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn take_rows(
        &mut self,
        x: &Tensor,
        rows: &WeightedRows,
        range: Range<usize>,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let (from, to) =
            (x.require("take_rows", rows.end)?, out.require("take_rows", range.len())?);
        let fits = (x.width, x.element) == (out.width, out.element) && range.end <= rows.len;
        require("take_rows", fits, || format!("{range:?} of {}", rows.len))?;
        let kernel = if x.element == Element::F32 { "gather_f32" } else { "gather_bf16" };
        let (indices, _) = rows.at(range.start);
        // SAFETY: the kernel's parameters; the listed rows are rows of `x`.
        unsafe {
            let parameters: [&dyn super::stream::Parameter; 4] =
                [&from, &indices, &to, &(x.width as i32)];
            self.launch(kernel, &per_row(range.len(), x.width), &parameters)
        }
    }

    /// `sum[rows[range][i]] += weights[range][i] * answers[i]`, all f32; no row twice in `range`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn add_weighted(
        &mut self,
        answers: &Tensor,
        rows: &WeightedRows,
        range: Range<usize>,
        sum: &mut Tensor,
    ) -> Result<(), CudaError> {
        let from = answers.require("add_weighted", range.len())?;
        let to = sum.require("add_weighted", rows.end)?;
        let f32 = (Element::F32, Element::F32);
        let fits = (answers.element, sum.element) == f32
            && answers.width == sum.width
            && range.end <= rows.len;
        require("add_weighted", fits, || format!("{range:?} of {}", rows.len))?;
        let (indices, weights) = rows.at(range.start);
        // SAFETY: the kernel's parameters; the listed rows are rows of `sum`.
        unsafe {
            let parameters: [&dyn super::stream::Parameter; 5] =
                [&from, &indices, &weights, &to, &(sum.width as i32)];
            self.launch("add_weighted", &per_row(range.len(), sum.width), &parameters)
        }
    }

    /// `x = 0`.
    ///
    /// # Errors
    /// If the tensor has fewer rows, or the GPU has failed.
    pub fn clear(&mut self, x: &mut Tensor, rows: usize) -> Result<(), CudaError> {
        let at = x.require("clear", rows)?;
        let bytes = rows * x.width * x.element.bytes();
        // SAFETY: the rows are inside the allocation.
        unsafe { check("cuMemsetD8Async", sys::cuMemsetD8Async(at, 0, bytes, self.raw)) }
    }

    /// `out = x`, f32 rounded to the type of `out`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn round(&mut self, x: &Tensor, rows: usize, out: &mut Tensor) -> Result<(), CudaError> {
        let (from, to) = (x.require("round", rows)?, out.require("round", rows)?);
        let fits = x.element == Element::F32 && x.width == out.width;
        require("round", fits, || format!("widths {} and {}", x.width, out.width))?;
        let kernel = if out.element == Element::F32 { "round_f32" } else { "round_bf16" };
        let count = rows * x.width;
        // SAFETY: the kernel's parameters; both tensors have `count` values.
        unsafe { self.launch(kernel, &per_value(count), &[&from, &to, &(count as u64)]) }
    }
}
