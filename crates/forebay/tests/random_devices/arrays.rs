//! Arrays of one size, every item alike: what is worth testing is the way that they take between the devices.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay::hal::Device;
use forebay::place::Models;
use forebay::{Arg, Datablock, Drain, Feed, Geometry, Graph, Kind, Launch, Mode, Runtime, Source, Task};
use forebay::{TaskId, Template};
use proptest::prelude::*;

use crate::{By, MIXED, OnDrop, all, anybody, mixed, pull, push};

/// Items that go through each graph.
const ROUNDS: u32 = 12;
/// Elements of a block: of one that the processor may copy, and of larger ones.
const SIZES: [usize; 5] = [1, 33, 1500, 9000, 40_000];

/// What becomes of a task's output at the program's end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    Read,
    /// It is waited for, and dropped.
    Waited,
    Dropped,
    /// It is read some items later.
    Kept,
    /// There is no such end, unless nobody else takes the output.
    None,
}

#[derive(Clone, Debug)]
struct Node {
    inputs: Vec<usize>,
    in_place: bool,
    sticky: bool,
    /// It takes a number, too: the first element of that node's output, which this makes.
    number: Option<(usize, By)>,
    capacity: usize,
    by: By,
    end: Use,
}

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<Node>,
    elements: usize,
    mode: Mode,
    fusion: bool,
    workers: usize,
    /// The graph is stopped and set going between items.
    interrupted: bool,
    /// Blocks to push are the graph's own, or new ones.
    own_blocks: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let end = prop_oneof![Just(Use::Read), Just(Use::Waited), Just(Use::Dropped), Just(Use::Kept), Just(Use::None)];
    let node = (
        proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
        (any::<bool>(), prop::bool::weighted(0.2)),
        prop::option::weighted(0.2, (any::<prop::sample::Index>(), anybody())),
        1usize..4,
        anybody(),
        end,
    );
    let nodes = proptest::collection::vec(node, 1..10).prop_map(|raw| {
        let all = raw.into_iter().enumerate();
        all.map(|(i, (inputs, (in_place, sticky), number, capacity, by, end))| Node {
            inputs: inputs.into_iter().filter(|_| i > 0).map(|ix| ix.index(i)).collect(),
            in_place,
            sticky,
            number: number.filter(|_| i > 0).map(|(of, by)| (of.index(i), by)),
            capacity,
            by,
            end,
        })
        .collect()
    });
    let settings =
        (0..SIZES.len(), 0..Mode::ALL.len(), any::<bool>(), 1usize..4, prop::bool::weighted(0.3), any::<bool>());
    (nodes, settings).prop_map(|(nodes, (size, mode, fusion, workers, interrupted, own_blocks))| Case {
        nodes,
        elements: SIZES[size],
        mode: Mode::ALL[mode],
        fusion,
        workers,
        interrupted,
        own_blocks,
    })
}

/// What is pushed.
fn fed(round: u32, feed: usize, i: usize) -> u32 {
    mixed(round.wrapping_mul(977).wrapping_add(feed as u32), i as u32)
}

/// Every node in order, for one round: what comes out of each.
fn reference(case: &Case, round: u32) -> Vec<Vec<u32>> {
    let n = case.elements;
    let mut out: Vec<Vec<u32>> = Vec::new();
    for (at, node) in case.nodes.iter().enumerate() {
        let value = |i: usize| {
            let first = match node.inputs.first() {
                Some(&j) => out[j][i],
                None => fed(round, at, i),
            };
            let rest = node.inputs.iter().skip(1).map(|&j| out[j][i]);
            let kept = node.sticky.then(|| fed(u32::MAX, at, i));
            let number = node.number.map(|(j, _)| out[j][0]);
            std::iter::once(first).chain(rest).chain(kept).chain(number).fold(at as u32 + 1, mixed)
        };
        out.push((0..n).map(value).collect());
    }
    out
}

/// The kernel for so many inputs behind the first one, and a number.
fn text(in_place: bool, others: usize, number: bool) -> String {
    let first = if in_place { "" } else { "GLOBAL const uint *x, " };
    let from = if in_place { "o" } else { "x" };
    let ports: String = (0..others).map(|i| format!("GLOBAL const uint *y{i}, ")).collect();
    let mut steps: String = (0..others).map(|i| format!("h = mixed(h, y{i}[i]); ")).collect();
    let given = if number { "uint m, " } else { "" };
    steps += if number { "h = mixed(h, m); " } else { "" };
    format!(
        "{MIXED}KERNEL void blend({first}{ports}GLOBAL uint *o, {given}uint node, uint n) {{
  uint i = gid_x();
  if (i < n) {{ uint h = mixed(node + 1u, {from}[i]); {steps}o[i] = h; }}
}}"
    )
}

fn task(at: usize, node: &Node, n: usize) -> Task {
    let t = Template::array::<u32>([n]);
    let mut task = Task::new(format!("n{at}")).input("x", t);
    let mut others: Vec<String> = (1..node.inputs.len()).map(|p| format!("y{}", p - 1)).collect();
    for p in &others {
        task = task.input(p, t);
    }
    if node.sticky {
        let p = format!("y{}", others.len());
        task = task.sticky(&p, t);
        others.push(p);
    }
    let number = node.number.is_some();
    if number {
        task = task.meta::<u32>("m");
    }
    task = if node.in_place { task.in_place("x", "o") } else { task.output("o", t) };
    if node.by != By::Host {
        let source = Source::Portable(text(node.in_place, others.len(), number).into());
        let first = (!node.in_place).then(|| Arg::port("x"));
        let ports = others.iter().map(|p| Arg::port(p));
        let given = number.then(|| Arg::meta("m"));
        let rest = [Arg::U32(at as u32), Arg::U32(n as u32)];
        let ports = first.into_iter().chain(ports).chain([Arg::port("o")]);
        let args: Vec<Arg> = ports.chain(given).chain(rest).collect();
        let launch = Launch::new(source, "blend", args);
        task = task.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
    }
    if node.by != By::Kernel {
        let in_place = node.in_place;
        task = task.host(move |inv| {
            let o = inv.output::<u32>("o")?;
            if !in_place {
                o.copy_from_slice(inv.input::<u32>("x")?);
            }
            o.iter_mut().for_each(|o| *o = mixed(at as u32 + 1, *o));
            for p in &others {
                let y = inv.input::<u32>(p.as_str())?;
                o.iter_mut().zip(y).for_each(|(o, y)| *o = mixed(*o, *y));
            }
            if number {
                let m = inv.value::<u32>("m")?;
                o.iter_mut().for_each(|o| *o = mixed(*o, m));
            }
            Ok(())
        });
    }
    task.geometry(Geometry::linear(n))
}

/// Makes a number of an array: its first element.
fn head(at: usize, by: By, n: usize) -> Task {
    const TEXT: &str = "KERNEL void head(GLOBAL const uint *x, GLOBAL uint *m) { if (gid_x() == 0) m[0] = x[0]; }";
    let task = Task::new(format!("head{at}")).input("x", Template::array::<u32>([n]));
    let mut task = task.output("m", Template::scalar::<u32>());
    if by != By::Host {
        task = task.portable(TEXT, "head");
    }
    if by != By::Kernel {
        task = task.host(|inv| {
            inv.output::<u32>("m")?[0] = inv.input::<u32>("x")?[0];
            Ok(())
        });
    }
    task.geometry(Geometry::linear(1))
}

struct Built {
    graph: Graph,
    /// With the node's number.
    feeds: Vec<(usize, Feed)>,
    sticky: Vec<(usize, Feed)>,
    drains: Vec<(usize, Drain)>,
}

fn build(case: &Case) -> Built {
    let mut g = Graph::new("random");
    let (mut ids, mut feeds, mut sticky): (Vec<TaskId>, _, _) = (Vec::new(), Vec::new(), Vec::new());
    for (at, node) in case.nodes.iter().enumerate() {
        let id = g.add(task(at, node, case.elements)).unwrap();
        match node.inputs.is_empty() {
            true => feeds.push((at, g.feed((id, "x"), node.capacity).unwrap())),
            false => {
                for (p, &j) in node.inputs.iter().enumerate() {
                    let port = p.checked_sub(1).map_or("x".to_owned(), |p| format!("y{p}"));
                    g.connect_with((ids[j], "o"), (id, &port), node.capacity, forebay::Predicate::Always).unwrap();
                }
            }
        }
        if let Some((of, by)) = node.number {
            let head = g.add(head(at, by, case.elements)).unwrap();
            g.connect((ids[of], "o"), (head, "x")).unwrap();
            g.connect((head, "m"), (id, "m")).unwrap();
        }
        if node.sticky {
            let port = format!("y{}", node.inputs.len().saturating_sub(1));
            sticky.push((at, g.feed((id, &port), 1).unwrap()));
        }
        ids.push(id);
    }
    let takes = |n: &Node, at: usize| n.inputs.contains(&at) || n.number.is_some_and(|(of, _)| of == at);
    let taken = |at: usize| case.nodes.iter().any(|n| takes(n, at));
    let ends = (0..ids.len()).filter(|&at| case.nodes[at].end != Use::None || !taken(at));
    let drains = ends.map(|at| (at, g.drain((ids[at], "o"), 2).unwrap())).collect();
    Built { graph: g, feeds, sticky, drains }
}

fn check(case: &Case, devices: &[Arc<dyn Device>]) {
    let Built { graph, feeds, sticky, drains } = build(case);
    let builder = Runtime::builder().devices(devices.to_vec()).mode(case.mode).fusion(case.fusion);
    let rt = builder.workers(case.workers).models(Arc::new(Models::off())).build().unwrap();
    let run = rt.start(graph).unwrap();
    let data = |round: u32, at: usize| (0..case.elements).map(|i| fed(round, at, i)).collect::<Vec<u32>>();
    let _shows = OnDrop(|| {
        if std::thread::panicking() {
            eprintln!("{case:#?}\n{:#?}", run.snapshot());
        }
    });
    let ended = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let block = |feed, data: &[u32]| {
                let b = match case.own_blocks {
                    true => run.acquire(feed).and_then(|mut b| b.assign(data).map(|()| b)),
                    false => Datablock::from_slice(Template::array::<u32>([data.len()]), data),
                };
                b.unwrap()
            };
            for &(at, feed) in &sticky {
                let data = data(u32::MAX, at);
                push(&run, feed, || block(feed, &data));
            }
            for round in 0..ROUNDS {
                for &(at, feed) in &feeds {
                    let data = data(round, at);
                    push(&run, feed, || block(feed, &data));
                }
            }
        });
        if case.interrupted {
            s.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    run.stop().unwrap();
                    run.run().unwrap();
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
        }
        // Also when something below is wrong.
        let _ends = OnDrop(|| ended.store(true, Ordering::Relaxed));
        let mut kept: VecDeque<(usize, Datablock, Vec<u32>)> = VecDeque::new();
        let look = |at: usize, b: &Datablock, want: &[u32], round: u32| {
            let got = b.as_slice::<u32>().unwrap();
            let wrong = got.iter().zip(want).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "node {at}, about round {round}: {:?}", b.residency());
        };
        for round in 0..ROUNDS {
            let want = reference(case, round);
            for &(at, drain) in &drains {
                let b = pull(&run, drain);
                match case.nodes[at].end {
                    Use::Dropped => {}
                    Use::Waited => b.wait().unwrap(),
                    Use::Kept => kept.push_back((at, b, want[at].clone())),
                    Use::Read | Use::None => look(at, &b, &want[at], round),
                }
            }
            while kept.len() > 3 * drains.len() || round + 1 == ROUNDS && !kept.is_empty() {
                if let Some((at, b, want)) = kept.pop_front() {
                    look(at, &b, &want, round);
                }
            }
        }
    });
    assert!(run.snapshot().channels.iter().all(|c| c.len == 0));
}

#[test]
fn on_opencl() {
    crate::on_opencl(|devices| all(cases(), |case| check(case, devices)));
}

#[test]
fn on_two_gpus() {
    crate::on_two_gpus("arrays::on_two_gpus", |devices| all(cases(), |case| check(case, devices)));
}
