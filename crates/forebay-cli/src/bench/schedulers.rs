//! `forebay bench schedulers`: PTask's figures 12 and 13, on simulated devices whose kernels take real time; figure 12
//! also on the real devices of a kind of which there are two.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::hal::Device;
use forebay::hal::sim::{Model, SimDevice};
use forebay::{
    Arg, Datablock, Drain, Feed, Graph, Kind, Launch, Mode, Result, Running, Runtime, Source, Task, Template,
};

use super::part::Part;
use super::ptask::source;
use super::schema::{Row, median};

const PRIORITIES: [i32; 4] = [2, 4, 6, 8];
const SECONDS: f64 = 1.0;
/// Repetitions, interleaved; the median counts.
const REPEATS: usize = 3;
/// Side of the matrices on real devices.
const SIDE: usize = 256;
/// Length of one run of a rectangle, s.
const RECTANGLE_SECONDS: f64 = 0.3;
const ITEMS: usize = 256;

fn template() -> Template {
    Template::array::<u32>([ITEMS])
}

/// A kernel that occupies its device for `busy` of real time.
fn kernel(busy: Duration) -> Source {
    Source::Cpu(Arc::new(move |s| {
        // SAFETY: each part writes its own elements only.
        let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
        s.for_each(|i, _, _| y[i] = x[i].wrapping_add(1));
        if s.start == 0 {
            std::thread::sleep(busy);
        }
    }))
}

fn work(name: String, busy: Duration) -> Task {
    let launch = Launch::new(kernel(busy), "work", [Arg::port("x"), Arg::port("y")]);
    Task::new(name).input("x", template()).output("y", template()).kernels(Kind::Sim, [launch])
}

/// Invocations per second of four competing graphs.
fn compete(mode: Mode) -> Result<Vec<f64>> {
    let rt = Runtime::builder().devices(vec![Arc::new(SimDevice::new(Model::default()))]).mode(mode).build()?;
    let mut runs: Vec<(Running, Feed, Drain)> = Vec::new();
    for p in PRIORITIES {
        let mut g = Graph::new(format!("priority {p}"));
        let id = g.add(work("work".into(), Duration::from_micros(200)).priority(p))?;
        let (f, d) = (g.feed((id, "x"), 4)?, g.drain((id, "y"), 4)?);
        runs.push((rt.start(g)?, f, d));
    }
    let until = Instant::now() + Duration::from_secs_f64(SECONDS);
    let counts: Vec<u64> = std::thread::scope(|s| {
        let handles: Vec<_> = runs
            .iter()
            .map(|(run, f, d)| {
                s.spawn(move || {
                    let mut done = 0u64;
                    // Four under way at any time, so every graph always wants the device.
                    for _ in 0..4 {
                        let _ = run.acquire(*f).and_then(|b| run.push(*f, b));
                    }
                    while Instant::now() < until && run.pull(*d).is_ok() {
                        done += 1;
                        let _ = run.acquire(*f).and_then(|b| run.push(*f, b));
                    }
                    done
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap_or(0)).collect()
    });
    Ok(counts.into_iter().map(|c| c as f64 / SECONDS).collect())
}

/// The devices of figure 12, and what a task does there.
enum Machine {
    /// Simulated devices, tasks that take 300 µs.
    Simulated,
    /// Real ones of a kind; tasks that multiply matrices.
    Real(Kind, Vec<Arc<dyn Device>>),
}

impl Machine {
    fn devices(&self, n: usize) -> Vec<Arc<dyn Device>> {
        match self {
            Machine::Simulated => {
                let named = |i: usize| SimDevice::new(Model { name: format!("sim{i}"), ..Model::default() });
                (0..n).map(|i| Arc::new(named(i)) as _).collect()
            }
            Machine::Real(_, all) => all.iter().take(n).cloned().collect(),
        }
    }

    fn template(&self) -> Template {
        match self {
            Machine::Simulated => template(),
            Machine::Real(..) => Template::array::<f32>([SIDE, SIDE]),
        }
    }

    fn task(&self, name: String) -> Task {
        match self {
            Machine::Simulated => work(name, Duration::from_micros(300)),
            Machine::Real(kind, _) => {
                let args = [Arg::port("x"), Arg::port("x"), Arg::port("y"), Arg::U32(SIDE as u32)];
                let launch = Launch::new(source(*kind, "gemm"), "gemm", args);
                Task::new(name).input("x", self.template()).output("y", self.template()).kernels(*kind, [launch])
            }
        }
    }
}

/// Items per second of a rectangle of tasks on `devices` devices.
fn rectangle(machine: &Machine, mode: Mode, devices: usize, width: usize, depth: usize) -> Result<f64> {
    let rt = Runtime::builder().devices(machine.devices(devices)).mode(mode).workers(4).build()?;
    let mut g = Graph::new("rectangle");
    let mut ends = Vec::new();
    for w in 0..width {
        let mut last = None;
        for d in 0..depth {
            let id = g.add(machine.task(format!("w{w}d{d}")))?;
            match last {
                None => ends.push((g.feed((id, "x"), 4)?, None)),
                Some(prev) => g.connect((prev, "y"), (id, "x"))?,
            }
            last = Some(id);
        }
        if let (Some(id), Some(e)) = (last, ends.last_mut()) {
            e.1 = Some(g.drain((id, "y"), 4)?);
        }
    }
    let run = rt.start(g)?;
    let item = || -> Result<()> {
        for (f, _) in &ends {
            run.push(*f, Datablock::zeroed(machine.template())?)?;
        }
        for d in ends.iter().filter_map(|e| e.1) {
            let out = run.pull(d)?;
            // A simulated device's blocks hold integers, a real one's floats; both end on the host.
            match machine {
                Machine::Simulated => drop(out.as_slice::<u32>()?),
                Machine::Real(..) => drop(out.as_slice::<f32>()?),
            }
        }
        Ok(())
    };
    item()?;
    let t = Instant::now();
    let mut items = 0.0;
    while t.elapsed().as_secs_f64() < RECTANGLE_SECONDS {
        item()?;
        items += 1.0;
    }
    Ok(items / t.elapsed().as_secs_f64())
}

/// A kind of which this machine has two devices or more, the fastest kind first.
fn real() -> Option<Machine> {
    [Kind::Cuda, Kind::OpenCl].into_iter().find_map(|kind| {
        let (devices, _) = forebay::hal::discover(&[kind]);
        (devices.len() > 1).then_some(Machine::Real(kind, devices))
    })
}

/// Runs the benchmark.
pub fn parts() -> Vec<Part> {
    vec![
        Part::of_rows("figure 13", figure_13),
        Part::of_rows("figure 12, simulated", |rows| figure_12(&Machine::Simulated, rows)),
        Part::of_rows("figure 12", |rows| real().map_or(Ok(()), |machine| figure_12(&machine, rows))),
    ]
}

fn figure_13(rows: &mut Vec<Row>) -> Result<()> {
    let mut all: [Vec<Vec<f64>>; 2] = Default::default();
    for _ in 0..REPEATS {
        all[0].push(compete(Mode::Fifo)?);
        all[1].push(compete(Mode::Priority)?);
    }
    let [fifo, priority] =
        all.map(|runs| (0..PRIORITIES.len()).map(|i| median(runs.iter().map(|r| r[i]).collect())).collect::<Vec<_>>());
    for ((p, ours), f) in PRIORITIES.iter().zip(&priority).zip(&fifo) {
        rows.push(
            Row::new(format!("figure 13: priority {p}, mode priority"), "invocations/s", Some(*ours))
                .peer("fifo", Some(*f)),
        );
    }
    let rises = priority.windows(2).all(|w| w[1] > w[0]);
    let even = fifo.iter().copied().fold(f64::MIN, f64::max) / fifo.iter().copied().fold(f64::MAX, f64::min);
    rows.push(Row {
        target: "rises with priority".into(),
        met: Some(rises),
        ..Row::new("figure 13: rate under priority", "most / least", Some(priority[3] / priority[0]))
    });
    rows.push(Row {
        target: "≤ 1.25: even under fifo".into(),
        met: Some(even <= 1.25),
        ..Row::new("figure 13: rate under fifo", "most / least", Some(even))
    });
    Ok(())
}

fn figure_12(machine: &Machine, rows: &mut Vec<Row>) -> Result<()> {
    let name = match machine {
        Machine::Simulated => "simulated".into(),
        Machine::Real(kind, _) => kind.to_string(),
    };
    for mode in [Mode::FirstAvailable, Mode::Priority, Mode::DataAware] {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            one.push(rectangle(machine, mode, 1, 4, 4)?);
            two.push(rectangle(machine, mode, 2, 4, 4)?);
        }
        let (one, two) = (median(one), median(two));
        rows.push(Row {
            ratio: Some(two / one),
            ..Row::new(format!("figure 12: two {name} devices, {mode}"), "items/s", Some(two))
                .peer("one device", Some(one))
        });
    }
    Ok(())
}
