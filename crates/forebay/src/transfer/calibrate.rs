//! Finding out what each way costs on this machine.
//!
//! Sizes grow, and at each size all ways are measured in turns, so that whatever else the machine does meets them alike;
//! then those that were close once more, against each other. Time for a size is bounded, so the whole is; sizes that were
//! not reached are extrapolated from the last one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_hal::{Buffer, Direction, Method};

use super::curve::{Cost, Curve, Curves, Host, MAX_POINTS, Measured, Together, Way};
use super::engine::Engine;
use super::pinned::Pinned;
use super::plan::{CACHED, Range};
use super::stream::Stream;
use crate::error::Result;

/// What calibration may take.
pub const BUDGET: Duration = Duration::from_secs(2);
/// Sizes up to this one are measured even if the time is over: on a machine that is busy it may go by while memory is
/// touched, and a curve without points is none. They take some milliseconds.
const ALWAYS: usize = 4096;
/// Largest size that is measured: beyond it every way is at its rate.
const LARGEST: usize = 128 << 20;
/// Samples of a way at a size: enough for a median, few enough for many sizes. Of the largest ones one will do at first.
const SAMPLES: (usize, usize) = (3, 200);
/// Samples go on for so long, however many they are: what else the machine does comes and goes in milliseconds.
const WHILE: Duration = Duration::from_millis(5);
const LARGE: usize = 32 << 20;
/// Before copies up to this size a plain one goes: a program has mostly used its bytes on one core just before.
const SETTLED: usize = CACHED as usize;
/// A way that takes so many times as long as the best at so many sizes in a row, from this size on, is not measured at
/// larger ones: its curve goes on at its last rate. (Loads through a GPU's aperture would take most of the time.)
const HOPELESS: u64 = 6;
const GIVEN_UP: u32 = 2;
const LONG: usize = 64 << 10;
/// Copies of up to this size within the host's memory are timed so many at once.
const SHORT: usize = 8 << 10;
const AT_ONCE: u32 = 16;
/// Parts of the time by whose end all ways were measured, and those that were close.
const FIRST_PASS: f32 = 0.5;
const SECOND_PASS: f32 = 0.82;
/// How close: the second best takes less than this much of the best.
const CLOSE_PERCENT: u64 = 130;
/// Sizes at which two ways are tried together, and how often.
const TOGETHER: [usize; 3] = [1 << 20, 8 << 20, 64 << 20];
const TRIALS: usize = 15;
/// Copies in the batch that tells what a further one adds.
const BATCH: usize = 32;

struct Bench {
    stream: Stream,
    device: Buffer,
    pinned: Pinned,
    pageable: Vec<u8>,
}

impl Bench {
    /// What a copy takes: the mean of some, where one is too short for clocks that go by steps of 10 ns.
    fn once(&mut self, way: Way, direction: Direction, host: Host, bytes: usize) -> Result<Duration> {
        self.stream.force(Some(way))?;
        let is_short = bytes <= SHORT && way.is_copy_by_host(&**self.stream.engine().device());
        let times = if is_short { AT_ONCE } else { 1 };
        let begun = Instant::now();
        for _ in 0..times {
            match (direction, host) {
                (Direction::ToDevice, Host::Pinned) => self.stream.write(&self.device, 0, &self.pinned.part(0..bytes)),
                (Direction::ToDevice, Host::Pageable) => self.stream.write(&self.device, 0, &self.pageable[..bytes]),
                (Direction::ToHost, Host::Pinned) => {
                    self.stream.read(&self.device, 0, &mut self.pinned.part_mut(0..bytes))
                }
                (Direction::ToHost, Host::Pageable) => self.stream.read(&self.device, 0, &mut self.pageable[..bytes]),
            }?;
        }
        Ok(begun.elapsed() / times)
    }
}

fn ns(d: Duration) -> u64 {
    d.as_nanos().min(u128::from(u64::MAX)) as u64
}

/// Of an even number of samples the lower one: what disturbs makes slower, never faster.
fn median(samples: &mut [u64]) -> u64 {
    samples.sort_unstable();
    samples.get(samples.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

fn cost(samples: &mut [u64]) -> Cost {
    let median = median(samples);
    Cost { median, tail: samples.last().copied().unwrap_or(median) }
}

/// A way that is measured.
struct Candidate {
    way: Way,
    direction: Direction,
    host: Host,
    points: Vec<Cost>,
    /// Sizes in a row at which it was hopeless.
    hopeless: u32,
}

/// Order without a pattern.
struct Shuffle(u64);

impl Shuffle {
    fn order(&mut self, order: &mut [usize]) {
        for i in (1..order.len()).rev() {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            order.swap(i, (self.0 >> 33) as usize % (i + 1));
        }
    }
}

/// Samples of some candidates at one size, in another order each round. What one leaves in the caches is the next one's
/// gain or loss: so up to [`SETTLED`] the same plain copy goes before each, and does not count. It is one of the other
/// direction, so that what is copied was just written on this core, as a program's data mostly was: what was only read stays in the
/// caches of other cores that had a part in copying it before, and 1 MiB by two of them took 32 µs instead of 42. At least `least` rounds, then
/// until there are enough ([`SAMPLES`], [`WHILE`]) or the time is over.
fn rounds(
    bench: &mut Bench,
    all: &[Candidate],
    who: &[usize],
    size: usize,
    least: usize,
    time: Duration,
    shuffle: &mut Shuffle,
) -> Result<Vec<Vec<u64>>> {
    let (mut order, from) = ((0..who.len()).collect::<Vec<_>>(), Instant::now());
    // By this thread where it can be: a driver's thread leaves the bytes in the caches of another core, or of this one, as it happens.
    let plain = Way::Direct(bench.stream.engine().device().plain_copy().unwrap_or(Method::Engine));
    let mut samples = vec![Vec::with_capacity(SAMPLES.1); who.len()];
    for round in 0.. {
        let passed = from.elapsed();
        if round >= least && (passed >= time || (round >= SAMPLES.1 && passed >= WHILE)) {
            break;
        }
        shuffle.order(&mut order);
        for &i in &order {
            let c = &all[who[i]];
            if size <= SETTLED {
                bench.once(plain, c.direction.opposite(), c.host, size)?;
            }
            samples[i].push(ns(bench.once(c.way, c.direction, c.host, size)?));
        }
    }
    Ok(samples)
}

/// Measures every way that the device has.
pub(super) fn measure(engine: &Arc<Engine>, budget: Duration) -> Result<Curves> {
    let begun = Instant::now();
    let device = engine.device();
    // What there is time for, a quarter of a small device's memory at most, and never below what one page is for.
    let affordable = LARGEST as u128 * budget.as_nanos() / BUDGET.as_nanos();
    let affordable = (affordable.min(LARGEST as u128) as usize).min((device.info().memory_bytes / 4) as usize);
    let largest = 1 << affordable.max(4096).ilog2();
    let mut bench = Bench {
        stream: engine.stream()?,
        device: engine.memory(largest)?,
        pinned: engine.pinned(largest)?,
        pageable: vec![1; largest],
    };
    bench.pinned.fill(1);
    let mut all: Vec<Candidate> = Vec::new();
    for way in Way::of(&**device) {
        // Where all memory is as good as pinned memory only that is measured.
        let hosts = Host::ALL.into_iter().filter(|h| way.serves(*h) && engine.place(*h) == *h);
        let hosts: Vec<Host> = hosts.collect();
        let each = Direction::ALL.into_iter().flat_map(|d| hosts.iter().map(move |h| (d, *h)));
        all.extend(each.map(|(direction, host)| Candidate { way, direction, host, points: Vec::new(), hopeless: 0 }));
    }
    // The first copy of its kind does things that no other does, and memory that nobody touched is not there yet.
    for c in &all {
        bench.once(c.way, c.direction, c.host, 8)?;
    }
    bench.once(Way::Direct(Method::Engine), Direction::ToDevice, Host::Pinned, largest)?;
    let mut shuffle = Shuffle(1);
    survey(&mut bench, &mut all, largest, begun + budget.mul_f32(FIRST_PASS), &mut shuffle)?;
    duels(&mut bench, &mut all, begun + budget.mul_f32(SECOND_PASS), &mut shuffle)?;
    let measured =
        |c: Candidate| Measured { way: c.way, direction: c.direction, host: c.host, curve: Curve::new(c.points) };
    let mut curves = Curves { all: all.into_iter().map(measured).collect(), ..Curves::default() };
    for direction in Direction::ALL {
        curves.further[direction as usize] = further(&mut bench, direction, largest)?;
        if device.methods().contains(&Method::Mapped) {
            for size in TOGETHER.into_iter().filter(|s| *s <= largest && begun.elapsed() < budget.mul_f32(0.95)) {
                let Some(permille) = together(&mut bench, direction, size, &curves)? else { continue };
                curves.together[direction as usize].push(Together { bytes: size as u64, permille });
            }
        }
    }
    Ok(curves)
}

/// All ways at all sizes, in equal parts of the time.
fn survey(
    bench: &mut Bench,
    all: &mut [Candidate],
    largest: usize,
    until: Instant,
    shuffle: &mut Shuffle,
) -> Result<()> {
    let sizes: Vec<usize> = (0..MAX_POINTS).map(|i| Curve::size(i) as usize).take_while(|s| *s <= largest).collect();
    for (i, &size) in sizes.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() && size > ALWAYS {
            break;
        }
        let who: Vec<usize> = (0..all.len()).filter(|c| all[*c].hopeless < GIVEN_UP).collect();
        let least = if size < LARGE { SAMPLES.0 } else { 1 };
        let samples = rounds(bench, all, &who, size, least, left / (sizes.len() - i) as u32, shuffle)?;
        for (c, mut s) in who.into_iter().zip(samples) {
            all[c].points.push(cost(&mut s));
        }
        // What was given up stays so: it has no figure.
        let latest = |of: &Candidate| of.points.get(i).map_or(u64::MAX, |c| c.median);
        for c in 0..all.len() {
            let rivals = all.iter().filter(|o| (o.direction, o.host) == (all[c].direction, all[c].host));
            let best = rivals.map(latest).min().unwrap_or(0);
            let hopeless = size >= LONG && latest(&all[c]) / HOPELESS > best;
            all[c].hopeless = if hopeless { all[c].hopeless + 1 } else { 0 };
        }
    }
    Ok(())
}

/// Where the two best ways are close they are measured against each other once more: among all others each was measured
/// with what those left in the caches, and seldom.
fn duels(bench: &mut Bench, all: &mut [Candidate], until: Instant, shuffle: &mut Shuffle) -> Result<()> {
    let mut close: Vec<(usize, [usize; 2])> = Vec::new();
    for (direction, host) in Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h))) {
        for i in 0..MAX_POINTS {
            let at = |c: &usize| all[*c].points.get(i).map_or(u64::MAX, |p| p.median);
            let rivals = (0..all.len()).filter(|c| (all[*c].direction, all[*c].host) == (direction, host));
            let mut rivals: Vec<usize> = rivals.filter(|c| at(c) < u64::MAX).collect();
            rivals.sort_by_key(at);
            if let [a, b, ..] = rivals[..]
                && at(&b) < at(&a).saturating_mul(CLOSE_PERCENT) / 100
            {
                close.push((i, [a, b]));
            }
        }
    }
    // The small ones need little time, and leave it to the large ones.
    close.sort_unstable();
    for (n, (i, pair)) in close.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let size = Curve::size(*i) as usize;
        let samples = rounds(bench, all, pair, size, 1, left / (close.len() - n) as u32, shuffle)?;
        for (c, mut s) in pair.iter().zip(samples) {
            let (found, point) = (cost(&mut s), &mut all[*c].points[*i]);
            // A few of them: with those of the first pass.
            let median = if s.len() >= SAMPLES.0 { found.median } else { found.median.min(point.median) };
            *point = Cost { median, tail: found.tail.max(point.tail) };
        }
    }
    Ok(())
}

/// What a further copy of a batch adds, ns.
fn further(bench: &mut Bench, direction: Direction, largest: usize) -> Result<u64> {
    // Apart, so that they are not merged.
    let ranges: Vec<_> = (0..BATCH.min(largest / 128)).map(|i| i as u64 * 128).collect();
    let ranges: Vec<_> = ranges.into_iter().map(|at| Range { host: at, device: at, bytes: 64 }).collect();
    bench.stream.force(Some(Way::Direct(Method::Engine)))?;
    let mut time = |ranges: &[Range]| -> Result<u64> {
        let mut samples = Vec::new();
        for _ in 0..9 {
            let begun = Instant::now();
            match direction {
                Direction::ToDevice => bench.stream.write_batch(&bench.device, &bench.pinned, ranges)?,
                Direction::ToHost => bench.stream.read_batch(&bench.device, &mut bench.pinned, ranges)?,
            }
            samples.push(ns(begun.elapsed()));
        }
        Ok(median(&mut samples))
    };
    let (one, many) = (time(&ranges[..1])?, time(&ranges)?);
    Ok(many.saturating_sub(one) / (ranges.len() as u64 - 1).max(1))
}

/// What a split transfer takes over one by the engine alone, in thousandths; none where none can be split.
fn together(bench: &mut Bench, direction: Direction, bytes: usize, curves: &Curves) -> Result<Option<u64>> {
    bench.stream.force(None)?;
    let (mut alone, mut split) = (Vec::new(), Vec::new());
    for _ in 0..if bytes < LARGE { TRIALS } else { 3 } {
        let found = bench.stream.alone_and_split(direction, &bench.device, &mut bench.pinned, bytes, curves)?;
        let Some((a, s)) = found else { return Ok(None) };
        alone.push(a);
        split.push(s);
    }
    Ok(Some(median(&mut split) * 1000 / median(&mut alone).max(1)))
}
