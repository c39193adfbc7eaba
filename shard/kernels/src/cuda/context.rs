//! One GPU: its context and the kernels loaded into it.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    sync::Arc,
};

use cudarc::driver::sys;

use super::error::{CudaError, check};

/// CUDA 12.4: the oldest driver whose graphs keep programmatic launches.
const DRIVER_VERSION_MIN: i32 = 12_040;

/// The kernels of `cuda/*.cu`, by file.
const MODULES: [(&[u8], &[&str]); 8] = [
    (include_bytes!(concat!(env!("OUT_DIR"), "/rows.fatbin")), &ROWS),
    (include_bytes!(concat!(env!("OUT_DIR"), "/linear.fatbin")), &LINEAR),
    (include_bytes!(concat!(env!("OUT_DIR"), "/attention_decode.fatbin")), &DECODE),
    (include_bytes!(concat!(env!("OUT_DIR"), "/attention_prefill.fatbin")), &PREFILL),
    (include_bytes!(concat!(env!("OUT_DIR"), "/attention_prefill_hopper.fatbin")), &PREFILL_HOPPER),
    (include_bytes!(concat!(env!("OUT_DIR"), "/attention_plain.fatbin")), &PLAIN),
    (include_bytes!(concat!(env!("OUT_DIR"), "/sampling.fatbin")), &["choose"]),
    (
        include_bytes!(concat!(env!("OUT_DIR"), "/experts.fatbin")),
        &["add_weighted", "round_f32", "round_bf16"],
    ),
];
const ROWS: [&str; 21] = [
    "embed_f32",
    "embed_bf16",
    "add_rms_norm_f32",
    "add_rms_norm_bf16",
    "rms_norm_bf16",
    "rms_norm_heads_f32",
    "rms_norm_heads_bf16",
    "add_f32",
    "add_bf16",
    "scale_f32",
    "scale_bf16",
    "add_bias_f32",
    "add_bias_bf16",
    "gather_f32",
    "gather_bf16",
    "gate_mul_f32",
    "gate_mul_bf16",
    "rotate_and_append_f32",
    "rotate_and_append_bf16",
    "rotate_and_append_wide_f32",
    "rotate_and_append_wide_bf16",
];
const LINEAR: [&str; 21] = [
    "linear_1_1_8",
    "linear_1_1_5",
    "linear_1_2_6",
    "linear_1_4_8",
    "linear_2_1_5",
    "linear_2_2_8",
    "linear_2_4_6",
    "linear_f32_1_1_8",
    "linear_f32_1_1_5",
    "linear_f32_1_2_6",
    "linear_f32_1_4_8",
    "linear_f32_2_1_5",
    "linear_f32_2_2_8",
    "linear_f32_2_4_6",
    "linear_gated_1_1_8",
    "linear_gated_1_1_5",
    "linear_gated_1_2_6",
    "linear_gated_1_4_8",
    "linear_gated_2_1_5",
    "linear_gated_2_2_8",
    "linear_gated_2_4_6",
];
const DECODE: [&str; 3] = ["attention_decode_64", "attention_decode_128", "attention_decode_256"];
const PREFILL: [&str; 3] =
    ["attention_prefill_64", "attention_prefill_128", "attention_prefill_256"];
const PREFILL_HOPPER: [&str; 2] = ["attention_prefill_hopper_64", "attention_prefill_hopper_128"];
const PLAIN: [&str; 2] = ["attention_plain_f32", "attention_plain_bf16"];

/// A GPU that this process computes on.
pub struct Context {
    raw: sys::CUcontext,
    functions: HashMap<&'static str, sys::CUfunction>,
    name: String,
    ordinal: usize,
    /// Compute capability 9.0, whose own instructions some kernels use.
    pub(super) is_hopper: bool,
    /// Kernels may overlap with the one before them (sm_90 and newer).
    pub(super) overlaps_launches: bool,
    /// Most shared memory of a block, in bytes.
    shared_bytes: usize,
    pub(super) multiprocessors: usize,
}

// SAFETY: the driver's context and functions may be used from every thread that makes the context
// current, which every method here does first.
unsafe impl Send for Context {}
// SAFETY: as above; nothing here changes after `open`.
unsafe impl Sync for Context {}

/// GPUs that this process may use.
///
/// # Errors
/// Without a driver, or with one too old.
pub fn gpu_count() -> Result<usize, CudaError> {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: plain outputs; initialisation may be repeated.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
    }
    if version < DRIVER_VERSION_MIN {
        let text = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(CudaError::OldDriver {
            found: text(version),
            needed: text(DRIVER_VERSION_MIN),
        });
    }
    Ok(count as usize)
}

impl Context {
    /// Opens GPU `ordinal` of those visible and loads the kernels.
    ///
    /// # Errors
    /// If there is no such GPU, or the GPU or its driver is too old.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let count = gpu_count()?;
        if ordinal >= count {
            return Err(CudaError::NoGpu { ordinal, count });
        }
        let mut device = 0;
        let mut raw = std::ptr::null_mut();
        // SAFETY: plain outputs; the ordinal is in range.
        unsafe { check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as i32))? };
        let name = device_name(device)?;
        use sys::CUdevice_attribute as Attribute;
        let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::OldGpu { name, major, minor });
        }
        let shared =
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let multiprocessors =
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: a valid device; the context is made current before it is used.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut raw, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(raw))?;
        }
        let mut context = Self {
            raw,
            functions: HashMap::new(),
            name,
            ordinal,
            is_hopper: (major, minor) == (9, 0),
            overlaps_launches: major >= 9,
            shared_bytes: shared as usize,
            multiprocessors: multiprocessors as usize,
        };
        for (image, names) in MODULES {
            context.load(image, names)?;
        }
        Ok(Arc::new(context))
    }

    fn load(&mut self, image: &[u8], names: &[&'static str]) -> Result<(), CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: `image` is a fat binary that nvcc made; the context is current.
        unsafe {
            check("cuModuleLoadData", sys::cuModuleLoadData(&mut module, image.as_ptr().cast()))?;
        }
        for name in names {
            let text = CString::new(*name).unwrap_or_default();
            let mut function = std::ptr::null_mut();
            // SAFETY: a loaded module and a terminated name.
            unsafe {
                let code = sys::cuModuleGetFunction(&mut function, module, text.as_ptr());
                check("cuModuleGetFunction", code)?;
                let attribute =
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let mut fixed = 0;
                let code = sys::cuFuncGetAttribute(
                    &mut fixed,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                    function,
                );
                check("cuFuncGetAttribute", code)?;
                let most = self.shared_bytes as i32 - fixed;
                check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, attribute, most))?;
            }
            self.functions.insert(name, function);
        }
        Ok(())
    }

    /// Makes this GPU the calling thread's.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as the process.
        unsafe { check("cuCtxSetCurrent", sys::cuCtxSetCurrent(self.raw)) }
    }

    pub(super) fn function(&self, name: &str) -> Result<sys::CUfunction, CudaError> {
        self.functions.get(name).copied().ok_or_else(|| CudaError::Shape {
            what: "a kernel",
            detail: format!("{name} is not among the loaded ones"),
        })
    }

    /// Whether a block may have so much shared memory.
    pub(super) fn has_shared(&self, bytes: usize) -> bool {
        bytes + 1024 <= self.shared_bytes
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Free and total bytes of the GPU.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: plain outputs; the context is current.
        unsafe { check("cuMemGetInfo", sys::cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok((free, total))
    }
}

fn device_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name = [0; 128];
    // SAFETY: the buffer's length is given.
    unsafe { check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 128, device))? };
    // SAFETY: the driver terminates the name within the buffer.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: a plain output.
    unsafe { check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut value, which, device))? };
    Ok(value)
}
