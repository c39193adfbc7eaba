//! Asks a server what a task wants to know, with the token arithmetic of lm-evaluation-harness.

use std::ops::Range;

use anyhow::{anyhow, bail};
use futures::{StreamExt, TryStreamExt, stream};
use trireme_proto::generate::v1::{
    GenerateRequest, InfoReply, InfoRequest, Parameters, ScoreRequest, TokenIds, TokenizeRequest,
    generate_request, score_request,
};

use super::{
    metrics::{Outcome, Score},
    task::{Documents, Generate, Task},
};
use crate::{answer::client, rpc::Connection};

/// A server, and what scoring must know of it.
pub struct Harness {
    channel: Connection,
    info: InfoReply,
    /// Stands before a text without context; nothing for a model without special tokens.
    prefix: Option<u32>,
}

/// Ids of which the last ones are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Window {
    ids: Vec<u32>,
    /// The first that is scored.
    start: usize,
}

impl Harness {
    pub async fn new(channel: Connection) -> anyhow::Result<Self> {
        let info = client(channel.clone()).info(InfoRequest {}).await?.into_inner();
        let mut harness = Self { channel, info, prefix: None };
        let tokens = [&harness.info.bos_token, &harness.info.eos_token];
        if let Some(token) = tokens.into_iter().find(|token| !token.is_empty()).cloned() {
            harness.prefix = harness.encode(&token).await?.first().copied();
        }
        Ok(harness)
    }

    pub fn model(&self) -> &str {
        &self.info.model
    }

    /// One outcome for each document, in their order; `concurrency` of them are asked at once.
    pub async fn run(&self, task: &Task, concurrency: usize) -> anyhow::Result<Vec<Outcome>> {
        let count = match &task.documents {
            Documents::Choice(documents) => documents.len(),
            Documents::Loglikelihood(documents) => documents.len(),
            Documents::Rolling(documents) => documents.len(),
            Documents::Generate(documents) => documents.len(),
        };
        stream::iter(0..count)
            .map(|index| self.ask(&task.documents, index))
            .buffered(concurrency)
            .try_collect()
            .await
    }

    async fn ask(&self, documents: &Documents, index: usize) -> anyhow::Result<Outcome> {
        Ok(match documents {
            Documents::Choice(documents) => {
                let document = &documents[index];
                let mut scores = Vec::with_capacity(document.choices.len());
                for choice in &document.choices {
                    scores.push(self.loglikelihood(&document.context, choice).await?);
                }
                Outcome::Scores(scores)
            }
            Documents::Loglikelihood(documents) => {
                let document = &documents[index];
                let score = self.loglikelihood(&document.context, &document.continuation).await?;
                Outcome::Scores(vec![score])
            }
            Documents::Rolling(documents) => {
                Outcome::Scores(vec![self.rolling(&documents[index].text).await?])
            }
            Documents::Generate(documents) => {
                Outcome::Text(self.generate(&documents[index]).await?)
            }
        })
    }

    async fn loglikelihood(&self, context: &str, continuation: &str) -> anyhow::Result<Score> {
        if context.is_empty() {
            let ids = self.encode(continuation).await?;
            return self.score(tail(self.prefixed(ids)?, 1, self.most_ids())).await;
        }
        let (context, continuation) = split_blanks(context, continuation);
        let whole = self.encode(&format!("{context}{continuation}")).await?;
        let start = self.encode(context).await?.len().min(whole.len());
        if start == whole.len() {
            bail!("a continuation has no token of its own after its context");
        }
        self.score(tail(whole, start, self.most_ids())).await
    }

    async fn rolling(&self, text: &str) -> anyhow::Result<Score> {
        let ids = self.encode(text).await?;
        let prefixed = self.prefixed(ids)?;
        let mut sum = Score { logprob: 0.0, is_greedy: true };
        for window in windows(prefixed.len(), self.most_ids()) {
            let (ids, start) = window;
            let score = self.score(Window { ids: prefixed[ids].to_vec(), start }).await?;
            sum.logprob += score.logprob;
            sum.is_greedy &= score.is_greedy;
        }
        Ok(sum)
    }

    async fn generate(&self, document: &Generate) -> anyhow::Result<String> {
        let parameters = Parameters {
            max_new_tokens: Some(document.max_new_tokens),
            stop: document.until.clone(),
            ..Parameters::default()
        };
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Text(document.prompt.clone())),
            parameters: Some(parameters),
            ..GenerateRequest::default()
        };
        let reply = client(self.channel.clone()).generate(request).await.map_err(refused)?;
        Ok(reply.into_inner().text)
    }

    fn prefixed(&self, ids: Vec<u32>) -> anyhow::Result<Vec<u32>> {
        let Some(prefix) = self.prefix else {
            bail!("the model has no special token to stand before a text without context");
        };
        Ok(std::iter::once(prefix).chain(ids).collect())
    }

    /// Most ids of one scored prompt.
    fn most_ids(&self) -> usize {
        self.info.max_model_len as usize
    }

    async fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let request = TokenizeRequest { text: text.to_owned(), add_special_tokens: false };
        let reply = client(self.channel.clone()).tokenize(request).await.map_err(refused)?;
        Ok(reply.into_inner().ids)
    }

    async fn score(&self, window: Window) -> anyhow::Result<Score> {
        let Window { ids, start } = window;
        let wanted = ids.len() - start;
        let request = ScoreRequest {
            prompt: Some(score_request::Prompt::Ids(TokenIds { ids })),
            start: start as u32,
            ..ScoreRequest::default()
        };
        let reply = client(self.channel.clone()).score(request).await.map_err(refused)?;
        let tokens = reply.into_inner().tokens;
        let mut sum = Score { logprob: 0.0, is_greedy: true };
        let mut found = 0;
        for token in tokens.iter().skip(start) {
            let (Some(logprob), Some(rank)) = (token.logprob, token.rank) else { continue };
            sum.logprob += f64::from(logprob);
            sum.is_greedy &= rank == 1;
            found += 1;
        }
        if found != wanted {
            bail!("the server scored {found} of {wanted} tokens");
        }
        Ok(sum)
    }
}

fn refused(status: tonic::Status) -> anyhow::Error {
    anyhow!("{}: {}", status.code(), status.message())
}

/// Blanks at the end of a context belong to what follows: tokens begin with them.
fn split_blanks<'a>(context: &'a str, continuation: &str) -> (&'a str, String) {
    let kept = context.trim_end();
    (kept, format!("{}{continuation}", &context[kept.len()..]))
}

/// The last `most` of `ids`, of which those from `start` on are scored.
fn tail(ids: Vec<u32>, start: usize, most: usize) -> Window {
    let cut = ids.len().saturating_sub(most);
    // One id at least stays before the first that is scored.
    let start = (start.max(1)).saturating_sub(cut).max(1);
    Window { ids: ids[cut..].to_vec(), start }
}

/// The windows of a text of `len` ids, its prefix the first of them: every id but that one is scored
/// once, in windows of at most `most` ids. The last window is filled up with ids before it.
fn windows(len: usize, most: usize) -> Vec<(Range<usize>, usize)> {
    let mut windows = Vec::new();
    let mut scored = 1;
    while scored < len {
        let end = len.min(scored + most - 1);
        let first = if scored == 1 { 0 } else { end.saturating_sub(most) };
        windows.push((first..end, scored - first));
        scored = end;
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_move_to_the_continuation() {
        let check = |context, continuation, expected: (&str, &str)| {
            let (context, continuation) = split_blanks(context, continuation);
            assert_eq!((context, continuation.as_str()), expected);
        };
        check("a b", " c", ("a b", " c"));
        check("a b ", "c", ("a b", " c"));
        check("a\n\n", "c", ("a", "\n\nc"));
    }

    #[test]
    fn a_long_prompt_loses_its_beginning() {
        let check = |len: u32, start, most, expected: (Range<u32>, usize)| {
            let window = tail((0..len).collect(), start, most);
            let expected = Window { ids: expected.0.collect(), start: expected.1 };
            assert_eq!(window, expected, "{len} {start} {most}");
        };
        check(5, 3, 10, (0..5, 3));
        check(10, 7, 6, (4..10, 3));
        // More is to be scored than fits.
        check(10, 2, 6, (4..10, 1));
        check(3, 0, 6, (0..3, 1));
    }

    #[test]
    fn every_token_of_a_text_is_scored_once() {
        assert_eq!(windows(1, 8), []);
        assert_eq!(windows(8, 8), [(0..8, 1)]);
        // The second window scores two ids, after six that were scored already.
        assert_eq!(windows(10, 8), [(0..8, 1), (2..10, 6)]);
        for (len, most) in [(2, 2), (50, 2), (50, 7), (49, 7), (500, 64)] {
            let mut next = 1;
            for (ids, start) in windows(len, most) {
                assert!(ids.len() <= most && start >= 1, "{len} {most} {ids:?}");
                assert_eq!(ids.start + start, next, "{len} {most}");
                next = ids.end;
            }
            assert_eq!(next, len);
        }
    }
}
