//! Moments on a stream, for measuring.

use std::ptr;

use cudarc::driver::sys;

use super::{
    error::{CudaError, check},
    stream::Stream,
};

/// A moment on a stream.
pub(super) struct Event(sys::CUevent);

impl Event {
    pub(super) fn new() -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a plain output; the thread's context is that of its stream.
        unsafe { check("cuEventCreate", sys::cuEventCreate(&mut raw, 0))? };
        Ok(Self(raw))
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are live and of one context.
        unsafe { check("cuEventRecord", sys::cuEventRecord(self.0, stream.raw)) }
    }

    /// Milliseconds since `start`, once this has come.
    pub(super) fn since(&self, start: &Self) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: both were recorded.
        unsafe {
            check("cuEventSynchronize", sys::cuEventSynchronize(self.0))?;
            check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&mut ms, start.0, self.0))?;
        }
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
