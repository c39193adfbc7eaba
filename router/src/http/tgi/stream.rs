//! A TGI stream: one event for each token, the last one with the whole text.

use schemars::JsonSchema;
use serde::Serialize;

use super::{TokenBody, reason, top_tokens};
use crate::{
    api::Finished,
    error::RouterError,
    http::{
        refusal::Dialect,
        turns::{Admitted, Turn},
    },
    sse::{self, Frames},
};

pub struct Head {
    /// The prompt, when the full text is asked for.
    pub prefix: String,
    pub sampled: bool,
    pub top: bool,
}

pub struct Writer {
    head: Head,
    seed: Option<u64>,
    input_length: usize,
    /// Tokens told so far; TGI counts from 1.
    index: u32,
    last_id: u32,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GeneratedEvent")]
pub struct Event {
    index: u32,
    token: TokenBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_tokens: Option<Vec<TokenBody>>,
    generated_text: Option<String>,
    details: Option<StreamDetails>,
}

#[derive(Serialize, JsonSchema)]
struct StreamDetails {
    finish_reason: &'static str,
    generated_tokens: u32,
    seed: Option<u64>,
    input_length: usize,
}

impl Writer {
    pub fn new(head: Head, admitted: &Admitted) -> Self {
        Self {
            seed: admitted.seeds.first().copied().filter(|_| head.sampled),
            input_length: admitted.prompts.first().map_or(0, |prompt| prompt.len()),
            head,
            index: 0,
            last_id: 0,
        }
    }

    fn details(&self, finished: &Finished) -> StreamDetails {
        StreamDetails {
            finish_reason: reason(finished),
            generated_tokens: finished.usage.completion_tokens,
            seed: self.seed,
            input_length: self.input_length,
        }
    }
}

impl sse::Writer for Writer {
    const DIALECT: Dialect = Dialect::Tgi;

    fn turn(&mut self, turn: Turn, frames: &mut Frames) -> Result<(), RouterError> {
        let Turn { token, end, .. } = turn;
        let finished = end.transpose()?;
        let rest = finished.as_ref().map_or("", |finished| &finished.rest);
        let (body, top) = match &token {
            Some(token) => {
                self.index += 1;
                self.last_id = token.id;
                let mut body = TokenBody::new(token);
                body.text.push_str(rest);
                (body, self.head.top.then(|| top_tokens(token)))
            }
            // The end came after its token had gone out. TGI has no event without a token: the
            // held-back text stands in one, under the last id.
            None => {
                let text = rest.to_owned();
                let special = text.is_empty();
                (TokenBody { id: self.last_id, text, logprob: 0.0, special }, None)
            }
        };
        frames.event(&Event {
            index: self.index,
            token: body,
            top_tokens: top,
            generated_text: finished
                .as_ref()
                .map(|finished| format!("{}{}", self.head.prefix, finished.text)),
            details: finished.as_ref().map(|finished| self.details(finished)),
        });
        Ok(())
    }

    fn end(&mut self, _frames: &mut Frames) {}
}
