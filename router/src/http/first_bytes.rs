//! The first bytes of a connection, which must come in time.
//!
//! hyper's own limit on a request's head begins once it knows the protocol, HTTP/1 or HTTP/2, and
//! to know that it waits for these bytes without a limit.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// What HTTP/2 begins with (RFC 9113, section 3.4). Any other byte means HTTP/1.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection whose reads fail when its protocol is not told in time.
pub struct FirstBytes<S> {
    stream: S,
    /// How much of the preface has come.
    seen: usize,
    /// `None` once the protocol is known.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<S> FirstBytes<S> {
    pub fn within(limit: Duration, stream: S) -> Self {
        Self { stream, seen: 0, limit: Some(Box::pin(sleep(limit))) }
    }

    fn see(&mut self, new: &[u8]) {
        let rest = &PREFACE[self.seen..];
        if new.len() >= rest.len() || !rest.starts_with(new) {
            self.limit = None;
        } else {
            self.seen += new.len();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FirstBytes<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Some(limit) = &mut self.limit {
            match &read {
                Poll::Ready(_) => self.see(&buffer.filled()[before..]),
                Poll::Pending => {
                    std::task::ready!(limit.as_mut().poll(context));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
            }
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FirstBytes<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
