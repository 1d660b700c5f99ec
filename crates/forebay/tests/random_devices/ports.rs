//! Every kind of port and mark: items that differ in length, in their marks and in their metadata; sizes, spaces and groups that
//! the program gives; loops that an initializer starts; channels that let only some items pass; functions that fail where a
//! kernel can take over; graphs that begin anew, and two of them at once.

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::Device;
use forebay::place::Models;
use forebay::{Arg, Datablock, Drain, Feed, Geometry, Graph, Invocation, Kind, Launch, Mode, Predicate, Running};
use forebay::{Runtime, Signals, Source, Task, TaskError, TaskId, Template};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::{By, MIXED, OnDrop, all, anybody, mixed, pull, push};

/// Items that the program pushes into each feed of data.
const ROUNDS: u32 = 9;
/// Most elements of a block.
const SIZES: [usize; 3] = [4, 300, 20_000];
/// The marks of a stream and of groups.
const STREAM: u32 = 3;
const MARKS: [Signals; 4] =
    [Signals::BEGIN_STREAM, Signals::END_STREAM, Signals::BEGIN_ITERATION, Signals::END_ITERATION];

const GONE_ROUND: Predicate = Predicate::Only(Signals::END_ITERATION);

/// What is in a block.
#[derive(Clone, Debug, PartialEq)]
struct Item {
    data: Vec<u32>,
    signals: u32,
    meta: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Group {
    Of(u64),
    /// As the program says at a port, group by group.
    Told,
}

#[derive(Clone, Debug)]
struct Node {
    /// All of them bring equally many items. The first is `x`.
    inputs: Vec<usize>,
    /// Of the channel that brings the only input.
    predicate: Predicate,
    in_place: bool,
    sticky: bool,
    /// How many elements come out (or, in place, over how many of them it runs) the program says at a port.
    told: bool,
    group: Option<Group>,
    /// Each item goes round for as long as a group is.
    looped: bool,
    by: By,
    /// A function that leaves out some elements and adds marks and metadata; only on the host.
    trims: bool,
    /// The function fails at this invocation.
    fails_at: Option<u64>,
    capacity: usize,
    drained: Option<Predicate>,
}

#[derive(Clone, Debug)]
struct Plan {
    nodes: Vec<Node>,
    most: usize,
    /// The graph begins anew after so many items or microseconds.
    reset: Option<(u32, u64)>,
    own_blocks: bool,
}

#[derive(Clone, Debug)]
struct Case {
    plans: Vec<Plan>,
    mode: Mode,
    fusion: bool,
    workers: usize,
}

fn predicate() -> impl Strategy<Value = Predicate> {
    let signals = || (0..MARKS.len()).prop_map(|i| MARKS[i]);
    prop_oneof![
        8 => Just(Predicate::Always),
        1 => signals().prop_map(Predicate::Only),
        1 => signals().prop_map(Predicate::Unless),
        1 => signals().prop_map(Predicate::OpenFrom),
        1 => signals().prop_map(Predicate::CloseAfter),
    ]
}

fn plan() -> impl Strategy<Value = Plan> {
    let group = prop_oneof![(1u64..4).prop_map(Group::Of), Just(Group::Told)];
    let what = (
        proptest::collection::vec(any::<Index>(), 0..4),
        predicate(),
        (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.3), prop::bool::weighted(0.2)),
        prop::option::weighted(0.4, group),
        any::<bool>(),
    );
    let how = (anybody(), prop::option::weighted(0.3, 0u64..6), 1usize..4, prop::option::weighted(0.5, predicate()));
    let nodes = proptest::collection::vec((what, how), 1..9).prop_map(|raw| {
        let mut nodes: Vec<Node> = Vec::new();
        // Whose items come one for one: those behind a predicate are others.
        let mut line: Vec<usize> = Vec::new();
        for (at, (what, (by, fails_at, capacity, drained))) in raw.into_iter().enumerate() {
            let (inputs, predicate, (in_place, sticky, told, trims), group, looped) = what;
            let first = inputs.first().filter(|_| at > 0).map(|ix| ix.index(at));
            // Out of a loop comes what has gone round, and no channel has two predicates.
            let out_of_loop = |first: &usize| nodes[*first].looped;
            let predicate = first.filter(|first| !out_of_loop(first)).map_or(Predicate::Always, |_| predicate);
            let looped = looped && group.is_some() && !trims;
            let alone = predicate != Predicate::Always || looped;
            let others = inputs.iter().skip(1).map(|ix| ix.index(at.max(1)));
            let alike = |j: &usize| first.is_some_and(|first| line[first] == line[*j]);
            let others: Vec<usize> = others.filter(|j| !alone && alike(j)).collect();
            line.push(match first {
                Some(first) if predicate == Predicate::Always => line[first],
                Some(_) => at + 1,
                None => 0,
            });
            let by = if trims { By::Host } else { by };
            let may_fail = by == By::Both && !in_place;
            nodes.push(Node {
                inputs: first.into_iter().chain(others).collect(),
                predicate,
                in_place: in_place && !trims,
                sticky,
                told: told && !trims,
                group,
                looped,
                by,
                trims,
                fails_at: fails_at.filter(|_| may_fail),
                capacity,
                drained,
            });
        }
        nodes
    });
    let reset = prop::option::weighted(0.3, (0..ROUNDS, 0u64..1500));
    (nodes, 0..SIZES.len(), reset, any::<bool>()).prop_map(|(nodes, size, reset, own_blocks)| Plan {
        nodes,
        most: SIZES[size],
        reset,
        own_blocks,
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let plans = proptest::collection::vec(plan(), 1..3);
    (plans, 0..Mode::ALL.len(), any::<bool>(), 1usize..4).prop_map(|(mut plans, mode, fusion, workers)| {
        let mode = Mode::ALL[mode];
        if mode != Mode::Adaptive {
            // Nobody else takes over there.
            plans.iter_mut().flat_map(|p| &mut p.nodes).for_each(|n| n.fails_at = None);
        }
        Case { plans, mode, fusion, workers }
    })
}

/// A number for item `k` of what goes in at a node.
fn number(at: usize, port: u32, k: u32) -> u32 {
    mixed(mixed(at as u32 * 8 + port, k), 0x51ED_270B) >> 3
}

fn fed(at: usize, k: u32, most: usize) -> Item {
    let n = number(at, 0, k);
    // Some are empty, and some full.
    let len = match n % 8 {
        0 => 0,
        1 => most,
        _ => (n / 8) as usize % (most + 1),
    };
    let data = (0..len as u32).map(|i| mixed(n, i)).collect();
    let meta = (n.is_multiple_of(3)).then(|| n.to_le_bytes()[..(n / 3 % 4) as usize].to_vec());
    Item { data, signals: (n / 64) & STREAM, meta }
}

fn kept(at: usize, most: usize) -> Vec<u32> {
    fed(at, 77, most).data
}

fn told(at: usize, k: u32, most: usize) -> u64 {
    u64::from(number(at, 1, k)) % (most as u64 + 1)
}

fn rounds(at: usize, group: Group, k: u32) -> u64 {
    match group {
        Group::Of(n) => n,
        Group::Told => 1 + u64::from(number(at, 2, k)) % 3,
    }
}

fn element(data: &[u32], i: usize) -> u32 {
    data.get(i).copied().unwrap_or(i as u32)
}

/// One invocation.
fn step(at: usize, node: &Node, most: usize, inputs: &[&Item], told: Option<u64>) -> Item {
    let x = inputs[0];
    let signals = inputs.iter().fold(0, |s, i| s | i.signals & STREAM);
    if node.trims {
        let data: Vec<u32> = x.data.iter().copied().filter(|v| v & 1 == 1).collect();
        let more = if data.len().is_multiple_of(3) { STREAM } else { 0 };
        let meta = (!data.len().is_multiple_of(2)).then(|| data.len().to_le_bytes().to_vec());
        return Item { data, signals: signals | more, meta };
    }
    let space = told.filter(|_| node.in_place).map(|n| n.max(1) as usize);
    let n = match (node.in_place, told) {
        (true, _) => x.data.len(),
        (false, told) => told.map_or(most, |n| n as usize),
    };
    let kept = node.sticky.then(|| kept(at, most));
    let value = |i: usize| {
        let first = mixed(at as u32 + 1, element(&x.data, i));
        let others = inputs[1..].iter().map(|y| element(&y.data, i));
        others.chain(kept.as_ref().map(|k| element(k, i))).chain(space.map(|s| s as u32)).fold(first, mixed)
    };
    let changed = |i: usize| if space.is_some_and(|s| i >= s) { x.data[i] } else { value(i) };
    Item { data: (0..n).map(changed).collect(), signals, meta: x.meta.clone().filter(|_| node.in_place) }
}

struct Reference {
    /// What each node puts out, before any channel drops some.
    out: Vec<Vec<Item>>,
    /// How many numbers each takes at its port for sizes or spaces, and how many for groups.
    told: Vec<(u32, u32)>,
}

fn passing(p: Predicate, items: &[Item]) -> Vec<Item> {
    let mut seen = false;
    let pass = |i: &&Item| {
        let (has, had) = (|s: Signals| i.signals & s.0 != 0, seen);
        match p {
            Predicate::Always => true,
            Predicate::Only(s) => has(s),
            Predicate::Unless(s) => !has(s),
            Predicate::OpenFrom(s) => {
                seen |= has(s);
                seen
            }
            Predicate::CloseAfter(s) => !std::mem::replace(&mut seen, had | has(s)),
        }
    };
    items.iter().filter(pass).cloned().collect()
}

fn reference(plan: &Plan) -> Reference {
    let mut r = Reference { out: Vec::new(), told: Vec::new() };
    for (at, node) in plan.nodes.iter().enumerate() {
        let incoming: Vec<Vec<Item>> = match node.inputs.as_slice() {
            [] => vec![(0..ROUNDS).map(|k| fed(at, k, plan.most)).collect()],
            [one] => vec![passing(node.predicate, &r.out[*one])],
            several => several.iter().map(|&j| r.out[j].clone()).collect(),
        };
        let (mut calls, mut groups, mut of_group, mut in_group) = (0u32, 0u32, 0u64, 0u64);
        let mut out = Vec::new();
        for k in 0..incoming[0].len() {
            let inputs: Vec<&Item> = incoming.iter().map(|i| &i[k]).collect();
            let mut again: Option<Item> = None;
            loop {
                if let (Some(g), 0) = (node.group, in_group) {
                    of_group = rounds(at, g, groups);
                    groups += 1;
                }
                let from: Vec<&Item> = again.as_ref().map_or(inputs.clone(), |a| vec![a]);
                let told = node.told.then(|| told(at, calls, plan.most));
                calls += 1;
                let mut item = step(at, node, plan.most, &from, told);
                if node.group.is_some() {
                    item.signals |= if in_group == 0 { Signals::BEGIN_ITERATION.0 } else { 0 };
                    in_group += 1;
                    if in_group == of_group {
                        item.signals |= Signals::END_ITERATION.0;
                        in_group = 0;
                    }
                }
                if !node.looped {
                    out.push(item);
                    break;
                }
                again = Some(item.clone());
                if in_group == 0 {
                    // What goes round is not let out.
                    out.push(item);
                    break;
                }
            }
        }
        let told = if node.told { calls } else { 0 };
        r.told.push((told, if node.group == Some(Group::Told) { groups } else { 0 }));
        r.out.push(out);
    }
    r
}

/// Every buffer's argument is followed by its number of elements.
fn kernel(at: usize, node: &Node, others: &[String], spaced: bool) -> Launch {
    let ports: String = others.iter().map(|y| format!("GLOBAL const uint *{y}, uint n{y}, ")).collect();
    let mut steps: String = others.iter().map(|y| format!("h = mixed(h, i < n{y} ? {y}[i] : i); ")).collect();
    let x = if node.in_place { "" } else { "GLOBAL const uint *x, uint nx, " };
    let first = if node.in_place { "o[i]" } else { "i < nx ? x[i] : i" };
    if spaced {
        steps += "h = mixed(h, space); ";
    }
    let guard = if spaced { " && i < space" } else { "" };
    let text = format!(
        "{MIXED}KERNEL void blend({x}{ports}GLOBAL uint *o, uint no, uint space, uint node) {{
  uint i = gid_x();
  if (i < no{guard}) {{ uint h = mixed(node + 1u, {first}); {steps}o[i] = h; }}
}}"
    );
    let buffers = (!node.in_place).then_some("x").into_iter().chain(others.iter().map(String::as_str)).chain(["o"]);
    let args = buffers.flat_map(|p| [Arg::port(p), Arg::records(p)]);
    let args: Vec<Arg> = args.chain([Arg::Items(0), Arg::U32(at as u32)]).collect();
    Launch::new(Source::Portable(text.into()), "blend", args)
}

fn trim(inv: &mut Invocation<'_>) -> Result<(), TaskError> {
    let x = inv.input::<u32>("x")?;
    let o = inv.output::<u32>("o")?;
    let mut n = 0;
    for &v in x.iter().filter(|v| **v & 1 == 1) {
        o[n] = v;
        n += 1;
    }
    let out = inv.out("o")?;
    out.set_records(n)?;
    if n.is_multiple_of(3) {
        out.set_signals(out.signals() | Signals(STREAM));
    }
    if !n.is_multiple_of(2) {
        out.set_meta(&n.to_le_bytes())?;
    }
    Ok(())
}

fn task(at: usize, node: &Node, most: usize) -> Task {
    let t = Template::records::<u32>(most);
    let mut task = Task::new(format!("n{at}")).input("x", t);
    let mut others: Vec<String> = (1..node.inputs.len()).map(|p| format!("y{}", p - 1)).collect();
    for p in &others {
        task = task.input(p, t);
    }
    if node.sticky {
        others.push("kept".into());
        task = task.sticky("kept", t);
    }
    task = if node.in_place { task.in_place("x", "o") } else { task.output("o", t) };
    if node.looped {
        task = task.initializer("first", "x");
    }
    let spaced = node.told && node.in_place;
    task = match (node.told, node.in_place) {
        (true, true) => task.meta_geometry("space"),
        (true, false) => task.meta_size("size", "o"),
        _ => task,
    };
    task = match node.group {
        Some(Group::Of(n)) => task.iterations(n),
        Some(Group::Told) => task.meta_iterations("rounds"),
        None => task,
    };
    if node.by != By::Host {
        let launch = kernel(at, node, &others, spaced);
        task = task.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
    }
    if node.trims {
        task = task.host(trim);
    } else if node.by != By::Kernel {
        let (in_place, fails_at, mut calls) = (node.in_place, node.fails_at, 0);
        task = task.host(move |inv| {
            let n = inv.out("o")?.records();
            let space = spaced.then(|| inv.geometry().items[0]);
            let o = inv.output::<u32>("o")?;
            if fails_at == Some(calls) {
                // Whatever it has done until then is not to be seen.
                o.fill(7);
                inv.out("o")?.set_records(n / 2)?;
                inv.out("o")?.set_meta(b"half")?;
                inv.out("o")?.set_signals(Signals(15));
                return Err("it was to fail".into());
            }
            calls += 1;
            if !in_place {
                let x = inv.input::<u32>("x")?;
                o.iter_mut().enumerate().for_each(|(i, o)| *o = element(x, i));
            }
            let o = &mut o[..space.unwrap_or(n).min(n)];
            o.iter_mut().for_each(|o| *o = mixed(at as u32 + 1, *o));
            for y in &others {
                let y = inv.input::<u32>(y.as_str())?;
                o.iter_mut().enumerate().for_each(|(i, o)| *o = mixed(*o, element(y, i)));
            }
            if let Some(space) = space {
                o.iter_mut().for_each(|o| *o = mixed(*o, space as u32));
            }
            Ok(())
        });
    }
    task.geometry(Geometry::linear(most))
}

/// What the program pushes at an end.
#[derive(Clone, Copy)]
enum What {
    Data,
    Kept,
    Told,
    Rounds,
}

struct Built {
    graph: Graph,
    feeds: Vec<(usize, What, Feed)>,
    drains: Vec<(usize, Predicate, Drain)>,
}

fn build(plan: &Plan) -> Built {
    let mut g = Graph::new("ports");
    let (mut ids, mut feeds, mut drains): (Vec<TaskId>, _, _) = (Vec::new(), Vec::new(), Vec::new());
    for (at, node) in plan.nodes.iter().enumerate() {
        let id = g.add(task(at, node, plan.most)).unwrap();
        let x = if node.looped { "first" } else { "x" };
        if node.inputs.is_empty() {
            feeds.push((at, What::Data, g.feed((id, x), node.capacity).unwrap()));
        }
        for (p, &j) in node.inputs.iter().enumerate() {
            let port = p.checked_sub(1).map_or(x.to_owned(), |p| format!("y{p}"));
            let predicate = if plan.nodes[j].looped { GONE_ROUND } else { node.predicate };
            g.connect_with((ids[j], "o"), (id, &port), node.capacity, predicate).unwrap();
        }
        if node.looped {
            let again = Predicate::Unless(Signals::END_ITERATION);
            g.connect_with((id, "o"), (id, "x"), node.capacity, again).unwrap();
        }
        let ports = [(node.sticky, "kept", What::Kept), (node.group == Some(Group::Told), "rounds", What::Rounds)];
        let told = [(node.told, if node.in_place { "space" } else { "size" }, What::Told)];
        for (_, port, what) in ports.into_iter().chain(told).filter(|p| p.0) {
            feeds.push((at, what, g.feed((id, port), node.capacity).unwrap()));
        }
        ids.push(id);
    }
    for (at, node) in plan.nodes.iter().enumerate() {
        let taken = plan.nodes.iter().any(|n| n.inputs.contains(&at));
        if let Some(p) = node.drained.or((!taken).then_some(Predicate::Always)) {
            let p = if node.looped { GONE_ROUND } else { p };
            drains.push((at, p, g.drain_with((ids[at], "o"), 2, p).unwrap()));
        }
    }
    Built { graph: g, feeds, drains }
}

/// Block `k` for a feed.
fn block(plan: &Plan, run: &Running, (at, what, feed): (usize, What, Feed), k: u32) -> Datablock {
    let group = plan.nodes[at].group;
    match what {
        What::Data | What::Kept => {
            let item = fed(at, if matches!(what, What::Kept) { 77 } else { k }, plan.most);
            let made = match plan.own_blocks {
                true => run.acquire(feed).and_then(|mut b| b.assign(&item.data).map(|()| b)),
                false => Datablock::from_slice(Template::records::<u32>(plan.most), &item.data),
            };
            let b = made.unwrap().with_signals(Signals(item.signals));
            if let Some(meta) = &item.meta {
                b.set_meta(meta).unwrap();
            }
            b
        }
        What::Told if plan.nodes[at].in_place => {
            Datablock::from_slice(Template::array::<u64>([3]), &[told(at, k, plan.most), 0, 1]).unwrap()
        }
        What::Told => Datablock::scalar(told(at, k, plan.most)).unwrap(),
        What::Rounds => Datablock::scalar(group.map_or(1, |g| rounds(at, g, k))).unwrap(),
    }
}

fn go(plan: &Plan, rt: &Runtime) {
    let Built { graph, feeds, drains } = build(plan);
    let want = reference(plan);
    let run = rt.start(graph).unwrap();
    let _shows = OnDrop(|| {
        if std::thread::panicking() {
            eprintln!("{plan:#?}\n{:#?}", run.snapshot());
        }
    });
    if let Some((items, micros)) = plan.reset {
        for &(at, what, feed) in &feeds {
            for k in 0..items {
                // What there is no room for is not missed.
                let _ = run.try_push(feed, block(plan, &run, (at, what, feed), k));
            }
        }
        std::thread::sleep(Duration::from_micros(micros));
        drains.iter().for_each(|d| drop(run.try_pull(d.2)));
        run.stop().unwrap();
        run.reset().unwrap();
        run.run().unwrap();
    }
    std::thread::scope(|s| {
        for &(at, what, feed) in &feeds {
            let n = match what {
                What::Data => ROUNDS,
                What::Kept => 1,
                What::Told => want.told[at].0,
                What::Rounds => want.told[at].1,
            };
            let run = &run;
            s.spawn(move || (0..n).for_each(|k| push(run, feed, || block(plan, run, (at, what, feed), k))));
        }
        for &(at, predicate, drain) in &drains {
            let items = passing(predicate, &want.out[at]);
            let run = &run;
            s.spawn(move || {
                for (k, item) in items.iter().enumerate() {
                    let b = pull(run, drain);
                    let marks = (b.signals().0, b.meta(), b.records());
                    assert_eq!(marks, (item.signals, item.meta.clone(), item.data.len()), "node {at}, item {k}");
                    match number(at, 3, k as u32) % 4 {
                        0 => {}
                        1 => b.wait().unwrap(),
                        _ => {
                            let got = b.as_slice::<u32>().unwrap();
                            let wrong = got.iter().zip(&item.data).position(|(a, b)| a != b);
                            assert_eq!(wrong, None, "node {at}, item {k}: {:?}", b.residency());
                        }
                    }
                }
            });
        }
    });
}

fn check(case: &Case, devices: &[Arc<dyn Device>]) {
    let builder = Runtime::builder().devices(devices.to_vec()).mode(case.mode).fusion(case.fusion);
    let rt = builder.workers(case.workers).models(Arc::new(Models::off())).build().unwrap();
    std::thread::scope(|s| case.plans.iter().for_each(|plan| drop(s.spawn(|| go(plan, &rt)))));
}

#[test]
fn on_opencl() {
    crate::on_opencl(|devices| all(cases(), |case| check(case, devices)));
}

#[test]
fn on_two_gpus() {
    crate::on_two_gpus("ports::on_two_gpus", |devices| all(cases(), |case| check(case, devices)));
}
