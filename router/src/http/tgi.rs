//! The generating routes of text-generation-inference: `POST /generate`, `/generate_stream` and `/`.

use axum::{
    Json,
    extract::{Extension, State},
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    App,
    best_of::best_first,
    constraint,
    fields::{
        Fields,
        field::{Field, count, flag, object, real, refused, shaped, text, texts, whole},
    },
    logprobs::writable,
    refusal::Refusal,
    sampling::{CHOICES_MAX, candidates, derived_seed},
    turns::{Admitted, Answer, admit, collect},
};
use crate::{
    api::{
        FinishReason, Finished, GenerateRequest, Parameters, Prompt, PromptScoring, PromptToken,
        StopCause, Token, TopToken,
    },
    sse,
    stack::RequestId,
    validation::TOP_LOGPROBS_MOST,
};

pub mod stream;

/// What the body holds.
pub const FIELDS: &[Field] = &[
    text("inputs", "The text to go on from.").required(),
    object("parameters", PARAMETERS, "How."),
    flag("stream", "On `/` alone: send the answer as it comes."),
];

pub const PARAMETERS: &[Field] = &[
    count("max_new_tokens", 1, "Most tokens of the answer; all that fit when absent."),
    flag("do_sample", "Draw tokens at random; so does any of the next four."),
    real("temperature", 0.0, 100.0, "0 is greedy."),
    count("top_k", 0, "Choose among the k likeliest; 0: all."),
    real("top_p", 0.0, 1.0, "Choose among the likeliest that have this share; over 0."),
    real("typical_p", 0.0, 1.0, "Choose among the most typical that have this share; over 0."),
    real("repetition_penalty", 0.01, 100.0, "Over 1: tokens of prompt and answer get less likely."),
    real("frequency_penalty", -2.0, 2.0, "Taken off for each time a token was generated."),
    whole("seed", i64::MIN, u64::MAX, "The same request gives the same tokens."),
    texts("stop", "Ends the answer, and is cut from it."),
    count("truncate", 1, "Keeps the last so many tokens of the input."),
    flag("return_full_text", "Puts the input before the answer."),
    flag("details", "Tell the tokens and how the answer ended."),
    flag("decoder_input_details", "Tell the input's tokens and their logprobs; not in a stream."),
    whole("top_n_tokens", 0, TOP_LOGPROBS_MOST as u64, "Candidates told beside each token."),
    whole("best_of", 0, CHOICES_MAX as u64, "Tell the likeliest of so many sampled answers."),
    refused("adapter_id"),
    shaped("grammar", constraint::typed_shape, "What the answer must look like."),
    refused("tool_prompt"),
    refused("tools"),
    refused("watermark"),
];

struct Job {
    inputs: String,
    parameters: Parameters,
    best_of: u32,
    details: bool,
    return_full_text: bool,
    stream: bool,
}

#[derive(Serialize, JsonSchema)]
pub struct Generated {
    generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GeneratedDetails")]
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
    /// The answers that were not the best.
    #[serde(skip_serializing_if = "Option::is_none")]
    best_of_sequences: Option<Vec<Sequence>>,
}

#[derive(Serialize, JsonSchema)]
struct PrefillToken {
    id: u32,
    text: String,
    /// Null for the first token.
    logprob: Option<f32>,
}

#[derive(Serialize, JsonSchema)]
struct Sequence {
    generated_text: String,
    #[serde(flatten)]
    details: Details,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GeneratedToken")]
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
    let generated = generated(&app, &request_id, job).await?;
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
    let generated = generated(&app, &request_id, job).await?;
    Ok(Json([generated]).into_response())
}

fn refuse_streamed_prefill(job: &Job) -> Result<(), Refusal> {
    const FIELD: &str = "decoder_input_details";
    match job.parameters.prompt_scoring {
        None => Ok(()),
        Some(_) => Err(Refusal::invalid(FIELD, format!("{FIELD} is not told in a stream"))),
    }
}

async fn generated(app: &App, request_id: &RequestId, job: Job) -> Result<Generated, Refusal> {
    app.check_choices(1, job.best_of, "best_of")?;
    let telling = Telling {
        prefix: if job.return_full_text { job.inputs.clone() } else { String::new() },
        sampled: is_sampled(&job.parameters),
        top: job.parameters.top_logprobs > 0,
    };
    let (with_details, best_of) = (job.details, job.best_of as usize);
    let mut answers = collect(admitted(app, request_id, job).await?).await?;
    best_first(&mut answers, best_of);
    let mut sequences = answers.into_iter().map(|answer| telling.sequence(answer));
    let Some(Sequence { generated_text, mut details }) = sequences.next() else {
        return Err(Refusal::panicked());
    };
    if best_of > 1 {
        details.best_of_sequences = Some(sequences.collect());
    }
    Ok(Generated { generated_text, details: with_details.then_some(details) })
}

/// How the answers of one request are told.
struct Telling {
    prefix: String,
    sampled: bool,
    top: bool,
}

impl Telling {
    fn sequence(&self, answer: Answer) -> Sequence {
        let Answer { prompt, tokens, finished, seed } = answer;
        Sequence {
            generated_text: format!("{}{}", self.prefix, finished.text),
            details: Details {
                finish_reason: reason(&finished),
                generated_tokens: finished.usage.completion_tokens,
                seed: self.sampled.then_some(seed),
                prefill: prompt.iter().flatten().map(PrefillToken::new).collect(),
                top_tokens: self.top.then(|| tokens.iter().map(top_tokens).collect()),
                tokens: tokens.iter().map(TokenBody::new).collect(),
                best_of_sequences: None,
            },
        }
    }
}

async fn streamed(app: &App, request_id: &RequestId, job: Job) -> Result<Response, Refusal> {
    if job.best_of > 1 {
        let message =
            format!("best_of {} cannot be streamed: the best is known at the end", job.best_of);
        return Err(Refusal::invalid("best_of", message));
    }
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
    let Job { inputs, parameters, best_of, .. } = job;
    let request = |choice: u32| GenerateRequest {
        request_id: request_id.of_choice(choice as usize),
        prompt: Prompt::Text(inputs.clone()),
        parameters: Parameters {
            seed: derived_seed(parameters.seed, choice),
            ..parameters.clone()
        },
    };
    Ok(admit(&app.generator, (0..best_of).map(request).collect()).await?)
}

fn read(fields: &mut Fields) -> Result<Job, Refusal> {
    let inputs = fields.text("inputs")?.ok_or_else(|| Refusal::missing("inputs"))?.to_owned();
    let given = fields.nested("parameters")?;
    given.refuse_unsupported(PARAMETERS)?;
    let parameters = parameters(&given)?;
    Ok(Job {
        inputs,
        best_of: best_of(&given, &parameters)?,
        details: given.flag("details")? || given.flag("decoder_input_details")?,
        return_full_text: given.flag("return_full_text")?,
        stream: fields.flag("stream")?,
        parameters,
    })
}

/// How many answers there are to choose from.
fn best_of(given: &Fields, parameters: &Parameters) -> Result<u32, Refusal> {
    match given.count("best_of", 0)?.unwrap_or(1).max(1) {
        best_of if best_of > CHOICES_MAX => {
            let message = format!("best_of must be at most {CHOICES_MAX}, got {best_of}");
            Err(Refusal::invalid("best_of", message))
        }
        best_of if best_of > 1 && !is_sampled(parameters) => {
            let message = format!("best_of {best_of} needs sampling: greedy answers are all alike");
            Err(Refusal::invalid("best_of", message))
        }
        best_of => Ok(best_of),
    }
}

/// Greedy unless something asks for sampling, as in TGI: `do_sample`, or any of the thresholds.
fn parameters(given: &Fields) -> Result<Parameters, Refusal> {
    let (temperature, top_k) = (given.real("temperature")?, given.count("top_k", 0)?);
    let (top_p, typical_p) = (given.real("top_p")?, given.real("typical_p")?);
    let is_cut = |share: Option<f32>| share.is_some_and(|share| share < 1.0);
    let thresholds = top_k.is_some_and(|top_k| top_k > 0) || is_cut(top_p) || is_cut(typical_p);
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
        typical_p,
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
