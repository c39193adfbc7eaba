//! One NCCL group: calls that return at once, and its end from another thread.

#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use trireme_kernels::cuda::{Element, Stream, Tensor};

use super::library::{Config, IN_PROGRESS, Library, PointToPoint, Raw, SUCCESS, UniqueId, library};
use crate::{AbortHandle, CollectiveError};

/// `ncclDataType_t` and `ncclRedOp_t`.
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;
/// NCCL settles a call on a thread of its own: how long to sleep between two looks.
const LOOK: Duration = Duration::from_micros(20);

/// NCCL's handle, until somebody takes it to end the group.
pub(super) struct Line {
    library: &'static Library,
    raw: Mutex<Option<Raw>>,
    rank: usize,
    size: usize,
}

// SAFETY: the handle is used under the mutex alone, and by whoever took it out.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

pub(super) struct Communicator {
    line: Arc<Line>,
    abort: AbortHandle,
    /// What NCCL gets to settle a call: the first ones between two ranks connect them.
    patience: Duration,
}

impl Line {
    fn with_raw<T>(
        &self,
        operation: &'static str,
        work: impl FnOnce(Raw) -> T,
    ) -> Result<T, CollectiveError> {
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        let (rank, size) = (self.rank, self.size);
        raw.map(work).ok_or(CollectiveError::Aborted { operation, rank, size })
    }

    /// What became of calls and of peers: a result code.
    pub(super) fn state(&self, operation: &'static str) -> Result<c_int, CollectiveError> {
        self.with_raw(operation, |raw| {
            let mut state = SUCCESS;
            // SAFETY: a live group, a plain output.
            let code = unsafe { (self.library.async_error)(raw, &mut state) };
            if code == SUCCESS { state } else { code }
        })
    }

    /// An error that NCCL found meanwhile.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        match self.state("watch") {
            Ok(SUCCESS | IN_PROGRESS) | Err(_) => None,
            Ok(code) => Some(self.error("watch", code)),
        }
    }

    fn error(&self, operation: &'static str, code: c_int) -> CollectiveError {
        let raw = *self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        self.library.error(operation, (self.rank, self.size), code, raw)
    }

    /// Ends the group on a thread of its own, the first time. Kernels that wait for peers return at
    /// once; the call itself returns when no recorded step holds the group any more.
    pub(super) fn end(&self) -> Option<thread::JoinHandle<()>> {
        struct Taken(Raw);
        // SAFETY: taken out of the mutex: nobody else uses it any more.
        unsafe impl Send for Taken {}
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let (taken, abort) = (Taken(raw), self.library.abort);
        let end = move || {
            let Taken(raw) = { taken };
            // SAFETY: a live group that only this thread still has.
            unsafe { abort(raw) };
        };
        thread::Builder::new().name("nccl-abort".into()).spawn(end).ok()
    }
}

impl Communicator {
    /// Waits for all ranks until then.
    pub(super) fn join(
        id: &UniqueId,
        rank: usize,
        size: usize,
        abort: &AbortHandle,
        until: Instant,
    ) -> Result<Self, CollectiveError> {
        let library = library()?;
        let mut raw = std::ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: plain outputs; the configuration says how long it is.
        let code =
            unsafe { (library.init)(&mut raw, size as c_int, *id, rank as c_int, &mut config) };
        if raw.is_null() || (code != SUCCESS && code != IN_PROGRESS) {
            return Err(library.error("join", (rank, size), code, None));
        }
        let line = Arc::new(Line { library, raw: Mutex::new(Some(raw)), rank, size });
        let patience = until.saturating_duration_since(Instant::now());
        let group = Self { line, abort: abort.clone(), patience };
        let joined = group.settle("join", until);
        if joined.is_err() {
            drop(group.line.end());
        }
        joined.map(|()| group)
    }

    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub(super) fn line(&self) -> Arc<Line> {
        self.line.clone()
    }

    /// Waits until NCCL has done with the last call (not until the GPU has).
    fn settle(&self, operation: &'static str, until: Instant) -> Result<(), CollectiveError> {
        let Line { rank, size, .. } = *self.line;
        loop {
            match self.line.state(operation)? {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                code => return Err(self.line.error(operation, code)),
            }
            if self.abort.is_aborted() {
                return Err(CollectiveError::Aborted { operation, rank, size });
            }
            if Instant::now() >= until {
                let detail = "not all ranks came in time".to_owned();
                return Err(CollectiveError::Nccl { operation, rank, size, detail });
            }
            thread::sleep(LOOK);
        }
    }

    fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(&Library, Raw) -> c_int,
    ) -> Result<(), CollectiveError> {
        let line = &self.line;
        if self.abort.is_aborted() {
            let Line { rank, size, .. } = **line;
            return Err(CollectiveError::Aborted { operation, rank, size });
        }
        match line.with_raw(operation, |raw| call(line.library, raw))? {
            SUCCESS => Ok(()),
            IN_PROGRESS => self.settle(operation, Instant::now() + self.patience),
            code => Err(line.error(operation, code)),
        }
    }

    pub(super) fn all_reduce_sum(
        &self,
        stream: &Stream,
        tensor: &mut Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        let (at, count, kind) = operand("all_reduce_sum", tensor, rows)?;
        self.call("all_reduce_sum", |library, raw| {
            // SAFETY: the operand is in its allocation, which the stream's work keeps alive; in place.
            unsafe { (library.all_reduce)(at, at, count, kind, SUM, raw, stream.handle()) }
        })
    }

    pub(super) fn send(
        &self,
        stream: &Stream,
        to: usize,
        tensor: &Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        self.exchange("send", |library| library.send, to, operand("send", tensor, rows)?, stream)
    }

    pub(super) fn recv(
        &self,
        stream: &Stream,
        from: usize,
        tensor: &mut Tensor,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        self.exchange("recv", |library| library.recv, from, operand("recv", tensor, rows)?, stream)
    }

    fn exchange(
        &self,
        operation: &'static str,
        function: impl FnOnce(&Library) -> PointToPoint,
        peer: usize,
        (at, count, kind): (*mut c_void, usize, c_int),
        stream: &Stream,
    ) -> Result<(), CollectiveError> {
        if peer >= self.line.size {
            let detail = format!("rank {peer} of a group of {}", self.line.size);
            return Err(CollectiveError::Mismatch { operation, detail });
        }
        self.call(operation, |library, raw| {
            let (function, peer) = (function(library), peer as c_int);
            // SAFETY: as for the sum; a receiver's tensor is borrowed mutably by its caller.
            unsafe { function(at, count, kind, peer, raw, stream.handle()) }
        })
    }
}

/// Address, values and NCCL's type of the first rows.
fn operand(
    operation: &'static str,
    tensor: &Tensor,
    rows: usize,
) -> Result<(*mut c_void, usize, c_int), CollectiveError> {
    let address = tensor
        .address(operation, rows)
        .map_err(|error| CollectiveError::Mismatch { operation, detail: error.to_string() })?;
    let kind = match tensor.element() {
        Element::F32 => FLOAT32,
        Element::Bf16 => BFLOAT16,
    };
    Ok((address as *mut c_void, rows * tensor.width(), kind))
}
