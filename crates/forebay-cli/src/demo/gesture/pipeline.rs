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

fn ports(names: &[&str]) -> Vec<Arg> {
    names.iter().map(|n| Arg::port(n)).collect()
}

fn launch(source: &Source, entry: &str, buffers: &[&str], numbers: Vec<Arg>, space: [usize; 3]) -> Launch {
    let args = ports(buffers).into_iter().chain(numbers);
    Launch::new(source.clone(), entry, args).over(Geometry::new(space[0], space[1], space[2]))
}

/// Rectifies, matches and reprojects a pair of images: `left`, `right`, sticky `map` → `cloud`, `disp` (1/16 pixel).
pub fn xform(shape: &Shape) -> Task {
    let ((w, h), (sw, sh)) = (shape.rectified(), shape.source());
    let (nd, radius) = (shape.disparities.min(cpu::MAX_DISPARITIES), shape.radius);
    let (focal, cx, cy) = shape.optics();
    let map_args = vec![u(w), u(h), u(sw), u(sh)];
    let match_args = vec![u(w), u(h), u(nd), u(radius)];
    // Nearer than twice the distance at which a disparity of 4 pixels lies.
    let optics = vec![Arg::F32(focal), Arg::F32(cx), Arg::F32(cy), Arg::F32(shape.calibration.baseline as f32), u(64)];
    let reproject_args: Vec<Arg> = [u(w), u(h)].into_iter().chain(optics).collect();
    let views = [w, h, 2];
    let p = Source::Portable(KERNELS.into());
    let device = vec![
        launch(&p, "rectify", &["left", "right", "map", "rect"], map_args.clone(), views),
        launch(&p, "columns", &["rect", "cost"], match_args.clone(), [w, h, nd]),
        launch(&p, "match", &["cost", "disp"], match_args.clone(), views),
        launch(&p, "reproject", &["rect", "disp", "cloud"], reproject_args.clone(), views),
    ];
    let host = vec![
        launch(&cpu::rectify(), "rectify", &["left", "right", "map", "rect"], map_args, views),
        launch(&cpu::match_rows(), "match", &["rect", "disp"], match_args, [w, h, 1]),
        launch(&cpu::reproject(), "reproject", &["rect", "disp", "cloud"], reproject_args, views),
    ];
    Task::new("xform")
        .input("left", shape.image())
        .input("right", shape.image())
        .sticky("map", shape.map())
        .output("cloud", shape.cloud())
        .output("disp", Template::array::<i32>([w, h, 2]))
        .scratch("rect", 2 * w * h)
        .scratch("cost", 2 * w * h * nd)
        .kernels(Kind::Cpu, host)
        .kernels(Kind::OpenCl, device.clone())
        .kernels(Kind::Cuda, device)
}

/// Smooths a cloud's depths without blurring its edges: `cloud`, sticky `weights` → `smooth`.
pub fn filter(shape: &Shape) -> Task {
    let (w, h) = shape.rectified();
    let numbers = vec![u(w), u(h), Arg::F32(DEPTH_STEPS)];
    let buffers = ["cloud", "weights", "smooth"];
    let views = [w, h, 2];
    let p = Source::Portable(KERNELS.into());
    let device = [launch(&p, "bilateral", &buffers, numbers.clone(), views)];
    Task::new("filter")
        .input("cloud", shape.cloud())
        .sticky("weights", Template::array::<f32>([WEIGHTS]))
        .output("smooth", shape.cloud())
        .kernels(Kind::Cpu, [launch(&cpu::bilateral(), "bilateral", &buffers, numbers, views)])
        .kernels(Kind::OpenCl, device.clone())
        .kernels(Kind::Cuda, device)
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
