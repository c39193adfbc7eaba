//! The events of one request as a stream that cancels the request when it is dropped.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use anyhow::anyhow;
use futures::Stream;
use tokio::sync::mpsc;
use trireme_scheduler::SequenceId;

use crate::{api::GenerateEvent, error::RouterError};

/// Ends after exactly one `Finished` or `Failed`.
pub struct EventStream {
    id: SequenceId,
    events: mpsc::Receiver<GenerateEvent>,
    cancels: mpsc::UnboundedSender<SequenceId>,
    is_over: bool,
}

impl EventStream {
    pub(super) fn new(
        id: SequenceId,
        events: mpsc::Receiver<GenerateEvent>,
        cancels: mpsc::UnboundedSender<SequenceId>,
    ) -> Self {
        Self { id, events, cancels, is_over: false }
    }
}

impl Stream for EventStream {
    type Item = GenerateEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let event = match std::task::ready!(self.events.poll_recv(context)) {
            Some(event) => event,
            // The loop ends every request; only its own end leaves one open.
            None => GenerateEvent::Failed(RouterError::Internal(anyhow!("the loop ended"))),
        };
        self.is_over = !matches!(event, GenerateEvent::Token(_));
        Poll::Ready(Some(event))
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
