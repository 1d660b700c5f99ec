//! What an implementation costs on a device: its time by size, learned from its own invocations.
//!
//! Rules:
//! 1. A time is recorded as it would have been with all of the device: what was measured, less copies, times the share that
//!    was available. So load is counted once, when a prediction divides by the share of that moment.
//! 2. Sizes fall into half octaves, and so do hints. Each such cell keeps its last samples; what a size says is their median, so one spike says nothing.
//!    The first sample of all is not kept: it compiles, allocates and warms up.
//! 3. Between half octaves with samples the logarithm of the time is interpolated over that of the size; beyond them it goes
//!    on as between the outermost two (not falling, at most quadratic), or proportionally when there is only one.
//! 4. The uncertainty is the spread of the samples, and more for what is interpolated or beyond.
//! 5. A second variable, the hint, scales the time by a power that is fitted over all samples.
//! 6. Ten predictions in a row that miss by more than a quarter: what was known is forgotten.
//!
//! A prediction reads a few atomic words. Whoever records works out all of them anew, but only now and then while a sample is
//! what was predicted and there are enough like it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::fixed::{self, Tables};

/// Samples that a cell keeps.
const KEPT: usize = 7;
/// Most cells.
const MAX_CELLS: usize = 128;
/// Half octaves: sizes from 1 to 2^44.
const STEPS: usize = 89;
/// Samples that make a size known.
pub const ENOUGH: usize = 3;
/// A prediction that is off by more than this part has missed.
const MISS: f64 = 0.25;
/// Misses in a row after which everything is learned anew.
const MISSES: u32 = 10;
/// A sample this near to its prediction tells nothing new; but one in so many is looked at all the same.
const HIT: f64 = 0.1;
const LOOK_EVERY: u32 = 16;
/// Uncertainty for each octave between or beyond samples.
const PER_OCTAVE: f64 = 0.15;

/// A measured invocation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Bytes, or items: whatever the task's size is.
    pub size: u64,
    /// The second variable; 0 without one.
    pub hint: f64,
    /// Nanoseconds, with all of the device.
    pub ns: f64,
}

impl Sample {
    /// From a tenth of a nanosecond to eleven days, and a hint that is a number like others.
    fn can_be(&self) -> bool {
        (0.1..1e15).contains(&self.ns) && (self.hint == 0.0 || (1e-12..1e18).contains(&self.hint))
    }
}

/// What is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Nanoseconds, with all of the device.
    pub ns: f64,
    /// How far off it may be, as a part of `ns`.
    pub uncertainty: f64,
}

#[derive(Default)]
struct Learned {
    /// By half octave of the size, and of the hint.
    cells: BTreeMap<(usize, i32), VecDeque<Sample>>,
    warm: bool,
    misses: u32,
    /// Samples that told nothing new since the table was worked out.
    hits: u32,
}

/// The model of an implementation on a device. Predicting takes no lock.
pub struct Model {
    /// For each half octave the logarithm (base 2) of the time, in fixed point, and the uncertainty, an f32; 0 while nothing is
    /// known.
    table: [AtomicU64; STEPS],
    /// A bit for each half octave near which there are enough samples.
    known: [AtomicU64; 2],
    /// The hint's power, and the logarithm of the hint for which the table is, as two f32.
    hint: AtomicU64,
    learned: Mutex<Learned>,
    forgotten: AtomicU64,
}

impl Default for Model {
    fn default() -> Self {
        Model {
            table: [const { AtomicU64::new(0) }; STEPS],
            known: [const { AtomicU64::new(0) }; 2],
            hint: AtomicU64::new(0),
            learned: Mutex::default(),
            forgotten: AtomicU64::new(0),
        }
    }
}

/// The logarithm of a time, in fixed point, and an uncertainty.
fn pair(log: f64, unsure: f64) -> u64 {
    u64::from(fixed::from(log) as u32) << 32 | u64::from((unsure as f32).to_bits())
}

#[inline(always)]
fn log_of(word: u64) -> i32 {
    (word >> 32) as u32 as i32
}

fn unpair(word: u64) -> (i32, f64) {
    (log_of(word), f64::from(f32::from_bits(word as u32)))
}

fn pair_floats(a: f64, b: f64) -> u64 {
    u64::from((a as f32).to_bits()) << 32 | u64::from((b as f32).to_bits())
}

fn unpair_floats(v: u64) -> (f64, f64) {
    (f64::from(f32::from_bits((v >> 32) as u32)), f64::from(f32::from_bits(v as u32)))
}

/// Where a size is among the half octaves, in fixed point.
#[inline]
pub(super) fn position(size: u64, tables: &Tables) -> i32 {
    2 * tables.log2(size)
}

fn step(size: u64) -> usize {
    nearest(position(size, fixed::tables()))
}

/// The half octave nearest to a position.
#[inline]
fn nearest(at: i32) -> usize {
    (((at + fixed::ONE / 2) >> fixed::BITS) as usize).min(STEPS - 1)
}

/// The cell of a sample.
fn cell(s: &Sample) -> (usize, i32) {
    (step(s.size), if s.hint > 0.0 { (s.hint.log2() * 2.0).round() as i32 } else { i32::MIN })
}

impl Learned {
    fn keep(&mut self, s: Sample) {
        let at = cell(&s);
        if !self.cells.contains_key(&at) && self.cells.len() >= MAX_CELLS {
            // The farthest away goes.
            let far = |&(size, hint): &(usize, i32)| size.abs_diff(at.0) as u64 + u64::from(hint.abs_diff(at.1));
            if let Some(farthest) = self.cells.keys().copied().max_by_key(far) {
                self.cells.remove(&farthest);
            }
        }
        let samples = self.cells.entry(at).or_default();
        if samples.len() == KEPT {
            samples.pop_front();
        }
        samples.push_back(s);
    }

    /// The samples of some half octaves of size.
    fn of_sizes(&self, from: usize, to: usize) -> impl Iterator<Item = &Sample> {
        self.cells.range((from, i32::MIN)..=(to, i32::MAX)).flat_map(|(_, s)| s)
    }

    /// The half octaves of size with samples.
    fn sizes(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.cells.keys().map(|k| k.0).collect();
        all.dedup();
        all
    }
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    // Of two the smaller one: spikes are long.
    v.get(v.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// What a half octave says: where it is, the logarithm of its time, how far its samples are apart.
struct Point {
    at: f64,
    log: f64,
    spread: f64,
}

impl Model {
    fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an invocation of this size takes; none while nothing is known.
    pub fn predict(&self, size: u64, hint: f64) -> Option<Prediction> {
        let tables = fixed::tables();
        let (low, high, part) = self.words(position(size, tables))?;
        let ((_, unsure_a), (_, unsure_b)) = (unpair(low), unpair(high));
        let uncertainty = unsure_a + (unsure_b - unsure_a) * fixed::to_float(part);
        Some(Prediction { ns: self.time(low, high, part, hint, tables), uncertainty })
    }

    /// The time alone, infinite while nothing is known, and whether it is known well, at a position: several models may be
    /// asked for one.
    #[inline(always)]
    pub(super) fn look(&self, at: i32, hint: f64, tables: &Tables) -> (f64, bool) {
        let i = nearest(at);
        let known = self.known[i / 64].load(Ordering::Relaxed) >> (i % 64) & 1 != 0;
        let ns = self.words(at).map_or(f64::INFINITY, |(low, high, part)| self.time(low, high, part, hint, tables));
        (ns, known)
    }

    /// The table's words below and above a position, and how far it is from the lower one.
    #[inline(always)]
    fn words(&self, at: i32) -> Option<(u64, u64, i32)> {
        let low = ((at >> fixed::BITS) as usize).min(STEPS - 1);
        let a = self.table[low].load(Ordering::Relaxed);
        if a == 0 {
            return None;
        }
        let b = self.table[(low + 1).min(STEPS - 1)].load(Ordering::Relaxed);
        // Between two words somebody may have forgotten everything.
        Some((a, if b == 0 { a } else { b }, at & (fixed::ONE - 1)))
    }

    #[inline(always)]
    fn time(&self, low: u64, high: u64, part: i32, hint: f64, tables: &Tables) -> f64 {
        let (a, b) = (log_of(low), log_of(high));
        let mut log = a.saturating_add((((i64::from(b) - i64::from(a)) * i64::from(part)) >> fixed::BITS) as i32);
        if hint > 0.0 {
            let (power, usual) = unpair_floats(self.hint.load(Ordering::Relaxed));
            log = log.saturating_add(fixed::from(power * (hint.log2() - usual)));
        }
        tables.exp2(log)
    }

    /// Whether sizes near this one have been measured often enough.
    pub fn knows(&self, size: u64) -> bool {
        let i = step(size);
        self.known[i / 64].load(Ordering::Relaxed) >> (i % 64) & 1 != 0
    }

    /// Samples there are.
    pub fn samples(&self) -> usize {
        self.learned().cells.values().map(VecDeque::len).sum()
    }

    /// How often everything was learned anew, because predictions kept missing.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// Takes in what an invocation took. Times that cannot be are not.
    pub fn record(&self, s: Sample) {
        if !s.can_be() {
            return;
        }
        let mut learned = self.learned();
        if !learned.warm {
            learned.warm = true;
            return;
        }
        if let Some(p) = self.predict(s.size, s.hint).filter(|_| learned.cells.contains_key(&cell(&s))) {
            learned.misses = if (p.ns - s.ns).abs() > MISS * s.ns { learned.misses + 1 } else { 0 };
            if learned.misses >= MISSES {
                learned.cells.clear();
                learned.misses = 0;
                self.forgotten.fetch_add(1, Ordering::Relaxed);
            }
            let full = learned.cells.get(&cell(&s)).is_some_and(|c| c.len() == KEPT);
            if full && (p.ns - s.ns).abs() <= HIT * s.ns && learned.hits < LOOK_EVERY {
                learned.hits += 1;
                learned.keep(s);
                return;
            }
        }
        learned.keep(s);
        learned.hits = 0;
        self.work_out(&learned);
    }

    /// All samples, the older ones of a size first.
    pub fn export(&self) -> Vec<Sample> {
        self.learned().cells.values().flatten().copied().collect()
    }

    /// Goes on from samples that were exported. What cannot be is left out.
    pub fn import(&self, samples: impl IntoIterator<Item = Sample>) {
        let mut learned = self.learned();
        for s in samples {
            if s.can_be() {
                learned.keep(s);
                learned.warm = true;
            }
        }
        self.work_out(&learned);
    }

    /// Forgets everything.
    pub fn reset(&self) {
        let mut learned = self.learned();
        *learned = Learned::default();
        self.work_out(&learned);
    }

    fn work_out(&self, learned: &Learned) {
        let (power, usual) = hint_of(learned);
        let points: Vec<Point> = learned
            .sizes()
            .into_iter()
            .map(|size| {
                let samples: Vec<&Sample> = learned.of_sizes(size, size).collect();
                // As if all had the usual hint.
                let log = |s: &&Sample| s.ns.log2() - if s.hint > 0.0 { power * (s.hint.log2() - usual) } else { 0.0 };
                let mid = median(samples.iter().map(log).collect());
                let off = median(samples.iter().map(|s| (log(s) - mid).abs()).collect());
                let at = samples.iter().map(|s| fixed::to_float(position(s.size, fixed::tables()))).sum::<f64>()
                    / samples.len() as f64;
                // Few samples may agree by chance.
                Point { at, log: mid, spread: off.exp2() - 1.0 + 0.3 / samples.len() as f64 }
            })
            .collect();
        self.hint.store(pair_floats(power, usual), Ordering::Relaxed);
        let near = |i: usize| learned.of_sizes(i.saturating_sub(2), i + 2).count();
        for (word, bits) in self.known.iter().enumerate() {
            let all = (0..64).map(|b| (word * 64 + b, b)).filter(|&(i, _)| i < STEPS && near(i) >= ENOUGH);
            bits.store(all.map(|(_, b)| 1u64 << b).sum(), Ordering::Relaxed);
        }
        for (i, word) in self.table.iter().enumerate() {
            let v = at(&points, i as f64).map_or(0, |(log, unsure)| pair(log, unsure));
            word.store(v, Ordering::Relaxed);
        }
    }
}

/// The logarithm of the time at a position, and the uncertainty.
fn at(points: &[Point], x: f64) -> Option<(f64, f64)> {
    let above = points.iter().position(|p| p.at >= x);
    let (near, slope) = match (above, points) {
        (_, []) => return None,
        // Half an octave of size is half an octave of time.
        (_, [only]) => (only, 0.5),
        (Some(0), [a, b, ..]) => (a, between(a, b)),
        (None, [.., a, b]) => (b, between(a, b)),
        (Some(i), all) => {
            let (a, b) = (&all[i - 1], &all[i]);
            let part = (x - a.at) / (b.at - a.at);
            let octaves = (x - a.at).min(b.at - x) / 2.0;
            let log = a.log + (b.log - a.log) * part;
            let spread = a.spread + (b.spread - a.spread) * part;
            return Some((log, spread + PER_OCTAVE * octaves / 2.0));
        }
    };
    let octaves = (x - near.at).abs() / 2.0;
    // A smaller size is not expected to take longer, and time grows with the square at most.
    let slope = slope.clamp(0.0, 1.0);
    Some((near.log + slope * (x - near.at), near.spread + PER_OCTAVE * octaves))
}

fn between(a: &Point, b: &Point) -> f64 {
    if b.at > a.at { (b.log - a.log) / (b.at - a.at) } else { 0.5 }
}

/// The power of the hint, and the mean logarithm of hints: a regression within sizes.
fn hint_of(learned: &Learned) -> (f64, f64) {
    let (mut xy, mut xx, mut sum, mut n) = (0.0, 0.0, 0.0, 0.0);
    for size in learned.sizes() {
        let hinted: Vec<(f64, f64)> =
            learned.of_sizes(size, size).filter(|s| s.hint > 0.0).map(|s| (s.hint.log2(), s.ns.log2())).collect();
        let count = hinted.len().max(1) as f64;
        let mean_x = hinted.iter().map(|p| p.0).sum::<f64>() / count;
        let mean_y = hinted.iter().map(|p| p.1).sum::<f64>() / count;
        for (x, y) in &hinted {
            xy += (x - mean_x) * (y - mean_y);
            xx += (x - mean_x) * (x - mean_x);
            sum += x;
            n += 1.0;
        }
    }
    let power = if xx > 0.01 { (xy / xx).clamp(-4.0, 4.0) } else { 0.0 };
    (power, if n > 0.0 { sum / n } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taught(pairs: impl IntoIterator<Item = (u64, f64)>) -> Model {
        let m = Model::default();
        m.record(Sample { size: 1, hint: 0.0, ns: 1e9 });
        for (size, ns) in pairs {
            for _ in 0..ENOUGH {
                m.record(Sample { size, hint: 0.0, ns });
            }
        }
        m
    }

    fn close(m: &Model, size: u64, ns: f64, within: f64) {
        let p = m.predict(size, 0.0).unwrap().ns;
        assert!((p - ns).abs() <= within * ns, "{size}: {p}, not {ns}");
    }

    #[test]
    fn it_knows_nothing_until_it_is_warm_and_told() {
        let m = Model::default();
        assert_eq!(m.predict(100, 0.0), None);
        m.record(Sample { size: 100, hint: 0.0, ns: 5e9 });
        assert_eq!(m.predict(100, 0.0), None, "the first invocation warms up");
        m.record(Sample { size: 100, hint: 0.0, ns: 1000.0 });
        close(&m, 100, 1000.0, 0.01);
        assert!(!m.knows(100) && !m.knows(100_000));
    }

    /// Sorting, matrices by their bytes, fixed costs: none is a straight line.
    #[test]
    fn curves_need_not_be_straight() {
        let sizes = || (8..24).step_by(2).map(|e| 1u64 << e);
        for (name, f) in [
            ("fixed and linear", (|n| 20_000.0 + n) as fn(f64) -> f64),
            ("n log n", |n| n * n.log2()),
            ("n^1.5", |n| n.powf(1.5) / 50.0),
        ] {
            let m = taught(sizes().map(|n| (n, f(n as f64))));
            for n in sizes().flat_map(|n| [n, n + n / 3, n * 2]) {
                let (p, wanted) = (m.predict(n, 0.0).unwrap().ns, f(n as f64));
                assert!((p - wanted).abs() < 0.12 * wanted, "{name} at {n}: {p}, not {wanted}");
            }
        }
    }

    #[test]
    fn a_spike_says_nothing() {
        for before in 0..6 {
            let m = Model::default();
            m.record(Sample { size: 1000, hint: 0.0, ns: 1e9 });
            for i in 0..7 {
                m.record(Sample { size: 1000, hint: 0.0, ns: if i == before { 1e6 } else { 500.0 } });
                assert!(
                    i == before && i == 0 || m.predict(1000, 0.0).unwrap().ns < 510.0,
                    "spike {before}, sample {i}"
                );
            }
        }
    }

    #[test]
    fn what_keeps_missing_is_learned_anew() {
        let m = taught([(1000, 500.0), (1 << 20, 300_000.0)]);
        // Faster by half at once: the medians follow, and what was known of other sizes goes when ten in a row missed.
        for i in 0..30 {
            m.record(Sample { size: 1000 << (i % 3), hint: 0.0, ns: 100.0 });
        }
        close(&m, 1000, 100.0, 0.01);
        let drifting = taught([(1000, 500.0)]);
        for i in 0..40 {
            // Twice as long each time: the median is always behind.
            drifting.record(Sample { size: 1000, hint: 0.0, ns: 500.0 * 1.5f64.powi(i) });
        }
        assert!(drifting.forgotten() >= 1);
    }

    #[test]
    fn the_uncertainty_grows_with_the_distance() {
        let m = taught([(1 << 10, 1000.0), (1 << 12, 4000.0)]);
        let unsure = |n: u64| m.predict(n, 0.0).unwrap().uncertainty;
        assert!(
            unsure(1 << 10) < unsure(1 << 11) && unsure(1 << 12) < unsure(1 << 14) && unsure(1 << 14) < unsure(1 << 20)
        );
    }

    #[test]
    fn a_hint_is_a_second_variable() {
        let m = Model::default();
        let f = |size: u64, hint: f64| size as f64 * hint.powf(1.5) + 0.0;
        for i in 0..60u64 {
            let (size, hint) = (1000 << (i % 4), 1.0 + (i * 7 % 11) as f64);
            m.record(Sample { size, hint, ns: f(size, hint) });
        }
        for (size, hint) in [(1000, 2.0), (4000, 9.0), (2000, 30.0)] {
            let p = m.predict(size, hint).unwrap().ns;
            assert!((p - f(size, hint)).abs() < 0.1 * f(size, hint), "{size} {hint}: {p}");
        }
    }

    proptest! {
        /// Whatever it is told: predictions are numbers above 0, and what is exported says the same when imported.
        #[test]
        fn it_can_be_told_anything(samples in proptest::collection::vec((any::<u64>(), any::<f64>(), any::<f64>()), 0..60), ask: u64) {
            let m = Model::default();
            for (size, hint, ns) in samples {
                m.record(Sample { size, hint, ns });
            }
            if let Some(p) = m.predict(ask, 0.0) {
                prop_assert!(p.ns >= 0.0 && !p.ns.is_nan() && p.uncertainty >= 0.0, "{p:?}");
            }
            let again = Model::default();
            again.import(m.export());
            prop_assert_eq!(again.predict(ask, 3.0), m.predict(ask, 3.0));
        }
    }
}
