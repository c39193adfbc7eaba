//! Moments on a stream: for measuring, and for looking how far it is.

use std::{ptr, sync::Arc};

use cudarc::driver::sys::{self, CUresult};

use super::{
    context::Context,
    error::{CudaError, check},
    stream::Stream,
};

/// A moment on a stream.
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: events may be recorded and asked from any thread that makes their context current.
unsafe impl Send for Event {}
// SAFETY: as above; the driver orders calls on one event.
unsafe impl Sync for Event {}

impl Event {
    /// # Errors
    /// What the driver reports.
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        Self::of(&stream.context)
    }

    pub(super) fn of(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a plain output; the context is current.
        unsafe { check("cuEventCreate", sys::cuEventCreate(&mut raw, 0))? };
        Ok(Self { raw, context: context.clone() })
    }

    /// From here on the event is behind all that the stream holds now.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are live and of one context.
        unsafe { check("cuEventRecord", sys::cuEventRecord(self.raw, stream.raw)) }
    }

    /// Whether the stream has passed it; a stream that failed has.
    pub fn is_over(&self) -> bool {
        if self.context.bind().is_err() {
            return true;
        }
        // SAFETY: a live event.
        unsafe { sys::cuEventQuery(self.raw) != CUresult::CUDA_ERROR_NOT_READY }
    }

    /// Waits until it has come.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: a live event.
        unsafe { check("cuEventSynchronize", sys::cuEventSynchronize(self.raw)) }
    }

    /// Milliseconds since `start`, once this has come.
    pub(super) fn since(&self, start: &Self) -> Result<f32, CudaError> {
        self.wait()?;
        let mut ms = 0.0;
        // SAFETY: both were recorded.
        unsafe {
            check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&mut ms, start.raw, self.raw))?;
        }
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: ours, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
