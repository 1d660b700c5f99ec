//! A running graph's tasks and channels.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_hal::cpu::Turn;
use forebay_hal::{Buffer, Geometry, Kernel, Recorded};
use forebay_policy::{DeviceSet, MAX_PLACED};
use smallvec::SmallVec;

use super::dispatch::Running;
use super::elsewhere::Full;
use super::host::HostEnd;
use super::life::Life;
use super::members::Members;
use super::notify::Notify;
use super::ring::Ring;
use super::runtime::RuntimeInner;
use super::trace::Trace;
use crate::block::{Datablock, Inner, Pool};
use crate::graph::{Predicate, Work};
use crate::place::Adapt;
use crate::resident::Resident;
use crate::template::{Elem, Template};

/// Mostly one of it: kept inside its owner, so that running a small task touches few cache lines.
pub(crate) type Few<T> = SmallVec<[T; 1]>;

/// Everything of one running graph. Nodes and channels refer to each other by index.
pub(crate) struct Core {
    pub(crate) name: String,
    pub(crate) nodes: Box<[Node]>,
    pub(crate) channels: Box<[Chan]>,
    pub(crate) runtime: Arc<RuntimeInner>,
    pub(crate) life: Life,
    /// Nice value of the thread that asked last (proxy priority).
    pub(crate) nice: AtomicI32,
    pub(crate) trace: Option<Trace>,
    /// Dropped last.
    pub(crate) _trim: Trim,
}

/// Frees the devices' spare memory once a graph's blocks have given theirs back, and what its commands were given.
pub(crate) struct Trim(pub(crate) Arc<RuntimeInner>);

impl Drop for Trim {
    fn drop(&mut self) {
        for d in &self.0.devices {
            d.sweep();
            d.trim();
        }
    }
}

/// One end of a running channel.
#[derive(Clone, Copy)]
pub(crate) enum EndRef {
    Node(u32),
    Host,
}

pub(crate) struct Chan {
    pub(crate) ring: Ring<Inner>,
    /// What the program declared; the ring of a channel into a region holds more (fuse.rs, rule 4).
    pub(crate) declared: usize,
    /// The program has shown that it pushes ahead of what it declared.
    pub(crate) ahead: AtomicBool,
    pub(crate) from: EndRef,
    pub(crate) to: EndRef,
    pub(crate) predicate: Predicate,
    /// The predicate's memory; touched by the producer's owner only.
    pub(crate) latched: UnsafeCell<bool>,
    pub(crate) template: Template,
    /// The program's end, if one end is the program.
    pub(crate) host: Option<Arc<HostEnd>>,
    /// For feeds: where the program gets blocks to fill.
    pub(crate) pool: Option<PoolRef>,
    /// Inside a region that this task leads: nothing goes through it.
    pub(crate) inside: Option<u32>,
}

// SAFETY: `latched` belongs to the producer's owner (node.rs, `Node::own`); the ring's sides likewise.
unsafe impl Send for Chan {}
// SAFETY: as above.
unsafe impl Sync for Chan {}

impl Drop for Chan {
    fn drop(&mut self) {
        while let Some(p) = self.ring.pop() {
            // SAFETY: the ring holds handles given by `into_raw`.
            drop(unsafe { Datablock::from_raw(p) });
        }
    }
}

/// A pool's owner, or one of them.
pub(crate) struct PoolRef(pub(crate) NonNull<Pool>);

// SAFETY: a pool is Sync (atomics, and a line of blocks under a lock).
unsafe impl Send for PoolRef {}
// SAFETY: as above.
unsafe impl Sync for PoolRef {}

impl Clone for PoolRef {
    fn clone(&self) -> Self {
        // SAFETY: we are an owner, so it lives.
        unsafe { self.0.as_ref() }.own();
        PoolRef(self.0)
    }
}

impl PoolRef {
    pub(crate) fn acquire(&self) -> Datablock {
        // SAFETY: we are an owner, so it lives.
        unsafe { self.0.as_ref() }.acquire()
    }

    /// See [`Pool::set_ahead`].
    pub(crate) fn set_ahead(&self, capacity: usize) {
        // SAFETY: as above.
        unsafe { self.0.as_ref() }.set_ahead(capacity);
    }

    /// Of its blocks.
    pub(crate) fn template(&self) -> Template {
        // SAFETY: as above.
        unsafe { self.0.as_ref() }.template()
    }

    /// Bytes of a block.
    pub(crate) fn bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.0.as_ref() }.bytes()
    }
}

impl Drop for PoolRef {
    fn drop(&mut self) {
        // SAFETY: each owner closes it once; nobody acquires through a dropped reference.
        unsafe { Pool::close(self.0) };
    }
}

/// What an input port does, resolved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum InKind {
    /// One block per invocation; at the start from that other input's channel, if there is one.
    Plain {
        initializer: Option<u32>,
    },
    Sticky,
    /// A number; iteration counts only at the start of a group.
    Meta {
        geometry: bool,
        iterations: bool,
        size_of: Option<u32>,
    },
    Initializer,
}

pub(crate) struct In {
    pub(crate) channel: u32,
    pub(crate) kind: InKind,
}

pub(crate) struct Out {
    pub(crate) channels: SmallVec<[u32; 4]>,
    pub(crate) pool: PoolRef,
    pub(crate) from_input: Option<u32>,
    /// Records or bytes that a block here has room for: what comes in may have less. 0 for arrays, which are all alike.
    pub(crate) room: usize,
}

/// The channels of a task with one input and at most one channel out.
pub(crate) struct Link {
    pub(crate) from: u32,
    pub(crate) to: Option<u32>,
}

impl Link {
    fn of(inputs: &[In], outputs: &[Out]) -> Option<Link> {
        let [input] = inputs else { return None };
        let to = match outputs {
            [] => None,
            [o] if o.channels.len() == 1 => Some(o.channels[0]),
            _ => return None,
        };
        Some(Link { from: input.channel, to })
    }
}

/// A kernel argument, resolved.
#[derive(Clone, Copy)]
pub(crate) enum KArg {
    In(u32),
    Out(u32),
    Scratch(u32),
    Meta(u32, Elem),
    RecordsIn(u32),
    RecordsOut(u32),
    Items(usize),
    U32(u32),
    I32(i32),
    F32(f32),
}

pub(crate) struct KLaunch {
    pub(crate) kernel: Kernel,
    pub(crate) args: Box<[KArg]>,
    pub(crate) geometry: Option<Geometry>,
    /// In a fused task: the task whose iteration space it runs over.
    pub(crate) member: Option<u32>,
    /// Bit `i`: argument `i` is a buffer that may be written.
    pub(crate) writes: u64,
}

/// How a task runs on one device.
pub(crate) enum Imp {
    Host(Work),
    Kernels {
        launches: Box<[KLaunch]>,
        /// Sets of scratch memory, and which is next: where kernels run side by side, an invocation need not wait for the
        /// memory of the one before.
        scratch: Few<Box<[Buffer]>>,
        next: usize,
        /// Bit `i`: the buffer at input (output) `i` is an argument.
        reads: u64,
        writes: u64,
        /// Bit `i`: the number at input `i` is.
        numbers: u64,
        /// What an argument at an input has room for, where blocks may come that have less.
        rooms: Few<(usize, Template)>,
        recorded: Recorded,
    },
    /// With memory of the device for its ports' spans, from the first invocation on.
    Resident {
        task: Resident,
        spans: Option<Buffer>,
    },
    /// A region's tasks, on the host.
    Members(Members),
}

/// A task of a running graph.
///
/// The order of the fields is that of their use: what a hop touches comes first and fills few cache lines.
#[repr(C, align(64))]
pub(crate) struct Node {
    pub(crate) notify: Notify,
    pub(crate) index: u32,
    core: AtomicPtr<Core>,
    /// One input, at most one channel out, and otherwise `simple`: `run_link`.
    pub(crate) link: Option<Link>,
    /// All inputs are plain: readiness is one look at each channel.
    pub(crate) plain: bool,
    /// Plain inputs, no groups, and nothing but a function on the host: `invoke_simple`.
    pub(crate) simple: bool,
    /// Nothing but kernels on the host.
    pub(crate) only_kernels: bool,
    /// Has several inputs, so only the one that it waits for notifies it (notify.rs).
    pub(crate) watches: bool,
    /// Goes through the ready queue; otherwise it runs where it became ready.
    pub(crate) managed: bool,
    pub(crate) geometry_set: AtomicBool,
    pub(crate) stats: Stats,
    pub(crate) outputs: Few<Out>,
    /// Touched only by the owner (notify.rs).
    pub(crate) own: UnsafeCell<Own>,
    pub(crate) inputs: Few<In>,
    pub(crate) devices: DeviceSet,
    /// What it is left to where none of these can be used: the host, for a region that can run there (members.rs).
    pub(crate) spare: DeviceSet,
    pub(crate) priority: AtomicI32,
    pub(crate) default_geometry: Geometry,
    /// `set_geometry`: the value, if there is one.
    pub(crate) geometry: Mutex<Option<Geometry>>,
    /// Its place among all that want the workers for long.
    pub(crate) turn: Turn,
    /// And among what is in the ready queue (managed tasks only).
    pub(crate) served: Turn,
    /// Invocations by device number (managed tasks only).
    pub(crate) by_device: [AtomicU64; MAX_PLACED],
    /// Moves to another home, and why devices are not chosen any more (adaptive placement).
    pub(crate) moves: AtomicU64,
    /// Predictions, and their mean error in millionths.
    pub(crate) accuracy: [AtomicU64; 2],
    /// The last of them, and what it took, ns.
    pub(crate) predicted: [AtomicU64; 2],
    pub(crate) refused: Mutex<Vec<(usize, String)>>,
    /// The Meta port whose number is the hint.
    pub(crate) hint: Option<u32>,
    pub(crate) input_names: Box<[Arc<str>]>,
    pub(crate) output_names: Box<[Arc<str>]>,
    pub(crate) name: String,
    /// The task that runs for this one: itself, or the first of the region that it is fused into.
    pub(crate) lead: u32,
    /// Name of the region that this task leads.
    pub(crate) region: Option<Box<str>>,
}

// SAFETY: `own` is touched only by the owner; everything else is Sync.
unsafe impl Send for Node {}
// SAFETY: as above.
unsafe impl Sync for Node {}

/// Written by the owner, read by anybody.
#[repr(C)]
pub(crate) struct Stats {
    pub(crate) invocations: AtomicU64,
    /// Estimate of an invocation, ns, for the workers' decision to wake others.
    pub(crate) cost_ns: AtomicU32,
    /// 0 waiting, 1 queued, 2 executing, 3 completed with outputs that have no room.
    pub(crate) state: AtomicU8,
    /// Decayed averages, ns (managed tasks only).
    pub(crate) avg_wait: AtomicU64,
    pub(crate) avg_run: AtomicU64,
}

/// One invocation in so many is timed (two clock reads cost about as much as a whole hop of a chain).
const COST_SAMPLE: u64 = 64;
/// From here on timing costs nothing by comparison, so every invocation is timed.
const COST_ALWAYS_NS: u32 = 10_000;

impl Default for Stats {
    fn default() -> Self {
        Stats {
            invocations: AtomicU64::new(0),
            avg_wait: AtomicU64::new(0),
            avg_run: AtomicU64::new(0),
            state: AtomicU8::new(0),
            cost_ns: AtomicU32::new(forebay_hal::cpu::UNKNOWN_NS),
        }
    }
}

impl Stats {
    /// Whether this invocation should be timed.
    #[inline]
    pub(crate) fn wants_cost(&self) -> bool {
        let n = self.invocations.load(Ordering::Relaxed);
        n % COST_SAMPLE < 2 || self.cost_ns.load(Ordering::Relaxed) > COST_ALWAYS_NS
    }

    /// Whether one invocation is so much that it does not matter where it waits.
    pub(crate) fn is_long(&self) -> bool {
        self.cost_ns.load(Ordering::Relaxed) > COST_ALWAYS_NS
    }

    /// Takes a sample into the estimate: upwards at once, downwards by halves.
    pub(crate) fn cost(&self, ns: u64) {
        let new = u32::try_from(ns).unwrap_or(u32::MAX - 1);
        let old = self.cost_ns.load(Ordering::Relaxed);
        let next = if old == forebay_hal::cpu::UNKNOWN_NS || new > old { new } else { new + (old - new) / 2 };
        self.cost_ns.store(next, Ordering::Relaxed);
    }

    /// Counts without a read-modify-write: only the owner writes.
    #[inline]
    pub(crate) fn count(&self) {
        self.invocations.store(self.invocations.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// A task's state that only its owner touches; in order of use, as [`Node`].
#[repr(C)]
pub(crate) struct Own {
    /// `outs` wait for room in the channels (Completed).
    pub(crate) holding: bool,
    /// A task without inputs that said that it has finished.
    pub(crate) finished: bool,
    pub(crate) started: bool,
    /// Something of the current invocation may have been done.
    pub(crate) touched: bool,
    pub(crate) imps: Few<(usize, Imp)>,
    /// Datablocks of the current invocation, by input; sticky ones stay.
    pub(crate) ins: SmallVec<[Option<Datablock>; 2]>,
    /// Datablocks produced, by output.
    pub(crate) outs: SmallVec<[Option<Datablock>; 2]>,
    /// Position in the iteration group, and its length (0: no groups).
    pub(crate) iteration: u64,
    pub(crate) group: u64,
    pub(crate) fixed_group: u64,
    /// Device chosen by the ready queue, and when the task became ready.
    pub(crate) device: usize,
    /// What the ready queue thinks of it meanwhile.
    pub(crate) running: Running,
    /// Adaptive placement, for tasks that can run on several devices.
    pub(crate) adapt: Option<Box<Adapt>>,
    /// Devices that had no room for it.
    pub(crate) full: Full,
    /// Buffers of the current launch, kept for their capacity.
    pub(crate) in_buffers: Vec<Option<Buffer>>,
    pub(crate) out_buffers: Vec<Option<Buffer>>,
}

impl Own {
    /// Whether the next invocation is the first, of all or of its group.
    pub(crate) fn at_start(&self) -> bool {
        if self.fixed_group != 0 || self.group != 0 { self.iteration == 0 } else { !self.started }
    }

    /// Back to the beginning; drops every block. What failed may be tried again.
    pub(crate) fn reset(&mut self) {
        self.adapt.iter_mut().for_each(|a| a.forgive());
        self.ins.iter_mut().for_each(|b| *b = None);
        self.outs.iter_mut().for_each(|b| *b = None);
        self.holding = false;
        self.finished = false;
        self.iteration = 0;
        self.group = self.fixed_group;
        self.started = false;
    }
}

impl Node {
    #[allow(clippy::too_many_arguments, reason = "called once, by the runtime, with everything resolved")]
    pub(crate) fn new(
        name: String,
        index: u32,
        inputs: Few<In>,
        outputs: Few<Out>,
        input_names: Box<[Arc<str>]>,
        output_names: Box<[Arc<str>]>,
        imps: Few<(usize, Imp)>,
        adapt: Option<Box<Adapt>>,
        managed: bool,
        geometry: Geometry,
        priority: i32,
        group: u64,
    ) -> Self {
        let plain_inputs = inputs.iter().all(|i| i.kind == InKind::Plain { initializer: None });
        let simple = group == 0 && plain_inputs && matches!(imps.as_slice(), [(0, Imp::Host(_))]);
        let only_kernels = matches!(imps.as_slice(), [(0, Imp::Kernels { .. })]);
        let devices = imps.iter().fold(DeviceSet::default(), |s, (d, _)| s.with(*d));
        Node {
            name,
            notify: Notify::new(),
            own: UnsafeCell::new(Own {
                imps,
                ins: inputs.iter().map(|_| None).collect(),
                outs: outputs.iter().map(|_| None).collect(),
                holding: false,
                finished: false,
                iteration: 0,
                group,
                fixed_group: group,
                started: false,
                touched: false,
                device: 0,
                running: Running::default(),
                adapt,
                full: Full::default(),
                in_buffers: inputs.iter().map(|_| None).collect(),
                out_buffers: outputs.iter().map(|_| None).collect(),
            }),
            plain: inputs.iter().all(|i| i.kind == InKind::Plain { initializer: None }),
            link: if simple && !managed { Link::of(&inputs, &outputs) } else { None },
            simple,
            only_kernels,
            watches: inputs.len() > 1,
            inputs,
            outputs,
            input_names,
            output_names,
            managed,
            devices,
            spare: DeviceSet::default(),
            default_geometry: geometry,
            geometry: Mutex::new(None),
            geometry_set: AtomicBool::new(false),
            priority: AtomicI32::new(priority),
            index,
            core: AtomicPtr::new(std::ptr::null_mut()),
            stats: Stats::default(),
            turn: Turn::default(),
            served: Turn::default(),
            by_device: Default::default(),
            moves: AtomicU64::new(0),
            accuracy: Default::default(),
            predicted: Default::default(),
            refused: Mutex::default(),
            hint: None,
            lead: index,
            region: None,
        }
    }

    /// A task that another one runs for (fuse.rs): a name and an iteration space.
    pub(crate) fn fused(name: String, index: u32, lead: u32, geometry: Geometry) -> Self {
        let none = || Box::<[Arc<str>]>::default();
        let (inputs, outputs, imps) = (Few::new(), Few::new(), Few::new());
        let node = Node::new(name, index, inputs, outputs, none(), none(), imps, None, true, geometry, 0, 0);
        Node { lead, ..node }
    }

    /// Called once, before the first notification.
    pub(crate) fn bind(&self, core: &Arc<Core>) {
        self.core.store(Arc::as_ptr(core).cast_mut(), Ordering::Release);
    }

    /// The graph; valid while the task is owned, since teardown waits until nobody owns any task.
    #[inline]
    pub(crate) fn core(&self) -> &Core {
        // SAFETY: set by `bind` before the first job; the graph outlives owned tasks (life.rs, `quiesce`).
        unsafe { &*self.core.load(Ordering::Relaxed) }
    }

    pub(crate) fn geometry_now(&self) -> Geometry {
        if self.geometry_set.load(Ordering::Acquire)
            && let Some(g) = *self.geometry.lock().unwrap_or_else(PoisonError::into_inner)
        {
            return g;
        }
        self.default_geometry
    }
}
