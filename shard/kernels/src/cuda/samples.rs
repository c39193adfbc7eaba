//! The choice of tokens on the GPU.

use std::{collections::VecDeque, sync::Arc};

use bytemuck::{Pod, Zeroable};

use super::{
    context::Context,
    error::CudaError,
    event::Event,
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
    /// Keep so many of the likeliest; 0: all.
    pub top_k: u32,
    /// Of those keep the likeliest that have this share of the probability; 0: all.
    pub top_p: f32,
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

/// Room for the choices of two steps: the second may be queued before the first is known.
pub struct SampleBuffers {
    choices: Memory,
    chosen: Memory,
    slots: [Slot; 2],
    /// Rows of the choices that were queued and not taken, the oldest first.
    queued: VecDeque<usize>,
    /// The slot of the oldest of them.
    oldest: usize,
}

struct Slot {
    choices: Pinned<Choice>,
    chosen: Pinned<Chosen>,
    done: Event,
}

impl SampleBuffers {
    /// # Errors
    /// If there is no memory for it.
    pub fn new(context: &Arc<Context>, rows: usize) -> Result<Self, CudaError> {
        context.bind()?;
        let slot = || {
            let (choices, chosen) = (Pinned::new(context, rows)?, Pinned::new(context, rows)?);
            Ok::<_, CudaError>(Slot { choices, chosen, done: Event::of(context)? })
        };
        Ok(Self {
            choices: Memory::new(context, rows * size_of::<Choice>(), "sampling")?,
            chosen: Memory::new(context, rows * size_of::<Chosen>(), "sampling")?,
            slots: [slot()?, slot()?],
            queued: VecDeque::new(),
            oldest: 0,
        })
    }

    /// Queues the choice of a token for each of the first rows of `logits`, whose first column is token
    /// `first_token`. At most two choices may wait to be taken.
    ///
    /// # Errors
    /// If a shape does not fit, or a launch fails.
    pub fn queue(
        &mut self,
        stream: &Stream,
        logits: &Tensor,
        first_token: u32,
        choices: &[Choice],
    ) -> Result<(), CudaError> {
        let rows = choices.len();
        let from = logits.require("choose", rows)?;
        let number = self.queued.len();
        let slot = &mut self.slots[(self.oldest + number) % 2];
        let capacity = slot.choices.values().len();
        let fits = logits.element == Element::F32 && logits.width > 0 && number < 2;
        if rows > capacity || !fits {
            let detail = format!("{rows} rows of {} logits, room for {capacity}", logits.width);
            return Err(CudaError::Shape { what: "choose", detail });
        }
        if rows > 0 {
            slot.choices.values_mut()[..rows].copy_from_slice(choices);
            stream.copy_in(&slot.choices, rows, &self.choices)?;
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
            stream.copy_out(&self.chosen, rows, &mut slot.chosen)?;
        }
        slot.done.record(stream)?;
        self.queued.push_back(rows);
        Ok(())
    }

    /// Whether the oldest choice that was queued is known, or never will be.
    pub fn is_known(&self) -> bool {
        self.slots[self.oldest].done.is_over()
    }

    /// Waits for the oldest choice that was queued; nothing if there is none.
    ///
    /// # Errors
    /// If the GPU has failed.
    pub fn take(&mut self) -> Result<&[Chosen], CudaError> {
        let Some(rows) = self.queued.pop_front() else { return Ok(&[]) };
        let slot = &self.slots[self.oldest];
        self.oldest = (self.oldest + 1) % 2;
        slot.done.wait()?;
        Ok(&slot.chosen.values()[..rows])
    }

    /// What the newest choice on the GPU has chosen.
    pub(super) fn chosen(&self) -> u64 {
        self.chosen.address()
    }
}
