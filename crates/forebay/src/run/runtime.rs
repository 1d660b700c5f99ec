//! The runtime: devices, workers, scheduling mode; and the step from a checked graph to a running one.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use forebay_hal::cpu::{CpuDevice, Helpers, Pool as Workers};
use forebay_hal::fork::Home;
use forebay_hal::{Device, Kind, Recorded};
use forebay_policy::{DeviceSet, MAX_PLACED, Mode};
use forebay_proto::client::Account;

use super::device::{DEPTH_PRIORITY, DEPTH_THROUGHPUT, DeviceHandle};
use super::dispatch::Dispatcher;
use super::exec::MAX_ARGS;
use super::fuse::{Able, Parts, fuse};
use super::gate::Gate;
use super::host::HostEnd;
use super::life::Life;
use super::node::{Chan, Core, EndRef, Few, Imp, In, InKind, KArg, KLaunch, Node, Out, PoolRef, Trim};
use super::ring::Ring;
use super::running::Running;
use super::scratch::MAX_APART;
use super::trace::{Copies, CopySpan, TRACE_VARIABLE, Trace, monotonic_ns};
use crate::block::Pool;
use crate::error::{Error, Result};
use crate::graph::task::InPort;
use crate::graph::{Arg, End, Graph, Impl, Launch, PortKind, Task};
use crate::place::{Adapt, Load, Models};
use crate::resident::Resident;
use crate::template::Layout;

/// Most devices of a runtime, with the CPU.
pub const MAX_DEVICES: usize = MAX_PLACED;

pub(crate) struct RuntimeInner {
    pub(crate) devices: Vec<Arc<DeviceHandle>>,
    pub(crate) pool: Arc<Workers>,
    pub(crate) dispatcher: Dispatcher,
    /// Of devices that nobody named, once it was tried: why one cannot be used. It may be full, on a machine that others use.
    refused: Box<[OnceLock<Option<forebay_hal::Error>>]>,
    mode: Mode,
    fusion: bool,
    /// The device whose page-locked memory blocks should live in on the host.
    pinned: Option<Arc<dyn Device>>,
    /// The process's presence at the accelerator service, if there is one.
    pub(crate) gate: Option<Arc<Gate>>,
    epoch: Instant,
    /// Where recordings of all graphs go.
    pub(crate) recordings: Option<PathBuf>,
    models: Arc<Models>,
    load: Arc<Load>,
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
pub struct Runtime(Arc<RuntimeInner>);

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

    /// The CPU and every device of this kind.
    ///
    /// # Errors
    /// The reason why there is none, or why none can compile kernels. (Who has compiled them elsewhere names the devices.)
    pub fn only(self, kind: Kind) -> Result<Self> {
        if kind == Kind::Cpu {
            return Ok(self.cpu_only());
        }
        let (devices, missing) = forebay_hal::discover(&[kind]);
        let why = match devices.first() {
            None => missing.into_iter().next().map(|(_, why)| why),
            // What one of a kind needs to compile all do.
            Some(d) => d.compiles().err(),
        };
        why.map_or_else(|| Ok(self.devices(devices)), |why| Err(why.into()))
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
                d.serve(gate, if info.is_cpu { Some(gate.cpu().clone()) } else { gate.account(&info.name) });
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
        let refused = devices.iter().filter(|_| !named).map(|_| OnceLock::new()).collect();
        let inner = Arc::new(RuntimeInner {
            dispatcher: Dispatcher::new(self.mode, strengths, slots, shared, helpers),
            devices,
            pool,
            refused,
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
    fn cannot_run(&self, d: &DeviceHandle, launches: &[Launch]) -> Option<forebay_hal::Error> {
        let text = launches.iter().any(|l| l.source.is_text());
        text.then(|| d.device.compiles().err()).flatten().or_else(|| self.refusal(d))
    }

    fn refusal(&self, d: &DeviceHandle) -> Option<forebay_hal::Error> {
        let refused = self.0.refused.get(d.index).and_then(|r| r.get()?.clone());
        refused.or_else(|| d.lost().cloned())
    }

    /// Tries the devices that these tasks have kernels for and nobody has named: a little memory is what the least needs.
    fn try_devices(&self, tasks: &[Task]) {
        for (d, refused) in self.0.devices.iter().zip(&self.0.refused).filter(|(d, _)| !d.is_host()) {
            let has = |t: &Task| t.impls.iter().any(|i| matches!(i, Impl::Kernels(k, _) if *k == d.kind()));
            if tasks.iter().any(has) {
                refused.get_or_init(|| d.device.alloc(1).err());
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

    /// Checks a graph, compiles its kernels and starts it.
    ///
    /// # Errors
    /// Those of [`Graph::check`]; a task without an implementation for these devices; kernels that do not compile.
    pub fn start(&self, graph: Graph) -> Result<Running> {
        self.start_with(graph, false)
    }

    /// As [`Runtime::start`], recording a [`super::Span`] per invocation.
    ///
    /// # Errors
    /// As [`Runtime::start`].
    pub fn start_traced(&self, graph: Graph) -> Result<Running> {
        self.start_with(graph, true)
    }

    fn start_with(&self, graph: Graph, trace: bool) -> Result<Running> {
        if !self.0.is_here() {
            return Err(Error::Forked { what: "this runtime".into() });
        }
        graph.check()?;
        let rt = &self.0;
        let trace = trace || rt.recordings.is_some();
        if trace {
            for d in &rt.devices {
                d.copies.get_or_init(|| Copies::new(rt.epoch));
            }
        }
        let Graph { name, tasks, channels, into, out_of, .. } = graph;
        self.try_devices(&tasks);
        let parts = Parts { tasks: &tasks, channels: &channels, into: &into, out_of: &out_of };
        let regions = if rt.fusion { fuse(parts, |t| self.only_accelerators(t)) } else { Vec::new() };
        let mut lead: Vec<u32> = (0..tasks.len() as u32).collect();
        let mut inside: Vec<Option<u32>> = vec![None; channels.len()];
        let mut room = vec![0; channels.len()];
        let mut leads = HashMap::new();
        for f in regions {
            let first = f.members[0];
            f.members.iter().for_each(|&m| lead[m as usize] = first);
            f.inside.iter().for_each(|&c| inside[c as usize] = Some(first));
            f.room.iter().for_each(|&(c, n)| room[c as usize] = n);
            leads.insert(first, f);
        }
        let mut nodes = Vec::with_capacity(tasks.len());
        for ((index, task), (ins, outs)) in (0u32..).zip(tasks).zip(into.iter().zip(&out_of)) {
            nodes.push(match leads.remove(&index) {
                Some(f) => {
                    let region = f.task.name().into();
                    let mut node = self.node(index, f.task, &f.into, &f.out_of)?;
                    (node.name, node.region) = (task.name, Some(region));
                    node
                }
                None if lead[index as usize] != index => {
                    let geometry = task.geometry.unwrap_or_else(|| task.inferred_geometry());
                    Node::fused(task.name, index, lead[index as usize], geometry)
                }
                None => self.node(index, task, ins, outs)?,
            });
        }
        let channels = channels
            .into_iter()
            .enumerate()
            .map(|(at, c)| {
                let end = |e: End| match e {
                    End::Task { task, .. } => EndRef::Node(lead[task as usize]),
                    End::Host => EndRef::Host,
                };
                let feed = c.from == End::Host;
                Chan {
                    ring: Ring::new(c.capacity + room[at]),
                    declared: c.capacity,
                    ahead: AtomicBool::new(room[at] == 0),
                    from: end(c.from),
                    to: end(c.to),
                    predicate: c.predicate,
                    latched: UnsafeCell::new(false),
                    template: c.template,
                    host: (feed || c.to == End::Host).then(HostEnd::new),
                    pool: feed.then(|| PoolRef(Pool::new(c.template, rt.pinned.clone()))),
                    inside: inside[at],
                }
            })
            .collect();
        let core = Arc::new(Core {
            name,
            nodes: nodes.into_boxed_slice(),
            channels,
            runtime: rt.clone(),
            life: Life::new(),
            nice: AtomicI32::new(super::running::current_nice()),
            trace: trace.then(Trace::default),
            _trim: Trim(rt.clone()),
        });
        core.nodes.iter().for_each(|n| n.bind(&core));
        let capacity = |c: &u32| core.channels[*c as usize].declared;
        for o in core.nodes.iter().flat_map(|n| n.outputs.iter()) {
            o.pool.set_ahead(o.channels.iter().map(capacity).max().unwrap_or(1));
        }
        for c in &core.channels {
            c.pool.iter().for_each(|p| p.set_ahead(c.declared));
        }
        let running = Running::new(core);
        running.run()?;
        Ok(running)
    }

    /// The accelerators that run a task, if nothing else does, and they are of one kind. Under data-aware scheduling the CPU
    /// only helps out where there is something stronger ([`Mode::DataAware`]), and that is given up for a region.
    fn only_accelerators(&self, task: &Task) -> Option<Able> {
        if task.impls.iter().any(|i| matches!(i, Impl::Resident(_))) {
            // It is the device's, and not by its queue: no kernels to put together with others.
            return None;
        }
        let can = |d: &&Arc<DeviceHandle>| {
            task.impls.iter().any(|i| match i {
                Impl::Host(_) => d.is_host(),
                Impl::Kernels(k, launches) => *k == d.kind() && self.cannot_run(d, launches).is_none(),
                Impl::Resident(_) => false,
            })
        };
        let strength = |d: &DeviceHandle| d.device.info().strength;
        let mut able: Vec<&Arc<DeviceHandle>> = self.0.devices.iter().filter(can).collect();
        if let Some(host) = able.first().filter(|d| d.is_host() && self.0.mode == Mode::DataAware) {
            let host = strength(host);
            able.retain(|d| strength(d) > host);
        }
        let kind = able.first().filter(|d| !d.is_host())?.kind();
        able.iter().all(|d| d.kind() == kind).then_some(Able { kind, several: able.len() > 1 })
    }

    fn node(&self, index: u32, task: Task, ins: &[Option<u32>], outs: &[Vec<u32>]) -> Result<Node> {
        let rt = &self.0;
        let geometry = task.geometry.unwrap_or_else(|| task.inferred_geometry());
        let has = task.impls.iter().map(Impl::describe).collect::<Vec<_>>().join(", ");
        let inputs: Few<In> = task
            .inputs
            .iter()
            .enumerate()
            .map(|(i, p)| {
                let initializer = || {
                    let found = task.inputs.iter().position(|o| o.kind == PortKind::Initializer && o.target == Some(i));
                    found.map(|j| j as u32)
                };
                use crate::graph::task::MetaUse;
                let kind = match p.kind {
                    PortKind::Input => InKind::Plain { initializer: initializer() },
                    PortKind::Sticky => InKind::Sticky,
                    PortKind::Initializer => InKind::Initializer,
                    PortKind::Meta => InKind::Meta {
                        geometry: p.meta == MetaUse::Geometry,
                        iterations: p.meta == MetaUse::Iterations,
                        size_of: if let MetaUse::SizeOf(o) = p.meta { Some(o as u32) } else { None },
                    },
                };
                In { channel: ins[i].unwrap_or(u32::MAX), kind }
            })
            .collect();
        let outputs: Few<Out> = task
            .outputs
            .iter()
            .zip(outs)
            .map(|(p, channels)| Out {
                channels: channels.iter().copied().collect(),
                pool: PoolRef(Pool::new(p.template, rt.pinned.clone())),
                from_input: p.from_input.map(|i| i as u32),
                room: if p.template.layout == Layout::Array { 0 } else { p.template.elements() },
            })
            .collect();
        let hint = task.hint.as_ref().and_then(|h| task.inputs.iter().position(|p| p.name == *h)).map(|i| i as u32);
        let mut kernels: Vec<(Kind, Vec<Launch>)> = Vec::new();
        let (mut host, mut resident) = (None, None);
        let Task { name, inputs: in_ports, outputs: out_ports, scratch, impls, priority, iterations, .. } = task;
        for i in impls {
            match i {
                Impl::Host(f) => host = Some(f),
                Impl::Kernels(kind, launches) => kernels.push((kind, launches)),
                Impl::Resident(r) => resident = Some(r),
            }
        }
        let described = |kind: Kind| {
            let of = kernels.iter().filter(|(k, _)| *k == kind).flat_map(|(_, l)| l);
            of.flat_map(|l| format!("{:?} {}\n", l.source, l.entry).into_bytes()).collect::<Vec<u8>>()
        };
        let mut imps: Few<(usize, Imp)> = Few::new();
        let mut refused = None;
        for d in &rt.devices {
            let wanted = kernels.iter().find(|(k, _)| *k == d.kind());
            if let Some(why) = wanted.and_then(|(_, launches)| self.cannot_run(d, launches)) {
                // As if it had no implementation for that device.
                refused = Some(why);
                continue;
            }
            match (wanted, d.is_host()) {
                (None, true) => imps.extend(host.take().map(|f| (d.index, Imp::Host(f)))),
                (None, false) => {
                    let there = resident.take_if(|r| r.reaches(d.device.memory_id()));
                    imps.extend(there.map(|task| (d.index, Imp::Resident { task, spans: None })));
                }
                (Some((_, launches)), _) => {
                    let resolve = |a: &Arg| resolve_arg(a, &in_ports, &out_ports, &scratch);
                    let mut compiled = Vec::new();
                    let mut lost = None;
                    for l in launches {
                        if l.args.len() > MAX_ARGS {
                            let why = format!("kernel {:?} has more than {MAX_ARGS} arguments", l.entry);
                            return Err(Error::Task { task: name, why });
                        }
                        let kernel = match d.device.compile(&l.source, &l.entry) {
                            Ok(kernel) => kernel,
                            Err(why @ forebay_hal::Error::Lost { .. }) => {
                                lost = Some(why);
                                break;
                            }
                            Err(why) => return Err(Error::Task { task: name, why: why.to_string() }),
                        };
                        compiled.push(KLaunch {
                            kernel,
                            args: l.args.iter().map(resolve).collect::<Option<Box<[KArg]>>>().ok_or_else(|| {
                                Error::Task { task: name.clone(), why: format!("arguments of {:?}", l.entry) }
                            })?,
                            geometry: l.geometry,
                            member: l.member,
                            writes: 0,
                        });
                    }
                    if lost.is_some() {
                        refused = lost;
                        rt.dispatcher.look_for_lost(&rt.devices);
                        continue;
                    }
                    for (c, l) in compiled.iter_mut().zip(launches) {
                        let written = |(i, a): (usize, &KArg)| match a {
                            KArg::Out(_) | KArg::Scratch(_) => 1 << i,
                            _ => 0,
                        };
                        c.writes = c.args.iter().enumerate().map(written).sum::<u64>() & !l.read_only;
                    }
                    let (mut reads, mut writes, mut numbers) = (0u64, 0u64, 0u64);
                    for a in compiled.iter().flat_map(|l| l.args.iter()) {
                        match a {
                            KArg::In(i) => reads |= 1 << i,
                            KArg::Out(o) => writes |= 1 << o,
                            KArg::Meta(i, _) => numbers |= 1 << i,
                            _ => {}
                        }
                    }
                    let varies = |(i, p): (usize, &InPort)| {
                        (reads >> i & 1 != 0 && p.template.layout != Layout::Array).then_some((i, p.template))
                    };
                    let rooms = in_ports.iter().enumerate().filter_map(varies).collect();
                    // What no kernel of this device uses takes no memory there.
                    let used = |i: usize| {
                        let mut all = compiled.iter().flat_map(|l| l.args.iter());
                        all.any(|a| matches!(a, KArg::Scratch(s) if *s as usize == i))
                    };
                    let sizes = scratch.iter().enumerate().map(|(i, (_, bytes))| if used(i) { *bytes } else { 0 });
                    let sizes: Vec<usize> = sizes.collect();
                    let set = || sizes.iter().map(|bytes| d.buffer(*bytes)).collect::<Result<Box<[_]>, _>>();
                    let mut scratch: Few<_> = Few::from_iter([set()?]);
                    let total = sizes.iter().fold(0usize, |sum, b| sum.saturating_add(*b));
                    if d.device.kernels_beside() && (1..=MAX_APART).contains(&total) {
                        // Without room for it, one does.
                        scratch.extend(set().ok());
                    }
                    imps.push((
                        d.index,
                        Imp::Kernels {
                            launches: compiled.into(),
                            scratch,
                            next: 0,
                            reads,
                            writes,
                            numbers,
                            rooms,
                            recorded: Recorded::default(),
                        },
                    ));
                }
            }
        }
        if let Some(why) = refused.filter(|_| imps.is_empty()) {
            return Err(Error::Task { task: name, why: why.to_string() });
        }
        if imps.is_empty() {
            let devices = rt.devices.iter().map(|d| d.kind().to_string()).collect::<Vec<_>>().join(", ");
            return Err(Error::NoImplementation { task: name, devices, has });
        }
        let cpu_only = imps.iter().all(|(d, _)| *d == 0);
        let managed = !(cpu_only && matches!(rt.mode, Mode::FirstAvailable | Mode::DataAware | Mode::Adaptive));
        let adapt = (rt.mode == Mode::Adaptive && imps.len() > 1).then(|| {
            let cores = rt.pool.workers().max(1);
            let mut adapt = Adapt::new(&name, &rt.models, &rt.load, cores, u64::from(index));
            for (d, imp) in &imps {
                let (i, cpu) = (rt.devices[*d].device.info(), rt.devices[*d].is_host());
                let (content, width) = match imp {
                    // A function may use more than its worker, but seldom does.
                    Imp::Host(_) => (program(), Some(1)),
                    Imp::Kernels { .. } => (described(i.kind), (cpu || i.is_cpu).then_some(cores)),
                    Imp::Resident { task, .. } => (task.content(), None),
                };
                adapt.add(*d, format!("{} {} {}", i.kind.name(), i.name, i.driver), content, width);
            }
            Box::new(adapt)
        });
        let names = |all: Vec<&str>| all.into_iter().map(Arc::from).collect::<Box<[Arc<str>]>>();
        let mut node = Node::new(
            name,
            index,
            inputs,
            outputs,
            names(in_ports.iter().map(|p| p.name.as_str()).collect()),
            names(out_ports.iter().map(|p| p.name.as_str()).collect()),
            imps,
            adapt,
            managed,
            geometry,
            priority,
            iterations.unwrap_or(0),
        );
        node.hint = hint;
        Ok(node)
    }
}

/// What this program is: its functions take what they take until it is built anew.
fn program() -> Vec<u8> {
    let of = std::env::current_exe().ok().and_then(|p| Some((p.metadata().ok()?, p)));
    of.map_or_else(Vec::new, |(m, p)| format!("{} {} {:?}", p.display(), m.len(), m.modified().ok()).into_bytes())
}

fn resolve_arg(
    a: &Arg,
    inputs: &[crate::graph::task::InPort],
    outputs: &[crate::graph::task::OutPort],
    scratch: &[(String, usize)],
) -> Option<KArg> {
    let output = |n: &str| outputs.iter().position(|p| p.name == *n).map(|i| i as u32);
    let input = |n: &str| inputs.iter().position(|p| p.name == *n).map(|i| i as u32);
    Some(match a {
        // An in-place input's datablock is at its output.
        Arg::Port(n) => output(n)
            .map(KArg::Out)
            .or_else(|| {
                let i = input(n)?;
                let moved = outputs.iter().position(|o| o.from_input == Some(i as usize));
                Some(moved.map_or(KArg::In(i), |o| KArg::Out(o as u32)))
            })
            .or_else(|| scratch.iter().position(|(s, _)| s == n).map(|i| KArg::Scratch(i as u32)))?,
        Arg::Records(n) => output(n).map(KArg::RecordsOut).or_else(|| input(n).map(KArg::RecordsIn))?,
        Arg::Meta(n) => {
            let i = input(n)?;
            KArg::Meta(i, inputs[i as usize].template.elem)
        }
        Arg::Items(d) => KArg::Items(*d),
        Arg::U32(v) => KArg::U32(*v),
        Arg::I32(v) => KArg::I32(*v),
        Arg::F32(v) => KArg::F32(*v),
    })
}
