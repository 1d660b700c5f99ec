//! `forebay demo gesture`: PTask's own application (section 2.1) on recordings of real stereo cameras.

pub mod camera;
pub mod cpu;
pub mod pipeline;
pub mod recording;
mod report;
#[cfg(test)]
mod tests;
pub mod track;
mod uinput;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay::{Feed, Kind, Mode, Running, Runtime, Wanted};

use camera::{Frame, Source};
use pipeline::Shape;
use track::Event;

/// Most frames of one run.
const MAX_FRAMES: u64 = 10_000_000;

/// Frames a second: with fewer, or as many as that, there is nothing to be seen.
const RATES: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

/// Latencies that room is made for at once.
const MAX_LATENCIES: u64 = 1 << 16;

/// Options of the demo.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay demo gesture               the recordings, at the cameras' rate
  forebay demo gesture --rate max --device cpu
  forebay demo gesture --camera /dev/video0 --calibration cameras.toml --uinput
  forebay demo gesture --trace t.pftrace    for ui.perfetto.dev")]
pub struct Options {
    /// Where the kernels run: cpu, opencl, cuda, one of several (cuda:1), or auto for the best there is
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Frames to replay
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=MAX_FRAMES))]
    pub frames: u64,
    /// Frames per second: a number, or "max" for as fast as possible
    #[arg(long, default_value = "30")]
    pub rate: String,
    /// A V4L2 camera with both views side by side, or a left and a right one; instead of the recording
    #[arg(long, value_name = "/dev/videoN", num_args = 1..=2)]
    pub camera: Vec<PathBuf>,
    /// Calibration of the cameras, a file like data/stereo/calibration.toml; the recording's without
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Scheduling mode: first-available, fifo, priority, data-aware
    #[arg(long, default_value = "data-aware")]
    pub mode: Mode,
    /// Room of each channel, datablocks; 1 at a camera's rate, and 2 as fast as possible, if nothing is said
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub capacity: Option<u16>,
    /// Write a timeline for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Send swipes as key presses through /dev/uinput instead of only printing them
    #[arg(long)]
    pub uinput: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// No gestures, no progress line
    #[arg(long)]
    pub quiet: bool,
}

/// What a run measured.
pub struct Measured {
    pub frames: u64,
    pub seconds: f64,
    pub frame_bytes: usize,
    /// Push of the second image to arrival of the gestures, ms, per frame.
    pub latency_ms: Vec<f64>,
    /// CPU time of the process, s: user, system.
    pub cpu: (f64, f64),
    pub gestures: usize,
    /// Task, and how often it ran on which device.
    pub placed: Vec<(String, Vec<(String, u64)>)>,
    /// Bytes copied to and from devices.
    pub copied: u64,
}

/// Runs the demo.
pub fn run(o: &Options) -> Result<(), String> {
    let rate = match o.rate.as_str() {
        "max" => None,
        r => Some(
            r.parse::<f64>()
                .ok()
                .filter(|r| RATES.contains(r))
                .ok_or("--rate takes a number from 0.001 to 1000000, or \"max\"")?,
        ),
    };
    let mut shape = Shape::of_recording()?;
    if let Some(path) = &o.calibration {
        if o.camera.is_empty() {
            return Err("--calibration is for --camera: the recording has its own".into());
        }
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        shape.calibration = recording::Calibration::parse(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let frames = recording::pairs()?;
    let mut source = match o.camera.as_slice() {
        [] => Source::Recording { frames: &frames, rate },
        paths => Source::Live(camera::open(paths, shape.source())?),
    };
    let rt = crate::runtime(&o.device, o.mode)?;
    // A device is asked for by name: its kernels run there and nowhere else.
    let only = o.device.parse::<Wanted>().ok().map(|w| w.kind).filter(|k| *k != Kind::Cpu);
    let capacity = o.capacity.map_or_else(|| pipeline::capacity(rate), usize::from);
    let mut p = pipeline::build(&shape, capacity, only).map_err(|e| e.to_string())?;
    let names: Vec<String> = p.task_names();
    let graph = std::mem::replace(&mut p.graph, forebay::Graph::new("started"));
    let run = if o.trace.is_some() { rt.start_traced(graph) } else { rt.start(graph) };
    let run = run.map_err(|e| e.to_string())?;
    crate::tell_unused(&rt);
    let mut keys = if o.uinput { Some(uinput::Keys::open()?) } else { None };
    let progress = progress(o);
    let measured = replay(
        &run,
        &rt,
        &p,
        &shape,
        &mut source,
        o.frames,
        |event| {
            if !o.quiet && !o.json {
                progress.suspend(|| crate::say(&event.json()));
            }
            if let Some(k) = &mut keys {
                k.send(event);
            }
        },
        |n| progress.set_position(n),
    )?;
    progress.finish_and_clear();
    if let Some(path) = &o.trace {
        let (spans, dropped) = run.take_trace();
        let (copies, _) = run.take_copies();
        let devices: Vec<String> = rt.devices().into_iter().map(|(n, k)| format!("{k}: {n}")).collect();
        let devices = crate::told_apart(&devices);
        let mut t = crate::perfetto::Timeline::default();
        t.graph(None, 0, (&names, &devices), (&spans, &copies));
        std::fs::write(path, t.encode()).map_err(|e| format!("{}: {e}", path.display()))?;
        eprintln!("{} spans in {} ({dropped} did not fit); open it in ui.perfetto.dev", spans.len(), path.display());
    }
    drop(run);
    if o.json {
        crate::say(&report::json(&measured));
    } else {
        crate::say(&report::table(&measured, &rt));
    }
    Ok(())
}

fn progress(o: &Options) -> indicatif::ProgressBar {
    if o.quiet || o.json {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new(o.frames);
    let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} frames  {per_sec}  {elapsed}");
    bar.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// CPU time of this process, s: user, system.
pub fn cpu_time() -> (f64, f64) {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15, counted behind the parenthesised name.
    let rest = text.rsplit(") ").next().unwrap_or_default();
    let f: Vec<f64> = rest.split(' ').skip(11).take(2).filter_map(|v| v.parse().ok()).collect();
    let hz = rustix::param::clock_ticks_per_second() as f64;
    (f.first().unwrap_or(&0.0) / hz, f.get(1).unwrap_or(&0.0) / hz)
}

/// Feeds `count` frames and collects what comes out.
///
/// # Errors
/// What ended the graph, or why the cameras give no more frames.
#[allow(clippy::too_many_arguments, reason = "one call, each argument another thing")]
pub fn replay(
    run: &Running,
    rt: &Runtime,
    p: &pipeline::Pipeline,
    shape: &Shape,
    source: &mut Source<'_>,
    count: u64,
    mut gesture: impl FnMut(&Event),
    mut progress: impl FnMut(u64),
) -> Result<Measured, String> {
    let text = |e: forebay::Error| e.to_string();
    for (feed, block) in &p.constants {
        run.push(*feed, block.clone()).map_err(text)?;
    }
    let push = |feed: Feed, image: &[u8]| -> Result<(), String> {
        let mut b = run.acquire(feed).map_err(text)?;
        b.assign(image).map_err(text)?;
        run.push(feed, b).map_err(text)
    };
    let (left, right) = (p.left, p.right);
    // The first frames warm the pools and compile nothing; they are not measured.
    let mut frame = Frame { left: Vec::new(), right: Vec::new() };
    let blank = vec![0u8; shape.image().bytes()];
    for i in 0..2 {
        match source {
            Source::Recording { frames, .. } => {
                let (l, r) = &frames[recording::replay(i, frames.len())];
                push(left, &l.pixels)?;
                push(right, &r.pixels)?;
            }
            Source::Live(_) => {
                push(left, &blank)?;
                push(right, &blank)?;
            }
        }
        run.pull(p.events).map_err(text)?;
    }
    let sent: Mutex<VecDeque<Instant>> = Mutex::new(VecDeque::new());
    let (begun, cpu) = (Instant::now(), cpu_time());
    let mut latency_ms = Vec::with_capacity(count.min(MAX_LATENCIES) as usize);
    let mut gestures = 0;
    std::thread::scope(|s| -> Result<(), String> {
        let cameras = crate::beside(s, || {
            let fed = (0..count).try_for_each(|i| {
                source.frame(i, begun, &mut frame)?;
                push(left, &frame.left)?;
                sent.lock().unwrap_or_else(PoisonError::into_inner).push_back(Instant::now());
                push(right, &frame.right)
            });
            if fed.is_err() {
                // Nobody should wait for frames that never come.
                let _ = run.stop();
            }
            fed
        })?;
        let pulled = (0..count).try_for_each(|i| {
            let block = run.pull(p.events)?;
            let at = sent.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            latency_ms.extend(at.map(|t| t.elapsed().as_secs_f64() * 1e3));
            for e in block.as_slice::<Event>()? {
                gestures += 1;
                gesture(e);
            }
            progress(i + 1);
            Ok(())
        });
        let fed = cameras.join().unwrap_or_else(|_| Err("the cameras' thread panicked".into()));
        match run.error() {
            Some(e) => Err(text(e)),
            None => fed.and(pulled.map_err(text)),
        }
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    let end = cpu_time();
    let kinds: Vec<String> = rt.devices().into_iter().map(|(_, kind)| kind.to_string()).collect();
    let devices = crate::told_apart(&kinds);
    let placed = run.snapshot().tasks.into_iter().map(|t| {
        let on = t.by_device.iter().zip(&devices).filter(|(n, _)| **n > 0).map(|(n, name)| (name.clone(), *n));
        (t.name, on.collect())
    });
    Ok(Measured {
        frames: count,
        seconds,
        frame_bytes: shape.frame_bytes(),
        latency_ms,
        cpu: (end.0 - cpu.0, end.1 - cpu.1),
        gestures,
        placed: placed.collect(),
        copied: rt.copied().iter().sum(),
    })
}
