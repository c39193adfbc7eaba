//! From what a client asked to what will run, or an error that names field, limit and value. Pure.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    api::{Constraint, Parameters, PromptScoring},
    error::RouterError,
};

const TEMPERATURE_MOST: f32 = 100.0;
const PENALTY_MOST: f32 = 2.0;
/// The sampler divides by it: less than the least gives infinite logits.
const REPETITION_PENALTY_LEAST: f32 = 0.01;
const REPETITION_PENALTY_MOST: f32 = 100.0;
const LOGIT_BIAS_MOST: f32 = 100.0;
const LOGIT_BIASES_MOST: usize = 1024;
pub const TOP_LOGPROBS_MOST: u32 = 20;
pub const STOPS_MOST: usize = 16;
const STOP_TOKENS_MOST: usize = 64;
const STOP_BYTES_MOST: usize = 1024;
/// A grammar's text; OpenAI's own limit on a schema's names and values is 120,000 characters.
const GRAMMAR_BYTES_MOST: usize = 128 << 10;
pub const PRIORITY_MOST: i32 = 1000;
/// Ids that may be decoded at once, for each token of the model's length.
const DECODED_IDS_PER_TOKEN: usize = 4;
/// A text that is to be truncated may be so many times as long as one that is not.
const TRUNCATED_TEXT_FACTOR: usize = 4;

/// What the served model allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub max_model_len: u32,
    pub vocab_size: u32,
    /// The longest token's length: no text has fewer tokens than its characters by this.
    pub token_chars: usize,
    /// End-of-sequence ids of the model.
    pub eos_token_ids: Vec<u32>,
}

/// Sampling with every default resolved, in the words of the sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0: greedy.
    pub temperature: f32,
    /// 0: off.
    pub top_k: u32,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub typical_p: f32,
    /// 1: off.
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub logit_bias: BTreeMap<u32, f32>,
    pub seed: u64,
    pub logprobs: bool,
    pub top_logprobs: u32,
}

/// Parameters that hold for the model; the prompt is not known yet.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidParameters {
    /// `None`: all the room that the prompt leaves.
    pub max_new_tokens: Option<u32>,
    pub min_new_tokens: u32,
    pub sampling: Sampling,
    pub stop: Vec<String>,
    /// Ids that end the answer, end-of-sequence ids included unless they are ignored.
    pub stop_token_ids: Vec<u32>,
    /// An end-of-sequence id ends the answer only as one of the client's own stop ids.
    pub ignore_eos: bool,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    pub priority: i32,
    pub truncate: Option<u32>,
    pub prompt_scoring: Option<PromptScoring>,
    /// In form; whether its grammar can be compiled is not known yet.
    pub constraint: Option<Constraint>,
}

/// A request that can be admitted.
#[derive(Clone, Debug)]
pub struct ValidRequest {
    pub request_id: String,
    pub prompt_ids: Arc<[u32]>,
    /// At least 1 (0 where a prompt is scored and nothing else is asked), and within the room that the prompt leaves.
    pub max_new_tokens: u32,
    pub parameters: ValidParameters,
}

fn invalid<T>(field: &'static str, message: String) -> Result<T, RouterError> {
    Err(RouterError::Invalid { field, message })
}

/// `value` is within `range`, or the error says so. NaN is in no range.
fn within<T: PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: T,
    range: std::ops::RangeInclusive<T>,
) -> Result<T, RouterError> {
    if range.contains(&value) {
        return Ok(value);
    }
    invalid(
        field,
        format!("{field} must be from {} to {}, not {value}", range.start(), range.end()),
    )
}

fn at_most(field: &'static str, what: &str, given: usize, most: usize) -> Result<(), RouterError> {
    if given <= most {
        return Ok(());
    }
    invalid(field, format!("{field} holds at most {most} {what}, not {given}"))
}

/// Checks everything that does not depend on the prompt. `seed` is used where none is given.
pub fn parameters(
    given: Parameters,
    limits: &Limits,
    seed: u64,
) -> Result<ValidParameters, RouterError> {
    if given.max_new_tokens == Some(0) && given.prompt_scoring.is_none() {
        return invalid("max_tokens", "max_tokens must be at least 1, not 0".to_owned());
    }
    if let Some(most) = given.max_new_tokens.filter(|most| *most < given.min_new_tokens) {
        let least = given.min_new_tokens;
        return invalid("min_tokens", format!("min_tokens {least} is over max_tokens {most}"));
    }
    let prompt_top = given.prompt_scoring.map_or(0, |scoring| scoring.top_logprobs);
    within("prompt_logprobs", prompt_top, 0..=TOP_LOGPROBS_MOST)?;
    within("min_tokens", given.min_new_tokens, 0..=limits.max_model_len)?;
    if given.truncate == Some(0) {
        return invalid("truncate", "truncate must be at least 1, not 0".to_owned());
    }
    check_stops(&given.stop)?;
    at_most("stop_token_ids", "ids", given.stop_token_ids.len(), STOP_TOKENS_MOST)?;
    check_ids("stop_token_ids", &given.stop_token_ids, limits.vocab_size)?;

    let mut stop_token_ids = given.stop_token_ids.clone();
    if !given.ignore_eos {
        stop_token_ids.extend(&limits.eos_token_ids);
    }
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    Ok(ValidParameters {
        max_new_tokens: given.max_new_tokens,
        min_new_tokens: given.min_new_tokens,
        stop_token_ids,
        ignore_eos: given.ignore_eos,
        include_stop: given.include_stop,
        skip_special_tokens: given.skip_special_tokens.unwrap_or(true),
        priority: within("priority", given.priority, -PRIORITY_MOST..=PRIORITY_MOST)?,
        truncate: given.truncate,
        prompt_scoring: given.prompt_scoring,
        sampling: sampling(&given, limits, seed)?,
        constraint: constraint(&given, limits)?,
        stop: given.stop,
    })
}

/// A grammar ends with an end of sequence, so there has to be one, and it has to end the answer.
fn constraint(given: &Parameters, limits: &Limits) -> Result<Option<Constraint>, RouterError> {
    let Some(constraint) = &given.constraint else { return Ok(None) };
    let field = constraint.field;
    let bytes = constraint.grammar.text.len();
    if bytes > GRAMMAR_BYTES_MOST {
        let message =
            format!("{field} has {bytes} bytes as a grammar, at most {GRAMMAR_BYTES_MOST}");
        return invalid(field, message);
    }
    if given.ignore_eos {
        let message =
            format!("ignore_eos cannot be true beside {field}, whose grammar ends the answer");
        return invalid("ignore_eos", message);
    }
    if limits.eos_token_ids.is_empty() {
        let message =
            format!("{field}: the model names no end-of-sequence id to end the answer with");
        return Err(RouterError::Unsupported { field, message });
    }
    Ok(Some(constraint.clone()))
}

fn sampling(given: &Parameters, limits: &Limits, seed: u64) -> Result<Sampling, RouterError> {
    let repetition_penalty = within(
        "repetition_penalty",
        given.repetition_penalty.unwrap_or(1.0),
        REPETITION_PENALTY_LEAST..=REPETITION_PENALTY_MOST,
    )?;
    at_most("logit_bias", "entries", given.logit_bias.len(), LOGIT_BIASES_MOST)?;
    for (&token, &bias) in &given.logit_bias {
        check_ids("logit_bias", &[token], limits.vocab_size)?;
        within("logit_bias", bias, -LOGIT_BIAS_MOST..=LOGIT_BIAS_MOST)?;
    }
    let penalty = |field, value: Option<f32>| {
        within(field, value.unwrap_or(0.0), -PENALTY_MOST..=PENALTY_MOST)
    };
    let temperature = given.temperature.unwrap_or(0.0);
    Ok(Sampling {
        temperature: within("temperature", temperature, 0.0..=TEMPERATURE_MOST)?,
        // More than the vocabulary is the whole vocabulary.
        top_k: given.top_k.unwrap_or(0).min(limits.vocab_size),
        top_p: share("top_p", given.top_p)?,
        min_p: within("min_p", given.min_p.unwrap_or(0.0), 0.0..=1.0)?,
        typical_p: share("typical_p", given.typical_p)?,
        repetition_penalty,
        frequency_penalty: penalty("frequency_penalty", given.frequency_penalty)?,
        presence_penalty: penalty("presence_penalty", given.presence_penalty)?,
        logit_bias: given.logit_bias.clone(),
        seed: given.seed.unwrap_or(seed),
        logprobs: given.logprobs || given.top_logprobs > 0,
        top_logprobs: within("top_logprobs", given.top_logprobs, 0..=TOP_LOGPROBS_MOST)?,
    })
}

/// Over 0 and at most 1, which is off.
fn share(field: &'static str, given: Option<f32>) -> Result<f32, RouterError> {
    let share = given.unwrap_or(1.0);
    if share > 0.0 && share <= 1.0 {
        return Ok(share);
    }
    invalid(field, format!("{field} must be over 0 and at most 1, not {share}"))
}

fn check_stops(stops: &[String]) -> Result<(), RouterError> {
    at_most("stop", "strings", stops.len(), STOPS_MOST)?;
    for stop in stops {
        if stop.is_empty() {
            return invalid("stop", "stop must not hold an empty string".to_owned());
        }
        if stop.len() > STOP_BYTES_MOST {
            let given = stop.len();
            let message = format!("a string of stop may have {STOP_BYTES_MOST} bytes, not {given}");
            return invalid("stop", message);
        }
    }
    Ok(())
}

/// Every id is in the vocabulary.
pub fn check_ids(field: &'static str, ids: &[u32], vocab: u32) -> Result<(), RouterError> {
    match ids.iter().find(|id| **id >= vocab) {
        None => Ok(()),
        Some(id) => {
            invalid(field, format!("{field} holds id {id}; the vocabulary has {vocab} ids"))
        }
    }
}

/// Ids to be turned into text, which need not be a prompt: they may be longer than one, by a factor.
pub fn check_decode(ids: &[u32], max_model_len: u32, vocab: u32) -> Result<(), RouterError> {
    let most = max_model_len as usize * DECODED_IDS_PER_TOKEN;
    at_most("tokens", "ids", ids.len(), most)?;
    check_ids("tokens", ids, vocab)
}

/// Keeps texts that can never fit away from the tokenizer, whose time grows with them. One that is
/// to be truncated afterwards may be longer, but not without a bound.
pub fn check_text(text: &str, truncates: bool, limits: &Limits) -> Result<(), RouterError> {
    let factor = if truncates { TRUNCATED_TEXT_FACTOR } else { 1 };
    let most = factor * limits.token_chars * limits.max_model_len as usize;
    // Characters are counted only when the bytes could be too many.
    if text.len() <= most {
        return Ok(());
    }
    let given = text.chars().count();
    if given <= most {
        return Ok(());
    }
    let tokens = limits.max_model_len;
    let what = if truncates { "may be truncated to" } else { "can fit in" };
    invalid(
        "prompt",
        format!(
            "prompt has {given} characters; at most {most} {what} max-model-len {tokens} tokens"
        ),
    )
}

/// Cuts the prompt if asked to, and fits the answer into the room that is left: an answer asked
/// for explicitly is shortened (and ends with `length`), a prompt without any room is refused.
pub fn fit(
    request_id: String,
    mut prompt_ids: Vec<u32>,
    parameters: ValidParameters,
    limits: &Limits,
) -> Result<ValidRequest, RouterError> {
    if let Some(keep) = parameters.truncate {
        let cut = prompt_ids.len().saturating_sub(keep as usize);
        prompt_ids.drain(..cut);
    }
    let given = prompt_ids.len();
    if given == 0 {
        return invalid("prompt", "prompt must have at least 1 token, not 0".to_owned());
    }
    check_ids("prompt", &prompt_ids, limits.vocab_size)?;
    let most = limits.max_model_len;
    let room = (most as usize).saturating_sub(given) as u32;
    let is_only_scored = parameters.max_new_tokens == Some(0) && given <= most as usize;
    if room == 0 && !is_only_scored {
        return invalid(
            "prompt",
            format!(
                "prompt has {given} tokens; max-model-len {most} must leave room for an answer"
            ),
        );
    }
    if parameters.min_new_tokens > room {
        let least = parameters.min_new_tokens;
        return invalid(
            "min_tokens",
            format!("min_tokens {least} is over the {room} tokens that the prompt leaves"),
        );
    }
    let max_new_tokens = parameters.max_new_tokens.unwrap_or(room).min(room);
    Ok(ValidRequest { request_id, prompt_ids: prompt_ids.into(), max_new_tokens, parameters })
}

#[cfg(test)]
mod tests;
