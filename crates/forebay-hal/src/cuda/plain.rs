//! Copies as a program makes them that knows CUDA and nothing else, for whoever measures against them.

use std::ptr::null_mut;
use std::sync::Arc;

use super::sys::CuStream;
use super::{Context, CudaMemory};
use crate::cpu::check_range;
use crate::{Buffer, Direction, Error, Result};

/// Which calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `cudaMemcpy`: `cuMemcpyHtoD` or `cuMemcpyDtoH`.
    Blocking,
    /// `cudaMemcpyAsync` on a stream of its own, and `cudaStreamSynchronize`.
    Stream,
}

/// Copies to and from one piece of device memory by the driver's own calls.
pub struct PlainCopies {
    context: Arc<Context>,
    memory: Buffer,
    stream: CuStream,
}

// SAFETY: a stream may be used by any thread.
unsafe impl Send for PlainCopies {}

impl PlainCopies {
    /// Of this memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is not memory of a CUDA device; the driver's.
    pub fn of(memory: &Buffer) -> Result<Self> {
        let foreign = || Error::Invalid { device: "cuda".into(), what: "a buffer of another kind of device".into() };
        let m = memory.as_any().downcast_ref::<CudaMemory>().filter(|m| m.host.is_none()).ok_or_else(foreign)?;
        let (context, mut stream) = (m.context.clone(), null_mut());
        let d = context.enter()?;
        // SAFETY: `stream` is valid; no flags, as a program has it that says nothing.
        context.check("cuStreamCreate", unsafe { (d.cuStreamCreate)(&mut stream, 0) })?;
        Ok(PlainCopies { context, memory: memory.clone(), stream })
    }

    /// Copies the memory's first bytes from or to `host`, and returns when that is done as far as the calls tell.
    ///
    /// # Errors
    /// More bytes than it has; the driver's.
    ///
    /// # Safety
    /// `host` is valid for `bytes`, for writing if they go there.
    pub unsafe fn copy(&self, calls: Calls, direction: Direction, host: *mut u8, bytes: usize) -> Result<()> {
        check_range(&self.memory, 0, bytes, &self.context.name)?;
        let memory = self.memory.as_any().downcast_ref::<CudaMemory>().map_or(0, |m| m.ptr);
        let (d, host) = (self.context.enter()?, host.cast::<std::ffi::c_void>());
        let (call, code) = match (calls, direction) {
            (Calls::Blocking, Direction::ToDevice) => {
                // SAFETY: the range is the buffer's, and the host's by the contract; both outlive a call that waits.
                ("cuMemcpyHtoD", unsafe { (d.cuMemcpyHtoD)(memory, host, bytes) })
            }
            (Calls::Blocking, Direction::ToHost) => {
                // SAFETY: as above.
                ("cuMemcpyDtoH", unsafe { (d.cuMemcpyDtoH)(host, memory, bytes) })
            }
            (Calls::Stream, Direction::ToDevice) => {
                // SAFETY: as above; it is awaited below.
                ("cuMemcpyHtoDAsync", unsafe { (d.cuMemcpyHtoDAsync)(memory, host, bytes, self.stream) })
            }
            (Calls::Stream, Direction::ToHost) => {
                // SAFETY: as above; it is awaited below.
                ("cuMemcpyDtoHAsync", unsafe { (d.cuMemcpyDtoHAsync)(host, memory, bytes, self.stream) })
            }
        };
        self.context.check(call, code)?;
        if calls == Calls::Stream {
            // SAFETY: the stream exists.
            self.context.check("cuStreamSynchronize", unsafe { (d.cuStreamSynchronize)(self.stream) })?;
        }
        Ok(())
    }
}

impl Drop for PlainCopies {
    fn drop(&mut self) {
        if let Ok(d) = self.context.enter() {
            // SAFETY: created in `of`, and nothing is on it.
            unsafe { (d.cuStreamDestroy)(self.stream) };
        }
    }
}
