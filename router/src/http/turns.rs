//! The events of several generations, merged as they come.

use std::{pin::Pin, sync::Arc};

use anyhow::anyhow;
use futures::{
    FutureExt, StreamExt, TryFutureExt,
    future::try_join_all,
    stream::{self, BoxStream, SelectAll},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::refusal::Refusal;
use crate::{
    api::{Finished, GenerateEvent, GenerateRequest, Generator, PromptToken, Token},
    error::RouterError,
};

/// Admitted generations, one for each choice. Dropping this cancels them all.
pub struct Admitted {
    /// The ids of each choice's prompt.
    pub prompts: Vec<Arc<[u32]>>,
    /// The seed of each choice.
    pub seeds: Vec<u64>,
    pub turns: BoxStream<'static, Turn>,
}

/// What one choice says next: a token, its end, or both when the end is known with the last token.
pub struct Turn {
    pub choice: usize,
    /// With the first turn of a choice whose prompt is scored.
    pub prompt: Option<Vec<PromptToken>>,
    pub token: Option<Token>,
    pub end: Option<Result<Finished, RouterError>>,
}

/// Why a request was not admitted, and which of its choices was refused.
pub struct Refused {
    pub choice: usize,
    pub error: RouterError,
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        refused.error.into()
    }
}

/// Admits all or none: when one is refused, those admitted before are cancelled.
pub async fn admit(
    generator: &Arc<dyn Generator>,
    requests: Vec<GenerateRequest>,
) -> Result<Admitted, Refused> {
    let generations = requests.into_iter().enumerate().map(|(choice, request)| {
        generator.generate(request).map_err(move |error| Refused { choice, error })
    });
    let generations = try_join_all(generations).await?;
    let (mut prompts, mut seeds) = (Vec::new(), Vec::new());
    let mut merged = SelectAll::new();
    for (choice, generation) in generations.into_iter().enumerate() {
        prompts.push(generation.prompt_ids);
        seeds.push(generation.seed);
        merged.push(turns(choice, generation.events));
    }
    let mut tally = Tally::new(generator.model().name);
    let turns = merged.inspect(move |turn| tally.count(turn));
    Ok(Admitted { prompts, seeds, turns: turns.boxed() })
}

/// Counts the tokens of a request and tells its span, however the request ends. The names are
/// OpenTelemetry's GenAI conventions.
struct Tally {
    span: Span,
    output_tokens: i64,
}

impl Tally {
    fn new(model: String) -> Self {
        let span = Span::current();
        span.set_attribute("gen_ai.request.model", model);
        Self { span, output_tokens: 0 }
    }

    fn count(&mut self, turn: &Turn) {
        self.output_tokens += i64::from(turn.token.is_some());
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.span.set_attribute("gen_ai.usage.output_tokens", self.output_tokens);
    }
}

/// One choice's turns. The end comes with the last token, since a generator has it there by then,
/// so that a stream has as many events as tokens; nothing is held back to get there.
fn turns(choice: usize, events: BoxStream<'static, GenerateEvent>) -> BoxStream<'static, Turn> {
    let state = Some(events.peekable());
    stream::unfold(state, move |state| async move {
        let mut events = state?;
        let (prompt, event) = match events.next().await {
            Some(GenerateEvent::Prompt(prompt)) => (Some(prompt), events.next().await),
            event => (None, event),
        };
        let (token, end) = match event {
            Some(GenerateEvent::Token(token)) => {
                let ended = Pin::new(&mut events).peek().now_or_never().flatten();
                if !matches!(ended, Some(GenerateEvent::Finished(_))) {
                    let turn = Turn { choice, prompt, token: Some(token), end: None };
                    return Some((turn, Some(events)));
                }
                (Some(token), events.next().await)
            }
            other => (None, other),
        };
        let end = match end {
            Some(GenerateEvent::Finished(finished)) => Ok(finished),
            Some(GenerateEvent::Failed(error)) => Err(error),
            _ => Err(RouterError::Internal(anyhow!("a generation ended without a reason"))),
        };
        Some((Turn { choice, prompt, token, end: Some(end) }, None))
    })
    .boxed()
}

/// One choice, whole.
pub struct Answer {
    /// Where the prompt is scored.
    pub prompt: Option<Vec<PromptToken>>,
    pub tokens: Vec<Token>,
    pub finished: Finished,
    pub seed: u64,
}

/// Waits for all choices, in order of their index. The first failure ends the wait and cancels
/// the rest.
pub async fn collect(admitted: Admitted) -> Result<Vec<Answer>, Refusal> {
    let Admitted { prompts, seeds, mut turns } = admitted;
    let mut tokens: Vec<Vec<Token>> = prompts.iter().map(|_| Vec::new()).collect();
    let mut ends: Vec<Option<Finished>> = prompts.iter().map(|_| None).collect();
    let mut scored: Vec<Option<Vec<PromptToken>>> = prompts.iter().map(|_| None).collect();
    while let Some(turn) = turns.next().await {
        if turn.prompt.is_some() {
            scored[turn.choice] = turn.prompt;
        }
        tokens[turn.choice].extend(turn.token);
        if let Some(end) = turn.end {
            ends[turn.choice] = Some(end?);
        }
    }
    tokens
        .into_iter()
        .zip(ends)
        .zip(scored)
        .zip(seeds)
        .map(|(((tokens, end), prompt), seed)| match end {
            Some(finished) => Ok(Answer { prompt, tokens, finished, seed }),
            None => Err(RouterError::Internal(anyhow!("a choice never ended")).into()),
        })
        .collect()
}
