//! `generate.v1` messages to and from [`crate::api`].

use serde_json::json;
use trireme_proto::generate::v1 as proto;

use crate::{
    api::{FinishReason, GenerateEvent, GenerateRequest, Parameters, Prompt, Token, Usage},
    error::RouterError,
    stack::{REQUEST_ID_CHARS_MAX, is_request_id},
};

/// A request as the core takes it; `served` is the only model there is.
pub fn request(
    given: proto::GenerateRequest,
    served: &str,
) -> Result<GenerateRequest, RouterError> {
    if !given.model.is_empty() && given.model != served {
        let served = served.to_owned();
        return Err(RouterError::ModelNotFound { given: given.model, served });
    }
    let prompt = match given.prompt {
        Some(proto::generate_request::Prompt::Text(text)) => Prompt::Text(text),
        Some(proto::generate_request::Prompt::Ids(ids)) => Prompt::Ids(ids.ids),
        Some(proto::generate_request::Prompt::Messages(messages)) => {
            Prompt::Messages(conversation(messages.messages)?)
        }
        None => {
            let message = "prompt must be one of text, ids and messages; none is given".to_owned();
            return Err(RouterError::Invalid { field: "prompt", message });
        }
    };
    let request_id = match given.request_id.is_empty() {
        true => uuid::Uuid::new_v4().simple().to_string(),
        false => request_id(given.request_id)?,
    };
    let parameters = parameters(given.parameters.unwrap_or_default());
    Ok(GenerateRequest { request_id, prompt, parameters })
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

fn request_id(given: String) -> Result<String, RouterError> {
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

fn parameters(given: proto::Parameters) -> Parameters {
    Parameters {
        max_new_tokens: given.max_new_tokens,
        min_new_tokens: given.min_new_tokens,
        temperature: given.temperature,
        top_k: given.top_k,
        top_p: given.top_p,
        min_p: given.min_p,
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
        ..Parameters::default()
    }
}

pub fn event(event: GenerateEvent, request_id: &str) -> Result<proto::GenerateEvent, RouterError> {
    use proto::generate_event::Event;
    let event = match event {
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
    let top = given.top.into_iter().map(|top| proto::TopToken {
        id: top.id,
        text: top.piece,
        logprob: top.logprob,
    });
    proto::Token { id: given.id, text: given.text, logprob: given.logprob, top: top.collect() }
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
