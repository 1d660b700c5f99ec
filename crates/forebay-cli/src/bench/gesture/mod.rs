//! `forebay bench gesture`: PTask's table 2. The gesture pipeline, written in five ways over the same kernels.
//!
//! - *host-based*: one thread, no accelerator: the CPU kernels called one after the other.
//! - *hand-coded*: one thread and the device; nothing copied that need not be, but every frame waited for.
//! - *modular*: a thread per stage with queues between them (of 4; of 1 at a camera's rate); each stage copies in and out.
//! - *pipes*: a process per stage, connected by pipes.
//! - *dataflow*: the Forebay graph of the demo.
//!
//! Each is run in processes of its own, so that memory and threads are its own; unconstrained, and at a camera's rate.

mod usage;
mod ways;

use std::sync::Arc;

use forebay::Kind;
use forebay::hal::Device;
use forebay::hal::cpu::{CpuDevice, Pool};
use serde::{Deserialize, Serialize};

use super::part::{self, Part};
use super::schema::{Row, median};
use crate::demo::gesture::pipeline::Shape;
use crate::demo::gesture::recording;
use ways::Job;
pub use ways::stage;

/// Least time of one measurement, s.
const LEAST: f64 = 4.0;
/// Repetitions, interleaved; the median counts.
const REPEATS: usize = 5;
/// Rate of the real-time half, frames a second.
const CAMERA_RATE: f64 = 30.0;
/// Frames of the real-time half.
const CAMERA_FRAMES: usize = 90;
/// Frames of a host-based run at most: it does not get faster by waiting.
const HOST_FRAMES: usize = 60;
/// The ways, ours first; the order of the table's columns.
const WAYS: [&str; 5] = ["dataflow", "host-based", "hand-coded", "modular", "pipes"];

type Outcome<T> = Result<T, String>;

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// What one way took for its frames.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Run {
    seconds: f64,
    /// CPU time, s.
    user: f64,
    system: f64,
    /// From the camera to the gestures, per frame.
    latency_ms: Vec<f64>,
    gestures: usize,
    /// Largest resident memory and threads, of all processes of the way.
    memory_mib: f64,
    threads: u64,
    /// Utilisation of the GPU, %.
    gpu: Option<f64>,
}

/// `forebay bench gesture-way`: one way in this process; its figures as JSON.
pub fn way(name: &str, kind: Kind, count: usize, rate: Option<f64>) -> Outcome<()> {
    let (shape, frames) = (Shape::of_recording()?, recording::pairs()?);
    let device: Arc<dyn Device> = match name {
        "host-based" => Arc::new(CpuDevice::new(Pool::new(1))),
        _ => {
            let (devices, _) = forebay::hal::discover(&[kind]);
            devices.into_iter().next().ok_or_else(|| format!("no {kind} device"))?
        }
    };
    let job = Job { device: &device, shape: &shape, frames: &frames, count, rate };
    let (run, gpu) = usage::gpu_during(|| match name {
        "dataflow" => ways::dataflow(&job),
        "host-based" | "hand-coded" => ways::hand_coded(&job),
        "modular" => ways::modular(&job),
        "pipes" => ways::pipes(&job),
        other => Err(format!("no way of running is called {other:?}; there are: {}", WAYS.join(", "))),
    })?;
    crate::say(&serde_json::to_string(&Run { gpu: gpu.filter(|_| kind == Kind::Cuda), ..run }).map_err(text)?);
    Ok(())
}

/// Runs one way in a process of its own.
fn apart(name: &str, kind: Kind, count: usize, rate: Option<f64>) -> Outcome<Run> {
    let exe = std::env::current_exe().map_err(text)?;
    let mut c = std::process::Command::new(exe);
    c.args(["bench", "gesture-way", name, kind.name(), &count.to_string()]);
    if let Some(rate) = rate {
        c.args(["--rate", &rate.to_string()]);
    }
    let out = c.stderr(std::process::Stdio::inherit()).output().map_err(text)?;
    if !out.status.success() {
        return Err(format!("{name} on {kind} ended with {}", out.status));
    }
    serde_json::from_slice(&out.stdout).map_err(|e| format!("{name} on {kind}: {e}"))
}

/// Median over the repetitions of each way.
fn medians(all: &[Vec<Run>], f: impl Fn(&Run) -> Option<f64>) -> Vec<Option<f64>> {
    all.iter().map(|runs| runs.iter().map(&f).collect::<Option<Vec<f64>>>().map(median)).collect()
}

fn row(case: String, unit: &str, v: &[Option<f64>]) -> Row {
    WAYS.iter().zip(v).skip(1).fold(Row::new(case, unit, v[0]), |r, (n, v)| r.peer(n, *v))
}

/// The rows that both halves of the table have.
fn table(half: &str, kind: Kind, frame_bytes: usize, all: &[Vec<Run>]) -> Vec<Row> {
    let frames = |r: &Run| r.latency_ms.len() as f64;
    let percentile = |r: &Run, p: f64| {
        let mut v = r.latency_ms.clone();
        v.sort_by(f64::total_cmp);
        v.get(((v.len() as f64 * p) as usize).min(v.len().saturating_sub(1))).copied()
    };
    let line = |what: &str, unit: &str, f: &dyn Fn(&Run) -> Option<f64>| {
        row(format!("{kind}: {half}, {what}"), unit, &medians(all, f))
    };
    vec![
        line("frames", "fps", &|r| Some(frames(r) / r.seconds)),
        line("camera data", "MB/s", &|r| Some(frames(r) / r.seconds * frame_bytes as f64 / 1e6)),
        line("latency p50", "ms", &|r| percentile(r, 0.5)),
        line("latency p99", "ms", &|r| percentile(r, 0.99)),
        line("CPU, user", "% of a core", &|r| Some(r.user / r.seconds * 100.0)),
        line("CPU, system", "% of a core", &|r| Some(r.system / r.seconds * 100.0)),
        line("GPU busy", "%", &|r| r.gpu),
        line("memory", "MiB", &|r| Some(r.memory_mib)),
        line("threads", "threads", &|r| Some(r.threads as f64)),
    ]
}

/// A part for every kind of device here, or for one: the ways find their device by kind, so the first one of each is measured.
pub fn parts(only: Option<Kind>) -> Outcome<Vec<Part>> {
    let kinds = part::kinds(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda], only)?;
    Ok(kinds.into_iter().map(|k| Part::of_rows(k.name(), move |rows| run(k, rows))).collect())
}

fn run(kind: Kind, rows: &mut Vec<Row>) -> Outcome<()> {
    let shape = Shape::of_recording()?;
    let once = apart("hand-coded", kind, 3, None)?.seconds / 3.0;
    let n = ((LEAST / once) as usize).clamp(5, 5000);
    let count = |way: &str| if way == "host-based" { n.min(HOST_FRAMES) } else { n };
    let mut free: [Vec<Run>; 5] = Default::default();
    for round in 0..REPEATS {
        eprintln!("gesture: {kind}: round {} of {REPEATS}, {n} frames", round + 1);
        for (runs, way) in free.iter_mut().zip(WAYS) {
            runs.push(apart(way, kind, count(way), None)?);
        }
    }
    // The same frames must give the same gestures whoever runs them.
    for (i, way) in WAYS.iter().enumerate().skip(2) {
        let (want, got) = (free[2][0].gestures, free[i][0].gestures);
        if got != want {
            return Err(format!("{kind}: hand-coded found {want} gestures, {way} {got}"));
        }
    }
    let fps = medians(&free, |r| Some(r.latency_ms.len() as f64 / r.seconds));
    let gpu = kind == Kind::Cuda;
    let targets = [1.0, 5.0, if gpu { 1.12 } else { 1.0 }, 1.36, 1.71];
    for (i, way) in WAYS.iter().enumerate().skip(1) {
        // Off a GPU the only target is to be no slower than hand-coded.
        let target = (gpu || i == 2).then_some(targets[i]);
        let ratio = fps[0].zip(fps[i]).map(|(a, b)| a / b);
        rows.push(Row {
            ratio,
            target: target.map_or(String::new(), |t| format!("dataflow / {way} ≥ {t}")),
            met: target.zip(ratio).map(|(t, r)| r >= t),
            ..row(format!("{kind}: unconstrained, against {way}"), "fps", &fps)
        });
    }
    rows.extend(table("unconstrained", kind, shape.frame_bytes(), &free).into_iter().skip(1));
    eprintln!("gesture: {kind}: at {CAMERA_RATE} fps");
    let paced = WAYS.map(|way| apart(way, kind, CAMERA_FRAMES, Some(CAMERA_RATE)).map(|r| vec![r]));
    let paced = paced.into_iter().collect::<Outcome<Vec<_>>>()?;
    rows.extend(table("real-time", kind, shape.frame_bytes(), &paced));
    Ok(())
}
