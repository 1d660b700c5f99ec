//! A simulated accelerator: real results, virtual time.
//!
//! Kernels are CPU functions and run when they are enqueued, so results are exact; what they would have cost on a
//! device comes from a [`Model`] and advances a virtual clock. Nothing here reads the wall clock, so a test of
//! scheduling gives the same answer on any machine. Memory is separate from the host's, so coherence is exercised.

use std::any::Any;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::cpu::{HostMemory, Pool, check_range, compile, host_range, run_kernel};
use crate::{
    Arg, Buffer, Completion, Device, DeviceInfo, Direction, Error, Fence, Geometry, HostFn, Kernel, Kind, Memory,
    Method, Queue, Result, Source,
};

/// What things cost on the simulated device, in virtual nanoseconds.
#[derive(Clone, Debug)]
pub struct Model {
    /// Name in reports.
    pub name: String,
    /// Per launch.
    pub launch_ns: u64,
    /// Per 1024 work-items.
    pub kilo_items_ns: u64,
    /// Per copy.
    pub copy_ns: u64,
    /// Per KiB copied from or to the host.
    pub copy_kib_ns: u64,
    /// Relative speed for schedulers.
    pub strength: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The n-th launch (from 1) faults, as a wild store would; 0 for never.
    pub fault_at: u64,
}

impl Default for Model {
    /// About a mid-range GPU of 2026.
    fn default() -> Self {
        Model {
            name: "sim".into(),
            launch_ns: 4_000,
            kilo_items_ns: 50,
            copy_ns: 6_000,
            copy_kib_ns: 20,
            strength: 1 << 20,
            memory_bytes: 1 << 30,
            fault_at: 0,
        }
    }
}

struct State {
    model: Model,
    /// When the device will have finished everything enqueued, over all queues.
    busy_until: AtomicU64,
    /// The virtual now: the latest fence that anybody waited for.
    now: AtomicU64,
    busy: AtomicU64,
    allocated: AtomicU64,
    launches: AtomicU64,
    /// So many launches find memory yet, and so many behind them none.
    refusals: Mutex<(u64, u64)>,
    lost: OnceLock<String>,
}

/// The simulated device; clones of the handle share it.
#[derive(Clone)]
pub struct SimDevice {
    info: DeviceInfo,
    state: Arc<State>,
}

impl SimDevice {
    /// A device that behaves as `model` says.
    pub fn new(model: Model) -> Self {
        SimDevice {
            info: DeviceInfo {
                kind: Kind::Sim,
                name: model.name.clone(),
                driver: concat!("forebay-sim ", env!("CARGO_PKG_VERSION")).into(),
                compute_units: 64,
                memory_bytes: model.memory_bytes,
                strength: model.strength,
                host_memory: false,
                is_cpu: false,
                pci: None,
            },
            state: Arc::new(State {
                model,
                busy_until: AtomicU64::new(0),
                now: AtomicU64::new(0),
                busy: AtomicU64::new(0),
                allocated: AtomicU64::new(0),
                launches: AtomicU64::new(0),
                refusals: Mutex::new((0, 0)),
                lost: OnceLock::new(),
            }),
        }
    }

    /// Virtual nanoseconds until which the device has been waited for.
    pub fn now(&self) -> u64 {
        self.state.now.load(Ordering::Relaxed)
    }

    /// Virtual nanoseconds of work enqueued so far.
    pub fn busy(&self) -> u64 {
        self.state.busy.load(Ordering::Relaxed)
    }

    /// Kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.state.launches.load(Ordering::Relaxed)
    }

    /// Behind the next `after` launches so many find no memory, as those of a GPU that others have filled.
    pub fn refuse(&self, after: u64, launches: u64) {
        *self.state.refusals.lock().unwrap_or_else(PoisonError::into_inner) = (after, launches);
    }

    /// Makes the device disappear, as a GPU that falls off its bus.
    pub fn unplug(&self) {
        let _ = self.state.lost.set("unplugged".into());
    }
}

/// Simulated memory: host bytes that the host may not see.
struct SimMemory {
    bytes: Buffer,
    state: Arc<State>,
}

impl Memory for SimMemory {
    fn len(&self) -> usize {
        self.bytes.len()
    }
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.state.allocated.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        self.state.alive()?;
        let s = &self.state;
        let used = s.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        if used.saturating_add(bytes as u64) > s.model.memory_bytes {
            s.allocated.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Err(Error::OutOfMemory {
                device: s.model.name.clone(),
                requested: bytes as u64,
                used,
                limit: s.model.memory_bytes,
            });
        }
        match HostMemory::buffer(bytes) {
            Ok(bytes) => Ok(Arc::new(SimMemory { bytes, state: s.clone() })),
            Err(e) => {
                s.allocated.fetch_sub(bytes as u64, Ordering::Relaxed);
                Err(e)
            }
        }
    }

    fn compile(&self, source: &Source, entry: &str) -> Result<Kernel> {
        self.state.alive()?;
        compile(source, entry, &self.state.model.name)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.state.alive()?;
        Ok(Box::new(SimQueue { state: self.state.clone(), fences: VecDeque::new(), issued: 0, end: 0, dirty: false }))
    }

    fn allocated(&self) -> u64 {
        self.state.allocated.load(Ordering::Relaxed)
    }
}

impl State {
    fn alive(&self) -> Result<()> {
        match self.lost.get() {
            Some(why) => Err(Error::Lost { device: self.model.name.clone(), why: why.clone() }),
            None => Ok(()),
        }
    }

    /// That there is memory for the next launch ([`SimDevice::refuse`]).
    fn has_memory(&self, kernel: &str) -> Result<()> {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *refusals {
            (0, 0) => Ok(()),
            (0, n) => {
                *n -= 1;
                Err(Error::Full { device: self.model.name.clone(), why: format!("launch of {kernel}") })
            }
            (after, _) => {
                *after -= 1;
                Ok(())
            }
        }
    }

    /// Occupies the device for `ns` behind everything enqueued; returns when that ends.
    fn occupy(&self, ns: u64) -> u64 {
        self.busy.fetch_add(ns, Ordering::Relaxed);
        let now = self.now.load(Ordering::Relaxed);
        self.busy_until.fetch_max(now, Ordering::Relaxed);
        self.busy_until.fetch_add(ns, Ordering::Relaxed) + ns
    }
}

struct SimQueue {
    state: Arc<State>,
    fences: VecDeque<(u64, u64)>,
    issued: u64,
    end: u64,
    dirty: bool,
}

impl SimQueue {
    fn bytes<'b>(&self, b: &'b Buffer) -> Option<&'b Buffer> {
        b.as_any().downcast_ref::<SimMemory>().filter(|m| Arc::ptr_eq(&m.state, &self.state)).map(|m| &m.bytes)
    }

    fn foreign(&self, what: &str) -> Error {
        Error::Invalid { device: self.state.model.name.clone(), what: format!("{what} of another device") }
    }

    fn spend(&mut self, ns: u64) {
        self.end = self.end.max(self.state.occupy(ns));
        self.dirty = true;
    }
}

impl Queue for SimQueue {
    fn launch(&mut self, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
        self.state.alive()?;
        let mut mapped = Vec::with_capacity(args.len());
        for a in args {
            mapped.push(match a {
                Arg::Buffer(b) => Arg::Buffer(self.bytes(b).ok_or_else(|| self.foreign("buffer"))?),
                other => *other,
            });
        }
        self.state.has_memory(&kernel.name)?;
        let n = self.state.launches.fetch_add(1, Ordering::Relaxed) + 1;
        if n == self.state.model.fault_at {
            let _ = self.state.lost.set(format!("kernel {} faulted", kernel.name));
            self.state.alive()?;
        }
        run_kernel(Pool::global(), kernel, geometry, &mapped)?;
        let m = &self.state.model;
        let cost = m.launch_ns + (geometry.count() as u64 * m.kilo_items_ns).div_ceil(1024);
        self.spend(cost);
        Ok(())
    }

    fn copy(&mut self, src: &Buffer, src_offset: usize, dst: &Buffer, dst_offset: usize, bytes: usize) -> Result<()> {
        self.state.alive()?;
        let name = &self.state.model.name;
        let (s, d) = (self.bytes(src), self.bytes(dst));
        let host = s.is_none() || d.is_none();
        if s.is_none() && d.is_none() {
            return Err(self.foreign("buffer"));
        }
        check_range(src, src_offset, bytes, name)?;
        check_range(dst, dst_offset, bytes, name)?;
        let from = host_range(s.unwrap_or(src), src_offset, bytes, name)?;
        let to = host_range(d.unwrap_or(dst), dst_offset, bytes, name)?;
        // SAFETY: both ranges are in bounds; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
        let m = &self.state.model;
        let cost = m.copy_ns + if host { (bytes as u64 * m.copy_kib_ns).div_ceil(1024) } else { 0 };
        self.spend(cost);
        Ok(())
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
        self.state.alive()?;
        let m = &self.state.model;
        if method != Method::Engine {
            return Err(Error::Unsupported { device: m.name.clone(), what: format!("copies by {}", method.name()) });
        }
        let cost = m.copy_ns + (bytes as u64 * m.copy_kib_ns).div_ceil(1024);
        let b = self.bytes(device).ok_or_else(|| self.foreign("buffer"))?;
        let p = host_range(b, offset, bytes, &m.name)?;
        let (from, to) = if direction == Direction::ToDevice { (host, p) } else { (p, host) };
        // SAFETY: in bounds (checked, and by the contract); `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
        self.spend(cost);
        Ok(())
    }

    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        self.state.alive()?;
        let b = self.bytes(dst).ok_or_else(|| self.foreign("buffer"))?;
        let p = host_range(b, offset, bytes, &self.state.model.name)?;
        // SAFETY: in bounds.
        unsafe { std::ptr::write_bytes(p, value, bytes) };
        self.spend(self.state.model.copy_ns);
        Ok(())
    }

    fn host_fn(&mut self, f: HostFn) -> Result<()> {
        self.state.alive()?;
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence> {
        self.state.alive()?;
        if std::mem::take(&mut self.dirty) {
            self.issued += 1;
            self.fences.push_back((self.issued, self.end));
        }
        Ok(Fence(self.issued))
    }

    fn done(&mut self, fence: Fence) -> Result<bool> {
        self.state.alive()?;
        let now = self.state.now.load(Ordering::Relaxed);
        Ok(!self.fences.iter().any(|&(f, end)| f <= fence.0 && end > now))
    }

    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>> {
        self.state.alive()?;
        if fence.0 > self.issued {
            let what = format!("fence {} that was never issued", fence.0);
            return Err(Error::Invalid { device: self.state.model.name.clone(), what });
        }
        let now = self.state.now.load(Ordering::Relaxed);
        while self.fences.front().is_some_and(|(_, end)| *end <= now) {
            self.fences.pop_front();
        }
        let end = self.fences.iter().filter(|(f, _)| *f <= fence.0).map(|(_, end)| *end).max();
        Ok(end.map(|end| Arc::new(Reached { state: self.state.clone(), end }) as Arc<dyn Completion>))
    }
}

/// A point in virtual time.
struct Reached {
    state: Arc<State>,
    end: u64,
}

impl Completion for Reached {
    fn wait(&self) -> Result<()> {
        self.state.now.fetch_max(self.end, Ordering::Relaxed);
        self.state.alive()
    }
}
