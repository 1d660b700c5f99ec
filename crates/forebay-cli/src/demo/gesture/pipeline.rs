//! The graph: two cameras → xform → filter → hidinput.

use forebay::hal::Geometry;
use forebay::{Arg, Datablock, Drain, Elem, Feed, Graph, Kind, Launch, Result, Source, Task, Template};

use super::cpu;
use super::recording::Calibration;
use super::track::{Event, MAX_EVENTS, Tracker};

const KERNELS: &str = include_str!("kernels.cl");

/// Weights of the bilateral filter: 5×5 by distance, then 256 by difference of depth.
const WEIGHTS: usize = 25 + 256;
/// Steps of the depth weights per chessboard square; their standard deviation is half a square.
const DEPTH_STEPS: f32 = 128.0;

/// Sizes and constants of a pipeline.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Calibration of the cameras.
    pub calibration: Calibration,
    /// The rectified images are smaller than the cameras' by this factor.
    pub scale: usize,
    /// Disparities that are tried, rectified pixels; at most 256.
    pub disparities: usize,
    /// Half the matching window's side.
    pub radius: usize,
}

impl Shape {
    /// For the recording: 320×240 points a view, 96 disparities, windows of 9×9.
    pub fn of_recording() -> std::result::Result<Self, String> {
        Ok(Shape { calibration: Calibration::of_recording()?, scale: 2, disparities: 96, radius: 4 })
    }

    /// Width and height of a camera's image.
    pub fn source(&self) -> (usize, usize) {
        (self.calibration.size[0], self.calibration.size[1])
    }

    /// Width and height of a rectified image.
    pub fn rectified(&self) -> (usize, usize) {
        (self.calibration.size[0] / self.scale, self.calibration.size[1] / self.scale)
    }

    /// Focal length and principal point of the rectified images, pixels.
    pub fn optics(&self) -> (f32, f32, f32) {
        let p = &self.calibration.left.projection;
        let (s, shift) = (self.scale as f64, (self.scale as f64 - 1.0) / 2.0);
        ((p[0] / s) as f32, ((p[2] - shift) / s) as f32, ((p[6] - shift) / s) as f32)
    }

    /// A camera's image.
    pub fn image(&self) -> Template {
        let (w, h) = self.source();
        Template::array::<u8>([w, h])
    }

    /// A point cloud: x, y, z, brightness of each point of both views.
    pub fn cloud(&self) -> Template {
        let (w, h) = self.rectified();
        Template::array::<f32>([4 * w, h, 2])
    }

    /// The rectification maps.
    pub fn map(&self) -> Template {
        let (w, h) = self.rectified();
        Template::array::<i16>([2 * w, h, 2])
    }

    /// Bytes that the cameras deliver per frame.
    pub fn frame_bytes(&self) -> usize {
        2 * self.image().bytes()
    }
}

/// The weights of the bilateral filter.
pub fn weights() -> Vec<f32> {
    let mut out = Vec::with_capacity(WEIGHTS);
    for j in -2i32..=2 {
        for i in -2i32..=2 {
            out.push((-((i * i + j * j) as f32) / (2.0 * 1.5 * 1.5)).exp());
        }
    }
    let sigma = 0.5 * DEPTH_STEPS;
    out.extend((0..256).map(|b| (-(b as f32 * b as f32) / (2.0 * sigma * sigma)).exp()));
    out
}

fn u(v: usize) -> Arg {
    Arg::U32(v as u32)
}

/// One kernel call of a stage, with its buffers by name; the graph and the hand-written versions both come from it.
#[derive(Clone, Debug)]
pub struct Step {
    /// Code.
    pub source: Source,
    /// Entry point.
    pub entry: &'static str,
    /// Buffers, which are its first arguments.
    pub buffers: Vec<&'static str>,
    /// Numbers, which are its other arguments.
    pub numbers: Vec<Arg>,
    /// Iteration space.
    pub space: [usize; 3],
}

impl Step {
    fn launch(&self) -> Launch {
        let args = self.buffers.iter().map(|n| Arg::port(n)).chain(self.numbers.iter().cloned());
        Launch::new(self.source.clone(), self.entry, args).over(self.geometry())
    }

    /// The iteration space.
    pub fn geometry(&self) -> Geometry {
        Geometry::new(self.space[0], self.space[1], self.space[2])
    }
}

/// The kernel calls of `xform` on a kind of device.
pub fn xform_steps(shape: &Shape, kind: Kind) -> Vec<Step> {
    let ((w, h), (sw, sh)) = (shape.rectified(), shape.source());
    let (nd, radius) = (shape.disparities.min(cpu::MAX_DISPARITIES), shape.radius);
    let (focal, cx, cy) = shape.optics();
    let views = [w, h, 2];
    let map = vec![u(w), u(h), u(sw), u(sh)];
    let window = vec![u(w), u(h), u(nd), u(radius)];
    // Disparities from 4 pixels on: what is farther away is too uncertain.
    let optics = vec![
        u(w),
        u(h),
        Arg::F32(focal),
        Arg::F32(cx),
        Arg::F32(cy),
        Arg::F32(shape.calibration.baseline as f32),
        u(64),
    ];
    let step = |cpu: Source, entry, buffers: &[&'static str], numbers: &[Arg], space| Step {
        source: if kind == Kind::Cpu { cpu } else { Source::Portable(KERNELS.into()) },
        entry,
        buffers: buffers.to_vec(),
        numbers: numbers.to_vec(),
        space,
    };
    let rectify = step(cpu::rectify(), "rectify", &["left", "right", "map", "rect"], &map, views);
    let reproject = step(cpu::reproject(), "reproject", &["rect", "disp", "cloud"], &optics, views);
    if kind == Kind::Cpu {
        return vec![rectify, step(cpu::match_rows(), "match", &["rect", "disp"], &window, [w, h, 1]), reproject];
    }
    // The source given for the CPU is not used here.
    let columns = step(cpu::rectify(), "columns", &["rect", "cost"], &window, [w, h, nd]);
    let matching = step(cpu::rectify(), "match", &["cost", "disp"], &window, views);
    vec![rectify, columns, matching, reproject]
}

/// The kernel calls of `filter`.
pub fn filter_steps(shape: &Shape, kind: Kind) -> Vec<Step> {
    let (w, h) = shape.rectified();
    vec![Step {
        source: if kind == Kind::Cpu { cpu::bilateral() } else { Source::Portable(KERNELS.into()) },
        entry: "bilateral",
        buffers: vec!["cloud", "weights", "smooth"],
        numbers: vec![u(w), u(h), Arg::F32(DEPTH_STEPS)],
        space: [w, h, 2],
    }]
}

/// Bytes of the buffers that the steps name.
pub fn buffer_bytes(shape: &Shape, name: &str) -> usize {
    let (w, h) = shape.rectified();
    match name {
        "left" | "right" => shape.image().bytes(),
        "map" => shape.map().bytes(),
        "rect" => 2 * w * h,
        "cost" => 2 * w * h * shape.disparities,
        "disp" => 2 * 4 * w * h,
        "weights" => 4 * WEIGHTS,
        _ => shape.cloud().bytes(),
    }
}

fn on_all(mut task: Task, steps: impl Fn(Kind) -> Vec<Step>) -> Task {
    for kind in [Kind::Cpu, Kind::OpenCl, Kind::Cuda] {
        task = task.kernels(kind, steps(kind).iter().map(Step::launch));
    }
    task
}

/// Rectifies, matches and reprojects a pair of images: `left`, `right`, sticky `map` → `cloud`, `disp` (1/16 pixel).
pub fn xform(shape: &Shape) -> Task {
    let (w, h) = shape.rectified();
    let task = Task::new("xform")
        .input("left", shape.image())
        .input("right", shape.image())
        .sticky("map", shape.map())
        .output("cloud", shape.cloud())
        .output("disp", Template::array::<i32>([w, h, 2]))
        .scratch("rect", buffer_bytes(shape, "rect"))
        .scratch("cost", buffer_bytes(shape, "cost"));
    on_all(task, |kind| xform_steps(shape, kind))
}

/// Smooths a cloud's depths without blurring its edges: `cloud`, sticky `weights` → `smooth`.
pub fn filter(shape: &Shape) -> Task {
    let task = Task::new("filter")
        .input("cloud", shape.cloud())
        .sticky("weights", Template::array::<f32>([WEIGHTS]))
        .output("smooth", shape.cloud());
    on_all(task, |kind| filter_steps(shape, kind))
}

/// Follows the moving object: `cloud` → `events`.
pub fn hidinput(shape: &Shape) -> Task {
    let (w, h) = shape.rectified();
    let mut tracker = Tracker::new(w, h);
    Task::new("hidinput")
        .input("cloud", shape.cloud())
        .output("events", Template::records_of(Elem::Record(size_of::<Event>() as u32), MAX_EVENTS))
        .host(move |inv| {
            let found = tracker.look(inv.input::<f32>("cloud")?);
            inv.output::<Event>("events")?[..found.len()].copy_from_slice(&found);
            inv.out("events")?.set_records(found.len())?;
            Ok(())
        })
}

/// A pipeline's graph with the program's ends of it.
pub struct Pipeline {
    /// The graph.
    pub graph: Graph,
    /// Cameras.
    pub left: Feed,
    /// Cameras.
    pub right: Feed,
    /// Constants that are pushed once: the maps, the weights.
    pub constants: Vec<(Feed, Datablock)>,
    /// Gestures.
    pub events: Drain,
    names: Vec<String>,
}

impl Pipeline {
    /// Names of the tasks in order of addition.
    pub fn task_names(&self) -> Vec<String> {
        self.names.clone()
    }
}

/// Room of each channel where nothing is said of it: at a camera's rate what waits is late; as fast as possible (no rate) it
/// keeps everybody busy.
pub fn capacity(rate: Option<f64>) -> usize {
    if rate.is_some() { 1 } else { 2 }
}

/// Builds the graph with channels of `capacity`, with the kernels for all kinds of devices or for one.
pub fn build(shape: &Shape, capacity: usize, only: Option<Kind>) -> Result<Pipeline> {
    let keep = |t: Task| match only {
        Some(k) => t.only(k),
        None => t,
    };
    let mut graph = Graph::new("gesture");
    let x = graph.add(keep(xform(shape)))?;
    let f = graph.add(keep(filter(shape)))?;
    let hid = graph.add(hidinput(shape))?;
    let (w, h) = shape.rectified();
    // The demo does not look at the disparities; a task takes them, since every port is to be bound.
    let discard = graph.add(Task::new("discard").input("disp", Template::array::<i32>([w, h, 2])).host(|_| Ok(())))?;
    graph.connect((x, "disp"), (discard, "disp"))?;
    graph.connect_with((x, "cloud"), (f, "cloud"), capacity, forebay::Predicate::Always)?;
    graph.connect_with((f, "smooth"), (hid, "cloud"), capacity, forebay::Predicate::Always)?;
    let left = graph.feed((x, "left"), capacity)?;
    let right = graph.feed((x, "right"), capacity)?;
    let map = graph.feed((x, "map"), 1)?;
    let weight = graph.feed((f, "weights"), 1)?;
    let events = graph.drain((hid, "events"), capacity)?;
    let constants = vec![
        (map, Datablock::from_slice(shape.map(), &shape.calibration.maps(shape.scale))?),
        (weight, Datablock::from_slice(Template::array::<f32>([WEIGHTS]), &weights())?),
    ];
    let names = ["xform", "filter", "hidinput", "discard"].map(String::from).to_vec();
    Ok(Pipeline { graph, left, right, constants, events, names })
}
