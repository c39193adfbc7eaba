//! Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538; Mixtral: Jiang et al. 2024,
//! arXiv:2401.04088): which rows go to which expert, and the way there and back.
//!
//! Only the chosen experts' products are computed. A row's result is the sum over its experts in
//! ascending order, so it does not depend on the other rows.

/// The rows of a batch sorted by expert. Kept between calls.
#[derive(Default)]
pub struct Routing {
    /// Expert `e` has `rows[starts[e] .. starts[e + 1]]`.
    starts: Vec<usize>,
    rows: Vec<usize>,
    /// Beside `rows`: what the expert's answer counts.
    weights: Vec<f32>,
    /// Of one row at a time: probabilities and experts from the likeliest.
    probabilities: Vec<f32>,
    order: Vec<usize>,
    /// `(expert, row, weight)`, by row.
    chosen: Vec<(usize, usize, f32)>,
}

impl Routing {
    /// Sends each row to the `per_token` experts with the largest `logits`; `logits`:
    /// `[rows, experts]`. An expert counts by its softmax probability over all experts, or, with
    /// `renormalise`, over the chosen ones. Of equal logits the first goes first.
    ///
    /// # Panics
    /// If `logits` are not whole rows, or fewer experts are there than chosen.
    pub fn choose(&mut self, logits: &[f32], experts: usize, per_token: usize, renormalise: bool) {
        assert!(per_token > 0 && per_token <= experts, "{per_token} of {experts} experts");
        assert!(logits.len().is_multiple_of(experts), "{} logits of {experts}", logits.len());
        self.chosen.clear();
        for (row, logits) in logits.chunks_exact(experts).enumerate() {
            self.choose_row(row, logits, per_token, renormalise);
        }
        self.sort(experts);
    }

    fn choose_row(&mut self, row: usize, logits: &[f32], per_token: usize, renormalise: bool) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.probabilities.clear();
        self.probabilities.extend(logits.iter().map(|logit| (logit - largest).exp()));
        self.order.clear();
        self.order.extend(0..logits.len());
        let descending = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if per_token < logits.len() {
            self.order.select_nth_unstable_by(per_token - 1, descending);
        }
        let order = &mut self.order[..per_token];
        order.sort_unstable();
        let sum: f32 = match renormalise {
            true => order.iter().map(|&expert| self.probabilities[expert]).sum(),
            false => self.probabilities.iter().sum(),
        };
        let weight = |expert: usize| self.probabilities[expert] / sum;
        self.chosen.extend(order.iter().map(|&expert| (expert, row, weight(expert))));
    }

    /// By expert, and within an expert by row.
    fn sort(&mut self, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &(expert, ..) in &self.chosen {
            self.starts[expert + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.rows.resize(self.chosen.len(), 0);
        self.weights.resize(self.chosen.len(), 0.0);
        // Counting sort; `order` now holds where the next row of each expert goes.
        self.order.clear();
        self.order.extend_from_slice(&self.starts[..experts]);
        for &(expert, row, weight) in &self.chosen {
            let place = self.order[expert];
            self.order[expert] += 1;
            (self.rows[place], self.weights[place]) = (row, weight);
        }
    }

    /// Rows of an expert, ascending.
    pub fn rows_of(&self, expert: usize) -> &[usize] {
        &self.rows[self.starts[expert]..self.starts[expert + 1]]
    }

    /// What its answers count, beside [`Routing::rows_of`].
    pub fn weights_of(&self, expert: usize) -> &[f32] {
        &self.weights[self.starts[expert]..self.starts[expert + 1]]
    }

    /// Copies the expert's rows of `x` one after the other; both have rows of `width`.
    ///
    /// # Panics
    /// If a row is not in `x`, or `to` is too short.
    pub fn gather(&self, expert: usize, x: &[f32], width: usize, to: &mut [f32]) {
        for (to, &row) in to.chunks_exact_mut(width).zip(self.rows_of(expert)) {
            to.copy_from_slice(&x[row * width..][..width]);
        }
    }

    /// Adds the expert's weighted answers to its rows of `out`.
    ///
    /// # Panics
    /// If a row is not in `out`.
    pub fn scatter(&self, expert: usize, answers: &[f32], width: usize, out: &mut [f32]) {
        let rows = self.rows_of(expert).iter().zip(self.weights_of(expert));
        for (answer, (&row, weight)) in answers.chunks_exact(width).zip(rows) {
            for (out, answer) in out[row * width..][..width].iter_mut().zip(answer) {
                *out += weight * answer;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(row, weight)` of each expert.
    fn check(per_token: usize, renormalise: bool, logits: &[f32], expected: [&[(usize, f32)]; 3]) {
        let mut routing = Routing::default();
        // What an earlier, larger call left behind does not show.
        routing.choose(&[1.0; 12], 3, 3, false);
        routing.choose(logits, 3, per_token, renormalise);
        for (expert, expected) in expected.iter().enumerate() {
            let rows: Vec<usize> = expected.iter().map(|(row, _)| *row).collect();
            assert_eq!(routing.rows_of(expert), rows, "expert {expert} of {logits:?}");
            let answers = vec![1.0; rows.len()];
            let mut out = vec![0.0; logits.len() / 3];
            routing.scatter(expert, &answers, 1, &mut out);
            for &(row, weight) in *expected {
                assert!((out[row] - weight).abs() < 1e-6, "row {row}: {} {weight}", out[row]);
            }
        }
    }

    #[test]
    fn rows_go_to_their_best_experts() {
        // Probabilities 1/7, 2/7, 4/7, and the other way round.
        let (two, four) = (2f32.ln(), 4f32.ln());
        let logits = [0.0, two, four, four, two, 0.0];
        check(1, true, &logits, [&[(1, 1.0)], &[], &[(0, 1.0)]]);
        check(1, false, &logits, [&[(1, 4.0 / 7.0)], &[], &[(0, 4.0 / 7.0)]]);
        let thirds = (1.0 / 3.0, 2.0 / 3.0);
        let middle: &[(usize, f32)] = &[(0, thirds.0), (1, thirds.0)];
        check(2, true, &logits, [&[(1, thirds.1)], middle, &[(0, thirds.1)]]);
        check(3, false, &logits[..3], [&[(0, 1.0 / 7.0)], &[(0, 2.0 / 7.0)], &[(0, 4.0 / 7.0)]]);
        check(1, true, &[5.0, 5.0, 5.0], [&[(0, 1.0)], &[], &[]]);
        check(2, true, &[], [&[], &[], &[]]);
    }

    #[test]
    fn rows_are_gathered_in_order() {
        let mut routing = Routing::default();
        routing.choose(&[1.0, 0.0, 0.0, 1.0, 1.0, 0.0], 2, 1, true);
        let mut to = [0.0; 4];
        routing.gather(0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, &mut to);
        assert_eq!(to, [1.0, 2.0, 5.0, 6.0]);
    }
}
