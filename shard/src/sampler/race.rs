//! The draw: every kept token runs a race, and the fastest is the sample.
//!
//! If `u` is uniform in (0, 1), then `-ln(u) / weight` is exponential with rate `weight`, and the
//! least of such times belongs to a token with a probability proportional to its weight. In
//! logarithms that is Gumbel-max (Gumbel 1954): `argmin ln(-ln u) + distance`. A token's `u` is a
//! hash of (seed, position, token), so its time depends on nothing else, and ranks need to compare
//! their local winners only.

use trireme_collectives::{Collective, CollectiveError};
use trireme_kernels::Team;

use super::gather;
use super::row::{Row, each_row};
use super::weight::{
    BLOCK, PART, Place, Scale, distance_of, each_block, place, weights as weights_of,
};

/// The first to arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Winner {
    /// Natural logarithm of the time.
    time: f64,
    token: u32,
    raw: f32,
}

impl Default for Winner {
    /// Nobody: slower than everyone.
    fn default() -> Self {
        Self { time: f64::INFINITY, token: u32::MAX, raw: f32::NEG_INFINITY }
    }
}

/// Fills `drawn` of every row that is not greedy.
pub(super) fn run(
    rows: &mut [Row<'_>],
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<(), CollectiveError> {
    each_row(
        rows,
        team,
        |row| row.scale().is_some(),
        |row| {
            let Some(scale) = row.scale() else { return };
            let race = Race::new(row.request.sampling.seed, row.request.tokens.len() as u64);
            let mut winner = race.winner(row.logits, row.first, scale, row.search.cut());
            if winner.token != u32::MAX {
                winner.raw = row.raw(winner.token);
            }
            row.winner = winner;
        },
    );
    let mut runners: Vec<&mut Row<'_>> =
        rows.iter_mut().filter(|row| row.scale().is_some()).collect();
    if runners.is_empty() {
        return Ok(());
    }
    let message: Vec<[u64; 2]> = runners.iter().map(|row| row.winner.words()).collect();
    let all = gather(&message, tensor)?;
    for (index, row) in runners.iter_mut().enumerate() {
        let of_ranks = all.chunks(message.len()).map(|rank| Winner::from_words(rank[index]));
        // Of two at the same time the first, who has the lower token.
        let winner = of_ranks.reduce(|a, b| if b.time < a.time { b } else { a });
        row.drawn = winner.map(|winner| (winner.token, winner.raw));
    }
    Ok(())
}

impl Winner {
    fn words(self) -> [u64; 2] {
        [self.time.to_bits(), u64::from(self.token) << 32 | u64::from(self.raw.to_bits())]
    }

    fn from_words([time, rest]: [u64; 2]) -> Self {
        let (token, raw) = ((rest >> 32) as u32, f32::from_bits(rest as u32));
        Self { time: f64::from_bits(time), token, raw }
    }
}

/// The random numbers of one row: a counter-based generator, splitmix64 (Steele, Lea & Flood 2014)
/// with the token as its counter.
struct Race {
    start: u64,
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Where the random numbers of a row start: a token's is `mix(start + (token + 1) * GOLDEN)`.
#[cfg(feature = "cuda")]
pub(super) fn start(seed: u64, position: u64) -> u64 {
    Race::new(seed, position).start
}

#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Race {
    /// `position` is that of the token to be drawn.
    fn new(seed: u64, position: u64) -> Self {
        let seeded = mix(seed.wrapping_add(GOLDEN));
        Self { start: mix(seeded ^ position.wrapping_add(1).wrapping_mul(GOLDEN)) }
    }

    /// `1 - u` of a token, in (0, 1), never an end.
    #[inline(always)]
    fn uniform(&self, token: u32) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 52) as f64;
        let hash = mix(self.start.wrapping_add((u64::from(token) + 1).wrapping_mul(GOLDEN)));
        ((hash >> 12) as f64 + 0.5) * STEP
    }

    /// The fastest token of this slice whose place is not behind `cut`.
    fn winner(&self, logits: &[f32], first: u32, scale: Scale, cut: Place) -> Winner {
        let mut lead = Lead { race: self, best: Winner::default(), bound: f64::INFINITY };
        let mut weights = [0.0f32; BLOCK];
        let farthest = distance_of(cut);
        each_block(logits, first, scale, |first, distances| {
            if cut == Place::MAX {
                weights_of(distances, &mut weights[..distances.len()]);
                for ((token, &distance), &weight) in (first..).zip(distances).zip(&weights) {
                    lead.run(token, distance, weight);
                }
                return;
            }
            for (first, part) in (first..).step_by(PART).zip(distances.chunks(PART)) {
                if part.iter().filter(|&&distance| distance <= farthest).count() == 0 {
                    continue;
                }
                let weights = &mut weights[..part.len()];
                weights_of(part, weights);
                for ((token, &distance), &weight) in (first..).zip(part).zip(&*weights) {
                    if distance <= farthest && place(distance, token) <= cut {
                        lead.run(token, distance, weight);
                    }
                }
            }
        });
        lead.best
    }
}

/// The best so far.
struct Lead<'a> {
    race: &'a Race,
    best: Winner,
    /// The best time itself, not its logarithm, a little enlarged.
    bound: f64,
}

impl Lead<'_> {
    #[inline(always)]
    fn run(&mut self, token: u32, distance: f32, weight: f32) {
        let v = self.race.uniform(token);
        // -ln(1 - v) >= v, so most tokens are known to be too slow without a logarithm.
        if v > self.bound * f64::from(weight) {
            return;
        }
        let time = (-(-v).ln_1p()).ln() + f64::from(distance);
        if time < self.best.time {
            self.best = Winner { time, token, ..self.best };
            self.bound = time.exp() * 1.001;
        }
    }
}

#[cfg(test)]
pub(super) fn log_time(seed: u64, position: usize, token: u32, distance: f32) -> f64 {
    let v = Race::new(seed, position as u64).uniform(token);
    (-(-v).ln_1p()).ln() + f64::from(distance)
}
