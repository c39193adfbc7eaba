//! The likeliest token of each row, and what its raw logprobs need, in one gather.

use trireme_collectives::{Collective, CollectiveError};
use trireme_kernels::Team;

use super::row::{Row, each_row};
use super::weight::{BLOCK, Scale, each_block, weights};
use super::{Constraint, SampleError, Sampling, gather};

/// What this rank's slice of a row says.
#[derive(Clone, Debug)]
pub(super) struct LocalPeak {
    /// Largest processed logit, its lowest token, and that token's raw logit.
    best: Best,
    raw: f32,
    /// Largest raw logit, and the sum of `e^(raw - raw_max)`; only where logprobs are wanted.
    raw_max: f32,
    raw_sum: f32,
    /// The raw n best.
    top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Best {
    pub(super) value: f32,
    /// `u32::MAX` if there is none.
    pub(super) token: u32,
    pub(super) has_nan: bool,
    /// The row's grammar has no mask on this rank.
    pub(super) broken: bool,
}

impl Default for Best {
    fn default() -> Self {
        Self { value: f32::NEG_INFINITY, token: u32::MAX, has_nan: false, broken: false }
    }
}

impl Default for LocalPeak {
    fn default() -> Self {
        Self {
            best: Best::default(),
            raw: f32::NEG_INFINITY,
            raw_max: f32::NEG_INFINITY,
            raw_sum: 0.0,
            top: Vec::new(),
        }
    }
}

/// What all slices of a row say together. Equal on all ranks.
#[derive(Clone, Debug)]
pub(super) struct Peak {
    /// The largest processed logit; finite.
    pub(super) max: f32,
    /// The lowest token that has it, and that token's raw logit.
    pub(super) token: u32,
    pub(super) raw: f32,
    pub(super) normaliser: Normaliser,
    /// The raw n best, best first, lowest token first on a tie.
    pub(super) top: Vec<(u32, f32)>,
}

/// The log-sum-exp of the raw logits, in two parts: `max + ln_sum`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Normaliser {
    max: f32,
    ln_sum: f64,
}

impl Normaliser {
    /// Joins the slices of a row, in rank order: of each its largest logit and the sum of
    /// `e^(logit - largest)`.
    pub(super) fn of(slices: &[(f32, f32)]) -> Self {
        let max = slices.iter().map(|(max, _)| *max).fold(f32::NEG_INFINITY, f32::max);
        let scaled = |&(slice_max, sum): &(f32, f32)| match sum {
            0.0 => 0.0,
            sum => f64::from(sum) * (f64::from(slice_max) - f64::from(max)).exp(),
        };
        Self { max, ln_sum: slices.iter().map(scaled).sum::<f64>().ln() }
    }

    /// The same float for the same logit, whichever way its token was found.
    pub(super) fn logprob(self, raw: f32) -> f32 {
        (f64::from(raw) - f64::from(self.max) - self.ln_sum) as f32
    }
}

/// Fills every row's `peak`.
pub(super) fn find(
    rows: &mut [Row<'_>],
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<(), CollectiveError> {
    each_row(rows, team, |_| true, survey);
    let mut message: Vec<u32> = Vec::new();
    for row in &*rows {
        row.local.write(row.request.sampling.top_logprobs, &mut message);
    }
    let all = gather(&message, tensor)?;
    let mut start = 0;
    for row in rows {
        let top = row.request.sampling.top_logprobs;
        let words = start..start + LocalPeak::words(top);
        start = words.end;
        let slices: Vec<LocalPeak> =
            all.chunks(message.len()).map(|rank| LocalPeak::read(&rank[words.clone()])).collect();
        row.peak = merge(&slices, top);
    }
    Ok(())
}

/// Reads one row's slice: raw statistics first, then the edits, then the peak of what they left.
fn survey(row: &mut Row<'_>) {
    let sampling: &Sampling = row.request.sampling;
    let raw = best_of(row.logits, row.first);
    let mut local = LocalPeak { best: raw, raw: raw.value, ..LocalPeak::default() };
    if sampling.logprobs || sampling.top_logprobs > 0 {
        local.raw_max = raw.value;
        local.raw_sum = sum_of_weights(row.logits, raw.value);
        local.top = largest(row.logits, row.first, sampling.top_logprobs);
    }
    row.local = local;
    row.local.best.broken = matches!(row.request.constraint, Constraint::Broken);
    if sampling.has_edits() || matches!(row.request.constraint, Constraint::Mask(_)) {
        row.edit();
        let best = best_of(row.logits, row.first);
        row.local.best = Best { has_nan: best.has_nan || raw.has_nan, ..best };
        if best.token != u32::MAX {
            row.local.raw = row.raw(best.token);
        }
    }
}

/// The largest value and its lowest token, in one pass that vectorises.
pub(super) fn best_of(logits: &[f32], first: u32) -> Best {
    const LANES: usize = 32;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [0u32; LANES];
    let (chunks, tail) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let value = chunk[lane];
            max[lane] = if value > max[lane] { value } else { max[lane] };
            nan[lane] |= u32::from(value.is_nan());
        }
    }
    let has_nan = nan.iter().any(|&nan| nan != 0) || tail.iter().any(|value| value.is_nan());
    let value = max.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let index = logits.iter().position(|&logit| logit == value);
    let token = index.map_or(u32::MAX, |index| first + index as u32);
    Best { value, token, has_nan, broken: false }
}

/// `Σ e^(logit - max)`. Blocks are summed in f32 lanes, the blocks in f64.
pub(super) fn sum_of_weights(logits: &[f32], max: f32) -> f32 {
    const LANES: usize = 16;
    if !max.is_finite() {
        return 0.0;
    }
    let mut sum = 0.0f64;
    let mut block_weights = [0.0; BLOCK];
    each_block(logits, 0, Scale::new(max, 1.0), |_, distances| {
        let block_weights = &mut block_weights[..distances.len()];
        weights(distances, block_weights);
        let mut lanes = [0.0f32; LANES];
        let (chunks, tail) = block_weights.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                lanes[lane] += chunk[lane];
            }
        }
        sum += f64::from(lanes.iter().sum::<f32>());
        sum += tail.iter().map(|&weight| f64::from(weight)).sum::<f64>();
    });
    sum as f32
}

/// The `n` largest values, largest first, lowest token first on a tie.
fn largest(logits: &[f32], first: u32, n: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
    if n == 0 {
        return top;
    }
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in (first..).zip(logits) {
        if top.len() == n && logit.partial_cmp(&least) != Some(std::cmp::Ordering::Greater) {
            continue;
        }
        // After the equal ones: those have lower ids.
        let at = top.partition_point(|&(_, value)| value >= logit);
        top.insert(at, (token, logit));
        top.truncate(n);
        least = top.last().map_or(f32::NEG_INFINITY, |&(_, value)| value);
    }
    top
}

impl LocalPeak {
    const FIXED_WORDS: usize = 6;

    /// Words of a message about a row that wants `top` alternatives.
    fn words(top: usize) -> usize {
        Self::FIXED_WORDS + 2 * top
    }

    fn write(&self, top: usize, message: &mut Vec<u32>) {
        message.extend([
            u32::from(self.best.has_nan) | u32::from(self.best.broken) << 1,
            self.best.token,
            self.best.value.to_bits(),
            self.raw.to_bits(),
            self.raw_max.to_bits(),
            self.raw_sum.to_bits(),
        ]);
        let absent = (u32::MAX, f32::NEG_INFINITY);
        let entries = self.top.iter().copied().chain(std::iter::repeat(absent));
        message.extend(entries.take(top).flat_map(|(token, value)| [token, value.to_bits()]));
    }

    fn read(words: &[u32]) -> Self {
        let float = |at: usize| f32::from_bits(words[at]);
        let (top, _) = words[Self::FIXED_WORDS..].as_chunks::<2>();
        Self {
            best: Best {
                has_nan: words[0] & 1 != 0,
                broken: words[0] & 2 != 0,
                token: words[1],
                value: float(2),
            },
            raw: float(3),
            raw_max: float(4),
            raw_sum: float(5),
            top: top
                .iter()
                .filter(|entry| entry[0] != u32::MAX)
                .map(|&[token, bits]| (token, f32::from_bits(bits)))
                .collect(),
        }
    }
}

/// Merges the slices in rank order.
fn merge(slices: &[LocalPeak], top: usize) -> Result<Peak, SampleError> {
    if slices.iter().any(|slice| slice.best.broken) {
        return Err(SampleError::Grammar);
    }
    if slices.iter().any(|slice| slice.best.has_nan) {
        return Err(SampleError::NotANumber);
    }
    let mut best = LocalPeak::default();
    // A later slice has higher tokens: it wins only by a larger value.
    for slice in slices.iter().filter(|slice| slice.best.token != u32::MAX) {
        if slice.best.value > best.best.value || best.best.token == u32::MAX {
            best = slice.clone();
        }
    }
    match best.best.value {
        f32::INFINITY => return Err(SampleError::Infinite),
        f32::NEG_INFINITY => return Err(SampleError::NothingPossible),
        _ => {}
    }
    let sums: Vec<(f32, f32)> = slices.iter().map(|slice| (slice.raw_max, slice.raw_sum)).collect();
    let mut all: Vec<(u32, f32)> =
        slices.iter().flat_map(|slice| slice.top.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(top);
    Ok(Peak {
        max: best.best.value,
        token: best.best.token,
        raw: best.raw,
        normaliser: Normaliser::of(&sums),
        top: all,
    })
}
