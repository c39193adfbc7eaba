//! `generate.v1` messages to and from [`crate::api`].

use std::sync::Arc;

use serde_json::json;
use trireme_grammar::{Grammar, GrammarError, Whitespace};
use trireme_proto::generate::v1 as proto;

use crate::{
    api::{
        Constraint, Conversation, FinishReason, GenerateEvent, GenerateRequest, Parameters, Prompt,
        PromptScoring, PromptToken, Token, TopToken, Usage,
    },
    error::RouterError,
    stack::{REQUEST_ID_CHARS_MAX, is_request_id},
};

/// A request as the core takes it; `served` is the only model there is.
pub fn request(
    given: proto::GenerateRequest,
    served: &str,
) -> Result<GenerateRequest, RouterError> {
    check_model(given.model, served)?;
    let prompt = match given.prompt {
        Some(proto::generate_request::Prompt::Text(text)) => Prompt::Text(text),
        Some(proto::generate_request::Prompt::Ids(ids)) => Prompt::Ids(ids.ids),
        Some(proto::generate_request::Prompt::Messages(messages)) => {
            let messages = conversation(messages.messages)?;
            Prompt::Conversation(Arc::new(Conversation::to_answer(messages)))
        }
        None => return Err(no_prompt("text, ids and messages")),
    };
    let request_id = request_id(given.request_id)?;
    let parameters = parameters(given.parameters.unwrap_or_default())?;
    Ok(GenerateRequest { request_id, prompt, parameters })
}

/// A prompt to be scored, as the core takes it.
pub fn scoring_request(
    given: proto::ScoreRequest,
    served: &str,
) -> Result<GenerateRequest, RouterError> {
    check_model(given.model, served)?;
    let prompt = match given.prompt {
        Some(proto::score_request::Prompt::Text(text)) => Prompt::Text(text),
        Some(proto::score_request::Prompt::Ids(ids)) => Prompt::Ids(ids.ids),
        None => return Err(no_prompt("text and ids")),
    };
    let scoring = PromptScoring { top_logprobs: given.top_logprobs, start: given.start };
    let parameters = Parameters {
        max_new_tokens: Some(0),
        priority: given.priority,
        add_special_tokens: Some(given.add_special_tokens),
        prompt_scoring: Some(scoring),
        ..Parameters::default()
    };
    Ok(GenerateRequest { request_id: request_id(given.request_id)?, prompt, parameters })
}

fn check_model(given: String, served: &str) -> Result<(), RouterError> {
    if given.is_empty() || given == served {
        return Ok(());
    }
    Err(RouterError::ModelNotFound { given, served: served.to_owned() })
}

fn no_prompt(forms: &str) -> RouterError {
    let message = format!("prompt must be one of {forms}; none is given");
    RouterError::Invalid { field: "prompt", message }
}

fn conversation(messages: Vec<proto::Message>) -> Result<Vec<serde_json::Value>, RouterError> {
    let refused = |message| Err(RouterError::Invalid { field: "messages", message });
    if messages.is_empty() {
        return refused("messages must not be an empty list".to_owned());
    }
    if let Some(index) = messages.iter().position(|message| message.role.is_empty()) {
        return refused(format!("messages[{index}].role is required"));
    }
    let message = |given: proto::Message| json!({"role": given.role, "content": given.content});
    Ok(messages.into_iter().map(message).collect())
}

/// As given, or made up.
fn request_id(given: String) -> Result<String, RouterError> {
    if given.is_empty() {
        return Ok(uuid::Uuid::new_v4().simple().to_string());
    }
    if is_request_id(&given) {
        return Ok(given);
    }
    let bytes = given.len();
    let message = format!(
        "request_id must be 1 to {REQUEST_ID_CHARS_MAX} visible ASCII characters; \
         this one has {bytes} bytes"
    );
    Err(RouterError::Invalid { field: "request_id", message })
}

fn parameters(given: proto::Parameters) -> Result<Parameters, RouterError> {
    Ok(Parameters {
        max_new_tokens: given.max_new_tokens,
        min_new_tokens: given.min_new_tokens,
        temperature: given.temperature,
        top_k: given.top_k,
        top_p: given.top_p,
        min_p: given.min_p,
        typical_p: given.typical_p,
        repetition_penalty: given.repetition_penalty,
        frequency_penalty: given.frequency_penalty,
        presence_penalty: given.presence_penalty,
        logit_bias: given.logit_bias.into_iter().collect(),
        seed: given.seed,
        stop: given.stop,
        stop_token_ids: given.stop_token_ids,
        include_stop: given.include_stop,
        ignore_eos: given.ignore_eos,
        logprobs: given.logprobs,
        top_logprobs: given.top_logprobs,
        priority: given.priority,
        constraint: given.constraint.map(constraint).transpose()?,
        ..Parameters::default()
    })
}

fn constraint(given: proto::parameters::Constraint) -> Result<Constraint, RouterError> {
    use proto::parameters::Constraint as Given;
    let (field, grammar) = match given {
        Given::JsonSchema(text) => ("json_schema", json_schema(&text)),
        Given::Regex(pattern) => ("regex", Ok(Grammar::regex(&pattern))),
        Given::Lark(text) => ("lark", Ok(Grammar::lark(text))),
        Given::Choices(given) if given.choices.is_empty() => ("choices", Err(GrammarError::Empty)),
        Given::Choices(given) => ("choices", Ok(Grammar::choice(&given.choices))),
    };
    let invalid = |error| RouterError::Invalid { field, message: format!("{field}: {error}") };
    Ok(Constraint { field, grammar: Arc::new(grammar.map_err(invalid)?), thought: None })
}

fn json_schema(text: &str) -> Result<Grammar, GrammarError> {
    let schema = serde_json::from_str(text);
    let schema =
        schema.map_err(|error| GrammarError::Invalid(format!("not valid JSON: {error}")))?;
    Grammar::json_schema(&schema, Whitespace::Some)
}

pub fn event(event: GenerateEvent, request_id: &str) -> Result<proto::GenerateEvent, RouterError> {
    use proto::generate_event::Event;
    let event = match event {
        // Not asked for by this API: an event without content.
        GenerateEvent::Prompt(_) => return Ok(proto::GenerateEvent { event: None }),
        GenerateEvent::Token(given) => Event::Token(token(given)),
        GenerateEvent::Finished(finished) => Event::Finished(proto::Finished {
            request_id: request_id.to_owned(),
            text: finished.text,
            finish_reason: reason(finished.reason).into(),
            usage: Some(usage(finished.usage)),
        }),
        GenerateEvent::Failed(error) => return Err(error),
    };
    Ok(proto::GenerateEvent { event: Some(event) })
}

pub fn token(given: Token) -> proto::Token {
    let top = given.top.into_iter().map(top_token).collect();
    proto::Token { id: given.id, text: given.text, logprob: given.logprob, top }
}

fn top_token(given: TopToken) -> proto::TopToken {
    proto::TopToken { id: given.id, text: given.piece, logprob: given.logprob }
}

pub fn scored_token(given: PromptToken) -> proto::ScoredToken {
    let (logprob, rank, top) = match given.score {
        Some(score) => (Some(score.logprob), Some(score.rank), score.top),
        None => (None, None, Vec::new()),
    };
    let top = top.into_iter().map(top_token).collect();
    proto::ScoredToken { id: given.id, text: given.text, logprob, rank, top }
}

pub fn reason(given: FinishReason) -> proto::FinishReason {
    match given {
        FinishReason::Length => proto::FinishReason::Length,
        FinishReason::Stop => proto::FinishReason::Stop,
    }
}

pub fn usage(given: Usage) -> proto::Usage {
    proto::Usage {
        prompt_tokens: given.prompt_tokens,
        completion_tokens: given.completion_tokens,
        cached_tokens: given.cached_tokens,
    }
}
