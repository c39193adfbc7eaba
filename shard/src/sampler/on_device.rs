//! Rows whose token a GPU's own kernel chooses: those without edits, grammar and alternatives.

use trireme_kernels::cuda::{Choice, Chosen};

use super::{SampleError, Sampled, Sampling, race};

/// What the kernel is told of a sequence whose next token has this position.
pub fn device_choice(sampling: &Sampling, position: usize) -> Choice {
    Choice {
        inverse_temperature: sampling.temperature.map_or(0.0, |temperature| 1.0 / temperature),
        farthest: sampling.min_p.map_or(f32::INFINITY, |min_p| 0.0 - min_p.ln()),
        race: race::start(sampling.seed, position as u64),
        top_k: sampling.top_k.unwrap_or(0),
        top_p: sampling.top_p.unwrap_or(0.0),
    }
}

/// What the kernel says of a row.
pub fn device_sample(chosen: &Chosen) -> Result<Sampled, SampleError> {
    match chosen.status {
        0 => Ok(Sampled { token: chosen.token, logprob: chosen.logprob, top: Vec::new() }),
        1 => Err(SampleError::NotANumber),
        2 => Err(SampleError::Infinite),
        _ => Err(SampleError::NothingPossible),
    }
}
