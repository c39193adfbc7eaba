//! The same choice, written plainly: edit, sort, add up, cut, and race among what is left.

use std::collections::{BTreeMap, BTreeSet};

use super::Case;
use crate::sampler::race::log_time;

/// Logits after penalties, bias and mask.
pub(super) fn processed(case: &Case) -> Vec<f32> {
    let sampling = &case.sampling;
    let mut logits = case.logits.clone();
    let distinct: BTreeSet<u32> = case.tokens.iter().copied().collect();
    for token in distinct {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        if sampling.repetition_penalty != 1.0 {
            *logit = if *logit > 0.0 {
                *logit / sampling.repetition_penalty
            } else {
                *logit * sampling.repetition_penalty
            };
        }
    }
    let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
    for &token in &case.tokens[case.prompt_len..] {
        *counts.entry(token).or_default() += 1;
    }
    for (token, count) in counts {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit -= sampling.frequency_penalty * count as f32;
            *logit -= sampling.presence_penalty;
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    if case.tokens.len() - case.prompt_len < sampling.min_tokens as usize {
        for &token in &sampling.stop_token_ids {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    logits
}

/// `(token, distance)`, likeliest first, lowest id first on a tie.
fn ranking(case: &Case) -> Vec<(u32, f32)> {
    let logits = processed(case);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let inverse = 1.0 / case.sampling.temperature.unwrap_or(1.0);
    let mut ranking: Vec<(u32, f32)> =
        (0..).zip(&logits).map(|(token, &logit)| (token, (max - logit) * inverse)).collect();
    ranking.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    ranking
}

/// The tokens that may be drawn, with their probabilities (not renormalised), likeliest first.
pub(super) fn kept(case: &Case) -> Vec<(u32, f32, f64)> {
    let sampling = &case.sampling;
    let mut kept: Vec<(u32, f32, f64)> = ranking(case)
        .into_iter()
        .map(|(token, distance)| (token, distance, (-f64::from(distance)).exp()))
        .collect();
    let likeliest = kept[0].2;
    if let Some(k) = sampling.top_k {
        kept.truncate(k as usize);
    }
    if let Some(p) = sampling.top_p {
        let wanted = f64::from(p) * kept.iter().map(|token| token.2).sum::<f64>();
        let mut sum = 0.0;
        let enough = kept.iter().position(|token| {
            sum += token.2;
            sum >= wanted
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    if let Some(min_p) = sampling.min_p {
        kept.retain(|token| token.2 >= f64::from(min_p) * likeliest * (1.0 - 1e-9));
    }
    if let Some(p) = sampling.typical_p {
        kept.retain(|token| token.2 > 0.0);
        let total: f64 = kept.iter().map(|token| token.2).sum();
        let mean = kept.iter().map(|token| token.2 * f64::from(token.1)).sum::<f64>() / total;
        let oddness = |distance: f32| (distance - mean as f32).abs();
        let mut by_oddness: Vec<(f32, f64)> = kept.iter().map(|t| (oddness(t.1), t.2)).collect();
        by_oddness.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut sum = 0.0;
        let limit = by_oddness.iter().find(|token| {
            sum += token.1;
            sum >= f64::from(p) * total
        });
        let limit = limit.map_or(f32::INFINITY, |token| token.0);
        kept.retain(|token| oddness(token.1) <= limit);
    }
    kept
}

/// The token that must be chosen.
pub(super) fn token(case: &Case) -> u32 {
    let ranking = ranking(case);
    if case.sampling.temperature.is_none() {
        return ranking[0].0;
    }
    let position = case.tokens.len();
    let time = |&(token, distance, _): &(u32, f32, f64)| {
        (log_time(case.sampling.seed, position, token, distance), token)
    };
    let runners = kept(case);
    let winner = runners.iter().map(time).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    winner.expect("somebody runs").1
}

/// Raw logprobs in f64.
pub(super) fn logprobs(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit) - f64::from(max) - sum.ln()).collect()
}
