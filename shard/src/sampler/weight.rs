//! The processed logit, its order and its weight.
//!
//! The processed logit is kept as a distance: `(max - logit) / temperature`, from 0 for the likeliest
//! token to +inf for an impossible one. It does not depend on how the vocabulary is split, since a
//! maximum is exact. The bits of a float that is not negative order like the float itself, so
//! `(bits, token)` as one `u64` is a [`Place`]: unique to a token, smaller for a likelier one, and
//! for the lower id of two equally likely ones.

/// Where a token stands among all tokens of its row.
pub(super) type Place = u64;

/// How logits become distances.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    max: f32,
    inverse_temperature: f32,
}

impl Scale {
    /// `max` is finite, `temperature` positive.
    pub(super) fn new(max: f32, temperature: f32) -> Self {
        Self { max, inverse_temperature: 1.0 / temperature }
    }

    #[inline(always)]
    pub(super) fn distance(self, logit: f32) -> f32 {
        (self.max - logit) * self.inverse_temperature
    }
}

#[inline(always)]
pub(super) fn place(distance: f32, token: u32) -> Place {
    u64::from(distance.to_bits()) << 32 | u64::from(token)
}

pub(super) fn distance_of(place: Place) -> f32 {
    f32::from_bits((place >> 32) as u32)
}

/// `e^-distance` within 2 units in the last place; 0 where that is below the normal floats. All
/// weights come from one kernel, so that a token has the same one in every count of it.
#[inline(always)]
pub(super) fn weights(distances: &[f32], weights: &mut [f32]) {
    trireme_kernels::decay(distances, weights);
}

pub(super) fn weight(distance: f32) -> f32 {
    let mut weight = [0.0];
    weights(&[distance], &mut weight);
    weight[0]
}

/// A weight (0 to 1) in units of 2⁻⁴⁰, rounded: integers add up alike in every order, on any number
/// of ranks. What is rounded away is below 10⁻¹² of the likeliest token each. A million tokens fit
/// into 60 bits.
#[inline(always)]
pub(super) fn mass(weight: f32) -> u64 {
    /// Between it and its double, doubles are 2⁻⁴⁰ apart: adding it rounds to such a multiple, whose
    /// number then stands in the low bits. A loop over it vectorises.
    const ROUND: f64 = 4096.0;
    (f64::from(weight) + ROUND).to_bits().wrapping_sub(ROUND.to_bits())
}

/// Tokens handled at a time, so that what is computed for them stays in the first-level cache.
pub(super) const BLOCK: usize = 256;
/// Tokens that are passed over at a time where most are not wanted.
pub(super) const PART: usize = 32;

/// Calls `visit(first token, distances)` for blocks of a row.
#[inline(always)]
pub(super) fn each_block(
    logits: &[f32],
    first: u32,
    scale: Scale,
    mut visit: impl FnMut(u32, &[f32]),
) {
    let mut distances = [0.0; BLOCK];
    let mut token = first;
    for block in logits.chunks(BLOCK) {
        for (distance, &logit) in distances.iter_mut().zip(block) {
            *distance = scale.distance(logit);
        }
        visit(token, &distances[..block.len()]);
        token += block.len() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::{distance_of, mass, place, weight};

    #[test]
    fn weights_are_exponentials() {
        let mut worst = 0.0f64;
        for step in 0..870_000 {
            let distance = step as f32 * 1e-4;
            let expected = (-f64::from(distance)).exp();
            worst = worst.max((f64::from(weight(distance)) / expected - 1.0).abs());
        }
        assert!(worst < 2.4e-7, "relative error {worst}");
        assert_eq!([0.0, 1e-30, 88.0, f32::INFINITY].map(weight), [1.0, 1.0, 0.0, 0.0]);
        assert_eq!([1.0, 0.5, 0.0].map(mass), [1 << 40, 1 << 39, 0]);
    }

    #[test]
    fn places_order_by_distance_then_token() {
        let ordered = [(0.0, 3), (0.0, 4), (1e-40, 0), (0.5, 1), (f32::INFINITY, 0)];
        let places = ordered.map(|(distance, token)| place(distance, token));
        assert!(places.is_sorted());
        assert_eq!(places.map(distance_of), ordered.map(|(distance, _)| distance));
    }
}
