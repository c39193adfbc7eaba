//! Locally typical sampling (Meister et al. 2023): of the tokens that the cuts keep, those whose
//! surprise is nearest to the expected one stay, as few as have `typical_p` of the mass.
//!
//! With distances `d` and weights `e^-d` that sum to `Z`, a token's surprise is `d + ln Z` and the
//! entropy is their weighted mean, so a token's oddness is `|d - mean(d)|`. The limit of oddness is
//! found as an order of floats that are not negative, eight bits at a time, from masses that are
//! integers: on any number of ranks the same. Tokens as odd as the limit stay all.

use trireme_collectives::{Collective, CollectiveError};
use trireme_kernels::Team;

use super::gather;
use super::row::{Row, each_row};
use super::weight::{BLOCK, each_block, mass, place, weights};

/// One bit pattern of eight bits each.
const BINS: usize = 256;

/// The search for one row's limit. Equal on all ranks but for `sums` and `bins`.
#[derive(Debug, Default)]
pub(super) struct Typical {
    /// Mass of the kept tokens, and of their distances (a weight times its distance is below 1).
    sums: [u64; 2],
    mean: f32,
    /// Mass that is left to reach among the tokens with the bits of `limit` that are known.
    rest: u64,
    limit: u32,
    bins: Vec<u64>,
}

/// Makes what is not typical impossible in every row that asks for it.
pub(super) fn apply(
    rows: &mut [Row<'_>],
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<(), CollectiveError> {
    if !rows.iter().any(is_asked) {
        return Ok(());
    }
    each_row(rows, team, is_asked, |row| row.typical.sums = sums(row));
    sum_over_ranks(rows, |typical| &mut typical.sums, tensor)?;
    for row in rows.iter_mut().filter(|row| is_asked(row)) {
        row.typical.aim(row.request.sampling.typical_p.unwrap_or(1.0));
    }
    for shift in [24, 16, 8, 0] {
        each_row(rows, team, is_asked, |row| row.typical.bins = count(row, shift));
        sum_over_ranks(rows, |typical| &mut typical.bins, tensor)?;
        rows.iter_mut().filter(|row| is_asked(row)).for_each(|row| row.typical.narrow(shift));
    }
    each_row(rows, team, is_asked, mask);
    Ok(())
}

fn is_asked(row: &Row<'_>) -> bool {
    row.scale().is_some() && row.request.sampling.typical_p.is_some()
}

fn sums(row: &Row<'_>) -> [u64; 2] {
    let mut sums = [0; 2];
    each_kept(row, |distance, weight| {
        sums[0] += mass(weight);
        sums[1] += mass(weight * distance);
    });
    sums
}

/// Mass by the eight bits of oddness at `shift`, of the tokens with the limit's bits above them.
fn count(row: &Row<'_>, shift: u32) -> Vec<u64> {
    let mut bins = vec![0; BINS];
    let Typical { mean, limit, .. } = row.typical;
    each_kept(row, |distance, weight| {
        let bits = oddness(distance, mean).to_bits();
        if u64::from(bits ^ limit) >> (shift + 8) == 0 {
            bins[(bits >> shift) as usize % BINS] += mass(weight);
        }
    });
    bins
}

fn oddness(distance: f32, mean: f32) -> f32 {
    (distance - mean).abs()
}

/// Calls `visit(distance, weight)` for this rank's tokens whose place is not behind the cut.
fn each_kept(row: &Row<'_>, mut visit: impl FnMut(f32, f32)) {
    let Some(scale) = row.scale() else { return };
    let cut = row.search.cut();
    let mut block = [0.0; BLOCK];
    each_block(row.logits, row.first, scale, |first, distances| {
        let block = &mut block[..distances.len()];
        weights(distances, block);
        for ((token, &distance), &weight) in (first..).zip(distances).zip(&*block) {
            if weight > 0.0 && place(distance, token) <= cut {
                visit(distance, weight);
            }
        }
    });
}

fn mask(row: &mut Row<'_>) {
    let Some(scale) = row.scale() else { return };
    let Typical { mean, limit, .. } = row.typical;
    for logit in row.logits.iter_mut() {
        if oddness(scale.distance(*logit), mean).to_bits() > limit {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Replaces what `part` picks of each row by the sum over the ranks.
fn sum_over_ranks<P: AsMut<[u64]>>(
    rows: &mut [Row<'_>],
    part: impl Fn(&mut Typical) -> &mut P,
    tensor: &mut dyn Collective,
) -> Result<(), CollectiveError> {
    if tensor.size() == 1 {
        return Ok(());
    }
    let mut asked: Vec<&mut [u64]> = rows
        .iter_mut()
        .filter(|row| is_asked(row))
        .map(|row| part(&mut row.typical).as_mut())
        .collect();
    let message = asked.concat();
    let all = gather(&message, tensor)?;
    for (index, word) in asked.iter_mut().flat_map(|part| part.iter_mut()).enumerate() {
        *word = all.iter().skip(index).step_by(message.len()).sum();
    }
    Ok(())
}

impl Typical {
    /// Starts the search for the tokens that have `share` of the mass; at least one.
    fn aim(&mut self, share: f32) {
        let [mass, distances] = self.sums;
        self.mean = (distances as f64 / mass as f64) as f32;
        self.rest = ((f64::from(share) * mass as f64).ceil() as u64).clamp(1, mass.max(1));
        self.limit = 0;
    }

    /// Finds the eight bits of the limit at `shift`.
    fn narrow(&mut self, shift: u32) {
        for (bin, &mass) in (0..).zip(&self.bins) {
            if self.rest <= mass {
                self.limit |= bin << shift;
                return;
            }
            self.rest -= mass;
        }
    }
}
