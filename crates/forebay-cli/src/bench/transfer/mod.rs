//! `forebay bench transfer`: every way of moving bytes at every size, the engine's choice beside them; the same under
//! interference, for ordinary and real-time streams; and two streams at once (figures 6 to 17 of Fujii et al.).

mod interference;
pub mod load;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::hal::{Buffer, Device, Queue};
use forebay::transfer::{CALIBRATION, Curves, Direction, Engine, Host, Method, Pinned, Stream, Way};
use forebay::{Kind, Result};

use super::schema::{Row, median};
use crate::plot::{self, Series};

/// Sizes: powers of two from 8 B to 256 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 3..=28;
/// Rounds in which everything is measured once at a size: enough, and far more than enough.
const SAMPLES: (usize, usize) = (301, 100_000);
/// Time for one size, in one direction, from one kind of memory: so long that a hiccup of the machine is not all of it, and
/// no longer, however few rounds that are.
const LEAST: Duration = Duration::from_millis(40);
const PER_SIZE: Duration = Duration::from_millis(300);
/// The engine may be so much slower than the fastest way at a size.
const NEAR: f64 = 1.05;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// As planned.
    Ours,
    /// Forced.
    By(Way),
    /// The device's own calls, without Forebay's stream around them.
    Plain,
}

impl Path {
    fn name(self) -> String {
        match self {
            Path::Ours => "ours".into(),
            Path::By(w) => w.name().into(),
            Path::Plain => "plain".into(),
        }
    }
}

/// Everything that a transfer needs.
struct Site {
    stream: Stream,
    queue: Box<dyn Queue>,
    memory: Buffer,
    pinned: Pinned,
    pageable: Vec<u8>,
}

impl Site {
    fn new(engine: &Arc<Engine>, bytes: usize) -> Result<Self> {
        let mut pinned = engine.pinned(bytes)?;
        pinned.fill(1);
        let (stream, queue) = (engine.stream()?, engine.device().queue()?);
        let mut site = Site { stream, queue, memory: engine.memory(bytes)?, pinned, pageable: vec![2; bytes] };
        // Memory that nobody touched is not there yet.
        site.stream.write(&site.memory, 0, &site.pageable)?;
        Ok(site)
    }

    /// One transfer; what it took, µs.
    fn once(&mut self, path: Path, direction: Direction, host: Host, bytes: usize) -> Result<f64> {
        match path {
            Path::Ours => self.stream.force(None)?,
            Path::By(way) => self.stream.force(Some(way))?,
            Path::Plain => {}
        }
        let (stream, memory) = (&mut self.stream, &self.memory);
        let begun = Instant::now();
        match (path, direction, host) {
            (Path::Plain, ..) => {
                let p = match host {
                    Host::Pinned => self.pinned.as_mut_ptr(),
                    Host::Pageable => self.pageable.as_mut_ptr(),
                };
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
        Ok(begun.elapsed().as_secs_f64() * 1e6)
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

/// Rows, and plots by name.
type Found = (Vec<Row>, Vec<(String, String)>);

fn curves(engine: &Arc<Engine>, found: &mut Found) -> Result<()> {
    let device = engine.device().clone();
    let kind = device.info().kind;
    let largest = (1usize << SIZES.end()).min((device.info().memory_bytes / 4) as usize);
    let mut site = Site::new(engine, largest)?;
    let mut seed = 1;
    for (direction, host) in Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h))) {
        let mut paths = vec![Path::Ours, Path::Plain];
        paths.extend(ways(&*device, host).into_iter().map(Path::By));
        let mut lines: Vec<Series> =
            paths.iter().map(|p| Series { name: p.name(), points: Vec::new(), bold: *p == Path::Ours }).collect();
        let (mut near, mut slower) = (Vec::new(), Vec::new());
        for size in SIZES.map(|i| 1usize << i).filter(|s| *s <= largest) {
            eprint!("\rtransfer: {kind} {}, {}: {:>8} ", direction.name(), host.name(), plot::bytes(size as f64));
            let mut samples = vec![Vec::new(); paths.len()];
            let mut order: Vec<usize> = (0..paths.len()).collect();
            let from = Instant::now();
            let until = from + PER_SIZE;
            for round in 0.. {
                let now = Instant::now();
                if now > until || (round >= SAMPLES.0 && now > from + LEAST) || round >= SAMPLES.1 {
                    break;
                }
                // In another order each time: what one leaves in the caches is the next one's gain or loss.
                shuffle(&mut order, &mut seed);
                for &i in &order {
                    samples[i].push(site.once(paths[i], direction, host, size)?);
                }
            }
            let medians: Vec<f64> = samples.into_iter().map(median).collect();
            lines.iter_mut().zip(&medians).for_each(|(l, m)| l.points.push((size as f64, *m)));
            let best = medians[2..].iter().copied().fold(f64::MAX, f64::min);
            near.push(medians[0] / best);
            slower.push(medians[0] / medians[1]);
            let case = format!("{kind}, {}, {}, {}", direction.name(), host.name(), plot::bytes(size as f64));
            let mut row = Row::new(case, "µs", Some(medians[0]));
            for (p, m) in paths.iter().zip(&medians).skip(1) {
                row = row.peer(&p.name(), Some(*m));
            }
            row.ratio = Some(medians[0] / best);
            row.target = format!("ours / fastest way ≤ {NEAR}");
            row.met = row.ratio.map(|r| r <= NEAR);
            found.0.push(row);
        }
        eprintln!();
        let worst = slower.iter().copied().fold(0.0, f64::max);
        let case = format!("{kind}, {}, {}: slowest against plain, of all sizes", direction.name(), host.name());
        let mut row = Row::new(case, "ours / plain", Some(worst));
        (row.ratio, row.target, row.met) = (Some(worst), format!("≤ {NEAR}"), Some(worst <= NEAR));
        found.0.push(row);
        let name = format!("transfer-{kind}-{}-{}", direction.name().replace(' ', "-"), host.name());
        let title = format!("{}: {}, {} memory", device.info().name, direction.name(), host.name());
        found.1.push((name, plot::over_bytes(&title, "µs", &lines)));
    }
    Ok(())
}

/// Two streams at once, each by its own way; what a transfer takes beside the other, against alone.
fn two_streams(engine: &Arc<Engine>, rows: &mut Vec<Row>) -> Result<()> {
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
            for (da, db) in [
                (Direction::ToDevice, Direction::ToDevice),
                (Direction::ToDevice, Direction::ToHost),
                (Direction::ToHost, Direction::ToHost),
            ] {
                eprint!("\rtransfer: {kind}, {} {} beside {} {}      ", a.name(), da.name(), b.name(), db.name());
                let alone = run(&[(a, ah, da)])?[0];
                let both = run(&[(a, ah, da), (b, bh, db)])?;
                let case = format!("{kind}, 1 MiB by {} {} beside {} {}", a.name(), da.name(), b.name(), db.name());
                let row =
                    Row::new(case, "µs", Some(both[0])).peer("alone", Some(alone)).peer("the other", Some(both[1]));
                rows.push(Row { ratio: Some(both[0] / alone), ..row });
            }
        }
    }
    eprintln!();
    Ok(())
}

/// All of it, on these kinds of device.
pub fn run(device: Option<Kind>, quick: bool) -> std::result::Result<Found, String> {
    let text = |e: forebay::Error| e.to_string();
    let kinds = device.map_or(vec![Kind::Cpu, Kind::OpenCl, Kind::Cuda], |d| vec![d]);
    let (devices, missing) = forebay::hal::discover(&kinds);
    missing.iter().for_each(|(kind, why)| eprintln!("transfer: no {kind}: {why}"));
    let mut found = Found::default();
    for d in devices {
        let engine = Engine::with_curves(d.clone(), Curves::default());
        let begun = Instant::now();
        engine.calibrate(CALIBRATION).map_err(text)?;
        let took = begun.elapsed().as_secs_f64();
        let mut row = Row::new(format!("{}, calibration", d.info().kind), "s", Some(took));
        // A size that was begun is finished.
        (row.ratio, row.target, row.met) = (Some(took / 2.0), "≤ 2 s".into(), Some(took <= 2.0));
        found.0.push(row);
        for why in d.without() {
            eprintln!("transfer: {}: without {why}", d.info().kind);
        }
        curves(&engine, &mut found).map_err(text)?;
        if !quick {
            interference::run(&engine, &mut found.0)?;
            two_streams(&engine, &mut found.0).map_err(text)?;
        }
    }
    Ok(found)
}
