//! The events of one request as a stream that cancels the request when it is dropped.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use anyhow::anyhow;
use futures::Stream;
use tokio::sync::mpsc;
use trireme_scheduler::SequenceId;

use crate::{
    api::{GenerateEvent, Token},
    error::RouterError,
};

/// What the loop hands over in one piece: a token, an end, or the last token with its end. Whoever
/// has read the last token has the end too, without waiting and without a race.
pub(super) struct Delivery {
    pub token: Option<Token>,
    pub end: Option<GenerateEvent>,
}

/// Ends after exactly one `Finished` or `Failed`, which is ready as soon as the last token is out.
pub struct EventStream {
    id: SequenceId,
    deliveries: mpsc::Receiver<Delivery>,
    /// Came with the last token.
    end: Option<GenerateEvent>,
    cancels: mpsc::UnboundedSender<SequenceId>,
    is_over: bool,
}

impl EventStream {
    pub(super) fn new(
        id: SequenceId,
        deliveries: mpsc::Receiver<Delivery>,
        cancels: mpsc::UnboundedSender<SequenceId>,
    ) -> Self {
        Self { id, deliveries, end: None, cancels, is_over: false }
    }
}

impl Stream for EventStream {
    type Item = GenerateEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        if self.end.is_none() {
            let delivery = std::task::ready!(self.deliveries.poll_recv(context));
            if let Some(Delivery { token, end }) = delivery {
                self.end = end;
                if let Some(token) = token {
                    return Poll::Ready(Some(GenerateEvent::Token(token)));
                }
            }
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
        if !self.is_over {
            // Without a loop there is nothing to cancel.
            let _ = self.cancels.send(self.id);
        }
    }
}
