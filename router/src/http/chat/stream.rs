//! A chat answer as a stream: the role with the first token, then one event for each token.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Completion, Head,
    message::{Delta, Reading},
};
use crate::{
    answer_reader::AnswerReader,
    error::RouterError,
    http::{
        ending::Ending,
        logprobs::ChatLogprobs,
        refusal::Dialect,
        turns::Turn,
        usage::{Counts, UsageBody},
    },
    sse::{self, Frames},
};

const OBJECT: &str = "chat.completion.chunk";

pub struct Writer {
    head: Head,
    prompt: Arc<[u32]>,
    /// Whether the prompt's ids still have to be told.
    prompt_due: bool,
    choices: Vec<Progress>,
}

struct Progress {
    counts: Counts,
    begun: bool,
    reader: AnswerReader,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatChunk")]
pub struct Chunk {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl Writer {
    pub fn new(head: Head, prompts: &[Arc<[u32]>], reading: &Reading) -> Self {
        let choices = prompts.iter().map(|prompt| Progress {
            counts: Counts { prompt_tokens: prompt.len(), ..Counts::default() },
            begun: false,
            reader: reading.reader(),
        });
        Self {
            choices: choices.collect(),
            prompt: prompts.first().cloned().unwrap_or_default(),
            prompt_due: head.return_token_ids,
            head,
        }
    }

    /// Writes one event of one choice.
    fn write(&mut self, chunk: Chunk, frames: &mut Frames) {
        let counts = self.choices[chunk.index].counts;
        let prompt_due = std::mem::take(&mut self.prompt_due);
        frames.event(&Completion {
            usage: self.head.usage.each.then(|| UsageBody::total([counts], 1)),
            prompt_token_ids: prompt_due.then_some(&*self.prompt),
            ..self.head.completion(OBJECT, vec![chunk])
        });
    }
}

impl sse::Writer for Writer {
    const DIALECT: Dialect = Dialect::OpenAi;

    fn turn(&mut self, turn: Turn, frames: &mut Frames) -> Result<(), RouterError> {
        let Turn { choice: index, token, end, .. } = turn;
        let finished = end.transpose()?;
        if !std::mem::replace(&mut self.choices[index].begun, true) {
            let opening = Chunk {
                index,
                delta: Delta::opening(),
                logprobs: None,
                ending: Ending::default(),
                token_ids: None,
            };
            self.write(opening, frames);
        }
        let counts = &mut self.choices[index].counts;
        counts.completion_tokens += usize::from(token.is_some());
        if let Some(finished) = &finished {
            counts.cached_tokens = finished.usage.cached_tokens;
        }
        let reader = &mut self.choices[index].reader;
        let mut parts = token.as_ref().map(|token| reader.push(token)).unwrap_or_default();
        if let Some(finished) = &finished {
            parts.extend(reader.finish(&finished.rest));
        }
        let has_calls = reader.has_calls();
        let tokens = token.as_slice();
        let told = self.head.return_token_ids;
        let chunk = Chunk {
            index,
            delta: Delta::of(parts),
            logprobs: (self.head.logprobs && !tokens.is_empty())
                .then(|| ChatLogprobs::new(tokens, self.head.naming)),
            ending: finished
                .as_ref()
                .map(|finished| Ending::of_chat(finished, has_calls))
                .unwrap_or_default(),
            token_ids: told.then(|| tokens.iter().map(|token| token.id).collect()),
        };
        self.write(chunk, frames);
        Ok(())
    }

    fn end(&mut self, frames: &mut Frames) {
        if self.head.usage.last {
            let counts = self.choices.iter().map(|choice| choice.counts);
            frames.event(&Completion::<Chunk> {
                usage: Some(UsageBody::total(counts, self.head.n)),
                ..self.head.completion(OBJECT, Vec::new())
            });
        }
        frames.done();
    }
}
