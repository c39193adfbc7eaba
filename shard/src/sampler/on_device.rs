//! Rows whose token a GPU's own kernel chooses: greedy, or by temperature and min-p alone.

use trireme_kernels::cuda::{Choice, Chosen};

use super::{Constraint, SampleError, SampleRow, Sampled, race};

/// Whether a row asks for more than the kernel does.
pub fn is_for_host(row: &SampleRow<'_>) -> bool {
    let sampling = row.sampling;
    !matches!(row.constraint, Constraint::Free)
        || sampling.has_edits()
        || sampling.top_k.is_some()
        || sampling.top_p.is_some()
        || sampling.typical_p.is_some()
        || sampling.top_logprobs > 0
}

/// What the kernel is told of a row.
pub fn device_choice(row: &SampleRow<'_>) -> Choice {
    let sampling = row.sampling;
    Choice {
        inverse_temperature: sampling.temperature.map_or(0.0, |temperature| 1.0 / temperature),
        farthest: sampling.min_p.map_or(f32::INFINITY, |min_p| 0.0 - min_p.ln()),
        race: race::start(sampling.seed, row.tokens.len() as u64),
    }
}

/// What the kernel says of a row.
pub fn device_sample(row: &SampleRow<'_>, chosen: &Chosen) -> Result<Sampled, SampleError> {
    let logprob = if row.sampling.logprobs { chosen.logprob } else { 0.0 };
    match chosen.status {
        0 => Ok(Sampled { token: chosen.token, logprob, top: Vec::new() }),
        1 => Err(SampleError::NotANumber),
        2 => Err(SampleError::Infinite),
        _ => Err(SampleError::NothingPossible),
    }
}
