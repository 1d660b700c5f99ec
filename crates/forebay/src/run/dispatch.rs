//! Tasks that compete for devices: the ready queue of `forebay-policy`, with the runtime's clock and devices.
//!
//! A task in the queue is owned by the queue. Picking passes ownership, and one of the device's slots, to a job.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use forebay_hal::cpu::{Job, UNKNOWN_NS, Worker};
use forebay_policy::{DeviceSet, Mode, Ready, ReadyQueue, Stats, priority};

use super::exec;
use super::node::{Core, EndRef, InKind, Node, Own};
use super::runtime::RuntimeInner;
use crate::block::Datablock;

pub(crate) struct Dispatcher {
    mode: Mode,
    inner: Mutex<Inner>,
}

struct Inner {
    /// Keys are the addresses of owned nodes.
    queue: ReadyQueue<usize>,
    running: Vec<usize>,
    slots: Vec<usize>,
}

impl Dispatcher {
    /// `slots` is how many invocations a device may have in the hands of workers at a time.
    pub(crate) fn new(mode: Mode, strengths: Vec<u64>, slots: Vec<usize>) -> Self {
        let running = vec![0; slots.len()];
        Dispatcher { mode, inner: Mutex::new(Inner { queue: ReadyQueue::new(mode, strengths), running, slots }) }
    }

    /// Takes ownership of a ready task, then starts what can start.
    pub(crate) fn enqueue(&self, core: &Core, node: &Node, own: &Own, worker: &Worker) {
        // Once the task is in the queue somebody else may run it and end the graph: only this keeps us alive.
        let runtime = core.runtime.clone();
        let near = if self.mode == Mode::DataAware { nearest(core, node, own) } else { None };
        let load = |v: &std::sync::atomic::AtomicU64| v.load(Ordering::Relaxed);
        let ready = Ready {
            key: std::ptr::from_ref(node) as usize,
            devices: node.devices,
            near,
            since_ns: runtime.now_ns(),
            stats: Stats {
                priority: node.priority.load(Ordering::Relaxed),
                nice: core.nice.load(Ordering::Relaxed),
                wait_ns: 0,
                avg_wait_ns: load(&node.stats.avg_wait),
                avg_run_ns: load(&node.stats.avg_run),
            },
        };
        let accepted = self.inner.lock().unwrap_or_else(PoisonError::into_inner).queue.push(ready);
        if accepted {
            self.pump(&runtime, worker);
        } else {
            // The queue is full: run it later, by way of the pool.
            // SAFETY: this thread still owns the node.
            unsafe { worker.submit_back(exec::job(node)) };
        }
    }

    /// Starts ready tasks while devices are free.
    fn pump(&self, runtime: &RuntimeInner, worker: &Worker) {
        loop {
            let pick = {
                let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                if i.queue.is_empty() {
                    return;
                }
                let free = (0..i.slots.len())
                    .filter(|&d| i.running[d] < i.slots[d])
                    .fold(DeviceSet::default(), DeviceSet::with);
                let Some(p) = i.queue.pick(runtime.now_ns(), free) else { return };
                i.running[p.device] += 1;
                p
            };
            // SAFETY: queued nodes are owned, so they are alive; picking made this thread the owner.
            let node = unsafe { &*(pick.key as *const Node) };
            // SAFETY: as above.
            unsafe { (*node.own.get()).device = pick.device };
            let w = &node.stats.avg_wait;
            w.store(priority::decay(w.load(Ordering::Relaxed), pick.waited_ns), Ordering::Relaxed);
            // SAFETY: ownership goes with the job.
            unsafe {
                worker.submit_back(Job { run: run_picked, data: std::ptr::from_ref(node).cast(), cost_ns: UNKNOWN_NS })
            };
        }
    }

    /// Takes a task back out of the queue; true when the caller now owns it.
    pub(crate) fn remove(&self, node: &Node) -> bool {
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.queue.remove(std::ptr::from_ref(node) as usize)
    }

    fn release(&self, device: usize) {
        let mut i = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        i.running[device] = i.running[device].saturating_sub(1);
    }
}

/// # Safety
/// `data` is a node that was picked for this job, with a slot of its device.
unsafe fn run_picked(data: *const (), worker: &Worker) {
    // SAFETY: the job owns the node.
    let node = unsafe { &*data.cast::<Node>() };
    let core = node.core();
    // The runtime outlives the node's being owned, but not necessarily this function.
    let runtime = core.runtime.clone();
    // SAFETY: as above.
    let own = unsafe { &mut *node.own.get() };
    let device = own.device;
    // Others can run on this worker's other picks while a device is being waited for.
    worker.yield_slot();
    if !core.stopping() {
        let begun = runtime.now_ns();
        exec::run(core, node, own, device, worker);
        let ran = runtime.now_ns().saturating_sub(begun);
        let r = &node.stats.avg_run;
        r.store(priority::decay(r.load(Ordering::Relaxed), ran), Ordering::Relaxed);
    }
    // The task stands in line again, if it can, before the next one is picked: a high priority must not lose its turn to
    // the moment in which it is between two invocations.
    exec::own(node, worker);
    runtime.dispatcher.release(device);
    runtime.dispatcher.pump(&runtime, worker);
}

/// The device that holds most of the input bytes of a ready task.
fn nearest(core: &Core, node: &Node, own: &Own) -> Option<usize> {
    let mut bytes = [0usize; DeviceSet::MAX];
    for (at, i) in node.inputs.iter().enumerate() {
        let mut count = |b: &Datablock| {
            if let Some(d) = b.nearest() {
                bytes[d] += b.bytes();
            }
        };
        match i.kind {
            InKind::Sticky if own.ins[at].is_some() => own.ins[at].iter().for_each(count),
            InKind::Meta { .. } | InKind::Initializer => {}
            _ => {
                let c = &core.channels[i.channel as usize];
                if let Some(p) = c.ring.peek() {
                    // SAFETY: the handle stays in the ring while this thread owns the consumer; it is not dropped here.
                    let b = std::mem::ManuallyDrop::new(unsafe { Datablock::from_raw(p) });
                    count(&b);
                }
            }
        }
        debug_assert!(matches!(core.channels[i.channel as usize].to, EndRef::Node(_)));
    }
    let (device, most) = bytes.iter().enumerate().max_by_key(|&(d, b)| (*b, std::cmp::Reverse(d)))?;
    (*most > 0).then_some(device)
}
