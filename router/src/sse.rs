//! Server-sent events (WHATWG HTML, section 9.2), in the subset that every benchmark client can
//! read: `data:` lines only, no comments, no keep-alive, no `event:` names.

use std::convert::Infallible;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use futures::{StreamExt, stream};
use serde::Serialize;

use crate::{
    error::RouterError,
    http::{
        refusal::{Dialect, ErrorEvent, Refusal},
        turns::{Admitted, Turn},
    },
};

/// Events that go out together.
#[derive(Debug, Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// One event with a JSON body.
    pub fn event(&mut self, body: &impl Serialize) {
        let start = self.0.len();
        self.0.extend_from_slice(b"data: ");
        match serde_json::to_writer(&mut self.0, body) {
            Ok(()) => self.0.extend_from_slice(b"\n\n"),
            // Our own types serialize; half an event would be worse than none.
            Err(error) => {
                tracing::error!(%error, "an event could not be written");
                self.0.truncate(start);
            }
        }
    }

    /// The end of a stream, as OpenAI's clients know it.
    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Turns into the events of one route.
pub trait Writer: Send + 'static {
    const DIALECT: Dialect;

    /// Writes a token, an end, or both.
    ///
    /// # Errors
    /// The choice failed; the stream then says so and ends.
    fn turn(&mut self, turn: Turn, frames: &mut Frames) -> Result<(), RouterError>;

    /// Writes what follows the end of the last choice.
    fn end(&mut self, frames: &mut Frames);
}

/// A response that streams until every choice ended or one failed. When the client leaves, the
/// body is dropped, and with it the generations.
pub fn response(admitted: Admitted, writer: impl Writer) -> Response {
    let state = Some((admitted.turns, writer));
    let events = stream::unfold(state, |state| async move {
        let (mut turns, mut writer) = state?;
        let mut frames = Frames::default();
        let state = match turns.next().await {
            Some(turn) => match writer.turn(turn, &mut frames) {
                Ok(()) => Some((turns, writer)),
                Err(error) => {
                    fail(&writer, error, &mut frames);
                    None
                }
            },
            None => {
                writer.end(&mut frames);
                None
            }
        };
        Some((Ok::<_, Infallible>(Bytes::from(frames.0)), state))
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx not to gather events into blocks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A silent close would count as success with some clients.
fn fail<W: Writer>(_writer: &W, error: RouterError, frames: &mut Frames) {
    frames.event(&ErrorEvent::new(W::DIALECT, &Refusal::from(error)));
    if W::DIALECT == Dialect::OpenAi {
        frames.done();
    }
}
