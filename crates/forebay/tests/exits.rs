//! Programs that exit while graphs run: nothing is given to devices any more when what drivers have is destroyed, and nobody waits for
//! functions that never end.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use forebay::hal::sim::{Model, SimDevice};
use forebay::{Arg, Datablock, Error, Graph, Kind, Launch, Running, Runtime, Source, Task, Template};

const VARIABLE: &str = "FOREBAY_TEST_EXIT";
const CODE: i32 = 7;

static RUN: OnceLock<Arc<Running>> = OnceLock::new();

fn invocations() -> u64 {
    RUN.get().map_or(0, |run| run.snapshot().tasks.iter().map(|t| t.invocations).sum())
}

/// Called where the destructors of drivers are, or behind them: it was registered before any of them.
extern "C" fn behind() {
    let before = invocations();
    std::thread::sleep(Duration::from_millis(50));
    let state = RUN.get().map_or("gone", |run| run.state().name());
    println!("{state} {}", if invocations() == before { "quiet" } else { "busy" });
}

/// The program that exits; `how` says what runs.
fn program(how: &str) -> ! {
    // SAFETY: plain calls; the function may be called at any time.
    unsafe { libc::atexit(behind) };
    let word = Template::scalar::<u64>();
    let task = || Task::new("t").input("x", word).output("y", word);
    let kernel = |kind, source| {
        let launch = Launch::new(source, "k", [Arg::port("x"), Arg::port("y")]);
        task().kernels(kind, [launch])
    };
    let copies = Source::Cpu(Arc::new(|s| {
        // SAFETY: there is one item, and this writes it.
        let (x, y) = (s.slice::<u64>(0), unsafe { s.slice_mut::<u64>(1) });
        s.for_each(|i, _, _| y[i] = x[i]);
    }));
    let text = "KERNEL void k(GLOBAL const ulong *x, GLOBAL ulong *y) { if (gid_x() == 0) *y = *x; }";
    let task = match how {
        "opencl" => kernel(Kind::OpenCl, Source::Portable(text.into())),
        "endless" => kernel(
            Kind::Sim,
            Source::Cpu(Arc::new(|_| {
                loop {
                    std::thread::sleep(Duration::from_millis(10));
                }
            })),
        ),
        "host" => task().host(|_| {
            loop {
                std::thread::sleep(Duration::from_millis(10));
            }
        }),
        _ => kernel(Kind::Sim, copies),
    };
    let b = Runtime::builder().service(false);
    let rt = match how {
        "opencl" => b.only(Kind::OpenCl).unwrap_or_else(|e| no_device(&e)),
        _ => b.devices(vec![Arc::new(SimDevice::new(Model::default()))]),
    };
    let rt = rt.build().unwrap();
    let mut g = Graph::new("g");
    let t = g.add(task).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 2).unwrap(), g.drain((t, "y"), 2).unwrap());
    let run = RUN.get_or_init(|| Arc::new(rt.start(g).unwrap()));
    std::thread::spawn(move || while run.push(feed, Datablock::scalar(1u64).unwrap()).is_ok() {});
    std::thread::spawn(move || while run.pull(drain).is_ok() {});
    let begun = Instant::now();
    let never_ends = matches!(how, "endless" | "host");
    let goes_on = || if never_ends { run.snapshot().tasks[0].state == "executing" } else { invocations() >= 100 };
    while !goes_on() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    if how == "forked" {
        // SAFETY: the child exits; what is called for that says nothing of the first one's graphs.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            std::process::exit(0);
        }
        let mut status = 0;
        // SAFETY: our child; the status is valid for the call.
        assert_eq!((unsafe { libc::waitpid(pid, &mut status, 0) }, status), (pid, 0));
        let (before, begun) = (invocations(), Instant::now());
        while invocations() < before + 100 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
    std::process::exit(CODE)
}

fn no_device(e: &Error) -> ! {
    println!("skipped: {e}");
    std::process::exit(0)
}

/// This program once more, as that one.
fn exits(how: &str, recordings: Option<&PathBuf>) -> (Output, Duration) {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["a_program_that_exits_has_stopped_its_graphs_before_drivers_end", "--exact", "--nocapture"]);
    c.env(VARIABLE, how).envs(recordings.map(|dir| (forebay::TRACE_VARIABLE, dir)));
    let begun = Instant::now();
    (c.output().unwrap(), begun.elapsed())
}

#[test]
fn a_program_that_exits_has_stopped_its_graphs_before_drivers_end() {
    if let Ok(how) = std::env::var(VARIABLE) {
        program(&how);
    }
    for how in ["sim", "opencl", "forked", "endless", "host"] {
        let (o, took) = exits(how, None);
        let said = format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
        if how == "opencl" && said.contains("skipped") {
            eprintln!("{}", said.lines().last().unwrap_or_default());
            continue;
        }
        assert_eq!(o.status.code(), Some(CODE), "{how}: {said}");
        // A forked child says so, too: nothing runs in it, and what it has of its parent's it leaves as it was. What only the
        // processor does goes on.
        let said: Vec<&str> = said.lines().filter(|l| l.ends_with("quiet") || l.ends_with("busy")).collect();
        let expected = match how {
            "forked" => vec!["running quiet", "stopped quiet"],
            "host" => vec!["running quiet"],
            _ => vec!["stopped quiet"],
        };
        assert_eq!(said, expected, "{how}");
        assert!(took < Duration::from_secs(30), "{how}: {took:?}");
    }
}

#[test]
fn what_a_program_recorded_that_exits_is_there() {
    let dir = std::env::temp_dir().join(format!("forebay-exits-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    exits("sim", Some(&dir));
    let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let r: forebay::Recording = serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
    assert!(r.graph == "g" && r.spans.len() >= 100, "{} spans", r.spans.len());
    std::fs::remove_dir_all(dir).unwrap();
}
