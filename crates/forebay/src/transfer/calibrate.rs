//! Finding out what each way costs on this machine.
//!
//! Sizes grow, and at each size all ways are measured in turns, so that whatever else the machine does meets them alike.
//! Time for a size is bounded, so the whole is; sizes that were not reached are extrapolated from the last one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_hal::{Buffer, Direction, Method};

use super::curve::{Cost, Curve, Curves, Host, MAX_POINTS, Measured, Together, Way};
use super::engine::Engine;
use super::pinned::Pinned;
use super::plan::Range;
use super::stream::Stream;
use crate::error::Result;

/// What calibration may take.
pub const BUDGET: Duration = Duration::from_secs(2);
/// Largest size that is measured: beyond it every way is at its rate.
const LARGEST: usize = 128 << 20;
/// Samples of a way at a size: enough for a median, few enough for many sizes. Of the largest ones two will do.
const SAMPLES: (usize, usize) = (3, 200);
const LARGE: usize = 32 << 20;
/// A way that takes so many times as long as the best at so many sizes in a row, from this size on, is not measured at
/// larger ones: its curve goes on at its last rate. (Loads through a GPU's aperture would take most of the time.)
const HOPELESS: u64 = 6;
const GIVEN_UP: u32 = 2;
const LONG: usize = 64 << 10;
/// Sizes at which two ways are tried together, and how often.
const TOGETHER: [usize; 3] = [1 << 20, 8 << 20, 64 << 20];
const TRIALS: usize = 5;
/// Copies in the batch that tells what a further one adds.
const BATCH: usize = 32;

struct Bench {
    stream: Stream,
    device: Buffer,
    pinned: Pinned,
    pageable: Vec<u8>,
}

impl Bench {
    fn once(&mut self, way: Way, direction: Direction, host: Host, bytes: usize) -> Result<Duration> {
        self.stream.force(Some(way))?;
        let begun = Instant::now();
        match (direction, host) {
            (Direction::ToDevice, Host::Pinned) => self.stream.write(&self.device, 0, &self.pinned.part(0..bytes)),
            (Direction::ToDevice, Host::Pageable) => self.stream.write(&self.device, 0, &self.pageable[..bytes]),
            (Direction::ToHost, Host::Pinned) => self.stream.read(&self.device, 0, &mut self.pinned.part_mut(0..bytes)),
            (Direction::ToHost, Host::Pageable) => self.stream.read(&self.device, 0, &mut self.pageable[..bytes]),
        }?;
        Ok(begun.elapsed())
    }
}

fn shuffle(order: &mut [usize], seed: &mut u64) {
    for i in (1..order.len()).rev() {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (*seed >> 33) as usize % (i + 1));
    }
}

fn ns(d: Duration) -> u64 {
    d.as_nanos().min(u128::from(u64::MAX)) as u64
}

fn median(samples: &mut [u64]) -> u64 {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or(0)
}

/// Measures every way that the device has.
pub(super) fn measure(engine: &Arc<Engine>, budget: Duration) -> Result<Curves> {
    let begun = Instant::now();
    let device = engine.device();
    // A quarter of a small device's memory at most, and never below what one page is for.
    let largest = LARGEST.min((device.info().memory_bytes / 4) as usize).max(4096);
    let mut bench = Bench {
        stream: engine.stream()?,
        device: engine.memory(largest)?,
        pinned: engine.pinned(largest)?,
        pageable: vec![1; largest],
    };
    bench.pinned.fill(1);
    let has = |w: &Way| match w {
        Way::Direct(m) => device.methods().contains(m),
        Way::Staged => true,
    };
    let mut all: Vec<(Way, Direction, Host, Vec<Cost>)> = Vec::new();
    for way in Way::ALL.into_iter().filter(has) {
        for direction in Direction::ALL {
            all.extend(Host::ALL.into_iter().filter(|h| way.serves(*h)).map(|h| (way, direction, h, Vec::new())));
        }
    }
    // The first copy of its kind does things that no other does, and memory that nobody touched is not there yet.
    for (way, direction, host, _) in &all {
        bench.once(*way, *direction, *host, 8)?;
    }
    bench.once(Way::Direct(Method::Engine), Direction::ToDevice, Host::Pinned, largest)?;
    let sizes: Vec<usize> = (0..MAX_POINTS).map(|i| Curve::size(i) as usize).take_while(|s| *s <= largest).collect();
    let mut hopeless = vec![0; all.len()];
    let (mut order, mut seed) = ((0..all.len()).collect::<Vec<_>>(), 1);
    for (i, &size) in sizes.iter().enumerate() {
        // An equal part of the time that is left for every size that is left, the two special measurements among them.
        let left = budget.saturating_sub(begun.elapsed());
        let until = Instant::now() + left / (sizes.len() - i + 4) as u32;
        let mut samples = vec![Vec::with_capacity(SAMPLES.1); all.len()];
        let least = if size < LARGE { SAMPLES.0 } else { 2 };
        for round in 0..SAMPLES.1 {
            if round >= least && Instant::now() >= until {
                break;
            }
            // In another order each time: what one leaves in the caches is the next one's gain or loss.
            shuffle(&mut order, &mut seed);
            for &at in order.iter().filter(|at| hopeless[**at] < GIVEN_UP) {
                let (way, direction, host, _) = &all[at];
                samples[at].push(ns(bench.once(*way, *direction, *host, size)?));
            }
        }
        for ((.., points), s) in all.iter_mut().zip(&mut samples).filter(|(_, s)| !s.is_empty()) {
            let median = median(s);
            points.push(Cost { median, tail: s.last().copied().unwrap_or(median) });
        }
        // What was given up stays so: it has no figure.
        let latest = |of: &(Way, Direction, Host, Vec<Cost>)| of.3.get(i).map_or(u64::MAX, |c| c.median);
        for (w, h) in all.iter().zip(&mut hopeless) {
            let best = all.iter().filter(|o| (o.1, o.2) == (w.1, w.2)).map(latest).min().unwrap_or(0);
            *h = if size >= LONG && latest(w) / HOPELESS > best { *h + 1 } else { 0 };
        }
        if begun.elapsed() > budget.mul_f32(0.8) {
            break;
        }
    }
    let all = all.into_iter();
    let all = all.map(|(way, direction, host, points)| Measured { way, direction, host, curve: Curve::new(points) });
    let mut curves = Curves { all: all.collect(), ..Curves::default() };
    for direction in Direction::ALL {
        curves.further[direction as usize] = further(&mut bench, direction, largest)?;
        if has(&Way::Direct(Method::Mapped)) {
            for size in TOGETHER.into_iter().filter(|s| *s <= largest && begun.elapsed() < budget.mul_f32(0.9)) {
                let permille = together(&mut bench, direction, size, &curves)?;
                curves.together[direction as usize].push(Together { bytes: size as u64, permille });
            }
        }
    }
    Ok(curves)
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

/// What engine and mapping take together over what the slower of them takes alone, in thousandths.
fn together(bench: &mut Bench, direction: Direction, bytes: usize, curves: &Curves) -> Result<u64> {
    bench.stream.force(None)?;
    let mut ratios = Vec::new();
    for _ in 0..if bytes < LARGE { TRIALS } else { 2 } {
        ratios.push(bench.stream.together(direction, &bench.device, &mut bench.pinned, bytes, curves)?);
    }
    Ok(median(&mut ratios))
}
