//! CPU kernels: AVX-512, AVX2 and portable, chosen at run time.
//!
//! Activations are `f32`; weights and KV pages are `f32` or `bf16`, widened in registers, so a `bf16`
//! weight costs half the memory traffic and no accuracy beyond its own rounding.
//!
//! **A row's result does not depend** on the other rows of the batch, on how a prompt was cut into
//! chunks, or on the number of threads: every output is one chain of fused multiply-adds in a fixed
//! order, whichever tile computes it. Results differ in the last bits between instruction sets.
//! [`matmul_split`] keeps the same promise with sixteen bits of the activations.
//!
//! # Layouts
//! * [`Matrix`] `[outputs, inputs]` is kept in panels of 32 outputs, so that one 64-byte line feeds one
//!   vector register and a product reads memory strictly forward:
//!   `f32`: `[panel][inputs][32]`; `bf16`: `[panel][inputs / 2][32][2]`. Two neighbouring inputs share a
//!   32-bit lane: shifting left by 16 widens the first, masking widens the second, nothing is permuted.
//! * [`KvPages`]: `[block][kv_head][K | V]`, a block being 16 tokens. K is `[head_dim][16 tokens]`, so the
//!   scores of a whole block are one vector and need no horizontal sum; V is
//!   `[head_dim / 16][16 tokens][16]`. For `bf16`, K pairs neighbouring dimensions and V neighbouring
//!   tokens, as above.
//! * A quantised matrix keeps the blocks of a GGUF file, their parts regrouped in panels of 32 outputs
//!   (`quantised.rs`). Its products are bit-equal to those of the decoded matrix in `f32`.
//! * Pages and dense matrices are operands of one micro-kernel, `matmul::tile`.
//!
//! # Threads
//! A [`Team`] forks and joins in about a microsecond while its workers spin, and sleeps otherwise.
//! Every function here blocks its caller until done, and panics on shapes that do not fit (a defect of
//! the caller; nothing a request says reaches this level unchecked).

mod activation;
mod attention;
mod buffer;
#[cfg(feature = "cuda")]
pub mod cuda;
mod disjoint;
mod experts;
mod exponential;
mod kv_pages;
mod matmul;
mod matrix;
mod norm;
mod quantised;
mod reduce;
mod rotary;
#[cfg(test)]
mod samples;
mod simd;
mod team;
mod top_n;

pub use activation::{Activation, gate_mul};
pub use attention::{SequenceRows, paged_attention};
pub use buffer::Buffer;
pub use experts::Routing;
pub use exponential::decay;
pub use kv_pages::KvPages;
pub use matmul::{matmul, matmul_split};
pub use matrix::{Matrix, Storage};
pub use norm::{add_rms_norm, rms_norm, rms_norm_heads};
pub use quantised::BlockType;
pub use reduce::{argmax, count_greater, max_and_sum_exp};
pub use rotary::{HeadLayout, RotaryTable, rotate_and_append};
pub use simd::instruction_set;
pub use team::{Team, share};
pub use top_n::top_n;
