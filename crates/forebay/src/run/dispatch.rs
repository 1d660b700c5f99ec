//! Tasks that compete for devices: the ready queue of `forebay-policy`, with the runtime's clock and devices.
//!
//! A task in the queue is owned by the queue. Picking passes ownership, and one of the device's slots, to a job.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_hal::Direction;
use forebay_hal::cpu::{Helpers, Job, UNKNOWN_NS, Worker};
use forebay_policy::{Ahead, DeviceSet, MAX_PLACED, Mode, Ready, ReadyQueue, Stats, priority};

use super::device::DeviceHandle;
use super::exec;
use super::node::{Core, EndRef, Imp, InKind, Node, Own};
use super::runtime::RuntimeInner;
use crate::block::Datablock;
use crate::place::Situation;

/// What is predicted to be on a device for no longer than that is waited for by the worker that issues it: handing it to another
/// thread costs a wake-up, or two.
const SHORT_NS: u64 = 100_000;

pub(crate) struct Dispatcher {
    mode: Mode,
    /// Threads that wait for devices, by device (adaptive placement, which learns what everything takes).
    helpers: Vec<Option<Helpers>>,
    /// Devices that are lost, as bits: for tasks that no other runs.
    lost: AtomicU32,
    inner: Mutex<Inner>,
}

struct Inner {
    /// Keys are the addresses of owned nodes.
    queue: ReadyQueue<usize>,
    running: Vec<usize>,
    slots: Vec<usize>,
    /// For each device, what runs on it (adaptive placement).
    ends: Vec<Vec<Running>>,
    /// Devices that are the host's cores, the host among them, and how many cores.
    shared: (DeviceSet, usize),
    /// Threads of others that want the cores, in thousandths, as of the last task that came.
    others: u64,
    /// The queue's time, by which tasks have their turns (`forebay_hal::cpu::Turn`).
    now: u64,
}

/// An invocation on a device, as it was predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Running {
    begun_ns: u64,
    until_ns: u64,
    /// Of the host's cores, ns of one.
    work_ns: u64,
}

impl Running {
    /// What is left of its work.
    fn left(&self, now_ns: u64) -> u64 {
        let (whole, left) = (self.until_ns - self.begun_ns, self.until_ns.saturating_sub(now_ns));
        (u128::from(self.work_ns) * u128::from(left) / u128::from(whole.max(1))) as u64
    }
}

impl Inner {
    /// What has begun. The CPU's cores work side by side, other devices do one thing after the other.
    fn ahead(&self, now_ns: u64) -> Ahead {
        let mut ahead = Ahead::default();
        let (shared, _) = self.shared;
        for (d, (to, ends)) in ahead.until.iter_mut().zip(&self.ends).enumerate() {
            let ends = ends.iter().map(|r| r.until_ns);
            let when = match shared.has(d) {
                true if self.is_free(d) => None,
                // Whatever ends first leaves them a core.
                true => self
                    .ends
                    .iter()
                    .enumerate()
                    .filter(|(d, _)| shared.has(*d))
                    .flat_map(|(_, e)| e)
                    .map(|r| r.until_ns)
                    .min(),
                false => ends.max(),
            };
            *to = when.map_or(0, |w| w.saturating_sub(now_ns));
        }
        let on_cores = self.ends.iter().enumerate().filter(|(d, _)| shared.has(*d)).flat_map(|(_, all)| all);
        ahead.work = on_cores.map(|r| r.left(now_ns)).sum();
        ahead.threads = self.threads() as u64;
        ahead.others = self.others;
        ahead
    }

    /// Whether a device could begin something now. One that is the host's cores uses all of them, and has its turn when one is
    /// free, or when others want them: of those who want more than there is whoever has more threads has more. As many
    /// as the others', that is, and no more than twice the cores. The CPU does not wait for it: what is short would wait for the
    /// longest, which the system has share the cores.
    fn is_free(&self, d: usize) -> bool {
        let (shared, cores) = self.shared;
        if self.running[d] >= self.slots[d] {
            return false;
        }
        d == 0 || !shared.has(d) || self.threads() < cores + (self.others as usize / 1000).min(cores)
    }

    /// Threads that are at work on the host's cores.
    fn threads(&self) -> usize {
        let (shared, cores) = self.shared;
        let used = |(d, n): (usize, &usize)| if d == 0 { *n } else { n * cores };
        self.running.iter().enumerate().filter(|(d, _)| shared.has(*d)).map(used).sum()
    }
}

impl Dispatcher {
    /// `slots` is how many invocations a device may have in the hands of workers at a time.
    /// `shared` are the devices that are the host's cores; adaptive placement runs no more on them than there are cores.
    pub(crate) fn new(
        mode: Mode,
        strengths: Vec<u64>,
        slots: Vec<usize>,
        shared: DeviceSet,
        helpers: Vec<Option<Helpers>>,
    ) -> Self {
        let shared =
            (if mode == Mode::Adaptive { shared } else { DeviceSet::default() }, slots.first().copied().unwrap_or(1));
        let (running, ends) = (vec![0; slots.len()], vec![Vec::new(); slots.len()]);
        Dispatcher {
            mode,
            helpers,
            lost: AtomicU32::new(0),
            inner: Mutex::new(Inner {
                queue: ReadyQueue::new(mode, strengths).sharing(shared.0, shared.1),
                shared,
                running,
                slots,
                ends,
                others: 0,
                now: 0,
            }),
        }
    }

    /// Something failed: a device that is lost is given no more tasks that others run.
    #[cold]
    pub(crate) fn look_for_lost(&self, devices: &[Arc<DeviceHandle>]) -> DeviceSet {
        let lost = devices.iter().filter(|d| !d.is_host() && d.look_whether_lost());
        let lost = lost.fold(DeviceSet::default(), |s, d| s.with(d.index));
        self.lost.fetch_or(lost.0, Ordering::Relaxed);
        lost
    }

    /// Those of the task's devices that are neither lost nor full; if there is none, what it has to spare, those that may have
    /// room again, or all.
    fn left_of(&self, node: &Node, full: DeviceSet) -> DeviceSet {
        let devices = node.devices;
        let there = devices.and(DeviceSet(!self.lost.load(Ordering::Relaxed)));
        let left = [there.and(DeviceSet(!full.0)), node.spare, there];
        left.into_iter().find(|d| !d.is_empty()).unwrap_or(devices)
    }

    /// Takes ownership of a ready task, then starts what can start. True when the caller owns it again, with a slot of its
    /// device, to run it ([`run_here`]): only of who `may_run_it`, and only if the device takes it at once.
    pub(crate) fn enqueue(&self, core: &Core, node: &Node, worker: &Worker, may_run_it: bool) -> bool {
        // Once the task is in the queue somebody else may run it and end the graph: only this keeps us alive.
        let runtime = core.runtime.clone();
        let load = |v: &std::sync::atomic::AtomicU64| v.load(Ordering::Relaxed);
        let now = runtime.now_ns();
        let (near, counts, work, others, full) = {
            // SAFETY: the caller owns the node. Nothing is kept of this: once it is in the queue it may be another thread's.
            let own = unsafe { &mut *node.own.get() };
            let near = if self.mode == Mode::DataAware { nearest(core, node, own) } else { None };
            let full = own.full.at(now);
            match own.adapt.take() {
                Some(mut adapt) => {
                    let counts = adapt.weigh(now, situation(core, node, own), &|d| runtime.account(d));
                    let (work, others) = (adapt.work, (adapt.others * 1000.0) as u64);
                    own.adapt = Some(adapt);
                    (near, counts, work, Some(others), full)
                }
                None => (near, [u64::MAX; MAX_PLACED], [0; MAX_PLACED], None, full),
            }
        };
        let mut ready = Ready {
            turn: 0,
            key: std::ptr::from_ref(node) as usize,
            devices: self.left_of(node, full),
            near,
            counts,
            work,
            since_ns: now,
            stats: Stats {
                priority: node.priority.load(Ordering::Relaxed),
                nice: core.nice.load(Ordering::Relaxed),
                wait_ns: 0,
                avg_wait_ns: load(&node.stats.avg_wait),
                avg_run_ns: load(&node.stats.avg_run),
            },
        };
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.others = others.unwrap_or(i.others);
        ready.turn = node.served.begin(i.now, 0);
        let accepted = i.queue.push(ready);
        drop(i);
        if accepted {
            self.pump(&runtime, worker, may_run_it.then_some(node))
        } else {
            // The queue is full: run it later, by way of the pool.
            // SAFETY: this thread still owns the node.
            unsafe { worker.submit_back(exec::job(node)) };
            false
        }
    }

    /// Starts ready tasks while devices are free; true if `mine` is one of them and is left to the caller, who owns it.
    fn pump(&self, runtime: &RuntimeInner, worker: &Worker, mine: Option<&Node>) -> bool {
        let mut left_to_caller = false;
        loop {
            let pick = {
                let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                if i.queue.is_empty() {
                    return left_to_caller;
                }
                let free = (0..i.slots.len()).filter(|&d| i.is_free(d)).fold(DeviceSet::default(), DeviceSet::with);
                let now = runtime.now_ns();
                let ahead = if self.mode == Mode::Adaptive { i.ahead(now) } else { Ahead::default() };
                let Some(p) = i.queue.pick(now, free, &ahead) else { return left_to_caller };
                i.running[p.device] += 1;
                i.now = i.now.max(p.turn);
                let begun_ns = now.saturating_add(if p.device == 0 { 0 } else { ahead.until[p.device] });
                let until_ns = begun_ns.saturating_add(if p.count_ns == u64::MAX { 0 } else { p.count_ns });
                let running = Running { begun_ns, until_ns, work_ns: p.work_ns };
                if self.mode == Mode::Adaptive {
                    i.ends[p.device].push(running);
                }
                (p, running)
            };
            let (pick, running) = pick;
            // SAFETY: queued nodes are owned, so they are alive; picking made this thread the owner.
            let node = unsafe { &*(pick.key as *const Node) };
            // SAFETY: as above.
            unsafe {
                (*node.own.get()).device = pick.device;
                (*node.own.get()).running = running;
            }
            node.served.begin(pick.turn, pick.work_ns);
            let w = &node.stats.avg_wait;
            w.store(priority::decay(w.load(Ordering::Relaxed), pick.waited_ns), Ordering::Relaxed);
            // SAFETY: as above.
            let own = || unsafe { &*node.own.get() };
            if mine.is_some_and(|m| std::ptr::eq(m, node)) && is_only_issued(runtime, own(), pick.device) {
                left_to_caller = true;
                continue;
            }
            let job = Job { run: run_picked, data: std::ptr::from_ref(node).cast(), cost_ns: UNKNOWN_NS };
            // 0 is what something counts as that is to be found out.
            let short = (1..=SHORT_NS).contains(&pick.count_ns);
            let helpers = self.helpers.get(pick.device).and_then(Option::as_ref).filter(|_| !short);
            // SAFETY: ownership goes with the job.
            let left = helpers.map_or(Err(job), |h| unsafe { h.submit(job) });
            if let Err(job) = left {
                // SAFETY: as above.
                unsafe { worker.submit_back(job) };
            }
        }
    }

    /// Takes a task back out of the queue; true when the caller now owns it.
    pub(crate) fn remove(&self, node: &Node) -> bool {
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.queue.remove(std::ptr::from_ref(node) as usize)
    }

    /// What was released is taken again, whether or not there is a slot.
    fn take_again(&self, device: usize, running: Running) {
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.running[device] += 1;
        if self.mode == Mode::Adaptive {
            i.ends[device].push(running);
        }
    }

    fn release(&self, device: usize, was: Running) {
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.running[device] = i.running[device].saturating_sub(1);
        if let Some(at) = i.ends[device].iter().position(|e| *e == was) {
            i.ends[device].swap_remove(at);
        }
    }
}

/// The slot of a task that a thread is at.
#[derive(Clone, Copy)]
struct Held {
    runtime: *const RuntimeInner,
    device: usize,
    running: Running,
}

thread_local! {
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

/// The thread has a slot as long as this is kept, however the task ends.
struct AtTask;

impl Drop for AtTask {
    fn drop(&mut self) {
        HELD.set(None);
    }
}

/// The slot of this thread's task is others' as long as this is kept: on the stack of who waits inside the task.
pub(crate) struct Lent(Held);

/// For a thread that is about to wait inside a task, if that has a slot: it uses no core, and what it waits for may need one.
pub(crate) fn lend_slot() -> Option<Lent> {
    let held = HELD.take()?;
    // SAFETY: `run_owned` has a count of the runtime until after `AtTask` has gone, which empties `HELD`; so the task is still on
    // this thread's stack.
    let rt = unsafe { &*held.runtime };
    rt.dispatcher.release(held.device, held.running);
    rt.pool.helping(|w| _ = rt.dispatcher.pump(rt, w, None));
    Some(Lent(held))
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: as above; `Lent` stays on the thread (it has a pointer) and in the frame of a wait inside the task.
        unsafe { &*self.0.runtime }.dispatcher.take_again(self.0.device, self.0.running);
        HELD.set(Some(self.0));
    }
}

/// Whether running the task on this device is to issue it, with nothing to wait for and nothing to do afterwards.
fn is_only_issued(rt: &RuntimeInner, own: &Own, device: usize) -> bool {
    let d = &rt.devices[device];
    rt.dispatcher.mode != Mode::Adaptive
        && !d.is_host()
        && own.imps.iter().any(|(of, imp)| *of == device && matches!(imp, Imp::Kernels { .. }))
        // Workers are counted as long as they have something to do (gate.rs, rule 5), programs' threads are not.
        && rt.gate.as_ref().is_none_or(|g| !g.cpu().has_precedence())
        && d.takes_at_once()
}

/// Runs a task that [`Dispatcher::enqueue`] left to this thread, one of the program's.
pub(crate) fn run_here(node: &Node, worker: &Worker) {
    let device = run_owned(node, worker, |node, worker| _ = exec::stand_in_line(node, worker, false));
    // No worker runs out of work after this, which is when the rest is handed over.
    device.flush();
    // Nor does one find out when it is done, if nobody asks for the result.
    device.ask_to_look();
}

/// # Safety
/// `data` is a node that was picked for this job, with a slot of its device.
unsafe fn run_picked(data: *const (), worker: &Worker) {
    // SAFETY: the job owns the node.
    run_owned(unsafe { &*data.cast::<Node>() }, worker, exec::own);
}

/// Runs a picked task on its device, and has it looked at again by `then`.
fn run_owned(node: &Node, worker: &Worker, then: impl FnOnce(&Node, &Worker)) -> Arc<DeviceHandle> {
    let core = node.core();
    // The runtime outlives the node's being owned, but not necessarily this function.
    let runtime = core.runtime.clone();
    // SAFETY: this thread owns the node.
    let own = unsafe { &mut *node.own.get() };
    let (device, running) = (own.device, own.running);
    // Others can run on this worker's other picks while a device is being waited for.
    worker.yield_slot();
    if !core.stopping() {
        let begun = runtime.now_ns();
        HELD.set(Some(Held { runtime: Arc::as_ptr(&runtime), device, running }));
        let at_task = AtTask;
        exec::run(core, node, own, device, worker);
        drop(at_task);
        let ran = runtime.now_ns().saturating_sub(begun);
        let r = &node.stats.avg_run;
        r.store(priority::decay(r.load(Ordering::Relaxed), ran), Ordering::Relaxed);
    }
    // The task stands in line again, if it can, before the next one is picked: a high priority must not lose its turn to
    // the moment in which it is between two invocations.
    then(node, worker);
    runtime.dispatcher.release(device, running);
    runtime.dispatcher.pump(&runtime, worker, None);
    runtime.devices[device].clone()
}

/// Calls `f` with each input of a ready task and the datablock that is there.
fn each_input(core: &Core, node: &Node, own: &Own, mut f: impl FnMut(usize, &Datablock)) {
    for (at, i) in node.inputs.iter().enumerate() {
        match i.kind {
            InKind::Sticky if own.ins[at].is_some() => own.ins[at].iter().for_each(|b| f(at, b)),
            InKind::Initializer => {}
            _ => {
                let c = &core.channels[i.channel as usize];
                if let Some(p) = c.ring.peek() {
                    // SAFETY: the handle stays in the ring while this thread owns the consumer; it is not dropped here.
                    let b = std::mem::ManuallyDrop::new(unsafe { Datablock::from_raw(p) });
                    f(at, &b);
                }
            }
        }
        debug_assert!(matches!(core.channels[i.channel as usize].to, EndRef::Node(_)));
    }
}

/// The device that holds most of the input bytes of a ready task.
fn nearest(core: &Core, node: &Node, own: &Own) -> Option<usize> {
    let mut bytes = [0usize; DeviceSet::MAX];
    each_input(core, node, own, |at, b| {
        if let Some(d) = b.nearest().filter(|_| !matches!(node.inputs[at].kind, InKind::Meta { .. })) {
            bytes[d] += b.bytes();
        }
    });
    let (device, most) = bytes.iter().enumerate().max_by_key(|&(d, b)| (*b, std::cmp::Reverse(d)))?;
    (*most > 0).then_some(device)
}

/// What adaptive placement is to know of a ready task.
fn situation(core: &Core, node: &Node, own: &Own) -> Situation {
    let devices = &core.runtime.devices;
    let mut s = Situation::default();
    each_input(core, node, own, |at, b| {
        if let InKind::Meta { .. } = node.inputs[at].kind {
            if node.hint == Some(at as u32) {
                s.hint = b.number().unwrap_or(0.0);
            }
            return;
        }
        let bytes = b.bytes() as u64;
        s.size += bytes;
        let Some(near) = b.nearest() else { return };
        // A block may come from another runtime, which has other devices.
        let home = devices.get(near).filter(|d| !d.is_host()).map_or(0, |d| d.copy_ns(Direction::ToHost, bytes));
        for d in devices.iter().filter(|d| d.index != near).take(MAX_PLACED) {
            // From another device it goes home first.
            let there = if d.is_host() { 0 } else { d.copy_ns(Direction::ToDevice, bytes) };
            s.copies_ns[d.index] += home + there;
        }
    });
    for o in &node.outputs {
        let bytes = o.pool.bytes() as u64;
        if s.size == 0 {
            s.size = bytes;
        }
        // What goes to the program goes home.
        if o.channels.iter().any(|c| matches!(core.channels[*c as usize].to, EndRef::Host)) {
            for d in devices.iter().filter(|d| !d.is_host()).take(MAX_PLACED) {
                s.copies_ns[d.index] += d.copy_ns(Direction::ToHost, bytes);
            }
        }
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_cores_by_another_name_begins_beside_busy_cores_only_where_others_want_them() {
        let mut i = Inner {
            queue: ReadyQueue::new(Mode::Adaptive, vec![1, 1, 1]),
            running: vec![0; 3],
            slots: vec![2, 1, 1],
            ends: vec![Vec::new(); 3],
            shared: (DeviceSet(0b11), 2),
            others: 0,
            now: 0,
        };
        let mut free = |running: [usize; 3], others: u64| {
            (i.running, i.others) = (running.to_vec(), others);
            assert_eq!((i.ahead(0).threads, i.ahead(0).others), ((running[0] + 2 * running[1]) as u64, others));
            [0, 1, 2].map(|d| i.is_free(d))
        };
        assert_eq!(free([1, 0, 0], 0), [true; 3]);
        assert_eq!(free([2, 0, 0], 900), [false, false, true]);
        assert_eq!(free([2, 0, 0], 1000), [false, true, true]);
        assert_eq!(free([1, 1, 1], u64::MAX), [true, false, false], "each as often as it may");
    }
}
