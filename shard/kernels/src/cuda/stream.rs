//! The order in which a GPU works: launches, copies and recorded steps of one rank.

use std::{ffi::c_void, ops::Range, sync::Arc};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUresult};

use super::{
    blas::Blas,
    context::Context,
    error::{CudaError, check},
    graph::Graph,
    memory::{Memory, Pinned},
    tensor::{Element, Tensor},
};

/// Most parameters of a kernel.
const PARAMETERS: usize = 16;

/// Work runs in the order of the calls; calls return before it is done.
pub struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) raw: sys::CUstream,
    pub(super) blas: Blas,
    pub(super) attention: super::attention::Scratch,
    pub(super) recording: bool,
    /// Products that are new are measured.
    pub(super) measuring: bool,
}

// SAFETY: the handle may be used from any thread; `&mut self` keeps it to one at a time.
unsafe impl Send for Stream {}

/// How many blocks of how many threads.
pub(super) struct Shape {
    pub(super) grid: (usize, usize, usize),
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
}

/// A kernel parameter: its bytes are copied at the launch.
pub(super) trait Parameter {
    fn pointer(&self) -> *mut c_void;
}
impl<T: Copy> Parameter for T {
    fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl Stream {
    /// # Errors
    /// If the GPU or cuBLASLt cannot be used.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a plain output; the context is current.
        unsafe { check("cuStreamCreate", sys::cuStreamCreate(&mut raw, flags))? };
        let blas = Blas::new(context)?;
        let attention = super::attention::Scratch::new(context)?;
        Ok(Self {
            context: context.clone(),
            raw,
            blas,
            attention,
            recording: false,
            measuring: false,
        })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's `CUstream`, for libraries that queue work of their own.
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Whether work is recorded and not done.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// Makes this stream's GPU the calling thread's: once before a thread's first call.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind()
    }

    /// # Safety
    /// `parameters` are those of the kernel, in number, type and order; what they point to on the GPU
    /// is as large as the kernel takes it to be and lives until the stream has passed the launch.
    pub(super) unsafe fn launch(
        &self,
        kernel: &str,
        shape: &Shape,
        parameters: &[&dyn Parameter],
    ) -> Result<(), CudaError> {
        let function = self.context.function(kernel)?;
        let mut pointers = [std::ptr::null_mut(); PARAMETERS];
        assert!(parameters.len() <= PARAMETERS, "{kernel} has {} parameters", parameters.len());
        for (pointer, parameter) in pointers.iter_mut().zip(parameters) {
            // Of the value behind both references: a reference is itself a value that could be passed.
            *pointer = (**parameter).pointer();
        }
        let (x, y, z) = shape.grid;
        if x * y * z == 0 {
            return Ok(());
        }
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: shape.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes as u32,
            hStream: self.raw,
            attrs: &mut overlap,
            numAttrs: u32::from(self.context.overlaps_launches),
        };
        // SAFETY: the caller vouches for the parameters; the rest is ours.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        check("cuLaunchKernelEx", code)
    }

    /// Copies the first `count` values to `to`; returns before it is done. `from` must not change
    /// until [`Stream::synchronize`].
    pub(super) fn copy_in<T: Pod>(
        &self,
        from: &Pinned<T>,
        count: usize,
        to: &Memory,
    ) -> Result<(), CudaError> {
        let data = &from.values()[..count];
        to.require(0, size_of_val(data))?;
        // SAFETY: both ends are as long as the copy, and page-locked memory is not freed before the
        // stream is synchronised.
        unsafe {
            let (source, bytes) = (data.as_ptr().cast(), size_of_val(data));
            check(
                "cuMemcpyHtoDAsync",
                sys::cuMemcpyHtoDAsync_v2(to.address(), source, bytes, self.raw),
            )
        }
    }

    /// Copies `count` values from the GPU; returns before it is done. `to` must not be read until then.
    pub(super) fn copy_out<T: Pod>(
        &self,
        from: &Memory,
        count: usize,
        to: &mut Pinned<T>,
    ) -> Result<(), CudaError> {
        let data = &mut to.values_mut()[..count];
        from.require(0, size_of_val(data))?;
        // SAFETY: both ends are as long as the copy.
        unsafe {
            let (target, bytes) = (data.as_mut_ptr().cast(), size_of_val(data));
            let code = sys::cuMemcpyDtoHAsync_v2(target, from.address(), bytes, self.raw);
            check("cuMemcpyDtoHAsync", code)
        }
    }

    /// Rows as f32.
    ///
    /// # Errors
    /// If the tensor has fewer rows, or the GPU has failed.
    pub fn read_rows(&self, tensor: &Tensor, rows: Range<usize>) -> Result<Vec<f32>, CudaError> {
        let row_bytes = tensor.width * tensor.element.bytes();
        let address = tensor.require("a read", rows.end)? + (rows.start * row_bytes) as u64;
        self.synchronize()?;
        let mut bytes = vec![0u8; rows.len() * row_bytes];
        // SAFETY: `require` found the rows inside; the target is as long.
        unsafe {
            let code = sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, bytes.len());
            check("cuMemcpyDtoH", code)?;
        }
        Ok(match tensor.element {
            Element::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Element::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| half::bf16::from_ne_bytes([b[0], b[1]]).to_f32())
                .collect(),
        })
    }

    #[cfg(test)]
    pub(super) fn read_memory(&self, memory: &Memory) -> Result<Vec<f32>, CudaError> {
        self.synchronize()?;
        let mut values = vec![0.0f32; memory.bytes() / 4];
        // SAFETY: the target is as long as the allocation.
        unsafe {
            let target = values.as_mut_ptr().cast();
            check(
                "cuMemcpyDtoH",
                sys::cuMemcpyDtoH_v2(target, memory.address(), values.len() * 4),
            )?;
        }
        Ok(values)
    }

    /// Writes rows from their start.
    ///
    /// # Errors
    /// If the tensor is shorter, or the GPU has failed.
    pub fn write(&self, tensor: &mut Tensor, values: &[f32]) -> Result<(), CudaError> {
        self.synchronize()?;
        match tensor.element {
            Element::F32 => tensor.memory.upload(0, bytemuck::cast_slice(values)),
            Element::Bf16 => {
                let narrow: Vec<half::bf16> =
                    values.iter().map(|&v| half::bf16::from_f32(v)).collect();
                tensor.memory.upload(0, bytemuck::cast_slice(&narrow))
            }
        }
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// What any kernel before has done wrong.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: our stream.
        unsafe { check("cuStreamSynchronize", sys::cuStreamSynchronize(self.raw)) }
    }

    /// From here on work is recorded, not done.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn begin_recording(&mut self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: our stream, which is not recording.
        unsafe { check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(self.raw, mode))? };
        self.recording = true;
        Ok(())
    }

    /// What was recorded since [`Stream::begin_recording`].
    ///
    /// # Errors
    /// If something was queued that cannot be recorded.
    pub fn end_recording(&mut self) -> Result<Graph, CudaError> {
        self.recording = false;
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: plain outputs; the recording began before. The graph is not needed once it is
        // instantiated.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(self.raw, &mut graph))?;
            let code = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
            let _: CUresult = sys::cuGraphDestroy(graph);
            check("cuGraphInstantiate", code)?;
        }
        Ok(Graph { context: self.context.clone(), executable })
    }

    /// Queues a recorded step.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: the graph belongs to this context; its owner keeps alive what it was recorded over.
        unsafe { check("cuGraphLaunch", sys::cuGraphLaunch(graph.executable, self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: ours; destroyed once, after its work.
            unsafe {
                let _: CUresult = sys::cuStreamSynchronize(self.raw);
                let _: CUresult = sys::cuStreamDestroy_v2(self.raw);
            }
        }
    }
}
