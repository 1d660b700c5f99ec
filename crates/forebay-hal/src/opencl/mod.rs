//! OpenCL 1.2 devices, the library opened at run time (through `cl3`).
//!
//! One context per device. A fence is made of the events of commands before it, so it costs no command of its own.

mod list;
mod memory;
mod order;
mod queue;

use std::any::Any;
use std::ffi::CString;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cl3::types::{cl_command_queue, cl_context, cl_device_id, cl_int, cl_kernel, cl_platform_id, cl_program};
use cl3::{command_queue as cq, context, device, error_codes, kernel, platform, program};

use crate::cache::{Cache, Loaded};
use crate::fork::{self, Home};
use crate::kernel::KernelImpl;
use crate::{Buffer, Device, DeviceInfo, DriverError, Error, Kernel, Kind, Method, Queue, Result, Source, portable};

pub(crate) use list::look;
use memory::ClMemory;

/// The platform that is known to run commands of one queue side by side: PoCL's. Intel's for CPUs (2026.2) takes queues that are
/// out of order, too, but runs one command after the other in them on two cores, and now and then hangs for ever when such a
/// queue is released behind its last kernel (a task of the queue's waits for the queue's tasks to end).
const SIDE_BY_SIDE: &str = "Portable Computing Language";

/// Turns a status of `cl3` into an error.
fn check<T>(call: &'static str, device: &str, r: std::result::Result<T, cl_int>) -> Result<T> {
    r.map_err(|code| {
        let name = error_codes::error_text(code).to_owned();
        let why = || format!("{call}: {name}");
        match code {
            error_codes::CL_DEVICE_NOT_AVAILABLE => Error::Lost { device: device.into(), why: why() },
            // Drivers that give a buffer its memory when it is first used say so then.
            error_codes::CL_MEM_OBJECT_ALLOCATION_FAILURE => Error::Full { device: device.into(), why: why() },
            _ => Error::Driver(DriverError { call, code: i64::from(code), name, device: device.into() }),
        }
    })
}

/// Where OpenCL was used first: its drivers have threads.
static HOME: OnceLock<Home> = OnceLock::new();

/// Whether drivers may be asked for anything.
fn is_home() -> bool {
    HOME.get().is_none_or(|home| home.is_here())
}

struct Context {
    id: cl_context,
    device: cl_device_id,
    /// It is a part of a device, which is given back.
    is_part: bool,
    name: String,
    /// Its memory is the processor's, too.
    is_shared: bool,
    allocated: AtomicU64,
    limit: u64,
}

// SAFETY: OpenCL objects other than kernels may be used from any thread (OpenCL 1.2, appendix A.2).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        if !is_home() {
            return;
        }
        // SAFETY: created in `open`, released once.
        let _ = unsafe { context::release_context(self.id) };
        if self.is_part {
            // SAFETY: made in `split`, released once.
            let _ = unsafe { device::release_device(self.device) };
        }
    }
}

impl Context {
    /// That its driver serves this process.
    fn is_ours(&self) -> Result<()> {
        let lost = || Error::Lost { device: self.name.clone(), why: fork::WHY.into() };
        if is_home() { Ok(()) } else { Err(lost()) }
    }
}

/// An OpenCL device.
pub struct ClDevice {
    info: DeviceInfo,
    context: Arc<Context>,
    cache: Cache,
    programs: Loaded<Program>,
    /// Its queues are out of order, and run commands side by side.
    free_queues: bool,
    /// It is the processor, which does not share its memory, for this reason.
    not_shared: Option<String>,
}

impl ClDevice {
    /// Opens it; `of` says what it is a part of, if it is one.
    fn open(id: cl_device_id, of: Option<&DeviceInfo>) -> Result<Self> {
        let text = |what| list::text(id, what);
        let number = |what| device::get_device_info(id, what).map(u64::from).unwrap_or(0);
        let units = device::get_device_info(id, device::CL_DEVICE_MAX_COMPUTE_UNITS).map(u32::from).unwrap_or(1);
        let mhz = device::get_device_info(id, device::CL_DEVICE_MAX_CLOCK_FREQUENCY).map(u32::from).unwrap_or(1000);
        let platform = device::get_device_info(id, device::CL_DEVICE_PLATFORM).map(isize::from);
        let named = |p: isize| platform::get_platform_info(p as cl_platform_id, platform::CL_PLATFORM_NAME);
        let platform = platform.and_then(named).map(String::from);
        let is = |kind| number(device::CL_DEVICE_TYPE) & kind != 0;
        let (gpu, cpu) = (is(device::CL_DEVICE_TYPE_GPU), is(device::CL_DEVICE_TYPE_CPU));
        let name = of.map_or_else(
            || text(device::CL_DEVICE_NAME),
            |d| format!("{} ({units} of {} compute units)", d.name, d.compute_units),
        );
        let limit = crate::memory::allowed(number(device::CL_DEVICE_GLOBAL_MEM_SIZE));
        let not_shared = memory::why_not_shared(id).filter(|_| cpu);
        let ctx = check("clCreateContext", &name, context::create_context(&[id], null(), None, null_mut()))?;
        Ok(ClDevice {
            info: DeviceInfo {
                kind: Kind::OpenCl,
                driver: format!("{} {}", text(device::CL_DEVICE_VERSION), text(device::CL_DRIVER_VERSION)),
                compute_units: units,
                memory_bytes: limit,
                // 64 lanes per compute unit on GPUs; on CPUs slightly below our own CPU device, which needs no copies.
                strength: u64::from(units) * u64::from(mhz.max(1)) * if gpu { 64 } else { 7 },
                host_memory: false,
                is_cpu: cpu,
                pci: of.map_or_else(|| list::place(id), |whole| whole.pci),
                name: name.clone(),
            },
            context: Arc::new(Context {
                id: ctx,
                device: id,
                is_part: of.is_some(),
                name,
                is_shared: cpu && not_shared.is_none(),
                allocated: AtomicU64::new(0),
                limit,
            }),
            cache: Cache::user(),
            programs: Loaded::default(),
            not_shared,
            free_queues: platform.is_ok_and(|name| name.trim() == SIDE_BY_SIDE)
                && number(device::CL_DEVICE_QUEUE_ON_HOST_PROPERTIES) & cq::CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0,
        })
    }

    fn build(&self, source: &str, key: &str, entry: &str) -> Result<Program> {
        let c = &self.context;
        let options = CString::new(portable::OPENCL_OPTIONS).unwrap_or_default();
        if let Some(binary) = self.cache.get(key) {
            // SAFETY: the binary came from this driver for this device (its version is in the key).
            let made = unsafe { program::create_program_with_binary(c.id, &[c.device], &[&binary]) };
            if let Ok(id) = made {
                let p = Program { id, context: c.clone() };
                if program::build_program(p.id, &[c.device], &options, None, null_mut()).is_ok() {
                    return Ok(p);
                }
            }
        }
        let id = check("clCreateProgramWithSource", &c.name, program::create_program_with_source(c.id, &[source]))?;
        let p = Program { id, context: c.clone() };
        if let Err(code) = program::build_program(p.id, &[c.device], &options, None, null_mut()) {
            let log = program::get_program_build_info(p.id, c.device, program::CL_PROGRAM_BUILD_LOG)
                .map(String::from)
                .unwrap_or_default();
            let log = format!("{}\n{}", error_codes::error_text(code), annotate(&log, source));
            return Err(Error::Compile { device: c.name.clone(), entry: entry.into(), log });
        }
        if let Ok(binaries) = program::get_program_info(p.id, program::CL_PROGRAM_BINARIES) {
            let binaries: Vec<Vec<u8>> = binaries.into();
            if let Some(b) = binaries.first().filter(|b| !b.is_empty()) {
                self.cache.put(key, b);
            }
        }
        Ok(p)
    }
}

/// Appends to a compiler's log the source lines that it names (`...:LINE:COL: error`).
pub(crate) fn annotate(log: &str, source: &str) -> String {
    // Line numbers restart after the last `#line 1`.
    let body = source.rsplit_once("#line 1\n").map_or(source, |(_, b)| b);
    let lines: Vec<&str> = body.lines().collect();
    let mut out = String::new();
    for l in log.lines() {
        out.push_str(l.trim_end());
        out.push('\n');
        if !l.contains("error") {
            continue;
        }
        // `file:3:10: error` or `file(3): error`.
        let named =
            l.split_inclusive([':', '(', ')']).zip(l.split([':', '(', ')']).skip(1)).find_map(|(before, number)| {
                (before.ends_with([':', '('])).then(|| number.parse::<usize>().ok()).flatten()
            });
        let named = named.filter(|&n| n >= 1 && n <= lines.len());
        if let Some(n) = named {
            out.push_str(&format!("  source line {n}: {}\n", lines[n - 1]));
        }
    }
    out
}

struct Program {
    id: cl_program,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Program {}
// SAFETY: as for `Context`.
unsafe impl Sync for Program {}

impl Drop for Program {
    fn drop(&mut self) {
        if !is_home() {
            return;
        }
        // SAFETY: created by this crate, released once.
        let _ = unsafe { program::release_program(self.id) };
    }
}

/// A kernel object; its argument slots are state, so a launch holds the lock from the first argument to the enqueue.
pub(super) struct ClKernel {
    id: Mutex<KernelId>,
    /// Argument count, to report a wrong call before the driver does.
    args: u32,
    /// Bit `i`: what argument `i` points to is only read.
    reads: u64,
    /// Items of a group, at most: less than the device takes if the kernel needs much.
    most_items: usize,
    /// The only group that it takes, where its text says so (`reqd_work_group_size`).
    group: Option<[usize; 3]>,
    program: Arc<Program>,
}

pub(super) struct KernelId(cl_kernel);

// SAFETY: used by one thread at a time, under its lock.
unsafe impl Send for KernelId {}

impl Drop for ClKernel {
    fn drop(&mut self) {
        if !is_home() {
            return;
        }
        let id = self.id.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: created in `compile`, released once.
        let _ = unsafe { kernel::release_kernel(id.0) };
    }
}

impl KernelImpl for ClKernel {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for ClDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        Ok(Arc::new(ClMemory::alloc(&self.context, bytes)?))
    }

    fn alloc_shared(&self, bytes: usize) -> Result<(Buffer, Buffer)> {
        let c = &self.context;
        let host = crate::cpu::HostMemory::buffer(bytes.max(1))?;
        // Other devices may keep a copy of such memory, and bring it up to date only around a mapping.
        let p = host.host_ptr().filter(|_| self.info.is_cpu).ok_or_else(|| Error::Unsupported {
            device: c.name.clone(),
            what: "host memory that its kernels reach".into(),
        })?;
        let device = ClMemory::of_host(c, &host, p, bytes)?;
        Ok((host, Arc::new(device)))
    }

    fn compile(&self, source: &Source, entry: &str) -> Result<Kernel> {
        let c = &self.context;
        let text = match source {
            Source::OpenClC(s) => s.to_string(),
            Source::Portable(s) => format!("{}{s}", portable::OPENCL_PRELUDE),
            other => {
                return Err(Error::Unsupported { device: c.name.clone(), what: format!("kernel source {other:?}") });
            }
        };
        let key = Cache::key(&[
            b"opencl",
            text.as_bytes(),
            portable::OPENCL_OPTIONS.as_bytes(),
            self.info.name.as_bytes(),
            self.info.driver.as_bytes(),
        ]);
        let program = self.programs.get_or(&key, || self.build(&text, &key, entry))?;
        let missing = || Error::NoEntry {
            device: c.name.clone(),
            entry: entry.into(),
            known: program::get_program_info(program.id, program::CL_PROGRAM_KERNEL_NAMES)
                .map(String::from)
                .unwrap_or_default(),
        };
        let name = CString::new(entry).map_err(|_| missing())?;
        let id = kernel::create_kernel(program.id, &name).map_err(|_| missing())?;
        let args = kernel::get_kernel_info(id, kernel::CL_KERNEL_NUM_ARGS).map(u32::from).unwrap_or(0);
        let only_read = |&i: &u32| {
            let told = kernel::get_kernel_arg_info(id, i, kernel::CL_KERNEL_ARG_TYPE_QUALIFIER).map(u64::from);
            told.is_ok_and(|q| q & kernel::CL_KERNEL_ARG_TYPE_CONST as u64 != 0)
        };
        let reads = (0..args.min(63)).filter(only_read).fold(0, |r, i| r | 1 << i);
        let groups = |what| kernel::get_kernel_work_group_info(id, c.device, what);
        let most_items = groups(kernel::CL_KERNEL_WORK_GROUP_SIZE).map(usize::from).unwrap_or(usize::MAX);
        let group = groups(kernel::CL_KERNEL_COMPILE_WORK_GROUP_SIZE).ok().and_then(|g| Vec::from(g).try_into().ok());
        let group = group.filter(|g: &[usize; 3]| !g.contains(&0));
        Ok(Kernel {
            name: entry.into(),
            imp: Arc::new(ClKernel { id: Mutex::new(KernelId(id)), args, reads, most_items, group, program }),
        })
    }

    fn compiles(&self) -> Result<()> {
        // Boards whose kernels are made elsewhere, in hours. Whoever does not tell has one, as every full profile must.
        match device::get_device_info(self.context.device, device::CL_DEVICE_COMPILER_AVAILABLE).map(u32::from) {
            Ok(0) => {
                let what = "kernels that come as text: its driver has no compiler".into();
                Err(Error::Unsupported { device: self.info.name.clone(), what })
            }
            _ => Ok(()),
        }
    }

    fn methods(&self) -> &[Method] {
        &[Method::Engine, Method::Mapped]
    }

    fn plain_copy(&self) -> Option<Method> {
        self.context.is_shared.then_some(Method::Mapped)
    }

    fn without(&self) -> Vec<String> {
        let told = |why| format!("copies by the processor without map and unmap: {why}");
        self.not_shared.iter().map(told).collect()
    }

    fn split(&self, units: u32) -> Result<[Arc<dyn Device>; 2]> {
        let (c, all) = (&self.context, self.info.compute_units);
        if units == 0 || units >= all {
            let what = format!("a part of {units} of {all} compute units: something has to be left for each part");
            return Err(Error::Invalid { device: c.name.clone(), what });
        }
        // Asked before: Mesa's driver (22.3) has no such call, and the loader jumps to nowhere.
        let ways = device::get_device_info(c.device, device::CL_DEVICE_PARTITION_PROPERTIES).map(Vec::<isize>::from);
        if !ways.is_ok_and(|w| w.contains(&device::CL_DEVICE_PARTITION_BY_COUNTS)) {
            let what = "parts of it with so many compute units".into();
            return Err(Error::Unsupported { device: c.name.clone(), what });
        }
        let counts = [
            device::CL_DEVICE_PARTITION_BY_COUNTS,
            units as isize,
            (all - units) as isize,
            device::CL_DEVICE_PARTITION_BY_COUNTS_LIST_END,
            0,
        ];
        let parts = device::create_sub_devices(c.device, &counts).map_err(|code| Error::Unsupported {
            device: c.name.clone(),
            what: format!("a part of it with {units} compute units ({})", error_codes::error_text(code)),
        })?;
        let give_back = |id| {
            // SAFETY: just made, and nobody has it.
            let _ = unsafe { device::release_device(id) };
        };
        let [part, rest] = parts[..] else {
            parts.iter().for_each(|id| give_back(*id));
            let what = format!("{} parts instead of two", parts.len());
            return Err(Error::Invalid { device: c.name.clone(), what });
        };
        let open = |id| -> Result<Arc<dyn Device>> {
            let opened = ClDevice::open(id, Some(&self.info)).inspect_err(|_| give_back(id));
            Ok(Arc::new(opened?))
        };
        // Both, so that each has an owner or is given back.
        let (part, rest) = (open(part), open(rest));
        Ok([part?, rest?])
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let c = &self.context;
        let free = if self.free_queues { cq::CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE } else { 0 };
        // SAFETY: context and device belong together.
        let made = unsafe { cq::create_command_queue(c.id, c.device, free) };
        let id: cl_command_queue = check("clCreateCommandQueue", &c.name, made)?;
        Ok(Box::new(queue::ClQueue::new(id, self.free_queues, c.clone())))
    }

    fn copies_beside(&self) -> usize {
        // Of GPUs it is not known.
        if self.free_queues && self.info.is_cpu && self.info.compute_units > 1 { 0 } else { usize::MAX }
    }

    fn kernels_beside(&self) -> bool {
        self.free_queues && self.info.compute_units > 1
    }

    fn allocated(&self) -> u64 {
        self.context.allocated.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_says_of_a_command_is_told_apart() {
        let of = |code| check("clEnqueueNDRangeKernel", "gpu", Err::<(), _>(code)).unwrap_err();
        let full = of(error_codes::CL_MEM_OBJECT_ALLOCATION_FAILURE);
        assert!(full.is_out_of_memory() && full.to_string().contains("no memory is left on gpu: clEnqueue"), "{full}");
        assert!(matches!(of(error_codes::CL_DEVICE_NOT_AVAILABLE), Error::Lost { .. }));
        assert!(matches!(of(error_codes::CL_INVALID_VALUE), Error::Driver(_)));
    }
}
