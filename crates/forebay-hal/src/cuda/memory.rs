//! Buffers of a CUDA device, and page-locked memory of the host; what is freed waits for kernels that stay.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::sys::CuDevicePtr;
use super::{Context, window};
use crate::{Buffer, Memory};

pub(super) struct CudaMemory {
    pub(super) ptr: CuDevicePtr,
    pub(super) len: usize,
    /// The part of a slab that it is, or the host memory; otherwise it is an allocation of its own.
    pub(super) part: Option<window::Part>,
    pub(super) host: Option<Buffer>,
    pub(super) context: Arc<Context>,
}

impl Memory for CudaMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn is_mapped(&self) -> bool {
        self.part.is_some()
    }
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }
    fn address(&self) -> Option<u64> {
        Some(self.ptr)
    }
    fn mapped_ptr(&self) -> Option<NonNull<u8>> {
        self.part.as_ref()?.host()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.host.is_some() {
            return;
        }
        self.context.allocated.fetch_sub(self.len as u64, Ordering::Relaxed);
        if self.part.is_some() {
            return;
        }
        let ptr = self.ptr;
        self.context.free(move |d| {
            // SAFETY: allocated in `alloc`, freed once; queues keep buffers until their commands have ended.
            unsafe { (d.cuMemFree)(ptr) };
        });
    }
}

/// Page-locked host memory.
pub(super) struct PinnedMemory {
    pub(super) ptr: NonNull<u8>,
    pub(super) len: usize,
    pub(super) context: Arc<Context>,
}

// SAFETY: the bytes are reached only under the contract of `Memory::host_ptr`.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl Memory for PinnedMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.ptr)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let at = self.ptr.as_ptr() as usize;
        self.context.free(move |d| {
            // SAFETY: allocated in `alloc_host`, freed once.
            unsafe { (d.cuMemFreeHost)(at as *mut c_void) };
        });
    }
}
