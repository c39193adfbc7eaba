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
        field::{Field, fixed, flag, refused, shaped, whole},
    },
    logprobs::{ChatLogprobs, Naming, PromptLogprobs},
    prompts::messages_shape,
    refusal::Refusal,
    sampling::{self, UsageEvents},
    tools,
    turns::{Answer, admit, collect},
    usage::{Counts, UsageBody},
};
use crate::{
    api::{Constraint, Conversation, GenerateRequest, Parameters, Prompt},
    chat_syntax::ChatSyntax,
    reasoning::Thinking,
    sse,
    stack::RequestId,
    tools::{ToolUse, grammar},
    validation::TOP_LOGPROBS_MOST,
};
use message::{Message, Reading};

mod message;
pub mod stream;

/// What this route takes beside [`sampling::FIELDS`] and [`conversation::FIELDS`].
pub const FIELDS: &[Field] = &[
    shaped("messages", messages_shape, "The conversation so far.").required(),
    flag("logprobs", "Tell the logprob of each token."),
    whole("top_logprobs", 0, TOP_LOGPROBS_MOST as u64, "With logprobs: candidates for each token."),
    shaped("tool_choice", tools::choice_shape, "Whether the answer may, must or must not call."),
    flag("parallel_tool_calls", "Whether it may call more than once; the default."),
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
    refused("web_search_options"),
];

struct Job {
    conversation: Arc<Conversation>,
    parameters: Parameters,
    /// What the answers may call; `None` where nothing is to be called.
    tools: Option<ToolUse>,
    /// Where the model thinks, if its answers may have thought in them.
    thinking: Option<Thinking>,
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
    let mut job = read(&mut fields, &app.generator.chat_syntax())?;
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
    let (tools, thinking) = (job.tools.take(), job.thinking);
    let admitted = admit(&app.generator, requests(job, &request_id)).await?;
    let prompt = admitted.prompts.first().cloned().unwrap_or_default();
    let thinks = begins_in_thought(&app, &prompt, thinking).await?;
    let reading = Reading { thinks, tools };
    if stream {
        let writer = stream::Writer::new(head, &admitted.prompts, &reading);
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
    let choices = choices.map(|(index, answer)| choice(&head, &reading, index, answer)).collect();
    let prompt = prompts.first().map(|prompt| &**prompt);
    let completion = Completion {
        usage: Some(usage),
        prompt_token_ids: prompt.filter(|_| head.return_token_ids),
        prompt_logprobs,
        ..head.completion("chat.completion", choices)
    };
    Ok(Json(completion).into_response())
}

fn read(fields: &mut Fields, syntax: &ChatSyntax) -> Result<Job, Refusal> {
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
    let tools = tools::read(fields, syntax.tools)?;
    let is_constrained = parameters.constraint.is_some();
    if let Some(tools) = &tools {
        constrain(&mut parameters, tools, syntax)?;
    }
    if let Some(constraint) = &mut parameters.constraint {
        constraint.thought = syntax.thought();
    }
    let mut conversation = conversation::read(fields, messages)?;
    if tools.is_none() {
        conversation.tools = None;
    }
    Ok(Job {
        conversation: Arc::new(conversation),
        parameters,
        tools: tools.filter(|_| !is_constrained),
        thinking: syntax.thinking,
        n: sampling::choices(fields)?,
        naming: sampling::naming(fields)?,
        stream: fields.flag("stream")?,
        usage: sampling::usage_events(fields)?,
        return_token_ids: fields.flag("return_token_ids")?,
    })
}

/// An answer that has to call is nothing but calls.
fn constrain(
    parameters: &mut Parameters,
    tools: &ToolUse,
    syntax: &ChatSyntax,
) -> Result<(), Refusal> {
    let grammar = grammar(tools, |marker| syntax.marker_id(marker));
    let grammar = grammar.map_err(|error| Refusal::invalid("tools", format!("tools: {error}")))?;
    let Some(grammar) = grammar else { return Ok(()) };
    if let Some(other) = &parameters.constraint {
        let field = other.field;
        let message =
            format!("{field} beside a tool_choice that has to call: an answer can have one");
        return Err(Refusal::invalid(field, message));
    }
    let constraint = Constraint { field: "tool_choice", grammar: Arc::new(grammar), thought: None };
    parameters.constraint = Some(constraint);
    Ok(())
}

/// Whether the prompt leaves the answer within a thought; `None` for a model that does not think.
async fn begins_in_thought(
    app: &App,
    prompt: &[u32],
    thinking: Option<Thinking>,
) -> Result<Option<bool>, Refusal> {
    let Some(thinking) = thinking else { return Ok(None) };
    let end = app.generator.decode(thinking.end_of(prompt).to_vec()).await?;
    Ok(Some(thinking.is_open_after(&end)))
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

fn choice(head: &Head, reading: &Reading, index: usize, answer: Answer) -> Choice {
    let (message, has_calls) = Message::of(&answer, reading);
    let Answer { tokens, finished, .. } = answer;
    Choice {
        index,
        logprobs: head.logprobs.then(|| ChatLogprobs::new(&tokens, head.naming)),
        ending: Ending::of_chat(&finished, has_calls),
        token_ids: head.return_token_ids.then(|| tokens.iter().map(|token| token.id).collect()),
        message,
    }
}
