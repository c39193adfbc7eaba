//! How one sequence wants its tokens chosen.

use std::sync::Arc;

use trireme_grammar::{Grammar, Kind};
use trireme_proto::shard::v1 as proto;

use super::TOP_LOGPROBS_MAX;

/// Below this a temperature means greedy: the distribution is a point, and its inverse overflows.
const TEMPERATURE_MIN: f32 = 1e-5;
/// Above this all tokens are equally likely, and the inverse stays a normal float.
const TEMPERATURE_MAX: f32 = 1e30;

/// Sampling parameters, checked; what is off is absent.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// `None`: greedy. Otherwise finite and positive.
    pub temperature: Option<f32>,
    /// Keep this many of the likeliest tokens.
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens that have this share of the probability, in (0, 1).
    pub top_p: Option<f32>,
    /// Keep the tokens at least this times as likely as the likeliest, in (0, 1].
    pub min_p: Option<f32>,
    /// Keep the tokens nearest to the expected surprise that have this share of what is left, in (0, 1).
    pub typical_p: Option<f32>,
    /// 1: off.
    pub repetition_penalty: f32,
    /// 0: off.
    pub frequency_penalty: f32,
    /// 0: off.
    pub presence_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: u64,
    /// Report the raw logprob of the chosen token.
    pub logprobs: bool,
    /// Report this many of the likeliest tokens.
    pub top_logprobs: usize,
    /// Before this many generated tokens, `stop_token_ids` are impossible.
    pub min_tokens: u32,
    pub stop_token_ids: Vec<u32>,
    /// The generated tokens must match it.
    pub grammar: Option<Arc<Grammar>>,
}

/// A parameter that no sequence may have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("sampling.{field} must be {limit}, not {value}")]
pub struct SamplingError {
    pub field: &'static str,
    pub limit: &'static str,
    pub value: String,
}

impl Default for Sampling {
    /// Greedy, and nothing else.
    fn default() -> Self {
        Self {
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            typical_p: None,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: false,
            top_logprobs: 0,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            grammar: None,
        }
    }
}

impl Sampling {
    /// Whether a choice is made of the logits and the position alone: without the tokens before it,
    /// a grammar or alternatives.
    pub fn is_plain(&self) -> bool {
        !self.has_edits()
            && self.typical_p.is_none()
            && self.grammar.is_none()
            && self.top_logprobs == 0
    }

    /// Whether single logits are changed before the choice.
    pub(super) fn has_edits(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
            || !self.logit_bias.is_empty()
            || self.min_tokens > 0
    }
}

/// `value` if it `holds`.
fn require<T: ToString>(
    field: &'static str,
    limit: &'static str,
    value: T,
    holds: impl FnOnce(&T) -> bool,
) -> Result<T, SamplingError> {
    if holds(&value) {
        Ok(value)
    } else {
        Err(SamplingError { field, limit, value: value.to_string() })
    }
}

impl TryFrom<&proto::Sampling> for Sampling {
    type Error = SamplingError;

    fn try_from(wire: &proto::Sampling) -> Result<Self, SamplingError> {
        let share = |field, value: f32| {
            require(field, "between 0 and 1", value, |value| (0.0..=1.0).contains(value))
        };
        let finite =
            |field, value| require(field, "a finite number", value, |v: &f32| v.is_finite());
        let temperature =
            require("temperature", "0 or a finite positive number", wire.temperature, |t| {
                t.is_finite() && *t >= 0.0
            })?;
        let top_p = share("top_p", wire.top_p)?;
        let min_p = share("min_p", wire.min_p)?;
        let typical_p = share("typical_p", wire.typical_p)?;
        let repetition = require(
            "repetition_penalty",
            "0 (off) or a finite positive number",
            wire.repetition_penalty,
            |p| p.is_finite() && *p >= 0.0,
        )?;
        let logit_bias = wire
            .logit_bias
            .iter()
            .map(|entry| Ok((entry.token, finite("logit_bias", entry.bias)?)))
            .collect::<Result<_, _>>()?;
        let top_logprobs =
            require("top_logprobs", "at most 128", wire.top_logprobs, |&n| n <= TOP_LOGPROBS_MAX)?;
        Ok(Self {
            temperature: (temperature >= TEMPERATURE_MIN)
                .then_some(temperature.min(TEMPERATURE_MAX)),
            top_k: (wire.top_k > 0).then_some(wire.top_k),
            top_p: (top_p > 0.0 && top_p < 1.0).then_some(top_p),
            min_p: (min_p > 0.0).then_some(min_p),
            typical_p: (typical_p > 0.0 && typical_p < 1.0).then_some(typical_p),
            repetition_penalty: if repetition == 0.0 { 1.0 } else { repetition },
            frequency_penalty: finite("frequency_penalty", wire.frequency_penalty)?,
            presence_penalty: finite("presence_penalty", wire.presence_penalty)?,
            logit_bias,
            seed: wire.seed,
            logprobs: wire.logprobs,
            top_logprobs: top_logprobs as usize,
            min_tokens: wire.min_tokens,
            stop_token_ids: wire.stop_token_ids.clone(),
            grammar: wire.grammar.as_ref().map(|wire| grammar(wire).map(Arc::new)).transpose()?,
        })
    }
}

/// A grammar from the wire; its text is looked at when it is compiled.
pub fn grammar(wire: &proto::Grammar) -> Result<Grammar, SamplingError> {
    let kind = match wire.kind() {
        proto::GrammarKind::JsonSchema => Kind::JsonSchema,
        proto::GrammarKind::Regex => Kind::Regex,
        proto::GrammarKind::Lark => Kind::Lark,
        proto::GrammarKind::Unspecified => {
            let value = wire.kind.to_string();
            return Err(SamplingError { field: "grammar.kind", limit: "a known kind", value });
        }
    };
    Ok(Grammar { kind, text: wire.text.clone() })
}
