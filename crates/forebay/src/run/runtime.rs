//! The runtime: devices, workers, scheduling mode.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::{CpuDevice, Helpers, Pool as Workers};
use forebay_hal::fork::Home;
use forebay_hal::{Device, Kind, Wanted};
use forebay_policy::{DeviceSet, MAX_PLACED, Mode};
use forebay_proto::client::Account;

use super::device::{DEPTH_PRIORITY, DEPTH_THROUGHPUT, DeviceHandle};
use super::dispatch::Dispatcher;
use super::gate::Gate;
use super::trace::{Copies, CopySpan, TRACE_VARIABLE, monotonic_ns};
use crate::error::{Error, Result};
use crate::graph::{Impl, Launch, Task};
use crate::place::{Load, Models};
use crate::resident::Resident;

/// Most devices of a runtime, with the CPU.
pub const MAX_DEVICES: usize = MAX_PLACED;

/// How long a device that was full when it was tried is left alone. Asking anew may take long: for a context.
const FULL_FOR: Duration = Duration::from_secs(5);

/// What came of trying a device.
struct Tried {
    /// Why it cannot be used. It may be full, on a machine that others use.
    why: Option<forebay_hal::Error>,
    at: Instant,
}

impl Tried {
    fn try_it(d: &DeviceHandle) -> Self {
        // A little memory is what the least needs.
        Tried { why: d.device.alloc(1).err(), at: Instant::now() }
    }

    fn is_over(&self) -> bool {
        self.why.as_ref().is_some_and(forebay_hal::Error::is_out_of_memory) && self.at.elapsed() > FULL_FOR
    }
}

pub(crate) struct RuntimeInner {
    pub(crate) devices: Vec<Arc<DeviceHandle>>,
    pub(crate) pool: Arc<Workers>,
    pub(crate) dispatcher: Dispatcher,
    /// Of devices that nobody named.
    tried: Box<[Mutex<Option<Tried>>]>,
    pub(super) mode: Mode,
    pub(super) fusion: bool,
    /// The device whose page-locked memory blocks should live in on the host.
    pub(super) pinned: Option<Arc<dyn Device>>,
    /// The process's presence at the accelerator service, if there is one.
    pub(crate) gate: Option<Arc<Gate>>,
    epoch: Instant,
    /// Where recordings of all graphs go.
    pub(crate) recordings: Option<PathBuf>,
    pub(super) models: Arc<Models>,
    pub(super) load: Arc<Load>,
    home: Home,
}

impl RuntimeInner {
    /// Whether it works in this process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// Nanoseconds since the runtime started.
    pub(crate) fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Its beginning on the system's monotonic clock, ns.
    pub(crate) fn epoch_ns(&self) -> u64 {
        monotonic_ns(self.epoch)
    }

    /// Has copies remembered from now on.
    pub(super) fn record_copies(&self) {
        self.devices.iter().for_each(|d| _ = d.copies.get_or_init(|| Copies::new(self.epoch)));
    }

    /// The copies since the last call, in the order of their beginnings, and how many did not fit.
    pub(crate) fn take_copies(&self) -> (Vec<CopySpan>, u64) {
        let of_each = self.devices.iter().filter_map(|d| d.copies.get()).map(Copies::take);
        let (mut all, dropped) = of_each.fold((Vec::new(), 0), |(mut all, n), (c, m)| {
            all.extend(c);
            (all, n + m)
        });
        all.sort_by_key(|c| c.begin_ns);
        (all, dropped)
    }

    /// The process's account on a device, if the service divides it.
    pub(crate) fn account(&self, device: usize) -> Option<Arc<Account>> {
        let d = &self.devices[device];
        if d.is_host() { self.gate.as_ref().map(|g| g.cpu().clone()) } else { d.shared_account() }
    }
}

/// Where graphs run. Cheap to clone; graphs keep what they need of it.
#[derive(Clone)]
pub struct Runtime(pub(super) Arc<RuntimeInner>);

impl Drop for Runtime {
    fn drop(&mut self) {
        if !self.0.is_here() {
            // Its devices and threads are the other process's to give back.
            std::mem::forget(self.0.clone());
        }
    }
}

/// Settings of a [`Runtime`].
#[derive(Default)]
pub struct RuntimeBuilder {
    devices: Option<Vec<Arc<dyn Device>>>,
    workers: Option<usize>,
    mode: Mode,
    unfused: bool,
    unserved: bool,
    models: Option<Arc<Models>>,
}

impl RuntimeBuilder {
    /// Exactly these devices beside the CPU, which is always there.
    pub fn devices(mut self, devices: Vec<Arc<dyn Device>>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// The CPU only.
    pub fn cpu_only(self) -> Self {
        self.devices(Vec::new())
    }

    /// The CPU and every device of this kind, or one of them (`"cuda:1".parse::<Wanted>()`).
    ///
    /// # Errors
    /// The reason why there is none, or why none can compile kernels. (Who has compiled them elsewhere names the devices.)
    pub fn only(self, wanted: impl Into<Wanted>) -> Result<Self> {
        let devices = wanted.into().find()?;
        // What one of a kind needs to compile all do.
        devices.first().map_or(Ok(()), |d| d.compiles())?;
        // The CPU is there anyway.
        Ok(self.devices(devices.into_iter().filter(|d| d.info().kind != Kind::Cpu).collect()))
    }

    /// Scheduling mode; data-aware by default.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// A pool of so many workers of its own, instead of the process's shared pool.
    pub fn workers(mut self, n: usize) -> Self {
        self.workers = Some(n);
        self
    }

    /// Whether static regions that can run on one accelerator only become one task each, which is the default: modular
    /// graphs then cost what hand-written code costs. Never done under [`Mode::Priority`].
    pub fn fusion(mut self, on: bool) -> Self {
        self.unfused = !on;
        self
    }

    /// Whether the runtime registers with the accelerator service, when there is one, and keeps to the share that the
    /// service gives this process; which is the default.
    pub fn service(mut self, on: bool) -> Self {
        self.unserved = !on;
        self
    }

    /// Where [`Mode::Adaptive`] keeps what it learns: the user's folder by default, which all runtimes of a process share.
    pub fn models(mut self, models: Arc<Models>) -> Self {
        self.models = Some(models);
        self
    }

    /// Opens the devices and starts the workers.
    ///
    /// # Errors
    /// A device that refuses a queue; more than [`MAX_DEVICES`] devices.
    pub fn build(self) -> Result<Runtime> {
        let pool = match self.workers {
            Some(n) => Workers::new(n),
            None => Workers::global().clone(),
        };
        if !pool.is_alive() {
            let why = "no worker thread could be started (see the limits on threads and memory)".into();
            return Err(Error::Size { what: "runtime".into(), why });
        }
        let mut all: Vec<Arc<dyn Device>> = vec![Arc::new(CpuDevice::new(pool.clone()))];
        let named = self.devices.is_some();
        all.extend(self.devices.unwrap_or_else(accelerators));
        if all.len() > MAX_DEVICES {
            let why = format!("{} devices; the limit is {MAX_DEVICES}", all.len());
            return Err(Error::Size { what: "runtime".into(), why });
        }
        let depth = if self.mode == Mode::Priority { DEPTH_PRIORITY } else { DEPTH_THROUGHPUT };
        let pinned = all.iter().find(|d| d.info().kind == Kind::Cuda).cloned();
        let devices = all
            .into_iter()
            .enumerate()
            .map(|(i, d)| DeviceHandle::new(i, d, depth))
            .collect::<forebay_hal::Result<Vec<_>>>()?;
        let strengths = devices.iter().map(|d| d.device.info().strength).collect();
        // A worker issues one invocation at a time to an accelerator; `depth` bounds what runs behind it.
        // Under adaptive placement it waits for that one, so another issues the next.
        let issuing = if self.mode == Mode::Adaptive { 2 } else { 1 };
        let is_cores = |d: &&Arc<DeviceHandle>| d.is_host() || d.device.info().is_cpu;
        let shared = devices.iter().filter(is_cores).fold(DeviceSet::default(), |s, d| s.with(d.index));
        let helpers = |d: &Arc<DeviceHandle>| {
            let wanted = self.mode == Mode::Adaptive && !d.is_host();
            wanted.then(|| Helpers::new(&pool, &format!("forebay-{}{}", d.kind(), d.index), issuing))
        };
        let helpers = devices.iter().map(helpers).collect();
        let slots = devices.iter().map(|d| if d.is_host() { pool.workers() } else { issuing }).collect();
        let gate = if self.unserved { None } else { Gate::of_process(pool.workers()) };
        if let Some(gate) = &gate {
            for d in devices.iter().filter(|d| !d.is_host()) {
                // An OpenCL device on the CPU is the CPU, which the process has credit on.
                let info = d.device.info();
                if info.is_cpu {
                    gate.others_work();
                }
                d.serve(gate, if info.is_cpu { Some(gate.cpu().clone()) } else { gate.account(info) });
            }
            // As below: nothing that could become the last owner of anything.
            let gate = Arc::downgrade(gate);
            let sleeping = gate.clone();
            pool.on_sleep(Box::new(move |others| sleeping.upgrade().inspect(|gate| gate.sleeps(others)).is_some()));
            let others: Vec<_> = devices.iter().filter(|d| !d.is_host()).map(Arc::downgrade).collect();
            pool.on_idle(Box::new(move |at_work| {
                let Some(gate) = gate.upgrade() else { return false };
                gate.rests(
                    at_work,
                    others.iter().filter_map(std::sync::Weak::upgrade).all(|d| d.is_quiet_or_watched()),
                );
                true
            }));
        }
        let tried = devices.iter().filter(|_| !named).map(|_| Mutex::default()).collect();
        let inner = Arc::new(RuntimeInner {
            dispatcher: Dispatcher::new(self.mode, strengths, slots, shared, helpers),
            devices,
            pool,
            tried,
            mode: self.mode,
            fusion: !self.unfused && self.mode != Mode::Priority,
            pinned,
            gate,
            epoch: Instant::now(),
            recordings: std::env::var_os(TRACE_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from),
            models: self.models.unwrap_or_else(|| {
                static USERS: OnceLock<Arc<Models>> = OnceLock::new();
                USERS.get_or_init(|| Arc::new(Models::user())).clone()
            }),
            load: Load::of_process(),
            home: Home::here(),
        });
        // Only the devices: a hook that kept the runtime alive for a moment could become its last owner.
        let asynchronous: Vec<_> = inner.devices.iter().filter(|d| !d.is_host()).map(Arc::downgrade).collect();
        if !asynchronous.is_empty() {
            inner.pool.on_idle(Box::new(move |_| {
                let alive: Vec<_> = asynchronous.iter().filter_map(std::sync::Weak::upgrade).collect();
                alive.iter().for_each(|d| d.flush());
                !alive.is_empty()
            }));
        }
        Ok(Runtime(inner))
    }
}

/// What a runtime uses when nothing is said: all CUDA devices, or else OpenCL devices that are no CPUs and can compile; the
/// first ones, where there are more than it can have. NVIDIA's driver brings a compiler for OpenCL along, and none for CUDA.
fn accelerators() -> Vec<Arc<dyn Device>> {
    let (mut found, _) = forebay_hal::discover(&[Kind::Cuda]);
    if found.iter().all(|d| d.compiles().is_err()) {
        let (mut others, _) = forebay_hal::discover(&[Kind::OpenCl]);
        others.retain(|d| !d.info().is_cpu && d.compiles().is_ok());
        if !others.is_empty() {
            found = others;
        }
    }
    found.truncate(MAX_DEVICES - 1);
    found
}

impl Runtime {
    /// A runtime with the accelerators of this machine and the process's workers.
    ///
    /// # Errors
    /// As [`RuntimeBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Settings for another one.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// Whether it has a device that runs these kernels.
    pub(crate) fn runs(&self, kind: Kind, launches: &[Launch]) -> bool {
        self.0.devices.iter().any(|d| d.kind() == kind && self.cannot_run(d, launches).is_none())
    }

    /// Why a device runs none of these, though it is of their kind: they are text, and it has no compiler; nobody named it, and
    /// it could not be used when it was tried; or it is lost.
    pub(super) fn cannot_run(&self, d: &DeviceHandle, launches: &[Launch]) -> Option<forebay_hal::Error> {
        let text = launches.iter().any(|l| l.source.is_text());
        text.then(|| d.device.compiles().err()).flatten().or_else(|| self.refusal(d))
    }

    fn refusal(&self, d: &DeviceHandle) -> Option<forebay_hal::Error> {
        let tried = self.0.tried.get(d.index).map(|t| t.lock().unwrap_or_else(PoisonError::into_inner));
        tried.and_then(|t| t.as_ref()?.why.clone()).or_else(|| d.lost().cloned())
    }

    /// Tries the devices that these tasks have kernels for and nobody has named; full ones now and then again.
    pub(super) fn try_devices(&self, tasks: &[Task]) {
        for (d, tried) in self.0.devices.iter().zip(&self.0.tried).filter(|(d, _)| !d.is_host()) {
            let has = |t: &Task| t.impls.iter().any(|i| matches!(i, Impl::Kernels(k, _) if *k == d.kind()));
            if tasks.iter().any(has) {
                let mut tried = tried.lock().unwrap_or_else(PoisonError::into_inner);
                if tried.as_ref().is_none_or(Tried::is_over) {
                    *tried = Some(Tried::try_it(d));
                }
            }
        }
    }

    /// Which devices run no kernels, and why, as far as is known: for want of a compiler, because they are lost, or, of devices
    /// that nobody named, since a graph found that they cannot be used. What has another implementation runs elsewhere, and
    /// nothing else says so.
    pub fn unused(&self) -> Vec<(String, forebay_hal::Error)> {
        let why = |d: &Arc<DeviceHandle>| {
            let why = d.device.compiles().err().or_else(|| self.refusal(d))?;
            Some((d.device.info().name.clone(), why))
        };
        self.0.devices.iter().filter_map(why).collect()
    }

    /// Name and kind of each device, by number.
    pub fn devices(&self) -> Vec<(String, Kind)> {
        self.0.devices.iter().map(|d| (d.device.info().name.clone(), d.kind())).collect()
    }

    /// Whether it has a device whose memory is that of a grid.
    pub(crate) fn has_memory_of(&self, r: &Resident) -> bool {
        self.0.devices.iter().any(|d| r.reaches(d.device.memory_id()))
    }

    /// Bytes copied to and from each device so far, by number.
    pub fn copied(&self) -> Vec<u64> {
        self.0.devices.iter().map(|d| d.copied.load(std::sync::atomic::Ordering::Relaxed)).collect()
    }

    /// How many of the transfers to and from each device the processor made itself, through a mapping, because that was
    /// measured to be faster for their size.
    pub fn mapped(&self) -> Vec<u64> {
        self.0.devices.iter().map(|d| d.mapped.load(std::sync::atomic::Ordering::Relaxed)).collect()
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.0.pool.workers()
    }
}
