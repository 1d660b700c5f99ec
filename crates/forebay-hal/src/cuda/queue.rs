//! CUDA streams as an in-order queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::graph::Recording;
use super::lanes::{Lane, Lanes, Reached};
use super::part::Part;
use super::sys::{CuDevicePtr, CuFunction, SUCCESS};
use super::{Context, CopyKernel, CudaKernel, CudaMemory};
use crate::cpu::{check_range, host_range};
use crate::queue::HostRange;
use crate::{
    Arg, Buffer, Completion, Direction, Error, Fence, Geometry, HostFn, Issued, KeepAlive, Kernel, Listed, Method,
    Queue, Recorded, Result,
};

/// Most arguments of a kernel.
const MAX_ARGS: usize = 48;
/// Items of the copying kernel: enough loads in flight for any bus, few enough to leave most SMs alone.
const COPY_ITEMS: usize = 16 << 10;

/// What goes on streams of its own.
#[derive(Clone, Copy)]
pub(super) struct Beside {
    /// Copies from this size on.
    pub(super) copies: usize,
    /// Every other list of launches.
    pub(super) lists: bool,
}

pub(super) struct CudaQueue {
    context: Arc<Context>,
    lanes: Lanes,
    beside: Beside,
    /// The next list goes beside the one before it.
    side: bool,
    fences: VecDeque<(u64, Reached)>,
    issued: u64,
    reached: u64,
    keep: KeepAlive,
    copy: CopyKernel,
}

fn mine<'b>(context: &Arc<Context>, b: &'b Buffer) -> Option<&'b CudaMemory> {
    b.as_any().downcast_ref::<CudaMemory>().filter(|m| Arc::ptr_eq(&m.context, context))
}

/// Whether it is device memory of the same GPU.
pub(super) fn is_mine(context: &Arc<Context>, b: &Buffer) -> bool {
    mine(context, b).is_some_and(|m| m.host.is_none())
}

/// The device memory of another CUDA device.
pub(super) fn peer<'b>(context: &Arc<Context>, b: &'b Buffer) -> Option<&'b CudaMemory> {
    let other = |m: &&CudaMemory| !Arc::ptr_eq(&m.context, context) && m.host.is_none();
    b.as_any().downcast_ref::<CudaMemory>().filter(other)
}

fn foreign(context: &Context, what: &str) -> Error {
    Error::Invalid { device: context.name.clone(), what: format!("{what} of another device") }
}

/// A launch in the driver's terms.
#[derive(Clone, PartialEq)]
pub(super) struct Call {
    pub(super) function: CuFunction,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    count: usize,
    /// The arguments' bits, widened.
    values: [u64; MAX_ARGS],
}

impl Call {
    fn new(context: &Arc<Context>, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<Self> {
        let ours = kernel.imp.as_any().downcast_ref::<CudaKernel>().filter(|k| Arc::ptr_eq(&k.context, context));
        let ours = ours.ok_or_else(|| foreign(context, "kernel"))?;
        if args.len() > MAX_ARGS {
            let what = format!("call of kernel {} with {} arguments; the limit is {MAX_ARGS}", kernel.name, args.len());
            return Err(Error::Invalid { device: context.name.clone(), what });
        }
        let mut values = [0u64; MAX_ARGS];
        for (v, a) in values.iter_mut().zip(args) {
            *v = match a {
                Arg::Buffer(b) => mine(context, b).ok_or_else(|| foreign(context, "buffer"))?.ptr,
                scalar => u64::from_ne_bytes(scalar.scalar_bytes().unwrap_or_default().0),
            };
        }
        let block = geometry.group_or_default();
        let blocks = |i: usize| geometry.items[i].max(1).div_ceil(block[i]).min(u32::MAX as usize) as u32;
        Ok(Call {
            function: ours.function,
            grid: [blocks(0), blocks(1), blocks(2)],
            block: block.map(|b| b.min(u32::MAX as usize) as u32),
            shared_bytes: geometry.shared_bytes,
            count: args.len(),
            values,
        })
    }

    pub(super) fn values(&self) -> &[u64] {
        &self.values[..self.count]
    }

    /// Pointers to the arguments, as the driver wants them; valid as long as `self` stays where it is.
    pub(super) fn params(&mut self) -> [*mut c_void; MAX_ARGS] {
        let mut out = [null_mut(); MAX_ARGS];
        for (p, v) in out.iter_mut().zip(&mut self.values) {
            *p = std::ptr::from_mut(v).cast();
        }
        out
    }
}

/// The addresses of the buffers among the arguments.
fn buffers<'a>(args: &'a [Arg<'_>], call: &'a Call) -> impl Iterator<Item = CuDevicePtr> + 'a {
    args.iter().zip(call.values()).filter_map(|(a, v)| matches!(a, Arg::Buffer(_)).then_some(*v))
}

/// The host memory among the arguments.
fn shared<'a>(args: &'a [Arg<'_>]) -> impl Iterator<Item = HostRange> + 'a {
    args.iter().filter_map(|a| match a {
        Arg::Buffer(b) => {
            let m = b.as_any().downcast_ref::<CudaMemory>().filter(|m| m.host.is_some())?;
            Some(HostRange { start: m.ptr as usize, bytes: m.len, written: true })
        }
        _ => None,
    })
}

impl CudaQueue {
    pub(super) fn new(
        context: Arc<Context>,
        part: Option<Arc<Part>>,
        copy: CopyKernel,
        beside: Beside,
    ) -> Result<Self> {
        let lanes = Lanes::new(context.clone(), part)?;
        let (fences, keep) = (VecDeque::new(), KeepAlive::default());
        Ok(CudaQueue { context, lanes, beside, side: false, fences, issued: 0, reached: 0, keep, copy })
    }

    /// Launches on the main stream, with host memory that the arguments do not show.
    fn launch_over(
        &mut self,
        kernel: &Kernel,
        geometry: &Geometry,
        args: &[Arg<'_>],
        buffer: Option<CuDevicePtr>,
        host: Option<HostRange>,
    ) -> Result<()> {
        let d = self.context.enter()?;
        let mut call = Call::new(&self.context, kernel, geometry, args)?;
        let (function, [gx, gy, gz], [bx, by, bz]) = (call.function, call.grid, call.block);
        let ranges = || host.into_iter().chain(shared(args));
        let memory = buffer.into_iter().chain(buffers(args, &call));
        let stream = self.lanes.before(Lane::Main, memory, ranges())?;
        let mut params = call.params();
        // SAFETY: `params` points at one value per argument; the driver reads them before it returns.
        let code = unsafe {
            let shared = geometry.shared_bytes;
            (d.cuLaunchKernel)(function, gx, gy, gz, bx, by, bz, shared, stream, params.as_mut_ptr(), null_mut())
        };
        self.context.check("cuLaunchKernel", code)?;
        let memory = buffer.into_iter().chain(buffers(args, &call));
        self.lanes.issued(Lane::Main, memory, ranges());
        self.keep.launch(kernel, args);
        Ok(())
    }

    fn mine<'b>(&self, b: &'b Buffer) -> Option<&'b CudaMemory> {
        mine(&self.context, b)
    }

    fn foreign(&self, what: &str) -> Error {
        foreign(&self.context, what)
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { device: self.context.name.clone(), what: what.into() }
    }

    /// Waits for everything so far, without a fence: those are numbered by who asks for them ([`Queue::fence`]).
    fn wait_for_all(&mut self) -> Result<()> {
        let all = self.lanes.fence()?;
        all.completion().wait()?;
        self.lanes.retire(all);
        self.retire(self.issued);
        Ok(())
    }

    fn retire(&mut self, fence: u64) {
        self.reached = self.reached.max(fence);
        while self.fences.front().is_some_and(|(f, _)| *f <= fence) {
            if let Some((_, r)) = self.fences.pop_front() {
                self.lanes.retire(r);
            }
        }
        self.keep.reached(fence);
    }
}

impl Queue for CudaQueue {
    fn launch(&mut self, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
        self.launch_over(kernel, geometry, args, None, None)
    }

    fn copy(&mut self, src: &Buffer, src_offset: usize, dst: &Buffer, dst_offset: usize, bytes: usize) -> Result<()> {
        let d = self.context.enter()?;
        let device = self.context.name.clone();
        check_range(src, src_offset, bytes, &device)?;
        check_range(dst, dst_offset, bytes, &device)?;
        if bytes == 0 {
            return Ok(());
        }
        match (self.mine(src), self.mine(dst)) {
            (Some(s), Some(t)) => {
                let (from, to) = (s.ptr + src_offset as u64, t.ptr + dst_offset as u64);
                let used = [s.ptr, t.ptr];
                let stream = self.lanes.before(Lane::Main, used.into_iter(), None.into_iter())?;
                // SAFETY: ranges checked; both buffers are kept until the command has ended.
                let code = unsafe { (d.cuMemcpyDtoDAsync)(to, from, bytes, stream) };
                self.context.check("cuMemcpyDtoDAsync", code)?;
                self.lanes.issued(Lane::Main, used.into_iter(), None.into_iter());
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
            (None, Some(t)) if peer(&self.context, src).is_some() => {
                let Some(s) = peer(&self.context, src) else { return Err(self.foreign("buffer")) };
                let (from, to) = (s.ptr + src_offset as u64, t.ptr + dst_offset as u64);
                let lane = if bytes < self.beside.copies { Lane::Main } else { Lane::Up };
                let stream = self.lanes.before(lane, std::iter::once(t.ptr), None.into_iter())?;
                let (Some(own), Some(theirs)) = (self.context.handle(), s.context.handle()) else {
                    return Err(self.foreign("buffer"));
                };
                // SAFETY: ranges checked; both buffers are kept until the command has ended.
                let code = unsafe { (d.cuMemcpyPeerAsync)(to, own, from, theirs, bytes, stream) };
                self.context.check("cuMemcpyPeerAsync", code)?;
                self.lanes.issued(lane, std::iter::once(t.ptr), None.into_iter());
                self.keep.buffer(src);
                self.keep.buffer(dst);
                Ok(())
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
        self.context.alive()?;
        check_range(device, offset, bytes, &self.context.name)?;
        let memory = self.mine(device).ok_or_else(|| self.foreign("buffer"))?.ptr;
        let there = memory + offset as u64;
        if bytes == 0 {
            return Ok(());
        }
        let range = HostRange { start: host as usize, bytes, written: direction == Direction::ToHost };
        match (method, direction) {
            (Method::Engine, _) => {
                let lane = match direction {
                    _ if bytes < self.beside.copies => Lane::Main,
                    Direction::ToDevice => Lane::Up,
                    Direction::ToHost => Lane::Down,
                };
                let d = self.context.enter()?;
                let stream = self.lanes.before(lane, std::iter::once(memory), Some(range).into_iter())?;
                let (call, code) = match direction {
                    Direction::ToDevice => {
                        // SAFETY: range checked; the buffer is kept, and the host range valid, until the command has ended.
                        ("cuMemcpyHtoDAsync", unsafe { (d.cuMemcpyHtoDAsync)(there, host.cast(), bytes, stream) })
                    }
                    Direction::ToHost => {
                        // SAFETY: as above.
                        ("cuMemcpyDtoHAsync", unsafe { (d.cuMemcpyDtoHAsync)(host.cast(), there, bytes, stream) })
                    }
                };
                self.context.check(call, code)?;
                self.lanes.issued(lane, std::iter::once(memory), Some(range).into_iter());
                self.keep.buffer(device);
                Ok(())
            }
            (Method::Kernel, _) => {
                self.context.enter()?;
                let copy = self.copy.get().cloned().flatten();
                let copy = copy.ok_or_else(|| self.unsupported("copies by kernel without a compiler"))?;
                // Page-locked memory has one address for both sides.
                let (from, to) =
                    if direction == Direction::ToDevice { (host as u64, there) } else { (there, host as u64) };
                let args = [Arg::U64(to), Arg::U64(from), Arg::U64(bytes as u64)];
                self.keep.buffer(device);
                let geometry = Geometry::linear((bytes / 64).clamp(1, COPY_ITEMS));
                self.launch_over(&copy, &geometry, &args, Some(memory), Some(range))
            }
            (Method::Mapped, _) => {
                let host_side = self.mine(device).and_then(|m| m.part.as_ref()?.host());
                let mapped = host_side.ok_or_else(|| self.unsupported("mapping this memory into the processor"))?;
                // What is before it in the queue comes first. With nothing there the driver is not asked at all: its calls
                // would be a part of a small copy's time.
                if self.lanes.is_dirty() || self.reached < self.issued {
                    self.wait_for_all()?;
                }
                // SAFETY: the range was checked and lies in the window; nothing of this queue uses it any more.
                let sure = unsafe { super::window::copy(direction, mapped.add(offset), host, bytes) };
                if sure || self.mine(device).and_then(|m| m.part.as_ref()).is_some_and(|p| p.is_present()) {
                    return Ok(());
                }
                Err(self.context.lose("its memory answers every read with ones: it has left the bus".into()))
            }
        }
    }

    unsafe fn post(&mut self, device: &Buffer, offset: usize, host: *const u8, bytes: usize) -> Result<()> {
        self.context.alive()?;
        check_range(device, offset, bytes, &self.context.name)?;
        if let Some(mapped) = self.mine(device).and_then(|m| m.part.as_ref()?.host()) {
            // SAFETY: the range was checked and lies in the window; the contract says that nothing else uses it.
            unsafe {
                use crate::cpu::streaming::{Width, store};
                store(Width::widest(), host, mapped.as_ptr().add(offset), bytes);
            }
            return Ok(());
        }
        // SAFETY: by the contract; awaited here.
        unsafe { self.transfer(Method::Engine, Direction::ToDevice, device, offset, host.cast_mut(), bytes)? };
        self.wait_for_all()
    }

    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let d = self.context.enter()?;
        check_range(dst, offset, bytes, &self.context.name)?;
        let p = self.mine(dst).ok_or_else(|| self.foreign("buffer"))?.ptr;
        let stream = self.lanes.before(Lane::Main, std::iter::once(p), None.into_iter())?;
        // SAFETY: range checked; the buffer is kept.
        let code = unsafe { (d.cuMemsetD8Async)(p + offset as u64, value, bytes, stream) };
        self.context.check("cuMemsetD8Async", code)?;
        self.lanes.issued(Lane::Main, std::iter::once(p), None.into_iter());
        self.keep.buffer(dst);
        Ok(())
    }

    fn host_fn(&mut self, f: HostFn) -> Result<()> {
        unsafe extern "C" fn call(data: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below; the driver calls once.
            let f = unsafe { Box::from_raw(data.cast::<HostFn>()) };
            // A panic must not unwind into the driver.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(*f));
        }
        let d = self.context.enter()?;
        let stream = self.lanes.before_all()?;
        let data: *mut c_void = Box::into_raw(Box::new(f)).cast();
        // SAFETY: `call` takes exactly this pointer.
        let code = unsafe { (d.cuLaunchHostFunc)(stream, call, data) };
        if code != SUCCESS {
            // SAFETY: the driver refused the pointer, so it is still ours.
            drop(unsafe { Box::from_raw(data.cast::<HostFn>()) });
        }
        self.lanes.issued_all();
        self.context.check("cuLaunchHostFunc", code)
    }

    fn fence(&mut self) -> Result<Fence> {
        self.context.alive()?;
        if self.lanes.is_dirty() {
            let reached = self.lanes.fence()?;
            self.issued += 1;
            self.fences.push_back((self.issued, reached));
            self.keep.seal(self.issued);
        }
        Ok(Fence(self.issued))
    }

    fn done(&mut self, fence: Fence) -> Result<bool> {
        if fence.0 <= self.reached {
            return Ok(true);
        }
        self.context.enter()?;
        let Some((f, reached)) = self.fences.iter().find(|(f, _)| *f >= fence.0) else { return Ok(true) };
        let f = *f;
        let done = reached.is_reached()?;
        if done {
            self.retire(f);
        }
        Ok(done)
    }

    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>> {
        if fence.0 > self.issued {
            let what = format!("fence {} that was never issued", fence.0);
            return Err(self.context.invalid(what));
        }
        if self.done(fence)? {
            return Ok(None);
        }
        let event = self.fences.iter().find(|(f, _)| *f >= fence.0);
        Ok(event.map(|(_, r)| r.completion()))
    }

    fn launch_list(&mut self, list: &[Listed<'_>], recorded: &mut Recorded) -> Result<Issued> {
        // A graph of one node costs more than a launch.
        if list.len() == 1 || self.lanes.is_part() {
            list.iter().try_for_each(|l| self.launch(l.kernel, &l.geometry, l.args))?;
            return Ok(Issued::Singly);
        }
        let calls = list.iter().map(|l| Call::new(&self.context, l.kernel, &l.geometry, l.args));
        let calls = calls.collect::<Result<Vec<_>>>()?;
        let fresh = || Box::new(Recording::new(self.context.clone()));
        let known = recorded.0.take().and_then(|r| r.downcast::<Recording>().ok());
        let mut recording = known.filter(|r| r.belongs_to(&self.context)).unwrap_or_else(fresh);
        let memory = || list.iter().zip(&calls).flat_map(|(l, c)| buffers(l.args, c));
        let ranges = || list.iter().flat_map(|l| shared(l.args));
        let lane = if self.side { Lane::Side } else { Lane::Main };
        let stream = self.lanes.before(lane, memory(), ranges())?;
        let (issued, held) = recording.launch(stream, list, &calls)?;
        self.lanes.issued(lane, memory(), ranges());
        self.side = self.beside.lists && !self.side;
        self.keep.other(held);
        recorded.0 = Some(recording);
        Ok(issued)
    }
}
