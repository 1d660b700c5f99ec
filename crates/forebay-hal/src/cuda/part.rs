//! A part of a GPU: some of its multiprocessors, as a device of its own ("green contexts", drivers from CUDA 12.4 on).
//!
//! The driver's contexts of parts are current to one thread at a time, so none is made current here: memory, kernels and
//! threads keep to the device's own context, and only the streams of a part's queues are the part's, which is what decides
//! where kernels run. Graphs run where their nodes' context says, so parts launch one by one instead.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;

use super::Context;
use super::sys::{self, CuDevice, CuResult, CuStream, SUCCESS};
use crate::{Error, Result};

/// `CUdevResource` of CUDA 12.4 to 13.0. Later versions are longer, and their functions have other names.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Resource {
    pub(super) kind: c_int,
    padding: [u8; 92],
    pub(super) multiprocessors: c_uint,
    pub(super) least: c_uint,
    pub(super) alignment: c_uint,
    rest: [u8; 36],
}
const _: () = assert!(size_of::<Resource>() == 144 && std::mem::offset_of!(Resource, multiprocessors) == 96);

pub(super) const RESOURCE_SM: c_int = 1;
pub(super) const GREEN_CTX_DEFAULT_STREAM: c_uint = 1;

type Handle = *mut c_void;

sys::optional! {
    /// The driver's functions for it.
    struct Calls {
        resource / "cuDeviceGetDevResource": unsafe extern "C" fn(CuDevice, *mut Resource, c_int) -> CuResult;
        split / "cuDevSmResourceSplitByCount": unsafe extern "C" fn(*mut Resource, *mut c_uint, *const Resource,
            *mut Resource, c_uint, c_uint) -> CuResult;
        describe / "cuDevResourceGenerateDesc": unsafe extern "C" fn(*mut Handle, *mut Resource, c_uint) -> CuResult;
        create / "cuGreenCtxCreate": unsafe extern "C" fn(*mut Handle, Handle, CuDevice, c_uint) -> CuResult;
        destroy / "cuGreenCtxDestroy": unsafe extern "C" fn(Handle) -> CuResult;
        stream / "cuGreenCtxStreamCreate": unsafe extern "C" fn(*mut CuStream, Handle, c_uint, c_int) -> CuResult;
    }
}

/// Some of a device's multiprocessors.
pub(super) struct Part {
    id: Handle,
    /// How many.
    pub(super) multiprocessors: u32,
    calls: Arc<Calls>,
    context: Arc<Context>,
}

// SAFETY: the handle is only passed to the driver, which locks for itself where streams are made.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

impl Part {
    /// A part of at least so many multiprocessors, and the rest.
    pub(super) fn split(context: &Arc<Context>, multiprocessors: u32) -> Result<[Part; 2]> {
        let d = context.enter()?;
        let calls = Arc::new(Calls::find(context.driver).map_err(|e| Error::Unsupported {
            device: context.name.clone(),
            what: format!("parts of a GPU, which take a driver of CUDA 12.4 or later: {e}"),
        })?);
        let whole = {
            let mut r = MaybeUninit::<Resource>::zeroed();
            // SAFETY: `r` has the size that the function of this name writes.
            let code = unsafe { (calls.resource)(context.device, r.as_mut_ptr(), RESOURCE_SM) };
            context.check("cuDeviceGetDevResource", code)?;
            // SAFETY: all bytes are numbers, and were zeroed.
            unsafe { r.assume_init() }
        };
        let (mut part, mut rest, mut groups) = (whole, whole, 1);
        let refused = |why: String| Error::Invalid {
            device: context.name.clone(),
            what: format!(
                "a part of {multiprocessors} of {} multiprocessors: {why} (parts are multiples of {}, at least {})",
                whole.multiprocessors, whole.alignment, whole.least
            ),
        };
        if multiprocessors == 0 || multiprocessors >= whole.multiprocessors {
            return Err(refused("something has to be left for each part".into()));
        }
        // SAFETY: room for one group, and all pointers are valid.
        let code = unsafe { (calls.split)(&mut part, &mut groups, &whole, &mut rest, 0, multiprocessors) };
        if code != SUCCESS || groups != 1 {
            return Err(refused(d.error_name(code)));
        }
        if rest.kind != RESOURCE_SM || rest.multiprocessors == 0 {
            return Err(refused("nothing would be left for the other".into()));
        }
        let open = |r: &mut Resource| -> Result<Part> {
            let (mut description, mut id) = (null_mut(), null_mut());
            // SAFETY: one resource, which came from the split above.
            context.check("cuDevResourceGenerateDesc", unsafe { (calls.describe)(&mut description, r, 1) })?;
            // SAFETY: the description was just made.
            let code = unsafe { (calls.create)(&mut id, description, context.device, GREEN_CTX_DEFAULT_STREAM) };
            context.check("cuGreenCtxCreate", code)?;
            Ok(Part { id, multiprocessors: r.multiprocessors, calls: calls.clone(), context: context.clone() })
        };
        Ok([open(&mut part)?, open(&mut rest)?])
    }

    /// A new stream on it.
    pub(super) fn stream(&self) -> Result<CuStream> {
        self.context.enter()?;
        let mut id = null_mut();
        // SAFETY: `id` is valid; the part lives as long as `self`, and its streams hold it.
        let code = unsafe { (self.calls.stream)(&mut id, self.id, sys::STREAM_NON_BLOCKING, 0) };
        self.context.check("cuGreenCtxStreamCreate", code)?;
        Ok(id)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `split`, destroyed once, after all of its streams.
            unsafe { (self.calls.destroy)(self.id) };
        }
    }
}
