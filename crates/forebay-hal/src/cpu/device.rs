//! The CPU as a device: host memory, and a queue that runs each command at once.

use std::alloc::Layout;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Pool, streaming};
use crate::kernel::{ArgSpan, CpuFn, KernelImpl};
use crate::{
    Arg, Buffer, Completion, Device, DeviceInfo, Direction, Error, Fence, Geometry, HostFn, Kernel, Kind, Memory,
    Method, Queue, Result, Source,
};

/// Alignment of host buffers: a cache line, and enough for any SIMD type.
const ALIGN: usize = 64;
/// Ranges per worker that a kernel is cut into, so that a slow range does not leave the others idle.
const RANGES_PER_WORKER: usize = 4;

/// Ordinary host memory, zeroed, aligned to 64 bytes.
pub struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    owner: Option<Arc<AtomicU64>>,
}

// SAFETY: the bytes are reached only under the contract of `Memory::host_ptr`.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `bytes` of zeroed host memory that no device accounts for.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn buffer(bytes: usize) -> Result<Buffer> {
        Ok(Arc::new(Self::alloc(bytes, None)?))
    }

    /// Allocates `bytes` of host memory, or as many as there are in `data`, which its first ones are; the others are zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn holding(data: &[u8], bytes: usize) -> Result<Buffer> {
        let bytes = bytes.max(data.len());
        let memory = Self::alloc_with(bytes, None, std::alloc::alloc)?;
        // SAFETY: so many bytes were just allocated, nobody else has them, and all of them are written here.
        unsafe {
            let rest = memory.ptr.add(data.len());
            std::ptr::copy_nonoverlapping(data.as_ptr(), memory.ptr.as_ptr(), data.len());
            rest.write_bytes(0, bytes - data.len());
        }
        Ok(Arc::new(memory))
    }

    fn alloc(len: usize, owner: Option<Arc<AtomicU64>>) -> Result<Self> {
        Self::alloc_with(len, owner, std::alloc::alloc_zeroed)
    }

    fn alloc_with(len: usize, owner: Option<Arc<AtomicU64>>, allocator: unsafe fn(Layout) -> *mut u8) -> Result<Self> {
        let oom = || Error::OutOfMemory {
            device: "cpu".into(),
            requested: len as u64,
            used: owner.as_ref().map_or(0, |o| o.load(Ordering::Relaxed)),
            limit: physical_memory(),
        };
        let layout = Layout::from_size_align(len.max(1), ALIGN).map_err(|_| oom())?;
        if len as u64 > physical_memory() {
            return Err(oom());
        }
        // SAFETY: the layout's size is at least 1.
        let ptr = NonNull::new(unsafe { allocator(layout) }).ok_or_else(oom)?;
        if let Some(o) = &owner {
            o.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(HostMemory { ptr, len, owner })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::from_size_align(self.len.max(1), ALIGN) {
            // SAFETY: allocated in `alloc` with the same layout.
            unsafe { std::alloc::dealloc(self.ptr.as_ptr(), layout) };
        }
        if let Some(o) = &self.owner {
            o.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
    }
}

impl Memory for HostMemory {
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

/// The machine's memory in bytes.
pub(crate) fn physical_memory() -> u64 {
    static BYTES: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *BYTES.get_or_init(|| {
        let info = rustix::system::sysinfo();
        (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)))
    })
}

/// The host's processors.
pub struct CpuDevice {
    info: DeviceInfo,
    pool: Arc<Pool>,
    allocated: Arc<AtomicU64>,
}

impl CpuDevice {
    /// The device over a pool of workers.
    pub fn new(pool: Arc<Pool>) -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo.lines().find(|l| l.starts_with(name)).and_then(|l| l.split(':').nth(1)).map(|v| v.trim().to_owned())
        };
        let mhz = field("cpu MHz").and_then(|v| v.parse::<f64>().ok()).unwrap_or(2000.0) as u64;
        let workers = pool.workers() as u32;
        CpuDevice {
            info: DeviceInfo {
                kind: Kind::Cpu,
                name: field("model name").unwrap_or_else(|| "CPU".into()),
                driver: concat!("forebay ", env!("CARGO_PKG_VERSION")).into(),
                compute_units: workers,
                memory_bytes: physical_memory(),
                strength: u64::from(workers) * mhz * 8,
                host_memory: true,
                is_cpu: true,
                pci: None,
            },
            pool,
            allocated: Arc::default(),
        }
    }

    /// The workers that run its kernels.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

struct CpuKernel(CpuFn);

impl KernelImpl for CpuKernel {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        Ok(Arc::new(HostMemory::alloc(bytes, Some(self.allocated.clone()))?))
    }

    fn compile(&self, source: &Source, entry: &str) -> Result<Kernel> {
        compile(source, entry, &self.info.name)
    }

    fn alloc_shared(&self, bytes: usize) -> Result<(Buffer, Buffer)> {
        let b = self.alloc(bytes)?;
        Ok((b.clone(), b))
    }

    fn methods(&self) -> &[Method] {
        &Method::ALL
    }

    fn plain_copy(&self) -> Option<Method> {
        Some(Method::Engine)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(CpuQueue { pool: self.pool.clone(), issued: 0 }))
    }

    fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }
}

pub(crate) fn compile(source: &Source, entry: &str, device: &str) -> Result<Kernel> {
    match source {
        Source::Cpu(f) => Ok(Kernel { name: entry.into(), imp: Arc::new(CpuKernel(f.clone())) }),
        other => Err(Error::Unsupported { device: device.into(), what: format!("kernel source {other:?}") }),
    }
}

/// Bytes that one worker copies at a time.
const PART: usize = 256 << 10;

/// An address that workers share.
struct Shared(*mut u8);
// SAFETY: whoever shares it keeps the workers apart.
unsafe impl Sync for Shared {}

pub(crate) struct CpuQueue {
    pub(crate) pool: Arc<Pool>,
    issued: u64,
}

/// Checks that `offset..offset+bytes` lies in `b` and gives the address of its first byte on the host.
pub(crate) fn host_range(b: &Buffer, offset: usize, bytes: usize, device: &str) -> Result<*mut u8> {
    let p = b
        .host_ptr()
        .ok_or_else(|| Error::Invalid { device: device.into(), what: "buffer of another device".into() })?;
    check_range(b, offset, bytes, device)?;
    // SAFETY: offset is within the allocation (checked above).
    Ok(unsafe { p.as_ptr().add(offset) })
}

pub(crate) fn check_range(b: &Buffer, offset: usize, bytes: usize, device: &str) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= b.len() => Ok(()),
        _ => Err(Error::Invalid {
            device: device.into(),
            what: format!("range {offset}+{bytes} of a buffer of {} B", b.len()),
        }),
    }
}

/// Runs a CPU kernel over its space on a pool; a panic becomes an error.
///
/// # Errors
/// [`Error::Invalid`] for a kernel of another device, [`Error::Panic`].
pub fn run_kernel(pool: &Pool, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
    let Some(k) = kernel.imp.as_any().downcast_ref::<CpuKernel>() else {
        return Err(Error::Invalid { device: "cpu".into(), what: format!("kernel {} of another device", kernel.name) });
    };
    let slices = ArgSpan::slices(geometry.items);
    let grain = slices.div_ceil(pool.workers() * RANGES_PER_WORKER).max(1);
    let body = |start: usize, end: usize| (k.0)(&ArgSpan::new(geometry.items, start, end, args));
    let run = || {
        // Small spaces are not worth waking anybody for.
        if geometry.count() <= 4096 { body(0, slices) } else { pool.parallel_for(slices, grain, &body) }
    };
    std::panic::catch_unwind(AssertUnwindSafe(run))
        .map_err(|why| Error::Panic { kernel: kernel.name.to_string(), why: panic_text(&*why) })
}

/// The message of a caught panic.
pub(crate) fn panic_text(why: &(dyn Any + Send)) -> String {
    why.downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| why.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}

impl Queue for CpuQueue {
    fn launch(&mut self, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()> {
        run_kernel(&self.pool, kernel, geometry, args)
    }

    fn copy(&mut self, src: &Buffer, src_offset: usize, dst: &Buffer, dst_offset: usize, bytes: usize) -> Result<()> {
        let s = host_range(src, src_offset, bytes, "cpu")?;
        let d = host_range(dst, dst_offset, bytes, "cpu")?;
        // SAFETY: both ranges are in bounds (checked); `copy` allows them to overlap.
        unsafe { std::ptr::copy(s, d, bytes) };
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
        let d = host_range(device, offset, bytes, "cpu")?;
        let (from, to) = if direction == Direction::ToDevice { (host, d) } else { (d, host) };
        if from.addr() < to.addr() + bytes && to.addr() < from.addr() + bytes {
            // Memory of this "device" is the host's, so the two may be the same.
            // SAFETY: in bounds (checked, and by the contract); overlap is allowed.
            unsafe { std::ptr::copy(from, to, bytes) };
            return Ok(());
        }
        match method {
            // SAFETY: as above, and they do not overlap.
            Method::Engine => unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) },
            // SAFETY: as above.
            Method::Mapped => unsafe { streaming::store(streaming::Width::widest(), from, to, bytes) },
            Method::Kernel => {
                let (from, to) = (Shared(from), Shared(to));
                self.pool.parallel_for(bytes.div_ceil(PART), 1, &|start, end| {
                    let (from, to) = (&from, &to);
                    let (at, end) = (start * PART, (end * PART).min(bytes));
                    // SAFETY: as above; every part is copied by one worker.
                    unsafe { std::ptr::copy_nonoverlapping(from.0.add(at), to.0.add(at), end - at) };
                });
            }
        }
        Ok(())
    }

    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let d = host_range(dst, offset, bytes, "cpu")?;
        // SAFETY: in bounds (checked).
        unsafe { std::ptr::write_bytes(d, value, bytes) };
        Ok(())
    }

    fn host_fn(&mut self, f: HostFn) -> Result<()> {
        std::panic::catch_unwind(AssertUnwindSafe(f))
            .map_err(|why| Error::Panic { kernel: "host function".into(), why: panic_text(&*why) })
    }

    fn fence(&mut self) -> Result<Fence> {
        self.issued += 1;
        Ok(Fence(self.issued))
    }

    fn done(&mut self, fence: Fence) -> Result<bool> {
        Ok(fence.0 <= self.issued)
    }

    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>> {
        if fence.0 <= self.issued {
            return Ok(None);
        }
        Err(Error::Invalid { device: "cpu".into(), what: format!("fence {} that was never issued", fence.0) })
    }
}
