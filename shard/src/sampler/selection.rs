//! Top-k, top-p and min-p: each keeps the likeliest tokens down to some [`Place`], the cut.
//!
//! A cut is found by radix selection. All ranks count their tokens (and add up their masses) in 256
//! bins of places, the histograms are gathered and summed, and the bin in which the goal is reached
//! is searched further, by its own tokens only. Once a bin holds few tokens, their places are
//! gathered and the cut is read off. The first digit has eight bins for every factor of two in
//! distance, so for real logits two or three gathers are the rule; if all logits are equal it takes
//! two more.
//!
//! Top-p is a share of what top-k kept (as in transformers and vLLM), so a row that has both is
//! searched twice, from the same first histogram.

mod histogram;

use trireme_collectives::{Collective, CollectiveError};
use trireme_kernels::Team;

use super::gather;
use super::row::{Row, each_row};
use super::weight::{PART, Place, distance_of, each_block, mass, place, weight};
use histogram::{BINS, Histogram, Tally};

/// A bin with no more tokens than this is gathered instead of being split.
const FEW: u64 = 512;

/// The search for one row's cut. Equal on all ranks but for `candidates`.
#[derive(Debug)]
pub(super) struct Search {
    /// What the cut must reach, and how much of it is left to reach inside the interval.
    goal: Option<(Goal, u64)>,
    /// The places where the cut may be, both ends included.
    interval: (Place, Place),
    /// Tokens of the row in the interval, over all ranks.
    tokens_inside: u64,
    /// Mass of the tokens before the interval; after the search, of all tokens up to the cut.
    mass_before: u64,
    /// This rank's places in the interval, once `is_compact`.
    candidates: Vec<Place>,
    is_compact: bool,
    /// Of the whole row, over all ranks.
    first: Histogram,
    /// Of the interval.
    histogram: Histogram,
    /// The last place that is kept by every filter searched so far.
    cut: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// This many tokens.
    Count,
    /// This much mass.
    Mass,
}

impl Default for Search {
    fn default() -> Self {
        Self {
            goal: None,
            interval: (0, Place::MAX),
            tokens_inside: 0,
            mass_before: 0,
            candidates: Vec::new(),
            is_compact: false,
            first: Histogram::default(),
            histogram: Histogram::default(),
            cut: Place::MAX,
        }
    }
}

/// Finds the cut of every row that is not greedy.
pub(super) fn find_cuts(
    rows: &mut [Row<'_>],
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<(), CollectiveError> {
    each_row(rows, team, is_searched, |row| row.search.histogram = count_row(row));
    sum_over_ranks(rows, is_searched, tensor)?;
    for row in rows.iter_mut().filter(|row| is_searched(row)) {
        row.search.first = std::mem::take(&mut row.search.histogram);
        match (row.request.sampling.top_k, row.request.sampling.top_p) {
            (Some(k), _) => row.search.aim(Goal::Count, u64::from(k)),
            (None, Some(p)) => row.search.aim_at_share(p, row.search.first.mass()),
            (None, None) => {}
        }
    }
    descend(rows, tensor, team)?;
    for row in rows.iter_mut() {
        let sampling = row.request.sampling;
        if let (true, Some(_), Some(p)) = (is_searched(row), sampling.top_k, sampling.top_p) {
            row.search.aim_at_share(p, row.search.mass_before);
        }
        if let Some(min_p) = sampling.min_p {
            // As likely as min_p times the best is a distance of -ln(min_p), ties included; the
            // zero turns -0 into 0.
            row.search.cut = row.search.cut.min(place(0.0 - min_p.ln(), u32::MAX));
        }
    }
    descend(rows, tensor, team)
}

/// Whether a row's cut depends on its distribution.
fn is_searched(row: &Row<'_>) -> bool {
    let sampling = row.request.sampling;
    row.scale().is_some() && (sampling.top_k.is_some() || sampling.top_p.is_some())
}

/// Searches every row that has a goal to its end.
fn descend(
    rows: &mut [Row<'_>],
    tensor: &mut dyn Collective,
    team: &Team,
) -> Result<(), CollectiveError> {
    let is_open = |row: &Row<'_>| row.search.goal.is_some();
    let is_wide = |row: &Row<'_>| is_open(row) && row.search.tokens_inside > FEW;
    // Ends: each turn divides an interval of unique places by 256.
    loop {
        each_row(rows, team, is_open, |row| {
            compact(row);
            if is_wide(row) {
                row.search.histogram =
                    Histogram::of_places(&row.search.candidates, row.search.interval);
            }
        });
        if !rows.iter().any(is_wide) {
            return finish(rows, tensor);
        }
        sum_over_ranks(rows, is_wide, tensor)?;
        for row in rows.iter_mut().filter(|row| is_wide(row)) {
            let histogram = std::mem::take(&mut row.search.histogram);
            row.search.narrow(&histogram);
        }
    }
}

/// Counts the whole slice by the first digit of places; masses only where they will be needed.
fn count_row(row: &Row<'_>) -> Histogram {
    let mut tally = Tally::new();
    let needs_mass = row.request.sampling.top_p.is_some();
    if let Some(scale) = row.scale() {
        each_block(row.logits, row.first, scale, |_, distances| {
            if needs_mass {
                tally.add_block(distances);
            } else {
                tally.count_block(distances);
            }
        });
    }
    tally.finish()
}

/// Reduces a row's candidates to those inside its interval.
fn compact(row: &mut Row<'_>) {
    let (low, high) = row.search.interval;
    if row.search.is_compact {
        row.search.candidates.retain(|place| (low..=high).contains(place));
        return;
    }
    row.search.is_compact = true;
    let mut candidates = std::mem::take(&mut row.search.candidates);
    candidates.clear();
    let Some(scale) = row.scale() else { return };
    let (nearest, farthest) = (distance_of(low), (high >> 32) as u32);
    each_block(row.logits, row.first, scale, |first, distances| {
        // Most parts have none: this loop vectorises, the next does not.
        let is_near = |d: &f32| (*d >= nearest) & (d.to_bits() <= farthest);
        for (first, part) in (first..).step_by(PART).zip(distances.chunks(PART)) {
            if part.iter().filter(|distance| is_near(distance)).count() > 0 {
                let places = (first..).zip(part).map(|(token, &distance)| place(distance, token));
                candidates.extend(places.filter(|place| (low..=high).contains(place)));
            }
        }
    });
    row.search.candidates = candidates;
}

/// Replaces the histogram of each row that is `included` by the sum over the ranks.
fn sum_over_ranks(
    rows: &mut [Row<'_>],
    included: impl Fn(&Row<'_>) -> bool,
    tensor: &mut dyn Collective,
) -> Result<(), CollectiveError> {
    let mut message = Vec::new();
    for row in rows.iter().filter(|row| included(row)) {
        row.search.histogram.write(&mut message);
    }
    if tensor.size() == 1 || message.is_empty() {
        return Ok(());
    }
    let all = gather(&message, tensor)?;
    for (index, row) in rows.iter_mut().filter(|row| included(row)).enumerate() {
        let words = index * Histogram::WORDS..(index + 1) * Histogram::WORDS;
        let of_ranks = all.chunks(message.len()).map(|rank| &rank[words.clone()]);
        row.search.histogram.read_sum(of_ranks);
    }
    Ok(())
}

/// Gathers the places that are left and reads the cuts off.
fn finish(rows: &mut [Row<'_>], tensor: &mut dyn Collective) -> Result<(), CollectiveError> {
    let mut message: Vec<Place> = Vec::new();
    for search in rows.iter().map(|row| &row.search).filter(|search| search.goal.is_some()) {
        // No rank has more than all have together. The padding is no place: its distance is NaN.
        let places = search.candidates.iter().copied().chain(std::iter::repeat(Place::MAX));
        message.extend(places.take(search.tokens_inside as usize));
    }
    if message.is_empty() {
        return Ok(());
    }
    let all = gather(&message, tensor)?;
    let mut start = 0;
    for search in rows.iter_mut().map(|row| &mut row.search).filter(|s| s.goal.is_some()) {
        let words = start..start + search.tokens_inside as usize;
        start = words.end;
        let of_ranks = all.chunks(message.len()).flat_map(|rank| &rank[words.clone()]);
        let mut places: Vec<Place> = of_ranks.copied().filter(|&p| p != Place::MAX).collect();
        places.sort_unstable();
        search.read_off(&places);
    }
    Ok(())
}

impl Search {
    /// The last place that is kept.
    pub(super) fn cut(&self) -> Place {
        self.cut
    }

    /// Starts a search for the first place at which `goal` is reached.
    fn aim(&mut self, goal: Goal, rest: u64) {
        self.goal = Some((goal, rest));
        self.interval = (0, Place::MAX);
        self.mass_before = 0;
        self.is_compact = false;
        let first = std::mem::take(&mut self.first);
        self.narrow(&first);
        self.first = first;
    }

    /// Starts a search for the fewest tokens that have `share` of `mass`; at least one.
    fn aim_at_share(&mut self, share: f32, mass: u64) {
        let wanted = (f64::from(share) * mass as f64).ceil() as u64;
        self.aim(Goal::Mass, wanted.clamp(1, mass.max(1)));
    }

    /// Narrows the interval to the bin of `histogram` in which the goal is reached. If it is not
    /// reached there are no more tokens than asked for, and all are kept.
    fn narrow(&mut self, histogram: &Histogram) {
        let Some((goal, mut rest)) = self.goal else { return };
        for bin in 0..BINS {
            let (count, mass) = histogram.bin(bin);
            let reached = if goal == Goal::Count { count } else { mass };
            if rest <= reached {
                self.goal = Some((goal, rest));
                self.interval = histogram.interval(bin);
                self.tokens_inside = count;
                return;
            }
            rest -= reached;
            self.mass_before += mass;
        }
        self.goal = None;
    }

    /// Ends the search, given all places of the interval in order.
    fn read_off(&mut self, places: &[Place]) {
        let Some((goal, mut rest)) = self.goal.take() else { return };
        for &place in places {
            let mass = mass(weight(distance_of(place)));
            self.mass_before += mass;
            rest = rest.saturating_sub(if goal == Goal::Count { 1 } else { mass });
            if rest == 0 {
                self.cut = self.cut.min(place);
                return;
            }
        }
    }
}
