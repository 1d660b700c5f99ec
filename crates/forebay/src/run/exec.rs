//! What a worker does with a task that it owns: look whether it can run, run it, pass its outputs on.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_hal::cpu::{Job, Worker, run_kernel};
use forebay_hal::{Arg as HalArg, Buffer, Geometry, Listed, Result as HalResult};
use smallvec::SmallVec;

use super::elsewhere::elsewhere;
use super::node::{Chan, Core, EndRef, Imp, InKind, KArg, KLaunch, Link, Node, Out, Own};
use crate::block::{Datablock, Signals};
use crate::error::{Error, TaskError};
use crate::graph::{Invocation, Predicate, Work};
use crate::resident::Span;
use crate::template::Elem;

/// Most arguments of a kernel (the CUDA backend's limit too).
pub(crate) const MAX_ARGS: usize = 48;

/// The job that looks at `node`.
pub(crate) fn job(node: &Node) -> Job {
    Job { run: run_node, data: std::ptr::from_ref(node).cast(), cost_ns: node.stats.cost_ns.load(Ordering::Relaxed) }
}

/// # Safety
/// `data` is a node that the caller of this job owns.
unsafe fn run_node(data: *const (), worker: &Worker) {
    // SAFETY: owned nodes stay alive (life.rs, `quiesce`).
    let node = unsafe { &*data.cast::<Node>() };
    own(node, worker);
}

/// Runs an owned task until there is nothing to do, then lets it go, or passes ownership on.
pub(crate) fn own(node: &Node, worker: &Worker) {
    let core = node.core();
    let _counted = core.runtime.gate.as_ref().and_then(|gate| {
        let cost = node.stats.cost_ns.load(Ordering::Relaxed);
        gate.begin(&core.runtime.pool, cost, || core.stopping())
    });
    if node.managed { _ = stand_in_line(node, worker, false) } else { look_after(core, node, worker) }
}

/// As [`own`], for a managed task, by whatever thread: all that comes of it is that it stands in line, if it can run. True
/// when it is its turn already and the caller, who `may_run_it`, is to do so ([`super::dispatch::run_here`]).
#[inline(never)]
pub(crate) fn stand_in_line(node: &Node, worker: &Worker, may_run_it: bool) -> bool {
    let core = node.core();
    let mut seen = node.notify.seen();
    loop {
        if !core.stopping() {
            // SAFETY: this thread owns the node (notify.rs).
            let own = unsafe { &mut *node.own.get() };
            if (!own.holding || deliver(core, node, own, worker)) && ready(core, node, own) {
                node.stats.state.store(1, Ordering::Relaxed);
                return core.runtime.dispatcher.enqueue(core, node, worker, may_run_it);
            }
        }
        match node.notify.release(seen) {
            Ok(()) => return false,
            Err(now) => seen = now,
        }
    }
}

/// As [`own`], for a task that runs where it becomes ready.
fn look_after(core: &Core, node: &Node, worker: &Worker) {
    let mut seen = node.notify.seen();
    let mut ran = false;
    loop {
        if !core.stopping() {
            // SAFETY: this thread owns the node (notify.rs).
            let own = unsafe { &mut *node.own.get() };
            if let Some(link) = &node.link
                && !own.holding
                && !node.stats.wants_cost()
                && core.trace.is_none()
            {
                if run_link(core, node, own, link, worker) {
                    // SAFETY: the node stays owned until that job runs.
                    unsafe { worker.submit_back(job(node)) };
                    return;
                }
                match node.notify.release(seen) {
                    Ok(()) => return,
                    Err(now) => seen = now,
                }
                continue;
            }
            if (!own.holding || deliver(core, node, own, worker)) && ready(core, node, own) {
                // What came just when the task was let go of: others wait, too.
                let had_its_turn = ran && node.stats.is_long();
                if !had_its_turn {
                    run(core, node, own, 0, worker);
                    ran = true;
                }
                if had_its_turn || !core.stopping() && !own.holding && ready(core, node, own) {
                    // The next invocation queues behind what this one made ready, and others may take it.
                    // SAFETY: the node stays owned until that job runs.
                    unsafe { worker.submit_in_turn(job(node), &node.turn) };
                    return;
                }
            }
        }
        match node.notify.release(seen) {
            Ok(()) => return,
            Err(now) => seen = now,
        }
    }
}

/// The shortest way, for what most tasks are: one input, at most one channel out, a function on the host. Runs one
/// invocation if there is a block; true when there is another one behind it.
///
/// The same as `ready`, `invoke_simple` and `deliver` in one piece: about half the instructions, which is what a hop
/// through a small task consists of.
#[inline]
fn run_link(core: &Core, node: &Node, own: &mut Own, link: &Link, worker: &Worker) -> bool {
    let from = &core.channels[link.from as usize];
    let Some(p) = from.ring.pop() else { return false };
    wake_producer(core, node, from, worker);
    // SAFETY: the ring holds handles given by `into_raw`.
    let block = unsafe { Datablock::from_raw(p) };
    let signals = block.signals().of_stream();
    let Some((_, Imp::Host(work))) = own.imps.first_mut() else { return false };
    let mut input = Some(block);
    let mut output = None;
    let mut finished = false;
    let result = (|| {
        if let Some(o) = node.outputs.first() {
            let taken = if o.from_input.is_some() { input.take() } else { None };
            let keep = taken.is_some();
            let b = sole(o, taken)?;
            if b.signals() != signals {
                b.set_signals(signals);
            }
            b.write_host(keep)?;
            output = Some(b);
        }
        worker.now();
        let outputs = if node.outputs.is_empty() { &[][..] } else { std::slice::from_ref(&output) };
        call(core, node, work, std::slice::from_ref(&input), outputs, None, 0, &mut finished)
    })();
    drop(input);
    node.stats.count();
    if let Err(why) = result {
        fail(core, node, 0, why);
        return false;
    }
    if let Some(block) = output {
        match link.to.map(|c| &core.channels[c as usize]) {
            Some(to) if to.predicate == Predicate::Always && to.ring.has_room() => {
                if let Err(p) = to.ring.push(block.into_raw()) {
                    // Cannot happen: there was room and this thread is the only producer.
                    // SAFETY: the ring gave the handle back.
                    drop(unsafe { Datablock::from_raw(p) });
                }
                wake_consumer(core, node, to, worker);
            }
            _ => {
                own.outs[0] = Some(block);
                if !deliver(core, node, own, worker) {
                    return false;
                }
            }
        }
    }
    !core.stopping() && !from.ring.is_empty()
}

/// Whether every input is occupied; if not, the task is marked as waiting for one that is not.
#[inline]
fn ready(core: &Core, node: &Node, own: &Own) -> bool {
    if own.finished {
        return false;
    }
    let filled = |c: u32| {
        let ring = &core.channels[c as usize].ring;
        !(if node.watches { ring.awaits_entry() } else { ring.is_empty() })
    };
    // From the last to the first: blocks tend to arrive in the order of declaration, so the last is worth waiting for.
    if node.plain {
        return node.inputs.iter().rev().all(|i| filled(i.channel));
    }
    let start = own.at_start();
    node.inputs.iter().enumerate().rev().all(|(at, i)| match i.kind {
        InKind::Plain { initializer: Some(init) } if start => filled(node.inputs[init as usize].channel),
        InKind::Plain { .. } => filled(i.channel),
        InKind::Sticky => own.ins[at].is_some() || filled(i.channel),
        InKind::Meta { iterations: true, .. } => !start || filled(i.channel),
        InKind::Meta { .. } => filled(i.channel),
        InKind::Initializer => true,
    })
}

/// Tells a channel's consumer that there is a block; true when the caller has become the owner of that node.
#[inline]
pub(crate) fn wakes_consumer(c: &Chan, consumer: &Node) -> bool {
    (!consumer.watches || c.ring.take_empty()) && consumer.notify.notify()
}

/// Tells a channel's producer that there is room; true when the caller has become the owner of that node.
#[inline]
pub(crate) fn wakes_producer(c: &Chan, producer: &Node) -> bool {
    c.ring.take_no_room() && producer.notify.notify()
}

/// Tells the program at a channel's other end. Behind a function another may come at once, before which nothing is put off.
#[inline]
fn wake_program(node: &Node, c: &Chan, worker: &Worker) {
    match &c.host {
        Some(end) if node.only_kernels => end.wake_soon(worker),
        end => end.iter().for_each(|end| end.wake()),
    }
}

/// `node` tells a channel's producer, task or program, that there is room.
#[inline]
fn wake_producer(core: &Core, node: &Node, c: &Chan, worker: &Worker) {
    match c.from {
        EndRef::Node(n) => {
            let producer = &core.nodes[n as usize];
            if wakes_producer(c, producer) {
                // SAFETY: this thread has just become the owner and hands the node to the job.
                unsafe { worker.submit_in_turn(job(producer), &producer.turn) };
            }
        }
        EndRef::Host => wake_program(node, c, worker),
    }
}

/// `node` tells a channel's consumer, task or program, that there is a block.
#[inline(always)]
fn wake_consumer(core: &Core, node: &Node, c: &Chan, worker: &Worker) {
    match c.to {
        EndRef::Node(n) => {
            let consumer = &core.nodes[n as usize];
            if wakes_consumer(c, consumer) {
                // SAFETY: as in `wake_producer`.
                unsafe { worker.submit(job(consumer)) };
            }
        }
        EndRef::Host => wake_program(node, c, worker),
    }
}

#[inline]
fn pop(core: &Core, node: &Node, channel: u32, worker: &Worker) -> Option<Datablock> {
    let c = &core.channels[channel as usize];
    let p = c.ring.pop()?;
    wake_producer(core, node, c, worker);
    // SAFETY: the ring holds handles given by `into_raw`.
    Some(unsafe { Datablock::from_raw(p) })
}

/// Passes finished outputs on if every channel has room; otherwise the task stays Completed.
fn deliver(core: &Core, node: &Node, own: &mut Own, worker: &Worker) -> bool {
    let room = |c: &u32| !core.channels[*c as usize].ring.awaits_room();
    let outputs = node.outputs.as_slice();
    if !outputs.iter().all(|o| o.channels.iter().all(room)) {
        own.holding = true;
        node.stats.state.store(3, Ordering::Relaxed);
        return false;
    }
    for (o, slot) in outputs.iter().zip(own.outs.as_mut_slice()) {
        let Some(block) = slot.take() else { continue };
        let signals = block.signals();
        let mut block = Some(block);
        for (i, &c) in o.channels.iter().enumerate() {
            let c = &core.channels[c as usize];
            // SAFETY: the channel's producer is this node, which this thread owns.
            let latched = unsafe { &mut *c.latched.get() };
            if !c.predicate.passes(signals, latched) {
                continue;
            }
            let last = i + 1 == o.channels.len();
            let Some(b) = (if last { block.take() } else { block.clone() }) else { continue };
            if let Err(p) = c.ring.push(b.into_raw()) {
                // Cannot happen: there was room and this thread is the only producer. Never lose memory over it.
                // SAFETY: the ring gave the handle back.
                drop(unsafe { Datablock::from_raw(p) });
                continue;
            }
            wake_consumer(core, node, c, worker);
        }
    }
    own.holding = false;
    node.stats.state.store(0, Ordering::Relaxed);
    true
}

/// Runs one invocation of a ready task on device `device` and passes its outputs on; a failure ends the graph.
pub(crate) fn run(core: &Core, node: &Node, own: &mut Own, device: usize, worker: &Worker) {
    node.stats.state.store(2, Ordering::Relaxed);
    let d = &core.runtime.devices[device];
    let _long = if d.is_host() {
        let cost = node.stats.cost_ns.load(Ordering::Relaxed);
        core.runtime.gate.as_ref().and_then(|gate| gate.does(cost))
    } else {
        d.await_credit(|| core.stopping());
        None
    };
    let timed = core.trace.is_some() || node.stats.wants_cost() || own.adapt.is_some();
    let begun = timed.then(|| core.runtime.now_ns());
    let busy = own.adapt.as_ref().and_then(|a| a.busy(device));
    let result = invoke(core, node, own, device, worker);
    // Where it was done in the end.
    let (asked, device) = (device, if node.managed { own.device } else { device });
    let d = &core.runtime.devices[device];
    let result = result.and_then(|()| {
        if d.is_host() {
            return Ok(());
        }
        let host = |c: &u32| matches!(core.channels[*c as usize].to, EndRef::Host);
        let made = node.outputs.iter().zip(&own.outs).filter_map(|(o, b)| Some((o, b.as_ref()?)));
        made.map(|(o, b)| b.send_home(d, o.channels.iter().all(host))).try_for_each(|sent| Ok(sent?))
    });
    let result = match result {
        Ok(()) if asked == device => learn(core, node, own, device, begun),
        // Something else did it than was asked: that says nothing.
        other => other,
    };
    drop(busy);
    if let Some(begun) = begun {
        let end = core.runtime.now_ns();
        node.stats.cost(end - begun);
        if let Some(t) = &core.trace {
            t.record(node.index, device, worker.index, begun, end);
        }
    }
    node.stats.count();
    if let Some(d) = node.by_device.get(device).filter(|_| node.managed) {
        d.store(d.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
    match result {
        Ok(()) => {
            deliver(core, node, own, worker);
        }
        Err(why) => {
            own.outs.iter_mut().for_each(|b| *b = None);
            core.runtime.dispatcher.look_for_lost(&core.runtime.devices);
            fail(core, node, device, why);
        }
    }
}

/// Tells adaptive placement what the invocation took.
fn learn(core: &Core, node: &Node, own: &mut Own, device: usize, begun: Option<u64>) -> Result<(), TaskError> {
    let (Some(begun), true) = (begun, own.adapt.is_some()) else { return Ok(()) };
    let d = &core.runtime.devices[device];
    let begun = if d.is_host() {
        begun
    } else {
        d.finish()?;
        // Until then the device did what was before it.
        begun.max(d.done_ns.load(Ordering::Relaxed))
    };
    let end = core.runtime.now_ns();
    d.done_ns.fetch_max(end, Ordering::Relaxed);
    if let Some(a) = &mut own.adapt {
        a.took(device, end.saturating_sub(begun), &|d| core.runtime.account(d));
        node.moves.store(a.moves(), Ordering::Relaxed);
        let (n, error) = a.accuracy();
        node.accuracy[0].store(n, Ordering::Relaxed);
        node.accuracy[1].store((error * 1e6) as u64, Ordering::Relaxed);
        let (predicted, took) = a.last();
        node.predicted[0].store(predicted as u64, Ordering::Relaxed);
        node.predicted[1].store(took, Ordering::Relaxed);
    }
    Ok(())
}

/// Ends the graph because a task failed.
#[cold]
fn fail(core: &Core, node: &Node, device: usize, why: TaskError) {
    let device = core.runtime.devices.get(device).map_or("?", |d| &d.device.info().name).to_owned();
    let task = node.region.as_deref().unwrap_or(&node.name).to_owned();
    core.fail(Error::Failed { task, device, why: Arc::new(why) });
}

/// The common case, straight through: plain inputs, no groups, a function on the host.
#[inline]
fn invoke_simple(core: &Core, node: &Node, own: &mut Own, worker: &Worker) -> Result<(), TaskError> {
    let (inputs, ins) = (node.inputs.as_slice(), own.ins.as_mut_slice());
    let (outputs, outs) = (node.outputs.as_slice(), own.outs.as_mut_slice());
    let mut signals = Signals::NONE;
    for (i, slot) in inputs.iter().zip(ins.iter_mut()) {
        let Some(block) = pop(core, node, i.channel, worker) else { return Err("an input is empty".into()) };
        signals = signals | block.signals().of_stream();
        *slot = Some(block);
    }
    for (o, slot) in outputs.iter().zip(outs.iter_mut()) {
        let taken = o.from_input.and_then(|i| ins[i as usize].take());
        let keep = taken.is_some();
        let block = sole(o, taken)?;
        if block.signals() != signals {
            block.set_signals(signals);
        }
        block.write_host(keep)?;
        *slot = Some(block);
    }
    let Some((_, Imp::Host(work))) = own.imps.first_mut() else { return Err("no function".into()) };
    worker.now();
    let result = call(core, node, work, ins, outs, None, 0, &mut own.finished);
    ins.iter_mut().for_each(|b| *b = None);
    result
}

/// A block for an output: what came in if nobody else holds it and it has the port's room, else a copy; or a fresh one.
#[inline(always)]
pub(super) fn sole(o: &Out, taken: Option<Datablock>) -> Result<Datablock, TaskError> {
    match taken {
        Some(b) if b.is_unique() && b.inner().has_room(o.room) => Ok(b),
        Some(shared) => {
            let copy = o.pool.acquire();
            shared.copy_to(&copy)?;
            Ok(copy)
        }
        None => Ok(o.pool.acquire()),
    }
}

/// Calls a task's function; a panic becomes its error.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the parts of one invocation, borrowed separately")]
fn call(
    core: &Core,
    node: &Node,
    work: &mut Work,
    inputs: &[Option<Datablock>],
    outputs: &[Option<Datablock>],
    geometry: Option<Geometry>,
    iteration: u64,
    finished: &mut bool,
) -> Result<(), TaskError> {
    let mut inv =
        Invocation { node, inputs, outputs, taken: 0, geometry, iteration, finish: false, pool: &core.runtime.pool };
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| work(&mut inv)));
    *finished |= inv.finish && inputs.is_empty() && matches!(result, Ok(Ok(())));
    result.unwrap_or_else(|why| Err(format!("panicked: {}", panic_text(&*why)).into()))
}

fn invoke(core: &Core, node: &Node, own: &mut Own, device: usize, worker: &Worker) -> Result<(), TaskError> {
    if node.simple {
        return invoke_simple(core, node, own, worker);
    }
    let start = own.at_start();
    let mut signals = Signals::NONE;
    let mut geometry = None;
    for (at, i) in node.inputs.iter().enumerate() {
        let block = match i.kind {
            InKind::Plain { initializer: Some(init) } if start => {
                pop(core, node, node.inputs[init as usize].channel, worker)
            }
            InKind::Plain { .. } => pop(core, node, i.channel, worker),
            InKind::Sticky => pop(core, node, i.channel, worker).or_else(|| own.ins[at].take()),
            InKind::Meta { iterations: true, .. } if !start => own.ins[at].take(),
            InKind::Meta { .. } => pop(core, node, i.channel, worker),
            InKind::Initializer => continue,
        };
        let Some(block) = block else { return Err(format!("input {} is empty", node.input_names[at]).into()) };
        if i.kind != InKind::Sticky {
            signals = signals | block.signals().of_stream();
        }
        if let InKind::Meta { geometry: g, iterations, .. } = i.kind {
            if g {
                let n = block.as_slice::<u64>()?;
                let n: Vec<usize> = n.iter().map(|&v| usize::try_from(v).unwrap_or(usize::MAX)).collect();
                geometry = Some(Geometry::new(n[0].max(1), n[1].max(1), n[2].max(1)));
            }
            if iterations && start {
                own.group = block.as_slice::<u64>()?[0];
                if own.group == 0 {
                    return Err(format!("{} asks for 0 iterations", node.input_names[at]).into());
                }
            }
        }
        own.ins[at] = Some(block);
    }
    if own.group != 0 {
        if own.iteration == 0 {
            signals = signals | Signals::BEGIN_ITERATION;
        }
        if own.iteration + 1 == own.group {
            signals = signals | Signals::END_ITERATION;
        }
    }
    for (at, o) in node.outputs.iter().enumerate() {
        own.outs[at] = Some(sole(o, o.from_input.and_then(|i| own.ins[i as usize].take()))?);
    }
    announce(node, own, signals)?;
    let geometry = geometry.unwrap_or_else(|| node.geometry_now());
    let iteration = own.iteration;
    if !node.only_kernels {
        // A function may wait for the program, and a driver for anything.
        worker.now();
    }
    let mut result = dispatch(core, node, own, device, geometry, iteration);
    while let Err(why) = &result
        && let Some(other) = elsewhere(core, node, own, why)
    {
        own.device = other;
        // What the one that failed has said of its outputs goes for nothing.
        let made = own.outs.iter().zip(&node.outputs).filter(|(_, o)| o.from_input.is_none());
        made.filter_map(|(b, _)| b.as_ref()).for_each(Datablock::unmark);
        result = announce(node, own, signals).and_then(|()| dispatch(core, node, own, other, geometry, iteration));
    }
    for (slot, i) in own.ins.iter_mut().zip(&node.inputs) {
        if !matches!(i.kind, InKind::Sticky | InKind::Meta { iterations: true, .. }) {
            *slot = None;
        }
    }
    own.started = true;
    if own.group != 0 {
        own.iteration += 1;
        if own.iteration >= own.group {
            own.iteration = 0;
        }
    }
    result
}

/// Gives the outputs the invocation's marks, and the sizes that Meta ports say.
fn announce(node: &Node, own: &Own, signals: Signals) -> Result<(), TaskError> {
    for block in own.outs.iter().flatten().filter(|b| b.signals() != signals) {
        block.set_signals(signals);
    }
    for (i, block) in node.inputs.iter().zip(&own.ins) {
        if let (InKind::Meta { size_of: Some(o), .. }, Some(block)) = (i.kind, block)
            && let Some(Some(out)) = own.outs.get(o as usize)
        {
            out.set_records(usize::try_from(block.as_slice::<u64>()?[0]).unwrap_or(usize::MAX))?;
        }
    }
    Ok(())
}

pub(super) fn dispatch(
    core: &Core,
    node: &Node,
    own: &mut Own,
    device: usize,
    geometry: Geometry,
    iteration: u64,
) -> Result<(), TaskError> {
    let Own { imps, ins, outs, in_buffers, out_buffers, finished, touched, .. } = own;
    let Some((_, imp)) = imps.iter_mut().find(|(d, _)| *d == device) else {
        return Err(format!("no implementation for device {device}").into());
    };
    // Kernels say more.
    *touched = !matches!(imp, Imp::Kernels { .. });
    match imp {
        Imp::Host(work) => {
            for (o, b) in node.outputs.iter().zip(outs.iter()) {
                if let Some(b) = b {
                    b.write_host(o.from_input.is_some())?;
                }
            }
            call(core, node, work, ins, outs, Some(geometry), iteration, finished)
        }
        Imp::Members(members) => members.run(core, ins, outs),
        Imp::Resident { task, spans } => {
            let d = &core.runtime.devices[device];
            let at = |b: &Buffer| b.address().ok_or("memory without an address");
            let mut places: SmallVec<[Span; 8]> = SmallVec::new();
            for b in ins.iter() {
                places.push(match b {
                    Some(b) => Span { data: at(&b.read_on(d)?)?, bytes: b.bytes() as u64 },
                    None => Span::NONE,
                });
            }
            for (o, b) in node.outputs.iter().zip(outs.iter()) {
                places.push(match b {
                    Some(b) => {
                        Span { data: at(&b.write_on(d, o.from_input.is_some())?)?, bytes: b.template().bytes() as u64 }
                    }
                    None => Span::NONE,
                });
            }
            let places: &[u8] = bytemuck::cast_slice(places.as_slice());
            if spans.is_none() {
                *spans = Some(d.device.alloc_mapped(places.len())?);
            }
            let Some(there) = spans else { return Err("no memory for spans".into()) };
            let mut issue = d.lock();
            // SAFETY: the spans are this task's, and nothing on the device reads them: `Resident::run` comes back when the
            // grid has completed what it was given, or has ended with all that ran on it. Nobody else can end the grid
            // before: the task holds it. No other command of the queue uses that memory.
            unsafe { issue.queue.post(there, 0, places.as_ptr(), places.len())? };
            // The grid does not wait for the queue, so what is copied there comes first.
            let fence = issue.fence_now()?;
            let before = issue.queue.completion(fence)?;
            drop(issue);
            before.map_or(Ok(()), |c| c.wait())?;
            let there = at(there)?;
            d.timed(|| task.run(there, geometry.items.iter().product()))?;
            d.invocations.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Imp::Kernels { launches, scratch, next, reads, writes, numbers, rooms, recorded } => {
            let d = &core.runtime.devices[device];
            for (i, room) in rooms.iter() {
                if let Some(b) = ins[*i].as_ref().filter(|b| !b.inner().has_room(room.elements())) {
                    let roomy = Datablock::zeroed(*room)?.with_signals(b.signals());
                    b.copy_to(&roomy)?;
                    ins[*i] = Some(roomy);
                }
            }
            if *numbers != 0 {
                // Before the queue is locked: a number that a device made is fetched by way of that.
                let given = ins.iter().enumerate().filter(|(i, _)| *numbers & 1 << i != 0);
                given.filter_map(|(_, b)| b.as_ref()).try_for_each(|b| b.host_bytes().map(drop))?;
            }
            let scratch = &scratch[*next % scratch.len()];
            *next = next.wrapping_add(1);
            for (i, b) in ins.iter().enumerate() {
                in_buffers[i] = match b {
                    Some(b) if *reads & 1 << i != 0 => Some(b.read_on(d)?),
                    _ => None,
                };
            }
            for (o, b) in outs.iter().enumerate() {
                out_buffers[o] = match b {
                    Some(b) if *writes & 1 << o != 0 => Some(b.write_on(d, node.outputs[o].from_input.is_some())?),
                    _ => None,
                };
            }
            let resolve = |a: &KArg, g: &Geometry| -> Result<HalArg<'_>, TaskError> {
                let gone = || -> TaskError { "a port of the kernel has no datablock".into() };
                Ok(match *a {
                    KArg::In(i) => HalArg::Buffer(in_buffers[i as usize].as_ref().ok_or_else(gone)?),
                    KArg::Out(o) => HalArg::Buffer(out_buffers[o as usize].as_ref().ok_or_else(gone)?),
                    KArg::Scratch(s) => HalArg::Buffer(&scratch[s as usize]),
                    KArg::Meta(i, elem) => meta_arg(ins[i as usize].as_ref().ok_or_else(gone)?, elem)?,
                    KArg::RecordsIn(i) => HalArg::U32(ins[i as usize].as_ref().ok_or_else(gone)?.records() as u32),
                    KArg::RecordsOut(o) => HalArg::U32(outs[o as usize].as_ref().ok_or_else(gone)?.records() as u32),
                    KArg::Items(n) => HalArg::U32(g.items[n] as u32),
                    KArg::U32(v) => HalArg::U32(v),
                    KArg::I32(v) => HalArg::I32(v),
                    KArg::F32(v) => HalArg::F32(v),
                })
            };
            let space = |l: &KLaunch| {
                let of_member = |m: u32| core.nodes[m as usize].geometry_now();
                l.geometry.or_else(|| l.member.map(of_member)).unwrap_or(geometry)
            };
            let one = |l: &KLaunch, launch: &mut dyn FnMut(&Geometry, &[HalArg<'_>]) -> HalResult<()>| {
                let g = space(l);
                let mut args = [HalArg::U32(0); MAX_ARGS];
                for (to, a) in args.iter_mut().zip(&l.args) {
                    *to = resolve(a, &g)?;
                }
                Ok::<(), TaskError>(launch(&g, &args[..l.args.len()])?)
            };
            let host = d.is_host();
            let mut issue = if host { None } else { Some(d.issue()) };
            match (&mut issue, launches.as_ref()) {
                (None, all) => {
                    *touched = true;
                    for l in all {
                        one(l, &mut |g, args| run_kernel(&core.runtime.pool, &l.kernel, g, args))?;
                    }
                }
                (Some(q), [l]) => {
                    // What is refused was not begun.
                    one(l, &mut |g, args| q.queue().launch(&l.kernel, g, args))?;
                    *touched = true;
                }
                (Some(q), all) => {
                    // Three allocations for a whole list, on the way to a driver that makes more. Each space is read
                    // once: `set_geometry` may change it meanwhile, and arguments say how large it is.
                    let spaces: Vec<Geometry> = all.iter().map(space).collect();
                    let mut args = Vec::with_capacity(all.iter().map(|l| l.args.len()).sum());
                    for (l, g) in all.iter().zip(&spaces) {
                        for a in &l.args {
                            args.push(resolve(a, g)?);
                        }
                    }
                    let mut rest = args.as_slice();
                    let mut list: Vec<Listed<'_>> = Vec::with_capacity(all.len());
                    for (l, &geometry) in all.iter().zip(&spaces) {
                        let (mine, others) = rest.split_at(l.args.len());
                        rest = others;
                        list.push(Listed { kernel: &l.kernel, geometry, args: mine, writes: l.writes });
                    }
                    *touched = true;
                    q.queue().launch_list(&list, recorded)?;
                }
            }
            match issue {
                Some(issue) => d.invocation_issued(issue)?,
                None => drop(d.invocations.fetch_add(1, Ordering::Relaxed)),
            }
            in_buffers.iter_mut().for_each(|b| *b = None);
            out_buffers.iter_mut().for_each(|b| *b = None);
            Ok(())
        }
    }
}

/// A Meta port's number as a kernel argument of its own type.
fn meta_arg(b: &Datablock, elem: Elem) -> Result<HalArg<'static>, TaskError> {
    Ok(match elem {
        Elem::U32 => HalArg::U32(b.as_slice::<u32>()?[0]),
        Elem::I32 => HalArg::I32(b.as_slice::<i32>()?[0]),
        Elem::F32 => HalArg::F32(b.as_slice::<f32>()?[0]),
        Elem::U64 => HalArg::U64(b.as_slice::<u64>()?[0]),
        other => return Err(format!("a meta port of {} cannot be a kernel argument", other.name()).into()),
    })
}

pub(crate) fn panic_text(why: &(dyn std::any::Any + Send)) -> String {
    why.downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| why.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
