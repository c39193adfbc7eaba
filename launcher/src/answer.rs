//! An answer on its way: printed as it comes, with the times of its tokens.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use anyhow::bail;
use trireme_proto::generate::v1::{
    FinishReason, GenerateRequest, Usage, generate_event::Event,
    generation_client::GenerationClient,
};

use crate::{
    cli::SamplingArgs,
    rpc::{Connection, MESSAGE_BYTES_MAX},
};

/// What an answer is printed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Print {
    Text,
    Ids,
    Nothing,
}

/// A finished answer. Times are from the sending of the request.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub text: String,
    pub token_times: Vec<Duration>,
    pub finish_reason: FinishReason,
    pub usage: Usage,
}

impl Answer {
    /// For a person: time to first token, tokens, speed.
    pub fn summary(&self) -> String {
        let (Some(first), Some(last)) = (self.token_times.first(), self.token_times.last()) else {
            return "no token".to_owned();
        };
        let tokens = self.token_times.len();
        let span_s = (*last - *first).as_secs_f64();
        // The first token is the prompt's: speed is that of the others.
        let speed = match tokens {
            2.. if span_s > 0.0 => format!("{:.1} tokens/s", (tokens - 1) as f64 / span_s),
            _ => "no speed from one token".to_owned(),
        };
        let end = match self.finish_reason {
            FinishReason::Length => "length",
            FinishReason::Stop => "stop",
            FinishReason::Unspecified => "unknown",
        };
        let ttft_ms = first.as_secs_f64() * 1e3;
        let prompt = self.usage.prompt_tokens;
        format!(
            "time to first token {ttft_ms:.1} ms ({prompt} prompt tokens), {tokens} tokens, {speed}, end: {end}"
        )
    }
}

/// A client of the public API.
pub fn client(channel: Connection) -> GenerationClient<Connection> {
    GenerationClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

/// An answer that is being received. Dropping it cancels the request.
pub struct Incoming<'a, W: Write> {
    out: &'a mut W,
    print: Print,
    start: Instant,
    pub answer: Answer,
}

impl<'a, W: Write> Incoming<'a, W> {
    pub fn new(out: &'a mut W, print: Print) -> Self {
        Self { out, print, start: Instant::now(), answer: Answer::default() }
    }

    /// Sends the request and receives the answer to its end; what came so far stays in `answer`.
    pub async fn receive(
        &mut self,
        channel: Connection,
        request: GenerateRequest,
    ) -> anyhow::Result<()> {
        self.start = Instant::now();
        let mut stream = client(channel)
            .generate_stream(request)
            .await
            .map_err(|status| refused(&status))?
            .into_inner();
        while let Some(event) = stream.message().await.map_err(|status| refused(&status))? {
            match event.event {
                Some(Event::Token(token)) => {
                    self.answer.token_times.push(self.start.elapsed());
                    self.answer.text.push_str(&token.text);
                    match self.print {
                        Print::Text => self.out.write_all(token.text.as_bytes())?,
                        Print::Ids => write!(self.out, "{} ", token.id)?,
                        Print::Nothing => continue,
                    }
                    self.out.flush()?;
                }
                Some(Event::Finished(finished)) => {
                    self.answer.finish_reason = finished.finish_reason();
                    self.answer.usage = finished.usage.unwrap_or_default();
                    self.finish(finished.text)?;
                    return Ok(());
                }
                None => {}
            }
        }
        bail!("the stream ended without a finish")
    }

    /// Text may have been held back: a possible stop string, an incomplete character.
    fn finish(&mut self, whole: String) -> io::Result<()> {
        if let (Print::Text, Some(rest)) = (self.print, whole.strip_prefix(&self.answer.text)) {
            self.out.write_all(rest.as_bytes())?;
        }
        if !whole.is_empty() {
            self.answer.text = whole;
        }
        if self.print != Print::Nothing {
            writeln!(self.out)?;
        }
        self.out.flush()
    }
}

/// A refusal in the server's own words.
fn refused(status: &tonic::Status) -> anyhow::Error {
    // An answer over HTTP/2 that is not gRPC.
    if status.message().contains("invalid compression flag") {
        return anyhow::anyhow!("no gRPC server answers there; is it the port of HTTP?");
    }
    anyhow::anyhow!("{}: {}", status.code(), status.message())
}

/// Sampling flags as the API takes them.
pub fn parameters(
    args: &SamplingArgs,
    seed: Option<u64>,
) -> trireme_proto::generate::v1::Parameters {
    trireme_proto::generate::v1::Parameters {
        max_new_tokens: Some(args.max_new_tokens.get()),
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        repetition_penalty: args.repetition_penalty,
        seed,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_figures() {
        let check = |times_ms: &[u64], want: &str| {
            let token_times = times_ms.iter().map(|ms| Duration::from_millis(*ms)).collect();
            let answer = Answer { token_times, ..Answer::default() };
            assert!(answer.summary().contains(want), "{}", answer.summary());
        };
        check(&[], "no token");
        check(&[50], "token 50.0 ms (0 prompt tokens), 1 tokens, no speed");
        check(&[50, 60, 70], "3 tokens, 100.0 tokens/s");
    }

    #[test]
    fn held_back_text_is_printed_at_the_end() {
        let check = |print: Print, streamed: &str, whole: &str, want: &str| {
            let mut page = Vec::new();
            let mut incoming = Incoming::new(&mut page, print);
            incoming.answer.text = streamed.to_owned();
            incoming.finish(whole.to_owned()).unwrap();
            assert_eq!(String::from_utf8(page).unwrap(), want, "{streamed} {whole}");
        };
        check(Print::Text, "He", "Hello", "llo\n");
        check(Print::Text, "Hello", "Hello", "\n");
        check(Print::Text, "Hello", "", "\n");
        check(Print::Ids, "", "Hello", "\n");
        check(Print::Nothing, "He", "Hello", "");
    }
}
