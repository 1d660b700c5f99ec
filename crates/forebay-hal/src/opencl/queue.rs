//! An in-order OpenCL command queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock, PoisonError};

use cl3::memory::{CL_MAP_READ, CL_MAP_WRITE_INVALIDATE_REGION};
use cl3::types::{cl_command_queue, cl_event, cl_int, cl_mem};
use cl3::{command_queue as cq, event, kernel};

use super::{ClKernel, ClMemory, Context, check};
use crate::cpu::{check_range, host_range};
use crate::{
    Arg, Buffer, Completion, Direction, Error, Fence, Geometry, HostFn, KeepAlive, Kernel, Method, Queue, Result,
};

/// An event that is released once.
struct Event(cl_event);

// SAFETY: events may be used from any thread (OpenCL 1.2, appendix A.2).
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: owned by this handle.
        let _ = unsafe { event::release_event(self.0) };
    }
}

pub(super) struct ClQueue {
    id: QueueId,
    context: Arc<Context>,
    /// Event of the last command since the last fence.
    last: Option<Event>,
    fences: VecDeque<(u64, Arc<Event>)>,
    issued: u64,
    reached: u64,
    keep: KeepAlive,
    lost: Arc<OnceLock<String>>,
}

struct QueueId(cl_command_queue);

// SAFETY: as for events.
unsafe impl Send for QueueId {}

impl ClQueue {
    pub(super) fn new(id: cl_command_queue, context: Arc<Context>) -> Self {
        ClQueue {
            id: QueueId(id),
            context,
            last: None,
            fences: VecDeque::new(),
            issued: 0,
            reached: 0,
            keep: KeepAlive::default(),
            lost: Arc::default(),
        }
    }

    fn alive(&self) -> Result<()> {
        match self.lost.get() {
            Some(why) => Err(Error::Lost { device: self.context.name.clone(), why: why.clone() }),
            None => Ok(()),
        }
    }

    fn issued(&mut self, call: &'static str, made: std::result::Result<cl_event, cl_int>) -> Result<()> {
        self.last = Some(Event(check(call, &self.context.name, made)?));
        Ok(())
    }

    fn mine<'b>(&self, b: &'b Buffer) -> Option<&'b ClMemory> {
        b.as_any().downcast_ref::<ClMemory>().filter(|m| Arc::ptr_eq(&m.context, &self.context))
    }

    fn foreign(&self, what: &str) -> Error {
        Error::Invalid { device: self.context.name.clone(), what: format!("{what} of another device") }
    }

    fn retire(&mut self, fence: u64) {
        self.reached = self.reached.max(fence);
        while self.fences.front().is_some_and(|(f, _)| *f <= fence) {
            self.fences.pop_front();
        }
        self.keep.reached(fence);
    }

    /// Maps, copies, unmaps, and waits for that.
    fn mapped(&mut self, to: Direction, id: cl_mem, offset: usize, host: *mut u8, bytes: usize) -> Result<()> {
        let (name, queue) = (&self.context.name, self.id.0);
        let flags = match to {
            // Whatever was there need not be brought to the host.
            Direction::ToDevice => CL_MAP_WRITE_INVALIDATE_REGION,
            Direction::ToHost => CL_MAP_READ,
        };
        let mut p: cl_mem = null_mut();
        // SAFETY: the range was checked by the caller; the map is blocking, so `p` is valid on return.
        let made = unsafe { cq::enqueue_map_buffer(queue, id, 1, flags, offset, bytes, &mut p, 0, null()) };
        drop(Event(check("clEnqueueMapBuffer", name, made)?));
        let mapped = p.cast::<u8>();
        // SAFETY: `bytes` are mapped at `mapped`, and valid at `host` by the caller's contract.
        unsafe {
            match to {
                Direction::ToDevice => std::ptr::copy_nonoverlapping(host, mapped, bytes),
                Direction::ToHost => std::ptr::copy_nonoverlapping(mapped, host, bytes),
            }
        }
        // SAFETY: mapped above, unmapped once.
        let made = unsafe { cq::enqueue_unmap_mem_object(queue, id, p.cast(), 0, null()) };
        let unmapped = Event(check("clEnqueueUnmapMemObject", name, made)?);
        event::wait_for_events(&[unmapped.0]).map_err(|code| self.fail(code))
    }

    /// Status of a fence's event: 0 done, positive pending, negative failed.
    fn status(&mut self, fence: Fence) -> Result<i32> {
        let Some((_, e)) = self.fences.iter().find(|(f, _)| *f >= fence.0) else { return Ok(0) };
        let s = check(
            "clGetEventInfo",
            &self.context.name,
            event::get_event_info(e.0, event::CL_EVENT_COMMAND_EXECUTION_STATUS),
        )?;
        Ok(i32::from(s))
    }

    fn fail(&self, code: i32) -> Error {
        failed(&self.lost, &self.context, code)
    }
}

/// Remembers that a command failed: the queue is of no use any more.
fn failed(lost: &OnceLock<String>, context: &Context, code: i32) -> Error {
    let why = format!("a command failed: {} ({code})", cl3::error_codes::error_text(code));
    let why = lost.get_or_init(|| why).clone();
    Error::Lost { device: context.name.clone(), why }
}

struct Pending {
    event: Arc<Event>,
    lost: Arc<OnceLock<String>>,
    context: Arc<Context>,
}

impl Completion for Pending {
    fn wait(&self) -> Result<()> {
        event::wait_for_events(&[self.event.0]).map_err(|code| failed(&self.lost, &self.context, code))
    }
}

impl Queue for ClQueue {
    fn launch(&mut self, k: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
        self.alive()?;
        let device = self.context.name.clone();
        let ours = k
            .imp
            .as_any()
            .downcast_ref::<ClKernel>()
            .filter(|c| Arc::ptr_eq(&c.program.context, &self.context))
            .ok_or_else(|| self.foreign("kernel"))?;
        if ours.args as usize != args.len() {
            let what = format!("call of kernel {} with {} arguments; it takes {}", k.name, args.len(), ours.args);
            return Err(Error::Invalid { device, what });
        }
        let group = geometry.group_or_default();
        let mut global = [0usize; 3];
        for d in 0..3 {
            global[d] = geometry.items[d].max(1).next_multiple_of(group[d]);
        }
        let id = ours.id.lock().unwrap_or_else(PoisonError::into_inner);
        for (i, a) in args.iter().enumerate() {
            let i = i as u32;
            let set = match a {
                Arg::Buffer(b) => {
                    let m = self.mine(b).ok_or_else(|| self.foreign("buffer"))?;
                    // SAFETY: the driver copies the handle; the buffer lives until the command ends (`keep`).
                    unsafe { kernel::set_kernel_arg(id.0, i, size_of_val(&m.id), (&raw const m.id).cast()) }
                }
                scalar => {
                    let (bytes, n) = scalar.scalar_bytes().unwrap_or_default();
                    // SAFETY: `n` bytes are valid and copied by the driver, which checks the size.
                    unsafe { kernel::set_kernel_arg(id.0, i, n, bytes.as_ptr().cast()) }
                }
            };
            if let Err(code) = set {
                let why = cl3::error_codes::error_text(code);
                return Err(Error::Invalid { device, what: format!("argument {i} of kernel {}: {why}", k.name) });
            }
        }
        // SAFETY: arguments are set; sizes are arrays of 3.
        let made = unsafe {
            cq::enqueue_nd_range_kernel(self.id.0, id.0, 3, null(), global.as_ptr(), group.as_ptr(), 0, null())
        };
        drop(id);
        self.keep.launch(k, args);
        self.issued("clEnqueueNDRangeKernel", made)
    }

    fn copy(&mut self, src: &Buffer, src_offset: usize, dst: &Buffer, dst_offset: usize, bytes: usize) -> Result<()> {
        self.alive()?;
        let device = self.context.name.clone();
        check_range(src, src_offset, bytes, &device)?;
        check_range(dst, dst_offset, bytes, &device)?;
        if bytes == 0 {
            return Ok(());
        }
        match (self.mine(src), self.mine(dst)) {
            (Some(s), Some(d)) => {
                // SAFETY: ranges checked; both buffers live until the command ends (`keep`).
                let made =
                    unsafe { cq::enqueue_copy_buffer(self.id.0, s.id, d.id, src_offset, dst_offset, bytes, 0, null()) };
                self.keep.buffer(src);
                self.keep.buffer(dst);
                self.issued("clEnqueueCopyBuffer", made)
            }
            (Some(_), None) => {
                let p = host_range(dst, dst_offset, bytes, &device)?;
                self.keep.buffer(dst);
                // SAFETY: the host range stays valid for as long as `dst` is kept.
                unsafe { self.transfer(Method::Engine, Direction::ToHost, src, src_offset, p, bytes) }
            }
            (None, Some(_)) => {
                let p = host_range(src, src_offset, bytes, &device)?;
                self.keep.buffer(src);
                // SAFETY: as above.
                unsafe { self.transfer(Method::Engine, Direction::ToDevice, dst, dst_offset, p, bytes) }
            }
            (None, None) => Err(self.foreign("buffer")),
        }
    }

    unsafe fn transfer(
        &mut self,
        method: Method,
        direction: Direction,
        device: &Buffer,
        offset: usize,
        host: *mut u8,
        bytes: usize,
    ) -> Result<()> {
        self.alive()?;
        check_range(device, offset, bytes, &self.context.name)?;
        let id = self.mine(device).ok_or_else(|| self.foreign("buffer"))?.id;
        if bytes == 0 {
            return Ok(());
        }
        let (queue, host) = (self.id.0, host.cast());
        match (method, direction) {
            (Method::Engine, Direction::ToDevice) => {
                self.keep.buffer(device);
                // SAFETY: range checked; the host range is valid by the contract, the buffer is kept.
                let made = unsafe { cq::enqueue_write_buffer(queue, id, 0, offset, bytes, host, 0, null()) };
                self.issued("clEnqueueWriteBuffer", made)
            }
            (Method::Engine, Direction::ToHost) => {
                self.keep.buffer(device);
                // SAFETY: as above.
                let made = unsafe { cq::enqueue_read_buffer(queue, id, 0, offset, bytes, host, 0, null()) };
                self.issued("clEnqueueReadBuffer", made)
            }
            (Method::Mapped, _) => self.mapped(direction, id, offset, host.cast(), bytes),
            (Method::Kernel, _) => {
                Err(Error::Unsupported { device: self.context.name.clone(), what: "copies by kernel".into() })
            }
        }
    }

    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        self.alive()?;
        check_range(dst, offset, bytes, &self.context.name)?;
        if bytes == 0 {
            return Ok(());
        }
        let m = self.mine(dst).ok_or_else(|| self.foreign("buffer"))?;
        // SAFETY: range checked; the pattern is copied by the driver; the buffer is kept.
        let made =
            unsafe { cq::enqueue_fill_buffer(self.id.0, m.id, (&raw const value).cast(), 1, offset, bytes, 0, null()) };
        self.keep.buffer(dst);
        self.issued("clEnqueueFillBuffer", made)
    }

    fn host_fn(&mut self, f: HostFn) -> Result<()> {
        self.alive()?;
        extern "C" fn call(_: cl_event, _: cl_int, data: *mut c_void) {
            // SAFETY: the pointer was made by `Box::into_raw` below and the driver calls back once.
            let f = unsafe { Box::from_raw(data.cast::<HostFn>()) };
            // A panic must not unwind into the driver.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(*f));
        }
        // SAFETY: an empty wait list means "after everything before".
        let made = unsafe { cq::enqueue_marker_with_wait_list(self.id.0, 0, null()) };
        self.issued("clEnqueueMarkerWithWaitList", made)?;
        let Some(last) = &self.last else { return Ok(()) };
        let data: *mut c_void = Box::into_raw(Box::new(f)).cast();
        let set = event::set_event_callback(last.0, event::CL_COMPLETE, call, data);
        if let Err(code) = set {
            // SAFETY: the driver refused the pointer, so it is still ours.
            drop(unsafe { Box::from_raw(data.cast::<HostFn>()) });
            return check("clSetEventCallback", &self.context.name, Err(code));
        }
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence> {
        self.alive()?;
        if let Some(e) = self.last.take() {
            self.issued += 1;
            self.fences.push_back((self.issued, Arc::new(e)));
            self.keep.seal(self.issued);
            check("clFlush", &self.context.name, cq::flush(self.id.0))?;
        }
        Ok(Fence(self.issued))
    }

    fn done(&mut self, fence: Fence) -> Result<bool> {
        if fence.0 <= self.reached {
            return Ok(true);
        }
        match self.status(fence)? {
            0 => {
                self.retire(fence.0);
                Ok(true)
            }
            s if s > 0 => Ok(false),
            s => Err(self.fail(s)),
        }
    }

    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>> {
        if fence.0 > self.issued {
            let what = format!("fence {} that was never issued", fence.0);
            return Err(Error::Invalid { device: self.context.name.clone(), what });
        }
        if self.done(fence)? {
            return Ok(None);
        }
        let event = self.fences.iter().find(|(f, _)| *f >= fence.0).map(|(_, e)| e.clone());
        let pending = |event| Pending { event, lost: self.lost.clone(), context: self.context.clone() };
        Ok(event.map(|e| Arc::new(pending(e)) as Arc<dyn Completion>))
    }
}

impl Drop for ClQueue {
    fn drop(&mut self) {
        // Host memory named in commands must not go before they have ended.
        let _ = cq::finish(self.id.0);
        self.fences.clear();
        self.last = None;
        // SAFETY: created in `queue`, released once, after its events.
        let _ = unsafe { cq::release_command_queue(std::mem::replace(&mut self.id.0, null_mut())) };
    }
}
