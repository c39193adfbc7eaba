//! A body as an object of the fields that some route reads. What no route reads is skipped where it
//! stands, so that a large unknown value costs its reading and no memory.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};

/// Every field that is read or refused by name, of bodies and of objects in them; sorted.
const KNOWN: &[&str] = &[
    "adapter_id",
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "continuous_usage_stats",
    "decoder_input_details",
    "details",
    "do_sample",
    "documents",
    "echo",
    "extra_args",
    "frequency_penalty",
    "function_call",
    "functions",
    "grammar",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_stop_str_in_output",
    "include_usage",
    "inputs",
    "logit_bias",
    "logits_processors",
    "logprob_start_len",
    "logprobs",
    "max_completion_tokens",
    "max_new_tokens",
    "max_tokens",
    "media_io_kwargs",
    "messages",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "modalities",
    "model",
    "n",
    "parameters",
    "prediction",
    "presence_penalty",
    "priority",
    "prompt",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_penalty",
    "response_format",
    "return_full_text",
    "return_token_ids",
    "return_token_strs",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "suffix",
    "temperature",
    "thinking_token_budget",
    "tokens",
    "tool_prompt",
    "tools",
    "top_k",
    "top_logprobs",
    "top_n_tokens",
    "top_p",
    "truncate",
    "truncate_prompt_tokens",
    "type",
    "typical_p",
    "use_beam_search",
    "watermark",
    "web_search_options",
];

pub fn is_known(name: &str) -> bool {
    KNOWN.binary_search(&name).is_ok()
}

/// The known fields of an object.
pub struct Object(pub Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KnownFields)
    }
}

struct KnownFields;

impl<'de> Visitor<'de> for KnownFields {
    type Value = Object;

    fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object, A::Error> {
        let mut known = Map::new();
        while let Some(name) = entries.next_key::<Cow<str>>()? {
            if is_known(&name) {
                known.insert(name.into_owned(), entries.next_value()?);
            } else {
                entries.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Object(known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: &str) {
        let object: Object = serde_json::from_str(body).unwrap();
        assert_eq!(Value::Object(object.0).to_string(), expected, "{body}");
    }

    #[test]
    fn unknown_fields_are_skipped() {
        assert!(KNOWN.is_sorted());
        check(r#"{}"#, "{}");
        check(r#"{"x": [[{}, 1e999]], "n": 2, "y": {"n": 3}}"#, r#"{"n":2}"#);
        check(r#"{"stop": {"x": 1}, "n": 1, "n": 2}"#, r#"{"stop":{"x":1},"n":2}"#);
        // A name with an escape is the same name.
        check(r#"{"\u006e": 5}"#, r#"{"n":5}"#);
    }
}
