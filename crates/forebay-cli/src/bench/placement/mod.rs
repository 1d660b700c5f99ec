//! `forebay bench placement`: what decisions cost, how good predictions are, what adaptive placement gains under load that
//! changes, and whether programs that are all alike settle.
//!
//! Load is a real process with twice as many computing threads as there are cores. Where the only accelerator is PoCL, all
//! devices are the same cores: nothing can be gained by going elsewhere when these are busy, and the rows say what is left.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::hal::{Device, discover};
use forebay::place::{Accelerated, Models, decision_cost};
use forebay::transfer::Engine;
use forebay::{Datablock, Impl, Kind, Mode, Runtime, Task};

mod central;
mod starpu;

use self::central::{Each, Heft, Omniscient, Told};
use self::starpu::POLICIES;
pub use self::starpu::be as be_starpu;
use super::part::{Found, Part};
use super::schema::{Row, median};
use super::transfer::load::{Load, Running as Loaded};
use crate::plot::{self, Series};
use crate::workloads::mix::{self, Work};

/// Calls of each workload that teach, and that are counted.
const LEARN: usize = 25;
const CALLS: usize = 60;
/// The load comes and goes.
const TURN: Duration = Duration::from_millis(700);
/// How long the workloads run at once: the load comes and goes twice.
const WHILE: Duration = TURN.saturating_mul(4);
/// Measurements of each way of placing.
const ROUNDS: usize = 3;
/// A central scheduler that knows what everything takes, and when the load is there.
const OMNISCIENT: &str = "omniscient";
/// Times that a decision's cost is measured, and how far apart: a machine is faster and slower for a while.
const DECISIONS: usize = 25;
const APART: Duration = Duration::from_secs(1);
/// Programs that are alike, and how long they run.
const ALIKE: usize = 5;
const SETTLE: Duration = Duration::from_secs(6);

type Result<T, E = String> = std::result::Result<T, E>;

/// Calls a workload once.
type Caller<'a> = Box<dyn Fn(&[Datablock]) -> Result<()> + Send + Sync + 'a>;
/// Makes a workload callable, in one way of placing.
type Make<'a> = dyn Fn(usize, &Work) -> Result<Caller<'a>> + 'a;

fn text(e: forebay::Error) -> String {
    e.to_string()
}

fn runtime(mode: Mode, models: &Arc<Models>, devices: &[Arc<dyn Device>]) -> Result<Runtime> {
    Runtime::builder().mode(mode).devices(devices.to_vec()).models(models.clone()).service(false).build().map_err(text)
}

/// Everything that there is, the CPU by another name included: it has other costs.
fn accelerators() -> Vec<Arc<dyn Device>> {
    discover(&[Kind::OpenCl, Kind::Cuda]).0.into_iter().flat_map(strong_and_weak).collect()
}

/// Three quarters and one quarter of a GPU that can be divided: two devices that differ in nothing but their strength.
fn strong_and_weak(device: Arc<dyn Device>) -> Vec<Arc<dyn Device>> {
    let i = device.info();
    let parts = (i.kind == Kind::Cuda).then(|| device.split((i.compute_units / 4).max(1)));
    match parts {
        Some(Ok([weak, strong])) => vec![strong, weak],
        Some(Err(why)) => {
            eprintln!("placement: the whole of {}: {why}", i.name);
            vec![device]
        }
        None => vec![device],
    }
}

/// A load that comes and goes while it exists.
struct Changing {
    stop: Arc<AtomicBool>,
    /// Whether it is there now.
    there: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Changing {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let there = Arc::new(AtomicBool::new(false));
        let (seen, is) = (stop.clone(), there.clone());
        let thread = std::thread::spawn(move || {
            let wait = || {
                let begun = Instant::now();
                while begun.elapsed() < TURN && !seen.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            };
            while !seen.load(Ordering::Relaxed) {
                let load = Loaded::start(Load::Cpu);
                is.store(true, Ordering::Relaxed);
                wait();
                drop(load);
                is.store(false, Ordering::Relaxed);
                wait();
            }
        });
        Changing { stop, there, thread: Some(thread) }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

/// One call, until what it makes is there: a block may come before its device is done.
fn done(task: &Accelerated, inputs: &[Datablock]) -> Result<()> {
    task.call(inputs).and_then(|out| out.iter().try_for_each(Datablock::wait)).map_err(text)
}

fn call(task: &Accelerated, w: &Work, n: usize) -> Result<f64> {
    let begun = Instant::now();
    for _ in 0..n {
        done(task, &w.inputs)?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Mean error of predictions on each workload, alone and under load that changes.
fn accuracy(found: &mut Found) -> Result<()> {
    let models = Arc::new(Models::off());
    let rt = runtime(Mode::Adaptive, &models, &accelerators())?;
    for w in mix::all(1).map_err(text)? {
        for d in rt.verify(&w.task, &w.inputs).map_err(text)? {
            if d.largest > w.tolerance {
                return Err(format!("{}: {} is {} off at {}", w.name, d.implementation, d.largest, d.at));
            }
        }
    }
    let mut means = [Vec::new(), Vec::new()];
    for (at, what) in ["alone", "load that changes"].into_iter().enumerate() {
        let load = (at == 1).then(Changing::start);
        let mut series: Vec<Series> = Vec::new();
        for scale in [1, 2, 4] {
            for w in mix::all(scale).map_err(text)? {
                let task = rt.accelerate(1, &w.task).map_err(text)?;
                call(&task, &w, LEARN)?;
                let mut points = Vec::with_capacity(CALLS);
                for _ in 0..CALLS {
                    let before = task.stats()[0].accuracy.0;
                    done(&task, &w.inputs)?;
                    let now = &task.stats()[0];
                    if let Some((predicted, took)) = now.last_prediction_ns.filter(|_| now.accuracy.0 > before) {
                        points.push((took as f64 / 1e3, predicted as f64 / 1e3));
                    }
                }
                if points.is_empty() {
                    return Err(format!("{}: none of {CALLS} calls was predicted", w.name));
                }
                let off: f64 = points.iter().map(|(took, predicted)| (predicted - took).abs() / took).sum();
                let error = off / points.len() as f64 * 100.0;
                means[at].push(error);
                if scale == 2 {
                    found.rows.push(Row::new(format!("prediction error, {what}: {}", w.name), "%", Some(error)));
                }
                match series.iter_mut().find(|s| s.name == w.name) {
                    Some(s) => s.points.extend(points),
                    None => series.push(Series { name: w.name.into(), points, bold: false }),
                }
            }
        }
        drop(load);
        let limit = [8.0, 15.0][at];
        let mean = means[at].iter().sum::<f64>() / means[at].len() as f64;
        let mut row = Row::new(format!("prediction error, {what}: mean of all workloads and sizes"), "%", Some(mean));
        row.target = format!("≤ {limit} %");
        row.met = Some(mean <= limit);
        found.rows.push(row);
        let title = format!("Calls of six workloads of three sizes: predicted over measured, {what}");
        let name = format!("placement-predicted-{}", ["alone", "load"][at]);
        found.plots.push((name, plot::predicted_over_measured(&title, "µs", &series)));
    }
    Ok(())
}

/// A workload's task with some of its implementations.
fn only(w: &Work, keep: impl Fn(&Impl) -> bool) -> Task {
    (w.task)().keep(keep)
}

/// All workloads at once for a while, each called by a thread of its own: calls in a second, the geometric mean of all.
fn rate_of(works: &[Work], time: Duration, call: &(dyn Fn(usize, &[Datablock]) -> Result<()> + Sync)) -> Result<f64> {
    let begun = Instant::now();
    let count = |i: usize, inputs: &[Datablock]| {
        let mut n = 0;
        while begun.elapsed() < time {
            call(i, inputs)?;
            n += 1;
        }
        // The last call goes on beyond the end, for as long as it takes.
        Ok(f64::from(n) / begun.elapsed().as_secs_f64())
    };
    let count = &count;
    let rates: Vec<Result<f64>> = std::thread::scope(|s| {
        let spawn = |(i, w): (usize, &Work)| {
            // A workload's makers stay here.
            let inputs = w.inputs.clone();
            s.spawn(move || count(i, &inputs))
        };
        let threads: Vec<_> = works.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a caller panicked".into()))).collect()
    });
    let rates = rates.into_iter().collect::<Result<Vec<_>>>()?;
    let logs: f64 = rates.iter().map(|r| r.max(1e-3).ln()).sum();
    Ok((logs / rates.len() as f64).exp())
}

/// The same, after each workload has been called a number of times.
fn together(works: &[Work], make: &Make<'_>) -> Result<f64> {
    let callers = works.iter().enumerate().map(|(i, w)| make(i, w)).collect::<Result<Vec<_>>>()?;
    for (caller, w) in callers.iter().zip(works) {
        (0..LEARN).try_for_each(|_| caller(&w.inputs))?;
    }
    rate_of(works, WHILE, &|i, inputs| callers[i](inputs))
}

/// A task as a caller.
fn caller<'a>(task: Result<Accelerated, forebay::Error>) -> Result<Caller<'a>> {
    let task = task.map_err(text)?;
    Ok(Box::new(move |inputs| done(&task, inputs)))
}

/// All workloads at once, placed in several ways.
fn contention(rows: &mut Vec<Row>) -> Result<()> {
    let models = Arc::new(Models::off());
    let works = mix::all(2).map_err(text)?;
    let devices = &accelerators();
    let adaptive = runtime(Mode::Adaptive, &models, devices)?;
    let first = runtime(Mode::FirstAvailable, &models, devices)?;
    let aware = runtime(Mode::DataAware, &models, devices)?;
    let host = |i: &Impl| matches!(i, Impl::Host(_));
    let each = Each::new(devices, &works)?;
    let times = each.times(&works)?;
    let prefers_host = |i: usize| times[i].iter().all(|t| times[i][0] <= *t);
    let omniscient = &Omniscient::new(&each, &works)?;
    let starpu =
        starpu::Mix::new().inspect_err(|why| eprintln!("starpu: not measured on the six workloads: {why}")).ok();
    for (what, loaded) in [("nothing else", false), ("load that changes", true)] {
        let load = loaded.then(Changing::start);
        let heft = &Heft::new(&each, &times);
        let told: &Told = &load.as_ref().map(|l| l.there.clone());
        let ways: [(&str, &Make); 8] = [
            ("adaptive", &|_, w| caller(adaptive.accelerate(1, &w.task))),
            ("all on the accelerator", &|_, w| caller(first.accelerate(1, || only(w, |i| !host(i))))),
            ("all on the CPU", &|_, w| caller(first.accelerate(1, || only(w, host)))),
            ("static best", &|i, w| caller(first.accelerate(1, || only(w, |k| host(k) == prefers_host(i))))),
            ("first-available", &|_, w| caller(first.accelerate(1, &w.task))),
            ("data-aware", &|_, w| caller(aware.accelerate(1, &w.task))),
            ("HEFT", &|i, _| Ok(Box::new(move |inputs| heft.call(i, inputs)))),
            (OMNISCIENT, &|i, _| Ok(Box::new(move |inputs| omniscient.call(i, told.as_deref(), inputs)))),
        ];
        let mut samples: Vec<Vec<f64>> = vec![Vec::new(); ways.len()];
        let mut theirs: [Vec<f64>; POLICIES.len()] = Default::default();
        // Each way once a round: what changes on the machine meets all of them.
        for round in 0..ROUNDS {
            for i in 0..ways.len() {
                let i = (i + round * 3) % ways.len();
                samples[i].push(together(&works, ways[i].1)?);
            }
            for (policy, samples) in POLICIES.iter().zip(&mut theirs) {
                samples.extend(starpu.as_ref().map(|s| s.rate(policy)).transpose()?);
            }
        }
        drop(load);
        let mut row = Row::new(format!("six workloads at once, beside {what}"), "calls/s", None);
        for ((name, _), s) in ways.iter().zip(samples) {
            let s = median(s);
            if *name == "adaptive" { row.ours = Some(s) } else { row = row.peer(name, Some(s)) }
        }
        for (policy, s) in POLICIES.iter().zip(theirs).filter(|(_, s)| !s.is_empty()) {
            let name =
                if *policy == POLICIES[0] { "StarPU with our policy".into() } else { format!("StarPU {policy}") };
            row = row.peer(&name, Some(median(s)));
        }
        let besides = |who: &str| Row { case: format!("the same, beside {what}: {who}"), ..row.clone() };
        let known = besides("whoever knows everything").at_least(OMNISCIENT, 0.965);
        let dmda = starpu.as_ref().map(|_| besides("StarPU").at_least("StarPU dmda", 1.5));
        rows.push(row.at_least("all on the accelerator", 1.8));
        rows.push(known);
        rows.extend(dmda);
    }
    Ok(())
}

/// Programs that are all alike, each a process: how often the one that moved most did so.
fn alike(rows: &mut Vec<Row>) -> Result<()> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let start = || {
        let mut c = Command::new(&exe);
        c.args(["bench", "placement-alike"]).stdout(Stdio::piped()).stdin(Stdio::null());
        c.spawn().map_err(|e| format!("cannot start a program: {e}"))
    };
    let children = (0..ALIKE).map(|_| start()).collect::<Result<Vec<_>>>()?;
    let mut moves = Vec::new();
    for mut c in children {
        let line = c.stdout.take().and_then(|o| BufReader::new(o).lines().next()?.ok()).unwrap_or_default();
        let _ = c.wait();
        moves.push(line.trim().parse::<f64>().map_err(|_| format!("a program said {line:?}"))?);
    }
    let most = moves.iter().copied().fold(0.0, f64::max);
    let mut row =
        Row::new(format!("{ALIKE} programs that are alike: moves of the one that moved most"), "moves", Some(most));
    row.target = "≤ 3".into();
    row.met = Some(most <= 3.0);
    rows.push(row);
    Ok(())
}

/// One of the programs that are alike: says how often it moved.
pub fn be_alike() -> Result<()> {
    let rt = runtime(Mode::Adaptive, &Arc::new(Models::off()), &accelerators())?;
    let w = mix::all(1).map_err(text)?.swap_remove(2);
    let task = rt.accelerate(1, &w.task).map_err(text)?;
    let begun = Instant::now();
    while begun.elapsed() < SETTLE {
        task.call(&w.inputs).map_err(text)?;
    }
    crate::say(&task.stats().iter().map(|s| s.moves).sum::<u64>().to_string());
    Ok(())
}

/// All of it.
pub fn parts() -> Vec<Part> {
    vec![
        Part::of_rows("decisions", decisions),
        Part::new("predictions", accuracy),
        Part::of_rows("contention", contention),
        Part::of_rows("programs that are alike", alike),
        Part::of_rows("StarPU", starpu::run),
    ]
}

/// What deciding costs.
fn decisions(rows: &mut Vec<Row>) -> Result<()> {
    // The curves of whatever device is nearest to an accelerator here.
    let device = discover(&[Kind::Cuda, Kind::OpenCl]).0.into_iter().next();
    let device = device.or_else(|| discover(&[Kind::Cpu]).0.into_iter().next()).ok_or("there is no device")?;
    let engine = Engine::open(device).map_err(text)?;
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..DECISIONS {
        costs[0].push(decision_cost(100_000, None));
        costs[1].push(decision_cost(100_000, Some(&engine)));
        std::thread::sleep(APART);
    }
    let whats = ["inputs known", "and what copying an input to two of them costs"];
    rows.extend(whats.into_iter().zip(costs).map(|(what, costs)| {
        let cost = median(costs);
        let mut row = Row::new(format!("a decision for three devices, warm models, {what}"), "ns", Some(cost));
        row.target = "≤ 100 ns".into();
        row.met = Some(cost <= 100.0);
        row
    }));
    Ok(())
}
