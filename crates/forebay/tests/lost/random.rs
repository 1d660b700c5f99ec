//! Random graphs on devices that vanish, or are filled by others, at random moments: what comes out is right or an error that says so, nothing stands
//! still, and what can go on does.

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::sim::{Model, SimDevice};
use forebay::hal::{Device, Source};
use forebay::place::Models;
use forebay::{Arg, Drain, Error, Feed, Graph, Kind, Launch, Mode, Running, Runtime, Task, Template};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::given_out::bytes;
use super::stand_in;

const N: usize = 64;
/// Of each device.
const MEMORY: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// Who can do a task.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Function,
    Cpu,
    Device,
    FunctionOrDevice,
    CpuOrDevice,
}

#[derive(Clone, Debug)]
struct Node {
    inputs: Vec<usize>,
    in_place: bool,
    by: By,
}

/// What happens: so many items are pushed and pulled, and then, or while they are on their way, a device vanishes; or it was
/// full all that time, or had no memory for some launches.
#[derive(Clone, Debug)]
struct Step {
    items: usize,
    lost: Option<(usize, bool)>,
    full: Option<usize>,
    /// Which device, behind how many launches, how many.
    refuses: Option<(usize, u64, u64)>,
}

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<Node>,
    steps: Vec<Step>,
    mode: Mode,
    fusion: bool,
    workers: usize,
    /// The launch at which a device faults, if it does.
    faults: [u64; 2],
}

fn cases() -> impl Strategy<Value = Case> {
    let by = prop::sample::select(vec![By::Function, By::Cpu, By::Device, By::FunctionOrDevice, By::CpuOrDevice]);
    let node = (proptest::collection::vec(any::<prop::sample::Index>(), 0..3), any::<bool>(), by);
    let nodes = proptest::collection::vec(node, 1..7).prop_map(|raw| {
        let made = raw.into_iter().enumerate().map(|(i, (inputs, in_place, by))| Node {
            inputs: inputs.into_iter().filter(|_| i > 0).map(|ix| ix.index(i)).collect(),
            in_place,
            by,
        });
        made.collect::<Vec<_>>()
    });
    let lost = proptest::option::weighted(0.3, (0usize..2, any::<bool>()));
    let full = proptest::option::weighted(0.2, 0usize..2);
    let step = (1usize..4, lost, full, proptest::option::weighted(0.2, (0usize..2, 0u64..4, 1u64..4)));
    let step = step.prop_map(|(items, lost, full, refuses)| Step { items, lost, full, refuses });
    let steps = proptest::collection::vec(step, 1..12);
    let faults = proptest::array::uniform2(prop_oneof![3 => Just(0u64), 1 => 1u64..20]);
    let mode = prop::sample::select(Mode::ALL.to_vec());
    (nodes, steps, mode, any::<bool>(), 1usize..4, faults)
        .prop_map(|(nodes, steps, mode, fusion, workers, faults)| Case { nodes, steps, mode, fusion, workers, faults })
}

fn mix(node: usize, values: impl Iterator<Item = u32>) -> u32 {
    values.fold(node as u32 + 1, |h, v| (h ^ v).wrapping_mul(0x9E37_79B1).rotate_left(11))
}

/// What every task without successors makes of the `i`-th number of an item.
fn reference(nodes: &[Node], item: u32, i: usize) -> Vec<u32> {
    let mut out: Vec<u32> = Vec::new();
    for (at, n) in nodes.iter().enumerate() {
        let fed = item.wrapping_add(i as u32);
        let of = |j: &usize| out[*j];
        let made = if n.inputs.is_empty() { mix(at, [fed].into_iter()) } else { mix(at, n.inputs.iter().map(of)) };
        out.push(made);
    }
    ends(nodes).map(|at| out[at]).collect()
}

fn ends(nodes: &[Node]) -> impl Iterator<Item = usize> {
    (0..nodes.len()).filter(|i| !nodes.iter().any(|n| n.inputs.contains(i)))
}

/// The same as text.
const MIX: &str = "#define STEP(h, v) h = (h ^ (v)) * 0x9E3779B1u; h = (h << 11) | (h >> 21)
KERNEL void new1(GLOBAL const uint *a, GLOBAL uint *o, uint h) {
  uint i = gid_x();
  if (i < 64) { STEP(h, a[i]); o[i] = h; }
}
KERNEL void new2(GLOBAL const uint *a, GLOBAL const uint *b, GLOBAL uint *o, uint h) {
  uint i = gid_x();
  if (i < 64) { STEP(h, a[i]); STEP(h, b[i]); o[i] = h; }
}
KERNEL void in1(GLOBAL uint *o, uint h) {
  uint i = gid_x();
  if (i < 64) { STEP(h, o[i]); o[i] = h; }
}
KERNEL void in2(GLOBAL const uint *b, GLOBAL uint *o, uint h) {
  uint i = gid_x();
  if (i < 64) { STEP(h, o[i]); STEP(h, b[i]); o[i] = h; }
}";

/// On a device of this kind, or elsewhere.
fn task(at: usize, n: &Node, device: Kind) -> Task {
    let (t, inputs, in_place) = (Template::array::<u32>([N]), n.inputs.len().max(1), n.in_place);
    let mut task = (0..inputs).fold(Task::new(format!("n{at}")), |task, p| task.input(&format!("i{p}"), t));
    task = if in_place { task.in_place("i0", "o") } else { task.output("o", t) };
    // In place the first input is where the output is.
    let first = usize::from(in_place);
    let ports = move || (first..inputs).map(|p| format!("i{p}")).chain(["o".to_owned()]).map(|p| Arg::port(&p));
    let kernel = move || {
        let source = Source::Cpu(Arc::new(move |s| {
            let read: Vec<&[u32]> = (first..inputs).map(|p| s.slice::<u32>(p - first)).collect();
            // SAFETY: each part writes its own elements only.
            let o = unsafe { s.slice_mut::<u32>(inputs - first) };
            s.for_each(|i, _, _| {
                let own = in_place.then_some(o[i]);
                o[i] = mix(at, own.into_iter().chain(read.iter().map(|r| r[i])));
            });
        }));
        [Launch::new(source, "mix", ports().collect::<Vec<_>>())]
    };
    let there = move || {
        if device != Kind::Cuda {
            return kernel();
        }
        let entry = format!("{}{inputs}", if in_place { "in" } else { "new" });
        let args = ports().chain([Arg::U32(at as u32 + 1)]).collect::<Vec<_>>();
        [Launch::new(Source::Portable(MIX.into()), &entry, args)]
    };
    let function = move |inv: &mut forebay::Invocation<'_>| {
        let read = (first..inputs).map(|p| inv.input::<u32>(p)).collect::<Result<Vec<_>, _>>()?;
        let o = inv.output::<u32>("o")?;
        for i in 0..N {
            let own = in_place.then_some(o[i]);
            o[i] = mix(at, own.into_iter().chain(read.iter().map(|r| r[i])));
        }
        Ok(())
    };
    match n.by {
        By::Function => task.host(function),
        By::Cpu => task.kernels(Kind::Cpu, kernel()),
        By::Device => task.kernels(device, there()),
        By::FunctionOrDevice => task.host(function).kernels(device, there()),
        By::CpuOrDevice => task.kernels(Kind::Cpu, kernel()).kernels(device, there()),
    }
}

struct Started {
    run: Running,
    feeds: Vec<Feed>,
    drains: Vec<Drain>,
}

fn start(rt: &Runtime, nodes: &[Node], device: Kind) -> Result<Started, Error> {
    let mut g = Graph::new("random");
    let ids: Vec<_> = nodes.iter().enumerate().map(|(at, n)| g.add(task(at, n, device)).unwrap()).collect();
    let mut feeds = Vec::new();
    for (n, &id) in nodes.iter().zip(&ids) {
        if n.inputs.is_empty() {
            feeds.push(g.feed((id, "i0"), 4).unwrap());
        }
        for (p, &j) in n.inputs.iter().enumerate() {
            g.connect((ids[j], "o"), (id, &format!("i{p}"))).unwrap();
        }
    }
    let drains = ends(nodes).map(|at| g.drain((ids[at], "o"), 4).unwrap()).collect();
    Ok(Started { run: rt.start(g)?, feeds, drains })
}

impl Started {
    /// Pushes items of these numbers, calls `then`, and looks at what comes out.
    fn items(&self, nodes: &[Node], numbers: std::ops::Range<u32>, then: impl FnOnce()) -> Result<(), Error> {
        for item in numbers.clone() {
            for feed in &self.feeds {
                let mut block = self.run.acquire(*feed)?;
                block.assign(&std::array::from_fn::<u32, N, _>(|i| item.wrapping_add(i as u32)))?;
                self.run.push_timeout(*feed, block, PATIENCE)?;
            }
        }
        then();
        for item in numbers {
            let blocks =
                self.drains.iter().map(|d| self.run.pull_timeout(*d, PATIENCE)).collect::<Result<Vec<_>, _>>()?;
            let made = blocks.iter().map(|b| b.as_slice::<u32>()).collect::<Result<Vec<_>, _>>()?;
            for i in 0..N {
                let got: Vec<u32> = made.iter().map(|m| m[i]).collect();
                assert_eq!(got, reference(nodes, item, i), "item {item}");
            }
        }
        Ok(())
    }

    fn begin_anew(&self) {
        self.run.reset().unwrap();
        self.run.run().unwrap();
    }
}

fn check(case: &Case) {
    let device = |i: usize| {
        let (name, fault_at) = (format!("sim{i}"), case.faults[i]);
        SimDevice::new(Model { name, fault_at, memory_bytes: MEMORY, strength: 1 << (18 + i), ..Model::default() })
    };
    let sims = [device(0), device(1)];
    let devices: Vec<Arc<dyn Device>> = sims.iter().map(|s| Arc::new(s.clone()) as Arc<dyn Device>).collect();
    let b = Runtime::builder().devices(devices).mode(case.mode).fusion(case.fusion).workers(case.workers);
    let rt = b.service(false).models(Arc::new(Models::off())).build().unwrap();
    let s = start(&rt, &case.nodes, Kind::Sim).unwrap();
    let lost = |e: &Error| assert!(e.to_string().contains("lost"), "{e}");
    let lost_or_full = |e: &Error| {
        let others = |n: &Node| n.by != By::Device && !n.in_place;
        let (full, said) = (!case.nodes.iter().all(others), e.to_string());
        assert!(said.contains("lost") || full && is_of_memory(e), "{e}");
    };
    let mut next = 0;
    for step in &case.steps {
        let numbers = next..next + step.items as u32;
        next = numbers.end;
        let vanishes = |when: bool| {
            if let Some((which, _)) = step.lost.filter(|(_, now)| *now == when) {
                sims[which].unplug();
            }
        };
        // What nobody uses is given up with the end of a graph.
        let others = step.full.and_then(|i| {
            drop(start(&rt, &[Node { inputs: Vec::new(), in_place: false, by: By::Function }], Kind::Sim).unwrap());
            sims[i].alloc((MEMORY - sims[i].allocated()) as usize).ok()
        });
        step.refuses.iter().for_each(|(i, after, n)| sims[*i].refuse(*after, *n));
        if let Err(e) = s.items(&case.nodes, numbers, || vanishes(true)) {
            lost_or_full(&e);
            s.begin_anew();
        }
        drop(others);
        sims.iter().for_each(|s| s.refuse(0, 0));
        vanishes(false);
    }
    // No more of them vanish; what can go on does, once what was under way has failed.
    if let Err(e) = s.items(&case.nodes, next..next + 3, || {}) {
        lost(&e);
        s.begin_anew();
    }
    let possible = || sims.iter().any(|s| s.alloc(1).is_ok()) || case.nodes.iter().all(|n| n.by != By::Device);
    // Each device that faults, or is found lost, may cost another try.
    let goes_on =
        |s: &Started| (0..4).any(|_| s.items(&case.nodes, 0..3, || {}).inspect_err(|_| s.begin_anew()).is_ok());
    assert!(goes_on(&s) || !possible(), "it does not go on");
    // So does a graph that begins now.
    drop(s);
    let begun = (0..4).any(|_| match start(&rt, &case.nodes, Kind::Sim) {
        Ok(now) => now.items(&case.nodes, 0..3, || {}).is_ok(),
        Err(e) => {
            lost(&e);
            false
        }
    });
    assert!(begun || !possible(), "another one does not begin");
    drop(rt);
    assert_eq!(sims.map(|s| s.allocated()), [0, 0]);
}

/// The same graphs on a CUDA device whose context a fault makes useless sooner or later. What comes back is the device, as a new
/// one where that happened.
fn check_faulting(case: &Case, device: Arc<dyn Device>) -> Arc<dyn Device> {
    let b = Runtime::builder().devices(vec![device.clone()]).mode(case.mode).fusion(case.fusion).workers(case.workers);
    let rt = b.service(false).models(Arc::new(Models::off())).build().unwrap();
    let lost = |e: &Error| assert!(e.to_string().contains("lost"), "{e}");
    let others = case.nodes.iter().all(|n| n.by != By::Device);
    let is_lost = || device.alloc(1).is_err();
    let mut next = 0;
    match start(&rt, &case.nodes, Kind::Cuda) {
        Ok(s) => {
            for step in &case.steps {
                let numbers = next..next + step.items as u32;
                next = numbers.end;
                if let Err(e) = s.items(&case.nodes, numbers, || {}) {
                    lost(&e);
                    assert!(is_lost(), "{e}");
                    s.begin_anew();
                }
            }
            // Once for what was under way when it happened, should it happen now.
            let goes_on =
                |s: &Started| (0..2).any(|_| s.items(&case.nodes, 0..3, || {}).inspect_err(|_| s.begin_anew()).is_ok());
            assert!(goes_on(&s) || !others && is_lost(), "it does not go on");
        }
        Err(e) => lost(&e),
    }
    let begun = start(&rt, &case.nodes, Kind::Cuda).inspect_err(lost).is_ok();
    assert!(begun || is_lost() && !others, "another one does not begin");
    drop(rt);
    until_free(|| device.allocated());
    if !is_lost() {
        return device;
    }
    // SAFETY: nobody else in this process uses the device.
    let renewed = unsafe { device.renew() }.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(bytes(), 0);
    renewed
}

/// `STAND_IN_FAULTS` says how many commands fault.
#[test]
fn graphs_on_a_device_that_faults() {
    if !stand_in::alone("random::graphs_on_a_device_that_faults") || std::env::var_os("STAND_IN_FAULTS").is_none() {
        return;
    }
    let device = forebay::hal::discover(&[Kind::Cuda]).0.remove(0);
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    let device = std::cell::RefCell::new(Some(device));
    runner
        .run(&cases(), |case| {
            let now = device.take();
            device.replace(now.map(|d| check_faulting(&case, d)));
            Ok(())
        })
        .unwrap();
}

#[test]
fn graphs_on_a_device_that_faults_with_the_stand_in() {
    for faults in ["20", "200"] {
        stand_in::again_with("random::graphs_on_a_device_that_faults", &[("STAND_IN_FAULTS", faults)]);
    }
}

fn is_of_memory(e: &Error) -> bool {
    ["out of memory", "no memory is left"].iter().any(|w| e.to_string().contains(w))
}

/// The same graphs where one call of CUDA's driver in some finds no memory.
fn check_scarce(case: &Case, device: &Arc<dyn Device>) {
    let b = Runtime::builder().devices(vec![device.clone()]).mode(case.mode).fusion(case.fusion).workers(case.workers);
    let rt = b.service(false).models(Arc::new(Models::off())).build().unwrap();
    let mut started = None;
    let mut next = 0;
    for step in &case.steps {
        if started.is_none() {
            started = match start(&rt, &case.nodes, Kind::Cuda) {
                Ok(s) => Some(s),
                Err(e) => {
                    assert!(is_of_memory(&e), "{e}");
                    continue;
                }
            };
        }
        let Some(s) = &started else { continue };
        let numbers = next..next + step.items as u32;
        next = numbers.end;
        if let Err(e) = s.items(&case.nodes, numbers, || {}) {
            assert!(is_of_memory(&e), "{e}");
            if step.lost.is_some() { started = None } else { s.begin_anew() }
        }
    }
    drop((started, rt));
    until_free(|| device.allocated() + bytes());
}

/// A thread may be about to give the last of it back.
fn until_free(left: impl Fn() -> u64) {
    let begun = std::time::Instant::now();
    while left() > 0 {
        assert!(begun.elapsed() < PATIENCE, "{} B are left", left());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// `STAND_IN_SCARCE` says how many.
#[test]
fn graphs_where_memory_is_scarce() {
    if !stand_in::alone("random::graphs_where_memory_is_scarce") || std::env::var_os("STAND_IN_SCARCE").is_none() {
        return;
    }
    if std::env::var_os("FOREBAY_TEST_MAPPED").is_some() {
        forebay::hal::cuda::use_rm(Arc::new(forebay_rm::fake::FakeRm::default()));
    }
    let device = forebay::hal::discover(&[Kind::Cuda]).0.remove(0);
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    runner
        .run(&cases(), |case| {
            check_scarce(&case, &device);
            Ok(())
        })
        .unwrap();
}

#[test]
fn graphs_where_memory_is_scarce_with_the_stand_in() {
    for scarce in ["20", "200"] {
        stand_in::again_with("random::graphs_where_memory_is_scarce", &[("STAND_IN_SCARCE", scarce)]);
    }
    let mapped = [("STAND_IN_SCARCE", "100"), ("FOREBAY_TEST_MAPPED", "1")];
    stand_in::again_with("random::graphs_where_memory_is_scarce", &mapped);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_can_go_on_does(case in cases()) {
        check(&case);
    }
}
