//! Memory of OpenCL devices.
//!
//! A device that computes on the host's own cores has the host's memory, so what it allocates is memory that the processor
//! may use as it is: fine-grained shared virtual memory, which OpenCL 2.0 defines for that, under an ordinary buffer. A copy
//! to or from it is one `memcpy` of the calling thread, which waits for commands that use the same buffer and for no thread
//! of the driver's. Elsewhere, and with [`SHARED_VARIABLE`] at `off`, the processor reaches memory by map and unmap.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cl3::types::{cl_device_id, cl_int, cl_mem};
use cl3::{device, error_codes, memory};

use super::{Context, check};
use crate::{Buffer, Error, Memory, Result};

/// `off`: memory of OpenCL devices is not shared with the processor, whatever the driver offers.
const SHARED_VARIABLE: &str = "FOREBAY_OPENCL_SHARED";

/// Why memory of a device that computes on the host's cores cannot be shared with the processor; none where it can.
pub(super) fn why_not_shared(id: cl_device_id) -> Option<String> {
    let able = device::get_device_info(id, device::CL_DEVICE_SVM_CAPABILITIES).map(u64::from).unwrap_or(0);
    if able & device::CL_DEVICE_SVM_FINE_GRAIN_BUFFER == 0 {
        return Some("the driver has no fine-grained shared virtual memory".into());
    }
    std::env::var(SHARED_VARIABLE).is_ok_and(|v| v == "off").then(|| format!("{SHARED_VARIABLE} is off"))
}

pub(super) struct ClMemory {
    pub(super) id: cl_mem,
    len: usize,
    bytes: Bytes,
    context: Arc<Context>,
}

/// Where a buffer's bytes are.
enum Bytes {
    /// The driver knows.
    Driver,
    /// In memory that the driver allocated for both sides.
    Shared(NonNull<u8>),
    /// In memory of the host's that kernels use, too.
    Host(Buffer),
}

// SAFETY: as for `Context`; the bytes are reached only by the queue's rules ([`super::order`]).
unsafe impl Send for ClMemory {}
// SAFETY: as above.
unsafe impl Sync for ClMemory {}

impl ClMemory {
    /// Allocates `len` bytes.
    pub(super) fn alloc(context: &Arc<Context>, len: usize) -> Result<Self> {
        let used = context.allocated.load(Ordering::Relaxed);
        let oom =
            || Error::OutOfMemory { device: context.name.clone(), requested: len as u64, used, limit: context.limit };
        if used.saturating_add(len as u64) > context.limit {
            return Err(oom());
        }
        let size = len.max(1);
        let (bytes, made) = if context.is_shared {
            let flags = memory::CL_MEM_READ_WRITE | memory::CL_MEM_SVM_FINE_GRAIN_BUFFER;
            // SAFETY: the device has such memory; an alignment of 0 is the driver's choice.
            let at = unsafe { memory::svm_alloc(context.id, flags, size, 0) };
            // The call has no other way to fail that could be met here.
            let at = at.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or_else(oom)?;
            (Bytes::Shared(at), create(context, size, at.as_ptr().cast()))
        } else {
            (Bytes::Driver, create(context, size, null_mut()))
        };
        match made {
            Ok(id) => {
                context.allocated.fetch_add(len as u64, Ordering::Relaxed);
                Ok(ClMemory { id, len, bytes, context: context.clone() })
            }
            Err(code) => {
                bytes.free(context);
                Err(match code {
                    // GPUs may have no buffer of more than a quarter of their memory.
                    error_codes::CL_INVALID_BUFFER_SIZE => {
                        let most = device::get_device_info(context.device, device::CL_DEVICE_MAX_MEM_ALLOC_SIZE);
                        let limit = most.map_or(context.limit, u64::from).min(context.limit);
                        let device = context.name.clone();
                        Error::OutOfMemory { device, requested: len as u64, used: 0, limit }
                    }
                    error_codes::CL_MEM_OBJECT_ALLOCATION_FAILURE
                    | error_codes::CL_OUT_OF_RESOURCES
                    | error_codes::CL_OUT_OF_HOST_MEMORY => oom(),
                    code => return check("clCreateBuffer", &context.name, Err(code)),
                })
            }
        }
    }

    /// A buffer of the host's memory, which has all of the bytes.
    pub(super) fn of_host(context: &Arc<Context>, host: &Buffer, at: NonNull<u8>, len: usize) -> Result<Self> {
        let id = check("clCreateBuffer", &context.name, create(context, len.max(1), at.as_ptr().cast()))?;
        Ok(ClMemory { id, len, bytes: Bytes::Host(host.clone()), context: context.clone() })
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Where it is in the host's memory, if it is memory of the host's: what it is known by, whoever uses it.
    pub(super) fn host(&self) -> Option<NonNull<u8>> {
        match &self.bytes {
            Bytes::Host(b) => b.host_ptr(),
            Bytes::Driver | Bytes::Shared(_) => None,
        }
    }

    /// Where the processor reaches the bytes, while no command uses them.
    pub(super) fn direct(&self) -> Option<NonNull<u8>> {
        match &self.bytes {
            Bytes::Shared(at) => Some(*at),
            Bytes::Driver | Bytes::Host(_) => None,
        }
    }
}

/// A buffer, of memory that is there already unless `at` is null.
fn create(context: &Context, size: usize, at: *mut c_void) -> std::result::Result<cl_mem, cl_int> {
    let flags = if at.is_null() { 0 } else { memory::CL_MEM_USE_HOST_PTR };
    // SAFETY: memory at `at` has the bytes, and lives as long as the buffer: `ClMemory` has both.
    unsafe { memory::create_buffer(context.id, memory::CL_MEM_READ_WRITE | flags, size, at) }
}

impl Bytes {
    /// Gives back what was allocated beside the buffer, which is gone.
    fn free(&self, context: &Context) {
        if let Bytes::Shared(at) = self {
            // SAFETY: allocated in `alloc`, freed once.
            let _ = unsafe { memory::svm_free(context.id, at.as_ptr().cast()) };
        }
    }
}

impl Memory for ClMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for ClMemory {
    fn drop(&mut self) {
        if !super::is_home() {
            return;
        }
        // SAFETY: created by this module, released once. Commands that use it have ended: queues keep it until then.
        let _ = unsafe { memory::release_mem_object(self.id) };
        self.bytes.free(&self.context);
        if !matches!(self.bytes, Bytes::Host(_)) {
            self.context.allocated.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
    }
}
