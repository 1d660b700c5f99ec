//! A device that falls off while graphs run, or has no room: what was under way on it fails and says so, and everything else
//! goes on.

mod cuda;
#[path = "../../../forebay-hal/tests/stand_in/bytes.rs"]
mod given_out;
mod random;
mod regions;
#[path = "../../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::sim::{Model, SimDevice};
use forebay::hal::{self, Device};
use forebay::place::Models;
use forebay::{
    Arg, Datablock, Drain, Error, Feed, Graph, Kind, Launch, Mode, Running, Runtime, Signals, Source, Task, Template,
};

const N: usize = 1000;
const TASKS: u32 = 3;
/// Of a small device.
const MEMORY: u64 = 1 << 20;

/// `y = 2x + 1`.
fn affine() -> Source {
    Source::Cpu(Arc::new(|s| {
        // SAFETY: each part writes its own elements only.
        let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
        s.for_each(|i, _, _| y[i] = 2 * x[i] + 1);
    }))
}

fn task(name: &str, kinds: &[Kind]) -> Task {
    let t = Template::array::<u32>([N]);
    kinds.iter().fold(Task::new(name).input("x", t).output("y", t), |task, &kind| {
        task.kernels(kind, [Launch::new(affine(), "affine", [Arg::port("x"), Arg::port("y"), Arg::Items(0)])])
    })
}

/// A chain of tasks.
fn chain(kinds: &[Kind]) -> (Graph, Feed, Drain) {
    let mut g = Graph::new("chain");
    let ids: Vec<_> = (0..TASKS).map(|i| g.add(task(&format!("t{i}"), kinds)).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
    let ends = (g.feed((ids[0], "x"), 4).unwrap(), g.drain((ids[ids.len() - 1], "y"), 4).unwrap());
    (g, ends.0, ends.1)
}

fn item(run: &Running, feed: Feed, drain: Drain, v: u32) -> Result<(), Error> {
    // Blocks of the graph, as a program that never allocates has them.
    let mut block = run.acquire(feed)?;
    block.assign(&[v; N])?;
    run.push(feed, block)?;
    let out = run.pull(drain)?;
    let want = (0..TASKS).fold(v, |v, _| 2 * v + 1);
    assert!(out.as_slice::<u32>()?.iter().all(|y| *y == want));
    Ok(())
}

/// Two devices, the first of them much stronger, and the CPU.
fn two(mode: Mode, fusion: bool) -> (SimDevice, Runtime) {
    let gone =
        SimDevice::new(Model { name: "gone".into(), strength: 1 << 20, memory_bytes: MEMORY, ..Model::default() });
    let here = SimDevice::new(Model { name: "here".into(), ..Model::default() });
    let devices: Vec<Arc<dyn Device>> = vec![Arc::new(gone.clone()), Arc::new(here)];
    let b = Runtime::builder().devices(devices).mode(mode).fusion(fusion).workers(2).service(false);
    let rt = b.models(Arc::new(Models::off())).build().unwrap();
    (gone, rt)
}

#[test]
fn what_others_can_do_goes_on_without_a_device_that_is_lost() {
    for (mode, fusion) in Mode::ALL.into_iter().flat_map(|m| [(m, true), (m, false)]) {
        let (gone, rt) = two(mode, fusion);
        let (g, feed, drain) = chain(&[Kind::Cpu, Kind::Sim]);
        let run = rt.start(g).unwrap();
        (0..50).for_each(|v| item(&run, feed, drain, v).unwrap());
        assert!(gone.launches() > 0 && rt.unused().is_empty(), "{mode}");
        gone.unplug();
        // Nothing is under way there, and all inputs are the program's.
        (0..50).for_each(|v| item(&run, feed, drain, v).unwrap());
        // So do graphs that begin now, by which at the latest it is noticed.
        let (g, feed, drain) = chain(&[Kind::Cpu, Kind::Sim]);
        let later = rt.start(g).unwrap();
        (0..50).for_each(|v| item(&later, feed, drain, v).unwrap());
        let unused = rt.unused();
        assert!(matches!(&unused[..], [(name, hal::Error::Lost { .. })] if name == "gone"), "{mode}: {unused:?}");
    }
}

#[test]
fn a_graph_begins_without_a_device_that_nobody_has_seen_vanish() {
    for mode in Mode::ALL {
        let (gone, rt) = two(mode, true);
        gone.unplug();
        let (g, feed, drain) = chain(&[Kind::Cpu, Kind::Sim]);
        let run = rt.start(g).unwrap();
        (0..10).for_each(|v| item(&run, feed, drain, v).unwrap());
        assert_eq!(rt.unused().len(), 1, "{mode}");
    }
}

#[test]
fn what_only_a_lost_device_had_fails_once_and_the_graph_can_begin_anew() {
    for mode in Mode::ALL {
        // One task each, or there would be nothing between them.
        let (gone, rt) = two(mode, false);
        let t = Template::array::<u32>([N]);
        let mut g = Graph::new("sum");
        let first = g.add(task("first", &[Kind::Sim])).unwrap();
        let sum = Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let (x, y, z) = (s.slice::<u32>(0), s.slice::<u32>(1), unsafe { s.slice_mut::<u32>(2) });
            s.for_each(|i, _, _| z[i] = x[i] + y[i]);
        }));
        let args = ["x", "y", "z"].map(Arg::port);
        let both = Task::new("sum").input("x", t).input("y", t).output("z", t);
        let both = [Kind::Cpu, Kind::Sim]
            .into_iter()
            .fold(both, |task, kind| task.kernels(kind, [Launch::new(sum.clone(), "sum", args.clone())]));
        let second = g.add(both).unwrap();
        g.connect((first, "y"), (second, "x")).unwrap();
        let (x, y) = (g.feed((first, "x"), 4).unwrap(), g.feed((second, "y"), 4).unwrap());
        let drain = g.drain((second, "z"), 4).unwrap();
        let run = rt.start(g).unwrap();
        let push = |feed, v: u32| {
            let mut block = run.acquire(feed).unwrap();
            block.assign(&[v; N]).unwrap();
            run.push(feed, block)
        };
        let last = || Ok::<_, Error>(run.pull(drain)?.as_slice::<u32>()?[N - 1]);
        let mut made = 0;
        // What the first task makes is on the stronger device, and waits for the other input.
        loop {
            let before = gone.launches();
            push(x, 1).unwrap();
            made += 1;
            while run.snapshot().tasks[0].invocations < made {
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            if gone.launches() > before {
                break;
            }
            push(y, 10).unwrap();
            assert_eq!(last().unwrap(), 13);
        }
        gone.unplug();
        let failed = push(y, 10).and_then(|()| last()).unwrap_err();
        assert!(failed.to_string().contains("gone is lost: unplugged"), "{mode}: {failed}");
        run.reset().unwrap();
        run.run().unwrap();
        for v in 0..20 {
            push(x, v).unwrap();
            push(y, v).unwrap();
            assert_eq!(last().unwrap(), 3 * v + 1);
        }
    }
}

/// A task that doubles in place, by two kernels, and one item through it.
fn doubled(rt: &Runtime) -> impl FnMut(u32) -> Result<(), Error> + use<> {
    let by = |factor: u32| {
        Source::Cpu(Arc::new(move |s| {
            // SAFETY: each part writes its own elements only.
            let x = unsafe { s.slice_mut::<u32>(0) };
            s.for_each(|i, _, _| x[i] *= factor);
        }))
    };
    let launch = |factor| Launch::new(by(factor), "times", [Arg::port("x"), Arg::Items(0)]);
    let task = [Kind::Cpu, Kind::Sim]
        .into_iter()
        .fold(Task::new("six").inout("x", Template::array::<u32>([N])), |t, kind| t.kernels(kind, [2, 3].map(launch)));
    let mut g = Graph::new("in place");
    let t = g.add(task).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 4).unwrap(), g.drain((t, "x"), 4).unwrap());
    let run = rt.start(g).unwrap();
    move |v| {
        let one = || {
            let mut block = run.acquire(feed)?;
            block.assign(&[v; N])?;
            block.set_meta(b"its own")?;
            run.push(feed, block.with_signals(Signals::END_STREAM))?;
            let out = run.pull(drain)?;
            assert_eq!(out.as_slice::<u32>()?[N - 1], 6 * v);
            assert_eq!((out.meta().as_deref(), out.signals()), (Some(&b"its own"[..]), Signals::END_STREAM));
            Ok::<_, Error>(())
        };
        one().inspect_err(|_| {
            run.reset().unwrap();
            run.run().unwrap();
        })
    }
}

/// Where nothing of it has begun it is done elsewhere; the device is lost, or full.
#[test]
fn what_is_done_in_place_goes_on() {
    for (mode, full) in Mode::ALL.into_iter().flat_map(|m| [(m, false), (m, true)]) {
        let (gone, rt) = two(mode, true);
        let mut one = doubled(&rt);
        (0..10).for_each(|v| one(v).unwrap());
        // The end of a graph gives back what its runtime keeps for another use.
        drop(rt.start(chain(&[Kind::Cpu]).0).unwrap());
        let others = full.then(|| gone.alloc((MEMORY - gone.allocated()) as usize).unwrap());
        if !full {
            gone.unplug();
        }
        (0..10).for_each(|v| one(v).unwrap());
        drop(others);
    }
}

/// What is half overwritten can't be done again.
#[test]
fn what_is_done_in_place_fails_once() {
    for mode in Mode::ALL {
        let (gone, rt) = two(mode, true);
        let mut one = doubled(&rt);
        (0..10).for_each(|v| one(v).unwrap());
        gone.refuse(1, 1);
        let failed = (0..10).filter(|v| one(*v).is_err()).count();
        // Adaptive placement may have left it already.
        assert!(failed == 1 || failed == 0 && mode == Mode::Adaptive, "{mode}: {failed}");
    }
}

#[test]
fn calls_go_on_without_a_device_that_is_lost() {
    for mode in Mode::ALL {
        let (gone, rt) = two(mode, true);
        let called = rt.accelerate(3, || task("called", &[Kind::Cpu, Kind::Sim])).unwrap();
        let call = |v: u32| -> Result<Vec<u32>, Error> {
            let x = Datablock::from_slice(Template::array::<u32>([N]), &[v; N])?;
            Ok(called.call(&[x])?[0].as_slice::<u32>()?.to_vec())
        };
        (0..20).for_each(|v| assert_eq!(call(v).unwrap(), [2 * v + 1; N]));
        assert!(gone.launches() > 0, "{mode}");
        // Some are under way, and may be lost: their results were there.
        let under_way: Vec<_> = (0..3u32)
            .map(|v| {
                let x = Datablock::from_slice(Template::array::<u32>([N]), &[v; N]).unwrap();
                called.spawn(&[x]).unwrap()
            })
            .collect();
        gone.unplug();
        for (v, pending) in (0u32..).zip(under_way) {
            match pending.wait().and_then(|out| Ok(out[0].as_slice::<u32>()?.to_vec())) {
                Ok(y) => assert_eq!(y, [2 * v + 1; N]),
                Err(why) => assert!(why.to_string().contains("lost"), "{mode}: {why}"),
            }
        }
        (0..20).for_each(|v| assert_eq!(call(v).unwrap(), [2 * v + 1; N], "{mode}"));
    }
}

/// As a GPU that somebody else has filled, and gives back later.
#[test]
fn what_has_no_room_on_a_device_is_done_elsewhere_until_there_is_some() {
    for mode in Mode::ALL {
        let sim = SimDevice::new(Model { memory_bytes: MEMORY, strength: 1 << 20, ..Model::default() });
        // One task each: a region for the device alone has nowhere else to go.
        let b = Runtime::builder().devices(vec![Arc::new(sim.clone())]).mode(mode).fusion(false).workers(2);
        let rt = b.service(false).models(Arc::new(Models::off())).build().unwrap();
        // A chain of tasks for the device and the CPU, where the CPU is never faster.
        let mut g = Graph::new("chain");
        let ids: Vec<_> = (0..TASKS)
            .map(|i| {
                let task = task(&format!("t{i}"), &[Kind::Sim]).host(|inv| {
                    std::thread::sleep(Duration::from_millis(2));
                    let (x, y) = (inv.input::<u32>("x")?, inv.output::<u32>("y")?);
                    y.iter_mut().zip(x).for_each(|(y, x)| *y = 2 * x + 1);
                    Ok(())
                });
                g.add(task).unwrap()
            })
            .collect();
        ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
        let (feed, drain) = (g.feed((ids[0], "x"), 4).unwrap(), g.drain((ids[2], "y"), 4).unwrap());
        let run = rt.start(g).unwrap();
        let all = |of: u32| (0..of).for_each(|v| item(&run, feed, drain, v).unwrap());
        all(20);
        let before = sim.launches();
        assert!(before > 0, "{mode}");
        // Room for one block, and then for none. The end of a graph gives back what its runtime keeps for another use.
        for room in [4 * N as u64, 0] {
            drop(rt.start(chain(&[Kind::Cpu]).0).unwrap());
            let others = sim.alloc((MEMORY - sim.allocated() - room) as usize).unwrap();
            let (before, copied) = (sim.launches(), rt.copied()[1]);
            all(10);
            assert_eq!(sim.launches(), before, "{mode}");
            // Each task has tried it once.
            assert!(rt.copied()[1] - copied <= u64::from(TASKS) * 4 * N as u64, "{mode}");
            let refused = &run.snapshot().tasks[0].refused;
            assert!(matches!(&refused[..], [(1, why)] if why.contains("out of memory")), "{mode}: {refused:?}");
            drop(others);
            // It is left alone for a second.
            std::thread::sleep(Duration::from_millis(1100));
            all(10);
            assert!(sim.launches() > before, "{mode}: it has room again");
        }
    }
}

#[test]
fn what_nothing_else_does_is_an_error_that_says_why() {
    for mode in Mode::ALL {
        let gone = SimDevice::new(Model { name: "gone".into(), ..Model::default() });
        let rt = Runtime::builder()
            .devices(vec![Arc::new(gone.clone())])
            .mode(mode)
            .service(false)
            .models(Arc::new(Models::off()))
            .build()
            .unwrap();
        let (g, feed, drain) = chain(&[Kind::Sim]);
        let run = rt.start(g).unwrap();
        item(&run, feed, drain, 1).unwrap();
        gone.unplug();
        for _ in 0..2 {
            let failed = item(&run, feed, drain, 2).unwrap_err();
            assert!(failed.to_string().contains("gone is lost: unplugged"), "{mode}: {failed}");
            run.reset().unwrap();
            run.run().unwrap();
        }
        let refused = rt.start(chain(&[Kind::Sim]).0).map(drop).unwrap_err();
        assert!(matches!(&refused, Error::Task { why, .. } if why.contains("lost")), "{mode}: {refused}");
    }
}
