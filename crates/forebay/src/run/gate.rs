//! The accelerator service's say in when this process works.
//!
//! Rules:
//! 1. A process has one presence at the service, made with its first runtime and kept as long as one lives. Without a
//!    service nothing is asked, and a service that goes away sets everybody free.
//! 2. A worker asks before it looks after a task. While there is no credit it sleeps there, holding the task; a graph that
//!    is being stopped waits for nothing.
//! 3. The kernel says what the process has used of the CPU, whichever thread it was. A worker asks it when the tasks since
//!    the last time took about [`LOOK_NS`]. Of other devices the runtime says what was used: from the issue of work, or
//!    the end of what was before it, until it is found done; and meanwhile, since when there is work. When the last worker
//!    goes to sleep, or a thread of the program has issued something, and nobody waits for the device, somebody else finds
//!    that out.
//! 4. What long tasks of other workers will use counts as well, and with little credit only as many workers are at tasks as its
//!    share is cores: rules in `forebay_policy::begin`; who is one too many waits as `width` says.
//! 5. An interactive process tells when its first worker begins and when the last one runs out of work.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use forebay_hal::cpu::{Pool, UNKNOWN_NS};
use forebay_hal::fork::Own;
use forebay_hal::{DeviceInfo, Kind};
use forebay_policy::begin;
use forebay_proto::client::{Account, Session};
use forebay_proto::wire::MAX_NAME;

use super::width::Width;

/// Work between two looks at what was used: asking the kernel takes half a microsecond.
const LOOK_NS: u32 = 100_000;
/// What a task of unknown length counts for.
const GUESS_NS: u32 = 20_000;
/// The least that any task counts for, so that many tiny ones are looked at, too.
const LEAST_NS: u32 = 50;

/// The process's presence.
pub(crate) struct Gate {
    cpu: Arc<Account>,
    devices: Mutex<HashMap<String, Arc<Account>>>,
    cores: u64,
    /// Workers, and how many of them were at work when one last looked.
    workers: usize,
    at_work: AtomicUsize,
    /// Workers that have something to do, while that matters to others.
    working: AtomicU32,
    /// About what is left of long tasks that have been begun, ns.
    ahead: AtomicU64,
    /// Somebody ran out of work since the demand was last said.
    rested: AtomicBool,
    width: Width,
    /// The runtime's threads are not all that work: a device of it uses the CPU, too.
    others_work: AtomicBool,
}

thread_local! {
    /// Estimated ns of work since this thread looked.
    static SINCE: Cell<u32> = const { Cell::new(u32::MAX) };
    /// What this thread's long tasks count for: one, and more where one calls another.
    static AHEAD: Cell<u64> = const { Cell::new(0) };
}

/// A worker that is counted. It keeps what counts it: letting a task go may end the graph, and its runtime with it.
pub(crate) struct Counted(Arc<Gate>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.working.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A long task that is being done.
pub(crate) struct Long {
    gate: Arc<Gate>,
    ns: u64,
}

impl Drop for Long {
    fn drop(&mut self) {
        AHEAD.set(AHEAD.get().saturating_sub(self.ns));
        self.gate.ahead.fetch_sub(self.ns, Ordering::Relaxed);
        self.gate.cpu.less_is_ahead();
    }
}

/// What this thread's long tasks count for does not count as long as this is kept: they use nothing.
pub(crate) struct Waits {
    gate: Arc<Gate>,
    ns: u64,
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.gate.ahead.fetch_add(self.ns, Ordering::Relaxed);
        AHEAD.set(AHEAD.get() + self.ns);
    }
}

/// What all programs call a device, and no other of this machine, if the driver tells where it is.
fn own_name(info: &DeviceInfo) -> String {
    let place = info.pci.map_or(String::new(), |p| format!(" at {p}"));
    let (most, mut name) = (MAX_NAME - place.len().min(MAX_NAME), info.name.clone());
    while name.len() > most {
        name.pop();
    }
    name + &place
}

/// Whether programs share a device without anybody having named it. Not an instance of a GPU that is partitioned (MIG): others
/// may have its name and place, and nobody there is in its way.
fn is_brought(info: &DeviceInfo) -> bool {
    let is_instance = info.name.split(' ').any(|word| word == "MIG");
    matches!(info.kind, Kind::OpenCl | Kind::Cuda) && !is_instance
}

impl Gate {
    /// The task that this thread is at waits for others.
    pub(crate) fn waits(self: &Arc<Self>) -> Waits {
        let ns = AHEAD.replace(0);
        self.ahead.fetch_sub(ns, Ordering::Relaxed);
        self.cpu.less_is_ahead();
        Waits { gate: self.clone(), ns }
    }

    /// The account on the CPU.
    pub(crate) fn cpu(&self) -> &Arc<Account> {
        &self.cpu
    }

    /// The presence of this process; none without a service.
    pub(crate) fn of_process(workers: usize) -> Option<Arc<Gate>> {
        static GATE: Own<Weak<Gate>> = Own::new();
        // Held while a service is asked, which may be silent for seconds.
        let mut held = GATE.lock();
        if let Some(g) = held.upgrade() {
            return Some(g);
        }
        let name = std::env::args_os().next().unwrap_or_default();
        let name = std::path::Path::new(&name).file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Why there is none is for `forebay doctor` to say: a program runs without.
        let session = Session::open(&name).ok()?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let cpu = Arc::new(Account::cpu(&session).ok()?);
        let gate = Arc::new(Gate {
            cpu,
            devices: Mutex::default(),
            cores,
            workers,
            at_work: AtomicUsize::new(0),
            working: AtomicU32::new(0),
            ahead: AtomicU64::new(0),
            rested: AtomicBool::new(false),
            width: Width::default(),
            others_work: AtomicBool::new(false),
        });
        *held = Arc::downgrade(&gate);
        Some(gate)
    }

    /// From now on the process can use more of the CPU than its workers.
    pub(crate) fn others_work(&self) {
        self.others_work.store(true, Ordering::Relaxed);
    }

    /// The process's account on another device, if the service shares it: one for all runtimes.
    pub(crate) fn account(&self, info: &DeviceInfo) -> Option<Arc<Account>> {
        let mut all = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let own = own_name(info);
        if let Some(a) = all.get(&own) {
            return Some(a.clone());
        }
        // First as somebody may have named it when the service was started. A service that divides GPUs by their own means
        // takes none (`forebayd/src/service/brought.rs`, rule 2).
        let session = self.cpu.session();
        let a = match session.join(&info.name) {
            Err(_) if is_brought(info) => session.bring(&own),
            named => named,
        };
        let a = Arc::new(a.ok()?);
        all.insert(own, a.clone());
        Some(a)
    }

    /// Before a worker looks after a task that takes about `cost_ns`; sleeps while there is no credit, unless `over`.
    #[inline]
    pub(crate) fn begin(self: &Arc<Self>, pool: &Pool, cost_ns: u32, over: impl Fn() -> bool) -> Option<Counted> {
        let cost = if cost_ns == UNKNOWN_NS { GUESS_NS } else { cost_ns.max(LEAST_NS) };
        let since = SINCE.get().saturating_add(cost);
        SINCE.set(since);
        let looks = since >= LOOK_NS || self.rested.load(Ordering::Relaxed);
        if looks {
            self.look(pool);
        }
        let counted = self.cpu.has_precedence().then(|| {
            self.working.fetch_add(1, Ordering::SeqCst);
            self.cpu.works(true);
            Counted(self.clone())
        });
        if self.has_enough() {
            self.width.changed();
        } else if looks || self.needs_credit() {
            // In between a lock would cost tiny tasks more than they do.
            self.narrow(pool, over);
        }
        counted
    }

    /// Whether there is credit for more workers than the share is cores.
    fn has_enough(&self) -> bool {
        self.cpu.may_beside(self.ahead.load(Ordering::Relaxed) + begin::ENOUGH_NS * self.cores)
    }

    fn needs_credit(&self) -> bool {
        !self.cpu.may_beside(self.ahead.load(Ordering::Relaxed))
    }

    #[cold]
    fn narrow(&self, pool: &Pool, over: impl Fn() -> bool) {
        if self.needs_credit() {
            self.wait(pool, &over);
        }
        let all = self.cpu.session().load(0).map_or(self.cores, |l| l.units);
        let share = self.cpu.standing().map_or(1_000_000, |s| s.share);
        let width = usize::try_from(begin::width(share, all)).unwrap_or(usize::MAX);
        // Of a device that uses the CPU as well nobody knows on how many cores it works; and who waits for it would count.
        if width < self.workers && !self.others_work.load(Ordering::Relaxed) {
            let may = || over() || self.has_enough();
            self.width.pass(|| pool.at_work(), width, may, forebay_hal::cpu::about_to_block);
            // It is its turn, but others may have used up what there was.
            if self.needs_credit() {
                self.wait(pool, &over);
            }
        }
    }

    /// A worker does a task that takes about `cost_ns` as long as it keeps what comes back. Two that have asked at the same
    /// time both begin.
    #[inline]
    pub(crate) fn does(self: &Arc<Self>, cost_ns: u32) -> Option<Long> {
        let ns = if cost_ns == UNKNOWN_NS { 0 } else { begin::of_task(cost_ns.into()) };
        (ns > 0).then(|| {
            self.ahead.fetch_add(ns, Ordering::Relaxed);
            AHEAD.set(AHEAD.get() + ns);
            Long { gate: self.clone(), ns }
        })
    }

    #[cold]
    fn look(&self, pool: &Pool) {
        SINCE.set(0);
        self.rested.store(false, Ordering::Relaxed);
        self.cpu.look();
        let at_work = pool.at_work().max(1);
        self.at_work.store(at_work, Ordering::Relaxed);
        self.demands(if self.others_work.load(Ordering::Relaxed) { self.workers } else { at_work });
    }

    fn demands(&self, threads: usize) {
        let part = (threads as u64 * 1_000_000 / self.cores).clamp(1, 1_000_000);
        self.cpu.demands(part as u32);
    }

    #[cold]
    fn wait(&self, pool: &Pool, over: impl Fn() -> bool) {
        forebay_hal::cpu::about_to_block();
        self.look(pool);
        while !over() && !self.cpu.wait(|| self.ahead.load(Ordering::Relaxed)) {}
    }

    /// A worker has run out of work, and so many others are at work; `quiet` says that no device has any.
    pub(crate) fn rests(&self, others: usize, quiet: bool) {
        self.at_work.store(others, Ordering::Relaxed);
        let busy = !quiet && self.others_work.load(Ordering::Relaxed);
        self.demands(if busy { self.workers } else { others });
        self.rested.store(true, Ordering::Relaxed);
        self.width.changed();
        if quiet {
            self.over();
        }
    }

    /// A worker sleeps, and so many others are at work: one that looked since that one had run out of work said more.
    pub(crate) fn sleeps(&self, others: usize) {
        self.at_work.store(others, Ordering::Relaxed);
        self.width.changed();
        if !self.others_work.load(Ordering::Relaxed) {
            self.demands(others);
        }
    }

    /// A device has nothing left to do.
    pub(crate) fn is_quiet(&self) {
        self.demands(self.at_work.load(Ordering::Relaxed));
        self.rested.store(true, Ordering::Relaxed);
        self.over();
    }

    fn over(&self) {
        if self.cpu.has_precedence() && self.working.load(Ordering::SeqCst) == 0 {
            self.cpu.works(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_hal::Device;
    use forebay_hal::PciAddress;
    use forebay_hal::sim::{Model, SimDevice};

    use super::*;

    #[test]
    fn devices_that_are_alike_have_names_of_their_own() {
        let mut info = SimDevice::new(Model::default()).info().clone();
        assert_eq!(own_name(&info), info.name);
        info.name = "Arc".into();
        info.pci = Some(PciAddress { domain: 0, bus: 3, device: 0 });
        assert_eq!(own_name(&info), "Arc at 0000:03:00");
        info.name = "ä".repeat(MAX_NAME);
        let own = own_name(&info);
        assert!(own.len() <= MAX_NAME && own.ends_with("ä at 0000:03:00"), "{own}");
    }

    #[test]
    fn accelerators_are_brought_and_instances_of_partitioned_ones_are_not() {
        let mut info = SimDevice::new(Model::default()).info().clone();
        let mut is = |kind: Kind, name: &str| {
            (info.kind, info.name) = (kind, name.into());
            is_brought(&info)
        };
        assert!(is(Kind::OpenCl, "Arc") && is(Kind::Cuda, "NVIDIA H200") && is(Kind::Cuda, "MIGHTY"));
        assert!([Kind::Cuda, Kind::OpenCl].iter().all(|kind| !is(*kind, "NVIDIA H200 MIG 1g.18gb")));
        assert!(!is(Kind::Cpu, "cpu") && !is(Kind::Sim, "sim"));
    }
}
