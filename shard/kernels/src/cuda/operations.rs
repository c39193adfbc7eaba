//! The row-wise operations of a step, checked and launched.

use std::ops::Range;

use super::{
    error::CudaError,
    samples::SampleBuffers,
    step_inputs::StepInputs,
    stream::{Shape, Stream},
    tensor::{Element, Matrix, Pages, Tensor, Vector},
};
use crate::{Activation, HeadLayout};

/// Heads that one block of the rotation of any shape takes.
const ROTATED_HEADS: usize = 8;
/// Threads of a block of the rotation of whole heads; each takes so many values and their partners.
const ROTATION_THREADS: usize = 128;
const ROTATED_VALUES: usize = 8;

pub(super) fn require(
    what: &'static str,
    holds: bool,
    detail: impl FnOnce() -> String,
) -> Result<(), CudaError> {
    if holds { Ok(()) } else { Err(CudaError::Shape { what, detail: detail() }) }
}

/// One block a row.
pub(super) fn per_row(rows: usize, width: usize) -> Shape {
    let threads = (width / 4).next_power_of_two().clamp(64, 512);
    Shape { grid: (rows, 1, 1), threads, shared_bytes: 0 }
}

/// One thread a value.
pub(super) fn per_value(count: usize) -> Shape {
    Shape { grid: (count.div_ceil(256), 1, 1), threads: 256, shared_bytes: 0 }
}

impl Stream {
    /// `out[r] = table[tokens[r] - vocab.start]`, or zeros where `vocab` does not hold the token. Tokens
    /// that only the GPU knows are the newest of `samples`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn embed(
        &mut self,
        table: &Matrix,
        (inputs, samples): (&StepInputs, &SampleBuffers),
        rows: usize,
        vocab: &Range<u32>,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let to = out.require("embed", rows)?;
        let fits = out.element == Element::F32
            && rows <= inputs.row_count()
            && out.width == table.inputs
            && vocab.len() <= table.outputs;
        require("embed", fits, || format!("{rows} rows of {}", out.width))?;
        let kernel = if table.element == Element::F32 { "embed_f32" } else { "embed_bf16" };
        let (start, len, width) = (vocab.start, vocab.len() as u32, out.width as i32);
        // SAFETY: the kernel's parameters; rows and widths were checked, and tokens outside the table
        // give zeros.
        unsafe {
            let (table, chosen) = (table.memory.address(), samples.chosen());
            let parameters: [&dyn super::stream::Parameter; 7] =
                [&table, &inputs.rows(), &chosen, &start, &len, &to, &width];
            self.launch(kernel, &per_row(rows, out.width), &parameters)
        }
    }

    /// `residual += delta` where there is one, then `out = rms_norm(residual) * weight`. Without a delta
    /// the input may have the type of the output.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn add_rms_norm(
        &mut self,
        residual: &Tensor,
        delta: Option<&Tensor>,
        rows: usize,
        (weight, eps): (&Vector, f32),
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let width = residual.width;
        let from = residual.require("rms_norm", rows)?;
        let to = out.require("rms_norm", rows)?;
        let delta_fits = |delta: &Tensor| delta.width == width && delta.element == out.element;
        let narrow = delta.is_none() && residual.element == Element::Bf16;
        let fits = (residual.element == Element::F32 || (narrow && out.element == Element::Bf16))
            && out.width == width
            && weight.len == width
            && delta.is_none_or(delta_fits);
        require("rms_norm", fits, || format!("width {width}, {} and {}", out.width, weight.len))?;
        let delta = match delta {
            Some(delta) => delta.require("rms_norm", rows)?,
            None => 0,
        };
        let kernel = match out.element {
            Element::F32 => "add_rms_norm_f32",
            Element::Bf16 if narrow => "rms_norm_bf16",
            Element::Bf16 => "add_rms_norm_bf16",
        };
        let shape =
            Shape { shared_bytes: (width.next_multiple_of(4) + 33) * 4, ..per_row(rows, width) };
        // SAFETY: the kernel's parameters; all tensors have `rows` rows of `width`.
        unsafe {
            self.launch(
                kernel,
                &shape,
                &[&from, &delta, &weight.memory.address(), &eps, &to, &(width as i32)],
            )
        }
    }

    /// Normalises each query and key head in place.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn rms_norm_heads(
        &mut self,
        qkv: &mut Tensor,
        layout: &HeadLayout,
        rows: usize,
        (query, key, eps): (&Vector, &Vector, f32),
    ) -> Result<(), CudaError> {
        let at = qkv.require("rms_norm_heads", rows)?;
        let fits = qkv.width == layout.row_len() && query.len.min(key.len) >= layout.head_dim;
        require("rms_norm_heads", fits, || format!("width {} of {layout:?}", qkv.width))?;
        let kernel = match qkv.element {
            Element::F32 => "rms_norm_heads_f32",
            Element::Bf16 => "rms_norm_heads_bf16",
        };
        let grid = (rows, layout.heads + layout.kv_heads, 1);
        // SAFETY: the kernel's parameters; the rows hold the layout's heads.
        unsafe {
            self.launch(
                kernel,
                &Shape { grid, threads: 32, shared_bytes: 0 },
                &[
                    &at,
                    &(qkv.width as i32),
                    &(layout.heads as i32),
                    &(layout.head_dim as i32),
                    &query.memory.address(),
                    &key.memory.address(),
                    &eps,
                ],
            )
        }
    }

    /// `x += delta`; `x` is f32.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn add(&mut self, x: &mut Tensor, delta: &Tensor, rows: usize) -> Result<(), CudaError> {
        let (to, from) = (x.require("add", rows)?, delta.require("add", rows)?);
        let fits = x.element == Element::F32 && x.width == delta.width;
        require("add", fits, || format!("widths {} and {}", x.width, delta.width))?;
        let kernel = if delta.element == Element::F32 { "add_f32" } else { "add_bf16" };
        let count = rows * x.width;
        // SAFETY: the kernel's parameters; both tensors have `count` values.
        unsafe { self.launch(kernel, &per_value(count), &[&to, &from, &(count as u64)]) }
    }

    /// `x *= factor`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn scale(&mut self, x: &mut Tensor, rows: usize, factor: f32) -> Result<(), CudaError> {
        let at = x.require("scale", rows)?;
        let kernel = if x.element == Element::F32 { "scale_f32" } else { "scale_bf16" };
        let count = rows * x.width;
        // SAFETY: the kernel's parameters; the tensor has `count` values.
        unsafe { self.launch(kernel, &per_value(count), &[&at, &factor, &(count as u64)]) }
    }

    pub(super) fn add_bias(
        &mut self,
        x: &mut Tensor,
        rows: usize,
        bias: &Vector,
    ) -> Result<(), CudaError> {
        let at = x.require("bias", rows)?;
        require("bias", bias.len == x.width, || format!("{} for width {}", bias.len, x.width))?;
        let kernel = if x.element == Element::F32 { "add_bias_f32" } else { "add_bias_bf16" };
        // SAFETY: the kernel's parameters; `rows` rows as wide as the bias.
        unsafe {
            let parameters: [&dyn super::stream::Parameter; 3] =
                [&at, &bias.memory.address(), &(x.width as i32)];
            self.launch(kernel, &per_row(rows, x.width), &parameters)
        }
    }

    /// `out[i] = x[sampled[i]]` for the step's sampled rows.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn gather(
        &mut self,
        x: &Tensor,
        inputs: &StepInputs,
        count: usize,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let to = out.require("gather", count)?;
        let from = x.require("gather", inputs.row_count())?;
        let fits =
            x.width == out.width && x.element == out.element && count <= inputs.sampled_count();
        require("gather", fits, || format!("{count} rows of {} to {}", x.width, out.width))?;
        let kernel = if x.element == Element::F32 { "gather_f32" } else { "gather_bf16" };
        // SAFETY: the kernel's parameters; sampled rows are rows of the step.
        unsafe {
            let parameters: [&dyn super::stream::Parameter; 4] =
                [&from, &inputs.sampled(), &to, &(x.width as i32)];
            self.launch(kernel, &per_row(count, x.width), &parameters)
        }
    }

    /// `out = activation(gate) * up` of rows `[gate | up]`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn gate_mul(
        &mut self,
        activation: Activation,
        gate_up: &Tensor,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), CudaError> {
        let (from, to) = (gate_up.require("gate_mul", rows)?, out.require("gate_mul", rows)?);
        let fits = gate_up.width == 2 * out.width && gate_up.element == out.element;
        require("gate_mul", fits, || format!("widths {} and {}", gate_up.width, out.width))?;
        let kernel = if out.element == Element::F32 { "gate_mul_f32" } else { "gate_mul_bf16" };
        let shape =
            Shape { grid: (out.width.div_ceil(2048), rows, 1), threads: 256, shared_bytes: 0 };
        let tanh_gelu = i32::from(activation == Activation::GeluTanh);
        // SAFETY: the kernel's parameters; both tensors have `rows` rows.
        unsafe { self.launch(kernel, &shape, &[&from, &to, &(out.width as i32), &tanh_gelu]) }
    }

    /// Rotates q in place and writes rotated k, and v, to the pages alone. `rotary`: cosines and sines,
    /// `[positions, half_dim]`.
    ///
    /// # Errors
    /// If a shape does not fit, or the launch fails.
    pub fn rotate_and_append(
        &mut self,
        qkv: &mut Tensor,
        layout: &HeadLayout,
        (cos, sin, half_dim): (&Vector, &Vector, usize),
        inputs: &StepInputs,
        rows: usize,
        pages: &mut Pages,
    ) -> Result<(), CudaError> {
        let at = qkv.require("rotate_and_append", rows)?;
        let fits = qkv.width == layout.row_len()
            && qkv.element == pages.element
            && (pages.kv_heads, pages.head_dim) == (layout.kv_heads, layout.head_dim)
            && inputs.block_count() <= pages.num_blocks
            && 2 * half_dim <= layout.head_dim
            && rows <= inputs.row_count()
            && cos.len == sin.len;
        require("rotate_and_append", fits, || format!("{layout:?}, width {}", qkv.width))?;
        let wide = 2 * half_dim == layout.head_dim && half_dim.is_multiple_of(ROTATED_VALUES);
        let kernel = match (qkv.element, wide) {
            (Element::F32, false) => "rotate_and_append_f32",
            (Element::F32, true) => "rotate_and_append_wide_f32",
            (Element::Bf16, false) => "rotate_and_append_bf16",
            (Element::Bf16, true) => "rotate_and_append_wide_bf16",
        };
        let heads = layout.heads + 2 * layout.kv_heads;
        let pieces = heads * half_dim / ROTATED_VALUES;
        let (groups, threads) = match wide {
            false => (heads.div_ceil(ROTATED_HEADS), 32 * ROTATED_HEADS),
            true => (pieces.div_ceil(ROTATION_THREADS), ROTATION_THREADS),
        };
        // SAFETY: the kernel's parameters; slots lie in blocks that the pages have, and positions
        // are below the context lengths that the tables were made for.
        unsafe {
            self.launch(
                kernel,
                &Shape { grid: (rows, groups, 1), threads, shared_bytes: 0 },
                &[
                    &at,
                    &inputs.rows(),
                    &cos.memory.address(),
                    &sin.memory.address(),
                    &(half_dim as i32),
                    &(layout.heads as i32),
                    &(layout.kv_heads as i32),
                    &(layout.head_dim as i32),
                    &pages.memory.address(),
                ],
            )
        }
    }
}
