//! The gesture pipeline, written in five ways over the same kernels.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use forebay::hal::{Arg as HalArg, Buffer, Device, Kernel, Queue};
use forebay::{Arg, Kind, Mode};

use crate::demo::gesture;
use crate::demo::gesture::camera::Source;
use crate::demo::gesture::pipeline::{self, Shape, Step};
use crate::demo::gesture::recording::{self, Grey};
use crate::demo::gesture::track::Tracker;

use super::{Outcome, Run, text, usage};

/// What every way gets.
pub struct Job<'a> {
    pub device: &'a Arc<dyn Device>,
    pub shape: &'a Shape,
    pub frames: &'a [(Grey, Grey)],
    /// Frames to process.
    pub count: usize,
    /// Frames a second; none for as fast as possible.
    pub rate: Option<f64>,
}

impl Job<'_> {
    fn frame(&self, i: usize) -> &(Grey, Grey) {
        &self.frames[recording::replay(i as u64, self.frames.len())]
    }

    fn message(&self, i: usize) -> Message {
        let (l, r) = self.frame(i);
        [l.pixels.as_slice(), r.pixels.as_slice()].concat()
    }

    /// Waits until frame `i` of a recording that begins at `begun` is due; when the camera has it.
    fn camera(&self, begun: Instant, i: usize) -> Instant {
        if let Some(rate) = self.rate {
            let due = begun + Duration::from_secs_f64(i as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        Instant::now()
    }
}

fn since(t: Instant) -> f64 {
    t.elapsed().as_secs_f64() * 1e3
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

/// Times `f`, which gives the number of gestures and each frame's latency, ms.
fn timed(f: impl FnOnce() -> Outcome<(usize, Vec<f64>)>) -> Outcome<Run> {
    let (t, before) = (Instant::now(), usage::cpu());
    let (gestures, latency_ms) = f()?;
    let (seconds, after) = (t.elapsed().as_secs_f64(), usage::cpu());
    let (memory_mib, threads) = usage::size("self");
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    Ok(Run { seconds, user, system, latency_ms, gestures, memory_mib, threads, gpu: None })
}

/// All stages on one thread; host-based when the device is a CPU of one worker.
pub fn hand_coded(job: &Job<'_>) -> Outcome<Run> {
    let (device, shape) = (job.device, job.shape);
    let kind = device.info().kind;
    let steps = [pipeline::xform_steps(shape, kind), pipeline::filter_steps(shape, kind)].concat();
    let mut s = Stage::new(device, shape, steps)?;
    let images = [s.host(shape.image().bytes())?, s.host(shape.image().bytes())?];
    let out = s.host(shape.cloud().bytes())?;
    let (w, h) = shape.rectified();
    let mut tracker = Tracker::new(w, h);
    let mut one = |i: usize| {
        let (l, r) = job.frame(i);
        fill(&images[0], &l.pixels);
        fill(&images[1], &r.pixels);
        s.put("left", &images[0])?;
        s.put("right", &images[1])?;
        s.run()?;
        s.get("smooth", &out)?;
        s.wait()?;
        Ok::<_, String>(tracker.look(floats(&out)).len())
    };
    one(0)?;
    timed(|| {
        let (begun, mut gestures, mut latency) = (Instant::now(), 0, Vec::with_capacity(job.count));
        for i in 0..job.count {
            let at = job.camera(begun, i);
            gestures += one(i + 1)?;
            latency.push(since(at));
        }
        Ok((gestures, latency))
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

/// A thread per stage.
pub fn modular(job: &Job<'_>) -> Outcome<Run> {
    let (mut x, mut f) = (Modular::xform(job.device, job.shape)?, Modular::filter(job.device, job.shape)?);
    let (w, h) = job.shape.rectified();
    let mut tracker = Tracker::new(w, h);
    let mut look = |m: &Message| tracker.look(bytemuck::pod_collect_to_vec(m).as_slice()).len();
    let first = x.process(&job.message(0))?.to_vec();
    look(&f.process(&first)?.to_vec());
    timed(|| {
        type Sent = (Instant, Message);
        let channel = || sync_channel::<Sent>(pipeline::capacity(job.rate));
        let ((cameras, to_x), (from_x, to_f), (from_f, to_hid)) = (channel(), channel(), channel());
        std::thread::scope(|s| {
            s.spawn(move || {
                let begun = Instant::now();
                (0..job.count).all(|i| {
                    let at = job.camera(begun, i);
                    cameras.send((at, job.message(i + 1))).is_ok()
                })
            });
            let first = s.spawn(move || -> Outcome<()> {
                for (at, m) in to_x {
                    from_x.send((at, x.process(&m)?.to_vec())).map_err(text)?;
                }
                Ok(())
            });
            let second = s.spawn(move || -> Outcome<()> {
                for (at, m) in to_f {
                    from_f.send((at, f.process(&m)?.to_vec())).map_err(text)?;
                }
                Ok(())
            });
            let (mut gestures, mut latency) = (0, Vec::with_capacity(job.count));
            for (at, m) in to_hid {
                gestures += look(&m);
                latency.push(since(at));
            }
            let failed = "a stage panicked".to_owned();
            first.join().unwrap_or(Err(failed.clone()))?;
            second.join().unwrap_or(Err(failed))?;
            Ok((gestures, latency))
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
            Some(s) => output.write_all(s.process(&message)?).and_then(|()| output.flush()).map_err(text)?,
            None => {
                let events = tracker.look(bytemuck::pod_collect_to_vec::<u8, f32>(&message).as_slice());
                output.write_all(&(events.len() as u32).to_le_bytes()).and_then(|()| output.flush()).map_err(text)?;
            }
        }
    }
    Ok(())
}

/// A process per stage, and this one for the cameras.
pub fn pipes(job: &Job<'_>) -> Outcome<Run> {
    let exe = std::env::current_exe().map_err(text)?;
    let kind = job.device.info().kind;
    let spawn = |stage: &str, input: Stdio| {
        let mut c = Command::new(&exe);
        c.args(["bench", "gesture-stage", stage, kind.name()]).stdin(input).stdout(Stdio::piped()).spawn().map_err(text)
    };
    let mut x = spawn("xform", Stdio::piped())?;
    let mut f = spawn("filter", x.stdout.take().map_or(Stdio::null(), Stdio::from))?;
    let mut hid = spawn("hidinput", f.stdout.take().map_or(Stdio::null(), Stdio::from))?;
    let pids = [&x, &f, &hid].map(|c| c.id().to_string());
    let (mut to, mut from) = (x.stdin.take().ok_or("no pipe")?, hid.stdout.take().ok_or("no pipe")?);
    let mut word = [0u8; 4];
    // The first frame waits for three processes to start and compile.
    to.write_all(&job.message(0)).map_err(text)?;
    from.read_exact(&mut word).map_err(text)?;
    let mut sizes = (0.0, 0);
    let mut run = timed(|| {
        let (sent, arrived) = std::sync::mpsc::channel();
        std::thread::scope(|s| {
            // The pipe is closed when the writer ends, so its end is kept for the sizes below.
            let writer = s.spawn(move || {
                let begun = Instant::now();
                let all = (0..job.count).all(|i| {
                    let at = job.camera(begun, i);
                    sent.send(at).is_ok() && to.write_all(&job.message(i + 1)).is_ok()
                });
                (all, to)
            });
            let (mut gestures, mut latency) = (0, Vec::with_capacity(job.count));
            for _ in 0..job.count {
                from.read_exact(&mut word).map_err(text)?;
                gestures += u32::from_le_bytes(word) as usize;
                latency.push(since(arrived.recv().map_err(text)?));
            }
            let (_, to) = writer.join().map_err(|_| "the writer panicked".to_owned())?;
            sizes = pids.iter().map(|p| usage::size(p)).fold((0.0, 0), |a, s| (a.0 + s.0, a.1 + s.1));
            drop(to);
            // Their CPU time counts once they have been waited for.
            for child in [&mut x, &mut f, &mut hid] {
                child.wait().map_err(text)?;
            }
            Ok((gestures, latency))
        })
    })?;
    run.memory_mib += sizes.0;
    run.threads += sizes.1;
    Ok(run)
}

/// The demo's graph.
pub fn dataflow(job: &Job<'_>) -> Outcome<Run> {
    let kind = job.device.info().kind;
    let rt = crate::runtime(kind.name(), Mode::DataAware)?;
    let mut p = pipeline::build(job.shape, pipeline::capacity(job.rate), Some(kind)).map_err(text)?;
    let graph = std::mem::replace(&mut p.graph, forebay::Graph::new("started"));
    let run = rt.start(graph).map_err(text)?;
    let mut source = Source::Recording { frames: job.frames, rate: job.rate };
    let m = gesture::replay(&run, &rt, &p, job.shape, &mut source, job.count as u64, |_| {}, |_| {})?;
    let (memory_mib, threads) = usage::size("self");
    let (seconds, (user, system), latency_ms, gestures) = (m.seconds, m.cpu, m.latency_ms, m.gestures);
    Ok(Run { seconds, user, system, latency_ms, gestures, memory_mib, threads, gpu: None })
}
