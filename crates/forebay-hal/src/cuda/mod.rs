//! NVIDIA GPUs through the CUDA driver, opened at run time; kernels come as CUDA C++ (compiled by NVRTC), PTX, cubin or
//! fatbin.
//!
//! The device's primary context is used, so that buffers are visible to other CUDA libraries of the process. After a
//! fault the context is lost: every later call through any of its handles reports [`Error::Lost`] and calls nothing, and
//! what is freed is not. [`Device::renew`] makes another one.

pub mod checkpoint;
mod graph;
#[cfg(test)]
mod header;
mod lanes;
mod memory;
mod nvrtc;
mod part;
#[doc(hidden)]
pub mod plain;
mod queue;
mod stay;
mod sys;
mod window;

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use memory::{CudaMemory, PinnedMemory};
pub use nvrtc::Nvrtc;
use part::Part;
use stay::{Between, Free, Stay};
use sys::{CuContext, CuDevice, CuDevicePtr, CuFunction, CuModule, CuResult, Driver, SUCCESS};
use window::Windows;
#[doc(hidden)]
pub use window::use_rm;

use crate::cache::{Cache, Loaded};
use crate::fork::{self, Home};
use crate::kernel::KernelImpl;
use crate::{
    Buffer, Device, DeviceInfo, DriverError, Error, Found, Kernel, Kind, Method, Occupied, PciAddress, Queue, Result,
    Source, portable,
};

/// All CUDA devices. Each one's context is made when it is first needed: on a machine with many GPUs it would take seconds, and half
/// a gigabyte of each, to no end.
///
/// # Errors
/// [`Error::NoLibrary`] or [`Error::NoSymbol`] without a usable driver, [`Error::NoDevice`] without a GPU.
pub(crate) fn look() -> Result<Found> {
    if !is_home() {
        return Err(Error::NoDevice { kind: Kind::Cuda, why: fork::UNUSABLE.into() });
    }
    let d = sys::driver()?;
    let none =
        |call: &'static str, code| Error::NoDevice { kind: Kind::Cuda, why: format!("{call}: {}", d.error_name(code)) };
    // SAFETY: plain call of the driver.
    let code = unsafe { (d.cuInit)(0) };
    if code != SUCCESS {
        return Err(none("cuInit", code));
    }
    HOME.get_or_init(Home::here);
    let mut n = 0;
    // SAFETY: `n` is valid.
    let code = unsafe { (d.cuDeviceGetCount)(&mut n) };
    if code != SUCCESS || n == 0 {
        return Err(none("cuDeviceGetCount", code));
    }
    Ok(crate::opened((0..n).map(|i| Ok(Arc::new(CudaDevice::open(d, i)?) as Arc<dyn Device>))))
}

/// Where the driver was used first.
static HOME: OnceLock<Home> = OnceLock::new();

/// Whether the driver may be asked for anything.
fn is_home() -> bool {
    HOME.get().is_none_or(|home| home.is_here())
}

/// A device's primary context, which all handles of the device share.
struct Primary {
    /// No other has the same, before or after.
    serial: usize,
    /// Why it is lost, if it is.
    lost: OnceLock<String>,
    /// The driver waits for all of its kernels, whichever handle launched them.
    stay: Stay,
    /// What outlives the context when that is lost, and is freed by the next one ([`Context::free_mapped`]).
    left: Mutex<Vec<Free>>,
}

/// The primary contexts of today. Whoever opens or renews a device holds the lock.
static PRIMARIES: Mutex<BTreeMap<CuDevice, Arc<Primary>>> = Mutex::new(BTreeMap::new());

type Primaries<'a> = MutexGuard<'a, BTreeMap<CuDevice, Arc<Primary>>>;

fn primaries() -> Primaries<'static> {
    PRIMARIES.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Context {
    driver: &'static Driver,
    /// Once it has been needed.
    id: OnceLock<CuContext>,
    /// Held by whoever makes it.
    opening: Mutex<()>,
    primary: Arc<Primary>,
    ordinal: c_int,
    device: CuDevice,
    name: String,
    allocated: AtomicU64,
    limit: u64,
}

// SAFETY: driver handles may be used from any thread once the context is current there (`enter`).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

thread_local! {
    /// Serial number of the context that this thread made current last: the next one may have the same handle.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Context {
    /// The context, if it has been needed so far.
    fn handle(&self) -> Option<CuContext> {
        self.id.get().copied()
    }

    fn open(&self) -> Result<CuContext> {
        let _one = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = self.handle() {
            return Ok(id);
        }
        let mut id = null_mut();
        // SAFETY: `id` is valid.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRetain)(&mut id, self.device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(*self.id.get_or_init(|| id))
    }

    /// Makes the context current on this thread; an error once it is lost.
    fn enter(&self) -> Result<&'static Driver> {
        self.alive()?;
        let id = self.handle().map_or_else(|| self.open(), Ok)?;
        // Other users of the driver on this thread make contexts of theirs current.
        let mut current = null_mut();
        // SAFETY: `current` is valid.
        unsafe { (self.driver.cuCtxGetCurrent)(&mut current) };
        if current != id || CURRENT.get() != self.primary.serial {
            // SAFETY: the primary context is retained for as long as `self` lives.
            let code = unsafe { (self.driver.cuCtxSetCurrent)(id) };
            self.check("cuCtxSetCurrent", code)?;
            CURRENT.set(self.primary.serial);
        }
        Ok(self.driver)
    }

    /// That the device is not known to be lost; for what needs no call of the driver.
    fn alive(&self) -> Result<()> {
        if !is_home() {
            return Err(Error::Lost { device: self.name.clone(), why: fork::WHY.into() });
        }
        match self.primary.lost.get() {
            Some(why) => Err(Error::Lost { device: self.name.clone(), why: why.clone() }),
            None => Ok(()),
        }
    }

    /// An attribute of the device; 0 if the driver does not know it.
    fn attribute(&self, which: c_int) -> u32 {
        let mut v = 0;
        // SAFETY: `v` is valid; an unknown attribute is an error that leaves it 0.
        unsafe { (self.driver.cuDeviceGetAttribute)(&mut v, which, self.device) };
        v.max(0) as u32
    }

    /// Bytes in use.
    fn used(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Frees something, once no kernel stays: the driver would wait for it.
    fn free(&self, what: impl FnOnce(&'static Driver) + Send + 'static) {
        if !is_home() {
            // With what it would give back.
            return std::mem::forget(what);
        }
        if let Some((what, _between)) = self.primary.stay.between_or_after(what)
            && let Ok(d) = self.enter()
        {
            what(d);
        }
    }

    /// The same of memory that is no context's but the device's, and so is there yet when a lost context has been made anew;
    /// `mapping` goes first, whatever there is of the context.
    fn free_mapped<M: Send + 'static>(&self, mapping: M, what: impl FnOnce(&'static Driver) + Send + 'static) {
        let mut mapped = Mapped { primary: self.primary.clone(), free: Some(Box::new(what)) };
        self.free(move |d| {
            drop(mapping);
            if let Some(free) = mapped.free.take() {
                free(d);
            }
        });
    }

    fn invalid(&self, what: String) -> Error {
        Error::Invalid { device: self.name.clone(), what }
    }

    /// The device is lost from now on, if it was not before.
    fn lose(&self, why: String) -> Error {
        let why = self.primary.lost.get_or_init(|| why).clone();
        Error::Lost { device: self.name.clone(), why }
    }

    fn check(&self, call: &'static str, code: CuResult) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let name = self.driver.error_name(code);
        if sys::STICKY.contains(&code) {
            return Err(self.lose(format!("{call}: {name} ({code})")));
        }
        if code == sys::ERROR_OUT_OF_MEMORY {
            return Err(Error::Full { device: self.name.clone(), why: format!("{call}: {name}") });
        }
        Err(Error::Driver(DriverError { call, code: i64::from(code), name, device: self.name.clone() }))
    }
}

/// Memory to be freed by this context, or, if that is lost when its turn comes, by the next one.
struct Mapped {
    primary: Arc<Primary>,
    free: Option<Free>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            self.primary.left.lock().unwrap_or_else(PoisonError::into_inner).push(free);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if is_home() && self.handle().is_some() {
            // SAFETY: retained once in `open`.
            unsafe { (self.driver.cuDevicePrimaryCtxRelease)(self.device) };
        }
    }
}

/// How much memory kernels of the context that is current on this thread have for their own `malloc` (eight mebibytes
/// otherwise); for programs that are compared with. To be said before any code is loaded there: what is loaded keeps the heap
/// that there was.
///
/// # Errors
/// No driver, or that it refused.
#[doc(hidden)]
pub fn set_malloc_heap(bytes: usize) -> Result<()> {
    let driver = sys::driver()?;
    // SAFETY: only numbers are passed.
    let code = unsafe { (driver.cuCtxSetLimit)(sys::LIMIT_MALLOC_HEAP, bytes) };
    if code == SUCCESS {
        return Ok(());
    }
    let (call, device) = ("cuCtxSetLimit", "the current context".into());
    Err(Error::Driver(DriverError { call, code: i64::from(code), name: driver.error_name(code), device }))
}

/// A CUDA device.
pub struct CudaDevice {
    info: DeviceInfo,
    context: Arc<Context>,
    cc: u32,
    cache: Cache,
    modules: Loaded<CudaModule>,
    /// The part that it is, if it is not the whole of it.
    part: Option<Arc<Part>>,
    copy: CopyKernel,
    windows: Windows,
    beside: queue::Beside,
    /// Other devices whose memory it was asked about.
    peers: Mutex<HashSet<CuDevice>>,
}

/// Smallest copy that goes on a stream of its own: it takes some five microseconds, and the events that order it cost one or
/// two.
const BESIDE: usize = 256 << 10;

/// The same, or what `FOREBAY_COPIES_BESIDE` says: a number of bytes, or `off`. With `FOREBAY_LISTS_BESIDE=on` lists of launches
/// run beside each other, and so do all copies: one behind a list on the main stream would keep the next list waiting.
fn beside() -> queue::Beside {
    let copies = match std::env::var("FOREBAY_COPIES_BESIDE") {
        Ok(v) if v == "off" => usize::MAX,
        Ok(v) => v.parse().unwrap_or(BESIDE),
        Err(_) => BESIDE,
    };
    let lists = std::env::var("FOREBAY_LISTS_BESIDE").is_ok_and(|v| v == "on");
    queue::Beside { copies: if lists { 0 } else { copies }, lists }
}

/// The kernel of [`Method::Kernel`], once somebody has asked for it; none without a compiler.
type CopyKernel = Arc<OnceLock<Option<Kernel>>>;

impl CudaDevice {
    fn open(d: &'static Driver, ordinal: c_int) -> Result<Self> {
        Self::open_with(d, ordinal, &mut primaries())
    }

    fn open_with(d: &'static Driver, ordinal: c_int, primaries: &mut Primaries<'_>) -> Result<Self> {
        let mut device = 0;
        let mut name = [0 as c_char; 128];
        let (mut version, mut bytes) = (0, 0usize);
        let check = |call: &'static str, code: CuResult| match code {
            SUCCESS => Ok(()),
            code => Err(Error::Driver(DriverError {
                call,
                code: i64::from(code),
                name: d.error_name(code),
                device: format!("cuda:{ordinal}"),
            })),
        };
        let attribute = |device, which| {
            let mut v = 0;
            // SAFETY: `v` is valid; an unknown attribute is an error that leaves it 0.
            unsafe { (d.cuDeviceGetAttribute)(&mut v, which, device) };
            v.max(0) as u32
        };
        // SAFETY: all pointers are valid for the calls; the name's length is passed.
        unsafe {
            check("cuDeviceGet", (d.cuDeviceGet)(&mut device, ordinal))?;
            check("cuDeviceGetName", (d.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            check("cuDriverGetVersion", (d.cuDriverGetVersion)(&mut version))?;
            check("cuDeviceTotalMem", (d.cuDeviceTotalMem)(&mut bytes, device))?;
        }
        let mode = attribute(device, sys::ATTRIBUTE_COMPUTE_MODE);
        if mode == sys::COMPUTE_PROHIBITED {
            let why = format!("cuda:{ordinal} is closed to programs (nvidia-smi -c)");
            return Err(Error::NoDevice { kind: Kind::Cuda, why });
        }
        static SERIAL: AtomicUsize = AtomicUsize::new(1);
        let new = || {
            let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
            Arc::new(Primary { serial, lost: OnceLock::new(), stay: Stay::default(), left: Mutex::default() })
        };
        let primary = primaries.entry(device).or_insert_with(new).clone();
        // SAFETY: the driver NUL-terminates within the length, and the last byte was never written.
        let name = unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let limit = crate::memory::allowed(bytes as u64);
        let units = attribute(device, sys::ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let mhz = attribute(device, sys::ATTRIBUTE_CLOCK_RATE) / 1000;
        let cc = attribute(device, sys::ATTRIBUTE_CC_MAJOR) * 10 + attribute(device, sys::ATTRIBUTE_CC_MINOR);
        let place = [sys::ATTRIBUTE_PCI_DOMAIN, sys::ATTRIBUTE_PCI_BUS, sys::ATTRIBUTE_PCI_DEVICE];
        let [domain, bus, slot] = place.map(|a| attribute(device, a));
        let opened = CudaDevice {
            info: DeviceInfo {
                kind: Kind::Cuda,
                name: name.clone(),
                driver: format!("CUDA {}.{} sm_{cc}", version / 1000, version % 1000 / 10),
                compute_units: units,
                memory_bytes: limit,
                strength: u64::from(units) * u64::from(mhz.max(1000)) * 128,
                host_memory: false,
                is_cpu: false,
                pci: PciAddress::new(domain, bus, slot),
            },
            context: Arc::new(Context {
                driver: d,
                id: OnceLock::new(),
                opening: Mutex::new(()),
                primary,
                ordinal,
                device,
                name,
                allocated: AtomicU64::new(0),
                limit,
            }),
            cc,
            cache: Cache::user(),
            modules: Loaded::default(),
            part: None,
            copy: CopyKernel::default(),
            windows: Windows::default(),
            beside: beside(),
            peers: Mutex::default(),
        };
        // One program at a time may have it: whether this one may is known only when it tries.
        if mode == sys::COMPUTE_EXCLUSIVE {
            opened.context.enter()?;
        }
        Ok(opened)
    }

    /// The module of a source text, compiled or from the cache.
    fn module_of(&self, text: &str, entry: &str, options: &[&str]) -> Result<Arc<CudaModule>> {
        let nvrtc = Nvrtc::get()?;
        let (major, minor) = nvrtc.version();
        let compiler = format!("nvrtc {major}.{minor} sm_{} {}", self.cc, options.join(" "));
        let key = Cache::key(&[b"cuda", text.as_bytes(), compiler.as_bytes()]);
        self.modules.get_or(&key, || {
            // Known now, before the time that compiling takes, which no grid waits for.
            drop(self.may_load(entry)?);
            match self.cache.get(&key).map(|binary| self.load(&binary, entry)) {
                Some(Err(e)) if !e.is_out_of_memory() => {}
                Some(loaded) => return loaded,
                None => {}
            }
            let binary = nvrtc.compile(text, entry, self.cc, options, &self.context.name)?;
            let module = self.load(&binary, entry)?;
            self.cache.put(&key, &binary);
            Ok(module)
        })
    }

    /// Loading code would wait for kernels that stay.
    fn may_load(&self, entry: &str) -> Result<Between<'_>> {
        self.context.primary.stay.between().ok_or_else(|| {
            let what = format!(
                "loading kernel {entry} while a resident grid runs there; compile it before the grid is started"
            );
            Error::Unsupported { device: self.context.name.clone(), what }
        })
    }

    /// Loads a cubin, a fatbin or NUL-terminated PTX.
    fn load(&self, image: &[u8], entry: &str) -> Result<CudaModule> {
        let c = &self.context;
        let _between = self.may_load(entry)?;
        let d = c.enter()?;
        let mut id = null_mut();
        // SAFETY: the image is a cubin or fatbin with its own length, or NUL-terminated PTX.
        let code = unsafe { (d.cuModuleLoadData)(&mut id, image.as_ptr().cast()) };
        if code != SUCCESS {
            let log = format!("the driver refused the binary: {} ({code})", d.error_name(code));
            c.check("cuModuleLoadData", code).map_err(|e| match e {
                Error::Lost { .. } | Error::Full { .. } => e,
                _ => Error::Compile { device: c.name.clone(), entry: entry.into(), log },
            })?;
        }
        let module = CudaModule { id, functions: Mutex::default(), context: c.clone() };
        // Before a kernel may come that stays: then it would be refused. What else is wrong with it is said to who asks.
        match self.find(&module, entry) {
            Err(e) if e.is_out_of_memory() => Err(e),
            _ => Ok(module),
        }
    }

    /// A function of a module, and its code on the device: by itself the driver brings that there at the first launch, and
    /// waits for all kernels then.
    fn function(&self, module: &CudaModule, entry: &str) -> Result<CuFunction> {
        if let Some(known) = module.functions().get(entry) {
            return Ok(*known as CuFunction);
        }
        let _between = self.may_load(entry)?;
        self.find(module, entry)
    }

    /// The same of one that was not asked for yet, while no kernel stays.
    fn find(&self, module: &CudaModule, entry: &str) -> Result<CuFunction> {
        let c = &self.context;
        let d = c.enter()?;
        let mut function = null_mut();
        let name = CString::new(entry).unwrap_or_default();
        // SAFETY: the module is alive; the name is NUL-terminated.
        let code = unsafe { (d.cuModuleGetFunction)(&mut function, module.id, name.as_ptr()) };
        if code == sys::ERROR_NOT_FOUND {
            let known = "unknown (the driver does not tell); is it declared extern \"C\"?".into();
            return Err(Error::NoEntry { device: c.name.clone(), entry: entry.into(), known });
        }
        c.check("cuModuleGetFunction", code)?;
        // Drivers before CUDA 12.4 do not have it; there code comes with the function.
        if let Ok(loading) = sys::Loading::find(d) {
            // SAFETY: `function` was just found.
            c.check("cuFuncLoad", unsafe { (loading.load)(function) })?;
        }
        module.functions().insert(entry.into(), function as usize);
        Ok(function)
    }
}

struct CudaModule {
    id: CuModule,
    /// Those that were asked for, by name.
    functions: Mutex<HashMap<String, usize>>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for CudaModule {}
// SAFETY: as for `Context`.
unsafe impl Sync for CudaModule {}

impl CudaModule {
    fn functions(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let id = self.id as usize;
        self.context.free(move |d| {
            // SAFETY: loaded in `load`; queues keep kernels, and they their module, until their launches have ended.
            unsafe { (d.cuModuleUnload)(id as CuModule) };
        });
    }
}

pub(super) struct CudaKernel {
    function: CuFunction,
    context: Arc<Context>,
    /// The function's code.
    _module: Arc<CudaModule>,
}

// SAFETY: as for `Context`.
unsafe impl Send for CudaKernel {}
// SAFETY: as for `Context`.
unsafe impl Sync for CudaKernel {}

impl KernelImpl for CudaKernel {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        let c = &self.context;
        let d = c.enter()?;
        let mut ptr = 0;
        let refused = c.used().saturating_add(bytes as u64) > c.limit;
        // SAFETY: `ptr` is valid.
        let code = if refused { sys::ERROR_OUT_OF_MEMORY } else { unsafe { (d.cuMemAlloc)(&mut ptr, bytes.max(1)) } };
        if code == sys::ERROR_OUT_OF_MEMORY {
            let used = c.used();
            return Err(Error::OutOfMemory { device: c.name.clone(), requested: bytes as u64, used, limit: c.limit });
        }
        c.check("cuMemAlloc", code)?;
        c.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Arc::new(CudaMemory { ptr, len: bytes, part: None, host: None, context: c.clone() }))
    }

    fn alloc_mapped(&self, bytes: usize) -> Result<Buffer> {
        let c = &self.context;
        c.enter()?;
        let fits = c.used().saturating_add(bytes as u64) <= c.limit;
        let Some(part) = fits.then(|| self.windows.alloc(c, bytes)).flatten() else { return self.alloc(bytes) };
        c.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Arc::new(CudaMemory { ptr: part.device(), len: bytes, part: Some(part), host: None, context: c.clone() }))
    }

    fn alloc_shared(&self, bytes: usize) -> Result<(Buffer, Buffer)> {
        let host = self.alloc_host(bytes)?;
        let p = host.host_ptr().ok_or_else(|| self.context.invalid("page-locked memory without an address".into()))?;
        // Page-locked memory has one address for both sides.
        let ptr = p.as_ptr() as CuDevicePtr;
        let device =
            CudaMemory { ptr, len: bytes, part: None, host: Some(host.clone()), context: self.context.clone() };
        Ok((host, Arc::new(device)))
    }

    fn alloc_host(&self, bytes: usize) -> Result<Buffer> {
        let c = &self.context;
        let d = c.enter()?;
        let mut p: *mut c_void = null_mut();
        // SAFETY: `p` is valid.
        let code = unsafe { (d.cuMemHostAlloc)(&mut p, bytes.max(1), sys::MEMHOSTALLOC_PORTABLE) };
        c.check("cuMemHostAlloc", code).map_err(|e| match e {
            Error::Full { why, .. } => Error::Full { device: "the host".into(), why: format!("{why}, {bytes} B") },
            e => e,
        })?;
        let ptr = NonNull::new(p.cast::<u8>())
            .ok_or_else(|| Error::Invalid { device: c.name.clone(), what: "null page-locked memory".into() })?;
        // SAFETY: `bytes` were just allocated. Zeroed like other host memory.
        unsafe { std::ptr::write_bytes(ptr.as_ptr(), 0, bytes) };
        Ok(Arc::new(PinnedMemory { ptr, len: bytes, context: c.clone() }))
    }

    fn compile(&self, source: &Source, entry: &str) -> Result<Kernel> {
        let c = &self.context;
        let module = match source {
            Source::CudaCpp(s) => self.module_of(s, entry, &portable::NVRTC_OPTIONS)?,
            Source::Portable(s) => {
                let text = format!("{}{s}", portable::CUDA_PRELUDE);
                self.module_of(&text, entry, &portable::NVRTC_OPTIONS_HERE)?
            }
            Source::CudaBinary(b) => {
                let key = Cache::key(&[b"cuda binary", b]);
                // PTX is text and must end in a NUL.
                self.modules.get_or(&key, || self.load(&[b, &[0u8][..]].concat(), entry))?
            }
            other => {
                return Err(Error::Unsupported { device: c.name.clone(), what: format!("kernel source {other:?}") });
            }
        };
        let function = self.function(&module, entry)?;
        let imp = CudaKernel { function, context: c.clone(), _module: module };
        Ok(Kernel { name: entry.into(), imp: Arc::new(imp) })
    }

    fn compiles(&self) -> Result<()> {
        Nvrtc::get().map(|_| ())
    }

    fn methods(&self) -> &[Method] {
        let source = Source::CudaCpp(include_str!("../../../../device/copy.cu").into());
        // Where it has no room for now it may have some later.
        let kernel = match self.copy.get() {
            Some(kernel) => kernel.is_some(),
            None => match self.compile(&source, "forebay_copy") {
                Err(e) if e.is_out_of_memory() => false,
                compiled => self.copy.get_or_init(|| compiled.ok()).is_some(),
            },
        };
        // Whether the driver maps memory is known only when it is asked.
        let mapped = self.windows.refusal().is_none() && self.alloc_mapped(1).is_ok_and(|b| b.is_mapped());
        match (mapped, kernel) {
            (true, true) => &Method::ALL,
            (true, false) => &[Method::Engine, Method::Mapped],
            (false, true) => &[Method::Engine, Method::Kernel],
            (false, false) => &[Method::Engine],
        }
    }

    fn occupy(&self) -> Occupied {
        struct Leaves(Arc<Context>);
        impl Drop for Leaves {
            fn drop(&mut self) {
                self.0.primary.stay.leave().into_iter().for_each(|what| self.0.free(what));
            }
        }
        self.context.primary.stay.occupy();
        Occupied(Some(Box::new(Leaves(self.context.clone()))))
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(queue::CudaQueue::new(self.context.clone(), self.part.clone(), self.copy.clone(), self.beside)?))
    }

    fn reaches(&self, other: &Buffer) -> bool {
        if queue::is_mine(&self.context, other) {
            return true;
        }
        let Some(m) = queue::peer(&self.context, other) else { return false };
        // Once for each device: the driver copies directly then, where the machine can, and by the host's memory otherwise.
        let first = self.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(m.context.device);
        if first && let Ok(d) = self.context.enter() {
            let mut can = 0;
            // SAFETY: `can` is valid; both contexts are alive. Refusals leave everything as it was.
            unsafe {
                if (d.cuDeviceCanAccessPeer)(&mut can, self.context.device, m.context.device) == SUCCESS
                    && can != 0
                    && let Some(theirs) = m.context.handle()
                {
                    (d.cuCtxEnablePeerAccess)(theirs, 0);
                }
            }
        }
        true
    }

    fn memory_id(&self) -> Option<u64> {
        Some(self.context.primary.serial as u64)
    }

    unsafe fn renew(&self) -> Result<Arc<dyn Device>> {
        let (c, d) = (&self.context, self.context.driver);
        // Nobody opens it meanwhile.
        let mut primaries = primaries();
        if c.primary.lost.get().is_none() {
            return Err(c.invalid("it is not lost, so there is nothing to renew".into()));
        }
        if !primaries.get(&c.device).is_some_and(|p| Arc::ptr_eq(p, &c.primary)) {
            return Err(c.invalid("it has been renewed already".into()));
        }
        // Held by this handle: the context; by the kernel that copies, it and its module. By the table: the primary context.
        let copy = if self.copy.get().is_some_and(Option::is_some) { 2 } else { 0 };
        let held = (Arc::strong_count(c) + Arc::strong_count(&c.primary)).saturating_sub(3 + copy);
        if held > 0 || self.part.is_some() {
            return Err(
                c.invalid(format!("{held} of its parts, queues, buffers, kernels and other handles are in use"))
            );
        }
        // SAFETY: nothing of ours is left in the context, and by the contract nobody else has anything there.
        let code = unsafe { (d.cuDevicePrimaryCtxReset)(c.device) };
        if code != SUCCESS {
            let (call, name) = ("cuDevicePrimaryCtxReset", d.error_name(code));
            return Err(Error::Driver(DriverError { call, code: i64::from(code), name, device: c.name.clone() }));
        }
        primaries.remove(&c.device);
        let renewed = Self::open_with(d, c.ordinal, &mut primaries)?;
        // Whether it is well again.
        let d = renewed.context.enter()?;
        let left = std::mem::take(&mut *c.primary.left.lock().unwrap_or_else(PoisonError::into_inner));
        left.into_iter().for_each(|free| free(d));
        Ok(Arc::new(renewed))
    }

    fn split(&self, units: u32) -> Result<[Arc<dyn Device>; 2]> {
        if self.part.is_some() {
            let what = "a part of a part".into();
            return Err(Error::Unsupported { device: self.context.name.clone(), what });
        }
        let device = |part: Part| -> Arc<dyn Device> {
            let (units, all) = (part.multiprocessors, self.info.compute_units.max(1));
            let info = DeviceInfo {
                name: format!("{} ({units} of {all} multiprocessors)", self.info.name),
                compute_units: units,
                strength: self.info.strength * u64::from(units) / u64::from(all),
                ..self.info.clone()
            };
            Arc::new(CudaDevice {
                info,
                context: self.context.clone(),
                cc: self.cc,
                cache: self.cache.clone(),
                modules: Loaded::default(),
                part: Some(Arc::new(part)),
                copy: self.copy.clone(),
                windows: Windows::default(),
                beside: self.beside,
                peers: Mutex::default(),
            })
        };
        Ok(Part::split(&self.context, units)?.map(device))
    }

    fn copies_beside(&self) -> usize {
        self.beside.copies
    }

    fn kernels_beside(&self) -> bool {
        self.beside.lists && self.part.is_none()
    }

    fn replays(&self) -> bool {
        self.part.is_none()
    }

    fn without(&self) -> Vec<String> {
        self.windows.refusal().into_iter().collect()
    }

    fn allocated(&self) -> u64 {
        self.context.allocated.load(Ordering::Relaxed)
    }
}
