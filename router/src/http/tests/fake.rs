//! A generator that does what the prompt's text says.

use std::{
    collections::VecDeque,
    future::ready,
    sync::{Arc, Mutex},
    task::Poll,
};

use futures::{
    StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore};

use crate::{
    api::{
        Conversation, FinishReason, Finished, GenerateEvent, GenerateRequest, Generation,
        Generator, Piece, Prompt, PromptScore, PromptToken, Readiness, ServedModel, StopCause,
        Token, Tokenized, TopToken, Usage,
    },
    chat_syntax::{ChatSyntax, Parsers},
    error::RouterError,
};

/// The answer to every prompt: ids, new text, piece. The third token is half a character.
pub const ANSWER: [(u32, &str, &str); 5] = [
    (10, "One", "One"),
    (11, " two", " two"),
    (12, "", "\u{fffd}"),
    (13, "é", "\u{fffd}"),
    (2, "", "</s>"),
];
/// What follows it is the answer.
pub const SAY: &str = "say ";
/// Cannot be decoded.
pub const UNKNOWN_ID: u32 = 99_999;
/// A prompt whose second token is impossible, and looks like the likeliest.
pub const MISTY: &str = "m?";
/// What an answer says that it was made by.
pub const FINGERPRINT: &str = concat!("trireme-", env!("CARGO_PKG_VERSION"), "-f32-tp2-pp1");
/// The answer's text.
pub const TEXT: &str = "One twoé";

#[derive(Default)]
pub struct Fake {
    /// Every request, as it came.
    pub requests: Mutex<Vec<GenerateRequest>>,
    pub readiness: Mutex<Option<Readiness>>,
    /// 2048 by default.
    pub max_model_len: Option<u32>,
    /// How often the prefix cache was reset.
    pub resets: std::sync::atomic::AtomicU32,
    /// Told when a generation that hangs began to be polled.
    pub hanging: Notify,
    /// One permit for each generation that was dropped before its end.
    pub dropped: std::sync::Arc<DropCount>,
}

pub struct DropCount(pub Semaphore);

impl Default for DropCount {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

/// Counts its own drop.
struct Watched(std::sync::Arc<DropCount>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.0.add_permits(1);
    }
}

impl Fake {
    pub fn take_requests(&self) -> Vec<GenerateRequest> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }

    fn script(&self, text: &str, request: &GenerateRequest) -> BoxStream<'static, GenerateEvent> {
        let mut tokens = tokens(request);
        let prompt_tokens = text.len() as u32;
        match text {
            "lost" => events(tokens, 2, Some(GenerateEvent::Failed(RouterError::ShardLost))),
            "unended" => events(tokens, 2, None),
            "hang" | "hang at once" => {
                self.hanging.notify_one();
                let watched = Watched(self.dropped.clone());
                let begun = if text == "hang" { 1 } else { 0 };
                let forever = stream::poll_fn(move |_| {
                    let _ = &watched;
                    Poll::Pending
                });
                events(tokens, begun, None).chain(forever).boxed()
            }
            _ if text.starts_with(SAY) => {
                let (spoken, answer) = spoken(&text[SAY.len()..]);
                let count = spoken.len() as u32;
                let finished = Finished { text: answer, ..finished(text, count, 9, false) };
                events(spoken, count as usize, Some(GenerateEvent::Finished(finished)))
            }
            _ => {
                // How likely an answer is, its seed says.
                if text == "ranked" {
                    let seed = request.parameters.seed.unwrap_or(77);
                    tokens.iter_mut().for_each(|token| {
                        token.logprob = token.logprob.map(|_| -(1.0 + (seed % 97) as f32));
                    });
                }
                let count = tokens.len();
                let cut = count < ANSWER.len();
                let finished = finished(text, count as u32, prompt_tokens, cut);
                let end = GenerateEvent::Finished(finished);
                if request.parameters.prompt_scoring.is_some() {
                    let prompt = stream::iter([GenerateEvent::Prompt(scored(text, request))]);
                    return prompt.chain(events(tokens, count, Some(end))).boxed();
                }
                if text == "late" {
                    return events(tokens, count, None).chain(late(end)).boxed();
                }
                events(tokens, count, Some(end))
            }
        }
    }
}

/// The tokens that fit in the request.
fn tokens(request: &GenerateRequest) -> VecDeque<Token> {
    let parameters = &request.parameters;
    let limit = parameters.max_new_tokens.map_or(usize::MAX, |limit| limit as usize);
    let top = |id: u32, piece: &str, logprob: f32| TopToken {
        id,
        piece: piece.into(),
        bytes: piece.as_bytes().to_vec(),
        logprob,
    };
    ANSWER
        .iter()
        .take(limit)
        .map(|(id, text, piece)| Token {
            id: *id,
            text: (*text).into(),
            piece: (*piece).into(),
            bytes: piece.as_bytes().to_vec(),
            special: *id == 2,
            logprob: parameters.logprobs.then_some(-0.1),
            top: [top(*id, piece, -0.1), top(99, "x", -2.5)]
                .into_iter()
                .take(parameters.top_logprobs as usize)
                .collect(),
        })
        .collect()
}

/// An answer in tokens of three characters, then its end.
fn spoken(answer: &str) -> (VecDeque<Token>, String) {
    let token = |id: u32, text: String, special: bool| Token {
        id,
        piece: text.clone(),
        bytes: text.clone().into_bytes(),
        text: if special { String::new() } else { text },
        special,
        logprob: None,
        top: Vec::new(),
    };
    let characters: Vec<char> = answer.chars().collect();
    let pieces = characters.chunks(3).map(|piece| token(10, piece.iter().collect(), false));
    (pieces.chain([token(2, "</s>".into(), true)]).collect(), answer.to_owned())
}

/// Each byte of the prompt is a token; the likeliest is always another one, which looks like `?`.
fn scored(text: &str, request: &GenerateRequest) -> Vec<PromptToken> {
    let scoring = request.parameters.prompt_scoring.unwrap_or_default();
    let best = TopToken { id: 200, piece: "?".into(), bytes: vec![b'?'], logprob: -0.25 };
    let top: Vec<TopToken> = std::iter::once(best).take(scoring.top_logprobs as usize).collect();
    let token = |(position, byte): (usize, u8)| {
        let logprob = match text {
            MISTY => f32::NEG_INFINITY,
            _ => -0.5 - position as f32,
        };
        let is_scored = position >= (scoring.start as usize).max(1);
        PromptToken {
            id: byte.into(),
            text: char::from(byte).into(),
            piece: char::from(byte).into(),
            special: false,
            score: is_scored.then(|| PromptScore { logprob, rank: 3, top: top.clone() }),
        }
    };
    text.bytes().enumerate().map(token).collect()
}

fn finished(text: &str, completion_tokens: u32, prompt_tokens: u32, cut: bool) -> Finished {
    let shown: String =
        ANSWER.iter().take(completion_tokens as usize).map(|(_, text, _)| *text).collect();
    let rest = if text == "held back" { "?" } else { "" };
    Finished {
        reason: if cut { FinishReason::Length } else { FinishReason::Stop },
        text: format!("{shown}{rest}"),
        rest: rest.into(),
        stop: match text {
            _ if cut => None,
            "stopped by text" => Some(StopCause::Text("END".into())),
            "stopped by id" => Some(StopCause::TokenId(7)),
            _ => Some(StopCause::EndOfSequence(2)),
        },
        usage: Usage { prompt_tokens, completion_tokens, cached_tokens: 1 },
    }
}

fn events(
    tokens: VecDeque<Token>,
    count: usize,
    end: Option<GenerateEvent>,
) -> BoxStream<'static, GenerateEvent> {
    stream::iter(tokens.into_iter().take(count).map(GenerateEvent::Token))
        .chain(stream::iter(end))
        .boxed()
}

/// An event that is not there yet when it is first looked for.
fn late(event: GenerateEvent) -> impl futures::Stream<Item = GenerateEvent> {
    let mut waited = false;
    let mut event = Some(event);
    stream::poll_fn(move |cx| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(event.take());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}

fn text_of(prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Ids(ids) => ids.iter().map(|id| char::from(*id as u8)).collect(),
        Prompt::Conversation(conversation) => {
            let last = conversation.messages.last();
            last.and_then(|last| last["content"].as_str()).unwrap_or_default().to_owned()
        }
    }
}

impl Generator for Fake {
    fn generate(&self, request: GenerateRequest) -> BoxFuture<'_, Result<Generation, RouterError>> {
        let text = text_of(&request.prompt);
        self.requests.lock().unwrap().push(request.clone());
        let refused = match text.as_str() {
            "full" => Some(RouterError::Overloaded { limit: 8, retry_after_s: 3 }),
            "not ready" => Some(RouterError::NotReady("loading".into())),
            "too hot" => Some(RouterError::Invalid {
                field: "max_new_tokens",
                message: "max_tokens must be at most 9, got 10".into(),
            }),
            "empty" => Some(RouterError::Invalid {
                field: "prompt",
                message: "prompt must have at least 1 token, not 0".into(),
            }),
            "broken" => Some(RouterError::Internal(anyhow::anyhow!("the secret cause"))),
            "panic" => panic!("as the test asked"),
            _ => None,
        };
        Box::pin(ready(match refused {
            Some(error) => Err(error),
            None => Ok(Generation {
                request_id: request.request_id.clone(),
                prompt_ids: text.bytes().map(u32::from).collect(),
                seed: request.parameters.seed.unwrap_or(77),
                events: self.script(&text, &request),
            }),
        }))
    }

    fn encode(&self, text: String, special: bool) -> BoxFuture<'_, Result<Vec<u32>, RouterError>> {
        let first = special.then_some(1);
        Box::pin(ready(Ok(first.into_iter().chain(text.bytes().map(u32::from)).collect())))
    }

    /// Each byte is a token; text added around has no place in it.
    fn tokenize(
        &self,
        prompt: Prompt,
        special: Option<bool>,
    ) -> BoxFuture<'_, Result<Tokenized, RouterError>> {
        let (text, special) = match &prompt {
            Prompt::Conversation(_) => {
                (format!("<{}>", text_of(&prompt)), special.unwrap_or(false))
            }
            _ => (text_of(&prompt), special.unwrap_or(true)),
        };
        let piece = |(at, byte): (usize, u8)| Piece {
            id: byte.into(),
            token: char::from(byte).into(),
            chars: at..at + 1,
        };
        let first = special.then(|| Piece { id: 1, token: "<s>".into(), chars: 0..0 });
        let pieces = first.into_iter().chain(text.bytes().enumerate().map(piece)).collect();
        Box::pin(ready(Ok(Tokenized { text, pieces })))
    }

    fn decode(&self, ids: Vec<u32>) -> BoxFuture<'_, Result<String, RouterError>> {
        if ids.contains(&UNKNOWN_ID) {
            let message = format!("tokens holds id {UNKNOWN_ID}; the vocabulary has 256 ids");
            let error = RouterError::Invalid { field: "tokens", message };
            return Box::pin(ready(Err(error)));
        }
        Box::pin(ready(Ok(text_of(&Prompt::Ids(ids)))))
    }

    fn render(&self, given: Arc<Conversation>) -> BoxFuture<'_, Result<String, RouterError>> {
        Box::pin(ready(Ok(format!("<{}>", text_of(&Prompt::Conversation(given))))))
    }

    fn encode_conversation(
        &self,
        given: Arc<Conversation>,
    ) -> BoxFuture<'_, Result<Vec<u32>, RouterError>> {
        self.encode(format!("<{}>", text_of(&Prompt::Conversation(given))), false)
    }

    fn model(&self) -> ServedModel {
        ServedModel {
            name: "org/tiny".into(),
            created_s: 1_700_000_001,
            tp: 2,
            pp: 1,
            dtype: "f32".into(),
            max_model_len: self.max_model_len.unwrap_or(2048),
            max_sequences: 64,
            max_batch_tokens: 512,
            kv_blocks: 1000,
            kv_block_tokens: 16,
        }
    }

    fn chat_syntax(&self) -> ChatSyntax {
        let vocabulary = trireme_grammar::Vocabulary::default();
        ChatSyntax::of(Parsers::default(), "<tool_call> </think>", &vocabulary)
    }

    fn readiness(&self) -> Readiness {
        self.readiness.lock().unwrap().clone().unwrap_or(Readiness::Ready)
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, Result<(), RouterError>> {
        self.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Box::pin(ready(Ok(())))
    }

    fn tokenizer_info(&self) -> Option<Value> {
        Some(json!({"eos_token": "</s>"}))
    }
}
