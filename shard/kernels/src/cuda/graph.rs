//! A recorded step.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;

/// Work recorded between [`super::Stream::begin_recording`] and `end_recording`, with the addresses it
/// had then: whoever keeps a graph keeps what it was recorded over.
pub struct Graph {
    pub(super) context: Arc<Context>,
    pub(super) executable: sys::CUgraphExec,
}

// SAFETY: used by one thread at a time, through the stream that owns it.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by us, destroyed once.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
