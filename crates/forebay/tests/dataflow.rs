//! What the dataflow model promises, each notion once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::{
    Datablock, Drain, Error, Feed, Geometry, Graph, GraphState, Mode, Predicate, Running, Runtime, Signals, Task,
    Template,
};
use std::sync::Arc;

fn word() -> Template {
    Template::scalar::<u64>()
}

fn add(name: &str, n: u64) -> Task {
    Task::new(name).inout("x", word()).host(move |inv| {
        inv.output::<u64>(0)?[0] += n;
        Ok(())
    })
}

fn push(run: &Running, feed: Feed, v: u64) {
    let mut b = run.acquire(feed).unwrap();
    b.assign(&[v]).unwrap();
    run.push(feed, b).unwrap();
}

fn pull(run: &Running, drain: Drain) -> u64 {
    run.pull_timeout(drain, Duration::from_secs(20)).unwrap().as_slice::<u64>().unwrap()[0]
}

fn runtimes() -> Vec<Runtime> {
    Mode::ALL.into_iter().map(|m| Runtime::builder().cpu_only().mode(m).workers(2).build().unwrap()).collect()
}

fn chain(n: usize) -> (Graph, Feed, Drain) {
    let mut g = Graph::new("chain");
    let ids: Vec<_> = (0..n).map(|i| g.add(add(&format!("t{i}"), 1)).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], "x"), (w[1], "x")).unwrap());
    let feed = g.feed((ids[0], "x"), 4).unwrap();
    let drain = g.drain((ids[n - 1], "x"), 4).unwrap();
    (g, feed, drain)
}

#[test]
fn a_chain_keeps_order_in_every_mode() {
    for rt in runtimes() {
        let (g, feed, drain) = chain(20);
        let run = rt.start(g).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| (0..2000).for_each(|v| push(&run, feed, v)));
            (0..2000).for_each(|v| assert_eq!(pull(&run, drain), v + 20));
        });
    }
}

#[test]
fn fan_out_shares_and_fan_in_waits_for_all() {
    for rt in runtimes() {
        let mut g = Graph::new("diamond");
        let src = g.add(add("src", 0)).unwrap();
        let t = Template::array::<u64>([1]);
        let mut join = Task::new("join").output("sum", word());
        for i in 0..8 {
            join = join.input(&format!("i{i}"), t);
        }
        let join = g
            .add(join.host(|inv| {
                let sum = (0..8).map(|i| inv.value::<u64>(i)).sum::<Result<u64, _>>()?;
                inv.output::<u64>("sum")?[0] = sum;
                Ok(())
            }))
            .unwrap();
        for i in 0..8u64 {
            // In place behind a fan-out: each gets a copy of its own, or the sums would be wrong.
            let a = g.add(add(&format!("a{i}"), i)).unwrap();
            g.connect((src, "x"), (a, "x")).unwrap();
            g.connect((a, "x"), (join, &format!("i{i}"))).unwrap();
        }
        let feed = g.feed((src, "x"), 2).unwrap();
        let drain = g.drain((join, "sum"), 2).unwrap();
        let run = rt.start(g).unwrap();
        for v in 0..500 {
            push(&run, feed, v);
            assert_eq!(pull(&run, drain), 8 * v + 28);
        }
    }
}

#[test]
fn sticky_ports_keep_their_block_until_replaced() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("sticky");
    let t = g
        .add(Task::new("scale").input("x", word()).sticky("factor", word()).output("y", word()).host(|inv| {
            let v = inv.value::<u64>("x")? * inv.value::<u64>("factor")?;
            inv.output::<u64>("y")?[0] = v;
            Ok(())
        }))
        .unwrap();
    let (x, f, y) = (g.feed((t, "x"), 1).unwrap(), g.feed((t, "factor"), 1).unwrap(), g.drain((t, "y"), 1).unwrap());
    let run = rt.start(g).unwrap();
    push(&run, x, 1);
    assert!(matches!(run.pull_timeout(y, Duration::from_millis(30)), Err(Error::WouldBlock { .. })));
    push(&run, f, 10);
    assert_eq!(pull(&run, y), 10);
    push(&run, x, 2);
    assert_eq!(pull(&run, y), 20);
    push(&run, f, 7);
    push(&run, x, 3);
    assert_eq!(pull(&run, y), 21);
}

#[test]
fn meta_ports_size_outputs_and_set_the_iteration_space() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("meta");
    let t = g
        .add(
            Task::new("iota")
                .output("out", Template::records::<u32>(100))
                .meta_size("count", "out")
                .meta_geometry("space")
                .host(|inv| {
                    let (n, g) = (inv.out("out")?.records(), inv.geometry());
                    let out = inv.output::<u32>("out")?;
                    out[..n].iter_mut().enumerate().for_each(|(i, v)| *v = (i + g.items[0] * 1000) as u32);
                    Ok(())
                }),
        )
        .unwrap();
    let sum = g
        .add(Task::new("sum").input("in", Template::records::<u32>(200)).output("sum", word()).host(|inv| {
            let v = inv.input::<u32>("in")?;
            inv.output::<u64>("sum")?[0] = v.iter().map(|&v| u64::from(v)).sum::<u64>() * 1000 + v.len() as u64;
            Ok(())
        }))
        .unwrap();
    g.connect((t, "out"), (sum, "in")).unwrap();
    let (count, space) = (g.feed((t, "count"), 1).unwrap(), g.feed((t, "space"), 1).unwrap());
    let drain = g.drain((sum, "sum"), 1).unwrap();
    let run = rt.start(g).unwrap();
    let three = Template::array::<u64>([3]);
    for (n, s) in [(0u64, 1u64), (5, 2), (100, 1)] {
        push(&run, count, n);
        run.push(space, Datablock::from_slice(three, &[s, 1, 1]).unwrap()).unwrap();
        let want = (n * s * 1000 + (0..n).sum::<u64>()) * 1000 + n;
        assert_eq!(pull(&run, drain), want);
    }
    push(&run, count, 101);
    run.push(space, Datablock::from_slice(three, &[1u64, 1, 1]).unwrap()).unwrap();
    let e = run.pull(drain).unwrap_err().to_string();
    assert!(e.contains("iota") && e.contains("101"), "{e}");
    assert_eq!(run.state(), GraphState::Failed);
}

/// What is attached to a block travels with it, and not with the next one in the same memory.
#[test]
fn metadata_travels_with_its_block() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("attached");
    let cut = g
        .add(
            Task::new("cut")
                .input("text", Template::records::<u8>(64))
                .output("words", Template::records::<u8>(64))
                .host(|inv| {
                    let text = inv.input::<u8>("text")?;
                    let ends: Vec<u8> = (0..text.len()).filter(|&i| text[i] == b' ').map(|i| i as u8).collect();
                    inv.output::<u8>("words")?[..text.len()].copy_from_slice(text);
                    inv.out("words")?.set_records(text.len())?;
                    // Only where there is something to say.
                    if !ends.is_empty() {
                        inv.out("words")?.set_meta(&ends)?;
                    }
                    Ok(())
                }),
        )
        .unwrap();
    let pass = g
        .add(Task::new("count").input("words", Template::records::<u8>(64)).output("n", word()).host(|inv| {
            let ends = inv.block("words")?.meta();
            inv.output::<u64>("n")?[0] = ends.map_or(0, |ends| ends.len() as u64);
            Ok(())
        }))
        .unwrap();
    g.connect((cut, "words"), (pass, "words")).unwrap();
    let (feed, drain) = (g.feed((cut, "text"), 1).unwrap(), g.drain((pass, "n"), 1).unwrap());
    let watched = g.drain((cut, "words"), 1).unwrap();
    let run = rt.start(g).unwrap();
    for (text, ends) in [("one two three", vec![3, 7]), ("one", vec![]), ("a b", vec![1])] {
        run.push(feed, Datablock::from_slice(Template::records::<u8>(64), text.as_bytes()).unwrap()).unwrap();
        assert_eq!(pull(&run, drain), ends.len() as u64, "{text}");
        assert_eq!(run.pull(watched).unwrap().meta().unwrap_or_default(), ends, "{text}");
    }
}

/// Whoever else has the block that is changed in place: then it is a copy that goes on.
#[test]
fn metadata_stays_with_what_is_changed_in_place() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("in-place");
    let more = |name: &str| {
        Task::new(name).inout("x", word()).host(|inv| {
            inv.output::<u64>("x")?[0] += 1;
            Ok(())
        })
    };
    let (a, b) = (g.add(more("a")).unwrap(), g.add(more("b")).unwrap());
    let feed = g.feed((a, "x"), 1).unwrap();
    let (kept, out) = (g.drain((a, "x"), 1).unwrap(), g.drain((b, "x"), 1).unwrap());
    g.connect((a, "x"), (b, "x")).unwrap();
    let run = rt.start(g).unwrap();
    let block = Datablock::scalar(5u64).unwrap();
    block.set_meta(b"five").unwrap();
    run.push(feed, block.clone()).unwrap();
    for (drain, value) in [(kept, 6), (out, 7)] {
        let b = run.pull(drain).unwrap();
        assert_eq!((b.as_slice::<u64>().unwrap(), b.meta().as_deref()), (&[value][..], Some(&b"five"[..])));
    }
    assert_eq!(block.as_slice::<u64>().unwrap(), [5]);
}

/// Of as many as a task can have, with a port each.
#[test]
fn every_output_can_have_its_size_from_a_meta_port() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("sizes");
    let t = Template::records::<u32>(40);
    let outputs = 0..32;
    let task = outputs.clone().fold(Task::new("many"), |k, o| k.output(&format!("o{o}"), t));
    let task = outputs.clone().fold(task, |k, o| k.meta_size(&format!("n{o}"), &format!("o{o}"))).host(|_| Ok(()));
    let id = g.add(task).unwrap();
    let feeds: Vec<Feed> = outputs.clone().map(|o| g.feed((id, &format!("n{o}")), 1).unwrap()).collect();
    let drains: Vec<Drain> = outputs.map(|o| g.drain((id, &format!("o{o}")), 1).unwrap()).collect();
    let run = rt.start(g).unwrap();
    feeds.iter().enumerate().for_each(|(o, feed)| push(&run, *feed, o as u64));
    let sizes: Vec<usize> = drains.iter().map(|d| run.pull(*d).unwrap().records()).collect();
    assert_eq!(sizes, (0..drains.len()).collect::<Vec<_>>());
}

/// A loop that doubles a value n times: way back and exit are two channels of one port with opposite predicates.
fn looped(meta: bool) -> (Graph, Feed, Option<Feed>, Drain) {
    let mut g = Graph::new("loop");
    let mut t = Task::new("step").input("x", word()).initializer("x0", "x").in_place("x", "y");
    t = if meta { t.meta_iterations("n") } else { t.iterations(5) };
    let t = g
        .add(t.host(|inv| {
            inv.output::<u64>("y")?[0] *= 2;
            Ok(())
        }))
        .unwrap();
    g.connect_with((t, "y"), (t, "x"), 1, Predicate::Unless(Signals::END_ITERATION)).unwrap();
    let out = g.drain_with((t, "y"), 1, Predicate::Only(Signals::END_ITERATION)).unwrap();
    let n = meta.then(|| g.feed((t, "n"), 1).unwrap());
    let x0 = g.feed((t, "x0"), 2).unwrap();
    (g, x0, n, out)
}

#[test]
fn bounded_iteration_works_without_unrolling() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let (g, x0, _, out) = looped(false);
    let run = rt.start(g).unwrap();
    for v in 1..50 {
        push(&run, x0, v);
        assert_eq!(pull(&run, out), v * 32);
    }
    let (g, x0, n, out) = looped(true);
    let run = rt.start(g).unwrap();
    for v in 1..20 {
        push(&run, n.unwrap(), v);
        push(&run, x0, 3);
        assert_eq!(pull(&run, out), 3 << v);
    }
}

#[test]
fn an_iteration_group_of_none_is_an_error_that_names_the_port() {
    let (g, x0, n, out) = looped(true);
    let run = Runtime::builder().cpu_only().build().unwrap().start(g).unwrap();
    push(&run, n.unwrap(), 0);
    push(&run, x0, 3);
    let why = run.pull_timeout(out, Duration::from_secs(20)).unwrap_err().to_string();
    assert!(why.contains("\"step\"") && why.contains("n asks for 0 iterations"), "{why}");
    assert_eq!(run.state(), GraphState::Failed);
}

#[test]
fn latching_predicates_open_and_close_on_stream_marks() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("gates");
    let t = g.add(add("t", 0)).unwrap();
    let feed = g.feed((t, "x"), 8).unwrap();
    let from = g.drain_with((t, "x"), 8, Predicate::OpenFrom(Signals::BEGIN_STREAM)).unwrap();
    let until = g.drain_with((t, "x"), 8, Predicate::CloseAfter(Signals::END_STREAM)).unwrap();
    let run = rt.start(g).unwrap();
    let marks = [Signals::NONE, Signals::BEGIN_STREAM, Signals::NONE, Signals::END_STREAM, Signals::NONE];
    for (v, s) in marks.into_iter().enumerate() {
        let b = Datablock::scalar(v as u64).unwrap().with_signals(s);
        run.push(feed, b).unwrap();
    }
    assert_eq!((0..4).map(|_| pull(&run, from)).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!((0..4).map(|_| pull(&run, until)).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(run.try_pull(until).is_err());
}

#[test]
fn backpressure_reaches_the_source_and_every_form_of_push_reports_it() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let (g, feed, drain) = chain(3);
    let run = rt.start(g).unwrap();
    let mut pushed = 0u64;
    let until = Instant::now() + Duration::from_secs(20);
    let mut idle = 0;
    while idle < 20 && Instant::now() < until {
        match run.try_push(feed, Datablock::scalar(pushed).unwrap()) {
            Ok(()) => {
                pushed += 1;
                idle = 0;
            }
            Err((b, Error::WouldBlock { .. })) => {
                assert_eq!(b.as_slice::<u64>().unwrap(), [pushed]);
                idle += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            Err((_, e)) => panic!("{e}"),
        }
    }
    // 4 in each of 4 channels, and one finished invocation held by each of 3 tasks.
    assert_eq!(pushed, 19);
    let e = run.push_timeout(feed, Datablock::scalar(0u64).unwrap(), Duration::from_millis(10)).unwrap_err();
    assert!(e.to_string().contains("t0.x"), "{e}");
    (0..pushed).for_each(|v| assert_eq!(pull(&run, drain), v + 3));
    assert!(matches!(run.try_pull(drain), Err(Error::WouldBlock { .. })));
}

fn block_on<T>(f: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut f = std::pin::pin!(f);
    loop {
        match f.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(v) => return v,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    }
}

#[test]
fn push_and_pull_work_as_futures() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let (g, feed, drain) = chain(2);
    let run = rt.start(g).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            block_on(async {
                for v in 0..300u64 {
                    run.push_async(feed, Datablock::scalar(v).unwrap()).await.unwrap();
                }
            });
        });
        block_on(async {
            for v in 0..300u64 {
                assert_eq!(run.pull_async(drain).await.unwrap().as_slice::<u64>().unwrap(), [v + 2]);
            }
        });
    });
}

#[test]
fn stop_run_reset_and_teardown() {
    for rt in runtimes() {
        let (g, feed, drain) = chain(3);
        let run = rt.start(g).unwrap();
        push(&run, feed, 1);
        assert_eq!(pull(&run, drain), 4);
        run.stop().unwrap();
        assert_eq!(run.state(), GraphState::Stopped);
        let e = run.push(feed, Datablock::scalar(1u64).unwrap()).unwrap_err();
        assert!(e.to_string().contains("stopped"), "{e}");
        run.run().unwrap();
        push(&run, feed, 10);
        push(&run, feed, 20);
        run.reset().unwrap();
        run.run().unwrap();
        push(&run, feed, 30);
        assert_eq!(pull(&run, drain), 33);
        let held = {
            push(&run, feed, 5);
            run.pull(drain).unwrap()
        };
        run.teardown();
        assert_eq!(held.as_slice::<u64>().unwrap(), [8]);
    }
}

#[test]
fn a_task_may_stop_or_let_go_of_its_own_graph_and_is_refused_a_reset() {
    for workers in [1, 3] {
        let rt = Runtime::builder().cpu_only().workers(workers).build().unwrap();
        let own: Arc<std::sync::Mutex<Option<Running>>> = Arc::default();
        let (seen, asked) = (own.clone(), Arc::new(std::sync::Mutex::new(Vec::new())));
        let said = asked.clone();
        let mut g = Graph::new("own");
        let t = g.add(Task::new("t").input("x", word()).host(move |inv| {
            let mut own = seen.lock().unwrap();
            let run = own.as_ref().unwrap();
            match inv.value::<u64>("x")? {
                1 => said.lock().unwrap().push(run.reset().unwrap_err().to_string()),
                2 => run.stop()?,
                _ => drop(own.take()),
            }
            Ok(())
        }));
        let feed = g.feed((t.unwrap(), "x"), 4).unwrap();
        let held = rt.start(g).unwrap();
        *own.lock().unwrap() = Some(held);
        let wait = |what: &dyn Fn(&Option<Running>) -> bool| {
            let until = std::time::Instant::now() + Duration::from_secs(10);
            while !what(&own.lock().unwrap()) {
                assert!(std::time::Instant::now() < until, "nothing happened for ten seconds");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let push = |v: u64| own.lock().unwrap().as_ref().unwrap().try_push(feed, Datablock::scalar(v).unwrap());
        push(1).map_err(|e| e.1).unwrap();
        wait(&|_| !asked.lock().unwrap().is_empty());
        assert!(asked.lock().unwrap()[0].contains("inside a task"), "{:?}", asked.lock().unwrap());
        push(2).map_err(|e| e.1).unwrap();
        wait(&|own| own.as_ref().unwrap().state() == forebay::GraphState::Stopped);
        own.lock().unwrap().as_ref().unwrap().run().unwrap();
        push(3).map_err(|e| e.1).unwrap();
        wait(&|own| own.is_none());
        // The runtime is fine, and dropping it waits for what is left of the graph.
        let (g, f, d) = chain(3);
        let other = rt.start(g).unwrap();
        other.push(f, Datablock::scalar(1u64).unwrap()).unwrap();
        assert_eq!(pull(&other, d), 4);
    }
}

/// Whoever calls what when: in the end the graph does what it was told last, and works.
#[test]
fn several_threads_may_stop_run_and_reset_one_graph() {
    const TASKS: u64 = 200;
    for rt in runtimes() {
        // Many ends to open and close take a while, in which others call.
        let mut g = Graph::new("many");
        let ends: Vec<(Feed, Drain)> = (0..TASKS)
            .map(|i| {
                let t = g.add(add(&format!("t{i}"), i)).unwrap();
                (g.feed((t, "x"), 2).unwrap(), g.drain((t, "x"), 2).unwrap())
            })
            .collect();
        let run = rt.start(g).unwrap();
        let works = |v: u64| {
            run.run().unwrap();
            assert_eq!(run.state(), GraphState::Running);
            for (feed, _) in &ends {
                push(&run, *feed, v);
            }
            for (i, (_, drain)) in (0..).zip(&ends) {
                let out = run.pull_timeout(*drain, Duration::from_secs(10)).unwrap();
                assert_eq!(out.as_slice::<u64>().unwrap(), [v + i]);
            }
        };
        let together = std::sync::Barrier::new(2);
        for round in 0..5u64 {
            for _ in 0..20 {
                // One is told to run while another one is about to stop it.
                run.run().unwrap();
                std::thread::scope(|s| {
                    s.spawn(|| {
                        together.wait();
                        run.stop().unwrap();
                    });
                    together.wait();
                    while run.state() == GraphState::Running {
                        std::hint::spin_loop();
                    }
                    run.run().unwrap();
                });
                works(round);
            }
            std::thread::scope(|s| {
                for thread in 0..3u64 {
                    let (run, ends) = (&run, &ends);
                    s.spawn(move || {
                        let mut x = round * 8 + thread + 1;
                        for _ in 0..20 {
                            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                            let (feed, drain) = ends[(x >> 32) as usize % ends.len()];
                            match x >> 61 {
                                0 | 1 => run.stop().unwrap(),
                                2 => run.reset().unwrap(),
                                3 | 4 => run.run().unwrap(),
                                5 | 6 => drop(run.try_push(feed, Datablock::scalar(x).unwrap())),
                                _ => drop(run.try_pull(drain)),
                            }
                        }
                    });
                }
            });
            run.reset().unwrap();
            assert_eq!(run.state(), GraphState::Stopped);
            works(100 + round);
        }
    }
}

#[test]
fn a_task_cannot_set_going_what_somebody_stops_who_waits_for_it() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let own: Arc<std::sync::OnceLock<Running>> = Arc::default();
    let (seen, (tell, said)) = (own.clone(), std::sync::mpsc::channel());
    let mut g = Graph::new("own");
    let (begins, begun) = std::sync::mpsc::channel();
    let t = g.add(Task::new("t").input("x", word()).host(move |_| {
        begins.send(())?;
        let run = seen.get().ok_or("no graph")?;
        while run.state() == GraphState::Running {
            std::thread::yield_now();
        }
        tell.send(run.run().map_err(|e| e.to_string()))?;
        Ok(())
    }));
    let feed = g.feed((t.unwrap(), "x"), 1).unwrap();
    let run = own.get_or_init(|| rt.start(g).unwrap());
    run.push(feed, Datablock::scalar(1u64).unwrap()).unwrap();
    begun.recv_timeout(Duration::from_secs(10)).unwrap();
    run.stop().unwrap();
    let refused = said.recv_timeout(Duration::from_secs(10)).unwrap().unwrap_err();
    assert!(refused.contains("cannot be run from inside a task"), "{refused}");
    assert_eq!(run.state(), GraphState::Stopped);
    run.run().unwrap();
    assert_eq!(run.state(), GraphState::Running);
}

#[test]
fn a_blocked_pull_ends_when_the_graph_stops() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let (g, _, drain) = chain(2);
    let run = rt.start(g).unwrap();
    std::thread::scope(|s| {
        let h = s.spawn(|| run.pull(drain).unwrap_err().to_string());
        std::thread::sleep(Duration::from_millis(30));
        run.stop().unwrap();
        assert!(h.join().unwrap().contains("stopped"));
    });
}

#[test]
fn a_failure_ends_its_graph_alone_and_reset_revives_it() {
    for rt in runtimes() {
        let mut g = Graph::new("bad");
        let t = g
            .add(Task::new("checker").inout("x", word()).host(|inv| match inv.output::<u64>("x")?[0] {
                3 => Err("three is refused".into()),
                4 => panic!("four panics"),
                _ => Ok(()),
            }))
            .unwrap();
        let (feed, drain) = (g.feed((t, "x"), 4).unwrap(), g.drain((t, "x"), 4).unwrap());
        let bad = rt.start(g).unwrap();
        let (g, gf, gd) = chain(2);
        let good = rt.start(g).unwrap();
        for (v, why) in [(3, "three is refused"), (4, "four panics")] {
            push(&bad, feed, v);
            let e = bad.pull(drain).unwrap_err().to_string();
            assert!(e.contains("checker") && e.contains(why), "{e}");
            assert!(bad.push(feed, Datablock::scalar(0u64).unwrap()).is_err());
            push(&good, gf, 1);
            assert_eq!(pull(&good, gd), 3);
            bad.reset().unwrap();
            bad.run().unwrap();
            push(&bad, feed, 1);
            assert_eq!(pull(&bad, drain), 1);
        }
    }
}

#[test]
fn a_task_without_inputs_is_a_source_until_it_finishes() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("source");
    let mut n = 0;
    let t = g
        .add(Task::new("count").output("n", word()).host(move |inv| {
            inv.output::<u64>("n")?[0] = n;
            n += 1;
            if n == 100 {
                inv.finish();
            }
            Ok(())
        }))
        .unwrap();
    let drain = g.drain((t, "n"), 4).unwrap();
    let run = rt.start(g).unwrap();
    for v in 0..100u64 {
        let b = run.pull(drain).unwrap();
        assert_eq!(b.as_slice::<u64>().unwrap(), [v]);
        assert_eq!(b.signals() == Signals::END_STREAM, v == 99);
    }
    assert!(run.pull_timeout(drain, Duration::from_millis(20)).is_err());
}

#[test]
fn geometry_and_priority_can_be_changed_while_running() {
    let rt = Runtime::builder().cpu_only().mode(Mode::Priority).build().unwrap();
    let mut g = Graph::new("set");
    let t = g
        .add(Task::new("t").input("x", word()).output("items", word()).host(|inv| {
            let n = inv.geometry().count() as u64;
            inv.output::<u64>("items")?[0] = n;
            Ok(())
        }))
        .unwrap();
    let (feed, drain) = (g.feed((t, "x"), 1).unwrap(), g.drain((t, "items"), 1).unwrap());
    let run = rt.start(g).unwrap();
    let ask = || {
        push(&run, feed, 0);
        pull(&run, drain)
    };
    assert_eq!(ask(), 1);
    run.set_geometry(t, Some(Geometry::new(10, 20, 3))).unwrap();
    assert_eq!(ask(), 600);
    run.set_geometry(t, None).unwrap();
    assert_eq!(ask(), 1);
    run.set_priority(t, 5).unwrap();
    assert!(run.set_geometry(t, Some(Geometry::new(0, 1, 1))).is_err());
}

#[test]
fn an_idle_runtime_uses_no_cpu() {
    let rt = Runtime::builder().cpu_only().workers(4).build().unwrap();
    let (g, feed, drain) = chain(3);
    let run = rt.start(g).unwrap();
    push(&run, feed, 1);
    pull(&run, drain);
    std::thread::sleep(Duration::from_millis(50));
    // Measured in a child process, where no other test runs.
    if std::env::var_os("FOREBAY_IDLE_CHILD").is_some() {
        let cpu = || -> u64 {
            let s = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
            let mut all = s.split(' ').next().and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
            for t in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
                let stat = std::fs::read_to_string(t.path().join("schedstat")).unwrap_or_default();
                all += stat.split(' ').next().and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
            }
            all
        };
        let before = cpu();
        std::thread::sleep(Duration::from_millis(400));
        let used = cpu() - before;
        assert!(used < 4_000_000, "{used} ns of CPU in 400 ms of idleness");
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "an_idle_runtime_uses_no_cpu", "--test-threads=1"])
        .env("FOREBAY_IDLE_CHILD", "1")
        .status()
        .unwrap();
    assert!(status.success());
}

/// A function pushes into another graph and computes on: somebody else does what it pushed.
#[test]
fn what_a_task_pushes_elsewhere_is_done_while_it_computes() {
    let t = Template::array::<u32>([1]);
    for rt in runtimes() {
        let done = Arc::new(AtomicBool::new(false));
        let (says, hears) = (done.clone(), done.clone());
        let mut other = Graph::new("other");
        let id = other.add(Task::new("says").input("x", t).host(move |_| {
            says.store(true, Ordering::Release);
            Ok(())
        }));
        let to = other.feed((id.unwrap(), "x"), 1).unwrap();
        let other = rt.start(other).unwrap();
        let mut g = Graph::new("computes");
        let id = g.add(Task::new("computes").input("x", t).output("y", t).host(move |_| {
            // So that the others sleep.
            std::thread::sleep(Duration::from_millis(5));
            other.push(to, Datablock::zeroed(t)?)?;
            let begun = Instant::now();
            while !hears.load(Ordering::Acquire) {
                if begun.elapsed() > Duration::from_secs(10) {
                    return Err("nobody came".into());
                }
                std::hint::spin_loop();
            }
            Ok(())
        }));
        let id = id.unwrap();
        let (f, d) = (g.feed((id, "x"), 1).unwrap(), g.drain((id, "y"), 1).unwrap());
        let run = rt.start(g).unwrap();
        run.push(f, Datablock::zeroed(t).unwrap()).unwrap();
        run.pull(d).unwrap();
    }
}
