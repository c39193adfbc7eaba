//! `POST /v1/completions`.

use axum::{
    Json,
    extract::{Extension, State},
    response::{IntoResponse, Response},
};
use futures::future::try_join_all;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    App,
    best_of::best_first,
    ending::Ending,
    fields::{
        Fields,
        field::{Field, flag, refused, shaped, token_id, whole},
    },
    logprobs::{CompletionLogprobs, Naming, PromptLogprobs},
    prompts::{completion_prompts, messages_shape},
    refusal::Refusal,
    sampling::{self, CHOICES_MAX, UsageEvents},
    turns::{Answer, admit, collect},
    usage::{Counts, UsageBody},
};
use crate::{
    api::{GenerateRequest, Parameters, Prompt, PromptScoring, PromptToken, Token},
    sse,
    stack::RequestId,
    validation::TOP_LOGPROBS_MOST,
};

mod stream;

/// What this route takes beside [`sampling::FIELDS`].
pub const FIELDS: &[Field] = &[
    shaped("prompt", prompt_shape, "One choice for each prompt, in order.").required(),
    flag("echo", "Repeats the prompt's text before the answer."),
    shaped("logprobs", logprobs_shape, "Candidates told beside each chosen token."),
    whole("best_of", 0, CHOICES_MAX as u64, "Choose the n likeliest of so many answers."),
    refused("chat_template"),
    refused("chat_template_kwargs"),
    refused("suffix"),
];

fn prompt_shape() -> Value {
    let ids = json!({"type": "array", "minItems": 1, "items": token_id()});
    json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, ids]}},
        ids,
        messages_shape(),
    ]})
}

fn logprobs_shape() -> Value {
    json!({"anyOf": [
        {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MOST},
        {"const": false},
    ]})
}

/// The answer's length when the request does not say, as in the OpenAI and vLLM servers.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// A request, read.
struct Job {
    prompts: Vec<Prompt>,
    parameters: Parameters,
    n: u32,
    /// Answers for each prompt, of which `n` are told.
    candidates: u32,
    echo: bool,
    prompt_logprobs: Option<usize>,
    naming: Naming,
    stream: bool,
    usage: UsageEvents,
    return_token_ids: bool,
}

/// What is the same in every part of an answer.
struct Head {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    n: u32,
    /// Candidates beside each token.
    logprobs: Option<usize>,
    /// Candidates beside each prompt token, in the array of its own.
    prompt_logprobs: Option<usize>,
    naming: Naming,
    return_token_ids: bool,
    usage: UsageEvents,
    /// The prompt's text for each choice, when it is to be repeated; else empty.
    echoes: Vec<String>,
}

/// The wire shape of an answer and of each of its parts.
#[derive(Serialize, JsonSchema)]
pub struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageBody>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CompletionChoice")]
struct Choice<'a> {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    #[serde(flatten)]
    ending: Ending,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl Head {
    /// Of the tokens that a choice has got: with those of its prompt where that is repeated.
    fn logprobs(
        &self,
        index: usize,
        prompt: Option<&[PromptToken]>,
        tokens: &[Token],
        offset_chars: usize,
    ) -> Option<CompletionLogprobs> {
        let top = self.logprobs?;
        let echoed = prompt.filter(|_| self.echoes.get(index).is_some());
        Some(match echoed {
            Some(prompt) => {
                CompletionLogprobs::echoed(prompt, top, tokens, offset_chars, self.naming)
            }
            None => CompletionLogprobs::new(tokens, offset_chars, self.naming),
        })
    }

    fn completion<'a>(
        &'a self,
        choices: Vec<Choice<'a>>,
        usage: Option<UsageBody>,
    ) -> Completion<'a> {
        Completion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage,
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
    let field = if job.candidates > job.n { "best_of" } else { "n" };
    app.check_choices(job.prompts.len(), job.candidates, field)?;
    let head = head(&app, &request_id, &job).await?;
    if job.parameters.max_new_tokens == Some(0) {
        refuse_empty_stream(&job)?;
    }
    if job.parameters.max_new_tokens == Some(0) && job.parameters.prompt_scoring.is_none() {
        return echo_alone(&app, head, &job).await;
    }
    let stream = job.stream;
    let (entries, candidates) = (job.prompts.len(), job.candidates as usize);
    let admitted = admit(&app.generator, requests(job, &request_id)).await;
    let admitted = admitted.map_err(|refused| match entries {
        1 => refused.into(),
        _ => Refusal::from(refused.error).of_entry("prompt", refused.choice / candidates),
    })?;
    if stream {
        let writer = stream::Writer::new(head, &admitted.prompts);
        return Ok(sse::response(admitted, writer));
    }
    let prompts = admitted.prompts.clone();
    let mut answers = collect(admitted).await?;
    let usage = prompts.iter().zip(&answers).map(|(prompt, answer)| Counts::of(prompt, answer));
    let usage = UsageBody::total(usage, candidates as u32);
    if candidates > head.n as usize {
        best_first(&mut answers, candidates);
    }
    let told = answers.into_iter().enumerate();
    let told = told.filter(|(index, _)| index % candidates < head.n as usize);
    let choices = told
        .enumerate()
        .map(|(index, (candidate, answer))| choice(&head, index, &prompts[candidate], answer));
    Ok(Json(head.completion(choices.collect(), Some(usage))).into_response())
}

fn read(fields: &mut Fields) -> Result<Job, Refusal> {
    fields.refuse_unsupported(FIELDS)?;
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::missing("prompt"))?;
    let mut parameters = sampling::openai(fields)?;
    let echo = fields.flag("echo")?;
    let prompt_logprobs = parameters.prompt_scoring.map(|scoring| scoring.top_logprobs as usize);
    let has_answer = !echo && prompt_logprobs.is_none();
    let max_tokens = sampling::max_tokens(fields, u32::from(has_answer))?;
    // null asks for all the room there is, as in vLLM.
    parameters.max_new_tokens = match max_tokens {
        None if fields.is_written("max_tokens") => None,
        None => Some(MAX_TOKENS_DEFAULT),
        given => given,
    };
    if let Some(top) = logprobs(fields)? {
        parameters.logprobs = true;
        parameters.top_logprobs = top;
    }
    if echo && parameters.logprobs {
        let scoring = parameters.prompt_scoring.get_or_insert(PromptScoring {
            start: sampling::scoring_start(fields)?,
            ..PromptScoring::default()
        });
        scoring.top_logprobs = scoring.top_logprobs.max(parameters.top_logprobs);
        // Its tokens are counted by the client, who knows nothing of a token put before them.
        parameters.add_special_tokens.get_or_insert(false);
    }
    let (n, stream) = (sampling::choices(fields)?, fields.flag("stream")?);
    Ok(Job {
        prompts: completion_prompts(prompt)?,
        parameters,
        n,
        candidates: candidates(fields, n, stream)?,
        echo,
        prompt_logprobs,
        naming: sampling::naming(fields)?,
        stream,
        usage: sampling::usage_events(fields)?,
        return_token_ids: fields.flag("return_token_ids")?,
    })
}

/// `best_of`, `n` when absent.
fn candidates(fields: &Fields, n: u32, stream: bool) -> Result<u32, Refusal> {
    let refused = |message| Err(Refusal::invalid("best_of", message));
    // 0 is an older way not to ask, and 1 what some clients always send.
    match fields.count("best_of", 0)? {
        None | Some(0 | 1) => Ok(n),
        Some(given) if given > CHOICES_MAX => {
            refused(format!("best_of must be at most {CHOICES_MAX}, got {given}"))
        }
        Some(given) if given < n => {
            refused(format!("best_of must be at least n, {n}, got {given}"))
        }
        Some(given) if given > n && stream => refused(format!(
            "best_of {given} cannot be streamed with n {n}: the best is known at the end"
        )),
        Some(given) => Ok(given),
    }
}

/// The number of candidates beside each chosen token; `false` is an older way to say none.
fn logprobs(fields: &Fields) -> Result<Option<u32>, Refusal> {
    match fields.get("logprobs") {
        Some(Value::Bool(false)) => Ok(None),
        _ => sampling::candidates(fields, "logprobs"),
    }
}

async fn head(app: &App, request_id: &RequestId, job: &Job) -> Result<Head, Refusal> {
    let mut echoes = Vec::new();
    if job.echo {
        let texts = try_join_all(job.prompts.iter().map(|prompt| text(app, prompt))).await?;
        for text in texts {
            echoes.extend(std::iter::repeat_n(text, job.n as usize));
        }
    }
    Ok(Head {
        id: format!("cmpl-{}", request_id.as_str()),
        created: app.now_s(),
        model: app.generator.model().name,
        fingerprint: app.fingerprint(),
        n: job.n,
        logprobs: job.parameters.logprobs.then_some(job.parameters.top_logprobs as usize),
        prompt_logprobs: job.prompt_logprobs,
        naming: job.naming,
        return_token_ids: job.return_token_ids,
        usage: job.usage,
        echoes,
    })
}

async fn text(app: &App, prompt: &Prompt) -> Result<String, Refusal> {
    Ok(match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Ids(ids) => {
            let text = app.generator.decode(ids.clone()).await;
            text.map_err(|error| Refusal::from(error).renamed("tokens", "prompt"))?
        }
        Prompt::Conversation(conversation) => app.generator.render(conversation.clone()).await?,
    })
}

/// All candidates of a prompt in a row.
fn requests(job: Job, request_id: &RequestId) -> Vec<GenerateRequest> {
    let Job { prompts, mut parameters, n, candidates, .. } = job;
    // They are compared by them.
    parameters.logprobs |= candidates > n;
    let mut requests = Vec::with_capacity(prompts.len() * candidates as usize);
    for prompt in prompts {
        for choice in 0..candidates {
            let parameters = Parameters {
                seed: sampling::derived_seed(parameters.seed, choice),
                ..parameters.clone()
            };
            let request_id = request_id.of_choice(requests.len());
            requests.push(GenerateRequest { request_id, prompt: prompt.clone(), parameters });
        }
    }
    requests
}

fn choice<'a>(head: &Head, index: usize, prompt: &'a [u32], answer: Answer) -> Choice<'a> {
    let echo = head.echoes.get(index).map_or("", String::as_str);
    let Answer { prompt: scored, tokens, finished, .. } = answer;
    let scored = scored.as_deref();
    Choice {
        index,
        text: format!("{echo}{}", finished.text),
        logprobs: head.logprobs(index, scored, &tokens, echo.chars().count()),
        ending: Ending::of(&finished),
        prompt_logprobs: scored
            .zip(head.prompt_logprobs)
            .map(|(prompt, top)| PromptLogprobs::new(prompt, top)),
        prompt_token_ids: head.return_token_ids.then_some(prompt),
        token_ids: head.return_token_ids.then(|| tokens.iter().map(|token| token.id).collect()),
    }
}

fn refuse_empty_stream(job: &Job) -> Result<(), Refusal> {
    if !job.stream {
        return Ok(());
    }
    let message = "max_tokens must be at least 1 when streaming, got 0";
    Err(Refusal::invalid("max_tokens", message))
}

/// `echo` with `max_tokens` 0 and no scores: the prompt is the answer, and nothing is computed.
async fn echo_alone(app: &App, head: Head, job: &Job) -> Result<Response, Refusal> {
    let special = job.parameters.add_special_tokens;
    let ids = try_join_all(job.prompts.iter().map(|prompt| async {
        Ok::<_, Refusal>(match prompt {
            Prompt::Text(text) => {
                app.generator.encode(text.clone(), special.unwrap_or(true)).await?
            }
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Conversation(conversation) => {
                app.generator.encode_conversation(conversation.clone()).await?
            }
        })
    }))
    .await?;
    let length = Ending { finish_reason: Some("length"), stop_reason: None };
    let choices = head.echoes.iter().enumerate().map(|(index, echo)| Choice {
        index,
        text: echo.clone(),
        logprobs: None,
        ending: length.clone(),
        prompt_logprobs: None,
        prompt_token_ids: head.return_token_ids.then(|| &*ids[index / head.n as usize]),
        token_ids: head.return_token_ids.then(Vec::new),
    });
    let counts = ids.iter().map(|ids| Counts { prompt_tokens: ids.len(), ..Counts::default() });
    let usage = UsageBody::total(counts, 1);
    Ok(Json(head.completion(choices.collect(), Some(usage))).into_response())
}
