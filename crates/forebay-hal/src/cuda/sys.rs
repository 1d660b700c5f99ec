//! The part of the CUDA driver API that is used here: types, and a table of functions found at run time.
//!
//! Numbers and signatures follow `cuda.h` of CUDA 12.0 and 13.0, which agree on everything below; where a header is at hand,
//! the tests hold them against it (`header.rs`). Functions come from
//! `cuGetProcAddress_v2` (which gives the version of a function that the requested API version has) and otherwise from
//! the library's symbols. A missing function is [`Error::NoSymbol`], never a null call.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::{Error, Kind, Result};

pub type CuResult = c_int;
pub type CuDevice = c_int;
pub type CuContext = *mut c_void;
pub type CuModule = *mut c_void;
pub type CuFunction = *mut c_void;
pub type CuStream = *mut c_void;
pub type CuEvent = *mut c_void;
pub type CuGraph = *mut c_void;
pub type CuGraphNode = *mut c_void;
pub type CuGraphExec = *mut c_void;
pub type CuDevicePtr = u64;

pub const SUCCESS: CuResult = 0;
pub const ERROR_OUT_OF_MEMORY: CuResult = 2;
pub const ERROR_NOT_READY: CuResult = 600;
pub const ERROR_NOT_FOUND: CuResult = 500;
/// Statuses after which the context is unusable: ECC, NVLink and contained errors, illegal address and instruction,
/// launch time-out and failure, assert, hardware stack, misaligned address, address space, program counter, tensor memory,
/// an MPS client that its server ended, an external device, unknown. A launch that was refused for what it asks (701) is
/// none of them: nothing has happened then.
pub const STICKY: [CuResult; 16] = [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999];
/// Those of them that the header does not say it of; nothing can be relied on after them either.
#[cfg(test)]
pub const ENDS_BY_EXPERIENCE: [CuResult; 3] = [214, 220, 999];

pub const ATTRIBUTE_CLOCK_RATE: c_int = 13;
pub const ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub const ATTRIBUTE_COMPUTE_MODE: c_int = 20;
pub const COMPUTE_PROHIBITED: u32 = 2;
pub const COMPUTE_EXCLUSIVE: u32 = 3;
pub const ATTRIBUTE_CC_MAJOR: c_int = 75;
pub const ATTRIBUTE_CC_MINOR: c_int = 76;

pub const ATTRIBUTE_PCI_BUS: c_int = 33;
pub const ATTRIBUTE_PCI_DEVICE: c_int = 34;
pub const ATTRIBUTE_PCI_DOMAIN: c_int = 50;
pub const ATTRIBUTE_RDMA_WITH_VMM: c_int = 110;

pub const MEM_ALLOCATION_PINNED: c_int = 1;
pub const MEM_HANDLE_POSIX_FD: c_int = 1;
/// What `cuCtxSetLimit` calls the size of the device's own heap.
pub const LIMIT_MALLOC_HEAP: c_int = 2;
pub const MEM_LOCATION_DEVICE: c_int = 1;
pub const MEM_ACCESS_READ_WRITE: c_int = 3;
pub const MEM_GRANULARITY_MINIMUM: c_int = 0;
pub const MEM_RANGE_DMA_BUF: c_int = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct MemAllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: MemLocation,
    pub win32: *mut c_void,
    pub compression: u8,
    pub rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}
const _: () =
    assert!(size_of::<MemAllocationProp>() == 32 && std::mem::offset_of!(MemAllocationProp, rdma_capable) == 25);

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct MemAccessDesc {
    pub location: MemLocation,
    pub flags: c_int,
}
const _: () = assert!(size_of::<MemAccessDesc>() == 12);

pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const EVENT_BLOCKING_SYNC: c_uint = 1;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const MEMHOSTALLOC_PORTABLE: c_uint = 1;

/// `CUDA_KERNEL_NODE_PARAMS_v2` of CUDA 12.0 and later.
#[repr(C)]
pub struct KernelNodeParams {
    pub func: CuFunction,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub params: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    /// Null: `func` is used.
    pub kernel: *mut c_void,
    /// Null: the current context.
    pub context: CuContext,
}
const _: () = assert!(size_of::<KernelNodeParams>() == 72 && std::mem::offset_of!(KernelNodeParams, params) == 40);

/// API version asked of `cuGetProcAddress`: 12.0.
const API_VERSION: c_int = 12_000;

macro_rules! table {
    ($($name:ident / $symbol:literal : fn($($arg:ident : $ty:ty),*);)*) => {
        /// The driver's functions.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($arg: $ty),*) -> CuResult,)*
            library: libloading::Library,
        }

        impl Driver {
            fn open(library: libloading::Library) -> Result<Self> {
                let finder = Finder::new(&library);
                Ok(Driver {
                    $($name: {
                        let p = finder.find(stringify!($name), $symbol)?;
                        // SAFETY: the driver exports this function with this signature (cuda.h).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg: $ty),*) -> CuResult>(p) }
                    },)*
                    library,
                })
            }
        }

        /// Symbols, and the types of their functions' arguments.
        #[cfg(test)]
        pub const SIGNATURES: &[(&str, &[&str])] = &[$(($symbol, &[$(stringify!($ty)),*])),*];
    };
}

table! {
    cuInit / "cuInit": fn(flags: c_uint);
    cuDriverGetVersion / "cuDriverGetVersion": fn(version: *mut c_int);
    cuDeviceGetCount / "cuDeviceGetCount": fn(count: *mut c_int);
    cuDeviceGet / "cuDeviceGet": fn(device: *mut CuDevice, ordinal: c_int);
    cuDeviceGetName / "cuDeviceGetName": fn(name: *mut c_char, len: c_int, device: CuDevice);
    cuDeviceGetAttribute / "cuDeviceGetAttribute": fn(value: *mut c_int, attribute: c_int, device: CuDevice);
    cuDeviceTotalMem / "cuDeviceTotalMem_v2": fn(bytes: *mut usize, device: CuDevice);
    cuDevicePrimaryCtxRetain / "cuDevicePrimaryCtxRetain": fn(context: *mut CuContext, device: CuDevice);
    cuDevicePrimaryCtxRelease / "cuDevicePrimaryCtxRelease_v2": fn(device: CuDevice);
    cuDevicePrimaryCtxReset / "cuDevicePrimaryCtxReset_v2": fn(device: CuDevice);
    cuCtxGetCurrent / "cuCtxGetCurrent": fn(context: *mut CuContext);
    cuCtxSetCurrent / "cuCtxSetCurrent": fn(context: CuContext);
    cuCtxSetLimit / "cuCtxSetLimit": fn(limit: c_int, value: usize);
    cuGetErrorName / "cuGetErrorName": fn(code: CuResult, name: *mut *const c_char);
    cuMemAlloc / "cuMemAlloc_v2": fn(p: *mut CuDevicePtr, bytes: usize);
    cuMemFree / "cuMemFree_v2": fn(p: CuDevicePtr);
    cuMemGetAllocationGranularity / "cuMemGetAllocationGranularity": fn(bytes: *mut usize, prop: *const MemAllocationProp,
        option: c_int);
    cuMemCreate / "cuMemCreate": fn(handle: *mut u64, bytes: usize, prop: *const MemAllocationProp, flags: u64);
    cuMemRelease / "cuMemRelease": fn(handle: u64);
    cuMemAddressReserve / "cuMemAddressReserve": fn(p: *mut CuDevicePtr, bytes: usize, alignment: usize,
        place: CuDevicePtr, flags: u64);
    cuMemAddressFree / "cuMemAddressFree": fn(p: CuDevicePtr, bytes: usize);
    cuMemMap / "cuMemMap": fn(p: CuDevicePtr, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap / "cuMemUnmap": fn(p: CuDevicePtr, bytes: usize);
    cuMemSetAccess / "cuMemSetAccess": fn(p: CuDevicePtr, bytes: usize, access: *const MemAccessDesc, n: usize);
    cuMemExportToShareableHandle / "cuMemExportToShareableHandle": fn(handle: *mut c_void, allocation: u64, kind: c_int,
        flags: u64);
    cuMemGetHandleForAddressRange / "cuMemGetHandleForAddressRange": fn(handle: *mut c_void, p: CuDevicePtr, bytes: usize,
        kind: c_int, flags: u64);
    cuMemHostAlloc / "cuMemHostAlloc": fn(p: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost / "cuMemFreeHost": fn(p: *mut c_void);
    cuMemcpyHtoD / "cuMemcpyHtoD_v2": fn(dst: CuDevicePtr, src: *const c_void, bytes: usize);
    cuMemcpyDtoH / "cuMemcpyDtoH_v2": fn(dst: *mut c_void, src: CuDevicePtr, bytes: usize);
    cuMemcpyHtoDAsync / "cuMemcpyHtoDAsync_v2": fn(dst: CuDevicePtr, src: *const c_void, bytes: usize, stream: CuStream);
    cuMemcpyDtoHAsync / "cuMemcpyDtoHAsync_v2": fn(dst: *mut c_void, src: CuDevicePtr, bytes: usize, stream: CuStream);
    cuMemcpyDtoDAsync / "cuMemcpyDtoDAsync_v2": fn(dst: CuDevicePtr, src: CuDevicePtr, bytes: usize, stream: CuStream);
    cuMemcpyPeerAsync / "cuMemcpyPeerAsync": fn(dst: CuDevicePtr, dst_context: CuContext, src: CuDevicePtr,
        src_context: CuContext, bytes: usize, stream: CuStream);
    cuDeviceCanAccessPeer / "cuDeviceCanAccessPeer": fn(can: *mut c_int, device: CuDevice, peer: CuDevice);
    cuCtxEnablePeerAccess / "cuCtxEnablePeerAccess": fn(peer: CuContext, flags: c_uint);
    cuMemsetD8Async / "cuMemsetD8Async": fn(dst: CuDevicePtr, value: u8, bytes: usize, stream: CuStream);
    cuModuleLoadData / "cuModuleLoadData": fn(module: *mut CuModule, image: *const c_void);
    cuModuleUnload / "cuModuleUnload": fn(module: CuModule);
    cuModuleGetFunction / "cuModuleGetFunction": fn(f: *mut CuFunction, module: CuModule, name: *const c_char);
    cuStreamCreate / "cuStreamCreate": fn(stream: *mut CuStream, flags: c_uint);
    cuStreamDestroy / "cuStreamDestroy_v2": fn(stream: CuStream);
    cuStreamSynchronize / "cuStreamSynchronize": fn(stream: CuStream);
    cuStreamWaitEvent / "cuStreamWaitEvent": fn(stream: CuStream, event: CuEvent, flags: c_uint);
    cuLaunchKernel / "cuLaunchKernel": fn(f: CuFunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: CuStream, params: *mut *mut c_void, extra: *mut *mut c_void);
    cuLaunchHostFunc / "cuLaunchHostFunc": fn(stream: CuStream, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void);
    cuEventCreate / "cuEventCreate": fn(event: *mut CuEvent, flags: c_uint);
    cuEventDestroy / "cuEventDestroy_v2": fn(event: CuEvent);
    cuEventRecord / "cuEventRecord": fn(event: CuEvent, stream: CuStream);
    cuEventQuery / "cuEventQuery": fn(event: CuEvent);
    cuEventSynchronize / "cuEventSynchronize": fn(event: CuEvent);
    cuGraphCreate / "cuGraphCreate": fn(graph: *mut CuGraph, flags: c_uint);
    cuGraphAddKernelNode / "cuGraphAddKernelNode_v2": fn(node: *mut CuGraphNode, graph: CuGraph,
        dependencies: *const CuGraphNode, n: usize, params: *const KernelNodeParams);
    cuGraphExecKernelNodeSetParams / "cuGraphExecKernelNodeSetParams_v2": fn(exec: CuGraphExec, node: CuGraphNode,
        params: *const KernelNodeParams);
    cuGraphInstantiateWithFlags / "cuGraphInstantiateWithFlags": fn(exec: *mut CuGraphExec, graph: CuGraph, flags: u64);
    cuGraphLaunch / "cuGraphLaunch": fn(exec: CuGraphExec, stream: CuStream);
    cuGraphDestroy / "cuGraphDestroy": fn(graph: CuGraph);
    cuGraphExecDestroy / "cuGraphExecDestroy": fn(exec: CuGraphExec);
}

/// Functions that only newer drivers have.
macro_rules! optional {
    ($(#[$about:meta])* struct $name:ident { $($field:ident / $symbol:literal: $ty:ty;)* }) => {
        $(#[$about])*
        pub(super) struct $name {
            $(pub(super) $field: $ty,)*
        }

        impl $name {
            pub(super) fn find(driver: &$crate::cuda::sys::Driver) -> $crate::Result<Self> {
                Ok($name {
                    $($field: {
                        let p = driver.optional($symbol)?;
                        // SAFETY: the driver exports this function with this signature (cuda.h; `header.rs` holds it
                        // against that).
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $ty>(p) }
                    },)*
                })
            }

            /// Symbols, and what their functions are taken for.
            #[cfg(test)]
            pub(super) fn types() -> Vec<(&'static str, &'static str)> {
                vec![$(($symbol, std::any::type_name::<$ty>())),*]
            }
        }
    };
}
pub(super) use optional;

optional! {
    /// Of drivers from CUDA 12.4 on.
    struct Loading {
        load / "cuFuncLoad": unsafe extern "C" fn(CuFunction) -> CuResult;
    }
}

pub(super) type GetProc = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CuResult;

struct Finder<'a> {
    library: &'a libloading::Library,
    get_proc: Option<GetProc>,
}

impl<'a> Finder<'a> {
    fn new(library: &'a libloading::Library) -> Self {
        // SAFETY: the signature is that of cuda.h for CUDA 12 and later.
        let get_proc = unsafe { library.get::<GetProc>(b"cuGetProcAddress_v2\0") }.ok().map(|s| *s);
        Finder { library, get_proc }
    }

    /// `name` is the plain name for `cuGetProcAddress`, `symbol` the versioned one that the library exports.
    fn find(&self, name: &'static str, symbol: &'static str) -> Result<*mut c_void> {
        if let (Some(get), Ok(c)) = (self.get_proc, CString::new(name)) {
            let (mut p, mut status) = (std::ptr::null_mut(), 0);
            // SAFETY: all pointers are valid for the call.
            if unsafe { get(c.as_ptr(), &mut p, API_VERSION, 0, &mut status) } == SUCCESS && !p.is_null() {
                return Ok(p);
            }
        }
        // SAFETY: only the address is taken here.
        let found = unsafe { self.library.get::<*mut c_void>(symbol.as_bytes()) };
        match found {
            // SAFETY: the address of the symbol itself.
            Ok(s) => Ok(unsafe { s.into_raw() }.into_raw()),
            Err(_) => Err(Error::NoSymbol { library: "libcuda.so.1", symbol }),
        }
    }
}

/// Opens the driver library at `name`; the tests pass a file of their own.
pub(super) fn open(name: &str) -> Result<Driver> {
    // SAFETY: loading the driver runs its initialisers, which is what every CUDA program does.
    let library = unsafe { libloading::Library::new(name) }.map_err(|e| Error::NoLibrary {
        kind: Kind::Cuda,
        library: name.into(),
        why: e.to_string(),
    })?;
    Driver::open(library)
}

/// The driver, opened once.
pub fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| open("libcuda.so.1")).as_ref().map_err(Clone::clone)
}

impl Driver {
    /// A function that only newer drivers have ([`optional!`]).
    pub(super) fn optional(&self, name: &'static str) -> Result<*mut c_void> {
        Finder::new(&self.library).find(name, name)
    }

    /// A status by name.
    pub fn error_name(&self, code: CuResult) -> String {
        let mut p = std::ptr::null();
        // SAFETY: `p` is valid for the call; the driver's strings live forever.
        unsafe {
            if (self.cuGetErrorName)(code, &mut p) == SUCCESS && !p.is_null() {
                return CStr::from_ptr(p).to_string_lossy().into_owned();
            }
        }
        "unknown CUDA status".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stand-in for libcuda with every function except `without`: checks that the table finds what is there and names
    /// what is not. Nothing is called in it.
    fn stand_in(without: &str) -> Option<std::path::PathBuf> {
        let dir = std::env::temp_dir().join(format!("forebay-libcuda-{}-{without}", std::process::id()));
        std::fs::create_dir_all(&dir).ok()?;
        let code: String = SIGNATURES
            .iter()
            .filter(|(s, _)| *s != without)
            .map(|(s, _)| format!("int {s}(void) {{ return 0; }}\n"))
            .collect();
        std::fs::write(dir.join("stub.c"), code).ok()?;
        let out = dir.join("libcuda.so.1");
        let built = std::process::Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&out)
            .arg(dir.join("stub.c"))
            .status();
        built.is_ok_and(|s| s.success()).then_some(out)
    }

    #[test]
    fn a_missing_library_or_symbol_is_a_typed_error() {
        assert!(matches!(open("libcuda-not-there.so.1"), Err(Error::NoLibrary { kind: Kind::Cuda, .. })));
        let Some(whole) = stand_in("none") else {
            eprintln!("skipped: no C compiler for the stand-in library");
            return;
        };
        assert!(open(&whole.to_string_lossy()).is_ok());
        for missing in ["cuGraphAddKernelNode_v2", "cuMemAlloc_v2", "cuInit"] {
            let path = stand_in(missing).expect("compiled once already");
            match open(&path.to_string_lossy()) {
                Err(Error::NoSymbol { symbol, .. }) => assert_eq!(symbol, missing),
                other => panic!("{missing}: {:?}", other.err()),
            }
            std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        }
        std::fs::remove_dir_all(whole.parent().unwrap()).unwrap();
    }
}
