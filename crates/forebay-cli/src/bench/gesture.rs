//! `forebay bench gesture`: PTask's table 2. The gesture pipeline, written in five ways over the same kernels.
//!
//! - *host-based*: one thread, no accelerator: the CPU kernels called one after the other.
//! - *hand-coded*: one thread and the device; nothing copied that need not be, but every frame waited for.
//! - *modular*: a thread per stage with queues of 4 between them; each stage copies in and out.
//! - *pipes*: a process per stage, connected by pipes.
//! - *dataflow*: the Forebay graph of the demo.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use forebay::hal::cpu::{CpuDevice, Pool};
use forebay::hal::{Arg as HalArg, Buffer, Device, Kernel, Queue};
use forebay::{Arg, Kind, Mode};

use super::schema::{Row, median};
use crate::demo::gesture;
use crate::demo::gesture::pipeline::{self, Shape, Step};
use crate::demo::gesture::recording::{self, Grey};
use crate::demo::gesture::track::Tracker;

/// Least time of one measurement, s.
const LEAST: f64 = 1.5;
/// Repetitions, interleaved; the median counts.
const REPEATS: usize = 3;

type Outcome<T> = Result<T, String>;

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// One stage, or several, on a device: kernels, a queue, and buffers by name.
struct Stage {
    queue: Box<dyn Queue>,
    steps: Vec<(Step, Kernel)>,
    buffers: HashMap<&'static str, Buffer>,
    device: Arc<dyn Device>,
}

impl Stage {
    fn new(device: &Arc<dyn Device>, shape: &Shape, steps: Vec<Step>) -> Outcome<Self> {
        let mut stage = Stage {
            queue: device.queue().map_err(text)?,
            steps: Vec::new(),
            buffers: HashMap::new(),
            device: device.clone(),
        };
        for s in steps {
            for name in &s.buffers {
                if !stage.buffers.contains_key(name) {
                    let bytes = pipeline::buffer_bytes(shape, name);
                    stage.buffers.insert(name, device.alloc(bytes).map_err(text)?);
                }
            }
            let kernel = device.compile(&s.source, s.entry).map_err(text)?;
            stage.steps.push((s, kernel));
        }
        // Constants go up once.
        if stage.buffers.contains_key("map") {
            stage.put_new("map", bytemuck::cast_slice(&shape.calibration.maps(shape.scale)))?;
        }
        if stage.buffers.contains_key("weights") {
            stage.put_new("weights", bytemuck::cast_slice(&pipeline::weights()))?;
        }
        Ok(stage)
    }

    fn host(&self, bytes: usize) -> Outcome<Buffer> {
        self.device.alloc_host(bytes).map_err(text)
    }

    fn put_new(&mut self, name: &str, bytes: &[u8]) -> Outcome<()> {
        let h = self.host(bytes.len())?;
        fill(&h, bytes);
        self.put(name, &h)?;
        self.wait()
    }

    fn put(&mut self, name: &str, from: &Buffer) -> Outcome<()> {
        self.queue.copy(from, 0, &self.buffers[name], 0, from.len()).map_err(text)
    }

    fn get(&mut self, name: &str, to: &Buffer) -> Outcome<()> {
        self.queue.copy(&self.buffers[name], 0, to, 0, to.len()).map_err(text)
    }

    fn wait(&mut self) -> Outcome<()> {
        let f = self.queue.fence().map_err(text)?;
        self.queue.wait(f).map_err(text)
    }

    fn run(&mut self) -> Outcome<()> {
        for (s, kernel) in &self.steps {
            let buffers = s.buffers.iter().map(|n| HalArg::Buffer(&self.buffers[n]));
            let numbers = s.numbers.iter().map(|a| match a {
                Arg::U32(v) => HalArg::U32(*v),
                Arg::F32(v) => HalArg::F32(*v),
                _ => HalArg::U32(0),
            });
            let args: Vec<HalArg<'_>> = buffers.chain(numbers).collect();
            self.queue.launch(kernel, &s.geometry(), &args).map_err(text)?;
        }
        Ok(())
    }
}

fn fill(b: &Buffer, bytes: &[u8]) {
    if let Some(p) = b.host_ptr() {
        // SAFETY: host memory at least that long, and no command uses it (each caller has waited).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), p.as_ptr(), bytes.len().min(b.len())) };
    }
}

fn bytes_of(b: &Buffer) -> &[u8] {
    match b.host_ptr() {
        // SAFETY: host memory of that length; commands that write it have been waited for.
        Some(p) => unsafe { std::slice::from_raw_parts(p.as_ptr(), b.len()) },
        None => &[],
    }
}

fn floats(b: &Buffer) -> &[f32] {
    bytemuck::cast_slice(bytes_of(b))
}

/// What one way of running `n` frames took.
#[derive(Clone, Copy, Default)]
struct Run {
    seconds: f64,
    cpu: f64,
    gestures: usize,
}

/// CPU time of this process and of its children that have ended, s.
fn cpu_all() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = stat.rsplit(") ").next().unwrap_or_default();
    let ticks: f64 = rest.split(' ').skip(11).take(4).filter_map(|v| v.parse::<f64>().ok()).sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}

fn timed(f: impl FnOnce() -> Outcome<usize>) -> Outcome<Run> {
    let (t, c) = (Instant::now(), cpu_all());
    let gestures = f()?;
    Ok(Run { seconds: t.elapsed().as_secs_f64(), cpu: cpu_all() - c, gestures })
}

fn frame(frames: &[(Grey, Grey)], i: usize) -> &(Grey, Grey) {
    &frames[recording::replay(i as u64, frames.len())]
}

/// All stages on one thread; host-based when the device is a CPU of one worker.
fn hand_coded(device: &Arc<dyn Device>, shape: &Shape, frames: &[(Grey, Grey)], n: usize) -> Outcome<Run> {
    let kind = device.info().kind;
    let steps = [pipeline::xform_steps(shape, kind), pipeline::filter_steps(shape, kind)].concat();
    let mut s = Stage::new(device, shape, steps)?;
    let images = [s.host(shape.image().bytes())?, s.host(shape.image().bytes())?];
    let out = s.host(shape.cloud().bytes())?;
    let (w, h) = shape.rectified();
    let mut tracker = Tracker::new(w, h);
    timed(|| {
        let mut gestures = 0;
        for i in 0..n {
            let (l, r) = frame(frames, i);
            fill(&images[0], &l.pixels);
            fill(&images[1], &r.pixels);
            s.put("left", &images[0])?;
            s.put("right", &images[1])?;
            s.run()?;
            s.get("smooth", &out)?;
            s.wait()?;
            gestures += tracker.look(floats(&out)).len();
        }
        Ok(gestures)
    })
}

/// Frames as bytes between stages.
type Message = Vec<u8>;

/// One stage of the modular versions: bytes in, bytes out.
struct Modular {
    stage: Stage,
    inputs: Vec<(&'static str, Buffer)>,
    output: (&'static str, Buffer),
}

impl Modular {
    fn xform(device: &Arc<dyn Device>, shape: &Shape) -> Outcome<Self> {
        let stage = Stage::new(device, shape, pipeline::xform_steps(shape, device.info().kind))?;
        let inputs = ["left", "right"].into_iter().map(|n| Ok((n, stage.host(shape.image().bytes())?)));
        Ok(Modular {
            inputs: inputs.collect::<Outcome<_>>()?,
            output: ("cloud", stage.host(shape.cloud().bytes())?),
            stage,
        })
    }

    fn filter(device: &Arc<dyn Device>, shape: &Shape) -> Outcome<Self> {
        let stage = Stage::new(device, shape, pipeline::filter_steps(shape, device.info().kind))?;
        let inputs = vec![("cloud", stage.host(shape.cloud().bytes())?)];
        Ok(Modular { inputs, output: ("smooth", stage.host(shape.cloud().bytes())?), stage })
    }

    fn process(&mut self, message: &[u8]) -> Outcome<&[u8]> {
        let mut at = 0;
        for (name, host) in &self.inputs {
            fill(host, &message[at..at + host.len()]);
            at += host.len();
            self.stage.put(name, host)?;
        }
        self.stage.run()?;
        self.stage.get(self.output.0, &self.output.1)?;
        self.stage.wait()?;
        Ok(bytes_of(&self.output.1))
    }
}

fn message(frames: &[(Grey, Grey)], i: usize) -> Message {
    let (l, r) = frame(frames, i);
    [l.pixels.as_slice(), r.pixels.as_slice()].concat()
}

fn modular(device: &Arc<dyn Device>, shape: &Shape, frames: &[(Grey, Grey)], n: usize) -> Outcome<Run> {
    let (mut x, mut f) = (Modular::xform(device, shape)?, Modular::filter(device, shape)?);
    let (w, h) = shape.rectified();
    let mut tracker = Tracker::new(w, h);
    timed(|| {
        let (cameras, to_x) = sync_channel::<Message>(4);
        let (from_x, to_f) = sync_channel::<Message>(4);
        let (from_f, to_hid) = sync_channel::<Message>(4);
        std::thread::scope(|s| {
            s.spawn(move || (0..n).all(|i| cameras.send(message(frames, i)).is_ok()));
            let first = s.spawn(move || -> Outcome<()> {
                for m in to_x {
                    from_x.send(x.process(&m)?.to_vec()).map_err(text)?;
                }
                Ok(())
            });
            let second = s.spawn(move || -> Outcome<()> {
                for m in to_f {
                    from_f.send(f.process(&m)?.to_vec()).map_err(text)?;
                }
                Ok(())
            });
            let gestures =
                to_hid.into_iter().map(|m| tracker.look(bytemuck::pod_collect_to_vec(&m).as_slice()).len()).sum();
            let failed = "a stage panicked".to_owned();
            first.join().unwrap_or(Err(failed.clone()))?;
            second.join().unwrap_or(Err(failed))?;
            Ok(gestures)
        })
    })
}

/// `forebay bench gesture-stage`: one process of the version with pipes; frames on standard input and output.
pub fn stage(name: &str, kind: Kind) -> Outcome<()> {
    let shape = Shape::of_recording()?;
    let (devices, _) = forebay::hal::discover(&[kind]);
    let device = devices.first().ok_or_else(|| format!("no {kind} device"))?;
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let bytes = if name == "xform" { shape.frame_bytes() } else { shape.cloud().bytes() };
    let mut message = vec![0u8; bytes];
    let (w, h) = shape.rectified();
    let mut tracker = Tracker::new(w, h);
    let mut stage = match name {
        "xform" => Some(Modular::xform(device, &shape)?),
        "filter" => Some(Modular::filter(device, &shape)?),
        _ => None,
    };
    while input.read_exact(&mut message).is_ok() {
        match &mut stage {
            Some(s) => output.write_all(s.process(&message)?).map_err(text)?,
            None => {
                let events = tracker.look(bytemuck::pod_collect_to_vec::<u8, f32>(&message).as_slice());
                output.write_all(&(events.len() as u32).to_le_bytes()).and_then(|()| output.flush()).map_err(text)?;
            }
        }
    }
    Ok(())
}

fn pipes(kind: Kind, frames: &[(Grey, Grey)], n: usize) -> Outcome<Run> {
    let exe = std::env::current_exe().map_err(text)?;
    let spawn = |stage: &str, input: Stdio| {
        let mut c = Command::new(&exe);
        c.args(["bench", "gesture-stage", stage, kind.name()]).stdin(input).stdout(Stdio::piped()).spawn().map_err(text)
    };
    let (t, c) = (Instant::now(), cpu_all());
    let mut x = spawn("xform", Stdio::piped())?;
    let mut f = spawn("filter", x.stdout.take().map_or(Stdio::null(), Stdio::from))?;
    let mut hid = spawn("hidinput", f.stdout.take().map_or(Stdio::null(), Stdio::from))?;
    let (mut to, mut from) = (x.stdin.take().ok_or("no pipe")?, hid.stdout.take().ok_or("no pipe")?);
    let mut started = t;
    let gestures = std::thread::scope(|s| -> Outcome<usize> {
        let writer = s.spawn(move || (0..=n).all(|i| to.write_all(&message(frames, i)).is_ok()));
        let mut gestures = 0;
        let mut word = [0u8; 4];
        for i in 0..=n {
            from.read_exact(&mut word).map_err(text)?;
            gestures += u32::from_le_bytes(word) as usize;
            // The first frame waits for three processes to start and compile; time begins behind it.
            if i == 0 {
                started = Instant::now();
            }
        }
        writer.join().map_err(|_| "the writer panicked".to_owned())?;
        Ok(gestures)
    })?;
    let seconds = started.elapsed().as_secs_f64();
    for child in [&mut x, &mut f, &mut hid] {
        child.wait().map_err(text)?;
    }
    Ok(Run { seconds, cpu: cpu_all() - c, gestures })
}

fn dataflow(
    kind: Kind,
    shape: &Shape,
    frames: &[(Grey, Grey)],
    n: usize,
    rate: Option<f64>,
) -> Outcome<(Run, Vec<f64>)> {
    let rt = gesture::runtime(kind.name(), Mode::DataAware)?;
    let mut p = pipeline::build(shape, 4, Some(kind)).map_err(text)?;
    let graph = std::mem::replace(&mut p.graph, forebay::Graph::new("started"));
    let run = rt.start(graph).map_err(text)?;
    let m = gesture::replay(&run, &rt, &p, shape, frames, n as u64, rate, |_| {}, |_| {}).map_err(text)?;
    Ok((Run { seconds: m.seconds, cpu: m.cpu.0 + m.cpu.1, gestures: m.gestures }, m.latency_ms))
}

/// Runs the benchmark on every device here, or on one kind.
pub fn run(only: Option<Kind>) -> Outcome<Vec<Row>> {
    let shape = Shape::of_recording()?;
    let frames = recording::pairs()?;
    let (devices, _) = forebay::hal::discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
    let single: Arc<dyn Device> = Arc::new(CpuDevice::new(Pool::new(1)));
    let mut rows = Vec::new();
    for d in devices.iter().filter(|d| only.is_none_or(|k| d.info().kind == k)) {
        let kind = d.info().kind;
        let once = hand_coded(d, &shape, &frames, 3)?.seconds / 3.0;
        let n = ((LEAST / once) as usize).clamp(5, 5000);
        let mut all: [Vec<Run>; 5] = Default::default();
        for round in 0..REPEATS {
            eprintln!("gesture: {kind}: round {} of {REPEATS}, {n} frames", round + 1);
            all[0].push(dataflow(kind, &shape, &frames, n, None)?.0);
            // The host does not get faster by waiting: as many frames as take about as long.
            all[1].push(hand_coded(&single, &shape, &frames, n.min(60))?);
            all[2].push(hand_coded(d, &shape, &frames, n)?);
            all[3].push(modular(d, &shape, &frames, n)?);
            all[4].push(pipes(kind, &frames, n)?);
        }
        let counts = [n, n.min(60), n, n, n];
        const NAMES: [&str; 5] = ["dataflow", "host-based", "hand-coded", "modular", "pipes"];
        let fps: Vec<f64> =
            all.iter().zip(counts).map(|(r, n)| median(r.iter().map(|r| n as f64 / r.seconds).collect())).collect();
        let cpu: Vec<f64> =
            all.iter().zip(counts).map(|(r, n)| median(r.iter().map(|r| r.cpu / n as f64 * 1e3).collect())).collect();
        // The same frames must give the same gestures whoever runs them.
        let want = all[2][0].gestures;
        if all[3][0].gestures != want {
            return Err(format!("{kind}: hand-coded found {want} gestures, modular {}", all[3][0].gestures));
        }
        let row = |case: &str, unit: &str, v: &[f64]| {
            let row = Row::new(format!("{kind}: {case}"), unit, Some(v[0]));
            NAMES.iter().zip(v).skip(1).fold(row, |r, (n, v)| r.peer(n, Some(*v)))
        };
        let gpu = kind == Kind::Cuda;
        let targets = [1.0, 5.0, if gpu { 1.12 } else { 1.0 }, 1.36, 1.71];
        for i in 1..NAMES.len() {
            // Off a GPU the only target is to be no slower than hand-coded.
            let target = (gpu || i == 2).then_some(targets[i]);
            let ratio = fps[0] / fps[i];
            rows.push(Row {
                ratio: Some(ratio),
                target: target.map_or(String::new(), |t| format!("dataflow / {} ≥ {t}", NAMES[i])),
                met: target.map(|t| ratio >= t),
                ..row(&format!("unconstrained, against {}", NAMES[i]), "fps", &fps)
            });
        }
        let mb: Vec<f64> = fps.iter().map(|f| f * shape.frame_bytes() as f64 / 1e6).collect();
        rows.push(row("unconstrained, camera data", "MB/s", &mb));
        rows.push(row("unconstrained, CPU time", "ms per frame", &cpu));
        let (at_rate, latency) = dataflow(kind, &shape, &frames, 90, Some(30.0))?;
        let percent = at_rate.cpu / at_rate.seconds * 100.0;
        rows.push(Row::new(format!("{kind}: real-time, 30 fps, CPU"), "% of a core", Some(percent)));
        rows.push(Row::new(format!("{kind}: real-time, 30 fps, latency"), "ms, median", Some(median(latency))));
    }
    Ok(rows)
}
