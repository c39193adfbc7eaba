//! What can go wrong on a GPU, in words a human can act on.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

#[derive(Debug, Clone, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or use --device cpu"
    )]
    NoDriver,
    #[error(
        "no {library}: it cannot be loaded; install CUDA {major} or name its folder in LD_LIBRARY_PATH"
    )]
    NoLibrary { library: &'static str, major: u32 },
    #[error(
        "GPU {ordinal} was asked for, but this host shows {count} (CUDA_VISIBLE_DEVICES hides some)"
    )]
    NoGpu { ordinal: usize, count: usize },
    #[error(
        "the NVIDIA driver supports CUDA {found}, but {needed} or newer is needed: update the driver"
    )]
    OldDriver { found: String, needed: String },
    #[error("{name} has compute capability {major}.{minor}, but 8.0 (Ampere) or newer is needed")]
    OldGpu { name: String, major: i32, minor: i32 },
    #[error("out of GPU memory: {what} needs {bytes} bytes, but {free} of {total} are free")]
    OutOfMemory { what: &'static str, bytes: usize, free: usize, total: usize },
    #[error("GPU memory cannot hold {what}: {detail}")]
    Shape { what: &'static str, detail: String },
    #[error("{call}: {text}")]
    Driver { call: &'static str, text: String },
    #[error("{call}: {text}")]
    Blas { call: &'static str, text: String },
}

/// The result of a driver call.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a static string, or leaves ours alone.
    let found = unsafe { sys::cuGetErrorString(code, &mut text) };
    let text = if found == CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: a static, terminated string of the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        String::new()
    };
    Err(CudaError::Driver { call, text: format!("{text} ({code:?})") })
}
