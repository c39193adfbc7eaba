//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Extension, State},
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::{
    App, conversation,
    ending::Ending,
    fields::{
        Fields,
        field::{Field, fixed, flag, ignored, refused, shaped, whole},
    },
    logprobs::{ChatLogprobs, Naming, PromptLogprobs},
    prompts::messages_shape,
    refusal::Refusal,
    sampling::{self, UsageEvents},
    turns::{Answer, admit, collect},
    usage::{Counts, UsageBody},
};
use crate::{
    api::{Conversation, GenerateRequest, Parameters, Prompt},
    sse,
    stack::RequestId,
    validation::TOP_LOGPROBS_MOST,
};

pub mod stream;

/// What this route takes beside [`sampling::FIELDS`] and [`conversation::FIELDS`].
pub const FIELDS: &[Field] = &[
    shaped("messages", messages_shape, "The conversation so far.").required(),
    flag("logprobs", "Tell the logprob of each token."),
    whole("top_logprobs", 0, TOP_LOGPROBS_MOST as u64, "With logprobs: candidates for each token."),
    fixed("best_of", || json!(1)),
    fixed("modalities", || json!(["text"])),
    fixed("verbosity", || json!("medium")),
    refused("audio"),
    refused("echo"),
    refused("function_call"),
    refused("functions"),
    refused("media_io_kwargs"),
    refused("mm_processor_kwargs"),
    refused("prediction"),
    refused("reasoning_effort"),
    refused("tools"),
    refused("web_search_options"),
    ignored("parallel_tool_calls"),
    ignored("tool_choice"),
];

struct Job {
    conversation: Arc<Conversation>,
    parameters: Parameters,
    n: u32,
    naming: Naming,
    stream: bool,
    usage: UsageEvents,
    return_token_ids: bool,
}

/// What is the same in every part of an answer.
pub struct Head {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    logprobs: bool,
    naming: Naming,
    return_token_ids: bool,
    usage: UsageEvents,
    n: u32,
}

/// The wire shape of an answer, with `Choice`, and of its parts, with [`stream`]'s.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatCompletionOf{C}")]
pub struct Completion<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatChoice")]
pub struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize, JsonSchema)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

impl Head {
    fn completion<C>(&self, object: &'static str, choices: Vec<C>) -> Completion<'_, C> {
        Completion {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

pub async fn create(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    mut fields: Fields,
) -> Result<Response, Refusal> {
    app.check_model(&fields)?;
    let job = read(&mut fields)?;
    app.check_choices(1, job.n, "n")?;
    let head = Head {
        id: format!("chatcmpl-{}", request_id.as_str()),
        created: app.now_s(),
        model: app.generator.model().name,
        fingerprint: app.fingerprint(),
        logprobs: job.parameters.logprobs,
        naming: job.naming,
        return_token_ids: job.return_token_ids,
        usage: job.usage,
        n: job.n,
    };
    let (stream, scoring) = (job.stream, job.parameters.prompt_scoring);
    let admitted = admit(&app.generator, requests(job, &request_id)).await?;
    if stream {
        let writer = stream::Writer::new(head, &admitted.prompts);
        return Ok(sse::response(admitted, writer));
    }
    let prompts = admitted.prompts.clone();
    let answers = collect(admitted).await?;
    let usage = prompts.iter().zip(&answers).map(|(prompt, answer)| Counts::of(prompt, answer));
    let usage = UsageBody::total(usage, head.n);
    let scored = answers.first().and_then(|answer| answer.prompt.as_deref());
    let prompt_logprobs = scored
        .zip(scoring)
        .map(|(prompt, scoring)| PromptLogprobs::new(prompt, scoring.top_logprobs as usize));
    let choices = answers.into_iter().enumerate();
    let choices = choices.map(|(index, answer)| choice(&head, index, answer)).collect();
    let prompt = prompts.first().map(|prompt| &**prompt);
    let completion = Completion {
        usage: Some(usage),
        prompt_token_ids: prompt.filter(|_| head.return_token_ids),
        prompt_logprobs,
        ..head.completion("chat.completion", choices)
    };
    Ok(Json(completion).into_response())
}

fn read(fields: &mut Fields) -> Result<Job, Refusal> {
    fields.refuse_unsupported(FIELDS)?;
    let messages = fields.take("messages").ok_or_else(|| Refusal::missing("messages"))?;
    let mut parameters = sampling::openai(fields)?;
    parameters.max_new_tokens = sampling::max_tokens(fields, 1)?;
    parameters.logprobs = fields.flag("logprobs")?;
    parameters.top_logprobs = sampling::candidates(fields, "top_logprobs")?.unwrap_or(0);
    if parameters.top_logprobs > 0 && !parameters.logprobs {
        let message =
            format!("top_logprobs is {}, which needs logprobs to be true", parameters.top_logprobs);
        return Err(Refusal::invalid("top_logprobs", message));
    }
    Ok(Job {
        conversation: Arc::new(conversation::read(fields, messages)?),
        parameters,
        n: sampling::choices(fields)?,
        naming: sampling::naming(fields)?,
        stream: fields.flag("stream")?,
        usage: sampling::usage_events(fields)?,
        return_token_ids: fields.flag("return_token_ids")?,
    })
}

fn requests(job: Job, request_id: &RequestId) -> Vec<GenerateRequest> {
    let Job { conversation, parameters, n, .. } = job;
    (0..n)
        .map(|choice| GenerateRequest {
            request_id: request_id.of_choice(choice as usize),
            prompt: Prompt::Conversation(conversation.clone()),
            parameters: Parameters {
                seed: sampling::derived_seed(parameters.seed, choice),
                ..parameters.clone()
            },
        })
        .collect()
}

fn choice(head: &Head, index: usize, answer: Answer) -> Choice {
    let Answer { tokens, finished, .. } = answer;
    Choice {
        index,
        logprobs: head.logprobs.then(|| ChatLogprobs::new(&tokens, head.naming)),
        ending: Ending::of(&finished),
        token_ids: head.return_token_ids.then(|| tokens.iter().map(|token| token.id).collect()),
        message: Message { role: "assistant", content: finished.text, refusal: None },
    }
}
