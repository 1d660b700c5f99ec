//! Adaptive placement on real devices: the CPU, and an OpenCL device (PoCL where there is no other).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay::place::Models;
use forebay::{
    Arg, Datablock, Error, Geometry, Graph, Kind, Launch, Mode, Running, Runtime, Signals, Source, Task, TaskError,
    Template,
};

const N: usize = 4096;

/// Doubles, `ROUNDS` times slower than it could.
const SOURCE: &str = "KERNEL void twice(GLOBAL const float *x, GLOBAL float *y) {
    const uint i = gid_x();
    if (i >= 4096) return;
    float v = x[i];
    for (int k = 0; k < ROUNDS; k++) v = v * 1.0001f + 0.1f;
    y[i] = v > 1e30f ? v : x[i] * 2.0f;
}";

fn source(rounds: usize) -> String {
    SOURCE.replace("ROUNDS", &rounds.to_string())
}

/// One test at a time: another's kernels on the same device are load that nobody tells of.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adaptive, with what it learned in `dir`; none where there is no OpenCL.
fn runtime(dir: &tempfile::TempDir) -> Option<Runtime> {
    match Runtime::builder()
        .mode(Mode::Adaptive)
        .workers(2)
        .service(false)
        .models(Arc::new(Models::at(dir.path())))
        .only(Kind::OpenCl)
    {
        Ok(b) => Some(b.build().unwrap()),
        Err(e) => {
            eprintln!("skipped: {e}");
            None
        }
    }
}

/// A task that doubles: on the CPU it takes `host`, elsewhere `rounds`.
fn twice(host: Duration, rounds: usize) -> Task {
    let t = Template::array::<f32>([N]);
    let task = Task::new("twice").input("x", t).output("y", t).portable(&source(rounds), "twice");
    task.host(move |inv| {
        let begun = Instant::now();
        let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
        while begun.elapsed() < host {
            std::hint::spin_loop();
        }
        Ok(())
    })
}

struct Started {
    run: Running,
    feed: forebay::Feed,
    drain: forebay::Drain,
}

fn start(rt: &Runtime, task: Task) -> Started {
    let mut g = Graph::new("place");
    let id = g.add(task).unwrap();
    let (feed, drain) = (g.feed((id, "x"), 2).unwrap(), g.drain((id, "y"), 2).unwrap());
    Started { run: rt.start(g).unwrap(), feed, drain }
}

impl Started {
    fn call(&self, value: f32) -> Result<(), Error> {
        let t = Template::array::<f32>([N]);
        self.run.push(self.feed, Datablock::from_slice(t, &vec![value; N])?)?;
        let out = self.run.pull(self.drain)?;
        assert!(out.as_slice::<f32>()?.iter().all(|y| *y == value * 2.0));
        Ok(())
    }

    fn by_device(&self) -> Vec<u64> {
        self.run.snapshot().tasks[0].by_device.clone()
    }
}

#[test]
fn each_task_ends_up_where_it_is_faster_and_a_second_run_knows_it_already() {
    let _alone = alone();
    for (name, host, rounds) in [("opencl", Duration::from_millis(12), 1), ("cpu", Duration::from_micros(10), 20_000)] {
        // The CPU is the first device. Which of several others is the best is not for this test to say.
        let on_best = |by_device: &[u64]| if name == "cpu" { by_device[0] } else { by_device[1..].iter().sum() };
        let dir = tempfile::tempdir().unwrap();
        let Some(rt) = runtime(&dir) else { return };
        let s = start(&rt, twice(host, rounds));
        s.call(0.0).unwrap();
        assert!(s.run.snapshot().tasks[0].last_prediction_ns.is_none(), "nothing is known before the first invocation");
        (1..40).for_each(|i| s.call(i as f32).unwrap());
        // What was predicted of one is told beside what it took; of one that is measured for the first time nothing is.
        let told = (0..5).any(|i| {
            let (before, begun) = (s.run.snapshot().tasks[0].accuracy, Instant::now());
            s.call(i as f32).unwrap();
            let (whole, now) = (begun.elapsed(), s.run.snapshot().tasks[0].clone());
            if now.accuracy.0 == before.0 {
                return false;
            }
            let (predicted, took) = now.last_prediction_ns.unwrap();
            assert!(predicted > 0 && Duration::from_nanos(took) <= whole, "{predicted} {took} {whole:?}");
            let sum = |a: (u64, f64)| a.0 as f64 * a.1;
            let error = (predicted as f64 - took as f64).abs() / took as f64;
            let off = sum(now.accuracy) - sum(before) - error;
            assert!(off.abs() < 1e-3, "{before:?} {:?} {predicted} {took}", now.accuracy);
            true
        });
        assert!(told);
        let learned = s.by_device();
        assert!(learned.iter().all(|n| *n >= 1), "{name}: every device is tried: {learned:?}");
        assert!(on_best(&learned) >= 30, "{name}: {learned:?}");
        drop(s);
        drop(rt);
        let models = Models::at(dir.path());
        let known = models.entries();
        assert_eq!(known.len(), learned.len());
        assert!(known.iter().all(|e| e.task == "twice" && !e.samples.is_empty()), "{known:?}");
        let s = start(&runtime(&dir).unwrap(), twice(host, rounds));
        (0..20).for_each(|i| s.call(i as f32).unwrap());
        let again = s.by_device();
        assert!(on_best(&again) >= 18, "{name}: not learned again: {again:?}");
        drop(s);
    }
}

#[test]
fn what_fails_is_done_elsewhere_told_and_not_tried_again() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let Some(rt) = runtime(&dir) else { return };
    let t = Template::array::<f32>([N]);
    let tried = Arc::new(AtomicUsize::new(0));
    let count = tried.clone();
    let task = Task::new("half").input("x", t).output("y", t).portable(&source(1), "twice").host(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Err(TaskError::from("no such luck"))
    });
    let s = start(&rt, task);
    (0..10).for_each(|i| s.call(i as f32).unwrap());
    assert_eq!(tried.load(Ordering::Relaxed), 1);
    let refused = s.run.snapshot().tasks[0].refused.clone();
    assert!(matches!(&refused[..], [(0, why)] if why.contains("no such luck")), "{refused:?}");
    drop(s);
    // What it has said of its output until then goes for nothing.
    let (x, y) = (Template::records::<f32>(N), Template::records::<f32>(N));
    let task = Task::new("half").input("x", x).output("y", y).portable(&source(1), "twice").host(|inv| {
        let out = inv.out("y")?;
        out.set_records(1)?;
        out.set_meta(b"half done")?;
        out.set_signals(Signals::END_STREAM);
        Err(TaskError::from("no such luck"))
    });
    let s = start(&rt, task);
    let given = Datablock::from_slice(x, &[3.0f32; N]).unwrap().with_signals(Signals::BEGIN_STREAM);
    s.run.push(s.feed, given).unwrap();
    let out = s.run.pull(s.drain).unwrap();
    assert_eq!((out.records(), out.meta(), out.signals()), (N, None, Signals::BEGIN_STREAM));
    assert!(out.as_slice::<f32>().unwrap().iter().all(|y| *y == 6.0));
    drop(s);
    // Where everything fails the graph does, and says why.
    let both = Task::new("none").input("x", t).output("y", t).host(|_| Err(TaskError::from("nor here")));
    let s = start(&rt, both);
    let failed = s.call(1.0).unwrap_err();
    assert!(failed.to_string().contains("nor here"), "{failed}");
}

#[test]
fn what_failed_is_tried_again_after_a_reset() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let Some(rt) = runtime(&dir) else { return };
    let t = Template::array::<f32>([N]);
    let broken = Arc::new(AtomicBool::new(true));
    let is_broken = broken.clone();
    let task = Task::new("half").input("x", t).output("y", t).portable(&source(1), "twice").host(move |inv| {
        if is_broken.load(Ordering::Relaxed) {
            return Err(TaskError::from("no such luck"));
        }
        let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
        Ok(())
    });
    let s = start(&rt, task);
    (0..10).for_each(|i| s.call(i as f32).unwrap());
    // It was tried, and what did it instead is what counts.
    let before = s.by_device()[0];
    assert_eq!((before, s.run.snapshot().tasks[0].refused.len()), (0, 1));
    broken.store(false, Ordering::Relaxed);
    s.run.reset().unwrap();
    s.run.run().unwrap();
    assert!(s.run.snapshot().tasks[0].refused.is_empty());
    (0..10).for_each(|i| s.call(i as f32).unwrap());
    assert!(s.by_device()[0] > before, "{:?}", s.by_device());
    drop(s);
    // The same where nothing was left: no device has groups so large.
    broken.store(true, Ordering::Relaxed);
    let launch = Launch::new(Source::Portable(source(1).into()), "twice", [Arg::port("x"), Arg::port("y")]);
    let launch = launch.over(Geometry::linear(1 << 20).with_group(1 << 20, 1, 1));
    let is_broken = broken.clone();
    let task = Task::new("none").input("x", t).output("y", t).kernels(Kind::OpenCl, [launch]).host(move |inv| {
        if is_broken.load(Ordering::Relaxed) {
            return Err(TaskError::from("no such luck"));
        }
        let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
        Ok(())
    });
    let s = start(&rt, task);
    s.call(1.0).unwrap_err();
    broken.store(false, Ordering::Relaxed);
    s.run.reset().unwrap();
    s.run.run().unwrap();
    (0..5).for_each(|i| s.call(i as f32).unwrap());
}

#[test]
fn a_call_that_fails_is_not_the_end_of_the_task() {
    for (lanes, mode) in [(1, Mode::DataAware), (2, Mode::Adaptive)] {
        let rt = Runtime::builder().cpu_only().mode(mode).models(Arc::new(Models::off())).build().unwrap();
        let word = Template::scalar::<u64>();
        let root = || {
            Task::new("root").input("x", word).output("y", word).host(|inv| {
                let x = inv.value::<u64>("x")?;
                let y = x.isqrt();
                if y * y != x {
                    return Err(format!("{x} has none").into());
                }
                inv.output::<u64>("y")?[0] = y;
                Ok(())
            })
        };
        let root = rt.accelerate(lanes, root).unwrap();
        let of = |x: u64| {
            let y = root.call(&[Datablock::scalar(x).unwrap()])?;
            Ok::<u64, Error>(y[0].as_slice::<u64>()?[0])
        };
        for i in 0..20u64 {
            assert_eq!(of(i * i).unwrap(), i);
            let why = of(i * i + 2).unwrap_err().to_string();
            assert!(why.contains(&format!("{} has none", i * i + 2)), "{why}");
        }
        // Calls beside it on the same lane fail as well, and come back.
        let calls: Vec<_> = [5u64, 9, 16].into_iter().map(|x| root.spawn(&[Datablock::scalar(x).unwrap()])).collect();
        let came = calls.into_iter().map(|c| c.and_then(forebay::place::Pending::wait)).filter(Result::is_ok).count();
        assert!(came < 3, "{came}");
        assert_eq!(of(144).unwrap(), 12);
    }
}

/// It is called for what it does.
#[test]
fn a_call_of_a_task_without_outputs_comes_back_when_it_is_done() {
    let rt = Runtime::builder().cpu_only().models(Arc::new(Models::off())).build().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let make = || {
        let seen = seen.clone();
        Task::new("sink").input("done", Template::scalar::<u32>()).host(move |inv| {
            std::thread::sleep(Duration::from_millis(2));
            let x = inv.value::<u32>("done")?;
            seen.lock().unwrap().push(x);
            if x == 3 { Err("3 is refused".into()) } else { Ok(()) }
        })
    };
    let sink = rt.accelerate(1, make).unwrap();
    for x in 0..6u32 {
        let came = sink.call(&[Datablock::scalar(x).unwrap()]);
        assert_eq!(seen.lock().unwrap().last(), Some(&x));
        match came {
            Ok(outputs) => assert!(outputs.is_empty() && x != 3),
            Err(why) => assert!(x == 3 && why.to_string().contains("3 is refused"), "{why}"),
        }
    }
}

#[test]
fn a_hint_decides_where_the_size_says_nothing() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let Some(rt) = runtime(&dir) else { return };
    // On the CPU it takes 40 µs for each round, elsewhere always a few ms.
    let t = Template::array::<f32>([N]);
    let task = Task::new("rounds").input("x", t).meta::<u32>("rounds").output("y", t);
    let task = task.hint("rounds").portable(&source(1000), "twice").host(|inv| {
        let begun = Instant::now();
        let (x, y, rounds) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?, inv.value::<u32>("rounds")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
        while begun.elapsed() < Duration::from_micros(40) * rounds {
            std::hint::spin_loop();
        }
        Ok(())
    });
    let mut g = Graph::new("hint");
    let id = g.add(task).unwrap();
    let (feed, hint) = (g.feed((id, "x"), 2).unwrap(), g.feed((id, "rounds"), 2).unwrap());
    let drain = g.drain((id, "y"), 2).unwrap();
    let run = rt.start(g).unwrap();
    let call = |rounds: u32| {
        let before = run.snapshot().tasks[0].by_device[0];
        run.push(feed, Datablock::from_slice(t, &vec![1f32; N]).unwrap()).unwrap();
        run.push(hint, Datablock::scalar(rounds).unwrap()).unwrap();
        assert_eq!(run.pull(drain).unwrap().as_slice::<f32>().unwrap()[0], 2.0);
        run.snapshot().tasks[0].by_device[0] > before
    };
    // Whether nearly all of the latest go there, before long.
    let settles = |rounds: u32, cpu: bool| {
        let begun = Instant::now();
        let mut last = std::collections::VecDeque::new();
        while begun.elapsed() < Duration::from_secs(15) {
            last.push_back(call(rounds) == cpu);
            if last.len() == 13 {
                last.pop_front();
                if last.iter().filter(|right| **right).count() >= 11 {
                    return true;
                }
            }
        }
        false
    };
    assert!(settles(2, true), "a short one belongs on the CPU");
    assert!(settles(2000, false), "a long one does not");
    // What the data decides needs no patience.
    let right = (0..20).filter(|i| call(if i % 2 == 0 { 2 } else { 2000 }) == (i % 2 == 0)).count();
    assert!(right >= 17, "{right} of 20");
    drop(run);
}

#[test]
fn a_hint_must_be_a_number_that_the_task_gets() {
    let t = Template::array::<f32>([N]);
    let wrong = Graph::new("g").add(Task::new("t").input("x", t).hint("x").host(|_| Ok(()))).unwrap_err();
    assert!(wrong.to_string().contains("\"x\" is no Meta port"), "{wrong}");
}

#[test]
fn a_task_is_called_like_a_function_on_as_many_lanes_as_it_may() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let Some(rt) = runtime(&dir) else { return };
    let t = Template::array::<f32>([N]);
    let block = |v: f32| Datablock::from_slice(t, &vec![v; N]).unwrap();
    let task = rt.accelerate(3, || twice(Duration::from_micros(200), 1)).unwrap();
    let first = |b: &[Datablock]| b[0].as_slice::<f32>().unwrap()[0];
    assert_eq!(first(&task.call(&[block(4.0)]).unwrap()), 8.0);
    // Many at once, fetched in any order; some are never fetched.
    let mut pending: Vec<_> = (0..60).map(|i| (i, task.spawn(&[block(i as f32)]).unwrap())).collect();
    pending.retain(|(i, _)| i % 7 != 0);
    while let Some((i, p)) = pending.pop() {
        assert_eq!(first(&p.wait().unwrap()), i as f32 * 2.0);
    }
    let threads = 4;
    std::thread::scope(|s| {
        for n in 0..threads {
            let (task, block) = (&task, &block);
            s.spawn(move || {
                for i in 0..50 {
                    let v = (n * 1000 + i) as f32;
                    assert_eq!(first(&task.call(&[block(v)]).unwrap()), v * 2.0);
                }
            });
        }
    });
    let done: u64 = task.stats().iter().map(|s| s.invocations).sum();
    assert_eq!(done, 61 + threads as u64 * 50);
    task.spread(0);
    assert_eq!(task.lanes(), (1, 3));
    // Lanes must be alike, or one would wait for ever; so must what is checked.
    let turn = AtomicUsize::new(0);
    let unlike = || {
        let t = Task::new("unlike").input("x", t).output("y", t).host(|_| Ok(()));
        match turn.fetch_add(1, Ordering::Relaxed) {
            1 => t.sticky("more", Template::scalar::<u32>()),
            3 => t.output("more", Template::scalar::<u32>()),
            _ => t,
        }
    };
    for _ in 0..2 {
        let unlike = rt.accelerate(2, unlike);
        assert!(matches!(unlike, Err(Error::Task { why, .. }) if why.contains("different inputs or outputs")));
    }
    assert!(matches!(rt.verify(|| twice(Duration::ZERO, 1), &[]), Err(Error::Block { .. })));
    let made = AtomicUsize::new(0);
    let fewer = rt.verify(
        || {
            let task = twice(Duration::ZERO, 1);
            if made.fetch_add(1, Ordering::Relaxed) == 0 {
                task
            } else {
                task.keep(|i| matches!(i, forebay::Impl::Host(_)))
            }
        },
        &[block(1.0)],
    );
    assert!(matches!(fewer, Err(Error::Task { why, .. }) if why.contains("fewer implementations")));
    // What does not fit is refused, and nothing is left half given.
    for wrong in [vec![], vec![block(1.0), block(1.0)], vec![Datablock::scalar(1f32).unwrap()]] {
        assert!(matches!(task.call(&wrong), Err(Error::Block { .. })));
    }
    assert_eq!(first(&task.call(&[block(9.0)]).unwrap()), 18.0);
    assert!(matches!(rt.accelerate(0, || twice(Duration::ZERO, 1)), Err(Error::Size { .. })));
    assert!(rt.accelerate(1, || Task::new("none").input("x", t).output("y", t)).is_err());
}

#[test]
fn calls_whose_results_nobody_reads_do_not_run_far_ahead_of_the_device() {
    let _alone = alone();
    let Ok(b) = Runtime::builder().mode(Mode::FirstAvailable).service(false).only(Kind::OpenCl) else {
        eprintln!("skipped: no OpenCL here");
        return;
    };
    let rt = b.build().unwrap();
    // So large that the device copies it, and not the processor, which would wait.
    const LARGE: usize = 16 * N;
    let t = Template::array::<f32>([LARGE]);
    let source = source(100).replace("4096", &LARGE.to_string());
    let large = || Task::new("twice").input("x", t).output("y", t).portable(&source, "twice");
    let task = rt.accelerate(1, large).unwrap();
    let x = Datablock::from_slice(t, &[1f32; LARGE]).unwrap();
    let one = |n: usize| {
        let begun = Instant::now();
        let mut last = Vec::new();
        for _ in 0..n {
            last = task.call(std::slice::from_ref(&x)).unwrap();
            // The worker has run out of work, and handed over what was issued, each time.
            std::thread::sleep(Duration::from_micros(200));
        }
        (begun.elapsed(), last)
    };
    one(3).1[0].wait().unwrap();
    let begun = Instant::now();
    const CALLS: u32 = 150;
    let (called, last) = one(CALLS as usize);
    last[0].wait().unwrap();
    // Kernels that take milliseconds are not issued far ahead; 32 would be if they were short.
    let (ahead, each) = (begun.elapsed() - called, begun.elapsed() / CALLS);
    assert!(each > Duration::from_micros(200), "too short to tell: {each:?}");
    assert!(ahead < each * 20, "{ahead:?} ahead, {each:?} each");
    assert_eq!(last[0].as_slice::<f32>().unwrap()[7], 2.0);
}

/// The only worker is there for others while a device is being waited for.
#[test]
fn waiting_for_a_device_takes_no_worker() {
    let _alone = alone();
    let Ok(b) = Runtime::builder().mode(Mode::Adaptive).workers(1).service(false).only(Kind::OpenCl) else {
        eprintln!("skipped: no OpenCL here");
        return;
    };
    let rt = b.models(Arc::new(Models::off())).build().unwrap();
    let t = Template::array::<f32>([1]);
    let short = rt.accelerate(1, || Task::new("short").input("x", t).output("y", t).host(|_| Ok(()))).unwrap();
    let (x, one) =
        (Datablock::from_slice(Template::array::<f32>([N]), &[1f32; N]).unwrap(), Datablock::zeroed(t).unwrap());
    // A device may be twenty times as fast as another. PoCL's threads are on the worker's processors, so that a short
    // call may take a few turns of the system's scheduler: the kernel is to take many.
    for rounds in [60_000, 300_000, 1_500_000] {
        let long = rt.accelerate(1, || twice(Duration::from_millis(900), rounds)).unwrap();
        let on_device = || long.stats()[0].by_device[1];
        for _ in 0..20 {
            let (before, begun) = (on_device(), Instant::now());
            let (done, mut longest) = (AtomicBool::new(false), Duration::ZERO);
            std::thread::scope(|s| {
                s.spawn(|| {
                    let out = long.call(std::slice::from_ref(&x));
                    done.store(true, Ordering::Release);
                    out.unwrap();
                });
                while !done.load(Ordering::Acquire) {
                    let called = Instant::now();
                    short.call(std::slice::from_ref(&one)).unwrap();
                    longest = longest.max(called.elapsed());
                }
            });
            let whole = begun.elapsed();
            // One of those that find out what it takes on the CPU.
            if on_device() == before {
                continue;
            }
            if whole < Duration::from_millis(150) {
                break; // Too short to tell.
            }
            assert!(longest < whole / 2, "a call took {longest:?} beside a kernel of {whole:?}");
            return;
        }
    }
    panic!("no long kernel on the device");
}

#[test]
fn implementations_are_checked_against_each_other() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let Some(rt) = runtime(&dir) else { return };
    let t = Template::array::<f32>([N]);
    let data: Vec<f32> = (0..N).map(|i| i as f32 - 100.0).collect();
    let input = Datablock::from_slice(t, &data).unwrap();
    let same = rt.verify(|| twice(Duration::ZERO, 1), std::slice::from_ref(&input)).unwrap();
    assert!(matches!(&same[..], [d] if d.largest == 0.0 && d.output == "y"), "{same:?}");
    let wrong = || {
        Task::new("wrong").input("x", t).output("y", t).portable(&source(1), "twice").host(|inv| {
            let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
            y[77] *= 1.5;
            Ok(())
        })
    };
    let found = rt.verify(wrong, &[input]).unwrap();
    assert!(matches!(&found[..], [d] if d.at == 77 && (d.largest - 1.0 / 3.0).abs() < 1e-6), "{found:?}");
}

/// What is between the rows nobody makes, and nobody compares.
#[test]
fn implementations_of_arrays_with_gaps_are_checked_row_by_row() {
    let rt = Runtime::builder().cpu_only().models(Arc::new(Models::off())).build().unwrap();
    let t = Template::array::<u32>([3, 4]).with_stride(16);
    // Two functions: each makes the rows the same, but for what is said, and leaves something else in the gaps.
    let with = |wrong: Option<usize>| {
        move || {
            let one = move |gap: u32, wrong: Option<usize>| {
                move |inv: &mut forebay::Invocation<'_>| {
                    let y = inv.output::<u32>("y")?;
                    y.iter_mut().enumerate().for_each(|(i, v)| *v = if i % 4 == 3 { gap } else { i as u32 });
                    if let Some(at) = wrong {
                        y[at] += 1;
                    }
                    Ok(())
                }
            };
            Task::new("rows").input("x", t).output("y", t).host(one(7, None)).host(one(8, wrong))
        }
    };
    let input = Datablock::zeroed(t).unwrap();
    let same = rt.verify(with(None), std::slice::from_ref(&input)).unwrap();
    assert!(matches!(&same[..], [d] if d.largest == 0.0), "{same:?}");
    // The third of the third row.
    let found = rt.verify(with(Some(2 * 4 + 2)), &[input]).unwrap();
    assert!(matches!(&found[..], [d] if d.largest == 1.0 && d.at == 2 * 3 + 2), "{found:?}");
}

#[test]
fn goals_are_pursued_whatever_the_tracker_does() {
    use forebay::place::{Action, Counter, Goal};
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let rt = Runtime::builder()
        .cpu_only()
        .mode(Mode::Adaptive)
        .workers(2)
        .service(false)
        .models(Arc::new(Models::at(dir.path())));
    let rt = rt.build().unwrap();
    let t = Template::array::<f32>([N]);
    // A call sleeps for 2 ms: two lanes do twice as many. At fidelity 2 it is a hundred times as quick.
    let level = Arc::new(AtomicUsize::new(0));
    let task = rt
        .accelerate(2, || {
            let level = level.clone();
            Task::new("naps").input("x", t).output("y", t).host(move |_| {
                let ns = if level.load(Ordering::Relaxed) >= 2 { 20 } else { 2000 };
                std::thread::sleep(Duration::from_micros(ns));
                Ok(())
            })
        })
        .unwrap();
    let counter = Counter::default();
    let to = level.clone();
    let pursuit = task
        .pursue(Goal::Throughput(2000.0), counter.per_second(), 3, move |f| to.store(f as usize, Ordering::Relaxed))
        .unwrap();
    let silent = task.clone();
    let never = silent
        .pursue(
            Goal::Latency(1.0),
            || loop {
                std::thread::park()
            },
            1,
            |_| {},
        )
        .unwrap();
    let panics = silent.pursue(Goal::Latency(1.0), || panic!("no figure"), 1, |_| {}).unwrap();
    let begun = Instant::now();
    let block = Datablock::from_slice(t, &vec![1f32; N]).unwrap();
    let done = |p: &forebay::place::Pursuit| p.log().iter().any(|d| d.action == Some(Action::Fidelity(2)));
    let met = |p: &forebay::place::Pursuit| p.log().last().is_some_and(|d| d.measured.is_some_and(|m| m > 2000.0));
    while begun.elapsed() < Duration::from_secs(30) && !(done(&pursuit) && met(&pursuit)) {
        let all: Vec<_> = (0..4).map(|_| task.spawn(std::slice::from_ref(&block)).unwrap()).collect();
        for p in all {
            p.wait().unwrap();
            counter.add(1);
        }
    }
    let actions: Vec<_> = pursuit.log().iter().filter_map(|d| d.action).take(3).collect();
    assert_eq!(actions, [Action::Spread(2), Action::Fidelity(1), Action::Fidelity(2)], "{:?}", pursuit.log());
    assert!(met(&pursuit), "{:?}", pursuit.log().last());
    for other in [never, panics] {
        let log = other.log();
        assert!(!log.is_empty() && log.iter().all(|d| d.action.is_none() && d.why.contains("says nothing")), "{log:?}");
    }
}

#[test]
fn a_goal_that_is_given_up_while_its_tracker_is_asked_lowers_nothing_any_more() {
    use forebay::place::{Goal, Pursuit};
    let _alone = alone();
    let rt = Runtime::builder().cpu_only().mode(Mode::Adaptive).workers(2).service(false);
    let rt = rt.models(Arc::new(Models::off())).build().unwrap();
    let t = Template::array::<f32>([N]);
    let task = rt.accelerate(1, || Task::new("t").input("x", t).output("y", t).host(|_| Ok(()))).unwrap();
    // At which question the program is asked for less, and how often it was, if the goal is given up at question `last`.
    let run = |last: usize| {
        let [questions, lowered, at] = [(); 3].map(|()| Arc::new(AtomicUsize::new(0)));
        let pursuit: Arc<Mutex<Option<Pursuit>>> = Arc::default();
        let (asked, mine) = (questions.clone(), pursuit.clone());
        let tracker = move || {
            if asked.fetch_add(1, Ordering::Relaxed) + 1 == last {
                drop(mine.lock().unwrap().take());
            }
            1.0
        };
        let (asked, less, first) = (questions.clone(), lowered.clone(), Arc::clone(&at));
        let fidelity = move |_| {
            less.fetch_add(1, Ordering::Relaxed);
            let _ = AtomicUsize::compare_exchange(
                &first,
                0,
                asked.load(Ordering::Relaxed),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        };
        *pursuit.lock().unwrap() = Some(task.pursue(Goal::Throughput(1e9), tracker, 3, fidelity).unwrap());
        let begun = Instant::now();
        let over = || match last {
            usize::MAX => lowered.load(Ordering::Relaxed) > 0,
            _ => pursuit.lock().unwrap().is_none(),
        };
        while !over() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{questions:?} questions, and no end");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Longer than a look takes.
        std::thread::sleep(Duration::from_millis(800));
        drop(pursuit.lock().unwrap().take());
        (at.load(Ordering::Relaxed), lowered.load(Ordering::Relaxed))
    };
    let (question, lowered) = run(usize::MAX);
    assert!(question > 0 && lowered > 0);
    assert_eq!(run(question), (0, 0), "it was asked for less after it had given up");
}

#[test]
fn a_goal_that_is_given_up_leaves_as_many_lanes_as_there_were() {
    use forebay::place::Goal;
    let rt = Runtime::builder().cpu_only().service(false).models(Arc::new(Models::off())).build().unwrap();
    let t = Template::scalar::<u32>();
    let task = rt.accelerate(3, || Task::new("t").input("x", t).output("y", t).host(|_| Ok(()))).unwrap();
    // It is met as it is: nothing is changed.
    let goal = || task.pursue(Goal::Throughput(1.0), || 1.0, 0, |_| {}).unwrap();
    let lanes_are = |n: usize| {
        let begun = Instant::now();
        while task.lanes().0 != n {
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?} instead of {n}", task.lanes());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let given_up = goal();
    lanes_are(1);
    drop(given_up);
    lanes_are(3);
    let given_up = goal();
    task.spread(2);
    drop(given_up);
    std::thread::sleep(Duration::from_millis(1200));
    lanes_are(2);
}
