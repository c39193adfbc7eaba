//! Rotary position frequencies and their scaling.

use std::f64::consts::PI;

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
    /// NTK-by-parts (YaRN, arXiv 2309.00071): a ramp over the frequencies' index between those that
    /// turn `beta_fast` and `beta_slow` times in the original context.
    Yarn {
        factor: f64,
        original_max_position_embeddings: usize,
        beta_fast: f64,
        beta_slow: f64,
        /// The ramp begins and ends at whole indices.
        truncate: bool,
        /// On cosines and sines.
        attention_factor: f64,
    },
    /// Frequency `i` divided by entry `i`: of the short list where all positions are within the
    /// original context, else of the long one (LongRoPE, arXiv 2402.13753).
    LongRope {
        short_factors: Vec<f64>,
        long_factors: Vec<f64>,
        original_max_position_embeddings: usize,
        /// On cosines and sines.
        attention_factor: f64,
    },
    /// GGUF's `rope_freqs.weight`: frequency `i` divided by entry `i`, `rotary_dim / 2` of them.
    PerFrequency {
        divisors: Vec<f32>,
    },
}

/// How heads are rotated by position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// In radians a position, `rotary_dim / 2` of them.
    pub inverse_frequencies: Vec<f64>,
    /// Factor on every cosine and sine.
    pub magnitude: f64,
}

impl ModelConfig {
    /// Of layers that see all positions, for a context of up to `positions`. Frequency `i` is
    /// `rope_theta^(-2i / rotary_dim)` before scaling (RoFormer, arXiv 2104.09864).
    pub fn rotation(&self, positions: usize) -> Rotation {
        let frequencies = self.frequencies(self.rope_theta);
        let inverse_frequencies = self.rope_scaling.apply(self, frequencies, positions);
        Rotation { inverse_frequencies, magnitude: self.rope_scaling.magnitude() }
    }

    /// Of layers with a sliding window, where it is another than that of the others.
    pub fn sliding_rotation(&self) -> Option<Rotation> {
        let theta = self.layer.sliding.as_ref()?.rope_theta?;
        Some(Rotation { inverse_frequencies: self.frequencies(theta), magnitude: 1.0 })
    }

    fn frequencies(&self, theta: f64) -> Vec<f64> {
        let width = self.rotary_dim as f64;
        (0..self.rotary_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / width)).collect()
    }
}

impl RopeScaling {
    fn magnitude(&self) -> f64 {
        match self {
            Self::Yarn { attention_factor, .. } | Self::LongRope { attention_factor, .. } => {
                *attention_factor
            }
            _ => 1.0,
        }
    }

    fn apply(&self, model: &ModelConfig, frequencies: Vec<f64>, positions: usize) -> Vec<f64> {
        let indexed = frequencies.iter().copied().enumerate();
        match self {
            Self::None => frequencies,
            Self::Linear { factor } => frequencies.iter().map(|f| f / factor).collect(),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                // Turns of this frequency within the original context.
                let context = *original_max_position_embeddings as f64;
                let turns = |frequency: f64| context * frequency / (2.0 * PI);
                // 0 where stretched in full, 1 where kept: below low_freq_factor turns the model
                // never saw a whole period, above high_freq_factor it saw many.
                let kept =
                    |frequency: f64| ((turns(frequency) - low) / (high - low)).clamp(0.0, 1.0);
                frequencies.iter().map(|&f| interpolate(f, *factor, kept(f))).collect()
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let (width, context) = (model.rotary_dim as f64, *original_max_position_embeddings);
                // Index of the frequency that turns so often within the original context.
                let index_of = |turns: f64| {
                    width * (context as f64 / (turns * 2.0 * PI)).ln()
                        / (2.0 * model.rope_theta.ln())
                };
                let (mut low, mut high) = (index_of(*beta_fast), index_of(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0), high.min(width - 1.0));
                // An empty ramp is a step.
                let length = if high == low { 0.001 } else { high - low };
                let kept = |i: usize| 1.0 - ((i as f64 - low) / length).clamp(0.0, 1.0);
                indexed.map(|(i, f)| interpolate(f, *factor, kept(i))).collect()
            }
            Self::LongRope {
                short_factors,
                long_factors,
                original_max_position_embeddings,
                ..
            } => {
                let long = positions > *original_max_position_embeddings;
                let factors = if long { long_factors } else { short_factors };
                indexed.map(|(i, f)| f / factors[i]).collect()
            }
            Self::PerFrequency { divisors } => {
                indexed.map(|(i, f)| f / f64::from(divisors[i])).collect()
            }
        }
    }
}

/// `frequency` where `kept` is 1, `frequency / factor` where it is 0.
fn interpolate(frequency: f64, factor: f64, kept: f64) -> f64 {
    (1.0 - kept) * frequency / factor + kept * frequency
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

    const POSITIONS: usize = 128;

    // `_compute_yarn_parameters`, the ramp's ends rounded and not.
    const YARN: &[(usize, f64)] = &[
        (0, 1.0),
        (20, 0.01333521432163324),
        (23, 0.006978305848598663),
        (24, 0.005375321490790102),
        (35, 0.0002462584069089387),
        (39, 6.490394320837028e-05),
        (63, 3.102344401879299e-07),
    ];
    const YARN_UNROUNDED: &[(usize, f64)] = &[
        (0, 1.0),
        (5, 0.21988085591972237),
        (10, 0.04046660896647828),
        (15, 0.006827481301891265),
        (20, 0.0015811388300841895),
        (31, 6.66760716081662e-05),
    ];

    fn yarn(factor: f64, context: usize, truncate: bool) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            attention_factor: 1.25,
        }
    }

    fn check(theta: f64, head_dim: usize, scaling: RopeScaling, expected: &[(usize, f64)]) {
        let mut model = model();
        (model.rope_theta, model.rope_scaling) = (theta, scaling);
        (model.head_dim, model.rotary_dim) = (head_dim, head_dim);
        let found = model.rotation(POSITIONS).inverse_frequencies;
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
        check(1e6, 128, yarn(4.0, 32768, true), YARN);
        check(1e4, 64, yarn(2.0, 512, false), YARN_UNROUNDED);
        check(
            1e4,
            4,
            RopeScaling::PerFrequency { divisors: vec![1.0, 8.0] },
            &[(0, 1.0), (1, 0.00125)],
        );
    }

    #[test]
    fn longrope_follows_the_longest_context_served() {
        let rope_scaling = RopeScaling::LongRope {
            short_factors: vec![1.0, 2.0],
            long_factors: vec![4.0, 8.0],
            original_max_position_embeddings: POSITIONS,
            attention_factor: 1.5,
        };
        // Of a head of six, four dimensions are rotated.
        let model =
            ModelConfig { rope_theta: 100.0, rope_scaling, head_dim: 6, rotary_dim: 4, ..model() };
        for (positions, expected) in [(POSITIONS, [1.0, 0.05]), (POSITIONS + 1, [0.25, 0.0125])] {
            let Rotation { inverse_frequencies, magnitude } = model.rotation(positions);
            assert_eq!(magnitude, 1.5);
            assert_eq!(inverse_frequencies.len(), 2);
            for (found, expected) in inverse_frequencies.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-15, "{positions}: {found}");
            }
        }
    }

    #[test]
    fn sliding_layers_rotate_by_their_own_base_unscaled() {
        let sliding =
            crate::SlidingWindow { window: 8, layers: vec![true; 30], rope_theta: Some(1e4) };
        let layer = crate::LayerConfig { sliding: Some(sliding), ..Default::default() };
        let rope_scaling = RopeScaling::Linear { factor: 8.0 };
        let model = ModelConfig { layer, rope_scaling, rope_theta: 1e6, ..model() };
        let found = model.sliding_rotation().unwrap();
        let error = (found.inverse_frequencies[1] - PLAIN[1].1).abs();
        assert!(found.magnitude == 1.0 && error < 1e-15, "{found:?}");
        assert_eq!(crate::config::tests::model().sliding_rotation(), None);
    }
}
