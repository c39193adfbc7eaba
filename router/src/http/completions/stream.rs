//! A completion as a stream: one event for each token, from the first token on.

use std::sync::Arc;

use super::{Choice, Head};
use crate::{
    error::RouterError,
    http::{
        ending::Ending,
        refusal::Dialect,
        turns::Turn,
        usage::{Counts, UsageBody},
    },
    sse::{self, Frames},
};

pub struct Writer {
    head: Head,
    choices: Vec<Progress>,
}

/// How far one choice is.
struct Progress {
    prompt: Arc<[u32]>,
    counts: Counts,
    text_chars: usize,
    begun: bool,
}

impl Writer {
    pub fn new(head: Head, prompts: &[Arc<[u32]>]) -> Self {
        let choices = prompts.iter().map(|prompt| Progress {
            prompt: prompt.clone(),
            counts: Counts { prompt_tokens: prompt.len(), ..Counts::default() },
            text_chars: 0,
            begun: false,
        });
        Self { choices: choices.collect(), head }
    }
}

impl sse::Writer for Writer {
    const DIALECT: Dialect = Dialect::OpenAi;

    fn turn(&mut self, turn: Turn, frames: &mut Frames) -> Result<(), RouterError> {
        let Turn { choice: index, prompt, token, end } = turn;
        let finished = end.transpose()?;
        let head = &self.head;
        let progress = &mut self.choices[index];
        let first = !std::mem::replace(&mut progress.begun, true);

        let echo = if first { head.echoes.get(index).map_or("", String::as_str) } else { "" };
        let new = token.as_ref().map_or("", |token| &token.text);
        let rest = finished.as_ref().map_or("", |finished| &finished.rest);
        let text = format!("{echo}{new}{rest}");
        let offset_chars = progress.text_chars + echo.chars().count();
        progress.text_chars += text.chars().count();
        progress.counts.completion_tokens += usize::from(token.is_some());
        if let Some(finished) = &finished {
            progress.counts.cached_tokens = finished.usage.cached_tokens;
        }

        let tokens = token.as_slice();
        let counts = progress.counts;
        let choice = Choice {
            index,
            text,
            logprobs: head.logprobs(index, prompt.as_deref(), tokens, offset_chars),
            prompt_logprobs: None,
            ending: finished.as_ref().map(Ending::of).unwrap_or_default(),
            prompt_token_ids: (head.return_token_ids && first).then_some(&*progress.prompt),
            token_ids: head.return_token_ids.then(|| tokens.iter().map(|token| token.id).collect()),
        };
        let usage = head.usage.each.then(|| UsageBody::total([counts], 1));
        frames.event(&head.completion(vec![choice], usage));
        Ok(())
    }

    fn end(&mut self, frames: &mut Frames) {
        if self.head.usage.last {
            let counts = self.choices.iter().map(|choice| choice.counts);
            let usage = UsageBody::total(counts, self.head.n);
            frames.event(&self.head.completion(Vec::new(), Some(usage)));
        }
        frames.done();
    }
}
