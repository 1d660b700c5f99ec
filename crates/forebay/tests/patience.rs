//! Waits that end when whoever waits is told to: nothing is lost by them, and whoever waits beside goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::place::{Accelerated, Models};
use forebay::{Datablock, Error, Graph, Runtime, Task, Template};

fn word() -> Template {
    Template::scalar::<u64>()
}

fn runtime() -> Runtime {
    Runtime::builder().cpu_only().workers(2).models(Arc::new(Models::off())).build().unwrap()
}

fn block(v: u64) -> Datablock {
    Datablock::scalar(v).unwrap()
}

fn value(b: &Datablock) -> u64 {
    b.as_slice::<u64>().unwrap()[0]
}

/// Says so many times to wait a little longer.
fn times(n: u64) -> impl FnMut() -> Option<Duration> {
    let mut left = n;
    move || {
        left = left.checked_sub(1)?;
        Some(Duration::from_millis(10))
    }
}

fn would_block<T: std::fmt::Debug>(r: Result<T, Error>) -> (String, Duration) {
    match r {
        Err(Error::WouldBlock { port, waited, .. }) => (port, waited),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_push_and_a_pull_ask_how_long_to_wait() {
    let (open, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let mut g = Graph::new("gated");
    let t = Task::new("t").input("x", word()).output("y", word()).host(move |inv| {
        let _ = gate.lock().unwrap().recv();
        inv.output::<u64>("y")?[0] = inv.value::<u64>("x")?;
        Ok(())
    });
    let t = g.add(t).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 1).unwrap(), g.drain((t, "y"), 1).unwrap());
    let run = runtime().start(g).unwrap();
    // Without asking twice, where there is room, or something.
    let mut asked = 0;
    let mut once = || {
        asked += 1;
        Some(Duration::from_secs(60))
    };
    run.push_while(feed, block(1), &mut once).unwrap();
    let (port, waited) = would_block(run.pull_while(drain, times(3)));
    assert!(port.contains("t.y") && waited >= Duration::from_millis(30), "{port} {waited:?}");
    // The task has one, one is in the channel, and some are there ahead.
    let mut sent = 1;
    let waited = loop {
        match run.push_while(feed, block(sent + 1), times(3)) {
            Ok(()) => sent += 1,
            other => break would_block(other).1,
        }
        assert!(sent < 10);
    };
    assert!(waited >= Duration::from_millis(30));
    would_block(run.push_while(feed, block(99), || None));
    // Whoever is patient has it as soon as it is there, and everything in order.
    drop(open);
    for i in 1..=sent {
        assert_eq!(value(&run.pull_while(drain, &mut once).unwrap()), i);
    }
    would_block(run.pull_while(drain, times(1)));
    assert_eq!(asked, 1 + sent);
    run.stop().unwrap();
    assert!(matches!(run.pull_while(drain, times(100)), Err(Error::NotRunning { .. })));
}

/// A task with two outputs, the second of which comes when it is told to.
fn two_outputs(lanes: usize) -> (Accelerated, Sender<()>) {
    let (tell, told) = channel::<()>();
    let told = Arc::new(Mutex::new(told));
    let task = move || {
        let told = told.clone();
        Task::new("two").input("x", word()).output("a", word()).output("b", word()).host(move |inv| {
            let x = inv.value::<u64>("x")?;
            inv.output::<u64>("a")?[0] = x;
            inv.output::<u64>("b")?[0] = x + 1;
            let _ = told.lock().unwrap().recv();
            if x == 13 { Err("as told".into()) } else { Ok(()) }
        })
    };
    (runtime().accelerate(lanes, task).unwrap(), tell)
}

#[test]
fn a_call_that_was_given_up_waiting_for_can_be_waited_for_again() {
    let ((two, tell), begun) = (two_outputs(1), Instant::now());
    let mut first = two.spawn(&[block(1)]).unwrap();
    let (task, waited) = would_block(first.wait_while(times(3)));
    assert!(task == "two" && waited >= Duration::from_millis(30), "{task} {waited:?}");
    // One at work, one behind it: there is no room for a third.
    let mut second = two.spawn(&[block(2)]).unwrap();
    would_block(two.spawn_while(&[block(3)], times(2)).map(drop));
    would_block(second.wait_while(|| None));
    std::thread::scope(|s| {
        // Somebody waits who has all patience, and another one beside.
        let patient = s.spawn(|| second.wait_while(|| Some(Duration::MAX)).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        would_block(first.wait_while(times(2)));
        tell.send(()).unwrap();
        let found = first.wait_while(|| Some(Duration::from_secs(20))).unwrap();
        assert_eq!(found.iter().map(value).collect::<Vec<_>>(), [1, 2]);
        tell.send(()).unwrap();
        assert_eq!(patient.join().unwrap().iter().map(value).collect::<Vec<_>>(), [2, 3]);
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "nobody was told");
    // What is there is there once.
    assert!(matches!(first.wait_while(times(1)), Err(Error::NoSuch { .. })));
    drop(tell);
    // After a failure, too.
    let failed = two.spawn(&[block(13)]).unwrap();
    assert!(matches!(failed.wait(), Err(Error::Failed { .. })));
    assert_eq!(value(&two.call(&[block(5)]).unwrap()[1]), 6);
}

/// Threads that give up again and again, on lanes that fail now and then: each call's results are its own.
#[test]
fn who_gives_up_and_comes_back_has_the_results_of_its_own_call() {
    let calls = Arc::new(AtomicU64::new(0));
    let counted = calls.clone();
    let task = move || {
        let counted = counted.clone();
        Task::new("t").input("x", word()).output("a", word()).output("b", word()).host(move |inv| {
            let x = inv.value::<u64>("x")?;
            inv.output::<u64>("a")?[0] = x;
            inv.output::<u64>("b")?[0] = x + 1;
            counted.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(x % 7 * 100));
            if x % 31 == 0 { Err("as told".into()) } else { Ok(()) }
        })
    };
    let t = runtime().accelerate(2, task).unwrap();
    let begun = Instant::now();
    std::thread::scope(|s| {
        for n in 0..4u64 {
            let t = &t;
            s.spawn(move || {
                let mut asked = n;
                let mut soon = move || {
                    asked += 1;
                    (asked % 3 != 0).then_some(Duration::from_micros(asked % 5 * 40))
                };
                for i in 0..300 {
                    let x = n * 1000 + i + 1;
                    let mut call = loop {
                        match t.spawn_while(&[block(x)], &mut soon) {
                            Err(Error::WouldBlock { .. }) => assert!(begun.elapsed() < Duration::from_secs(60)),
                            other => break other.unwrap(),
                        }
                    };
                    if i % 11 == 0 {
                        continue;
                    }
                    let came = loop {
                        match call.wait_while(&mut soon) {
                            Err(Error::WouldBlock { .. }) => assert!(begun.elapsed() < Duration::from_secs(60)),
                            other => break other,
                        }
                    };
                    match came {
                        Ok(found) => assert_eq!([value(&found[0]), value(&found[1])], [x, x + 1]),
                        // Its own, or that of another call on its lane.
                        Err(e) => assert!(matches!(e, Error::Failed { .. }), "{e}"),
                    }
                }
            });
        }
    });
    assert!(calls.load(Ordering::Relaxed) > 300);
    assert_eq!(value(&t.call(&[block(1)]).or_else(|_| t.call(&[block(1)])).unwrap()[1]), 2);
}

fn still_running(r: Result<(), Error>) -> (String, Duration) {
    match r {
        Err(Error::StillRunning { task, waited, .. }) => (task, waited),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stop_asks_how_long_to_wait_and_has_stopped_the_graph_in_any_case() {
    let (begins, begun) = channel::<u64>();
    let (open, gate) = channel::<()>();
    let (gate, begins) = (Mutex::new(gate), Mutex::new(begins));
    let mut g = Graph::new("gated");
    let t = Task::new("t").input("x", word()).output("y", word()).host(move |inv| {
        let x = inv.value::<u64>("x")?;
        begins.lock().unwrap().send(x)?;
        gate.lock().unwrap().recv()?;
        inv.output::<u64>("y")?[0] = x;
        Ok(())
    });
    let t = g.add(t).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 4).unwrap(), g.drain((t, "y"), 4).unwrap());
    let run = runtime().start(g).unwrap();
    // Nobody is at work.
    run.stop_while(times(1000)).unwrap();
    run.run().unwrap();
    (0..3).for_each(|i| run.push(feed, block(i)).unwrap());
    assert_eq!(begun.recv().unwrap(), 0);
    let (task, waited) = still_running(run.stop_while(times(3)));
    assert!(task == "t" && waited >= Duration::from_millis(30), "{task} {waited:?}");
    assert!(still_running(run.stop_timeout(Duration::from_millis(20))).1 >= Duration::from_millis(20));
    let said = run.stop_timeout(Duration::ZERO).unwrap_err().to_string();
    assert!(said.contains("\"gated\"") && said.contains("\"t\" still runs"), "{said}");
    // It ends as ever, and the next one does not begin.
    assert!(matches!(run.push_timeout(feed, block(9), Duration::ZERO), Err(Error::NotRunning { .. })));
    open.send(()).unwrap();
    run.stop().unwrap();
    assert_eq!((value(&run.try_pull(drain).unwrap()), begun.try_recv().ok()), (0, None));
    // What was in the channel is there yet, also when the graph is set going while somebody has lost his patience with it.
    run.run().unwrap();
    assert_eq!(begun.recv().unwrap(), 1);
    still_running(run.stop_while(|| None));
    run.run().unwrap();
    // And after somebody who was asked has panicked.
    let panics = std::panic::AssertUnwindSafe(|| run.stop_while(|| panic!("asked how long")));
    assert!(std::panic::catch_unwind(panics).is_err());
    let (runs, goes_on) = channel();
    std::thread::scope(|s| {
        s.spawn(|| runs.send(run.run()));
        let ran = goes_on.recv_timeout(Duration::from_secs(20));
        if ran.is_err() {
            std::process::abort();
        }
        ran.unwrap().unwrap();
    });
    (0..2).for_each(|_| open.send(()).unwrap());
    assert_eq!([1, 2], [(); 2].map(|()| value(&run.pull(drain).unwrap())));
    assert_eq!(begun.recv().unwrap(), 2);
}

#[test]
fn who_calls_a_task_that_was_stopped_is_refused_also_when_it_failed() {
    let (two, tell) = two_outputs(2);
    let mut calls = [(); 4].map(|()| two.spawn(&[block(13)]).unwrap());
    while two.stats().iter().any(|t| t.state != "executing") {
        std::thread::yield_now();
    }
    assert_eq!(still_running(two.stop_while(times(2))).0, "two");
    assert!(matches!(two.spawn(&[block(1)]).map(drop), Err(Error::NotRunning { .. })));
    // Those that run end as they do; those behind them never began.
    (0..2).for_each(|_| tell.send(()).unwrap());
    two.stop_while(|| Some(Duration::MAX)).unwrap();
    for call in &mut calls {
        assert!(matches!(call.wait_while(|| Some(Duration::MAX)), Err(Error::Failed { .. })));
    }
    for _ in 0..3 {
        assert!(matches!(two.call(&[block(1)]), Err(Error::NotRunning { .. })));
    }
}

/// A runtime with a worker for each core of which all but one are at work, for as long as this is kept.
struct OneIsLeft {
    rt: Runtime,
    others: Option<forebay::Running>,
    over: Arc<AtomicU64>,
}

impl OneIsLeft {
    fn new() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).max(2);
        let rt = Runtime::builder().cpu_only().workers(workers).service(false).build().unwrap();
        let (there, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut g = Graph::new("busy");
        for i in 1..workers {
            let (there, over) = (there.clone(), over.clone());
            let busy = Task::new(format!("busy{i}")).output("x", word()).host(move |_| {
                there.fetch_add(1, Ordering::SeqCst);
                while over.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                Ok(())
            });
            let busy = g.add(busy).unwrap();
            g.drain((busy, "x"), 1).unwrap();
        }
        let others = Some(rt.start(g).unwrap());
        while there.load(Ordering::SeqCst) < workers as u64 - 1 {
            std::thread::yield_now();
        }
        OneIsLeft { rt, others, over }
    }
}

impl Drop for OneIsLeft {
    fn drop(&mut self) {
        self.over.store(1, Ordering::SeqCst);
        drop(self.others.take());
    }
}

/// A kernel of the processor, "x" to "y", that takes so many µs as there are in the number.
fn kernel(name: &str, us: &Arc<AtomicU64>, ended: &Arc<AtomicU64>) -> Task {
    use forebay::{Arg, Kind, Launch, Source};
    let (us, ended) = (us.clone(), ended.clone());
    let kernel = Source::Cpu(Arc::new(move |_| {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(us.load(Ordering::SeqCst)) {
            std::hint::spin_loop();
        }
        ended.fetch_add(1, Ordering::SeqCst);
    }));
    let launch = Launch::new(kernel, name, [Arg::port("x"), Arg::port("y")]);
    Task::new(name).input("x", word()).output("y", word()).kernels(Kind::Cpu, [launch])
}

/// A function that seldom waits for the program, behind a kernel whose result the program waits for: it is told of that before the
/// function begins, however short both are as a rule.
#[test]
fn who_waits_for_a_kernel_is_told_before_a_function_that_waits_for_him() {
    let (us, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut g = Graph::new("told");
    let first = g.add(kernel("first", &us, &ended)).unwrap();
    let (answer, answers) = channel::<u64>();
    let answers = Mutex::new(answers);
    let asked = us.clone();
    let then = g.add(Task::new("then").input("x", word()).output("y", word()).host(move |_| {
        if asked.load(Ordering::SeqCst) != 0 {
            answers.lock().unwrap().recv_timeout(Duration::from_secs(20))?;
        }
        Ok(())
    }));
    let then = then.unwrap();
    let feed = g.feed((first, "x"), 1).unwrap();
    let seen = g.drain((first, "y"), 1).unwrap();
    g.connect((first, "y"), (then, "x")).unwrap();
    let done = g.drain((then, "y"), 1).unwrap();
    let one = OneIsLeft::new();
    let run = one.rt.start(g).unwrap();
    for i in 0..200u64 {
        // Once in a while the kernel is long enough for the program to sleep meanwhile.
        let waits = i % 50 == 49;
        us.store(if waits { 1000 } else { 0 }, Ordering::SeqCst);
        run.push(feed, block(i)).unwrap();
        let begun = Instant::now();
        run.pull_timeout(seen, Duration::from_secs(10)).unwrap();
        // It looks once more when its time is over.
        assert!(begun.elapsed() < Duration::from_secs(9), "nobody has told");
        if waits {
            answer.send(i).unwrap();
        }
        run.pull_timeout(done, Duration::from_secs(10)).unwrap();
    }
}

/// There is room as soon as a long kernel has begun, and not only when it has ended.
#[test]
fn who_waits_for_room_is_told_before_a_long_kernel() {
    let (us, ended) = (Arc::new(AtomicU64::new(100_000)), Arc::new(AtomicU64::new(0)));
    let mut g = Graph::new("room");
    let long = g.add(kernel("long", &us, &ended)).unwrap();
    let (feed, drain) = (g.feed((long, "x"), 1).unwrap(), g.drain((long, "y"), 100).unwrap());
    let one = OneIsLeft::new();
    let run = one.rt.start(g).unwrap();
    let mut late = 0;
    for i in 0..12u64 {
        run.push(feed, block(i)).unwrap();
        // One is done now, and this one is in the channel.
        late += u64::from(i >= 2 && ended.load(Ordering::SeqCst) > i - 1);
    }
    // Others may have the cores for a while.
    assert!(late <= 3, "told {late} times after the kernel that made the room");
    (0..12).for_each(|_| drop(run.pull_timeout(drain, Duration::from_secs(10)).unwrap()));
}
