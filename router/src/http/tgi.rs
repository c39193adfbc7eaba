//! The routes of text-generation-inference: `POST /generate`, `/generate_stream` and `/`.

use axum::{
    Json,
    extract::{Extension, State},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use super::{
    App, constraint,
    fields::Fields,
    logprobs::writable,
    refusal::Refusal,
    sampling::candidates,
    turns::{Admitted, Answer, admit, collect},
};
use crate::{
    api::{
        FinishReason, Finished, GenerateRequest, Parameters, Prompt, PromptScoring, PromptToken,
        StopCause, Token, TopToken,
    },
    sse,
    stack::RequestId,
};

mod stream;

/// Known parameters that change the answer and are not built.
const UNSUPPORTED: &[&str] = &["adapter_id", "watermark", "tools", "tool_prompt"];

struct Job {
    inputs: String,
    parameters: Parameters,
    details: bool,
    return_full_text: bool,
    stream: bool,
}

#[derive(Serialize)]
struct Generated {
    generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

#[derive(Serialize)]
struct Details {
    finish_reason: &'static str,
    generated_tokens: u32,
    /// Null when nothing was drawn at random.
    seed: Option<u64>,
    /// The prompt's tokens, with `decoder_input_details`.
    prefill: Vec<PrefillToken>,
    tokens: Vec<TokenBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_tokens: Option<Vec<Vec<TokenBody>>>,
}

#[derive(Serialize)]
struct PrefillToken {
    id: u32,
    text: String,
    /// Null for the first token.
    logprob: Option<f32>,
}

#[derive(Serialize)]
struct TokenBody {
    id: u32,
    text: String,
    logprob: f32,
    special: bool,
}

pub async fn generate(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    mut fields: Fields,
) -> Result<Response, Refusal> {
    let job = read(&mut fields)?;
    let generated = whole(&app, &request_id, job).await?;
    Ok(Json(generated).into_response())
}

pub async fn generate_stream(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    mut fields: Fields,
) -> Result<Response, Refusal> {
    let job = read(&mut fields)?;
    refuse_streamed_prefill(&job)?;
    streamed(&app, &request_id, job).await
}

/// The form of the hosted inference API: streams when asked to, and wraps a whole answer in a list.
pub async fn compatible(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    mut fields: Fields,
) -> Result<Response, Refusal> {
    let job = read(&mut fields)?;
    if job.stream {
        refuse_streamed_prefill(&job)?;
        return streamed(&app, &request_id, job).await;
    }
    let generated = whole(&app, &request_id, job).await?;
    Ok(Json([generated]).into_response())
}

fn refuse_streamed_prefill(job: &Job) -> Result<(), Refusal> {
    const FIELD: &str = "decoder_input_details";
    match job.parameters.prompt_scoring {
        None => Ok(()),
        Some(_) => Err(Refusal::invalid(FIELD, format!("{FIELD} is not told in a stream"))),
    }
}

async fn whole(app: &App, request_id: &RequestId, job: Job) -> Result<Generated, Refusal> {
    let prefix = if job.return_full_text { job.inputs.clone() } else { String::new() };
    let sampled = is_sampled(&job.parameters);
    let (details, top) = (job.details, job.parameters.top_logprobs);
    let admitted = admitted(app, request_id, job).await?;
    let seed = admitted.seeds.first().copied().filter(|_| sampled);
    let mut answers = collect(admitted).await?;
    let Some(Answer { prompt, tokens, finished }) = answers.pop() else {
        return Err(Refusal::panicked());
    };
    Ok(Generated {
        generated_text: format!("{prefix}{}", finished.text),
        details: details.then(|| Details {
            finish_reason: reason(&finished),
            generated_tokens: finished.usage.completion_tokens,
            seed,
            prefill: prompt.iter().flatten().map(PrefillToken::new).collect(),
            top_tokens: (top > 0).then(|| tokens.iter().map(top_tokens).collect()),
            tokens: tokens.iter().map(TokenBody::new).collect(),
        }),
    })
}

async fn streamed(app: &App, request_id: &RequestId, job: Job) -> Result<Response, Refusal> {
    let head = stream::Head {
        prefix: if job.return_full_text { job.inputs.clone() } else { String::new() },
        sampled: is_sampled(&job.parameters),
        top: job.parameters.top_logprobs > 0,
    };
    let admitted = admitted(app, request_id, job).await?;
    let writer = stream::Writer::new(head, &admitted);
    Ok(sse::response(admitted, writer))
}

async fn admitted(app: &App, request_id: &RequestId, job: Job) -> Result<Admitted, Refusal> {
    let request = GenerateRequest {
        request_id: request_id.as_str().to_owned(),
        prompt: Prompt::Text(job.inputs),
        parameters: job.parameters,
    };
    Ok(admit(&app.generator, vec![request]).await?)
}

fn read(fields: &mut Fields) -> Result<Job, Refusal> {
    let inputs = fields.text("inputs")?.ok_or_else(|| Refusal::missing("inputs"))?.to_owned();
    let given = fields.nested("parameters")?;
    given.refuse_unsupported(UNSUPPORTED)?;
    if given.count("best_of", 0)?.is_some_and(|best_of| best_of > 1) {
        return Err(Refusal::unsupported("best_of", "best_of above 1 is not supported"));
    }
    if given.real("typical_p")?.is_some_and(|typical_p| typical_p != 1.0) {
        return Err(Refusal::unsupported("typical_p", "typical_p is not supported"));
    }
    Ok(Job {
        inputs,
        details: given.flag("details")? || given.flag("decoder_input_details")?,
        return_full_text: given.flag("return_full_text")?,
        stream: fields.flag("stream")?,
        parameters: parameters(&given)?,
    })
}

/// Greedy unless something asks for sampling, as in TGI: `do_sample`, or any of the thresholds.
fn parameters(given: &Fields) -> Result<Parameters, Refusal> {
    let (temperature, top_k, top_p) =
        (given.real("temperature")?, given.count("top_k", 0)?, given.real("top_p")?);
    let thresholds = top_k.is_some_and(|top_k| top_k > 0) || top_p.is_some_and(|top_p| top_p < 1.0);
    let sampled = given.flag("do_sample")? || temperature.is_some() || thresholds;
    let stop = given.texts("stop")?;
    if stop.iter().any(String::is_empty) {
        return Err(Refusal::invalid("stop", "stop must not hold an empty string"));
    }
    Ok(Parameters {
        max_new_tokens: given.count("max_new_tokens", 1)?,
        temperature: if sampled { Some(temperature.unwrap_or(1.0)) } else { None },
        top_k: top_k.filter(|top_k| *top_k > 0),
        top_p,
        repetition_penalty: given.real("repetition_penalty")?,
        frequency_penalty: given.real("frequency_penalty")?,
        seed: given.seed("seed")?,
        stop,
        // TGI tells every token's logprob, asked or not.
        logprobs: true,
        top_logprobs: candidates(given, "top_n_tokens")?.unwrap_or(0),
        truncate: given.count("truncate", 1)?,
        prompt_scoring: given.flag("decoder_input_details")?.then(PromptScoring::default),
        constraint: constraint::tgi(given)?,
        ..Parameters::default()
    })
}

fn is_sampled(parameters: &Parameters) -> bool {
    parameters.temperature.is_some_and(|temperature| temperature > 0.0)
}

fn reason(finished: &Finished) -> &'static str {
    match (finished.reason, &finished.stop) {
        (FinishReason::Length, _) => "length",
        (FinishReason::Stop, Some(StopCause::Text(_) | StopCause::TokenId(_))) => "stop_sequence",
        (FinishReason::Stop, _) => "eos_token",
    }
}

fn top_tokens(token: &Token) -> Vec<TokenBody> {
    let body = |top: &TopToken| TokenBody {
        id: top.id,
        text: top.piece.clone(),
        logprob: writable(top.logprob),
        special: false,
    };
    token.top.iter().map(body).collect()
}

impl PrefillToken {
    fn new(token: &PromptToken) -> Self {
        let logprob = token.score.as_ref().map(|score| writable(score.logprob));
        Self { id: token.id, text: token.piece.clone(), logprob }
    }
}

impl TokenBody {
    fn new(token: &Token) -> Self {
        Self {
            id: token.id,
            text: token.text.clone(),
            logprob: token.logprob.map_or(0.0, writable),
            special: token.special,
        }
    }
}
