//! What was put together for a device that is lost, or full, is done one by one on the host.

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::Device;
use forebay::hal::sim::{Model, SimDevice};
use forebay::place::Models;
use forebay::{Arg, Drain, Error, Feed, Graph, Kind, Launch, Running, Runtime, Signals, Source, Task, Template};

use super::MEMORY;

const N: usize = 500;

/// `o = 3 x + b`, where the CPU has kernels, or functions.
fn first(kernels: bool) -> Task {
    let t = Template::array::<u32>([N]);
    let source = || {
        Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let (x, b, o) = (s.slice::<u32>(0), s.slice::<u32>(1), unsafe { s.slice_mut::<u32>(2) });
            s.for_each(|i, _, _| o[i] = 3 * x[i] + b[0]);
        }))
    };
    let launch = || [Launch::new(source(), "first", ["x", "b", "o"].map(Arg::port))];
    let task = Task::new("first").input("x", t).sticky("b", Template::array::<u32>([1])).output("o", t);
    let task = task.kernels(Kind::Sim, launch());
    if kernels {
        return task.kernels(Kind::Cpu, launch());
    }
    task.host(|inv| {
        let (x, b, o) = (inv.input::<u32>("x")?, inv.value::<u32>("b")?, inv.output::<u32>("o")?);
        o.iter_mut().zip(x).for_each(|(o, x)| *o = 3 * x + b);
        Ok(())
    })
}

/// `o = 5 x + y`.
fn second(kernels: bool) -> Task {
    let t = Template::array::<u32>([N]);
    let source = || {
        Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let (x, y, o) = (s.slice::<u32>(0), s.slice::<u32>(1), unsafe { s.slice_mut::<u32>(2) });
            s.for_each(|i, _, _| o[i] = 5 * x[i] + y[i]);
        }))
    };
    let launch = || [Launch::new(source(), "second", ["x", "y", "o"].map(Arg::port))];
    let task = Task::new("second").input("x", t).input("y", t).output("o", t).kernels(Kind::Sim, launch());
    if kernels {
        return task.kernels(Kind::Cpu, launch());
    }
    task.host(|inv| {
        let (x, y, o) = (inv.input::<u32>("x")?, inv.input::<u32>("y")?, inv.output::<u32>("o")?);
        o.iter_mut().zip(x.iter().zip(y)).for_each(|(o, (x, y))| *o = 5 * x + y);
        Ok(())
    })
}

/// `o = x + 2`.
fn plain(kernels: bool) -> Task {
    let t = Template::array::<u32>([N]);
    let source = || {
        Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let (x, o) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
            s.for_each(|i, _, _| o[i] = x[i] + 2);
        }))
    };
    let launch = || [Launch::new(source(), "plain", ["x", "o"].map(Arg::port))];
    let task = Task::new("plain").input("x", t).output("o", t).kernels(Kind::Sim, launch());
    if kernels {
        return task.kernels(Kind::Cpu, launch());
    }
    task.host(|inv| {
        let (x, o) = (inv.input::<u32>("x")?, inv.output::<u32>("o")?);
        o.iter_mut().zip(x).for_each(|(o, x)| *o = x + 2);
        Ok(())
    })
}

/// `x += 1`, by kernels or by a function.
fn more(name: &str, kernels: bool) -> Task {
    let source = || {
        Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let x = unsafe { s.slice_mut::<u32>(0) };
            s.for_each(|i, _, _| x[i] += 1);
        }))
    };
    let launch = || [Launch::new(source(), "more", [Arg::port("x")])];
    let task = Task::new(name).inout("x", Template::array::<u32>([N])).kernels(Kind::Sim, launch());
    if kernels {
        return task.kernels(Kind::Cpu, launch());
    }
    task.host(|inv| {
        inv.output::<u32>("x")?.iter_mut().for_each(|x| *x += 1);
        Ok(())
    })
}

struct Region {
    run: Running,
    /// What is scaled, and what is added in the first task.
    feeds: [Feed; 2],
    drains: [Drain; 2],
    /// What comes in is overwritten in place.
    in_place: bool,
}

impl Region {
    /// A first task, whose output leaves and goes to a second one twice; behind that a third, and a last one in place.
    fn start(rt: &Runtime, kernels: bool, in_place: bool) -> Self {
        let mut g = Graph::new("region");
        let entry = in_place.then(|| g.add(more("entry", kernels)).unwrap());
        let (first, second) = (g.add(first(kernels)).unwrap(), g.add(second(kernels)).unwrap());
        let (third, last) = (g.add(plain(kernels)).unwrap(), g.add(more("last", kernels)).unwrap());
        let into = entry.map_or((first, "x"), |e| {
            g.connect((e, "x"), (first, "x")).unwrap();
            (e, "x")
        });
        g.connect((first, "o"), (second, "x")).unwrap();
        g.connect((first, "o"), (second, "y")).unwrap();
        g.connect((second, "o"), (third, "x")).unwrap();
        g.connect((third, "o"), (last, "x")).unwrap();
        let x = g.feed(into, 4).unwrap();
        let b = g.feed((first, "b"), 4).unwrap();
        let drains = [g.drain((first, "o"), 4).unwrap(), g.drain((last, "x"), 4).unwrap()];
        let run = rt.start(g).unwrap();
        let me = Region { run, feeds: [x, b], drains, in_place };
        assert!(me.run.snapshot().tasks.iter().all(|t| t.region.is_some()), "nothing was put together");
        me
    }

    /// Replaces what is at the sticky port.
    fn add(&self, v: u32) {
        let mut block = self.run.acquire(self.feeds[1]).unwrap();
        block.assign(&[v]).unwrap();
        self.run.push(self.feeds[1], block).unwrap();
    }

    fn item(&self, v: u32, b: u32) -> Result<(), Error> {
        let mut block = self.run.acquire(self.feeds[0])?;
        block.assign(&std::array::from_fn::<u32, N, _>(|i| v + i as u32))?;
        block = block.with_signals(Signals::END_STREAM);
        self.run.push(self.feeds[0], block.clone())?;
        let outs = [self.run.pull(self.drains[0])?, self.run.pull(self.drains[1])?];
        for i in 0..N {
            let first = 3 * (v + i as u32 + u32::from(self.in_place)) + b;
            assert_eq!(outs[0].as_slice::<u32>()?[i], first, "what leaves between two of them");
            assert_eq!(outs[1].as_slice::<u32>()?[i], 6 * first + 2 + 1);
        }
        assert!(outs.iter().all(|o| o.signals() == Signals::END_STREAM), "marks go with the data");
        // Nobody keeps what came in.
        block.assign(&[0u32; N])
    }
}

fn one_device() -> (SimDevice, Runtime) {
    let sim =
        SimDevice::new(Model { name: "gone".into(), memory_bytes: MEMORY, strength: 1 << 20, ..Model::default() });
    let b = Runtime::builder().devices(vec![Arc::new(sim.clone())]).workers(2).service(false);
    let rt = b.models(Arc::new(Models::off())).build().unwrap();
    (sim, rt)
}

#[test]
fn a_region_goes_on_without_its_device() {
    for kernels in [true, false] {
        let (gone, rt) = one_device();
        let region = Region::start(&rt, kernels, false);
        region.add(11);
        (0..10).for_each(|v| region.item(v, 11).unwrap());
        assert!(gone.launches() >= 30, "{}", gone.launches());
        gone.unplug();
        // What is at the sticky port is there yet, on the host.
        (0..10).for_each(|v| region.item(v, 11).unwrap());
        region.add(13);
        (0..10).for_each(|v| region.item(v, 13).unwrap());
        let refused = &region.run.snapshot().tasks[0].refused;
        assert!(matches!(&refused[..], [(1, why)] if why.contains("lost")), "{refused:?}");
        // One that begins now has nothing to put together.
        assert_eq!(rt.unused().len(), 1);
    }
}

#[test]
fn a_region_without_room_is_done_by_the_host_until_there_is_some() {
    for kernels in [true, false] {
        let (sim, rt) = one_device();
        let region = Region::start(&rt, kernels, false);
        region.add(1);
        (0..10).for_each(|v| region.item(v, 1).unwrap());
        let before = sim.launches();
        assert!(before > 0);
        // A launch that finds no memory, as when the driver wants some for itself.
        sim.refuse(0, 1);
        (0..10).for_each(|v| region.item(v, 1).unwrap());
        assert_eq!(sim.launches(), before, "it is left alone for a second");
        let refused = &region.run.snapshot().tasks[0].refused;
        assert!(matches!(&refused[..], [(1, why)] if why.contains("no memory is left on gone")), "{refused:?}");
        std::thread::sleep(Duration::from_millis(1100));
        (0..10).for_each(|v| region.item(v, 1).unwrap());
        assert!(sim.launches() > before, "it has room again");
    }
}

/// Where its input is overwritten in place, and that may be half done, it fails once.
#[test]
fn a_region_in_place_goes_on_once_it_is_reset() {
    for (kernels, full) in [(true, false), (false, false), (true, true), (false, true)] {
        let (gone, rt) = one_device();
        let region = Region::start(&rt, kernels, true);
        region.add(2);
        (0..5).for_each(|v| region.item(v, 2).unwrap());
        assert!(gone.launches() > 0);
        if full {
            gone.refuse(1, 1);
            assert!(region.item(0, 2).is_err());
            region.run.reset().unwrap();
            region.run.run().unwrap();
            region.add(2);
        } else {
            // Nothing has begun there, and the host has the input.
            gone.unplug();
        }
        (0..5).for_each(|v| region.item(v, 2).unwrap());
    }
}

/// Memory of a region that never had room is no reason not to begin.
#[test]
fn a_graph_begins_where_a_region_has_no_room() {
    let (sim, rt) = one_device();
    let others = sim.alloc((MEMORY - sim.allocated() - 512) as usize).unwrap();
    let region = Region::start(&rt, true, false);
    region.add(1);
    (0..5).for_each(|v| region.item(v, 1).unwrap());
    assert_eq!(sim.launches(), 0);
    let refused = &region.run.snapshot().tasks[0].refused;
    assert!(matches!(&refused[..], [(1, why)] if why.contains("out of memory")), "{refused:?}");
    drop((region, others));
    let region = Region::start(&rt, true, false);
    region.add(1);
    (0..5).for_each(|v| region.item(v, 1).unwrap());
    assert!(sim.launches() > 0);
}
