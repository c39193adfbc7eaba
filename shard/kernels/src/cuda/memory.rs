//! Memory of the GPU, and page-locked memory of the host that copies run from without waiting.

use std::{marker::PhantomData, sync::Arc};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUresult};

use super::{
    context::Context,
    error::{CudaError, check},
};

/// An allocation on the GPU, zero at first.
pub struct Memory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let mut address = 0;
        // SAFETY: a plain output; the context is current.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(16)) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = context.memory()?;
            return Err(CudaError::OutOfMemory { what, bytes, free, total });
        }
        check("cuMemAlloc", code)?;
        let memory = Self { context: context.clone(), address, bytes: bytes.max(16) };
        // SAFETY: just allocated, with this length. Streams do not wait for this one: we do.
        unsafe {
            check("cuMemsetD8", sys::cuMemsetD8_v2(address, 0, memory.bytes))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))?;
        }
        Ok(memory)
    }

    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies to the GPU; returns when the copy is done.
    pub(super) fn upload(&mut self, offset: usize, data: &[u8]) -> Result<(), CudaError> {
        self.require(offset, data.len())?;
        self.context.bind()?;
        // SAFETY: the target is inside the allocation; the source is a slice. Synchronous.
        unsafe {
            let to = self.address + offset as u64;
            check("cuMemcpyHtoD", sys::cuMemcpyHtoD_v2(to, data.as_ptr().cast(), data.len()))?;
            // From pageable memory the call may return before the copy has reached the GPU.
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    pub(super) fn require(&self, offset: usize, len: usize) -> Result<(), CudaError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let detail = format!("{len} bytes at {offset} of {}", self.bytes);
        Err(CudaError::Shape { what: "a copy", detail })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by us, freed once; the driver waits for kernels that use it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Page-locked host memory of `len` values, zero at first.
pub(super) struct Pinned<T: Pod> {
    context: Arc<Context>,
    address: *mut T,
    len: usize,
    values: PhantomData<T>,
}

// SAFETY: owned memory, reached through `&self` and `&mut self` alone.
unsafe impl<T: Pod + Send> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        context.bind()?;
        let bytes = len.max(1) * size_of::<T>();
        let mut address = std::ptr::null_mut();
        // SAFETY: a plain output; the context is current.
        unsafe { check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut address, bytes, 0))? };
        // SAFETY: just allocated, with this length; page-aligned.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Self { context: context.clone(), address: address.cast(), len, values: PhantomData })
    }

    pub(super) fn values(&self) -> &[T] {
        // SAFETY: `len` values that are initialised; all bit patterns are values.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    pub(super) fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nobody else reaches it.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by us, freed once. Copies from it are over: `Stream` synchronises
            // before what it copies from can be dropped or changed.
            let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
        }
    }
}
