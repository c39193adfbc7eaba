//! The events of one request as a stream that cancels the request when it is dropped.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use anyhow::anyhow;
use futures::{Stream, future::FutureExt};
use tokio::{sync::mpsc, task::JoinHandle};
use trireme_scheduler::SequenceId;

use super::scored_prompt::ScoredPrompt;
use crate::{
    api::{GenerateEvent, PromptToken, Token},
    detokenizer::TextDecoder,
    error::RouterError,
};

/// What the loop hands over in one piece: a token, an end, or the last token with its end. Whoever
/// has read the last token has the end too, without waiting and without a race.
pub(super) struct Delivery {
    /// With the first delivery, where the prompt was scored.
    pub prompt: Option<ScoredPrompt>,
    pub token: Option<Token>,
    pub end: Option<GenerateEvent>,
}

/// Ends after exactly one `Finished` or `Failed`, which is ready as soon as the last token is out.
pub struct EventStream {
    id: SequenceId,
    deliveries: mpsc::Receiver<Delivery>,
    decoder: Option<Arc<TextDecoder>>,
    /// Finds the words of a scored prompt beside the async workers.
    describing: Option<JoinHandle<Result<Vec<PromptToken>, RouterError>>>,
    /// Came with the scored prompt.
    token: Option<Token>,
    /// Came with the last token.
    end: Option<GenerateEvent>,
    cancels: mpsc::UnboundedSender<SequenceId>,
    is_over: bool,
}

impl EventStream {
    pub(super) fn new(
        id: SequenceId,
        deliveries: mpsc::Receiver<Delivery>,
        decoder: Option<Arc<TextDecoder>>,
        cancels: mpsc::UnboundedSender<SequenceId>,
    ) -> Self {
        Self {
            id,
            deliveries,
            decoder,
            describing: None,
            token: None,
            end: None,
            cancels,
            is_over: false,
        }
    }

    fn describe(&self, prompt: ScoredPrompt) -> JoinHandle<Result<Vec<PromptToken>, RouterError>> {
        let decoder = self.decoder.clone();
        tokio::task::spawn_blocking(move || {
            prompt.check().map(|()| prompt.describe(decoder.as_ref()))
        })
    }

    /// The described prompt, or the failure that ends the stream.
    fn poll_prompt(&mut self, context: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        let Some(describing) = &mut self.describing else { return Poll::Ready(None) };
        let described = std::task::ready!(describing.poll_unpin(context));
        self.describing = None;
        let described = described.unwrap_or_else(|cause| Err(RouterError::Internal(cause.into())));
        Poll::Ready(Some(match described {
            Ok(tokens) => GenerateEvent::Prompt(tokens),
            Err(error) => {
                self.stop();
                GenerateEvent::Failed(error)
            }
        }))
    }

    /// Nothing follows; the loop is told unless it knows.
    fn stop(&mut self) {
        if !self.is_over && self.end.is_none() {
            // Without a loop there is nothing to cancel.
            let _ = self.cancels.send(self.id);
        }
        self.is_over = true;
    }
}

impl Stream for EventStream {
    type Item = GenerateEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        if self.describing.is_none() && self.token.is_none() && self.end.is_none() {
            let delivery = std::task::ready!(self.deliveries.poll_recv(context));
            if let Some(Delivery { prompt, token, end }) = delivery {
                self.describing = prompt.map(|prompt| self.describe(prompt));
                self.token = token;
                self.end = end;
            }
        }
        if let Some(prompt) = std::task::ready!(self.poll_prompt(context)) {
            return Poll::Ready(Some(prompt));
        }
        if let Some(token) = self.token.take() {
            return Poll::Ready(Some(GenerateEvent::Token(token)));
        }
        self.is_over = true;
        let end = self.end.take();
        // The loop ends every request; only its own end leaves one open.
        let cut = || GenerateEvent::Failed(RouterError::Internal(anyhow!("the loop ended")));
        Poll::Ready(Some(end.unwrap_or_else(cut)))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.stop();
    }
}
