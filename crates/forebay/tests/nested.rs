//! Functions that call other tasks, or use other graphs, and wait: whoever waits keeps no worker from what it waits for.

use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use forebay::hal::{Kind, discover};
use forebay::place::{Accelerated, Models};
use forebay::{Arg, Datablock, Geometry, Graph, Launch, Mode, Runtime, Source, Task, TaskError, Template};

fn word() -> Template {
    Template::scalar::<u64>()
}

fn runtime(mode: Mode, workers: usize) -> Runtime {
    Runtime::builder().cpu_only().mode(mode).workers(workers).models(Arc::new(Models::off())).build().unwrap()
}

/// Its output is what `f` makes of its input.
fn task(name: &str, f: impl FnMut(u64) -> Result<u64, TaskError> + Send + 'static) -> Task {
    let mut f = f;
    Task::new(name).input("x", word()).output("y", word()).host(move |inv| {
        inv.output::<u64>("y")?[0] = f(inv.value::<u64>("x")?)?;
        Ok(())
    })
}

fn call(a: &Accelerated, x: u64) -> Result<u64, forebay::Error> {
    Ok(a.call(&[Datablock::scalar(x)?])?[0].as_slice::<u64>()?[0])
}

/// A test that would stand still for ever ends with the process.
fn within(seconds: u64, f: impl FnOnce()) {
    let (done, is_done) = channel::<()>();
    std::thread::scope(|s| {
        s.spawn(move || {
            if is_done.recv_timeout(Duration::from_secs(seconds)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("a call stands still");
                std::process::abort();
            }
        });
        f();
        drop(done);
    });
}

#[test]
fn a_function_calls_another_task_on_the_only_worker() {
    within(60, || {
        for mode in Mode::ALL {
            let rt = runtime(mode, 1);
            let inner = rt.accelerate(1, || task("inner", |x| Ok(x * x))).unwrap();
            let middle = || {
                let inner = inner.clone();
                task("middle", move |x| Ok(call(&inner, x)? + call(&inner, x + 1)?))
            };
            let middle = rt.accelerate(1, middle).unwrap();
            let outer = || {
                let middle = middle.clone();
                task("outer", move |x| Ok(call(&middle, x)? + 1))
            };
            let outer = rt.accelerate(1, outer).unwrap();
            for x in 0..50 {
                assert_eq!(call(&outer, x).unwrap(), x * x + (x + 1) * (x + 1) + 1, "{mode:?}");
            }
        }
    });
}

#[test]
fn as_many_functions_as_workers_call_one_task() {
    within(60, || {
        for (mode, workers) in Mode::ALL.into_iter().flat_map(|m| [(m, 1), (m, 2), (m, 3)]) {
            let rt = runtime(mode, workers);
            // One lane: all but one of those who call wait for each other.
            let inner = rt.accelerate(1, || task("inner", |x| Ok(x + 7))).unwrap();
            let outer = || {
                let inner = inner.clone();
                task("outer", move |x| {
                    let all: Vec<_> =
                        (0..3).map(|i| inner.spawn(&[Datablock::scalar(x + i)?])).collect::<Result<_, _>>()?;
                    all.into_iter().try_fold(0, |sum, p| Ok(sum + p.wait()?[0].as_slice::<u64>()?[0]))
                })
            };
            let outer = rt.accelerate(4, outer).unwrap();
            std::thread::scope(|s| {
                for t in 0..4u64 {
                    let outer = &outer;
                    s.spawn(move || (0..40).for_each(|x| assert_eq!(call(outer, x * t).unwrap(), 3 * (x * t) + 24)));
                }
            });
        }
    });
}

#[test]
fn a_function_uses_a_graph_of_its_own() {
    within(60, || {
        for mode in Mode::ALL {
            let rt = Arc::new(runtime(mode, 1));
            let mut g = Graph::new("inner");
            let first = g.add(task("first", |x| Ok(x + 1))).unwrap();
            let second = g.add(task("second", |x| Ok(x * 2))).unwrap();
            let third = g.add(task("third", |x| Ok(x * 5))).unwrap();
            let feed = g.feed((first, "x"), 1).unwrap();
            g.connect((first, "y"), (second, "x")).unwrap();
            g.connect((second, "y"), (third, "x")).unwrap();
            let drain = g.drain((third, "y"), 1).unwrap();
            let inner = rt.start(g).unwrap();
            let mut g = Graph::new("outer");
            let outer = task("outer", move |x| {
                // There is room for one, so this waits with what it pushes as well.
                (0..9).try_for_each(|i| inner.push(feed, Datablock::scalar(x + i)?))?;
                let pulled = (0..9).map(|_| inner.pull(drain)).collect::<Result<Vec<_>, _>>()?;
                pulled.iter().try_fold(0, |sum, b| Ok(sum + b.as_slice::<u64>()?[0]))
            });
            let outer = g.add(outer).unwrap();
            let (feed, drain) = (g.feed((outer, "x"), 1).unwrap(), g.drain((outer, "y"), 1).unwrap());
            let run = rt.start(g).unwrap();
            for x in 0..20u64 {
                run.push(feed, Datablock::scalar(x).unwrap()).unwrap();
                let y = run.pull(drain).unwrap().as_slice::<u64>().unwrap()[0];
                assert_eq!(y, (0..9).map(|i| (x + i + 1) * 10).sum::<u64>(), "{mode:?}");
            }
        }
    });
}

/// What is called may be a kernel, on a device that is the host's cores, too.
#[test]
fn a_function_calls_a_kernel_on_the_only_worker() {
    let (devices, missing) = discover(&[Kind::OpenCl]);
    let devices: Vec<_> = devices.into_iter().filter(|d| d.compiles().is_ok()).collect();
    if devices.is_empty() {
        return eprintln!("skipped: no opencl device ({missing:?})");
    }
    const TEXT: &str =
        "KERNEL void more(GLOBAL const ulong *x, GLOBAL ulong *y) { if (gid_x() == 0) y[0] = x[0] + 3; }";
    within(60, || {
        for mode in Mode::ALL {
            let rt = Runtime::builder().devices(devices.clone()).mode(mode).workers(1);
            let rt = rt.models(Arc::new(Models::off())).build().unwrap();
            let kernel = || Task::new("inner").input("x", word()).output("y", word()).portable(TEXT, "more");
            let inner = rt.accelerate(1, kernel).unwrap();
            let outer = || {
                let inner = inner.clone();
                task("outer", move |x| Ok(call(&inner, x)? * 2))
            };
            let outer = rt.accelerate(2, outer).unwrap();
            (0..30).for_each(|x| assert_eq!(call(&outer, x).unwrap(), (x + 3) * 2, "{mode:?}"));
        }
    });
}

/// Sums what is from `x` down, by calling itself.
fn sum(itself: &Arc<OnceLock<Accelerated>>) -> Task {
    let itself = itself.clone();
    task("sum", move |x| match x {
        0 => Ok(0),
        _ => Ok(x + call(itself.get().ok_or("not there yet")?, x - 1)?),
    })
}

#[test]
fn a_task_calls_itself_as_deep_as_it_has_lanes_and_is_told_beyond() {
    within(60, || {
        for (mode, workers) in Mode::ALL.into_iter().flat_map(|m| [(m, 1), (m, 2)]) {
            for lanes in [1u64, 2, 7] {
                let rt = runtime(mode, workers);
                let itself = Arc::new(OnceLock::new());
                let sums = rt.accelerate(lanes as usize, || sum(&itself)).unwrap();
                itself.set(sums.clone()).ok().unwrap();
                for x in [0, lanes - 1, lanes, 3 * lanes, lanes - 1] {
                    let begun = Instant::now();
                    loop {
                        match call(&sums, x) {
                            Ok(y) => assert!(x < lanes && y == x * (x + 1) / 2, "{x} with {lanes} lanes: {y}"),
                            Err(why) => {
                                let why = why.to_string();
                                assert!(why.contains("would wait for itself") && why.contains("\"sum\""), "{why}");
                                // What the last one had begun may be in the way for a moment.
                                if x < lanes && begun.elapsed() < Duration::from_secs(20) {
                                    continue;
                                }
                                assert!(x >= lanes, "{x} with {lanes} lanes: {why}");
                            }
                        }
                        break;
                    }
                }
            }
        }
    });
}

/// Each calls the other one; some of the calls come back, and every one ends.
#[test]
fn tasks_that_call_each_other_never_stand_still() {
    within(120, || {
        for (mode, workers, lanes) in Mode::ALL.into_iter().flat_map(|m| [(m, 1, 1), (m, 2, 2), (m, 3, 4)]) {
            let rt = runtime(mode, workers);
            let both: [Arc<OnceLock<Accelerated>>; 2] = Default::default();
            for i in 0..2 {
                let make = || {
                    let other = both[1 - i].clone();
                    task(["even", "odd"][i], move |x| match x {
                        0 => Ok(i as u64),
                        _ => Ok(call(other.get().ok_or("not there yet")?, x - 1)?),
                    })
                };
                both[i].set(rt.accelerate(lanes, make).unwrap()).ok().unwrap();
            }
            // Odd is 1 for odd numbers; alone, as deep as both have lanes.
            let of = |i: usize, x: u64| call(both[i].get().unwrap(), x);
            for x in 0..2 * lanes as u64 {
                assert_eq!((of(0, x).unwrap(), of(1, x).unwrap()), (x % 2, 1 - x % 2));
            }
            std::thread::scope(|s| {
                for t in 0..4 {
                    s.spawn(move || {
                        for x in 0..60 {
                            match of(t % 2, x % 6) {
                                Ok(y) => assert_eq!(y, (x + t as u64) % 2),
                                Err(e) => assert!(e.to_string().contains("would wait for itself"), "{e}"),
                            }
                        }
                    });
                }
            });
        }
    });
}

/// A call whose results nobody wants is let go of, by a function too, while somebody else waits for that lane.
#[test]
fn a_function_begins_calls_of_its_own_task_and_forgets_them() {
    within(60, || {
        let rt = runtime(Mode::Fifo, 2);
        let itself: Arc<OnceLock<Accelerated>> = Arc::default();
        let (count, counted) = channel();
        let make = || {
            let (itself, count) = (itself.clone(), count.clone());
            task("count", move |x| {
                count.send(x).map_err(|_| "nobody counts")?;
                if x > 0 {
                    // Where there is no room at once this fails; that is told.
                    match itself.get().ok_or("not there yet")?.spawn(&[Datablock::scalar(x - 1)?]) {
                        Ok(pending) => drop(pending),
                        Err(e) => assert!(matches!(e, forebay::Error::Circle { .. }), "{e}"),
                    }
                }
                Ok(x)
            })
        };
        let counts = rt.accelerate(2, make).unwrap();
        itself.set(counts.clone()).ok().unwrap();
        for x in 0..200 {
            assert_eq!(call(&counts, x % 3).unwrap(), x % 3);
        }
        drop((counts, count));
        assert!(counted.try_iter().count() >= 200);
    });
}

/// A function may have the place of a kernel that failed, on a thread that waits for the device.
#[test]
fn a_function_that_takes_over_for_a_kernel_calls_another_kernel() {
    let (devices, missing) = discover(&[Kind::OpenCl]);
    let devices: Vec<_> = devices.into_iter().filter(|d| d.compiles().is_ok()).collect();
    if devices.is_empty() {
        return eprintln!("skipped: no opencl device ({missing:?})");
    }
    let text = "KERNEL void more(GLOBAL const ulong *x, GLOBAL ulong *y) {
        ulong v = x[0];
        for (uint i = 0; i < 3000000u; i++) v = v * 3u + i;
        if (gid_x() == 0) y[0] = v == 1u ? 0u : x[0] + 3u;
    }";
    within(60, || {
        let rt = Runtime::builder().devices(devices).mode(Mode::Adaptive).workers(1);
        let rt = rt.models(Arc::new(Models::off())).build().unwrap();
        // Long, so that it is waited for by such a thread.
        let kernel = || Task::new("inner").input("x", word()).output("y", word()).portable(text, "more");
        let inner = rt.accelerate(2, kernel).unwrap();
        (0..4).for_each(|x| assert_eq!(call(&inner, x).unwrap(), x + 3));
        // No device has groups so large.
        let launch = Launch::new(Source::Portable(text.into()), "more", [Arg::port("x"), Arg::port("y")]);
        let launch = launch.over(Geometry::linear(1 << 20).with_group(1 << 20, 1, 1));
        let outer = || {
            let inner = inner.clone();
            task("outer", move |x| Ok(call(&inner, x)? * 2)).kernels(Kind::OpenCl, [launch.clone()])
        };
        let outer = rt.accelerate(4, outer).unwrap();
        std::thread::scope(|s| {
            for t in 0..4 {
                let outer = &outer;
                s.spawn(move || (t..t + 4).for_each(|x| assert_eq!(call(outer, x).unwrap(), (x + 3) * 2)));
            }
        });
        let refused: usize = outer.stats().iter().map(|t| t.refused.len()).sum();
        eprintln!("{refused} kernels were tried");
    });
}

/// More functions wait for each other than there may be threads: the last of them is told so, and nothing stands still.
#[test]
fn so_many_functions_call_each_other_that_none_is_left_to_work() {
    /// With one worker: it and as many spares as there may be, of which one has to work.
    const MOST: usize = 257;
    within(120, || {
        let rt = runtime(Mode::FirstAvailable, 1);
        let mut chain: Vec<Accelerated> = Vec::new();
        for i in 0..=MOST {
            let inner = chain.last().cloned();
            let one = || {
                let inner = inner.clone();
                task(&format!("t{i}"), move |x| inner.as_ref().map_or(Ok(x), |inner| Ok(call(inner, x)? + 1)))
            };
            chain.push(rt.accelerate(1, one).unwrap());
        }
        for round in 0..3 {
            let e = call(&chain[MOST], 5).unwrap_err();
            assert!(e.to_string().contains("257 functions of tasks would wait"), "{e}");
            // Those that failed with it begin anew, and there is one fewer.
            assert_eq!(call(&chain[MOST - 1], round).unwrap(), round + MOST as u64 - 1);
        }
    });
}
