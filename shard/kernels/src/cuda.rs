//! CUDA kernels and what they run on: one GPU of one rank.
//!
//! Everything here is safe to call: a [`Stream`] checks shapes against allocations before it launches,
//! and runs in order, so that no two kernels race. A failed launch is an error that no later call
//! mends: the process has lost its GPU.
//!
//! The CUDA driver and cuBLASLt are loaded when first used: the same program starts on a host
//! without them and says so.
//!
//! # Layouts
//! * [`Matrix`] `[outputs, inputs]`, [`Tensor`] `[rows, width]`: row major.
//! * [`Pages`]: `[block][kv_head][K | V][16 tokens][head_dim]`.
//! * Activations are bf16 with bf16 weights, f32 with f32 weights; the residual stream and the logits
//!   are always f32.

mod attention;
mod blas;
mod context;
mod error;
mod event;
mod experts;
mod graph;
mod memory;
mod operations;
mod product;
mod samples;
mod step_inputs;
mod stream;
mod tensor;
mod tensor_map;

pub use attention::Scoring;
pub use context::{Context, gpu_count};
pub use error::CudaError;
pub use event::Event;
pub use experts::WeightedRows;
pub use graph::Graph;
pub use product::{measured_rows, product_rows};
pub use samples::{Choice, Chosen, SampleBuffers};
pub use step_inputs::{CHOSEN, NO_SLOT, SequenceInput, StepInputs, TokenInput};
pub use stream::Stream;
pub use tensor::{Element, Matrix, Pages, Tensor, Vector};

#[cfg(test)]
mod tests;
