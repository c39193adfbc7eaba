//! Rotary position frequencies and their scaling.

use serde::Serialize;

use crate::ModelConfig;

/// How the rotary frequencies are stretched beyond the context the model was trained on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "snake_case")]
pub enum RopeScaling {
    None,
    /// Every frequency divided by `factor` (position interpolation, arXiv 2306.15595).
    Linear {
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp in between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
    /// GGUF's `rope_freqs.weight`: frequency `i` divided by entry `i`, `head_dim / 2` of them.
    PerFrequency {
        divisors: Vec<f32>,
    },
}

impl ModelConfig {
    /// Rotary inverse frequencies after scaling, in radians a position, `head_dim / 2` of them.
    /// Frequency `i` is `rope_theta^(-2i / head_dim)` (RoFormer, arXiv 2104.09864).
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let width = self.head_dim as f64;
        (0..self.head_dim / 2)
            .map(|i| self.rope_theta.powf(-2.0 * i as f64 / width))
            .enumerate()
            .map(|(i, frequency)| self.rope_scaling.apply(i, frequency))
            .collect()
    }
}

impl RopeScaling {
    fn apply(&self, index: usize, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                // Turns of this frequency within the original context.
                let context = *original_max_position_embeddings as f64;
                let turns = context * frequency / (2.0 * std::f64::consts::PI);
                // 0 where stretched in full, 1 where kept: below low_freq_factor turns the model
                // never saw a whole period, above high_freq_factor it saw many.
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
                    .clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
            Self::PerFrequency { divisors } => frequency / f64::from(divisors[index]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::model;

    // Computed apart in Python, as transformers' `ROPE_INIT_FUNCTIONS` words the formulas
    // (wavelengths and three branches, not turns and a clamp).
    const PLAIN: &[(usize, f64)] = &[
        (0, 1.0),
        (1, 0.7498942093324559),
        (17, 0.007498942093324558),
        (31, 0.0001333521432163324),
    ];
    const LINEAR: &[(usize, f64)] = &[
        (0, 0.25),
        (1, 0.18747355233311397),
        (17, 0.0018747355233311395),
        (31, 3.33380358040831e-05),
    ];
    const LLAMA31: &[(usize, f64)] = &[
        (0, 1.0),
        (20, 0.016560440080994446),
        (29, 0.002166570763503359),
        (30, 0.0013718935677611381),
        (31, 0.0008567514129196321),
        (32, 0.0005248461609929547),
        (33, 0.00031269375038406517),
        (34, 0.0001785078127679964),
        (35, 9.556212353964683e-05),
        (50, 4.411534674558404e-06),
        (63, 3.068925988914511e-07),
    ];

    fn check(theta: f64, head_dim: usize, scaling: RopeScaling, expected: &[(usize, f64)]) {
        let mut model = model();
        (model.rope_theta, model.head_dim, model.rope_scaling) = (theta, head_dim, scaling);
        let found = model.inverse_frequencies();
        assert_eq!(found.len(), head_dim / 2);
        for &(index, value) in expected {
            let error = (found[index] - value).abs() / value;
            assert!(error < 1e-11, "frequency {index}: {} is not {value}", found[index]);
        }
    }

    #[test]
    fn frequencies_match_the_reference() {
        check(1e4, 64, RopeScaling::None, PLAIN);
        check(1e4, 64, RopeScaling::Linear { factor: 4.0 }, LINEAR);
        let llama31 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        check(5e5, 128, llama31, LLAMA31);
        check(
            1e4,
            4,
            RopeScaling::PerFrequency { divisors: vec![1.0, 8.0] },
            &[(0, 1.0), (1, 0.00125)],
        );
    }
}
