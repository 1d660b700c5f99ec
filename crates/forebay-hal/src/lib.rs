//! What a device is to Forebay: memory, queues with in-order commands, monotonic fences, and kernels.
//!
//! Four backends implement [`Device`]: [`cpu`], [`opencl`], [`cuda`] and [`sim`]. All of them pass the one suite in
//! [`conformance`]. Everything is opened at run time: a missing library, symbol or device is an [`Error`] or an absent
//! device, never a panic.
//!
//! **Who validates.** The caller does. This crate checks what keeps memory safe (bounds, foreign handles) and reports
//! what the caller could not foresee (out of memory, a compile error, a lost device). It knows nothing of tasks,
//! coherence or policy: two commands that race because the caller ordered no fence between them are the caller's bug.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod cache;
pub mod conformance;
pub mod cpu;
pub mod cuda;
mod error;
pub mod fork;
mod kernel;
mod memory;
pub mod opencl;
pub mod portable;
mod queue;
pub mod sim;
mod sync;
mod transfer;
mod wanted;

pub use error::{DriverError, Error, Result};
pub use kernel::{Arg, ArgSpan, CpuFn, Geometry, Kernel, KernelImpl, Source};
pub use memory::{Buffer, MEMORY_VARIABLE, Memory};
pub use queue::{Completion, Fence, HostFn, Issued, KeepAlive, Listed, Queue, Recorded};
pub use transfer::{Direction, Method};
pub use wanted::Wanted;

use std::sync::Arc;

/// Which programming interface drives a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The host's processors.
    Cpu,
    /// Any device with an OpenCL 1.2 driver.
    OpenCl,
    /// An NVIDIA GPU through the CUDA driver.
    Cuda,
    /// The simulator: real results, virtual time.
    Sim,
}

impl Kind {
    /// All kinds, in the order in which [`discover`] looks for them.
    pub const ALL: [Kind; 4] = [Kind::Cpu, Kind::OpenCl, Kind::Cuda, Kind::Sim];

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cpu => "cpu",
            Kind::OpenCl => "opencl",
            Kind::Cuda => "cuda",
            Kind::Sim => "sim",
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        Kind::ALL
            .into_iter()
            .find(|k| k.name() == s)
            .ok_or_else(|| format!("unknown device kind {s:?}; known: cpu, opencl, cuda, sim"))
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What does not change about a device while it is open.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Interface that drives it.
    pub kind: Kind,
    /// Marketing name, as its driver gives it.
    pub name: String,
    /// Driver and compiler version; part of the key of cached kernels.
    pub driver: String,
    /// Cores, compute units or SMs.
    pub compute_units: u32,
    /// Bytes of memory that buffers come from.
    pub memory_bytes: u64,
    /// Rough relative speed (compute units × clock in MHz × lanes): only ever compared, never shown as a rate.
    pub strength: u64,
    /// True when the device's buffers are ordinary host memory, so that host and device need no copies.
    pub host_memory: bool,
    /// True when it computes on the host's own cores (the CPU, and OpenCL drivers for CPUs).
    pub is_cpu: bool,
    /// Where it is, if it is on the PCI bus and its driver says so.
    pub pci: Option<PciAddress>,
}

/// A device's place on the PCI bus: the same through whichever interface it is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device, which some call the slot.
    pub device: u32,
}

impl PciAddress {
    /// None for what drivers say that do not know: at 0000:00:00 is the bridge of the host.
    fn new(domain: u32, bus: u32, device: u32) -> Option<Self> {
        (domain | bus | device != 0).then_some(PciAddress { domain, bus, device })
    }
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

/// A device that can hold buffers, compile kernels and run them.
///
/// All methods may be called from any thread.
pub trait Device: Send + Sync {
    /// Constant facts about the device.
    fn info(&self) -> &DeviceInfo;

    /// Allocates `bytes` of device memory, uninitialised on devices and zeroed on the CPU. `bytes` of 0 gives an empty
    /// buffer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with requested, used and limit; [`Error::Lost`] when the device is gone.
    fn alloc(&self, bytes: usize) -> Result<Buffer>;

    /// Allocates device memory that the processor itself can load from and store to, where there is such memory
    /// ([`Memory::is_mapped`]); ordinary memory otherwise.
    ///
    /// # Errors
    /// As [`Device::alloc`].
    fn alloc_mapped(&self, bytes: usize) -> Result<Buffer> {
        self.alloc(bytes)
    }

    /// Allocates host memory that kernels of this device read and write in place, without any copy: two handles to the
    /// same bytes, the host's and the device's. What the host wrote before a launch the kernel sees; what a kernel wrote
    /// the host sees once a fence behind it has been reached.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a device cannot reach host memory; [`Error::OutOfMemory`].
    fn alloc_shared(&self, bytes: usize) -> Result<(Buffer, Buffer)> {
        let _ = bytes;
        Err(Error::Unsupported { device: self.info().name.clone(), what: "host memory that its kernels reach".into() })
    }

    /// Allocates host memory from which this device copies fastest (page-locked where that exists).
    fn alloc_host(&self, bytes: usize) -> Result<Buffer> {
        cpu::HostMemory::buffer(bytes)
    }

    /// Makes `entry` of `source` callable, compiling it at most once per content, device and driver ([`cache`]).
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log and the source line, [`Error::NoEntry`], or
    /// [`Error::Unsupported`] when the source is in a language of another device.
    fn compile(&self, source: &Source, entry: &str) -> Result<Kernel>;

    /// Whether kernels that come as text can be compiled for it. Without a compiler a device still moves data, and runs
    /// kernels that were compiled elsewhere.
    ///
    /// # Errors
    /// What it would need that is not here.
    fn compiles(&self) -> Result<()> {
        Ok(())
    }

    /// The methods by which its queues move bytes to and from the host; [`Method::Engine`] first.
    fn methods(&self) -> &[Method] {
        &[Method::Engine]
    }

    /// The method that is one `memcpy` by the calling thread within the host's memory, where there is one: for few bytes nothing is
    /// faster.
    fn plain_copy(&self) -> Option<Method> {
        None
    }

    /// Whether its queues copy from this memory of another device, without going by the host.
    fn reaches(&self, other: &Buffer) -> bool {
        let _ = other;
        false
    }

    /// Devices with the same number have one memory: what an address is on one ([`Memory::address`]) it is on the others.
    /// None where buffers have no addresses.
    fn memory_id(&self) -> Option<u64> {
        None
    }

    /// Divides it: a device of at least `units` of its compute units, and one of the rest. Kernels of one do not take the
    /// other's units; what else there is (memory, caches, copy engines) they share. It goes on being a device itself, whose
    /// kernels run on all units.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it cannot be divided, [`Error::Invalid`] where not like this.
    fn split(&self, units: u32) -> Result<[Arc<dyn Device>; 2]> {
        let what = format!("a part of it with {units} compute units");
        Err(Error::Unsupported { device: self.info().name.clone(), what })
    }

    /// A lost device, made anew: what comes back works again, though nothing is left of what was on it. Everything of the
    /// lost one (parts, queues, buffers, kernels, other handles) must have been dropped, save this handle.
    ///
    /// # Safety
    /// Nobody else in this process uses the device, or memory that the device's driver has page-locked for them: with the
    /// lost context, which the whole process shares, it goes away.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not lost, or something of it is still there; [`Error::Unsupported`] where a lost device
    /// stays lost; the driver's.
    unsafe fn renew(&self) -> Result<Arc<dyn Device>> {
        Err(Error::Unsupported { device: self.info().name.clone(), what: "being renewed".into() })
    }

    /// Copies of at least so many bytes run beside kernels that do not use the same memory; [`usize::MAX`] if none do.
    fn copies_beside(&self) -> usize {
        usize::MAX
    }

    /// Whether kernels of one queue that share no memory run side by side.
    fn kernels_beside(&self) -> bool {
        false
    }

    /// Whether its queues replay lists of kernels ([`Queue::launch_list`]) instead of launching one by one.
    fn replays(&self) -> bool {
        false
    }

    /// What it could not do that others of its kind can, and why, as far as that has been tried.
    fn without(&self) -> Vec<String> {
        Vec::new()
    }

    /// From now on, and until what comes back is dropped, a kernel may be running that ends only when it is told to. A
    /// driver that frees memory or loads code waits for all kernels; so what is freed meanwhile is freed in the end, and
    /// kernels that are not compiled yet are refused. Returns once what was being freed or loaded is.
    fn occupy(&self) -> Occupied {
        Occupied(None)
    }

    /// A new in-order queue.
    fn queue(&self) -> Result<Box<dyn Queue>>;

    /// Bytes currently allocated through this handle.
    fn allocated(&self) -> u64;
}

/// A device on which a kernel stays ([`Device::occupy`]).
#[must_use = "the device is occupied as long as this lives"]
pub struct Occupied(#[allow(dead_code, reason = "held for its drop")] Option<Box<dyn Send + Sync>>);

/// Devices of a kind that can be used, and why others cannot.
type Found = (Vec<Arc<dyn Device>>, Vec<Error>);

/// One device that cannot be had takes nothing away from the others.
fn opened(all: impl Iterator<Item = Result<Arc<dyn Device>>>) -> Found {
    let (mut found, mut why) = (Vec::new(), Vec::new());
    for device in all {
        match device {
            Ok(device) => found.push(device),
            Err(e) => why.push(e),
        }
    }
    (found, why)
}

/// Kinds of which there is no device, or not each, with the reason.
pub type Missing = Vec<(Kind, Error)>;

/// Every device of the wanted kinds on this machine, in the order of the kinds; what is absent is simply not in the list.
///
/// A GPU is there once, however many interfaces it has: through CUDA, if that is wanted and can compile, or else through the
/// first OpenCL platform that shows it. Two devices that are one would each be given work as if the other had none.
///
/// The second list says why a kind is missing, or not all of it is there, for `forebay doctor`.
pub fn discover(kinds: &[Kind]) -> (Vec<Arc<dyn Device>>, Missing) {
    let mut found: Vec<Arc<dyn Device>> = Vec::new();
    let mut missing = Vec::new();
    let none = |e| (Vec::new(), vec![e]);
    // Before OpenCL, which makes a context for everything that it opens.
    let mut through_cuda = kinds.contains(&Kind::Cuda).then(|| cuda::look().unwrap_or_else(none));
    let mut through_opencl = kinds.contains(&Kind::OpenCl).then(|| {
        let able = through_cuda.iter().flat_map(|(devices, _)| devices).filter(|d| d.compiles().is_ok());
        let places: Vec<PciAddress> = able.filter_map(|d| d.info().pci).collect();
        opencl::look(&places).unwrap_or_else(none)
    });
    if let (Some((devices, why)), Some((others, _))) = (&mut through_cuda, &through_opencl) {
        let twice = |d: &Arc<dyn Device>| {
            let place = d.info().pci.filter(|at| others.iter().any(|o| o.info().pci == Some(*at)))?;
            Some(Error::Twice { kind: Kind::Cuda, device: d.info().name.clone(), place, through: "OpenCL" })
        };
        why.extend(devices.iter().filter_map(twice));
        devices.retain(|d| twice(d).is_none());
    }
    for &kind in kinds {
        let (devices, why): Found = match kind {
            Kind::Cpu => (vec![Arc::new(cpu::CpuDevice::new(cpu::Pool::global().clone()))], Vec::new()),
            Kind::OpenCl => through_opencl.take().unwrap_or_default(),
            Kind::Cuda => through_cuda.take().unwrap_or_default(),
            Kind::Sim => (vec![Arc::new(sim::SimDevice::new(sim::Model::default()))], Vec::new()),
        };
        found.extend(devices);
        missing.extend(why.into_iter().map(|e| (kind, e)));
    }
    (found, missing)
}
