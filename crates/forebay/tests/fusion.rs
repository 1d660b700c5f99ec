//! Fusion: regions compute what their tasks compute, hold back nothing, and cost a list instead of launches.

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::sim::{Model, SimDevice};
use forebay::{
    Arg, Datablock, Error, Geometry, Graph, Kind, Launch, Mode, Running, Runtime, Signals, Source, Task, TaskId,
    Template,
};
use proptest::prelude::*;

/// Elements of every block here.
const N: usize = 3;

fn words() -> Template {
    Template::array::<u64>([N])
}

fn sim_runtime(fusion: bool, mode: Mode) -> Runtime {
    sims_runtime(1, fusion, mode)
}

fn sims_runtime(sims: usize, fusion: bool, mode: Mode) -> Runtime {
    let sim = || Arc::new(SimDevice::new(Model::default())) as Arc<dyn forebay::hal::Device>;
    let sims = (0..sims).map(|_| sim()).collect();
    Runtime::builder().devices(sims).fusion(fusion).mode(mode).build().unwrap()
}

fn regions(run: &Running) -> Vec<Option<String>> {
    run.snapshot().tasks.into_iter().map(|t| t.region).collect()
}

fn mix(node: u64, values: &[u64]) -> u64 {
    values.iter().fold(node + 1, |h, v| (h ^ v).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17))
}

/// A task of `k` inputs whose output mixes them, on the simulator or in this process.
fn mixer(node: u64, k: usize, in_place: bool, on_device: bool) -> Task {
    let mut t = Task::new(format!("n{node}"));
    for p in 0..k {
        t = t.input(&format!("i{p}"), words());
    }
    t = if in_place { t.in_place("i0", "o") } else { t.output("o", words()) };
    if on_device {
        let kernel = Source::Cpu(Arc::new(move |s| {
            // SAFETY: each part writes its own elements only, and reads them before.
            let out = unsafe { s.slice_mut::<u64>(k) };
            s.for_each(|e, _, _| {
                let values: Vec<u64> = (0..k).map(|p| s.slice::<u64>(p)[e]).collect();
                out[e] = mix(node, &values);
            });
        }));
        let args = (0..k).map(|p| Arg::Port(format!("i{p}"))).chain([Arg::port("o")]);
        return t.kernels(Kind::Sim, [Launch::new(kernel, "mix", args)]);
    }
    t.host(move |inv| {
        let first = if in_place { None } else { Some(inv.input::<u64>(0)?) };
        let rest = (1..k).map(|p| inv.input::<u64>(p)).collect::<Result<Vec<_>, _>>()?;
        let out = inv.output::<u64>("o")?;
        for e in 0..N {
            let mut values = vec![first.map_or(out[e], |f| f[e])];
            values.extend(rest.iter().map(|r| r[e]));
            out[e] = mix(node, &values);
        }
        Ok(())
    })
}

#[derive(Clone, Debug)]
struct Node {
    inputs: Vec<usize>,
    in_place: bool,
    on_device: bool,
    drained: bool,
    capacity: usize,
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let node = (
        proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
        any::<bool>(),
        prop::bool::weighted(0.85),
        prop::bool::weighted(0.15),
        1usize..4,
    );
    proptest::collection::vec(node, 2..16).prop_map(|raw| {
        let mut nodes: Vec<Node> = raw
            .into_iter()
            .enumerate()
            .map(|(i, (inputs, in_place, on_device, drained, capacity))| Node {
                inputs: inputs.into_iter().filter(|_| i > 0).map(|ix| ix.index(i)).collect(),
                in_place,
                on_device,
                drained,
                capacity,
            })
            .collect();
        for i in 0..nodes.len() {
            let used = nodes.iter().any(|n| n.inputs.contains(&i));
            nodes[i].drained |= !used;
        }
        nodes
    })
}

/// Runs a random graph and compares every drained value with the reference; returns how many tasks were fused.
fn check(nodes: &[Node], sims: usize, rounds: u64, fusion: bool, mode: Mode) -> usize {
    let mut g = Graph::new("random");
    let (mut ids, mut feeds): (Vec<TaskId>, Vec<_>) = (Vec::new(), Vec::new());
    for (i, n) in nodes.iter().enumerate() {
        let id = g.add(mixer(i as u64, n.inputs.len().max(1), n.in_place, n.on_device)).unwrap();
        if n.inputs.is_empty() {
            feeds.push(g.feed((id, "i0"), n.capacity).unwrap());
        }
        for (p, &j) in n.inputs.iter().enumerate() {
            let to = format!("i{p}");
            g.connect_with((ids[j], "o"), (id, &to), n.capacity, forebay::Predicate::Always).unwrap();
        }
        ids.push(id);
    }
    let drained: Vec<usize> = (0..nodes.len()).filter(|&i| nodes[i].drained).collect();
    let drains: Vec<_> = drained.iter().map(|&i| (i, g.drain((ids[i], "o"), 2).unwrap())).collect();
    let run = sims_runtime(sims, fusion, mode).start(g).unwrap();
    let value = |round: u64, f: usize, e: usize| round.wrapping_mul(1_000_003) ^ (f * N + e) as u64;
    std::thread::scope(|s| {
        s.spawn(|| {
            for round in 0..rounds {
                for (f, feed) in feeds.iter().enumerate() {
                    let data: Vec<u64> = (0..N).map(|e| value(round, f, e)).collect();
                    let block = Datablock::from_slice(words(), &data).unwrap();
                    run.push_timeout(*feed, block, Duration::from_secs(5)).unwrap();
                }
            }
        });
        for round in 0..rounds {
            let mut out: Vec<[u64; N]> = Vec::new();
            let mut fed = 0..;
            for (i, n) in nodes.iter().enumerate() {
                let feed = if n.inputs.is_empty() { fed.next() } else { None };
                out.push(std::array::from_fn(|e| match feed {
                    Some(f) => mix(i as u64, &[value(round, f, e)]),
                    None => mix(i as u64, &n.inputs.iter().map(|&j| out[j][e]).collect::<Vec<_>>()),
                }));
            }
            for (i, d) in &drains {
                let got = run.pull_timeout(*d, Duration::from_secs(5)).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(got.as_slice::<u64>().unwrap(), out[*i], "node {i} in round {round}");
            }
        }
    });
    let snapshot = run.snapshot();
    assert!(snapshot.channels.iter().all(|c| c.len == 0 && c.passed == rounds));
    assert!(snapshot.tasks.iter().all(|t| t.invocations == rounds));
    snapshot.tasks.iter().filter(|t| t.region.is_some()).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 20, ..ProptestConfig::default() })]
    #[test]
    fn fused_graphs_give_what_the_reference_gives(nodes in nodes(), mode in 0usize..4, sims in 1usize..4) {
        check(&nodes, sims, 12, true, Mode::ALL[mode]);
        prop_assert_eq!(check(&nodes, sims, 2, false, Mode::ALL[mode]), 0);
    }
}

fn device_chain(n: usize, capacity: usize) -> (Graph, forebay::Feed, forebay::Drain, Vec<TaskId>) {
    let mut g = Graph::new("chain");
    let ids: Vec<TaskId> = (0..n).map(|i| g.add(mixer(i as u64, 1, i % 2 == 1, true)).unwrap()).collect();
    for w in ids.windows(2) {
        g.connect_with((w[0], "o"), (w[1], "i0"), capacity, forebay::Predicate::Always).unwrap();
    }
    let (f, d) = (g.feed((ids[0], "i0"), capacity).unwrap(), g.drain((ids[n - 1], "o"), capacity).unwrap());
    (g, f, d, ids)
}

#[test]
fn a_chain_and_a_tree_become_one_region_and_priority_keeps_them_apart() {
    let (g, ..) = device_chain(6, 2);
    let run = sim_runtime(true, Mode::default()).start(g).unwrap();
    assert!(regions(&run).iter().all(|r| r.as_deref() == Some("n0 … n5 (6 tasks)")), "{:?}", regions(&run));
    let (g, ..) = device_chain(6, 2);
    assert!(regions(&sim_runtime(true, Mode::Priority).start(g).unwrap()).iter().all(Option::is_none));
    // A tree whose every task has an input of its own: only as a whole does all that leaves depend on all that enters.
    let mut g = Graph::new("steps");
    let mut last: Option<TaskId> = None;
    for i in 0..4 {
        let id = g.add(mixer(i, 2, false, true)).unwrap();
        match last {
            Some(l) => g.connect((l, "o"), (id, "i0")).unwrap(),
            None => drop(g.feed((id, "i0"), 1).unwrap()),
        }
        g.feed((id, "i1"), 1).unwrap();
        last = Some(id);
    }
    g.drain((last.unwrap(), "o"), 1).unwrap();
    let run = sim_runtime(true, Mode::default()).start(g).unwrap();
    assert!(regions(&run).iter().all(|r| r.as_deref() == Some("n0 + n1 + n2 + n3")), "{:?}", regions(&run));
}

/// What could run side by side is left to several devices; a chain goes to one of them, and the next item to another.
#[test]
fn with_several_devices_chains_are_regions_and_go_to_all_of_them() {
    let slow = || {
        let model = Model { launch_ns: 200_000, ..Model::default() };
        SimDevice::new(model)
    };
    let sims: Vec<SimDevice> = (0..2).map(|_| slow()).collect();
    let devices = sims.iter().map(|s| Arc::new(s.clone()) as Arc<dyn forebay::hal::Device>).collect();
    let rt = Runtime::builder().devices(devices).mode(Mode::FirstAvailable).build().unwrap();
    let (g, feed, drain, _) = device_chain(6, 4);
    let run = rt.start(g).unwrap();
    assert!(regions(&run).iter().all(|r| r.as_deref() == Some("n0 … n5 (6 tasks)")), "{:?}", regions(&run));
    let want = |i: u64| [(0..6).fold(i, |v, n| mix(n, &[v])); N];
    let on = || sims.iter().map(SimDevice::launches).collect::<Vec<_>>();
    // The second has a turn when the first has enough to do, which takes its time where the program is held up.
    for _ in 0..50 {
        std::thread::scope(|s| {
            s.spawn(|| {
                for i in 0..200u64 {
                    run.push(feed, Datablock::from_slice(words(), &[i; N]).unwrap()).unwrap();
                }
            });
            for i in 0..200u64 {
                assert_eq!(run.pull(drain).unwrap().as_slice::<u64>().unwrap(), want(i));
            }
        });
        if on().iter().all(|n| *n > 0) {
            break;
        }
    }
    assert!(on().iter().sum::<u64>() >= 200 && on().iter().all(|n| *n > 0), "{:?}", on());
    // A diamond: its branches are two chains, with the ends apart.
    let mut g = Graph::new("diamond");
    let top = g.add(mixer(0, 1, false, true)).unwrap();
    let join = g.add(mixer(9, 2, false, true)).unwrap();
    for branch in 0..2 {
        let ids: Vec<TaskId> = (0..3).map(|i| g.add(mixer(1 + 3 * branch + i, 1, false, true)).unwrap()).collect();
        ids.windows(2).for_each(|w| g.connect((w[0], "o"), (w[1], "i0")).unwrap());
        g.connect((top, "o"), (ids[0], "i0")).unwrap();
        g.connect((ids[2], "o"), (join, &format!("i{branch}"))).unwrap();
    }
    g.feed((top, "i0"), 1).unwrap();
    g.drain((join, "o"), 1).unwrap();
    let run = rt.start(g).unwrap();
    let all = regions(&run);
    let distinct: std::collections::HashSet<_> = all.iter().flatten().collect();
    assert!(distinct.len() == 2 && distinct.iter().all(|r| r.contains(" + ")), "{all:?}");
}

#[test]
fn what_leaves_early_is_not_withheld() {
    // a's output goes to the program, which computes b's second input from it: a and b must not be one.
    let mut g = Graph::new("talk");
    let a = g.add(mixer(0, 1, false, true)).unwrap();
    let b = g.add(mixer(1, 2, false, true)).unwrap();
    g.connect((a, "o"), (b, "i0")).unwrap();
    let (fa, fb) = (g.feed((a, "i0"), 1).unwrap(), g.feed((b, "i1"), 1).unwrap());
    let (da, db) = (g.drain((a, "o"), 1).unwrap(), g.drain((b, "o"), 1).unwrap());
    let run = sim_runtime(true, Mode::default()).start(g).unwrap();
    assert!(regions(&run).iter().all(Option::is_none));
    let wait = Duration::from_secs(10);
    run.push(fa, Datablock::from_slice(words(), &[7u64; N]).unwrap()).unwrap();
    let half = run.pull_timeout(da, wait).unwrap();
    run.push(fb, half.clone()).unwrap();
    let m = mix(0, &[7]);
    assert_eq!(run.pull_timeout(db, wait).unwrap().as_slice::<u64>().unwrap(), [mix(1, &[m, m]); N]);
}

#[test]
fn a_channel_with_a_predicate_stays_a_channel() {
    let (mut g, wait) = (Graph::new("last"), Duration::from_secs(10));
    let a = g.add(mixer(0, 1, false, true)).unwrap();
    let b = g.add(mixer(1, 1, false, true)).unwrap();
    g.connect_with((a, "o"), (b, "i0"), 4, forebay::Predicate::Only(Signals::END_STREAM)).unwrap();
    let (feed, drain) = (g.feed((a, "i0"), 4).unwrap(), g.drain((b, "o"), 4).unwrap());
    let run = sim_runtime(true, Mode::default()).start(g).unwrap();
    assert!(regions(&run).iter().all(Option::is_none));
    for i in 1..=3u64 {
        let block = Datablock::from_slice(words(), &[i; N]).unwrap();
        let mark = if i == 3 { Signals::END_STREAM } else { Signals::NONE };
        run.push(feed, block.with_signals(mark)).unwrap();
    }
    let out = run.pull_timeout(drain, wait).unwrap();
    assert_eq!(out.as_slice::<u64>().unwrap(), [mix(1, &[mix(0, &[3])]); N]);
    assert!(run.pull_timeout(drain, Duration::from_millis(50)).is_err());
}

#[test]
fn a_program_that_pushes_ahead_blocks_no_sooner() {
    let pushed = |fusion: bool| {
        let (g, feed, ..) = device_chain(5, 2);
        let run = sim_runtime(fusion, Mode::default()).start(g).unwrap();
        for i in 0..1000u64 {
            let block = Datablock::from_slice(words(), &[i; N]).unwrap();
            match run.push_timeout(feed, block, Duration::from_millis(100)) {
                Ok(()) => {}
                Err(Error::WouldBlock { .. }) => return i,
                Err(e) => panic!("{e}"),
            }
        }
        panic!("the channel has no bound")
    };
    let (apart, fused) = (pushed(false), pushed(true));
    // 6 channels of 2 and a block in each of 5 tasks.
    assert_eq!(apart, 17);
    assert!((apart..=apart + 1).contains(&fused), "{fused}");
}

#[test]
fn a_fused_task_keeps_its_own_iteration_space() {
    let (g, feed, drain, ids) = device_chain(3, 1);
    let run = sim_runtime(true, Mode::default()).start(g).unwrap();
    let go = |want: [u64; N]| {
        run.push(feed, Datablock::from_slice(words(), &[5u64; N]).unwrap()).unwrap();
        assert_eq!(run.pull(drain).unwrap().as_slice::<u64>().unwrap(), want);
    };
    let after = |n: u64| (0..n).fold(5, |v, i| mix(i, &[v]));
    go([after(3); N]);
    // The second task, in place, does its first element only.
    run.set_geometry(ids[1], Some(Geometry::linear(1))).unwrap();
    let skipped = mix(2, &[after(1)]);
    go([after(3), skipped, skipped]);
    run.set_geometry(ids[1], None).unwrap();
    go([after(3); N]);
}

#[test]
fn memory_inside_a_region_is_used_again() {
    use forebay::hal::Device;
    let sim = SimDevice::new(Model::default());
    let rt = Runtime::builder().devices(vec![Arc::new(sim.clone())]).build().unwrap();
    let mut g = Graph::new("long");
    let ids: Vec<TaskId> = (0..100).map(|i| g.add(mixer(i, 1, false, true)).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], "o"), (w[1], "i0")).unwrap());
    let (f, d) = (g.feed((ids[0], "i0"), 1).unwrap(), g.drain((ids[99], "o"), 1).unwrap());
    let run = rt.start(g).unwrap();
    for i in 0..20u64 {
        run.push(f, Datablock::from_slice(words(), &[i; N]).unwrap()).unwrap();
        run.pull(d).unwrap().as_slice::<u64>().unwrap();
        // In, out, and two that alternate inside; items take turns with the same memory.
        assert_eq!(sim.allocated(), 4 * 8 * N as u64);
    }
    drop(run);
    assert_eq!(sim.allocated(), 0);

    // What shares memory waits for each other: branches do not.
    let mut g = Graph::new("wide");
    let top = g.add(mixer(0, 1, false, true)).unwrap();
    let join = g.add(mixer(1, 4, false, true)).unwrap();
    for branch in 0..4 {
        let ids: Vec<TaskId> = (0..10).map(|i| g.add(mixer(2 + 10 * branch + i, 1, false, true)).unwrap()).collect();
        ids.windows(2).for_each(|w| g.connect((w[0], "o"), (w[1], "i0")).unwrap());
        g.connect((top, "o"), (ids[0], "i0")).unwrap();
        g.connect((ids[9], "o"), (join, &format!("i{branch}"))).unwrap();
    }
    let (f, d) = (g.feed((top, "i0"), 1).unwrap(), g.drain((join, "o"), 1).unwrap());
    let run = rt.start(g).unwrap();
    run.push(f, Datablock::from_slice(words(), &[1u64; N]).unwrap()).unwrap();
    run.pull(d).unwrap().as_slice::<u64>().unwrap();
    // In, out, the one that all branches read, and two that alternate in each branch.
    assert_eq!(sim.allocated(), 11 * 8 * N as u64);
}

const KERNELS: &str = "KERNEL void affine(GLOBAL const uint *x, GLOBAL uint *y, uint n) {
  uint i = gid_x();
  if (i < n) y[i] = 2u * x[i] + 1u;
}
KERNEL void add(GLOBAL const uint *a, GLOBAL const uint *b, GLOBAL uint *y, uint n) {
  uint i = gid_x();
  if (i < n) y[i] = a[i] + b[i];
}
KERNEL void wild(GLOBAL const uint *x, GLOBAL uint *y, uint n) {
  y[gid_x() + ((ulong)x[0] << 40)] = n;
}";

fn portable(name: &str, entry: &str, inputs: &[&str], kind: Kind) -> Task {
    let t = Template::array::<u32>([1000]);
    let task = inputs.iter().fold(Task::new(name), |task, i| task.input(i, t)).output("y", t);
    let args = inputs.iter().map(|i| Arg::port(i)).chain([Arg::port("y"), Arg::Items(0)]);
    task.kernels(kind, [Launch::new(Source::Portable(KERNELS.into()), entry, args)])
}

#[test]
fn where_kernels_run_side_by_side_an_invocation_has_other_memory_than_the_one_before() {
    let (devices, why) = forebay::hal::discover(&[Kind::OpenCl]);
    let Some(d) = devices.into_iter().find(|d| d.kernels_beside()) else { return eprintln!("skipped: {why:?}") };
    let rt = Runtime::builder().devices(vec![d.clone()]).build().unwrap();
    let mut g = Graph::new("chain");
    let ids = ["a", "b", "c", "d"].map(|n| g.add(portable(n, "affine", &["x"], Kind::OpenCl)).unwrap());
    ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
    let (feed, drain) = (g.feed((ids[0], "x"), 1).unwrap(), g.drain((ids[3], "y"), 1).unwrap());
    let before = d.allocated();
    let run = rt.start(g).unwrap();
    // Two pieces alternate inside, and invocations alternate between two of each.
    assert_eq!(d.allocated() - before, 4 * 4000);
    for v in 0..10u32 {
        run.push(feed, Datablock::from_slice(Template::array::<u32>([1000]), &[v; 1000]).unwrap()).unwrap();
        assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), [16 * v + 15; 1000]);
    }
}

/// A diamond on a real device: two ways from one block, joined, over and over with other blocks.
fn diamond(kind: Kind) {
    let rt = match Runtime::builder().only(kind) {
        Ok(b) => b.build().unwrap(),
        Err(e) => return eprintln!("skipped: {e}"),
    };
    let mut g = Graph::new("diamond");
    let top = g.add(portable("top", "affine", &["x"], kind)).unwrap();
    let (l, r) = (["left", "right"].map(|n| g.add(portable(n, "affine", &["x"], kind)).unwrap())).into();
    let join = g.add(portable("join", "add", &["a", "b"], kind)).unwrap();
    g.connect((top, "y"), (l, "x")).unwrap();
    g.connect((top, "y"), (r, "x")).unwrap();
    g.connect((l, "y"), (join, "a")).unwrap();
    g.connect((r, "y"), (join, "b")).unwrap();
    let (feed, drain) = (g.feed((top, "x"), 4).unwrap(), g.drain((join, "y"), 4).unwrap());
    let run = rt.start(g).unwrap();
    assert!(regions(&run).iter().all(Option::is_some));
    let t = Template::array::<u32>([1000]);
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..40u32 {
                run.push(feed, Datablock::from_slice(t, &vec![i; 1000]).unwrap()).unwrap();
            }
        });
        let mut held = Vec::new();
        for i in 0..40u32 {
            let out = run.pull_timeout(drain, Duration::from_secs(30)).unwrap();
            assert_eq!(out.as_slice::<u32>().unwrap(), vec![2 * (2 * (2 * i + 1) + 1); 1000]);
            // Some results are kept, so that pools cannot give the same memory every time.
            if i % 3 == 0 {
                held.push(out);
            }
        }
    });
}

#[test]
fn a_diamond_on_opencl() {
    diamond(Kind::OpenCl);
}

#[test]
fn a_diamond_on_cuda() {
    diamond(Kind::Cuda);
}

#[test]
fn a_diamond_on_cuda_with_the_stand_in() {
    stand_in::again("a_diamond_on_cuda");
    stand_in::again_as_ptx(&["a_diamond_on_cuda"], &[]);
}

/// With nothing said: tasks that could run on the CPU as well are put together on a GPU, where they belong. Where any free
/// device is taken they stay apart.
#[test]
fn tasks_of_the_cpu_and_a_gpu_are_one_on_the_gpu() {
    const NAME: &str = "tasks_of_the_cpu_and_a_gpu_are_one_on_the_gpu";
    if !stand_in::is_here() {
        return stand_in::again(NAME);
    }
    let t = Template::array::<u32>([1000]);
    for (mode, fused) in [(Mode::DataAware, true), (Mode::FirstAvailable, false)] {
        let rt = Runtime::builder().mode(mode).build().unwrap();
        let mut g = Graph::new("chain");
        let task = |n| {
            portable(n, "affine", &["x"], Kind::Cuda).host(|inv| {
                let (x, y) = (inv.input::<u32>("x")?, inv.output::<u32>("y")?);
                y.iter_mut().zip(x).for_each(|(y, x)| *y = 2 * x + 1);
                Ok(())
            })
        };
        let ids = ["a", "b", "c"].map(|n| g.add(task(n)).unwrap());
        ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
        let (feed, drain) = (g.feed((ids[0], "x"), 1).unwrap(), g.drain((ids[2], "y"), 1).unwrap());
        let run = rt.start(g).unwrap();
        assert!(regions(&run).iter().all(|r| r.is_some() == fused), "{mode}: {:?}", regions(&run));
        for v in 0..10u32 {
            run.push(feed, Datablock::from_slice(t, &[v; 1000]).unwrap()).unwrap();
            assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), [8 * v + 7; 1000]);
        }
        let first = &run.snapshot().tasks[0];
        assert!(!fused || first.by_device[0] == 0 && first.by_device[1] == 10, "{first:?}");
    }
}

/// A kernel that writes where it must not costs its graph, and nothing else; on a real GPU or its stand-in.
#[test]
fn a_faulting_cuda_context_is_contained() {
    // The context is the process's, so other tests of this program must not share it.
    if !stand_in::alone("a_faulting_cuda_context_is_contained") {
        return;
    }
    let rt = match Runtime::builder().only(Kind::Cuda) {
        Ok(b) => b.build().unwrap(),
        Err(e) => return eprintln!("skipped: {e}"),
    };
    let t = Template::array::<u32>([1000]);
    let mut g = Graph::new("gpu");
    let a = g.add(portable("wild", "wild", &["x"], Kind::Cuda)).unwrap();
    let (feed, drain) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    let gpu = rt.start(g).unwrap();
    let mut g = Graph::new("cpu");
    let b = g.add(mixer(0, 1, false, false)).unwrap();
    let (cf, cd) = (g.feed((b, "i0"), 1).unwrap(), g.drain((b, "o"), 1).unwrap());
    let cpu = rt.start(g).unwrap();
    // What the CPU can do as well goes on there.
    let either = || {
        let task = portable("either", "affine", &["x"], Kind::Cuda).host(|inv| {
            let (x, y) = (inv.input::<u32>("x")?, inv.output::<u32>("y")?);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = x.wrapping_mul(2).wrapping_add(1));
            Ok(())
        });
        let mut g = Graph::new("either");
        let t = g.add(task).unwrap();
        let ends = (g.feed((t, "x"), 1).unwrap(), g.drain((t, "y"), 1).unwrap());
        (rt.start(g).unwrap(), ends)
    };
    let does = |(run, (feed, drain)): &(forebay::Running, (forebay::Feed, forebay::Drain)), v: u32| {
        let mut block = run.acquire(*feed)?;
        block.assign(&[v; 1000])?;
        run.push(*feed, block)?;
        assert_eq!(run.pull(*drain)?.as_slice::<u32>()?, [2 * v + 1; 1000]);
        Ok::<_, forebay::Error>(())
    };
    let before = either();
    (0..10).for_each(|v| does(&before, v).unwrap());
    let on_gpu = before.0.snapshot().tasks[0].by_device[1];
    assert_eq!(on_gpu, 10);
    let go = |first: u32| {
        gpu.push(feed, Datablock::from_slice(t, &vec![first; 1000]).unwrap())?;
        gpu.pull_timeout(drain, Duration::from_secs(30))?.as_slice::<u32>().map(|_| ())
    };
    go(0).unwrap();
    let first = go(1).unwrap_err().to_string();
    assert!(first.contains("ILLEGAL_ADDRESS"), "{first}");
    // Once more, so that the failure has met the graph itself; it names the task and the cause.
    let again = go(0).unwrap_err().to_string();
    assert!(again.contains("ILLEGAL_ADDRESS"), "{again}");
    cpu.push(cf, Datablock::from_slice(words(), &[3u64; N]).unwrap()).unwrap();
    assert_eq!(cpu.pull(cd).unwrap().as_slice::<u64>().unwrap(), [mix(0, &[3]); N]);
    // The device is gone for new work too, with the cause, and the process lives.
    let mut g = Graph::new("later");
    let c = g.add(portable("later", "affine", &["x"], Kind::Cuda)).unwrap();
    let (lf, ld) = (g.feed((c, "x"), 1).unwrap(), g.drain((c, "y"), 1).unwrap());
    let late = rt.start(g).and_then(|run| {
        run.push(lf, Datablock::from_slice(t, &vec![0u32; 1000])?)?;
        run.pull_timeout(ld, Duration::from_secs(30))?.as_slice::<u32>().map(|_| ())
    });
    let late = late.unwrap_err().to_string();
    assert!(late.contains("lost") && late.contains("ILLEGAL_ADDRESS"), "{late}");
    let unused = rt.unused();
    assert!(matches!(&unused[..], [(_, forebay::hal::Error::Lost { .. })]), "{unused:?}");
    for graph in [before, either()] {
        (0..10).for_each(|v| does(&graph, v).unwrap());
        assert_eq!(graph.0.snapshot().tasks[0].by_device[0], 10);
    }
}

#[test]
fn a_faulting_cuda_context_is_contained_with_the_stand_in() {
    stand_in::again("a_faulting_cuda_context_is_contained");
}
