//! Programs with a goal, in the manner of Proteus's section 4.5: one that looks for motion between the pictures of a video,
//! one that answers queries over a table, and one that encrypts a file. Each is a process that says every quarter of a second
//! how it gets on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::hal::discover;
use forebay::place::{Accelerated, Goal, Models};
use forebay::{Arg, Datablock, Geometry, Kind, Launch, Mode, Runtime, Source, Task, Template};

use crate::demo::gesture::recording::{self, Grey};
use crate::workloads::{aes, mix};

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Program {
    /// Motion search, pictures a second; a smaller range of search is lower fidelity
    Video,
    /// Queries, seconds each; fewer rows are lower fidelity
    Query,
    /// Encryption, MB a second
    File,
}

/// Calls that may be under way at a time.
const LANES: usize = 2;
/// Between two reports.
const REPORT: Duration = Duration::from_millis(250);
/// Calls before the first report.
const WARM: usize = 10;

type Result<T, E = String> = std::result::Result<T, E>;

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// Pictures, and blocks of one.
const WIDE: usize = 640;
const HIGH: usize = 480;
const BLOCK: usize = 16;
const BLOCKS: usize = (WIDE / BLOCK) * (HIGH / BLOCK);
/// Ranges of search by fidelity, the best first.
const RANGES: [u32; 4] = [8, 6, 4, 2];

const SEARCH: &str = "
// The least difference between a block of one picture and any place near it in the other, and where that is.
KERNEL void motion(GLOBAL const uchar *now, GLOBAL const uchar *before, GLOBAL const uint *range, GLOBAL uint *best) {
  const int b = (int)gid_x();
  if (b >= 1200) return;
  const int x0 = b % 40 * 16, y0 = b / 40 * 16, r = (int)range[0];
  uint least = 0xffffffffu;
  for (int dy = -r; dy <= r; dy++)
    for (int dx = -r; dx <= r; dx++) {
      const int x1 = x0 + dx, y1 = y0 + dy;
      if (x1 < 0 || y1 < 0 || x1 + 16 > 640 || y1 + 16 > 480) continue;
      uint sum = 0;
      for (int y = 0; y < 16; y++)
        for (int x = 0; x < 16; x++) {
          const int d = (int)now[(y0 + y) * 640 + x0 + x] - (int)before[(y1 + y) * 640 + x1 + x];
          sum += (uint)(d < 0 ? -d : d);
        }
      if (sum < least) least = sum;
    }
  best[b] = least;
}
";

/// The search of [`SEARCH`] on the CPU.
fn motion(now: &[u8], before: &[u8], range: i32, best: &mut [u32]) {
    for (b, best) in best.iter_mut().enumerate() {
        let (x0, y0) = ((b % (WIDE / BLOCK) * BLOCK) as i32, (b / (WIDE / BLOCK) * BLOCK) as i32);
        *best = u32::MAX;
        for (dy, dx) in (-range..=range).flat_map(|dy| (-range..=range).map(move |dx| (dy, dx))) {
            let (x1, y1) = (x0 + dx, y0 + dy);
            if x1 < 0 || y1 < 0 || x1 as usize + BLOCK > WIDE || y1 as usize + BLOCK > HIGH {
                continue;
            }
            let row = |p: &'_ [u8], x: i32, y: i32| -> [u8; BLOCK] {
                let at = y as usize * WIDE + x as usize;
                std::array::from_fn(|i| p[at + i])
            };
            let sum: u32 = (0..BLOCK as i32)
                .map(|y| {
                    let (a, b) = (row(now, x0, y0 + y), row(before, x1, y1 + y));
                    a.iter().zip(b).map(|(a, b)| u32::from(a.abs_diff(b))).sum::<u32>()
                })
                .sum();
            *best = (*best).min(sum);
        }
    }
}

fn video() -> Task {
    let picture = Template::array::<u8>([WIDE * HIGH]);
    let launch = || {
        let ports = ["now", "before", "range", "best"].map(Arg::port);
        [Launch::new(Source::Portable(SEARCH.into()), "motion", ports).over(Geometry::linear(BLOCKS))]
    };
    Task::new("motion")
        .input("now", picture)
        .input("before", picture)
        .input("range", Template::array::<u32>([1]))
        .output("best", Template::array::<u32>([BLOCKS]))
        .kernels(Kind::OpenCl, launch())
        .kernels(Kind::Cuda, launch())
        .host(|inv| {
            let (now, before) = (inv.input::<u8>("now")?, inv.input::<u8>("before")?);
            let range = inv.input::<u32>("range")?[0] as i32;
            motion(now, before, range, inv.output::<u32>("best")?);
            Ok(())
        })
}

/// Numbers without order, the same everywhere.
fn mixed(i: u64) -> u64 {
    let z = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ z >> 27
}

/// Rows of the table, and the groups that they belong to.
const ROWS: usize = 1 << 21;
const GROUPS: usize = 256;

const SELECT: &str = "
KERNEL void none(GLOBAL uint *counts) {
  if (gid_x() < 256) counts[gid_x()] = 0;
}
// How many rows of each group have a value above the query's; of every so many rows one.
KERNEL void selected(GLOBAL const uchar *group, GLOBAL const uint *value, GLOBAL const uint *query, GLOBAL uint *counts, uint n) {
  const uint begin = gid_x() * 1024, step = query[1];
  for (uint i = begin; i < n && i < begin + 1024; i += step)
    if (value[i] > query[0]) ATOMIC_INC(&counts[group[i]]);
}
";

fn query() -> Task {
    let source = || Source::Portable(SELECT.into());
    let launches = || {
        let ports = ["group", "value", "query", "counts"].map(Arg::port);
        let args = ports.into_iter().chain([Arg::records("group")]);
        [
            Launch::new(source(), "none", [Arg::port("counts")]).over(Geometry::linear(GROUPS)),
            Launch::new(source(), "selected", args).over(Geometry::linear(ROWS / 1024)),
        ]
    };
    Task::new("query")
        .input("group", Template::array::<u8>([ROWS]))
        .input("value", Template::array::<u32>([ROWS]))
        .input("query", Template::array::<u32>([2]))
        .output("counts", Template::array::<u32>([GROUPS]))
        .kernels(Kind::OpenCl, launches())
        .kernels(Kind::Cuda, launches())
        .host(|inv| {
            let (group, value) = (inv.input::<u8>("group")?, inv.input::<u32>("value")?);
            let (above, step) = (inv.input::<u32>("query")?[0], inv.input::<u32>("query")?[1] as usize);
            let counts = inv.output::<u32>("counts")?;
            counts.fill(0);
            // In the same rows as the kernel, whose items are a thousand rows each.
            for (g, v) in group.chunks(1024).zip(value.chunks(1024)) {
                for (g, v) in g.iter().zip(v).step_by(step.max(1)) {
                    counts[usize::from(*g)] += u32::from(*v > above);
                }
            }
            Ok(())
        })
}

/// A program's task, what it is called with at a level of fidelity for the n-th time, and what a call counts.
struct Made {
    task: Box<dyn Fn() -> Task>,
    inputs: Box<dyn Fn(u32, u64) -> forebay::Result<Vec<Datablock>> + Send + Sync>,
    lowest: u32,
    each: f64,
}

fn words(of: &[u32]) -> forebay::Result<Datablock> {
    Datablock::from_slice(Template::array::<u32>([of.len()]), of)
}

impl Program {
    fn make(self) -> Result<Made> {
        match self {
            Program::Video => {
                let pairs = recording::pairs()?;
                let fits = |g: &Grey| g.width == WIDE && g.height == HIGH;
                let block = |(left, _): &(Grey, Grey)| {
                    Datablock::from_slice(Template::array::<u8>([WIDE * HIGH]), &left.pixels)
                };
                let pictures = pairs
                    .iter()
                    .filter(|(left, _)| fits(left))
                    .map(block)
                    .collect::<forebay::Result<Vec<_>>>()
                    .map_err(text)?;
                let ranges = RANGES.map(|r| words(&[r]));
                let ranges = ranges.into_iter().collect::<forebay::Result<Vec<_>>>().map_err(text)?;
                let inputs = move |level: u32, n: u64| {
                    let at = |n: u64| pictures[n as usize % pictures.len()].clone();
                    Ok(vec![at(n + 1), at(n), ranges[(level as usize).min(RANGES.len() - 1)].clone()])
                };
                Ok(Made { task: Box::new(video), inputs: Box::new(inputs), lowest: RANGES.len() as u32 - 1, each: 1.0 })
            }
            Program::Query => {
                let group: Vec<u8> = (0..ROWS as u64).map(|i| mixed(i) as u8).collect();
                let value: Vec<u32> = (0..ROWS as u64).map(|i| (mixed(i) >> 16) as u32 % 1_000_000).collect();
                let group = Datablock::from_slice(Template::array::<u8>([ROWS]), &group).map_err(text)?;
                let value = words(&value).map_err(text)?;
                let inputs = move |level: u32, n: u64| {
                    Ok(vec![group.clone(), value.clone(), words(&[(n % 1000) as u32 * 1000, 1 << level])?])
                };
                Ok(Made { task: Box::new(query), inputs: Box::new(inputs), lowest: 2, each: 1.0 })
            }
            Program::File => {
                const BYTES: usize = 1 << 20;
                let key = aes::Key::new(&std::array::from_fn(|i| (i * 37 + 11) as u8));
                let sectors = BYTES / aes::SECTOR;
                let inputs = mix::encryption(&key, BYTES).map_err(text)?;
                let task = move || aes::anywhere(&key, sectors);
                let inputs = move |_: u32, _: u64| Ok(inputs.clone());
                Ok(Made { task: Box::new(task), inputs: Box::new(inputs), lowest: 0, each: BYTES as f64 / 1e6 })
            }
        }
    }

    /// Whether a call's time is what counts; otherwise what is done in a second.
    pub fn is_latency(self) -> bool {
        self == Program::Query
    }

    /// The unit of its figure.
    pub fn unit(self) -> &'static str {
        match self {
            Program::Video => "pictures/s",
            Program::Query => "ms",
            Program::File => "MB/s",
        }
    }
}

/// Calls and their time, added up.
#[derive(Default)]
struct Done {
    calls: AtomicU64,
    ns: AtomicU64,
}

/// The figure since it was asked last: a rate, or the mean time of a call, s.
fn figure(done: Arc<Done>, latency: bool, each: f64) -> impl FnMut() -> f64 + Send + 'static {
    let mut last = (Instant::now(), 0u64, 0u64);
    move || {
        let now = (Instant::now(), done.calls.load(Ordering::Relaxed), done.ns.load(Ordering::Relaxed));
        let (time, calls, ns) = ((now.0 - last.0).as_secs_f64(), (now.1 - last.1) as f64, (now.2 - last.2) as f64);
        last = now;
        match latency {
            // Nothing has come back: it takes that long at least.
            true if calls == 0.0 => time,
            true => ns / calls / 1e9,
            false => calls * each / time,
        }
    }
}

/// Is the program, until its input ends. With a goal it pursues it; without, it does what it can, on all lanes.
pub fn be(program: Program, goal: Option<f64>) -> Result<()> {
    let (devices, _) = discover(&[Kind::OpenCl, Kind::Cuda]);
    let rt = Runtime::builder().mode(Mode::Adaptive).devices(devices).models(Arc::new(Models::off()));
    let rt = rt.build().map_err(text)?;
    let made = program.make()?;
    let task: Accelerated = rt.accelerate(LANES, &made.task).map_err(text)?;
    let (done, level) = (Arc::new(Done::default()), Arc::new(AtomicU32::new(0)));
    let over = AtomicBool::new(false);
    for n in 0..WARM as u64 {
        task.call(&(made.inputs)(0, n).map_err(text)?).map_err(text)?;
    }
    let latency = program.is_latency();
    let _pursuit = match goal {
        None => {
            task.spread(LANES);
            None
        }
        Some(g) => {
            let wanted = if latency { Goal::Latency(g / 1e3) } else { Goal::Throughput(g) };
            let set = level.clone();
            let tracker = figure(done.clone(), latency, made.each);
            Some(task.pursue(wanted, tracker, made.lowest, move |l| set.store(l, Ordering::Relaxed)).map_err(text)?)
        }
    };
    let mut said = figure(done.clone(), latency, made.each);
    let (made, task, done, level, over) = (&made, &task, &done, &level, &over);
    std::thread::scope(|s| {
        let threads = if latency { 1 } else { LANES };
        for t in 0..threads as u64 {
            let inputs = &made.inputs;
            s.spawn(move || {
                let mut n = t;
                while !over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let called = inputs(level.load(Ordering::Relaxed), n).and_then(|i| task.call(&i).map(drop));
                    if let Err(e) = called {
                        eprintln!("{e}");
                        over.store(true, Ordering::Relaxed);
                    }
                    done.ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    done.calls.fetch_add(1, Ordering::Relaxed);
                    n += threads as u64;
                }
            });
        }
        s.spawn(move || {
            // Whoever started this holds its other end.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            std::thread::sleep(REPORT);
            let value = said() * if latency { 1e3 } else { 1.0 };
            crate::say(&format!("{value:.3} {} {}", level.load(Ordering::Relaxed), task.lanes().0));
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_compute_the_same_everywhere() {
        let (mut devices, _) = discover(&[Kind::OpenCl, Kind::Cuda]);
        devices.retain(|d| d.compiles().is_ok());
        let rt = Runtime::builder().devices(devices).service(false).build().unwrap();
        for p in [Program::Video, Program::Query, Program::File] {
            let made = p.make().unwrap();
            for level in 0..=made.lowest {
                let all = rt.verify(&made.task, &(made.inputs)(level, 3).unwrap()).unwrap();
                assert!(all.iter().all(|d| d.largest == 0.0), "{p:?} at level {level}: {all:?}");
            }
        }
    }

    #[test]
    fn a_gpu_would_compute_the_same() {
        const ALL: &str = "bench::goals::programs::tests::the_programs_compute_the_same_everywhere";
        crate::stand_in::again_as_ptx(&[ALL], &[]);
    }

    #[test]
    fn motion_is_found_where_it_is() {
        let before: Vec<u8> = (0..(WIDE * HIGH) as u64).map(|i| mixed(i) as u8).collect();
        // Everything has moved by 3 to the right and 2 down.
        let now: Vec<u8> = (0..WIDE * HIGH)
            .map(|i| if i % WIDE >= 3 && i / WIDE >= 2 { before[i - 3 - 2 * WIDE] } else { 0 })
            .collect();
        let mut best = vec![0; BLOCKS];
        motion(&now, &before, 4, &mut best);
        let inner = |b: usize| !b.is_multiple_of(40) && b > 40;
        assert!((0..BLOCKS).filter(|b| inner(*b)).all(|b| best[b] == 0));
        motion(&now, &before, 1, &mut best);
        assert!((0..BLOCKS).filter(|b| inner(*b)).all(|b| best[b] > 1000));
    }
}
