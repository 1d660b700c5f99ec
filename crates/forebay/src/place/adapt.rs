//! The decisions of one task of a running graph: what it is predicted to take where, and what came of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_hal::Direction;
use forebay_policy::{Counts, DeviceSet, MAX_PLACED};
use forebay_proto::client::Account;

use super::cores::Cores;
use super::fixed;
use super::load::{Load, standing};
use super::model::{Model, Sample, position};
use super::stability::Stability;
use super::store::{Key, Models};
use crate::transfer::{Engine, Host};

/// A device that is so much slower than another is measured only as far as the budget for that goes.
const HOPELESS: f64 = 8.0;
/// Part of the time that may go into measuring what is not expected to be best.
const BUDGET: f64 = 0.03;
/// Invocations after which a device that was not chosen is measured again, if the budget allows.
const STALE: u32 = 100;
/// Of what was measured, the part that is the task's own at least: copies may take less than was expected of them.
const OWN_PART: f64 = 0.2;
/// With less of a device than this a task's feeling for load can be told.
const LOADED: f64 = 0.8;
/// More is not load.
const MOST_FELT: f64 = 1.5;
/// Weight of an invocation in that.
const FEELING: f64 = 0.1;
/// A model is written down after so many invocations, and so much time: the worker that does it has other work.
const WRITE_EVERY: u32 = 256;
const WRITE_APART: Duration = Duration::from_secs(5);

/// An implementation on a device.
pub(crate) struct Choice {
    pub(crate) device: usize,
    /// Name, kind and driver.
    pub(crate) name: String,
    /// What decides its times.
    pub(crate) content: Vec<u8>,
    /// Threads of the CPU that it keeps busy; none on other devices.
    pub(crate) width: Option<usize>,
    /// It failed: not chosen again.
    pub(crate) refused: Option<String>,
    model: Arc<Model>,
    unwritten: u32,
    /// Invocations since it was measured.
    since: u32,
    /// How much of the load it feels: 1 is all of it. What is short may run in its first slice of time as if there were none.
    feels: f64,
}

impl Choice {
    /// How many times as long as alone it takes, with such a share.
    fn slowed(&self, share: f64) -> f64 {
        1.0 + self.feels * (1.0 / share - 1.0)
    }
}

/// What is known of an invocation before it is placed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Situation {
    /// Bytes that come in; or else, that go out.
    pub(crate) size: u64,
    /// What the program says beside it; 0 for nothing.
    pub(crate) hint: f64,
    /// What moving costs, by device, ns.
    pub(crate) copies_ns: Counts,
}

/// A task's decisions.
pub(crate) struct Adapt {
    task: String,
    pub(crate) choices: Vec<Choice>,
    /// Those of its devices are below this.
    devices: usize,
    /// One for each device that would be fastest without load: what the data decides needs no stability, only what the load
    /// does.
    stability: Vec<Stability>,
    models: Arc<Models>,
    load: Arc<Load>,
    cores: Cores,
    /// Threads of others that wanted the cores when it was placed.
    pub(crate) others: f64,
    at: Situation,
    /// What may be spent on measuring, ns.
    budget: f64,
    /// What was predicted for each device, with copies, under the load of that moment; infinite where it is worth nothing.
    predicted: [f64; MAX_PLACED],
    /// Predictions that came to be, and the sum of how far they were off, as parts of what it took.
    errors: (u64, f64),
    /// The last of them: what was predicted, and what it took, ns.
    last: (f64, u64),
    /// When a model was written down last.
    written: Instant,
    /// What was available of each device when the invocation was placed.
    shares: [f64; MAX_PLACED],
    /// What the invocation is as work of the host's cores, ns of one, on devices that are these; 0 if that is not known.
    pub(crate) work: Counts,
}

impl Adapt {
    pub(crate) fn new(task: &str, models: &Arc<Models>, load: &Arc<Load>, cores: usize, seed: u64) -> Self {
        let here = Cores::here();
        let cores = if here.count() == cores { here.clone() } else { Cores::alike(cores) };
        Adapt {
            task: task.to_owned(),
            choices: Vec::new(),
            devices: 0,
            stability: (0..MAX_PLACED as u64)
                .map(|d| Stability::new((seed << 8 | d) ^ u64::from(std::process::id()) << 32))
                .collect(),
            models: models.clone(),
            load: load.clone(),
            others: 0.0,
            cores,
            at: Situation::default(),
            budget: 0.0,
            predicted: [f64::INFINITY; MAX_PLACED],
            errors: (0, 0.0),
            last: (0.0, 0),
            written: Instant::now(),
            shares: [1.0; MAX_PLACED],
            work: [0; MAX_PLACED],
        }
    }

    pub(crate) fn add(&mut self, device: usize, name: String, content: Vec<u8>, width: Option<usize>) {
        self.devices = self.devices.max(device + 1).min(MAX_PLACED);
        let model = self.models.get(&Key { task: &self.task, device: &name, content: &content });
        self.choices.push(Choice {
            device,
            name,
            content,
            width,
            refused: None,
            model,
            unwritten: 0,
            since: 0,
            feels: 1.0,
        });
    }

    /// Predictions that came to be, and how far they were off on the average, as a part of what it took.
    pub(crate) fn accuracy(&self) -> (u64, f64) {
        (self.errors.0, if self.errors.0 == 0 { 0.0 } else { self.errors.1 / self.errors.0 as f64 })
    }

    /// The last prediction that came to be, and what it took, ns; (0, 0) before there was one.
    pub(crate) fn last(&self) -> (f64, u64) {
        self.last
    }

    /// How often the task's home changed.
    pub(crate) fn moves(&self) -> u64 {
        self.stability.iter().map(Stability::moves).sum()
    }

    /// What is available of a device for this task, beside so many threads.
    #[inline]
    fn share(&self, c: &Choice, busy: f64, account: &dyn Fn(usize) -> Option<Arc<Account>>) -> f64 {
        let account = account(c.device);
        match c.width {
            Some(width) => Load::part(&self.cores, width, busy, account.as_deref()),
            None => account.map_or(1.0, |a| standing(&a)),
        }
    }

    /// What an invocation counts as on each device; `work` says it for the host's cores then. `account` is the process's account
    /// on a device, if the service divides it.
    pub(crate) fn weigh(
        &mut self,
        now_ns: u64,
        at: Situation,
        account: &dyn Fn(usize) -> Option<Arc<Account>>,
    ) -> Counts {
        self.at = at;
        let mut predicted = [f64::INFINITY; MAX_PLACED];
        let mut unknown = [false; MAX_PLACED];
        let (mut natural, mut best) = ((f64::INFINITY, 0), f64::INFINITY);
        let tables = fixed::tables();
        let position = position(at.size, tables);
        let (others, own) = self.load.both();
        let busy = others + f64::from(own);
        self.others = others;
        for c in self.choices.iter().filter(|c| c.refused.is_none()) {
            let share = self.share(c, busy, account);
            self.shares[c.device] = share;
            let (told, known) = c.model.look(position, at.hint, tables);
            unknown[c.device] = !known;
            let copies = at.copies_ns[c.device] as f64;
            let ns = copies + told * c.slowed(share);
            predicted[c.device] = ns;
            if let Some(width) = c.width {
                // A conversion to signed numbers is one instruction.
                self.work[c.device] = if known { (told * width as f64) as i64 as u64 } else { 0 };
            }
            best = if ns < best { ns } else { best };
            if copies + told < natural.0 {
                natural = (copies + told, c.device);
            }
        }
        // What moving costs is staked: the dearest way to where the data is not.
        let stake = self.choices.iter().map(|c| at.copies_ns[c.device]).max().unwrap_or(0);
        self.predicted = [f64::INFINITY; MAX_PLACED];
        let stability = &mut self.stability[natural.1];
        let mut counts = stability.weigh(now_ns, &predicted[..self.devices], stake);
        for c in self.choices.iter().filter(|c| c.refused.is_none()) {
            let ns = predicted[c.device];
            if ns == f64::INFINITY {
                counts[c.device] = 0;
                continue;
            }
            // The first invocations go everywhere, unless that is hopeless. Until then nobody is at home anywhere.
            if unknown[c.device] && (ns < HOPELESS * best || best == ns) {
                counts[c.device] = 0;
                stability.unsettle();
            } else if !unknown[c.device] {
                self.predicted[c.device] = ns;
            }
            if (unknown[c.device] || c.since >= STALE) && ns < self.budget {
                // Perhaps what is known of it was bad luck.
                counts[c.device] = 0;
            }
        }
        counts
    }

    /// An invocation on `device` took so long, copies included.
    pub(crate) fn took(&mut self, device: usize, ns: u64, account: &dyn Fn(usize) -> Option<Arc<Account>>) {
        let Some(i) = self.choices.iter().position(|c| c.device == device) else { return };
        // The share changes while a long task runs: what it was on the average.
        // While it runs it is counted as busy itself.
        let busy = self.load.threads(self.choices[i].width.unwrap_or(0));
        let share = (self.shares[device] + self.share(&self.choices[i], busy, account)) / 2.0;
        self.budget += BUDGET * ns as f64;
        let predicted = self.predicted[device];
        if predicted < f64::INFINITY {
            self.errors.0 += 1;
            self.errors.1 += (predicted - ns as f64).abs() / ns.max(1) as f64;
            self.last = (predicted, ns);
        }
        for (j, c) in self.choices.iter_mut().enumerate() {
            c.since = if i == j { 0 } else { c.since.saturating_add(1) };
        }
        let (at, c) = (self.at, &mut self.choices[i]);
        if self.stability.iter().all(|s| s.home() != Some(device)) {
            self.budget = (self.budget - ns as f64).max(0.0);
        }
        let own = (ns as f64 - at.copies_ns[device] as f64).max(OWN_PART * ns as f64);
        let tables = fixed::tables();
        let (told, known) = c.model.look(position(at.size, tables), at.hint, tables);
        if known && share < LOADED && told < f64::INFINITY {
            let felt = ((own / told - 1.0) / (1.0 / share - 1.0)).clamp(0.0, MOST_FELT);
            c.feels += (felt - c.feels) * FEELING;
        }
        c.model.record(Sample { size: at.size, hint: at.hint, ns: own / c.slowed(share) });
        c.unwritten += 1;
        if c.unwritten >= WRITE_EVERY && self.written.elapsed() >= WRITE_APART {
            self.write(i);
        }
    }

    /// It failed there and is not chosen again.
    pub(crate) fn refuse(&mut self, failed: usize, why: &str) {
        if let Some(c) = self.choices.iter_mut().find(|c| c.device == failed) {
            c.refused = Some(why.to_owned());
        }
    }

    /// Which device but these is predicted to do the present invocation in the shortest time.
    pub(crate) fn best_but(&self, not: DeviceSet) -> Option<usize> {
        let left = self.choices.iter().filter(|c| c.refused.is_none() && !not.has(c.device));
        let time = |c: &&Choice| c.model.predict(self.at.size, self.at.hint).map_or(f64::INFINITY, |p| p.ns);
        left.min_by(|a, b| time(a).total_cmp(&time(b))).map(|c| c.device)
    }

    /// What failed may be chosen again.
    pub(crate) fn forgive(&mut self) {
        self.choices.iter_mut().for_each(|c| c.refused = None);
    }

    /// Threads of the CPU that the task keeps busy on this device.
    pub(crate) fn busy(&self, device: usize) -> Option<super::load::Busy> {
        let width = self.choices.iter().find(|c| c.device == device)?.width?;
        Some(self.load.busy(width))
    }

    fn write(&mut self, i: usize) {
        self.written = Instant::now();
        let c = &mut self.choices[i];
        c.unwritten = 0;
        self.models.put(&Key { task: &self.task, device: &c.name, content: &c.content }, &c.model);
    }
}

impl Drop for Adapt {
    fn drop(&mut self) {
        for i in 0..self.choices.len() {
            if self.choices[i].unwritten > 0 {
                self.write(i);
            }
        }
    }
}

/// What a decision costs, ns: three devices, warm models, as the runtime makes it once it knows where the inputs are; with
/// `engine` it also asks what copying them to the two that do not have them costs.
#[doc(hidden)]
pub fn decision_cost(rounds: u32, engine: Option<&Engine>) -> f64 {
    let (models, load) = (Arc::new(Models::off()), Load::of_process());
    let mut adapt = Adapt::new("cost", &models, &load, 2, 1);
    for (d, width) in [(0, Some(1)), (1, Some(2)), (2, None)] {
        adapt.add(d, format!("device {d}"), Vec::new(), width);
        for i in 0..40u64 {
            let size = 1000 << (i % 8);
            adapt.choices[d].model.record(Sample { size, hint: 0.0, ns: size as f64 * (1.0 + d as f64) });
        }
    }
    let begun = Instant::now();
    for i in 0..rounds {
        let mut at = Situation { size: 1000 + u64::from(i % 50_000), ..Situation::default() };
        if let Some(e) = engine {
            for d in [1, 2] {
                at.copies_ns[d] = e.cost_ns(Direction::ToDevice, at.size, Host::Pinned);
            }
        }
        std::hint::black_box(adapt.weigh(u64::from(i), at, &|_| None));
    }
    begun.elapsed().as_nanos() as f64 / f64::from(rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The device that has a tenth of the other's time looked hopeless when it was measured first.
    #[test]
    fn one_bad_sample_is_not_for_ever_and_looking_costs_no_more_than_its_budget() {
        const MS: u64 = 1_000_000;
        let (models, load) = (Arc::new(Models::off()), Arc::new(Load::default()));
        let mut adapt = Adapt::new("t", &models, &load, 2, 1);
        (0..2).for_each(|d| adapt.add(d, format!("device {d}"), Vec::new(), None));
        let (mut now, mut measured, mut at, mut bad) = (0, 0, Vec::new(), 0);
        for _ in 0..3000 {
            let counts = adapt.weigh(now, Situation { size: 1000, ..Situation::default() }, &|_| None);
            let device = usize::from(counts[1] < counts[0]);
            measured += device;
            // The first warms up, the second is the spike.
            let ns = if device == 0 {
                MS
            } else if measured <= 2 {
                20 * MS
            } else {
                MS / 10
            };
            bad += if device == 1 && measured <= 2 { ns } else { 0 };
            now += ns;
            adapt.took(device, ns, &|_| None);
            at.push(device);
        }
        assert!(at[..300].iter().sum::<usize>() <= 3, "hopeless at first");
        assert!(at[2900..].iter().sum::<usize>() >= 98, "{:?}", &at[2900..]);
        assert_eq!(bad, 40 * MS);
    }
}
