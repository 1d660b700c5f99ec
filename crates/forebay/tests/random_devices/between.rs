//! Blocks that go from graph to graph, of one runtime and of others with other devices, while the program keeps some of them, reads
//! and overwrites them; and graphs and runtimes that end meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use forebay::hal::Device;
use forebay::place::Models;
use forebay::{Arg, Datablock, Drain, Feed, Geometry, Graph, Kind, Launch, Mode, Running, Runtime, Source, Task};
use forebay::{TaskId, Template};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::{By, MIXED, OnDrop, PATIENCE, all, anybody, mixed, pull};

const SIZES: [usize; 3] = [1, 1500, 40_000];
/// Blocks that the program has at a time.
const HELD: usize = 4;
/// Items in a graph that were not pulled yet.
const ON_THEIR_WAY: usize = 3;

#[derive(Clone, Debug)]
struct Host {
    /// Which of the devices, as bits.
    devices: u8,
    mode: Mode,
    fusion: bool,
    workers: usize,
}

/// A chain of tasks, each of which has one input, and one more if it is to have.
#[derive(Clone, Debug)]
struct Chain {
    runtime: Index,
    tasks: Vec<Link>,
}

#[derive(Clone, Debug)]
struct Link {
    by: By,
    in_place: bool,
    /// It takes a block from the program as well.
    second: bool,
}

/// What the program does with the blocks that it has, by the numbers of their places.
#[derive(Clone, Debug)]
enum Step {
    New(usize, u32),
    /// The graph's own block.
    Filled(usize, Index, u32),
    Overwrite(usize, u32),
    Copy(usize, usize),
    Read(usize),
    /// On another thread, at any time from now on.
    ReadBeside(usize),
    Wait(usize),
    Drop(usize),
    /// Into this graph, and whether the program keeps them, too.
    Push(Index, usize, bool),
    Pull(Index, usize),
    EndGraph(Index),
    EndRuntime(Index),
}

#[derive(Clone, Debug)]
struct Case {
    elements: usize,
    runtimes: Vec<Host>,
    graphs: Vec<Chain>,
    steps: Vec<Step>,
}

fn cases() -> impl Strategy<Value = Case> {
    let modes = prop::sample::select(Mode::ALL.to_vec());
    let host = (0u8..4, modes, any::<bool>(), 1usize..3);
    let host = host.prop_map(|(devices, mode, fusion, workers)| Host { devices, mode, fusion, workers });
    let link = (anybody(), any::<bool>(), prop::bool::weighted(0.3));
    let link = link.prop_map(|(by, in_place, second)| Link { by, in_place, second });
    let chain = (any::<Index>(), proptest::collection::vec(link, 1..4));
    let chain = chain.prop_map(|(runtime, tasks)| Chain { runtime, tasks });
    let (at, graph) = (0..HELD, any::<Index>());
    let step = prop_oneof![
        3 => (at.clone(), any::<u32>()).prop_map(|(at, v)| Step::New(at, v)),
        2 => (at.clone(), graph.clone(), any::<u32>()).prop_map(|(at, g, v)| Step::Filled(at, g, v)),
        3 => (at.clone(), any::<u32>()).prop_map(|(at, v)| Step::Overwrite(at, v)),
        2 => (at.clone(), at.clone()).prop_map(|(from, to)| Step::Copy(from, to)),
        2 => at.clone().prop_map(Step::Read),
        1 => at.clone().prop_map(Step::ReadBeside),
        1 => at.clone().prop_map(Step::Wait),
        1 => at.clone().prop_map(Step::Drop),
        12 => (graph.clone(), at.clone(), any::<bool>()).prop_map(|(g, at, keep)| Step::Push(g, at, keep)),
        12 => (graph.clone(), at).prop_map(|(g, at)| Step::Pull(g, at)),
        1 => graph.clone().prop_map(Step::EndGraph),
        1 => graph.prop_map(Step::EndRuntime),
    ];
    let sizes = prop::sample::select(SIZES.to_vec());
    let (hosts, chains) = (proptest::collection::vec(host, 1..4), proptest::collection::vec(chain, 1..5));
    (sizes, hosts, chains, proptest::collection::vec(step, 10..80))
        .prop_map(|(elements, runtimes, graphs, steps)| Case { elements, runtimes, graphs, steps })
}

/// What is in a block: as many numbers, that follow from one.
fn content(v: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| mixed(v, i)).collect()
}

/// What a chain makes of a block, and of those beside it.
fn reference(c: &Chain, x: &[u32], seconds: &[Vec<u32>]) -> Vec<u32> {
    let (mut out, mut seconds) = (x.to_vec(), seconds.iter());
    for (at, link) in c.tasks.iter().enumerate() {
        let second = if link.second { seconds.next() } else { None };
        for (i, o) in out.iter_mut().enumerate() {
            *o = second.into_iter().fold(mixed(at as u32 + 1, *o), |h, s| mixed(h, s[i]));
        }
    }
    out
}

fn task(at: usize, link: &Link, n: usize) -> Task {
    let (t, in_place, second) = (Template::array::<u32>([n]), link.in_place, link.second);
    let mut task = Task::new(format!("t{at}")).input("x", t);
    task = if second { task.input("s", t) } else { task };
    task = if in_place { task.in_place("x", "o") } else { task.output("o", t) };
    if link.by != By::Host {
        let (first, from) = if in_place { ("", "o") } else { ("GLOBAL const uint *x, ", "x") };
        let (taken, step) = if second { ("GLOBAL const uint *s, ", "h = mixed(h, s[i]);") } else { ("", "") };
        let text = format!(
            "{MIXED}KERNEL void link({first}{taken}GLOBAL uint *o, uint h, uint n) {{
  uint i = gid_x();
  if (i < n) {{ h = mixed(h, {from}[i]); {step} o[i] = h; }}
}}"
        );
        let ports = (!in_place).then_some("x").into_iter().chain(second.then_some("s")).chain(["o"]);
        let numbers = [Arg::U32(at as u32 + 1), Arg::U32(n as u32)];
        let args: Vec<Arg> = ports.map(Arg::port).chain(numbers).collect();
        let launch = Launch::new(Source::Portable(text.into()), "link", args);
        task = task.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
    }
    if link.by != By::Kernel {
        task = task.host(move |inv| {
            let o = inv.output::<u32>("o")?;
            if !in_place {
                o.copy_from_slice(inv.input::<u32>("x")?);
            }
            let s = if second { Some(inv.input::<u32>("s")?) } else { None };
            for (i, o) in o.iter_mut().enumerate() {
                *o = s.into_iter().fold(mixed(at as u32 + 1, *o), |h, s| mixed(h, s[i]));
            }
            Ok(())
        });
    }
    task.geometry(Geometry::linear(n))
}

struct Begun {
    run: Running,
    feeds: Vec<Feed>,
    drain: Drain,
    /// What is to come out.
    to_come: VecDeque<Vec<u32>>,
}

/// A block, and what is in it.
type Held = Option<(Datablock, Vec<u32>)>;

struct World<'a> {
    case: &'a Case,
    devices: &'a [Arc<dyn Device>],
    runtimes: Vec<Option<Runtime>>,
    graphs: Vec<Option<Begun>>,
    held: [Held; HELD],
}

impl World<'_> {
    fn devices_of(&self, r: usize) -> Vec<Arc<dyn Device>> {
        let bits = self.case.runtimes[r].devices;
        self.devices.iter().enumerate().filter(|(i, _)| bits >> i & 1 != 0).map(|(_, d)| d.clone()).collect()
    }

    fn runtime_of(&self, g: usize) -> usize {
        self.case.graphs[g].runtime.index(self.runtimes.len())
    }

    fn graph(&mut self, g: usize) -> &mut Begun {
        let r = self.runtime_of(g);
        let devices = self.devices_of(r);
        let host = &self.case.runtimes[r];
        let rt = self.runtimes[r].get_or_insert_with(|| {
            let b = Runtime::builder().devices(devices.clone()).mode(host.mode).fusion(host.fusion);
            b.workers(host.workers).service(false).models(Arc::new(Models::off())).build().unwrap()
        });
        self.graphs[g].get_or_insert_with(|| {
            let (mut graph, n) = (Graph::new(format!("g{g}")), self.case.elements);
            let mut ids: Vec<TaskId> = Vec::new();
            let mut seconds = Vec::new();
            for (at, link) in self.case.graphs[g].tasks.iter().enumerate() {
                // Somebody has to do it.
                let by = if devices.is_empty() { By::Host } else { link.by };
                let id = graph.add(task(at, &Link { by, ..link.clone() }, n)).unwrap();
                if let Some(last) = ids.last() {
                    graph.connect((*last, "o"), (id, "x")).unwrap();
                }
                if link.second {
                    seconds.push(graph.feed((id, "s"), ON_THEIR_WAY).unwrap());
                }
                ids.push(id);
            }
            let first = graph.feed((ids[0], "x"), ON_THEIR_WAY).unwrap();
            let drain = graph.drain((ids[ids.len() - 1], "o"), ON_THEIR_WAY).unwrap();
            let feeds = [first].into_iter().chain(seconds).collect();
            Begun { run: rt.start(graph).unwrap(), feeds, drain, to_come: VecDeque::new() }
        })
    }

    /// The blocks for a graph: from this place on, those that there are, and new ones.
    fn take(&mut self, n: usize, at: usize, keep: bool) -> Vec<(Datablock, Vec<u32>)> {
        let elements = self.case.elements;
        let mut taken = Vec::new();
        for i in 0..n {
            let place = &mut self.held[(at + i) % HELD];
            let of = if keep { place.clone() } else { place.take() };
            taken.push(of.unwrap_or_else(|| {
                let data = content(i as u32, elements);
                (Datablock::from_slice(Template::array::<u32>([elements]), &data).unwrap(), data)
            }));
        }
        taken
    }

    fn push(&mut self, g: usize, at: usize, keep: bool) {
        if self.graph(g).to_come.len() >= ON_THEIR_WAY {
            return;
        }
        let feeds = self.graph(g).feeds.clone();
        let (blocks, data): (Vec<_>, Vec<_>) = self.take(feeds.len(), at, keep).into_iter().unzip();
        let begun = self.graph(g);
        for (feed, block) in feeds.into_iter().zip(blocks) {
            begun.run.push_timeout(feed, block, PATIENCE).unwrap();
        }
        let to_come = reference(&self.case.graphs[g], &data[0], &data[1..]);
        self.graph(g).to_come.push_back(to_come);
    }

    fn end_graph(&mut self, g: usize) {
        self.graphs[g] = None;
    }
}

fn look(b: &Datablock, want: &[u32]) {
    let got = b.as_slice::<u32>().unwrap();
    let wrong = got.iter().zip(want).position(|(a, b)| a != b);
    assert_eq!((wrong, got.len()), (None, want.len()), "{:?}", b.residency());
}

fn check(case: &Case, devices: &[Arc<dyn Device>]) {
    let before = allocated(devices);
    let (runtimes, graphs) = (vec![None; case.runtimes.len()], case.graphs.iter().map(|_| None).collect());
    let mut w = World { case, devices, runtimes, graphs, held: Default::default() };
    let (n, t) = (case.elements, Template::array::<u32>([case.elements]));
    let done = std::cell::Cell::new(0);
    let _shows = OnDrop(|| {
        if std::thread::panicking() {
            eprintln!("step {} of {case:#?}", done.get());
        }
    });
    std::thread::scope(|s| {
        for step in &case.steps {
            match step {
                Step::New(at, v) => {
                    let data = content(*v, n);
                    w.held[*at] = Some((Datablock::from_slice(t, &data).unwrap(), data));
                }
                Step::Filled(at, g, v) => {
                    let (data, begun) = (content(*v, n), w.graph(g.index(case.graphs.len())));
                    let mut block = begun.run.acquire(begun.feeds[0]).unwrap();
                    block.assign(&data).unwrap();
                    w.held[*at] = Some((block, data));
                }
                Step::Overwrite(at, v) => {
                    if let Some((block, data)) = &mut w.held[*at] {
                        let new = content(*v, n);
                        match block.assign(&new) {
                            Ok(()) => *data = new,
                            // Somebody else has it, too, or had just now.
                            Err(e) => assert!(e.to_string().contains("several handles"), "{e}"),
                        }
                    }
                }
                Step::Copy(from, to) => w.held[*to] = w.held[*from].clone(),
                Step::Read(at) => w.held[*at].iter().for_each(|(b, data)| look(b, data)),
                Step::ReadBeside(at) => {
                    if let Some((b, data)) = w.held[*at].clone() {
                        s.spawn(move || look(&b, &data));
                    }
                }
                Step::Wait(at) => w.held[*at].iter().for_each(|(b, _)| b.wait().unwrap()),
                Step::Drop(at) => w.held[*at] = None,
                Step::Push(g, at, keep) => w.push(g.index(case.graphs.len()), *at, *keep),
                Step::Pull(g, at) => {
                    if let Some(begun) = &mut w.graphs[g.index(case.graphs.len())]
                        && let Some(data) = begun.to_come.pop_front()
                    {
                        w.held[*at] = Some((pull(&begun.run, begun.drain), data));
                    }
                }
                Step::EndGraph(g) => w.end_graph(g.index(case.graphs.len())),
                Step::EndRuntime(r) => {
                    let r = r.index(case.runtimes.len());
                    (0..case.graphs.len())
                        .filter(|g| w.runtime_of(*g) == r)
                        .collect::<Vec<_>>()
                        .into_iter()
                        .for_each(|g| w.end_graph(g));
                    w.runtimes[r] = None;
                }
            }
            done.set(done.get() + 1);
        }
        // What is still held is what it was, whoever has gone.
        w.held.iter().flatten().for_each(|(b, data)| look(b, data));
        for begun in w.graphs.iter_mut().flatten() {
            begun.to_come.drain(..).for_each(|data| look(&pull(&begun.run, begun.drain), &data));
        }
        w.runtimes.clear();
        w.graphs.clear();
        w.held.iter().flatten().for_each(|(b, data)| look(b, data));
    });
    drop(w);
    // The last of it may be given back by a thread of a runtime that is ending. (Elsewhere other tests use the devices, too.)
    let begun = Instant::now();
    while crate::stand_in::is_here() && allocated(devices) != before {
        assert!(begun.elapsed() < PATIENCE, "{:?} B were allocated, and now {:?}", before, allocated(devices));
        std::thread::yield_now();
    }
}

fn allocated(devices: &[Arc<dyn Device>]) -> Vec<u64> {
    devices.iter().map(|d| d.allocated()).collect()
}

#[test]
fn on_opencl() {
    crate::on_opencl(|devices| all(cases(), |case| check(case, devices)));
}

#[test]
fn on_two_gpus() {
    crate::on_two_gpus("between::on_two_gpus", |devices| all(cases(), |case| check(case, devices)));
}
