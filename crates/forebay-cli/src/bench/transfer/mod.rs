//! `forebay bench transfer`: every way of moving bytes at every size, the engine's choice beside them; the same under
//! interference, for ordinary and real-time streams; and two streams at once (figures 6 to 17 of Fujii et al.).

mod interference;
pub mod load;
pub mod pictures;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::hal::cuda::plain::{Calls, PlainCopies};
use forebay::hal::{Buffer, Device, Queue};
use forebay::transfer::{CALIBRATION, Curves, Direction, Engine, Host, Method, Pinned, Stream, Way};
use forebay::{Kind, Result};

use super::part::{self, Found, Part};
use super::schema::{Row, median, quantile};
use crate::plot::{self, Series};

/// Sizes: powers of two from 8 B to 256 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 3..=28;
/// Rounds in which everything is measured once at a size: enough, and far more than enough.
const SAMPLES: (usize, usize) = (301, 100_000);
/// Time for one size, in one direction, from one kind of memory: so long that a hiccup of the machine is not all of it, and
/// no longer, unless there were so few rounds by then that a median of them is chance. (Loads through a GPU's aperture take
/// seconds at the largest sizes: there is an end to that, too.)
const LEAST: Duration = Duration::from_millis(40);
const PER_SIZE: Duration = Duration::from_millis(300);
/// Rounds for which `PER_SIZE` does not count, and what they may take.
const FEWEST: usize = 15;
const MOST: Duration = Duration::from_secs(4);
/// A copy within the host's memory of up to this size takes less than a microsecond, and some clocks go by steps of 10 ns: so
/// many are timed at once.
const SHORT: usize = 8 << 10;
const AT_ONCE: u32 = 64;
/// The engine may be so much slower than the fastest way at a size.
const NEAR: f64 = 1.05;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// As planned.
    Ours,
    /// Forced.
    By(Way),
    /// The device's queue, without Forebay's stream around it.
    Queue,
    /// CUDA's own calls.
    Cuda(Calls),
}

impl Path {
    fn name(self) -> String {
        match self {
            Path::Ours => "ours".into(),
            Path::By(w) => w.name().into(),
            Path::Queue => "plain".into(),
            Path::Cuda(Calls::Blocking) => BLOCKING.into(),
            Path::Cuda(Calls::Stream) => STREAM.into(),
        }
    }
}

const BLOCKING: &str = "cudaMemcpy";
const STREAM: &str = "cudaMemcpyAsync + synchronise";

/// Everything that a transfer needs.
struct Site {
    stream: Stream,
    queue: Box<dyn Queue>,
    memory: Buffer,
    pinned: Pinned,
    pageable: Vec<u8>,
    /// CUDA's own calls, on memory of theirs.
    cuda: Option<PlainCopies>,
}

impl Site {
    fn new(engine: &Arc<Engine>, bytes: usize) -> Result<Self> {
        let mut pinned = engine.pinned(bytes)?;
        pinned.fill(1);
        let (stream, queue) = (engine.stream()?, engine.device().queue()?);
        let is_cuda = engine.device().info().kind == Kind::Cuda;
        let cuda = is_cuda.then(|| PlainCopies::of(&engine.device().alloc(bytes)?)).transpose()?;
        let mut site = Site { stream, queue, memory: engine.memory(bytes)?, pinned, pageable: vec![2; bytes], cuda };
        // Memory that nobody touched is not there yet.
        site.stream.write(&site.memory, 0, &site.pageable)?;
        Ok(site)
    }

    /// The plain copy of the same bytes, the other way: behind it they are where a program's mostly are that it has just made, in the
    /// caches of one core as far as they fit. Behind copies of several kinds they are in one place or another: 1 MiB by one core takes 32 µs behind itself
    /// and 100 behind a copy that went past the caches, and whose median is which depends on who came behind whom how often.
    fn settle(&mut self, direction: Direction, host: Host, bytes: usize) -> Result<()> {
        let plain = self.stream.engine().device().plain_copy().unwrap_or(Method::Engine);
        self.once(Path::By(Way::Direct(plain)), direction.opposite(), host, bytes).map(|_| ())
    }

    /// One transfer; what it took, µs. (Where it is shorter than what clocks can tell, one of several.)
    fn once(&mut self, path: Path, direction: Direction, host: Host, bytes: usize) -> Result<f64> {
        let device = self.stream.engine().device();
        let by_host = match path {
            Path::Ours => device.plain_copy().is_some(),
            Path::By(way) => way.is_copy_by_host(&**device),
            Path::Queue | Path::Cuda(_) => device.info().host_memory,
        };
        let is_short = bytes <= SHORT && by_host;
        let times = if is_short { AT_ONCE } else { 1 };
        match path {
            Path::Ours => self.stream.force(None)?,
            Path::By(way) => self.stream.force(Some(way))?,
            Path::Queue | Path::Cuda(_) => {}
        }
        let (stream, memory) = (&mut self.stream, &self.memory);
        let p = match host {
            Host::Pinned => self.pinned.as_mut_ptr(),
            Host::Pageable => self.pageable.as_mut_ptr(),
        };
        let begun = Instant::now();
        for _ in 0..times {
            match (path, direction, host) {
                (Path::Cuda(calls), ..) => {
                    if let Some(c) = &self.cuda {
                        // SAFETY: the host's memory has the bytes, and nobody else has it meanwhile.
                        unsafe { c.copy(calls, direction, p, bytes)? };
                    }
                }
                (Path::Queue, ..) => {
                    // SAFETY: both have the bytes, and they are awaited before anything else happens.
                    unsafe { self.queue.transfer(Method::Engine, direction, memory, 0, p, bytes)? };
                    let fence = self.queue.fence()?;
                    self.queue.wait(fence)?;
                }
                (_, Direction::ToDevice, Host::Pinned) => stream.write(memory, 0, &self.pinned.part(0..bytes))?,
                (_, Direction::ToDevice, Host::Pageable) => stream.write(memory, 0, &self.pageable[..bytes])?,
                (_, Direction::ToHost, Host::Pinned) => stream.read(memory, 0, &mut self.pinned.part_mut(0..bytes))?,
                (_, Direction::ToHost, Host::Pageable) => stream.read(memory, 0, &mut self.pageable[..bytes])?,
            }
        }
        Ok(begun.elapsed().as_secs_f64() * 1e6 / f64::from(times))
    }
}

fn ways(device: &dyn Device, host: Host) -> Vec<Way> {
    Way::of(device).filter(|w| w.serves(host)).collect()
}

fn shuffle(order: &mut [usize], seed: &mut u64) {
    for i in (1..order.len()).rev() {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (*seed >> 33) as usize % (i + 1));
    }
}

/// What has to be reached on a GPU, of all sizes in a range: so many times as fast as `cudaMemcpy`.
struct Times {
    direction: Direction,
    sizes: std::ops::RangeInclusive<usize>,
    times: f64,
}

const FASTER: [Times; 3] = [
    Times { direction: Direction::ToDevice, sizes: 8..=4 << 10, times: 5.0 },
    Times { direction: Direction::ToDevice, sizes: 64 << 10..=64 << 10, times: 2.0 },
    Times { direction: Direction::ToHost, sizes: 8..=1 << 10, times: 5.0 },
];
/// From this size on, so many GB/s from and to page-locked memory, and so many times `cudaMemcpy`'s rate from and to other
/// memory (at this size).
const LARGE: usize = 64 << 20;
const GB_A_SECOND: f64 = 54.0;
const PAGEABLE: f64 = 3.0;

/// Sizes, our times and those of `cudaMemcpy`, µs.
type BesideCuda = Vec<(usize, f64, f64)>;

fn gpu_targets(direction: Direction, host: Host, found: &BesideCuda) -> Vec<Row> {
    let mut rows = Vec::new();
    let what = format!("cuda, {}, {}", direction.name(), host.name());
    let range = |from: usize, to: usize| match from == to {
        true => plot::bytes(from as f64),
        false => format!("{} to {}", plot::bytes(from as f64), plot::bytes(to as f64)),
    };
    let worst = |from: usize, to: usize, of: &dyn Fn(&(usize, f64, f64)) -> f64| {
        found.iter().filter(|f| (from..=to).contains(&f.0)).map(of).reduce(f64::min)
    };
    for t in FASTER.iter().filter(|t| t.direction == direction) {
        let (from, to) = (*t.sizes.start(), *t.sizes.end());
        let case = format!("{what}, {}: {BLOCKING} / ours, of the worst size", range(from, to));
        rows.push(Row::new(case, "times", worst(from, to, &|f| f.2 / f.1)).above(t.times));
    }
    if host == Host::Pinned {
        let case = format!("{what}, {} and more: slowest", range(LARGE, LARGE));
        rows.push(Row::new(case, "GB/s", worst(LARGE, usize::MAX, &|f| f.0 as f64 / f.1 / 1e3)).above(GB_A_SECOND));
    } else {
        let case = format!("{what}, {}: {BLOCKING} / ours", range(LARGE, LARGE));
        rows.push(Row::new(case, "times", worst(LARGE, LARGE, &|f| f.2 / f.1)).above(PAGEABLE));
    }
    rows
}

fn curves(engine: &Arc<Engine>, found: &mut Found) -> Result<()> {
    let device = engine.device().clone();
    let kind = device.info().kind;
    let largest = (1usize << SIZES.end()).min((device.info().memory_bytes / 4) as usize);
    let mut site = Site::new(engine, largest)?;
    let mut seed = 1;
    for (direction, host) in Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h))) {
        let mut paths = vec![Path::Ours];
        match kind {
            Kind::Cuda => paths.extend([Calls::Stream, Calls::Blocking].map(Path::Cuda)),
            _ => paths.push(Path::Queue),
        }
        let peers = paths.len();
        paths.extend(ways(&*device, host).into_iter().map(Path::By));
        let mut lines: Vec<Series> =
            paths.iter().map(|p| Series { name: p.name(), points: Vec::new(), bold: *p == Path::Ours }).collect();
        let (mut slower, mut beside_cuda) = (Vec::new(), BesideCuda::new());
        for size in SIZES.map(|i| 1usize << i).filter(|s| *s <= largest) {
            eprint!("\rtransfer: {kind} {}, {}: {:>8} ", direction.name(), host.name(), plot::bytes(size as f64));
            let mut samples = vec![Vec::new(); paths.len()];
            let mut order: Vec<usize> = (0..paths.len()).collect();
            let from = Instant::now();
            for round in 0.. {
                let passed = from.elapsed();
                let time = match round {
                    0 => Duration::MAX,
                    r if r < FEWEST => MOST,
                    r if r < SAMPLES.0 => PER_SIZE,
                    _ => LEAST,
                };
                if passed > time || round >= SAMPLES.1 {
                    break;
                }
                // In another order each time, and from the same state: what one leaves in the caches is the next one's gain
                // or loss.
                shuffle(&mut order, &mut seed);
                for &i in &order {
                    site.settle(direction, host, size)?;
                    samples[i].push(site.once(paths[i], direction, host, size)?);
                }
            }
            let late: Vec<f64> = samples.iter().map(|s| quantile(s.clone(), 0.999)).collect();
            let medians: Vec<f64> = samples.into_iter().map(median).collect();
            lines.iter_mut().zip(&medians).for_each(|(l, m)| l.points.push((size as f64, *m)));
            let best = medians[peers..].iter().copied().fold(f64::MAX, f64::min);
            slower.push(medians[0] / medians[1]);
            let case = format!("{kind}, {}, {}, {}", direction.name(), host.name(), plot::bytes(size as f64));
            let beside = |row: Row, all: &[f64]| {
                paths.iter().zip(all).skip(1).fold(row, |row, (p, v)| row.peer(&p.name(), Some(*v)))
            };
            if kind == Kind::Cuda {
                beside_cuda.push((size, medians[0], medians[2]));
                found.rows.push(beside(Row::new(format!("{case}: p99.9"), "µs", Some(late[0])), &late));
            }
            let mut row = beside(Row::new(case, "µs", Some(medians[0])), &medians);
            row.ratio = Some(medians[0] / best);
            row.target = format!("ours / fastest way ≤ {NEAR}");
            row.met = row.ratio.map(|r| r <= NEAR);
            found.rows.push(row);
        }
        eprintln!();
        let worst = slower.iter().copied().fold(0.0, f64::max);
        let plain = paths[1].name();
        let case = format!("{kind}, {}, {}: slowest against {plain}, of all sizes", direction.name(), host.name());
        let mut row = Row::new(case, &format!("ours / {plain}"), Some(worst));
        // On a GPU: never slower.
        let limit = if kind == Kind::Cuda { 1.0 } else { NEAR };
        (row.ratio, row.target, row.met) = (Some(worst), format!("≤ {limit}"), Some(worst <= limit));
        found.rows.push(row);
        if kind == Kind::Cuda {
            found.rows.extend(gpu_targets(direction, host, &beside_cuda));
        }
        let name = format!("transfer-{kind}-{}-{}", direction.name().replace(' ', "-"), host.name());
        let title = format!("{}: {}, {} memory", device.info().name, direction.name(), host.name());
        found.plots.push((name, plot::over_bytes(&title, "µs", &lines)));
    }
    Ok(())
}

/// Two streams at once, each by its own way; what a transfer takes beside the other, against alone.
fn two_streams(engine: &Arc<Engine>, found: &mut Found) -> Result<()> {
    const BYTES: usize = 1 << 20;
    const TIME: Duration = Duration::from_millis(300);
    let device = engine.device().clone();
    let all: Vec<(Way, Host)> = ways(&*device, Host::Pinned).into_iter().map(|w| (w, Host::Pinned)).collect();
    let all: Vec<_> = all.into_iter().chain([(Way::Staged, Host::Pageable)]).collect();
    let run = |pair: &[(Way, Host, Direction)]| -> Result<Vec<f64>> {
        let mut sites = pair.iter().map(|_| Site::new(engine, BYTES)).collect::<Result<Vec<_>>>()?;
        let gate = std::sync::Barrier::new(pair.len());
        std::thread::scope(|s| {
            let each = sites.iter_mut().zip(pair).map(|(site, &(way, host, direction))| {
                let gate = &gate;
                s.spawn(move || -> Result<f64> {
                    gate.wait();
                    let (begun, mut samples) = (Instant::now(), Vec::new());
                    while begun.elapsed() < TIME {
                        samples.push(site.once(Path::By(way), direction, host, BYTES)?);
                    }
                    Ok(median(samples))
                })
            });
            let each: Vec<_> = each.collect();
            each.into_iter().map(|t| t.join().unwrap_or(Ok(f64::NAN))).collect()
        })
    };
    let kind = device.info().kind;
    for (i, &(a, ah)) in all.iter().enumerate() {
        for &(b, bh) in &all[i..] {
            let each = Direction::ALL.into_iter().flat_map(|da| Direction::ALL.map(|db| (da, db)));
            // Of one way beside itself the two directions are a pair once.
            for (da, db) in each.filter(|d| (a, ah) != (b, bh) || *d != (Direction::ToHost, Direction::ToDevice)) {
                eprint!("\rtransfer: {kind}, {} {} beside {} {}      ", a.name(), da.name(), b.name(), db.name());
                let alone = run(&[(a, ah, da)])?[0];
                let both = run(&[(a, ah, da), (b, bh, db)])?;
                let [one, other] = [(a, da), (b, db)].map(|(w, d)| format!("{} {}", w.name(), d.name()));
                let case = pictures::beside(kind.name(), &plot::bytes(BYTES as f64), &one, &other);
                let row =
                    Row::new(case, "µs", Some(both[0])).peer("alone", Some(alone)).peer("the other", Some(both[1]));
                found.rows.push(Row { ratio: Some(both[0] / alone), ..row });
            }
        }
    }
    eprintln!();
    found.plots.extend(pictures::of(&found.rows));
    Ok(())
}

/// All of it, on these kinds of device.
pub fn parts(device: Option<Kind>, quick: bool) -> std::result::Result<Vec<Part>, String> {
    let kinds = part::kinds(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda], device)?;
    let mut parts = Vec::new();
    for kind in kinds {
        parts.push(Part::new(format!("{kind}: curves"), move |found| {
            let (engine, took) = calibrated(kind)?;
            let mut row = Row::new(format!("{kind}, calibration"), "s", Some(took));
            // A size that was begun is finished.
            (row.ratio, row.target, row.met) = (Some(took / 2.0), "≤ 2 s".into(), Some(took <= 2.0));
            found.rows.push(row);
            for why in engine.device().without() {
                eprintln!("transfer: {kind}: without {why}");
            }
            curves(&engine, found).map_err(|e| e.to_string())
        }));
        if !quick {
            parts.push(Part::new(format!("{kind}: interference"), move |found| {
                interference::run(&calibrated(kind)?.0, found)
            }));
            parts.push(Part::new(format!("{kind}: two streams"), move |found| {
                two_streams(&calibrated(kind)?.0, found).map_err(|e| e.to_string())
            }));
        }
    }
    Ok(parts)
}

/// An engine of the first device of a kind, and how long its calibration took, s.
fn calibrated(kind: Kind) -> std::result::Result<(Arc<Engine>, f64), String> {
    let engine = Engine::with_curves(part::first(kind)?, Curves::default());
    let begun = Instant::now();
    engine.calibrate(CALIBRATION).map_err(|e| e.to_string())?;
    Ok((engine, begun.elapsed().as_secs_f64()))
}
