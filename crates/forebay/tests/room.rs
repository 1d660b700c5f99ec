//! Ports of records and bytes take blocks that have room for less. Whoever writes in place, or indexes as the port's template
//! says, has the port's room all the same.

use std::sync::Arc;

use forebay::hal::Device;
use forebay::hal::sim::{Model, SimDevice};
use forebay::{Arg, Datablock, Drain, Feed, Graph, Kind, Launch, Running, Runtime, Signals, Source, Task, Template};

const LESS: usize = 10;
const ROOM: usize = 20;

fn less() -> Template {
    Template::records::<u32>(LESS)
}

fn room() -> Template {
    Template::records::<u32>(ROOM)
}

fn runtime(fusion: bool) -> Runtime {
    let sim: Arc<dyn Device> = Arc::new(SimDevice::new(Model::default()));
    Runtime::builder().devices(vec![sim]).fusion(fusion).service(false).build().unwrap()
}

fn start(rt: &Runtime, tasks: Vec<Task>, ports: (&str, &str)) -> (Running, Feed, Drain) {
    let mut g = Graph::new("room");
    let ids: Vec<_> = tasks.into_iter().map(|t| g.add(t).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], ports.1), (w[1], ports.0)).unwrap());
    let (feed, drain) = (g.feed((ids[0], ports.0), 2).unwrap(), g.drain((ids[ids.len() - 1], ports.1), 2).unwrap());
    (rt.start(g).unwrap(), feed, drain)
}

fn given(n: usize) -> Datablock {
    let all: Vec<u32> = (0..n as u32).collect();
    Datablock::from_slice(less(), &all).unwrap().with_signals(Signals::END_STREAM)
}

#[test]
fn what_is_written_in_place_has_the_ports_room() {
    let rt = runtime(true);
    // Shared with the program, and its own.
    for shared in [false, true] {
        let grow = Task::new("grow").inout("x", room()).host(|inv| {
            inv.out("x")?.set_records(ROOM)?;
            inv.output::<u32>("x")?[LESS..].fill(7);
            Ok(())
        });
        let (run, feed, drain) = start(&rt, vec![grow], ("x", "x"));
        for n in [LESS, 3] {
            let block = given(n);
            block.set_meta(b"kept").unwrap();
            let _other = shared.then(|| block.clone());
            run.push(feed, block).unwrap();
            let out = run.pull(drain).unwrap();
            let y = out.as_slice::<u32>().unwrap();
            assert!(y[..n].iter().enumerate().all(|(i, v)| *v == i as u32), "{y:?}");
            assert_eq!((y.len(), &y[LESS..]), (ROOM, &[7; LESS][..]));
            assert_eq!((out.signals(), out.meta()), (Signals::END_STREAM, Some(b"kept".to_vec())));
        }
    }
}

/// Kernels that go over the whole of their port.
#[test]
fn what_kernels_index_by_the_port_is_there() {
    let read = || {
        let source = Source::Cpu(Arc::new(|s| {
            // SAFETY: each part writes its own elements only.
            let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
            let n = s.scalar(2) as usize;
            s.for_each(|i, _, _| {
                // As a kernel that asks afterwards.
                let v = x[i];
                y[i] = if i < n { v } else { 0 };
            });
        }));
        let args = [Arg::port("x"), Arg::port("y"), Arg::Records("x".into())];
        Launch::new(source, "read", args)
    };
    let write = || {
        let source = Source::Cpu(Arc::new(|s| {
            // SAFETY: as above.
            let x = unsafe { s.slice_mut::<u32>(0) };
            s.for_each(|i, _, _| x[i] = i as u32 + 1);
        }));
        Launch::new(source, "write", [Arg::port("x")])
    };
    let copy = || {
        let source = Source::Cpu(Arc::new(|s| {
            // SAFETY: as above.
            let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
            s.for_each(|i, _, _| y[i] = x[i]);
        }));
        Launch::new(source, "copy", [Arg::port("x"), Arg::port("y")])
    };
    for (kind, fusion) in [(Kind::Cpu, true), (Kind::Sim, true), (Kind::Sim, false)] {
        let rt = runtime(fusion);
        // From the program.
        let task =
            Task::new("read").input("x", room()).output("y", Template::array::<u32>([ROOM])).kernels(kind, [read()]);
        let (run, feed, drain) = start(&rt, vec![task], ("x", "y"));
        for n in [LESS, 4, LESS] {
            run.push(feed, given(n)).unwrap();
            let out = run.pull(drain).unwrap();
            let y = out.as_slice::<u32>().unwrap();
            assert_eq!(y, std::array::from_fn::<u32, ROOM, _>(|i| if i < n { i as u32 } else { 0 }), "{kind}");
            assert_eq!(out.signals(), Signals::END_STREAM);
        }
        let task = Task::new("write").inout("x", room()).kernels(kind, [write()]);
        let (run, feed, drain) = start(&rt, vec![task], ("x", "x"));
        run.push(feed, given(LESS)).unwrap();
        let out = run.pull(drain).unwrap();
        assert_eq!(out.as_slice::<u32>().unwrap(), std::array::from_fn::<u32, LESS, _>(|i| i as u32 + 1), "{kind}");
        assert_eq!(out.template(), room());
        // From another task, which one for the device would be put together with.
        let first = Task::new("first").input("x", less()).output("y", less()).kernels(kind, [copy()]);
        let second =
            Task::new("second").input("x", room()).output("y", Template::array::<u32>([ROOM])).kernels(kind, [read()]);
        let (run, feed, drain) = start(&rt, vec![first, second], ("x", "y"));
        run.push(feed, given(LESS)).unwrap();
        let y = run.pull(drain).unwrap();
        let want = std::array::from_fn::<u32, ROOM, _>(|i| if i < LESS { i as u32 } else { 0 });
        assert_eq!(y.as_slice::<u32>().unwrap(), want, "{kind} {fusion}");
    }
}
