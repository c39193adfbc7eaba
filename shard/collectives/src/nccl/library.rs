//! The functions of `libnccl` that groups need, looked up once.
//!
//! Not by cudarc: its loader does not know `libnccl.so.2`, the only name that NCCL's packages install,
//! and panics on a missing function.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

use libloading::Library as File;

use crate::CollectiveError;

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// 2.18: aborts of groups that are not blocking are reliable, recorded sends work.
const VERSION_MIN: c_int = 21_800;

/// Results (`ncclResult_t`).
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// What the ranks of a group find each other by (`ncclUniqueId`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; UniqueId::LEN]);

impl UniqueId {
    pub const LEN: usize = 128;

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// None: not [`UniqueId::LEN`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId")
    }
}

/// How a group is made (`ncclConfig_t` of 2.18; NCCL reads as much as `size` says).
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return at once; everything else is NCCL's choice.
    pub(super) fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN as u32,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclComm_t`.
pub(super) type Raw = *mut c_void;
/// `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

pub(super) type PointToPoint =
    unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Raw, RawStream) -> c_int;

pub(super) struct Library {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) init: unsafe extern "C" fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> c_int,
    pub(super) async_error: unsafe extern "C" fn(Raw, *mut c_int) -> c_int,
    pub(super) abort: unsafe extern "C" fn(Raw) -> c_int,
    pub(super) all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Raw,
        RawStream,
    ) -> c_int,
    pub(super) send: PointToPoint,
    pub(super) recv: PointToPoint,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Raw) -> *const c_char,
}

/// The library, or why there is none.
pub(super) fn library() -> Result<&'static Library, CollectiveError> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let missing = |reason: &String| CollectiveError::NoNccl { reason: reason.clone() };
    LIBRARY.get_or_init(Library::open).as_ref().map_err(missing)
}

/// Ids for so many groups. Whoever makes them helps the ranks to meet: it has to live until then.
///
/// # Errors
/// `NoNccl` if the library is missing or too old, `Nccl` with what it says.
pub fn unique_ids(count: usize) -> Result<Vec<UniqueId>, CollectiveError> {
    let library = library()?;
    let one = || {
        let mut id = UniqueId([0; UniqueId::LEN]);
        // SAFETY: a plain output.
        let code = unsafe { (library.get_unique_id)(&mut id) };
        if code == SUCCESS {
            Ok(id)
        } else {
            Err(library.error("unique_id", (0, count), code, None))
        }
    };
    (0..count).map(|_| one()).collect()
}

impl Library {
    fn open() -> Result<Self, String> {
        let mut problem = String::new();
        for name in NAMES {
            // SAFETY: NCCL's library, whose initialisers do nothing that could harm us.
            match unsafe { File::new(name) } {
                // Never unloaded: its threads run on.
                Ok(file) => return Self::read(Box::leak(Box::new(file))),
                Err(error) => problem = error.to_string(),
            }
        }
        Err(problem)
    }

    fn read(file: &'static File) -> Result<Self, String> {
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = find(file, c"ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: a plain output.
        unsafe { get_version(&mut version) };
        if version < VERSION_MIN {
            return Err(format!("NCCL {version} is older than {VERSION_MIN} (2.18)"));
        }
        Ok(Self {
            get_unique_id: find(file, c"ncclGetUniqueId")?,
            init: find(file, c"ncclCommInitRankConfig")?,
            async_error: find(file, c"ncclCommGetAsyncError")?,
            abort: find(file, c"ncclCommAbort")?,
            all_reduce: find(file, c"ncclAllReduce")?,
            send: find(file, c"ncclSend")?,
            recv: find(file, c"ncclRecv")?,
            error_string: find(file, c"ncclGetErrorString")?,
            last_error: find(file, c"ncclGetLastError")?,
        })
    }

    /// A result code in NCCL's words, with what to do about the usual causes.
    pub(super) fn error(
        &self,
        operation: &'static str,
        (rank, size): (usize, usize),
        code: c_int,
        raw: Option<Raw>,
    ) -> CollectiveError {
        // SAFETY: both take any value (NCCL allows a null group) and return static strings.
        let (what, last) = unsafe {
            let last = (self.last_error)(raw.unwrap_or(std::ptr::null_mut()));
            (text((self.error_string)(code)), text(last))
        };
        let mut detail = format!("{what} ({code})");
        if !last.is_empty() {
            detail = format!("{detail}: {last}");
        }
        if last.contains("Duplicate GPU") {
            detail +=
                "; ranks that share a GPU need NCCL_HOSTID to differ and NCCL_SOCKET_IFNAME=lo";
        }
        CollectiveError::Nccl { operation, rank, size, detail }
    }
}

/// # Safety of the callers' types
/// Each field of [`Library`] has the type that NCCL's header declares for that name.
fn find<F: Copy>(file: &'static File, name: &CStr) -> Result<F, String> {
    // SAFETY: see above; the file stays loaded.
    unsafe { file.get::<F>(name.to_bytes_with_nul()) }
        .map(|function| *function)
        .map_err(|error| error.to_string())
}

fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's static, terminated strings.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().trim().to_owned()
}
