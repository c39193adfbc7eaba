//! The choice of tokens on the GPU.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{
    context::Context,
    error::CudaError,
    memory::{Memory, Pinned},
    stream::{Shape, Stream},
    tensor::{Element, Tensor},
};

/// How one row's token is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Choice {
    /// 0: the likeliest.
    pub inverse_temperature: f32,
    /// Tokens whose scaled logit is farther below the best are out.
    pub farthest: f32,
    /// Start of the row's random numbers.
    pub race: u64,
}

/// What was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Chosen {
    pub token: u32,
    /// Of the raw logits, natural log.
    pub logprob: f32,
    /// 0: fine; 1: a NaN; 2: an infinite logit; 3: nothing is possible.
    pub status: u32,
    unused: u32,
}

/// Room for the choices of a step.
pub struct SampleBuffers {
    choices: Memory,
    chosen: Memory,
    choices_staging: Pinned<Choice>,
    chosen_staging: Pinned<Chosen>,
}

impl SampleBuffers {
    /// # Errors
    /// If there is no memory for it.
    pub fn new(context: &Arc<Context>, rows: usize) -> Result<Self, CudaError> {
        Ok(Self {
            choices: Memory::new(context, rows * size_of::<Choice>(), "sampling")?,
            chosen: Memory::new(context, rows * size_of::<Chosen>(), "sampling")?,
            choices_staging: Pinned::new(context, rows)?,
            chosen_staging: Pinned::new(context, rows)?,
        })
    }

    /// Chooses a token for each of the first rows of `logits`, whose first column is token
    /// `first_token`, and waits for them.
    ///
    /// # Errors
    /// If a shape does not fit, or the GPU has failed.
    pub fn choose(
        &mut self,
        stream: &Stream,
        logits: &Tensor,
        first_token: u32,
        choices: &[Choice],
    ) -> Result<&[Chosen], CudaError> {
        let rows = choices.len();
        let from = logits.require("choose", rows)?;
        let capacity = self.choices_staging.values().len();
        if rows > capacity || logits.element != Element::F32 || logits.width == 0 {
            let detail = format!("{rows} rows of {} logits, room for {capacity}", logits.width);
            return Err(CudaError::Shape { what: "choose", detail });
        }
        self.choices_staging.values_mut()[..rows].copy_from_slice(choices);
        stream.copy_in(&self.choices_staging, rows, &self.choices)?;
        // SAFETY: the kernel's parameters; `rows` rows of logits, choices and results.
        unsafe {
            stream.launch(
                "choose",
                &Shape { grid: (rows, 1, 1), threads: 1024, shared_bytes: 0 },
                &[
                    &from,
                    &(logits.width as i32),
                    &first_token,
                    &self.choices.address(),
                    &self.chosen.address(),
                ],
            )?;
        }
        stream.copy_out(&self.chosen, rows, &mut self.chosen_staging)?;
        Ok(&self.chosen_staging.values()[..rows])
    }
}
