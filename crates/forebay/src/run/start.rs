//! From a checked graph to a running one: regions, kernels, channels.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32};

use forebay_hal::{Kind, Recorded};
use forebay_policy::{DeviceSet, Mode};

use super::device::DeviceHandle;
use super::exec::MAX_ARGS;
use super::fuse::{Able, Fused, Parts, fuse};
use super::host::HostEnd;
use super::life::Life;
use super::members::{Declared, Members};
use super::node::{Chan, Core, EndRef, Few, Imp, In, InKind, KArg, KLaunch, Node, Out, PoolRef, Trim};
use super::ring::Ring;
use super::running::Running;
use super::runtime::Runtime;
use super::scratch::MAX_APART;
use super::share::share_pools;
use super::trace::Trace;
use crate::block::Pool;
use crate::error::{Error, Result};
use crate::graph::task::{InPort, OutPort};
use crate::graph::{Arg, End, Graph, Impl, Launch, PortKind, Task};
use crate::place::Adapt;
use crate::template::Layout;

impl Runtime {
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
            rt.record_copies();
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
        let mut of_regions: HashMap<u32, Declared> = HashMap::new();
        for ((index, task), (ins, outs)) in (0u32..).zip(tasks).zip(into.into_iter().zip(out_of)) {
            let is_member = lead[index as usize] != index || leads.contains_key(&index);
            nodes.push(if is_member {
                let geometry = task.geometry.unwrap_or_else(|| task.inferred_geometry());
                let node = Node::fused(task.name.clone(), index, lead[index as usize], geometry);
                of_regions.insert(index, Declared::new(index, task, ins, outs));
                node
            } else {
                self.node(index, task, &ins, &outs, None)?
            });
        }
        for (first, region) in leads {
            let members = region.members.iter().filter_map(|m| of_regions.remove(m)).collect();
            let node = &mut nodes[first as usize];
            *node = self.region(first, node.name.clone(), region, members)?;
        }
        let mut channels: Box<[Chan]> = channels
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
        share_pools(&mut nodes, &mut channels, rt);
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
        super::exit::note(&core);
        let running = Running::new(core);
        running.run()?;
        Ok(running)
    }

    /// The task that stands for a region: the first of its members, which are in the order of data.
    fn region(&self, first: u32, name: String, region: Fused, members: Vec<Declared>) -> Result<Node> {
        let spare = Members::of(&region, members);
        let of_all = region.task.name().into();
        let mut node = self.node(first, region.task, &region.into, &region.out_of, spare)?;
        (node.name, node.region) = (name, Some(of_all));
        Ok(node)
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

    /// A task with its implementations on these devices, and what it has to spare for when none of them can be used.
    pub(super) fn node(
        &self,
        index: u32,
        task: Task,
        ins: &[Option<u32>],
        outs: &[Vec<u32>],
        spare: Option<Members>,
    ) -> Result<Node> {
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
        let (mut absent, mut refused) = (None, Vec::new());
        for d in &rt.devices {
            let wanted = kernels.iter().find(|(k, _)| *k == d.kind());
            if let Some(why) = wanted.and_then(|(_, launches)| self.cannot_run(d, launches)) {
                // As if it had no implementation for that device.
                absent = Some(why.to_string());
                continue;
            }
            match (wanted, d.is_host()) {
                (None, true) => imps.extend(host.take().map(|f| (d.index, Imp::Host(f)))),
                (None, false) => {
                    let there = resident.take_if(|r| r.reaches(d.device.memory_id()));
                    imps.extend(there.map(|task| (d.index, Imp::Resident { task, spans: None })));
                }
                (Some((_, launches)), _) => match self.kernels(d, &name, launches, &in_ports, &out_ports, &scratch)? {
                    Ok(imp) => imps.push((d.index, imp)),
                    Err(why) => refused.push((d.index, why.to_string())),
                },
            }
        }
        let runs = !imps.is_empty() || spare.is_some();
        if let Some(why) = refused.last().map(|(_, why)| why).or(absent.as_ref()).filter(|_| !runs) {
            return Err(Error::Task { task: name, why: why.clone() });
        }
        if !runs {
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
                    Imp::Members(_) => continue,
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
        node.refused = refused.into();
        if let Some(members) = spare {
            // The last of them, since it is the last that is tried.
            node.own.get_mut().imps.push((0, Imp::Members(members)));
            node.spare = DeviceSet::default().with(0);
        }
        Ok(node)
    }

    /// An implementation by kernels on this device, or why it is out of the question for this graph: lost, or full.
    fn kernels(
        &self,
        d: &Arc<DeviceHandle>,
        task: &str,
        launches: &[Launch],
        in_ports: &[InPort],
        out_ports: &[OutPort],
        scratch: &[(String, usize)],
    ) -> Result<Result<Imp, forebay_hal::Error>> {
        let wrong = |why: String| Error::Task { task: task.into(), why };
        let mut compiled = Vec::new();
        for l in launches {
            if l.args.len() > MAX_ARGS {
                return Err(wrong(format!("kernel {:?} has more than {MAX_ARGS} arguments", l.entry)));
            }
            let kernel = match d.device.compile(&l.source, &l.entry) {
                Ok(kernel) => kernel,
                Err(why) if !d.is_host() && self.is_passing(&why) => return Ok(Err(why)),
                Err(why) => return Err(wrong(why.to_string())),
            };
            let resolve = |a: &Arg| resolve_arg(a, in_ports, out_ports, scratch);
            let args = l.args.iter().map(resolve).collect::<Option<Box<[KArg]>>>();
            let args = args.ok_or_else(|| wrong(format!("arguments of {:?}", l.entry)))?;
            let written = |(i, a): (usize, &KArg)| match a {
                KArg::Out(_) | KArg::Scratch(_) => 1 << i,
                _ => 0,
            };
            let writes = args.iter().enumerate().map(written).sum::<u64>() & !l.read_only;
            compiled.push(KLaunch { kernel, args, geometry: l.geometry, member: l.member, writes });
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
        let mut scratch: Few<_> = match set() {
            Ok(one) => Few::from_iter([one]),
            Err(why) if !d.is_host() && self.is_passing(&why) => return Ok(Err(why)),
            Err(why) => return Err(why.into()),
        };
        let total = sizes.iter().fold(0usize, |sum, b| sum.saturating_add(*b));
        if d.device.kernels_beside() && (1..=MAX_APART).contains(&total) {
            // Without room for it, one does.
            scratch.extend(set().ok());
        }
        let (launches, recorded) = (compiled.into(), Recorded::default());
        Ok(Ok(Imp::Kernels { launches, scratch, next: 0, reads, writes, numbers, rooms, recorded }))
    }

    /// Whether a device fails for what is no fault of the task: it is lost, or others have filled it.
    fn is_passing(&self, why: &forebay_hal::Error) -> bool {
        if matches!(why, forebay_hal::Error::Lost { .. }) {
            self.0.dispatcher.look_for_lost(&self.0.devices);
            return true;
        }
        why.is_out_of_memory()
    }
}

/// What this program is: its functions take what they take until it is built anew.
fn program() -> Vec<u8> {
    let of = std::env::current_exe().ok().and_then(|p| Some((p.metadata().ok()?, p)));
    of.map_or_else(Vec::new, |(m, p)| format!("{} {} {:?}", p.display(), m.len(), m.modified().ok()).into_bytes())
}

fn resolve_arg(a: &Arg, inputs: &[InPort], outputs: &[OutPort], scratch: &[(String, usize)]) -> Option<KArg> {
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
