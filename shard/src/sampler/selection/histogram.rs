//! How many tokens, and how much mass, lie in each of 256 bins of places.

use crate::sampler::weight::{BLOCK, Place, distance_of, mass, weights};

pub(super) const BINS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Histogram {
    /// Empty, or counts and masses: `[2 * BINS]`.
    sums: Vec<u64>,
    digit: Digit,
    /// Lowest and highest place that was counted, where known.
    bounds: (Place, Place),
}

/// How a place falls into a bin.
#[derive(Clone, Copy, Debug, Default)]
enum Digit {
    /// By exponent and three bits of the mantissa of the distance: bin 0 is all below 2⁻¹⁶, bin 255
    /// all from about 2¹⁶ on.
    #[default]
    First,
    /// `(place - low) >> shift`, for places of one interval.
    Later { low: Place, high: Place, shift: u32 },
}

impl Digit {
    /// A distance's bits without the last 20: sign, exponent and three bits of mantissa.
    const DISTANCE_SHIFT: u32 = 20;
    /// Those of 2⁻¹⁶.
    const FIRST_BASE: u32 = (127 - 16) << 3;

    #[inline(always)]
    fn first_bin(distance: f32) -> u8 {
        let digits = distance.to_bits() >> Self::DISTANCE_SHIFT;
        digits.saturating_sub(Self::FIRST_BASE).min(BINS as u32 - 1) as u8
    }

    /// The places of a bin, both ends included.
    fn interval(self, bin: usize) -> (Place, Place) {
        let bin = bin as u64;
        match self {
            Self::First => {
                let shift = Self::DISTANCE_SHIFT + 32;
                let start = (u64::from(Self::FIRST_BASE) + bin) << shift;
                let last = start + ((1 << shift) - 1);
                let is_last = bin == BINS as u64 - 1;
                (if bin == 0 { 0 } else { start }, if is_last { Place::MAX } else { last })
            }
            Self::Later { low, high, shift } => {
                // A bin that holds a place starts inside the interval; only its end may overflow.
                let start = low.saturating_add(bin << shift);
                (start, start.saturating_add((1 << shift) - 1).min(high))
            }
        }
    }
}

/// A histogram of a whole row in the making. Neighbouring tokens count in different lanes: most
/// tokens fall into few bins, and an addition to a bin would wait for the one before it. Count and
/// mass lie side by side: one addition of two words.
pub(super) struct Tally {
    sums: [[[u64; 2]; BINS]; Self::LANES],
}

impl Tally {
    const LANES: usize = 4;

    pub(super) fn new() -> Self {
        Self { sums: [[[0; 2]; BINS]; Self::LANES] }
    }

    /// Counts a block of distances.
    pub(super) fn count_block(&mut self, distances: &[f32]) {
        self.add(distances, &[0; BLOCK][..distances.len()]);
    }

    /// Counts a block of distances and adds up their masses.
    pub(super) fn add_block(&mut self, distances: &[f32]) {
        let mut block_weights = [0.0f32; BLOCK];
        let block_weights = &mut block_weights[..distances.len()];
        weights(distances, block_weights);
        let mut masses = [0; BLOCK];
        masses.iter_mut().zip(&*block_weights).for_each(|(out, &weight)| *out = mass(weight));
        self.add(distances, &masses[..distances.len()]);
    }

    #[inline(always)]
    fn add(&mut self, distances: &[f32], masses: &[u64]) {
        let mut bins = [0u8; BLOCK];
        let found = distances.iter().map(|&distance| Digit::first_bin(distance));
        bins.iter_mut().zip(found).for_each(|(bin, found)| *bin = found);
        let (fours, rest) = bins[..distances.len()].as_chunks::<{ Self::LANES }>();
        let (four_masses, rest_masses) = masses.as_chunks::<{ Self::LANES }>();
        for (four, masses) in fours.iter().zip(four_masses) {
            for lane in 0..Self::LANES {
                Self::add_one(&mut self.sums[lane][usize::from(four[lane])], masses[lane]);
            }
        }
        for (&bin, &mass) in rest.iter().zip(rest_masses) {
            Self::add_one(&mut self.sums[0][usize::from(bin)], mass);
        }
    }

    /// Cannot overflow: see `mass`.
    #[inline(always)]
    fn add_one(sums: &mut [u64; 2], mass: u64) {
        *sums = [sums[0].wrapping_add(1), sums[1].wrapping_add(mass)];
    }

    pub(super) fn finish(&self) -> Histogram {
        let column = |word: usize| {
            (0..BINS).map(move |bin| self.sums.iter().map(|lane| lane[bin][word]).sum::<u64>())
        };
        let sums = column(0).chain(column(1)).collect();
        Histogram { sums, digit: Digit::First, bounds: (0, Place::MAX) }
    }
}

impl Histogram {
    /// Words of one in a message.
    pub(super) const WORDS: usize = 2 * BINS + 2;

    /// Of places that all lie in `interval`.
    pub(super) fn of_places(places: &[Place], (low, high): (Place, Place)) -> Self {
        let bits = Place::BITS - (high - low).leading_zeros();
        let shift = bits.saturating_sub(BINS.ilog2());
        let mut sums = vec![0; 2 * BINS];
        for block in places.chunks(BLOCK) {
            let (mut distances, mut block_weights) = ([0.0; BLOCK], [0.0; BLOCK]);
            let found = block.iter().map(|&place| distance_of(place));
            distances.iter_mut().zip(found).for_each(|(out, distance)| *out = distance);
            weights(&distances[..block.len()], &mut block_weights[..block.len()]);
            for (&place, &weight) in block.iter().zip(&block_weights) {
                let bin = ((place - low) >> shift) as usize;
                sums[bin] += 1;
                sums[BINS + bin] += mass(weight);
            }
        }
        let lowest = places.iter().copied().min().unwrap_or(Place::MAX);
        let highest = places.iter().copied().max().unwrap_or(0);
        Self { sums, digit: Digit::Later { low, high, shift }, bounds: (lowest, highest) }
    }

    /// Tokens and mass in a bin.
    pub(super) fn bin(&self, bin: usize) -> (u64, u64) {
        (self.sums[bin], self.sums[BINS + bin])
    }

    /// Mass in all bins.
    pub(super) fn mass(&self) -> u64 {
        self.sums[BINS..].iter().sum()
    }

    /// The places of a bin that holds some, both ends included.
    pub(super) fn interval(&self, bin: usize) -> (Place, Place) {
        let (low, high) = self.digit.interval(bin);
        (low.max(self.bounds.0), high.min(self.bounds.1))
    }

    pub(super) fn write(&self, message: &mut Vec<u64>) {
        message.extend_from_slice(&self.sums);
        message.extend([self.bounds.0, self.bounds.1]);
    }

    /// Becomes the sum of what the ranks wrote about the same interval.
    pub(super) fn read_sum<'a>(&mut self, of_ranks: impl Iterator<Item = &'a [u64]>) {
        self.sums.fill(0);
        self.bounds = (Place::MAX, 0);
        for words in of_ranks {
            self.sums.iter_mut().zip(words).for_each(|(sum, word)| *sum += word);
            self.bounds.0 = self.bounds.0.min(words[2 * BINS]);
            self.bounds.1 = self.bounds.1.max(words[2 * BINS + 1]);
        }
    }
}
