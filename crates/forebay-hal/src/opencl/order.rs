//! Commands side by side: one queue, in order for whoever uses it, out of order for the driver.
//!
//! Rules:
//! 1. The bytes are those of the order in which commands were given: a command waits for the last one that wrote what it
//!    uses, on the device or on the host, and if it writes, for all that have read it since. What shares nothing runs
//!    side by side.
//! 2. A kernel only reads what its argument points to as `const`, where the compiler tells; all else counts as written.
//! 3. A fence has been reached when all commands before it have ended that none of the others waits for, and the fences
//!    before it have.
//! 4. A function of the host comes behind everything, and everything behind it.
//! 5. What is remembered is bounded: where it would be more, a marker comes behind everything and all else behind the
//!    marker.
//!
//! Where queues are in order (the driver has no others, or is not known to run commands side by side in them), nothing waits for
//! anything and the last command is the end.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use cl3::event;
use cl3::types::{cl_event, cl_mem};

use crate::queue::HostRange;

/// Commands that no other waits for, host ranges and buffers that are remembered.
const MAX_ENDS: usize = 64;
const MAX_HOST: usize = 64;
const MAX_BUFFERS: usize = 256;
/// Commands that read the same buffer side by side; the next one waits for them.
const MAX_READERS: usize = 32;

/// A command's event, released once.
pub(super) struct Event {
    pub(super) id: cl_event,
    /// The fence that covers the command.
    fence: u64,
}

// SAFETY: events may be used from any thread (OpenCL 1.2, appendix A.2).
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if !super::is_home() {
            return;
        }
        // SAFETY: owned by this handle.
        let _ = unsafe { event::release_event(self.id) };
    }
}

/// What a command does with memory.
#[derive(Clone, Copy)]
pub(super) enum Access {
    Buffer { id: cl_mem, written: bool },
    Host(HostRange),
}

/// The latest uses of a buffer.
#[derive(Default)]
struct Uses {
    writer: Option<Arc<Event>>,
    readers: Vec<Arc<Event>>,
}

/// Which command waits for which.
pub(super) struct Order {
    /// The driver's queue keeps no order of its own.
    free: bool,
    buffers: HashMap<usize, Uses>,
    host: VecDeque<(HostRange, Arc<Event>)>,
    /// Everything waits for this one.
    floor: Option<Arc<Event>>,
    /// Nobody waits for these.
    ends: Vec<Arc<Event>>,
    /// The next fence, and the last one that is known to be reached.
    next: u64,
    reached: u64,
    /// The command that is being issued.
    accesses: Vec<Access>,
    awaited: Vec<Arc<Event>>,
    list: Vec<cl_event>,
}

// SAFETY: the handles in it are used from any thread (appendix A.2), with `&mut`; `list` and `accesses` are scratch.
unsafe impl Send for Order {}

impl Order {
    pub(super) fn new(free: bool) -> Self {
        Order {
            free,
            buffers: HashMap::new(),
            host: VecDeque::new(),
            floor: None,
            ends: Vec::new(),
            next: 1,
            reached: 0,
            accesses: Vec::new(),
            awaited: Vec::new(),
            list: Vec::new(),
        }
    }

    /// Whether a marker must come first (rule 5).
    pub(super) fn is_full(&mut self) -> bool {
        if !self.free {
            return false;
        }
        if self.buffers.len() > MAX_BUFFERS {
            let reached = self.reached;
            self.buffers.retain(|_, u| {
                u.readers.retain(|e| e.fence > reached);
                u.writer.take_if(|e| e.fence <= reached);
                u.writer.is_some() || !u.readers.is_empty()
            });
        }
        self.ends.len() > MAX_ENDS || self.host.len() > MAX_HOST || self.buffers.len() > MAX_BUFFERS
    }

    /// What a command that does this waits for (rule 1). [`Order::issued`] follows once the driver has taken it.
    pub(super) fn before(&mut self, accesses: impl Iterator<Item = Access>) -> &[cl_event] {
        self.accesses.clear();
        self.awaited.clear();
        self.list.clear();
        if !self.free {
            return &self.list;
        }
        self.accesses.extend(accesses);
        let reached = self.reached;
        let awaited = &mut self.awaited;
        let mut need = |e: &Arc<Event>| {
            if e.fence > reached && !awaited.iter().any(|a| Arc::ptr_eq(a, e)) {
                awaited.push(e.clone());
            }
        };
        self.floor.iter().for_each(&mut need);
        for a in &mut self.accesses {
            match a {
                Access::Buffer { id, written } => {
                    let Some(u) = self.buffers.get_mut(&id.addr()) else { continue };
                    if u.readers.len() >= MAX_READERS {
                        u.readers.retain(|e| e.fence > reached);
                        *written |= u.readers.len() >= MAX_READERS;
                    }
                    // Whoever reads has waited for who wrote.
                    match *written && !u.readers.is_empty() {
                        true => u.readers.iter().for_each(&mut need),
                        false => u.writer.iter().for_each(&mut need),
                    }
                }
                Access::Host(h) => self.host.iter().filter(|(r, _)| r.conflicts(h)).for_each(|(_, e)| need(e)),
            }
        }
        self.list.extend(self.awaited.iter().map(|e| e.id));
        &self.list
    }

    /// What must have ended before the processor itself does this, behind everything that was issued before.
    pub(super) fn before_the_processor(&mut self, accesses: impl Iterator<Item = Access>) -> &[cl_event] {
        if self.free {
            return self.before(accesses);
        }
        let reached = self.reached;
        self.list.clear();
        self.list.extend(self.ends.iter().filter(|e| e.fence > reached).map(|e| e.id));
        &self.list
    }

    /// The command that [`Order::before`] was asked about has this event.
    pub(super) fn issued(&mut self, id: cl_event) {
        let event = Arc::new(Event { id, fence: self.next });
        if !self.free {
            self.ends.clear();
            self.ends.push(event);
            return;
        }
        for a in &self.accesses {
            match *a {
                Access::Buffer { id, written } => {
                    let u = self.buffers.entry(id.addr()).or_default();
                    if written {
                        u.readers.clear();
                        u.writer = Some(event.clone());
                    } else {
                        u.readers.push(event.clone());
                    }
                }
                Access::Host(h) => self.host.push_back((h, event.clone())),
            }
        }
        self.ends.retain(|e| !self.awaited.iter().any(|a| Arc::ptr_eq(a, e)));
        self.ends.push(event);
        self.awaited.clear();
    }

    /// The marker has this event, or another that comes behind it: everything from now on waits for it (rules 4 and 5).
    pub(super) fn issued_all(&mut self, id: cl_event) {
        self.buffers.clear();
        self.host.clear();
        self.ends.clear();
        self.awaited.clear();
        self.accesses.clear();
        self.issued(id);
        self.floor = self.ends.first().cloned();
    }

    /// Whether anything was issued since the last fence.
    pub(super) fn is_dirty(&self) -> bool {
        self.ends.iter().any(|e| e.fence == self.next)
    }

    /// Number of the last fence.
    pub(super) fn fenced(&self) -> u64 {
        self.next - 1
    }

    /// A fence behind everything so far (rule 3): its number and what must have ended.
    pub(super) fn fence(&mut self) -> (u64, Vec<Arc<Event>>) {
        let fence = self.next;
        self.next += 1;
        (fence, self.ends.iter().filter(|e| e.fence == fence).cloned().collect())
    }

    pub(super) fn reached(&self) -> u64 {
        self.reached
    }

    /// A fence has been reached, and all before it.
    pub(super) fn retire(&mut self, fence: u64) {
        self.reached = self.reached.max(fence);
        let reached = self.reached;
        self.ends.retain(|e| e.fence > reached);
        self.floor.take_if(|e| e.fence <= reached);
        while self.host.front().is_some_and(|(_, e)| e.fence <= reached) {
            self.host.pop_front();
        }
    }
}
