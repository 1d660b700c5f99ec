//! Programs that use the dataflow library, under the service: nothing in them says so.

mod common;
#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::io::Write;
use std::time::{Duration, Instant};

use common::{Program, Service, spin, until};
use forebay::{Datablock, Graph, Runtime, Task, Template};
use forebay_proto::wire::Class;

/// Not a test: a graph of three tasks, or `STAGES`, that each take `TASK_US`, fed without end, or every `PERIOD_MS`.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let task = Duration::from_micros(number("TASK_US").unwrap_or(500));
    let t = Template::array::<u64>([8]);
    let mut g = Graph::new("program");
    let stage = |name: &str| {
        Task::new(name).input("in", t).output("out", t).host(move |inv| {
            let (i, o) = (inv.input::<u64>("in")?, inv.output::<u64>("out")?);
            o.copy_from_slice(i);
            spin(task);
            Ok(())
        })
    };
    let stages = number("STAGES").unwrap_or(3);
    let all: Vec<_> = (0..stages).map(|n| g.add(stage(&n.to_string())).unwrap()).collect();
    all.windows(2).for_each(|two| g.connect((two[0], "out"), (two[1], "in")).unwrap());
    let (feed, drain) = (g.feed((all[0], "in"), 4).unwrap(), g.drain((all[all.len() - 1], "out"), 4).unwrap());
    let run = Runtime::builder().cpu_only().build().unwrap().start(g).unwrap();
    if std::env::var_os("ENDS").is_some() {
        // By now it is suspended: nothing of this is worked off.
        std::thread::sleep(Duration::from_secs(1));
        for i in 0..4u64 {
            let _ = run.try_push(feed, Datablock::from_slice(t, &[i; 8]).unwrap());
        }
        std::thread::sleep(Duration::from_millis(200));
        assert!(run.try_pull(drain).is_err(), "a suspended program worked");
        drop(run);
        return;
    }
    let mut latencies = Vec::new();
    let items = number("ITEMS").unwrap_or(u64::MAX);
    let period = number("PERIOD_MS");
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..items {
                if let Some(ms) = period {
                    std::thread::sleep(Duration::from_millis(ms));
                }
                run.push(feed, Datablock::from_slice(t, &[i; 8]).unwrap()).unwrap();
                if period.is_some() {
                    let begun = Instant::now();
                    run.pull(drain).unwrap();
                    latencies.push(begun.elapsed());
                }
            }
        });
        if period.is_none() {
            s.spawn(|| {
                (0..items).for_each(|i| assert_eq!(run.pull(drain).unwrap().as_slice::<u64>().unwrap(), [i; 8]))
            });
        }
    });
    leave_latencies(latencies);
}

/// For whoever started the program and named a file `RESULT`: the median and 95 %, µs.
fn leave_latencies(mut latencies: Vec<Duration>) {
    latencies.sort();
    if let Some(to) = std::env::var_os("RESULT") {
        let at = |q: usize| latencies[(latencies.len() - 1) * q / 100].as_micros();
        std::fs::write(to, format!("{} {}", at(50), at(95))).unwrap();
    }
}

/// What a program of a class, which ends, has left there.
fn latencies(s: &Service, role: &str, settings: &[(&str, String)], class: Class) -> (u64, u64) {
    let result = s.dir.join("result");
    let settings = [settings, &[("RESULT", result.display().to_string())]].concat();
    let mut p = Program::start(s, role, &settings);
    until("it has joined", || s.process(p.pid()).is_some());
    s.set(p.pid(), class);
    assert!(p.0.wait().unwrap().success());
    let text = std::fs::read_to_string(result).unwrap();
    let mut n = text.split(' ').map(|n| n.parse::<u64>().unwrap());
    (n.next().unwrap(), n.next().unwrap())
}

/// Not a test: a program with a goal of `GOAL` calls a second, each of which takes a core for a millisecond. It says in the file
/// `RESULT` how many it has done, and gives the goal up when the file `END` is there.
#[test]
#[ignore = "a program that other tests start"]
fn program_with_a_goal() {
    use forebay::place::{Counter, Goal};
    let goal: f64 = std::env::var("GOAL").unwrap().parse().unwrap();
    let (result, end) = (std::env::var("RESULT").unwrap(), std::env::var("END").unwrap());
    let t = Template::array::<u64>([8]);
    let task = || {
        Task::new("t").input("in", t).output("out", t).host(|inv| {
            let (i, o) = (inv.input::<u64>("in")?, inv.output::<u64>("out")?);
            o.copy_from_slice(i);
            spin(Duration::from_millis(1));
            Ok(())
        })
    };
    let cores = std::thread::available_parallelism().unwrap().get().min(16);
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let task = rt.accelerate(cores, task).unwrap();
    let count = Counter::default();
    let mut pursuit = Some(task.pursue(Goal::Throughput(goal), count.per_second(), 0, |_| {}).unwrap());
    let input = Datablock::from_slice(t, &[1u64; 8]).unwrap();
    let mut waiting = std::collections::VecDeque::new();
    let (mut done, mut said) = (0u64, Instant::now());
    loop {
        waiting.push_back(task.spawn(std::slice::from_ref(&input)).unwrap());
        if waiting.len() >= 2 * cores {
            waiting.pop_front().unwrap().wait().unwrap();
            count.add(1);
            done += 1;
        }
        if said.elapsed() > Duration::from_millis(50) {
            said = Instant::now();
            std::fs::write(&result, done.to_string()).unwrap();
            if std::path::Path::new(&end).exists() && pursuit.is_some() {
                pursuit = None;
            }
        }
    }
}

#[test]
fn a_goal_gets_the_share_that_it_needs_survives_the_service_and_gives_the_share_back() {
    let mut s = Service::start(&[]);
    let (result, end) = (s.dir.join("result"), s.dir.join("end"));
    // Two thirds of the machine, beside a program that takes what it can: half is not enough.
    let cores = std::thread::available_parallelism().unwrap().get().min(16) as f64;
    let path = |p: &std::path::Path| p.to_str().unwrap().to_owned();
    let settings = [("GOAL", (cores * 650.0).to_string()), ("RESULT", path(&result)), ("END", path(&end))];
    let hog = Program::start(&s, "program", &[("TASK_US", "500".into())]);
    until("the other one has joined", || s.process(hog.pid()).is_some());
    let p = Program::start(&s, "program_with_a_goal", &settings);
    let class = |s: &Service| s.process(p.pid()).map(|p| p.class);
    let long = Instant::now();
    while !matches!(class(&s), Some(Class::Custom(c)) if c >= 600_000) {
        assert!(long.elapsed() < Duration::from_secs(40), "{:?}", class(&s));
        std::thread::sleep(Duration::from_millis(100));
    }
    let done = || std::fs::read_to_string(&result).unwrap_or_default().parse::<u64>().unwrap_or(0);
    // The service goes: the program goes on, and nothing of it is lost when the service is back.
    s.kill();
    let before = done();
    until("it goes on by itself", || done() > before + 200);
    s.restart();
    until("it is known again", || matches!(class(&s), Some(Class::Custom(_))));
    let before = done();
    until("it goes on with the service", || done() > before + 200);
    std::fs::write(&end, "").unwrap();
    until("its share is given back", || class(&s) == Some(Class::Normal));
}

/// Not a test: a task that takes a core for 25 ms and calls itself, 15 deep, again and again. It says in the file `RESULT` how often
/// that has come back.
#[test]
#[ignore = "a program that other tests start"]
fn program_that_calls_itself() {
    use forebay::place::Accelerated;
    use std::sync::{Arc, OnceLock};
    let word = Template::scalar::<u64>();
    let itself: Arc<OnceLock<Accelerated>> = Arc::default();
    let make = || {
        let itself = itself.clone();
        Task::new("t").input("x", word).output("y", word).host(move |inv| {
            spin(Duration::from_millis(25));
            let x = inv.value::<u64>("x")?;
            let below = match (x, itself.get()) {
                (0, _) | (_, None) => 0,
                (_, Some(t)) => t.call(&[Datablock::scalar(x - 1)?])?[0].as_slice::<u64>()?[0] + 1,
            };
            inv.output::<u64>("y")?[0] = below;
            Ok(())
        })
    };
    let rt = Runtime::builder().cpu_only().workers(1).build().unwrap();
    let t = rt.accelerate(16, make).unwrap();
    itself.set(t.clone()).ok().unwrap();
    let result = std::env::var("RESULT").unwrap();
    for done in 1u64.. {
        let y = t.call(&[Datablock::scalar(15u64).unwrap()]).unwrap();
        assert_eq!(y[0].as_slice::<u64>().unwrap(), [15]);
        std::fs::write(&result, done.to_string()).unwrap();
    }
}

/// What waits inside a function neither uses credit nor keeps any from what it waits for.
#[test]
fn functions_that_call_tasks_go_on_with_a_small_share() {
    let s = Service::start(&[]);
    let result = s.dir.join("result");
    let hog = Program::start(&s, "program", &[("TASK_US", "500".into())]);
    let p = Program::start(&s, "program_that_calls_itself", &[("RESULT", result.to_str().unwrap().to_owned())]);
    [&hog, &p].iter().for_each(|p| until("it has joined", || s.process(p.pid()).is_some()));
    s.set(p.pid(), Class::Custom(100_000));
    let done = || std::fs::read_to_string(&result).unwrap_or_default().parse::<u64>().unwrap_or(0);
    let before = done();
    // Each takes 0.4 s of a core.
    let begun = Instant::now();
    while done() < before + 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} of 3", done() - before);
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn graphs_keep_to_their_shares_and_stop_when_told() {
    let s = Service::start(&[]);
    let programs: Vec<Program> =
        [300, 2000].iter().map(|t| Program::start(&s, "program", &[("TASK_US", t.to_string())])).collect();
    for p in &programs {
        until("it has joined", || s.process(p.pid()).is_some());
    }
    s.set(programs[0].pid(), Class::Custom(750_000));
    s.set(programs[1].pid(), Class::Custom(250_000));
    std::thread::sleep(Duration::from_secs(1));
    let before: Vec<_> = programs.iter().map(Program::cpu).collect();
    std::thread::sleep(Duration::from_secs(4));
    let used: Vec<_> = programs.iter().zip(before).map(|(p, b)| (p.cpu() - b).as_secs_f64()).collect();
    let part = used[0] / (used[0] + used[1]);
    assert!((part - 0.75).abs() < 0.03, "{used:?}");
    s.set(programs[0].pid(), Class::Suspended);
    std::thread::sleep(Duration::from_millis(100));
    let before = programs[0].cpu();
    std::thread::sleep(Duration::from_millis(500));
    let used = programs[0].cpu() - before;
    assert!(used < Duration::from_millis(10), "{used:?}");
}

/// Not a test: a graph on a simulated device whose kernels take a millisecond of real time, or `KERNEL_MS`, in many runtimes. There
/// is one such device, which serves all such programs by turns, as a GPU does: who has work in it has a file in the folder
/// `DEVICE`, and is the slower the more there are. The file `DEVICE.ran` says whose kernels it has run. After `ITEMS`, one more, and
/// one whose result nobody asks for, it rests. With `PERIOD_MS` it does its items so far apart, one at a time, and ends.
#[test]
#[ignore = "a program that other tests start"]
fn accelerated() {
    use forebay::hal::sim::{Model, SimDevice};
    use forebay::{Arg, Kind, Launch, Source};
    let t = Template::array::<u32>([8]);
    let device =
        || -> std::sync::Arc<dyn forebay::hal::Device> { std::sync::Arc::new(SimDevice::new(Model::default())) };
    // Each runtime has the same account.
    (0..20).for_each(|_| drop(Runtime::builder().devices(vec![device()]).build().unwrap()));
    let folder = std::path::PathBuf::from(std::env::var("DEVICE").unwrap());
    let me = std::process::id().to_string();
    let takes = std::env::var("KERNEL_MS").map_or(1.0, |n| n.parse().unwrap()) / 1e3;
    let ran = std::fs::File::options().append(true).open(folder.with_extension("ran")).unwrap();
    let kernel = Source::Cpu(std::sync::Arc::new(move |s| {
        // SAFETY: each part writes its own elements only.
        let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
        s.for_each(|i, _, _| y[i] = x[i] + 1);
        if s.start == 0 {
            std::fs::write(folder.join(&me), "").unwrap();
            let (mut left, mut now) = (takes, Instant::now());
            while left > 0.0 {
                std::thread::sleep(Duration::from_micros(100));
                let others = std::fs::read_dir(&folder).unwrap().count() - 1;
                left -= now.elapsed().as_secs_f64() / (1 + others) as f64;
                now = Instant::now();
            }
            std::fs::remove_file(folder.join(&me)).unwrap();
            writeln!(&ran, "{me}").unwrap();
        }
    }));
    let mut g = Graph::new("accelerated");
    let launch = Launch::new(kernel, "work", [Arg::port("x"), Arg::port("y")]);
    let id = g.add(Task::new("work").input("x", t).output("y", t).kernels(Kind::Sim, [launch])).unwrap();
    let (feed, drain) = (g.feed((id, "x"), 4).unwrap(), g.drain((id, "y"), 4).unwrap());
    let run = Runtime::builder().devices(vec![device()]).build().unwrap().start(g).unwrap();
    let push = || run.push(feed, Datablock::from_slice(t, &[7u32; 8]).unwrap()).unwrap();
    if let Ok(ms) = std::env::var("PERIOD_MS") {
        let items = (0..std::env::var("ITEMS").unwrap().parse().unwrap()).map(|_: u32| {
            std::thread::sleep(Duration::from_millis(ms.parse().unwrap()));
            let begun = Instant::now();
            push();
            assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), [8; 8]);
            begun.elapsed()
        });
        return leave_latencies(items.collect());
    }
    // One more than is waited for, so that the device always has work.
    push();
    for _ in 0..std::env::var("ITEMS").map_or(u32::MAX, |n| n.parse().unwrap()) {
        push();
        assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), [8; 8]);
    }
    run.pull(drain).unwrap();
    // When no worker is awake this thread issues it itself, and nobody asks for the result.
    std::thread::sleep(Duration::from_millis(50));
    push();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_device_whose_use_programs_report_is_shared_too() {
    let s = Service::start(&["--device", "sim=1"]);
    let device = s.dir.join("device");
    std::fs::create_dir(&device).unwrap();
    std::fs::write(device.with_extension("ran"), "").unwrap();
    let settings = [("DEVICE", device.display().to_string())];
    let programs = [0, 1].map(|_| Program::start(&s, "accelerated", &settings));
    let told = || {
        let all = s.connect().processes().unwrap();
        let of = |p: &Program| all.iter().find(|q| q.pid == p.pid() && q.device == "sim").map_or(0, |q| q.spent_ns);
        programs.each_ref().map(|p| of(p) as f64 / 1e9)
    };
    let kernels = || {
        let ran = std::fs::read_to_string(device.with_extension("ran")).unwrap();
        programs.each_ref().map(|p| ran.lines().filter(|l| *l == p.pid().to_string()).count() as f64)
    };
    until("both use it", || told().iter().all(|n| *n > 0.0));
    s.set(programs[0].pid(), Class::Custom(750_000));
    s.set(programs[1].pid(), Class::Custom(250_000));
    std::thread::sleep(Duration::from_secs(1));
    let (before, begun) = ((told(), kernels()), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let (after, passed) = ((told(), kernels()), begun.elapsed().as_secs_f64());
    let told = [0, 1].map(|i| (after.0[i] - before.0[i]) / passed);
    let ran = [0, 1].map(|i| (after.1[i] - before.1[i]) / passed);
    println!("kernels a second {ran:?}, use {told:?}");
    let share = |of: [f64; 2]| of[0] / (of[0] + of[1]);
    assert!((share(ran) - 0.75).abs() < 0.05 && (share(told) - 0.75).abs() < 0.05, "{ran:?} {told:?}");
    // Each takes others' turns for its own; all together the device was in use once.
    assert!((0.8..1.1).contains(&(told[0] + told[1])), "{told:?}");
}

#[test]
fn a_program_that_rests_uses_nothing_of_a_device() {
    let s = Service::start(&["--device", "sim=1"]);
    let device = s.dir.join("device");
    std::fs::create_dir(&device).unwrap();
    std::fs::write(device.with_extension("ran"), "").unwrap();
    let settings = [("DEVICE", device.display().to_string()), ("ITEMS", "20".into())];
    let p = Program::start(&s, "accelerated", &settings);
    until("it has run", || std::fs::read_to_string(device.with_extension("ran")).unwrap().lines().count() == 22);
    std::thread::sleep(Duration::from_millis(100));
    let told = || {
        let all = s.connect().processes().unwrap();
        all.iter().find(|q| q.pid == p.pid() && q.device == "sim").map_or(0, |q| q.spent_ns)
    };
    let before = told();
    assert!(before >= 22_000_000, "{before}");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(told(), before);
}

#[test]
fn an_interactive_graph_comes_through_beside_a_hog() {
    let s = Service::start(&[]);
    let settings = [("TASK_US", "1000".into()), ("PERIOD_MS", "20".into()), ("ITEMS", "150".into())];
    let latency = |class| latencies(&s, "program", &settings, class);
    let hogs: Vec<Program> = (0..2).map(|_| Program::start(&s, "program", &[("TASK_US", "300".into())])).collect();
    for h in &hogs {
        until("it has joined", || s.process(h.pid()).is_some());
    }
    // Whatever else the machine does at one time it does not do at all times.
    let comes_through = |_| {
        let (normal, first) = (latency(Class::Normal), latency(Class::Interactive));
        println!("median and 95 %, µs: normal {normal:?}, interactive {first:?}");
        first.1 < normal.1 && first.0 * 5 < normal.0 * 4
    };
    assert!((0..3).any(comes_through));
}

/// On a device that programs report their use of, an OpenCL GPU say: while an interactive program has a kernel there, the other's
/// next one waits.
#[test]
fn an_interactive_program_is_first_on_a_device_whose_use_programs_report() {
    let s = Service::start(&["--device", "sim=1"]);
    let device = s.dir.join("device");
    std::fs::create_dir(&device).unwrap();
    std::fs::write(device.with_extension("ran"), "").unwrap();
    let setting = ("DEVICE", device.display().to_string());
    let hog = Program::start(&s, "accelerated", std::slice::from_ref(&setting));
    until("it has joined", || s.process(hog.pid()).is_some());
    let settings = [setting, ("KERNEL_MS", "4".into()), ("PERIOD_MS", "30".into()), ("ITEMS", "60".into())];
    let comes_first = |_| {
        let [normal, first] = [Class::Normal, Class::Interactive].map(|c| latencies(&s, "accelerated", &settings, c));
        println!("median and 95 %, µs: normal {normal:?}, interactive {first:?}");
        first.0 < 6000 && first.0 * 4 < normal.0 * 3
    };
    // Other tests may have the cores for a while, the one that wants everything has less then.
    assert!((0..5).any(comes_first));
}

/// One whose graph has one task at a time, and a share of more: it says that it wants no more than it can use, so the other one
/// has at least half of what it leaves (a worker that is woken counts as one at work until it sleeps again).
#[test]
fn what_a_pipeline_cannot_use_others_have() {
    let cores = std::thread::available_parallelism().unwrap().get() as f64;
    if cores < 2.0 {
        return eprintln!("skipped: one core");
    }
    let s = Service::start(&[]);
    let start = |stages: u32, task_us: u32| {
        let settings = [("STAGES", stages.to_string()), ("TASK_US", task_us.to_string())];
        let p = Program::start(&s, "program", &settings);
        until("it has joined", || s.process(p.pid()).is_some());
        p
    };
    let programs = [start(1, 300), start(3, 1000)];
    s.set(programs[0].pid(), Class::Custom(800_000));
    std::thread::sleep(Duration::from_secs(1));
    let parts = || {
        let (before, begun) = (programs.each_ref().map(Program::cpu), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let all = cores * begun.elapsed().as_secs_f64();
        [0, 1].map(|i: usize| (programs[i].cpu() - before[i]).as_secs_f64() / all)
    };
    let mut last = [0.0; 2];
    // Other tests may have the cores for a while.
    let has_it = (0..5).any(|_| {
        last = parts();
        last[1] > 0.7 * (1.0 - 1.0 / cores)
    });
    assert!(has_it, "{last:?} of {cores} cores");
}

/// Not a test: tasks on a resident grid, one after the other, on the stand-in for a GPU. `RESULT` says for how long somebody
/// waited for them.
#[test]
#[ignore = "a program that other tests start"]
fn resident() {
    use forebay::resident::Builder;
    let device = forebay::hal::discover(&[forebay::Kind::Cuda]).0.remove(0);
    let text = "TASK_PER_THREAD(busy) {
        u64 x = ((const u64 *)fb_span(t, 0).data)[0];
        for (u32 k = 0; k < 3000000; k++) x = x * 6364136223846793005ull + (x >> 33);
        ((u64 *)fb_span(t, 1).data)[0] = x | 1;
    }";
    let grid = std::sync::Arc::new(Builder::new(text).functions(["busy"]).blocks(1).start_on(&device).unwrap());
    let t = Template::array::<u64>([1]);
    let mut g = Graph::new("resident");
    let id = g.add(Task::new("busy").input("x", t).output("y", t).resident(&grid, "busy")).unwrap();
    let (feed, drain) = (g.feed((id, "x"), 4).unwrap(), g.drain((id, "y"), 4).unwrap());
    let run = Runtime::builder().devices(vec![device]).build().unwrap().start(g).unwrap();
    let mut waited = Duration::ZERO;
    for i in 0..50u64 {
        let begun = Instant::now();
        run.push(feed, Datablock::from_slice(t, &[i]).unwrap()).unwrap();
        assert_eq!(run.pull(drain).unwrap().as_slice::<u64>().unwrap()[0] & 1, 1);
        waited += begun.elapsed();
        std::thread::sleep(Duration::from_millis(2));
    }
    std::fs::write(std::env::var("RESULT").unwrap(), waited.as_nanos().to_string()).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// They are in no queue, so nothing but the program says what they took.
#[test]
fn tasks_on_the_resident_grid_are_charged_for() {
    let Some(dir) = stand_in::build() else { return };
    let s = Service::start(&["--device", "stand-in on the host (no GPU)=1"]);
    let result = s.dir.join("result");
    let path = |p: &std::path::Path| p.to_str().unwrap().to_owned();
    let cache = path(&s.dir.join("cache"));
    let settings = [
        ("LD_LIBRARY_PATH", path(dir)),
        ("FOREBAY_NVRTC", path(dir)),
        ("FOREBAY_CACHE", cache),
        ("RESULT", path(&result)),
    ];
    let mut p = Program::start(&s, "resident", &settings);
    let waited = || std::fs::read_to_string(&result).ok().and_then(|r| r.parse::<u64>().ok());
    until("it has run", || {
        assert!(p.0.try_wait().unwrap().is_none(), "it ended");
        waited().is_some()
    });
    let waited = waited().unwrap() as f64;
    let told = || {
        let all = s.connect().processes().unwrap();
        all.iter().find(|q| q.pid == p.pid() && q.device.starts_with("stand-in")).map_or(0, |q| q.spent_ns) as f64
    };
    // What was waited for besides is the runtime's own part.
    until("it has been charged", || told() > 0.5 * waited);
    println!("{:.1} of {:.1} ms", told() / 1e6, waited / 1e6);
    assert!(told() < 1.05 * waited && waited > 20e6, "{} of {waited}", told());
    // The service takes in the end of it a little later than the program is told of its results.
    until("it rests", || {
        let before = told();
        std::thread::sleep(Duration::from_millis(200));
        told() == before
    });
}

/// Not a test: a kernel of about 20 ms of the processor on its OpenCL device, or the device of kind `DEVICE`, six invocations on
/// their way at a time.
#[test]
#[ignore = "a program that other tests start"]
fn on_accelerator() {
    use forebay::{Arg, Kind, Launch, Source};
    let kind = std::env::var("DEVICE").map_or(Kind::OpenCl, |kind| kind.parse().unwrap());
    let t = Template::array::<f32>([4096]);
    let source = "KERNEL void turn(GLOBAL const float *x, GLOBAL float *y, uint rounds) {
      uint i = gid_x(); float a = x[i];
      for (uint r = 0; r < rounds; r++) a = a * 0.5f + 1.0f;
      y[i] = a; }";
    let rt = Runtime::builder().only(kind).unwrap().build().unwrap();
    let start = |rounds: u32| {
        let mut g = Graph::new("kernels");
        let args = [Arg::port("x"), Arg::port("y"), Arg::U32(rounds)];
        let launch = Launch::new(Source::Portable(source.into()), "turn", args);
        let id = g.add(Task::new("turn").input("x", t).output("y", t).kernels(kind, [launch])).unwrap();
        let ends = (g.feed((id, "x"), 6).unwrap(), g.drain((id, "y"), 6).unwrap());
        (rt.start(g).unwrap(), ends)
    };
    let item = || Datablock::from_slice(t, &[1f32; 4096]).unwrap();
    let mut rounds = 1000;
    loop {
        let (run, (feed, drain)) = start(rounds);
        let once = || {
            let begun = forebay_proto::client::cpu_time_ns();
            run.push(feed, item()).unwrap();
            run.pull(drain).unwrap().as_slice::<f32>().unwrap();
            forebay_proto::client::cpu_time_ns() - begun
        };
        let took = (0..3).map(|_| once()).min().unwrap();
        if took > 4_000_000 {
            rounds = (u64::from(rounds) * 20_000_000 / took) as u32;
            break;
        }
        rounds *= 2;
    }
    let (run, (feed, drain)) = start(rounds);
    (0..5).for_each(|_| run.push(feed, item()).unwrap());
    loop {
        run.push(feed, item()).unwrap();
        run.pull(drain).unwrap();
    }
}

/// How much of the processor a program with a tenth of it, whose pieces of work take 20 ms, uses in one go beside one that wants
/// everything, ms, in order.
fn in_one_go(role: &str) -> Vec<f64> {
    let s = Service::start(&[]);
    let hog = Program::start(&s, "program", &[("TASK_US", "500".into())]);
    until("the other one has joined", || s.process(hog.pid()).is_some());
    let p = Program::start(&s, role, &[("TASK_US", "20000".into())]);
    until("it has joined", || s.process(p.pid()).is_some());
    // It measures how long its pieces are first.
    std::thread::sleep(Duration::from_secs(2));
    s.set(p.pid(), Class::Custom(100_000));
    std::thread::sleep(Duration::from_secs(1));
    let (mut goes, mut go) = (Vec::new(), Duration::ZERO);
    let (mut last, mut active, end) = (p.cpu(), Instant::now(), Instant::now() + Duration::from_secs(4));
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
        let now = p.cpu();
        if now - last > Duration::from_micros(50) {
            (go, active) = (go + (now - last), Instant::now());
        } else if active.elapsed() > Duration::from_millis(15) && go > Duration::from_millis(5) {
            goes.push(std::mem::take(&mut go).as_secs_f64() * 1e3);
        }
        last = now;
    }
    goes.sort_by(f64::total_cmp);
    println!("{role}: {goes:.1?}");
    goes
}

/// As long as it owes nothing it may begin, but not on all cores at once: it would owe a task of each.
#[test]
fn long_tasks_are_begun_one_at_a_time_where_there_is_credit_for_one() {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return eprintln!("skipped: one core");
    }
    // Other tests may have the cores for a while.
    let few = |goes: Vec<f64>| goes.len() > 4 && goes[goes.len() / 2] < 30.0;
    assert!((0..3).any(|_| few(in_one_go("program"))));
}

/// However long they are: who is alone has all cores.
#[test]
fn long_tasks_of_one_that_is_alone_are_begun_on_every_core() {
    let s = Service::start(&[]);
    let settings = [("TASK_US", "70000".into()), ("STAGES", "20".into())];
    let p = Program::start(&s, "program", &settings);
    until("it has joined", || s.process(p.pid()).is_some());
    std::thread::sleep(Duration::from_secs(2));
    let mut last = 0.0;
    let cores = std::thread::available_parallelism().unwrap().get().min(16) as f64;
    // Other tests may have the cores for a while.
    let has_all = (0..5).any(|_| {
        let (before, begun) = (p.cpu(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        last = (p.cpu() - before).as_secs_f64() / begun.elapsed().as_secs_f64() / cores;
        last > 0.85
    });
    assert!(has_all, "{last} of {cores} cores");
}

/// As with tasks, of what is issued to a device. One more may be issued when the one before is nearly done.
#[test]
fn long_kernels_are_issued_one_at_a_time_where_there_is_credit_for_one() {
    if forebay::hal::discover(&[forebay::Kind::OpenCl]).0.is_empty() {
        return eprintln!("skipped: no OpenCL device");
    }
    let few = |goes: Vec<f64>| goes.len() > 4 && goes[goes.len() * 3 / 4] < 60.0;
    assert!((0..3).any(|_| few(in_one_go("on_accelerator"))));
}

/// Nobody has told the service of it. What the programs say that they have used, and what the processor has done for each, since
/// that is what this GPU is made of.
fn is_shared_by_those_who_bring_it(device: &[(&str, String)]) {
    let s = Service::start(&[]);
    let cache = s.dir.join("cache").display().to_string();
    let settings = [device, &[("FOREBAY_CACHE", cache)]].concat();
    let programs = [0, 1].map(|_| Program::start(&s, "on_accelerator", &settings));
    let told = || {
        let all = s.connect().processes().unwrap();
        let of = |p: &Program| all.iter().find(|q| q.pid == p.pid() && q.device != "cpu").map_or(0, |q| q.spent_ns);
        programs.each_ref().map(|p| of(p) as f64 / 1e9)
    };
    until("both use it", || told().iter().all(|n| *n > 0.0));
    until("the log has it, once", || s.said("is shared from now on").len() == 1);
    for (p, share) in programs.iter().zip([750_000, 250_000]) {
        s.set(p.pid(), Class::Custom(share));
    }
    std::thread::sleep(Duration::from_secs(2));
    let had = || (told(), programs.each_ref().map(|p| p.cpu().as_secs_f64()));
    let (before, begun) = (had(), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let (after, passed) = (had(), begun.elapsed().as_secs_f64());
    let part = |before: [f64; 2], after: [f64; 2]| {
        let of = [0, 1].map(|i| (after[i] - before[i]) / passed);
        println!("{of:.3?}");
        (of[0] / (of[0] + of[1]), of[0] + of[1])
    };
    let (told, cpu) = (part(before.0, after.0), part(before.1, after.1));
    assert!((told.0 - 0.75).abs() < 0.05 && (cpu.0 - 0.75).abs() < 0.1, "{told:?} {cpu:?}");
    assert!((0.8..1.1).contains(&told.1), "{told:?}");
}

#[test]
fn an_opencl_gpu_is_shared_by_those_who_bring_it() {
    if forebay::hal::discover(&[forebay::Kind::OpenCl]).0.is_empty() {
        return eprintln!("skipped: no OpenCL device");
    }
    let Some(gpu) = stand_in::opencl_gpu() else { return };
    is_shared_by_those_who_bring_it(&[("OPENCL_DYLIB_PATH", gpu)]);
}

/// The service divides no GPU here.
#[test]
fn a_cuda_gpu_is_shared_by_those_who_bring_it() {
    let Some(dir) = stand_in::build() else { return };
    let dir = dir.to_str().unwrap();
    is_shared_by_those_who_bring_it(&[
        ("DEVICE", "cuda".into()),
        ("LD_LIBRARY_PATH", dir.into()),
        ("FOREBAY_NVRTC", dir.into()),
    ]);
}

/// A share of one core for a program of one thread, beside some that share the others: each of them works on as many cores as its
/// share is, and not on all of them for a part of the time.
#[test]
fn one_thread_has_a_core_beside_programs_that_take_everything() {
    let cores = std::thread::available_parallelism().unwrap().get().min(16) as u32;
    if cores < 2 {
        return eprintln!("skipped: one core");
    }
    let s = Service::start(&[]);
    let start = |stages: u32, task_us: u32| {
        let settings = [("STAGES", stages.to_string()), ("TASK_US", task_us.to_string())];
        let p = Program::start(&s, "program", &settings);
        until("it has joined", || s.process(p.pid()).is_some());
        p
    };
    let mut all = vec![start(1, 1000)];
    all.extend((0..3).map(|_| start(2 * cores, 200)));
    s.set(all[0].pid(), Class::Custom(1_000_000 / cores));
    std::thread::sleep(Duration::from_secs(1));
    let mut last = Vec::new();
    // Other tests may have the cores for a while.
    let has_it = (0..5).any(|_| {
        let (before, begun): (Vec<_>, _) = (all.iter().map(Program::cpu).collect(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let passed = begun.elapsed().as_secs_f64();
        last = all.iter().zip(before).map(|(p, b)| (p.cpu() - b).as_secs_f64() / passed).collect();
        println!("{last:.3?} cores");
        last[0] > 0.82 && last[1..].iter().sum::<f64>() > 0.8 * f64::from(cores - 1)
    });
    assert!(has_it, "{last:?} of {cores} cores");
}

#[test]
fn a_graph_that_waits_for_credit_ends_when_it_is_stopped() {
    let s = Service::start(&[]);
    let mut p = Program::start(&s, "program", &[("ENDS", "1".into())]);
    until("it has joined", || s.process(p.pid()).is_some());
    s.set(p.pid(), Class::Suspended);
    until("it has ended", || p.0.try_wait().unwrap().is_some());
    assert!(p.0.wait().unwrap().success());
}

#[test]
fn a_suspended_program_goes_on_where_it_was() {
    let s = Service::start(&[]);
    let settings = [("TASK_US", "1000".into()), ("ITEMS", "400".into()), ("PERIOD_MS", "1".into())];
    let mut p = Program::start(&s, "program", &settings);
    until("it has joined", || s.process(p.pid()).is_some());
    s.set(p.pid(), Class::Suspended);
    std::thread::sleep(Duration::from_millis(200));
    assert!(p.0.try_wait().unwrap().is_none());
    s.set(p.pid(), Class::Normal);
    assert!(p.0.wait().unwrap().success());
    until("it is forgotten", || s.process(p.pid()).is_none());
}
