//! One running request: its text so far, and the way to its client.

use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::Span;
use trireme_proto::shard::v1 as proto;

use super::{events::Delivery, lifecycle::Lifecycle, scored_prompt::ScoredPrompt};
use crate::{
    api::{FinishReason, Finished, GenerateEvent, StopCause, Token, TopToken, Usage},
    detokenizer::{Detokenizer, TextDecoder},
    error::RouterError,
    metrics::Outcome,
    shard_group::{self, SequenceParameters},
    stop::StopMatcher,
    validation::ValidRequest,
};

/// How a token leaves the request.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    Running,
    /// A stop string is complete; the request wants to be finished.
    StopString(String),
    /// The client is too far behind, or gone.
    Abandoned(Abandoned),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abandoned {
    Slow,
    Gone,
}

pub struct ActiveRequest {
    lifecycle: Lifecycle,
    request: ValidRequest,
    decoder: Option<Arc<TextDecoder>>,
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    deliveries: mpsc::Sender<Delivery>,
    text: String,
    completion_tokens: u32,
    cached_tokens: u32,
    last_id: Option<u32>,
    /// The token that the answer ends with; it leaves with the end.
    last: Option<Token>,
    /// Scores of the prompt; they leave with what leaves first.
    prompt: Option<ScoredPrompt>,
}

impl ActiveRequest {
    pub fn new(
        request: ValidRequest,
        lifecycle: Lifecycle,
        decoder: Option<Arc<TextDecoder>>,
        deliveries: mpsc::Sender<Delivery>,
    ) -> Self {
        let parameters = &request.parameters;
        let skip_special = parameters.skip_special_tokens;
        let scored = |scoring| ScoredPrompt::new(request.prompt_ids.clone(), scoring);
        Self {
            detokenizer: decoder.clone().map(|decoder| Detokenizer::new(decoder, skip_special)),
            stops: StopMatcher::new(parameters.stop.clone(), parameters.include_stop),
            lifecycle,
            decoder,
            deliveries,
            text: String::new(),
            completion_tokens: 0,
            cached_tokens: 0,
            last_id: None,
            last: None,
            prompt: parameters.prompt_scoring.map(scored),
            request,
        }
    }

    /// The request's own span, to link steps to.
    pub fn span(&self) -> &Span {
        self.lifecycle.span()
    }

    /// The field of its grammar.
    pub fn constrained_by(&self) -> Option<&'static str> {
        self.request.parameters.constraint.as_ref().map(|constraint| constraint.field)
    }

    /// What the shards need to know of it.
    pub fn sequence_parameters(&self) -> SequenceParameters {
        let parameters = &self.request.parameters;
        let (least, stops) = (parameters.min_new_tokens, &parameters.stop_token_ids);
        let grammar = parameters.constraint.as_ref().map(|constraint| &*constraint.grammar);
        SequenceParameters {
            sampling: shard_group::sampling(&parameters.sampling, least, stops, grammar),
            prompt_top_logprobs: parameters.prompt_scoring.map_or(0, |s| s.top_logprobs),
        }
    }

    pub fn started(&mut self, cached_tokens: usize) {
        let cached_tokens = cached_tokens as u32;
        if self.lifecycle.started(self.request.prompt_ids.len() as u32, cached_tokens) {
            self.cached_tokens = cached_tokens;
        }
    }

    /// Takes scores of its prompt's tokens.
    pub fn scored(&mut self, scores: proto::PromptScores) {
        if let Some(prompt) = &mut self.prompt {
            prompt.push(scores);
        }
    }

    /// Takes one token. `ends`: it is the last one; the id that stops the answer gives no text
    /// unless the stop is to be included.
    pub fn token(&mut self, out: &proto::TokenOut, ends: Option<FinishReason>) -> Progress {
        self.lifecycle.token();
        self.completion_tokens += 1;
        self.last_id = Some(out.token);
        let is_stop = ends == Some(FinishReason::Stop);
        let (text, found) = if is_stop && !self.request.parameters.include_stop {
            (String::new(), None)
        } else {
            let decoded = self.detokenizer.as_mut().map(|decode| decode.push(out.token));
            self.scan(&decoded.unwrap_or_default())
        };
        self.text.push_str(&text);
        let token = self.describe(out, text);
        let sent = match ends.is_some() || found.is_some() {
            true => self.check_reader().map(|()| self.last = Some(token)),
            false => self.send(token),
        };
        match (sent, found) {
            (Ok(()), None) => Progress::Running,
            (Ok(()), Some(stop)) => Progress::StopString(stop),
            (Err(abandoned), _) => Progress::Abandoned(abandoned),
        }
    }

    /// As in vLLM, stop strings count only once the least number of tokens is there.
    fn scan(&mut self, text: &str) -> (String, Option<String>) {
        if self.completion_tokens <= self.request.parameters.min_new_tokens {
            return (text.to_owned(), None);
        }
        let (text, found) = self.stops.push(text);
        (text, found.map(|found| found.stop))
    }

    fn describe(&self, out: &proto::TokenOut, text: String) -> Token {
        let sampling = &self.request.parameters.sampling;
        let vocabulary = self.decoder.as_ref().map(|decoder| &decoder.vocabulary);
        let piece = |id| vocabulary.map(|known| known.piece(id)).unwrap_or_default();
        let bytes = |id| vocabulary.map(|known| known.bytes(id).to_vec()).unwrap_or_default();
        let top = out.top.iter().take(sampling.top_logprobs as usize).map(|top| TopToken {
            id: top.token,
            piece: piece(top.token),
            bytes: bytes(top.token),
            logprob: top.logprob,
        });
        Token {
            id: out.token,
            text,
            piece: piece(out.token),
            bytes: bytes(out.token),
            special: vocabulary.is_some_and(|known| known.is_special(out.token)),
            logprob: sampling.logprobs.then_some(out.logprob),
            top: top.collect(),
        }
    }

    /// Never waits: one place stays free for the end.
    fn send(&mut self, token: Token) -> Result<(), Abandoned> {
        self.check_reader()?;
        let delivery = Delivery { prompt: self.prompt.take(), token: Some(token), end: None };
        self.deliveries.try_send(delivery).map_err(|_| Abandoned::Gone)
    }

    /// The client is there, and not too far behind.
    fn check_reader(&self) -> Result<(), Abandoned> {
        match () {
            () if self.deliveries.is_closed() => Err(Abandoned::Gone),
            () if self.deliveries.capacity() <= 1 => Err(Abandoned::Slow),
            () => Ok(()),
        }
    }

    /// The end, with the last token if that is still here.
    fn send_end(&mut self, end: GenerateEvent) {
        let prompt = self.prompt.take().filter(|_| matches!(end, GenerateEvent::Finished(_)));
        let delivery = Delivery { prompt, token: self.last.take(), end: Some(end) };
        // A client that left does not hear it.
        let _ = self.deliveries.try_send(delivery);
    }

    /// The scheduler ended it: by an id, or by length.
    pub fn finish(mut self, reason: FinishReason, eos_token_ids: &[u32]) {
        let ignores_eos = self.request.parameters.ignore_eos;
        let is_eos = |id| !ignores_eos && eos_token_ids.contains(&id);
        let stop = match (reason, self.last_id) {
            (FinishReason::Stop, Some(id)) if is_eos(id) => Some(StopCause::EndOfSequence(id)),
            (FinishReason::Stop, Some(id)) => Some(StopCause::TokenId(id)),
            _ => None,
        };
        let left = self.detokenizer.as_mut().map(Detokenizer::finish).unwrap_or_default();
        let (mut rest, found) = self.scan(&left);
        if found.is_none() {
            rest.push_str(&self.stops.flush());
        }
        self.end(reason, rest, stop);
    }

    /// A stop string ended it; the text ends there.
    pub fn finish_at_stop_string(self, stop: String) {
        self.end(FinishReason::Stop, String::new(), Some(StopCause::Text(stop)));
    }

    fn end(mut self, reason: FinishReason, rest: String, stop: Option<StopCause>) {
        self.text.push_str(&rest);
        let outcome = match reason {
            FinishReason::Length => Outcome::Length,
            FinishReason::Stop => Outcome::Stop,
        };
        self.lifecycle.ended(outcome, self.completion_tokens);
        let usage = Usage {
            prompt_tokens: self.request.prompt_ids.len() as u32,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
        };
        let text = std::mem::take(&mut self.text);
        self.send_end(GenerateEvent::Finished(Finished { reason, text, rest, stop, usage }));
    }

    pub fn fail(mut self, error: RouterError) {
        self.lifecycle.ended(Outcome::Failed, self.completion_tokens);
        self.send_end(GenerateEvent::Failed(error));
    }

    pub fn fail_abandoned(self, abandoned: Abandoned) {
        match abandoned {
            Abandoned::Slow => {
                let limit = self.deliveries.max_capacity() - 1;
                self.fail(RouterError::SlowReader { limit });
            }
            Abandoned::Gone => self.cancelled(),
        }
    }

    /// The client left; nobody hears.
    pub fn cancelled(self) {
        self.lifecycle.ended(Outcome::Cancelled, self.completion_tokens);
    }
}
