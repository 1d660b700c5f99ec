//! An OpenCL command queue: in order for whoever uses it ([`super::order`] has the rules).

use std::collections::VecDeque;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock, PoisonError};

use cl3::memory::{CL_MAP_READ, CL_MAP_WRITE_INVALIDATE_REGION};
use cl3::types::{cl_command_queue, cl_event, cl_int, cl_mem};
use cl3::{command_queue as cq, event, kernel};

use super::memory::ClMemory;
use super::order::{Access, Event, Order};
use super::{ClKernel, Context, check};
use crate::cpu::{check_range, host_range};
use crate::queue::HostRange;
use crate::{
    Arg, Buffer, Completion, Direction, Error, Fence, Geometry, HostFn, KeepAlive, Kernel, Memory, Method, Queue,
    Result,
};

pub(super) struct ClQueue {
    id: QueueId,
    context: Arc<Context>,
    order: Order,
    /// What must have ended for a fence, beside the fences before it.
    fences: VecDeque<(u64, Vec<Arc<Event>>)>,
    keep: KeepAlive,
    lost: Arc<OnceLock<String>>,
}

struct QueueId(cl_command_queue);

// SAFETY: as for events.
unsafe impl Send for QueueId {}

impl ClQueue {
    /// `free`: the driver keeps no order of its own in it.
    pub(super) fn new(id: cl_command_queue, free: bool, context: Arc<Context>) -> Self {
        ClQueue {
            id: QueueId(id),
            order: Order::new(free),
            context,
            fences: VecDeque::new(),
            keep: KeepAlive::default(),
            lost: Arc::default(),
        }
    }

    fn alive(&self) -> Result<()> {
        self.context.is_ours()?;
        match self.lost.get() {
            Some(why) => Err(Error::Lost { device: self.context.name.clone(), why: why.clone() }),
            None => Ok(()),
        }
    }

    /// Gives the driver a command that does this with memory: `enqueue` gets the queue and what it must wait for.
    fn issue(
        &mut self,
        call: &'static str,
        accesses: impl Iterator<Item = Access>,
        enqueue: impl FnOnce(cl_command_queue, &[cl_event]) -> std::result::Result<cl_event, cl_int>,
    ) -> Result<()> {
        if self.order.is_full() {
            self.barrier()?;
        }
        let made = enqueue(self.id.0, self.order.before(accesses));
        self.order.issued(check(call, &self.context.name, made)?);
        Ok(())
    }

    /// A marker behind everything so far.
    fn marker(&mut self) -> Result<cl_event> {
        // SAFETY: an empty list means all commands before it.
        let made = unsafe { cq::enqueue_marker_with_wait_list(self.id.0, 0, null()) };
        check("clEnqueueMarkerWithWaitList", &self.context.name, made)
    }

    fn barrier(&mut self) -> Result<()> {
        let made = self.marker()?;
        self.order.issued_all(made);
        Ok(())
    }

    fn mine<'b>(&self, b: &'b Buffer) -> Option<&'b ClMemory> {
        mine(b, &self.context)
    }

    fn foreign(&self, what: &str) -> Error {
        Error::Invalid { device: self.context.name.clone(), what: format!("{what} of another device") }
    }

    fn retire(&mut self, fence: u64) {
        self.order.retire(fence);
        while self.fences.front().is_some_and(|(f, _)| *f <= fence) {
            self.fences.pop_front();
        }
        self.keep.reached(fence);
    }

    /// Maps, copies, unmaps, and waits for that.
    fn mapped(
        &mut self,
        to: Direction,
        (id, accesses): (cl_mem, [Access; 2]),
        offset: usize,
        host: *mut u8,
        bytes: usize,
    ) -> Result<()> {
        let queue = self.id.0;
        let flags = match to {
            // Whatever was there need not be brought to the host.
            Direction::ToDevice => CL_MAP_WRITE_INVALIDATE_REGION,
            Direction::ToHost => CL_MAP_READ,
        };
        let mut p: cl_mem = null_mut();
        self.issue("clEnqueueMapBuffer", accesses.into_iter(), |queue, list| {
            let (n, list) = wait_list(list);
            // SAFETY: the range was checked by the caller; the map is blocking, so `p` is valid on return.
            unsafe { cq::enqueue_map_buffer(queue, id, 1, flags, offset, bytes, &mut p, n, list) }
        })?;
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
        let unmapped = check("clEnqueueUnmapMemObject", &self.context.name, made)?;
        let ended = event::wait_for_events(&[unmapped]);
        // SAFETY: the event is this function's.
        let _ = unsafe { event::release_event(unmapped) };
        ended.map_err(|code| self.fail(code))
    }

    /// Copies memory that the processor reaches as it is, once no command uses it any more.
    ///
    /// # Safety
    /// `bytes` are valid at both, and do not overlap.
    unsafe fn direct(
        &mut self,
        to: Direction,
        accesses: [Access; 2],
        device: *mut u8,
        host: *mut u8,
        bytes: usize,
    ) -> Result<()> {
        let before = self.order.before_the_processor(accesses.into_iter());
        if !before.is_empty() {
            event::wait_for_events(before).map_err(|code| failed(&self.lost, &self.context, code))?;
        }
        // SAFETY: by the contract.
        unsafe {
            match to {
                Direction::ToDevice => std::ptr::copy_nonoverlapping(host, device, bytes),
                Direction::ToHost => std::ptr::copy_nonoverlapping(device, host, bytes),
            }
        }
        Ok(())
    }

    /// Whether a fence has been reached, or which status a command before it failed with.
    fn is_reached(&mut self, fence: u64) -> Result<bool> {
        for (_, events) in self.fences.iter_mut().take_while(|(f, _)| *f <= fence) {
            while let Some(e) = events.last() {
                let status = event::get_event_info(e.id, event::CL_EVENT_COMMAND_EXECUTION_STATUS).map(i32::from);
                match check("clGetEventInfo", &self.context.name, status)? {
                    0 => drop(events.pop()),
                    s if s > 0 => return Ok(false),
                    s => return Err(failed(&self.lost, &self.context, s)),
                }
            }
        }
        Ok(true)
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

/// Length and address of a wait list; none may have one.
fn wait_list(list: &[cl_event]) -> (u32, *const cl_event) {
    if list.is_empty() { (0, null()) } else { (list.len() as u32, list.as_ptr()) }
}

fn mine<'b>(b: &'b Buffer, context: &Arc<Context>) -> Option<&'b ClMemory> {
    b.as_any().downcast_ref::<ClMemory>().filter(|m| m.is_of(context))
}

/// What a command does with a buffer. Memory of the host has one name, whoever uses it.
fn accessed(m: &ClMemory, written: bool) -> Access {
    match m.host() {
        Some(p) => Access::Host(HostRange { start: p.as_ptr() as usize, bytes: m.len(), written }),
        None => Access::Buffer { id: m.id, written },
    }
}

fn release(event: cl_event) {
    // SAFETY: called once for each handle that this module has.
    let _ = unsafe { event::release_event(event) };
}

/// A function of the host, what it comes behind, and what says that it has returned.
struct Called {
    f: HostFn,
    before: cl_event,
    returned: cl_event,
}

// SAFETY: events may be used by any thread, and these are this value's.
unsafe impl Send for Called {}

impl Called {
    /// Not a callback of the driver's: that comes on the thread that asks for it if there is nothing to wait for, and whoever
    /// waits in it keeps a thread of the driver's.
    fn run(self) {
        let status = match event::wait_for_events(&[self.before]) {
            Ok(()) => {
                // A panic is nobody's.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(self.f));
                event::CL_COMPLETE
            }
            Err(code) => code.min(-1),
        };
        let _ = event::set_user_event_status(self.returned, status);
        release(self.before);
        release(self.returned);
    }
}

struct Pending {
    events: Vec<Arc<Event>>,
    lost: Arc<OnceLock<String>>,
    context: Arc<Context>,
}

impl Completion for Pending {
    fn wait(&self) -> Result<()> {
        self.context.is_ours()?;
        let list: Vec<cl_event> = self.events.iter().map(|e| e.id).collect();
        event::wait_for_events(&list).map_err(|code| failed(&self.lost, &self.context, code))
    }
}

impl Queue for ClQueue {
    fn launch(&mut self, k: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
        self.alive()?;
        let refused = |what| Error::Invalid { device: self.context.name.clone(), what };
        let ours = k
            .imp
            .as_any()
            .downcast_ref::<ClKernel>()
            .filter(|c| Arc::ptr_eq(&c.program.context, &self.context))
            .ok_or_else(|| self.foreign("kernel"))?;
        if ours.args as usize != args.len() {
            let what = format!("call of kernel {} with {} arguments; it takes {}", k.name, args.len(), ours.args);
            return Err(refused(what));
        }
        let group = match ours.group {
            Some(group) if geometry.group[0] == 0 => group,
            _ => geometry.group_within(ours.most_items),
        };
        let items = group.iter().fold(1usize, |n, g| n.saturating_mul(*g));
        let takes = match ours.group {
            Some(only) if only != group => Some(format!("{only:?} only")),
            None if items > ours.most_items => Some(format!("{} items at most", ours.most_items)),
            _ => None,
        };
        if let Some(takes) = takes {
            let what =
                format!("groups of {group:?} for kernel {}, which takes {takes} (0 lets the device choose)", k.name);
            return Err(refused(what));
        }
        let mut global = [0usize; 3];
        for d in 0..3 {
            global[d] = geometry.items[d].max(1).checked_next_multiple_of(group[d]).ok_or_else(|| {
                let what = format!("{} items for kernel {}: more than can be counted", geometry.items[d], k.name);
                refused(what)
            })?;
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
                return Err(refused(format!("argument {i} of kernel {}: {why}", k.name)));
            }
        }
        let context = self.context.clone();
        let accesses = args.iter().enumerate().filter_map(|(i, a)| match a {
            Arg::Buffer(b) => Some(accessed(mine(b, &context)?, ours.reads >> i.min(63) & 1 == 0)),
            _ => None,
        });
        self.issue("clEnqueueNDRangeKernel", accesses, |queue, list| {
            let (n, list) = wait_list(list);
            // SAFETY: arguments are set; sizes are arrays of 3.
            unsafe { cq::enqueue_nd_range_kernel(queue, id.0, 3, null(), global.as_ptr(), group.as_ptr(), n, list) }
        })?;
        drop(id);
        self.keep.launch(k, args);
        Ok(())
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
                let (from, to) = (s.id, d.id);
                let accesses = [accessed(s, false), accessed(d, true)];
                self.issue("clEnqueueCopyBuffer", accesses.into_iter(), |queue, list| {
                    let (n, list) = wait_list(list);
                    // SAFETY: ranges checked; both buffers live until the command ends (`keep`).
                    unsafe { cq::enqueue_copy_buffer(queue, from, to, src_offset, dst_offset, bytes, n, list) }
                })?;
                self.keep.buffer(src);
                self.keep.buffer(dst);
                Ok(())
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
        let m = self.mine(device).ok_or_else(|| self.foreign("buffer"))?;
        if bytes == 0 {
            return Ok(());
        }
        let (id, direct, to_device) = (m.id, m.direct(), direction == Direction::ToDevice);
        let range = HostRange { start: host as usize, bytes, written: !to_device };
        let accesses = [accessed(m, to_device), Access::Host(range)];
        match (method, direction) {
            (Method::Engine, Direction::ToDevice) => {
                self.issue("clEnqueueWriteBuffer", accesses.into_iter(), |queue, list| {
                    let (n, list) = wait_list(list);
                    // SAFETY: range checked; the host range is valid by the contract, the buffer is kept.
                    unsafe { cq::enqueue_write_buffer(queue, id, 0, offset, bytes, host.cast(), n, list) }
                })?;
                self.keep.buffer(device);
                Ok(())
            }
            (Method::Engine, Direction::ToHost) => {
                self.issue("clEnqueueReadBuffer", accesses.into_iter(), |queue, list| {
                    let (n, list) = wait_list(list);
                    // SAFETY: as above.
                    unsafe { cq::enqueue_read_buffer(queue, id, 0, offset, bytes, host.cast(), n, list) }
                })?;
                self.keep.buffer(device);
                Ok(())
            }
            (Method::Mapped, _) => match direct {
                // SAFETY: range checked; the host's is valid by the contract, and nobody has a pointer to the device's.
                Some(p) => unsafe { self.direct(direction, accesses, p.as_ptr().add(offset), host, bytes) },
                None => self.mapped(direction, (id, accesses), offset, host, bytes),
            },
            (Method::Kernel, _) => {
                Err(Error::Unsupported { device: self.context.name.clone(), what: "copies by kernel".into() })
            }
        }
    }

    unsafe fn post(&mut self, device: &Buffer, offset: usize, host: *const u8, bytes: usize) -> Result<()> {
        let host = host.cast_mut();
        if self.mine(device).is_some_and(|m| m.direct().is_some()) {
            // SAFETY: by the contract; the bytes are only read, and have arrived when it returns.
            return unsafe { self.transfer(Method::Mapped, Direction::ToDevice, device, offset, host, bytes) };
        }
        // SAFETY: by the contract; the bytes are only read, and awaited here.
        unsafe { self.transfer(Method::Engine, Direction::ToDevice, device, offset, host, bytes)? };
        let fence = self.fence()?;
        self.wait(fence)
    }

    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        self.alive()?;
        check_range(dst, offset, bytes, &self.context.name)?;
        if bytes == 0 {
            return Ok(());
        }
        let m = self.mine(dst).ok_or_else(|| self.foreign("buffer"))?;
        let (id, accesses) = (m.id, [accessed(m, true)]);
        self.issue("clEnqueueFillBuffer", accesses.into_iter(), |queue, list| {
            let (n, list) = wait_list(list);
            // SAFETY: range checked; the pattern is copied by the driver; the buffer is kept.
            unsafe { cq::enqueue_fill_buffer(queue, id, (&raw const value).cast(), 1, offset, bytes, n, list) }
        })?;
        self.keep.buffer(dst);
        Ok(())
    }

    fn host_fn(&mut self, f: HostFn) -> Result<()> {
        self.alive()?;
        let name = self.context.name.clone();
        let before = self.marker()?;
        // Reached when the function has returned; everything else waits for it (rule 4).
        let made = event::create_user_event(self.context.id);
        let returned = check("clCreateUserEvent", &name, made).inspect_err(|_| release(before))?;
        // SAFETY: the event is ours; this handle is the thread's.
        let _ = unsafe { event::retain_event(returned) };
        let called = Called { f, before, returned };
        let thread = std::thread::Builder::new().name("forebay-host-fn".into()).spawn(move || called.run());
        if let Err(e) = thread {
            // The function is gone with the thread that there is not; the events are not.
            [before, returned, returned].into_iter().for_each(release);
            return Err(Error::Unsupported { device: name, what: format!("another thread: {e}") });
        }
        // SAFETY: one event, which is ours.
        let made = unsafe { cq::enqueue_barrier_with_wait_list(self.id.0, 1, &returned) };
        release(returned);
        self.order.issued_all(check("clEnqueueBarrierWithWaitList", &name, made)?);
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence> {
        self.alive()?;
        if self.order.is_dirty() {
            let (fence, events) = self.order.fence();
            self.fences.push_back((fence, events));
            self.keep.seal(fence);
            check("clFlush", &self.context.name, cq::flush(self.id.0))?;
        }
        Ok(Fence(self.order.fenced()))
    }

    fn done(&mut self, fence: Fence) -> Result<bool> {
        if fence.0 <= self.order.reached() {
            return Ok(true);
        }
        self.context.is_ours()?;
        let reached = self.is_reached(fence.0)?;
        if reached {
            self.retire(fence.0);
        }
        Ok(reached)
    }

    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>> {
        if fence.0 > self.order.fenced() {
            let what = format!("fence {} that was never issued", fence.0);
            return Err(Error::Invalid { device: self.context.name.clone(), what });
        }
        if self.done(fence)? {
            return Ok(None);
        }
        let before = self.fences.iter().take_while(|(f, _)| *f <= fence.0);
        let events = before.flat_map(|(_, e)| e).cloned().collect();
        Ok(Some(Arc::new(Pending { events, lost: self.lost.clone(), context: self.context.clone() })))
    }
}

impl Drop for ClQueue {
    fn drop(&mut self) {
        if !super::is_home() {
            return;
        }
        // Host memory named in commands must not go before they have ended.
        let _ = cq::finish(self.id.0);
        self.fences.clear();
        self.order = Order::new(false);
        // SAFETY: created in `queue`, released once, after its events.
        let _ = unsafe { cq::release_command_queue(std::mem::replace(&mut self.id.0, null_mut())) };
    }
}
