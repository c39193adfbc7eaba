//! The parameters of a generation, read from the fields of the OpenAI routes (with vLLM's
//! additions).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    constraint,
    fields::{
        Fields,
        field::{
            Field, count, fixed, flag, ids, ignored, object, real, refused, shaped, text, texts,
            whole,
        },
        must_be, shown,
    },
    logprobs::Naming,
    refusal::Refusal,
};
use crate::{
    api::{Parameters, PromptScoring},
    validation::{PRIORITY_MOST, TOP_LOGPROBS_MOST},
};

/// Most choices of one prompt.
pub const CHOICES_MAX: u32 = 128;

/// What both OpenAI routes take.
pub const FIELDS: &[Field] = &[
    text("model", "The served model's name, or absent."),
    count("max_tokens", 0, "Most tokens of the answer."),
    count("max_completion_tokens", 0, "The newer name of max_tokens."),
    count("min_tokens", 0, "Before so many tokens nothing ends the answer."),
    real("temperature", 0.0, 100.0, "1 when absent; 0 is greedy."),
    whole("top_k", -1, u32::MAX as u64, "Choose among the k likeliest; 0 and -1: all."),
    real("top_p", 0.0, 1.0, "Choose among the likeliest that have this share; over 0."),
    real("min_p", 0.0, 1.0, "Choose among tokens this times as likely as the likeliest."),
    real("typical_p", 0.0, 1.0, "Choose among the most typical that have this share; over 0."),
    real("repetition_penalty", 0.01, 100.0, "Over 1: tokens of prompt and answer get less likely."),
    real("frequency_penalty", -2.0, 2.0, "Taken off for each time a token was generated."),
    real("presence_penalty", -2.0, 2.0, "Taken off once a token was generated."),
    shaped("logit_bias", logit_bias_shape, "From token ids, as strings, to what is added."),
    whole("seed", i64::MIN, u64::MAX, "The same request gives the same tokens."),
    texts("stop", "Ends the answer, and is cut from it."),
    ids("stop_token_ids", "Ids that end the answer."),
    flag("include_stop_str_in_output", "Leaves the stop string in."),
    flag("ignore_eos", "The end of sequence does not end the answer."),
    whole("n", 1, CHOICES_MAX as u64, "Independent answers for each prompt."),
    flag("stream", "Send the answer as it comes."),
    object("stream_options", STREAM_OPTIONS, "What a stream says of usage."),
    flag("return_token_ids", "Adds the ids of prompt and answer."),
    flag("return_tokens_as_token_ids", "Logprobs name tokens as token_id:N."),
    whole("priority", -(PRIORITY_MOST as i64), PRIORITY_MOST as u64, "Lower runs first."),
    count("truncate_prompt_tokens", 1, "Keeps the last so many ids of the prompt."),
    flag("add_special_tokens", "Whether the tokenizer adds its special tokens."),
    flag("skip_special_tokens", "Whether the answer's text leaves special tokens out."),
    whole(
        "prompt_logprobs",
        0,
        TOP_LOGPROBS_MOST as u64,
        "Scores of the prompt's tokens, with so many candidates; not in a stream.",
    ),
    count("logprob_start_len", 0, "Prompt tokens before it are not scored."),
    fixed("detokenize", || json!(true)),
    fixed("length_penalty", || json!(1)),
    fixed("num_beams", || json!(1)),
    refused("allowed_token_ids"),
    refused("bad_words"),
    refused("early_stopping"),
    refused("extra_args"),
    refused("logits_processors"),
    refused("prompt_embeds"),
    refused("store"),
    refused("thinking_token_budget"),
    refused("use_beam_search"),
    ignored("cache_salt"),
    ignored("lora_path"),
    ignored("metadata"),
    ignored("prompt_cache_key"),
    ignored("safety_identifier"),
    ignored("service_tier"),
    ignored("spaces_between_special_tokens"),
    ignored("user"),
];

const STREAM_OPTIONS: &[Field] = &[
    flag("include_usage", "One last event with the totals."),
    flag("continuous_usage_stats", "With include_usage: counts on every event."),
    ignored("include_obfuscation"),
];

fn logit_bias_shape() -> Value {
    json!({
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    })
}

/// Reads what both OpenAI routes share; `max_tokens` and logprobs differ and are the caller's.
/// The temperature is 1 when absent, as in the OpenAI and vLLM servers.
pub fn openai(fields: &Fields) -> Result<Parameters, Refusal> {
    fields.refuse_unsupported(FIELDS)?;
    let stop = fields.texts("stop")?;
    if stop.iter().any(String::is_empty) {
        return Err(Refusal::invalid("stop", "stop must not hold an empty string"));
    }
    Ok(Parameters {
        max_new_tokens: None,
        min_new_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        temperature: Some(fields.real("temperature")?.unwrap_or(1.0)),
        top_k: top_k(fields)?,
        top_p: fields.real("top_p")?,
        min_p: fields.real("min_p")?,
        typical_p: fields.real("typical_p")?,
        repetition_penalty: fields.real("repetition_penalty")?,
        frequency_penalty: fields.real("frequency_penalty")?,
        presence_penalty: fields.real("presence_penalty")?,
        logit_bias: logit_bias(fields)?,
        seed: fields.seed("seed")?,
        stop,
        stop_token_ids: fields.ids("stop_token_ids")?,
        include_stop: fields.flag("include_stop_str_in_output")?,
        ignore_eos: fields.flag("ignore_eos")?,
        logprobs: false,
        top_logprobs: 0,
        priority: priority(fields)?,
        truncate: fields.count("truncate_prompt_tokens", 1)?,
        skip_special_tokens: fields.optional_flag("skip_special_tokens")?,
        add_special_tokens: fields.optional_flag("add_special_tokens")?,
        prompt_scoring: prompt_scoring(fields)?,
        constraint: constraint::openai(fields)?,
    })
}

/// `prompt_logprobs`, of the tokens from `logprob_start_len` on.
fn prompt_scoring(fields: &Fields) -> Result<Option<PromptScoring>, Refusal> {
    let start = scoring_start(fields)?;
    let Some(top_logprobs) = candidates(fields, "prompt_logprobs")? else { return Ok(None) };
    if fields.flag("stream")? {
        let message = "prompt_logprobs are not told in a stream; send stream false, or echo with \
                       logprobs";
        return Err(Refusal::invalid("prompt_logprobs", message));
    }
    Ok(Some(PromptScoring { top_logprobs, start }))
}

/// Prompt tokens before it need no score.
pub fn scoring_start(fields: &Fields) -> Result<u32, Refusal> {
    Ok(fields.count("logprob_start_len", 0)?.unwrap_or(0))
}

/// `max_tokens` under either of its names, at least `least`; two different values are refused.
pub fn max_tokens(fields: &Fields, least: u32) -> Result<Option<u32>, Refusal> {
    let older = fields.count("max_tokens", least)?;
    let newer = fields.count("max_completion_tokens", least)?;
    match (older, newer) {
        (Some(older), Some(newer)) if older != newer => {
            let message = format!(
                "max_completion_tokens is {newer}, but max_tokens, its older name, is {older}"
            );
            Err(Refusal::invalid("max_completion_tokens", message))
        }
        _ => Ok(newer.or(older)),
    }
}

/// How many independent answers each prompt gets.
pub fn choices(fields: &Fields) -> Result<u32, Refusal> {
    let n = fields.count("n", 1)?.unwrap_or(1);
    if n > CHOICES_MAX {
        return Err(Refusal::invalid("n", format!("n must be at most {CHOICES_MAX}, got {n}")));
    }
    Ok(n)
}

/// How logprobs call tokens.
pub fn naming(fields: &Fields) -> Result<Naming, Refusal> {
    let by_id = fields.flag("return_tokens_as_token_ids")?;
    Ok(if by_id { Naming::Id } else { Naming::Piece })
}

/// The seed of one of several answers: the first has the request's own, so that `n` does not
/// change it. The mix is SplitMix64's (Steele, Lea and Flood 2014).
pub fn derived_seed(seed: Option<u64>, choice: u32) -> Option<u64> {
    let seed = seed?;
    if choice == 0 {
        return Some(seed);
    }
    let mut mixed = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    Some(mixed ^ (mixed >> 31))
}

/// What a stream is asked to say about usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageEvents {
    /// One last event with the totals and no choices.
    pub last: bool,
    /// Counts so far on every event.
    pub each: bool,
}

pub fn usage_events(fields: &Fields) -> Result<UsageEvents, Refusal> {
    let options = fields.nested("stream_options")?;
    let last = options.flag("include_usage")?;
    let each = options.flag("continuous_usage_stats")?;
    Ok(UsageEvents { last, each: last && each })
}

/// vLLM's -1 and 0 mean "all".
fn top_k(fields: &Fields) -> Result<Option<u32>, Refusal> {
    match fields.whole("top_k")? {
        None | Some(-1 | 0) => Ok(None),
        Some(k) => u32::try_from(k).map(Some).map_err(|_| {
            Refusal::invalid("top_k", format!("top_k must be -1, 0 or a positive number, got {k}"))
        }),
    }
}

/// vLLM's order (lower runs first) into ours (higher runs first).
fn priority(fields: &Fields) -> Result<i32, Refusal> {
    let given = fields.whole("priority")?.unwrap_or(0);
    let most = i64::from(PRIORITY_MOST);
    match i32::try_from(given) {
        Ok(priority) if (-most..=most).contains(&given) => Ok(-priority),
        _ => {
            let message = format!("priority must be from -{most} to {most}, not {given}");
            Err(Refusal::invalid("priority", message))
        }
    }
}

/// How many candidates beside each token, under the route's own name for it.
pub fn candidates(fields: &Fields, name: &'static str) -> Result<Option<u32>, Refusal> {
    match fields.count(name, 0)? {
        Some(given) if given > TOP_LOGPROBS_MOST => {
            let message = format!("{name} must be from 0 to {TOP_LOGPROBS_MOST}, not {given}");
            Err(Refusal::invalid(name, message))
        }
        given => Ok(given),
    }
}

/// The keys are token ids written as strings, as JSON wants them.
fn logit_bias(fields: &Fields) -> Result<BTreeMap<u32, f32>, Refusal> {
    const FIELD: &str = "logit_bias";
    let entries = match fields.get(FIELD) {
        None => return Ok(BTreeMap::new()),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(must_be(FIELD, "an object from token ids to numbers", other)),
    };
    entries
        .iter()
        .map(|(key, value)| {
            let id = key.parse::<u32>().map_err(|_| {
                let key = shown(&Value::from(key.as_str()));
                Refusal::invalid(FIELD, format!("{FIELD}: key {key} is not a token id"))
            })?;
            let bias = value.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite());
            let bias = bias.ok_or_else(|| {
                Refusal::invalid(
                    FIELD,
                    format!("{FIELD}[{id}] must be a number, got {}", shown(value)),
                )
            })?;
            Ok((id, bias))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: &Value) -> Fields {
        Fields::parse(value.to_string().as_bytes()).unwrap()
    }

    /// What `read` makes of a body: a value, or the field and the start of the message.
    fn check<T: std::fmt::Debug + PartialEq>(
        body: Value,
        read: impl Fn(&Parameters) -> T,
        expected: Result<T, &str>,
    ) {
        match (openai(&fields(&body)), expected) {
            (Ok(parameters), Ok(expected)) => assert_eq!(read(&parameters), expected, "{body}"),
            (Err(refusal), Err(expected)) => {
                assert!(refusal.message.contains(expected), "{body}: {}", refusal.message);
            }
            (given, expected) => panic!("{body}: {given:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn parameters_are_read_or_named() {
        check(json!({}), |p| p.temperature, Ok(Some(1.0)));
        check(json!({"temperature": 0}), |p| p.temperature, Ok(Some(0.0)));
        check(json!({"temperature": "hot"}), |p| p.temperature, Err("temperature must be"));
        check(json!({"temperature": 1e300}), |p| p.temperature, Err("got 1e+300"));
        check(json!({"top_k": -1}), |p| p.top_k, Ok(None));
        check(json!({"top_k": 40}), |p| p.top_k, Ok(Some(40)));
        check(json!({"top_k": -7}), |p| p.top_k, Err("-7"));
        check(json!({"stop": "a"}), |p| p.stop.clone(), Ok(vec!["a".into()]));
        check(json!({"stop": ["a", "b"]}), |p| p.stop.len(), Ok(2));
        check(json!({"stop": null}), |p| p.stop.len(), Ok(0));
        check(json!({"stop": [1]}), |p| p.stop.len(), Err("stop must be"));
        check(json!({"stop": [""]}), |p| p.stop.len(), Err("stop must not"));
        check(json!({"seed": -1}), |p| p.seed, Ok(Some(u64::MAX)));
        check(json!({"seed": u64::MAX}), |p| p.seed, Ok(Some(u64::MAX)));
        check(json!({"seed": 1.5}), |p| p.seed, Err("seed must be"));
        check(json!({"logit_bias": {"5": -100}}), |p| p.logit_bias[&5], Ok(-100.0));
        check(json!({"logit_bias": {"five": 1}}), |p| p.logit_bias.len(), Err("\"five\""));
        check(json!({"logit_bias": {"5": "x"}}), |p| p.logit_bias.len(), Err("logit_bias[5]"));
        check(json!({"priority": 3}), |p| p.priority, Ok(-3));
        let message = "priority must be from -1000 to 1000, not -1001";
        check(json!({"priority": -1001}), |p| p.priority, Err(message));
        check(json!({"priority": i64::MIN}), |p| p.priority, Err("-9223372036854775808"));
        check(json!({"min_tokens": -1}), |p| p.min_new_tokens, Err("min_tokens must be"));
        check(json!({"typical_p": 0.9, "guided_json": null}), |p| p.typical_p, Ok(Some(0.9)));
        check(json!({"length_penalty": 2}), |p| p.top_k, Err("length_penalty 2"));
        check(json!({"detokenize": false}), |p| p.top_k, Err("detokenize false"));
        check(json!({"response_format": {"type": "text"}}), |p| p.top_k, Ok(None));
        check(json!({"guided_regex": "a"}), |p| p.constraint.is_some(), Ok(true));
    }

    #[test]
    fn seeds_of_several_answers_differ_and_repeat() {
        assert_eq!(derived_seed(None, 1), None);
        assert_eq!(derived_seed(Some(7), 0), Some(7));
        let seeds: std::collections::BTreeSet<_> =
            (0..1000).map(|choice| derived_seed(Some(7), choice)).collect();
        assert_eq!(seeds.len(), 1000);
        assert_eq!(derived_seed(Some(7), 3), derived_seed(Some(7), 3));
    }
}
