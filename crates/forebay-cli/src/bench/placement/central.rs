//! Schedulers that decide for all programs at once: HEFT's rule over the times that each workload takes alone (a call goes where
//! it would end first, behind what was sent there before); and one that knows everything, since it has tried it: the best of
//! all assignments of workloads to devices, without the load and beside it, and whether the load is there now.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::hal::Device;
use forebay::place::Accelerated;
use forebay::{Datablock, Impl, Mode, Runtime};

use super::{Load, Loaded, Result, Work, call, done, median, only, rate_of, text};

/// Calls that each time is the median of.
const SAMPLES: usize = 9;
/// How long all assignments are tried, but each no shorter than that; and those that were best once more.
const TRIALS: Duration = Duration::from_secs(26);
const LEAST: Duration = Duration::from_millis(120);
const AGAIN: Duration = Duration::from_secs(2);
/// How many of them.
const FINAL: usize = 4;

/// Each workload on each device only: the CPU is the first.
pub(super) struct Each {
    tasks: Vec<Vec<Accelerated>>,
    /// Devices that are the CPU by another name.
    same: Vec<bool>,
}

impl Each {
    pub(super) fn new(accelerators: &[Arc<dyn Device>], works: &[Work]) -> Result<Self> {
        let alone = |devices: Vec<Arc<dyn Device>>| {
            Runtime::builder().mode(Mode::FirstAvailable).service(false).devices(devices).build().map_err(text)
        };
        let cpu = alone(Vec::new())?;
        let others = accelerators.iter().map(|d| alone(vec![d.clone()])).collect::<Result<Vec<_>>>()?;
        let on = |w: &Work, rt: &Runtime, host: bool| {
            rt.accelerate(1, || only(w, |i| matches!(i, Impl::Host(_)) == host)).map_err(text)
        };
        let each = |w: &Work| {
            let others = others.iter().map(|rt| on(w, rt, false));
            std::iter::once(on(w, &cpu, true)).chain(others).collect::<Result<Vec<_>>>()
        };
        let tasks = works.iter().map(each).collect::<Result<_>>()?;
        let same = std::iter::once(false).chain(accelerators.iter().map(|d| d.info().is_cpu)).collect();
        Ok(Each { tasks, same })
    }

    fn devices(&self) -> usize {
        self.same.len()
    }

    /// What each takes alone, s.
    pub(super) fn times(&self, works: &[Work]) -> Result<Vec<Vec<f64>>> {
        let time = |task: &Accelerated, w: &Work| -> Result<f64> {
            call(task, w, 3)?;
            Ok(median((0..SAMPLES).map(|_| call(task, w, 1)).collect::<Result<Vec<_>>>()?))
        };
        self.tasks.iter().zip(works).map(|(on, w)| on.iter().map(|t| time(t, w)).collect()).collect()
    }

    fn call(&self, workload: usize, device: usize, inputs: &[Datablock]) -> Result<()> {
        done(&self.tasks[workload][device], inputs)
    }

    /// The assignment (a device for each workload) at which most is done: all are tried, the best of them for longer.
    fn best(&self, works: &[Work]) -> Result<Vec<usize>> {
        let n = self.devices();
        let all = n.pow(works.len() as u32);
        let device = |assignment: usize, workload: usize| assignment / n.pow(workload as u32) % n;
        let rate = |a: usize, time| rate_of(works, time, &|i, inputs| self.call(i, device(a, i), inputs));
        let trial = (TRIALS / all as u32).max(LEAST);
        let mut tried = (0..all).map(|a| Ok((rate(a, trial)?, a))).collect::<Result<Vec<(f64, usize)>>>()?;
        tried.sort_by(|a, b| b.0.total_cmp(&a.0));
        let last = tried.iter().take(FINAL).map(|(_, a)| Ok((rate(*a, AGAIN)?, *a))).collect::<Result<Vec<_>>>()?;
        let best = last.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).ok_or("no assignment")?.1;
        Ok((0..works.len()).map(|i| device(best, i)).collect())
    }
}

/// Knows everything.
pub(super) struct Omniscient<'a> {
    each: &'a Each,
    /// The best assignment without the load, and beside it.
    best: [Vec<usize>; 2],
}

impl<'a> Omniscient<'a> {
    /// Tries everything: minutes.
    pub(super) fn new(each: &'a Each, works: &[Work]) -> Result<Self> {
        let alone = each.best(works)?;
        let load = Loaded::start(Load::Cpu)?;
        let beside = each.best(works)?;
        drop(load);
        Ok(Omniscient { each, best: [alone, beside] })
    }

    /// One call of a workload, while the load is there or not.
    pub(super) fn call(&self, workload: usize, loaded: Option<&AtomicBool>, inputs: &[Datablock]) -> Result<()> {
        let there = loaded.is_some_and(|l| l.load(Ordering::Relaxed));
        self.each.call(workload, self.best[usize::from(there)][workload], inputs)
    }
}

/// HEFT.
pub(super) struct Heft<'a> {
    each: &'a Each,
    times: &'a [Vec<f64>],
    /// When each server is free: one for each core, one for each accelerator.
    free: Mutex<Vec<Instant>>,
    cores: usize,
}

impl<'a> Heft<'a> {
    pub(super) fn new(each: &'a Each, times: &'a [Vec<f64>]) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Heft { each, times, free: Mutex::new(vec![Instant::now(); cores + each.devices() - 1]), cores }
    }

    /// The device of a server.
    fn device(&self, server: usize) -> usize {
        (server + 1).saturating_sub(self.cores)
    }

    /// Whether a server is the cores, or one of them.
    fn is_cores(&self, server: usize) -> bool {
        server < self.cores || self.each.same[self.device(server)]
    }

    /// One call of a workload.
    pub(super) fn call(&self, workload: usize, inputs: &[Datablock]) -> Result<()> {
        let times = &self.times[workload];
        let device = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            // What has all cores waits for all, and they for it.
            let all = |at: usize| at >= self.cores && self.is_cores(at);
            let cores = free.iter().enumerate().filter(|(at, _)| self.is_cores(*at)).map(|(_, f)| *f).max();
            let end = |(at, f): (usize, &Instant)| {
                let from = if all(at) { cores.unwrap_or(*f) } else { *f };
                (from.max(now) + Duration::from_secs_f64(times[self.device(at)]), at)
            };
            let (end, at) = free.iter().enumerate().map(end).min().ok_or("no device")?;
            let taken = |other: usize| other == at || all(at) && self.is_cores(other);
            free.iter_mut().enumerate().filter(|(other, _)| taken(*other)).for_each(|(_, f)| *f = end);
            self.device(at)
        };
        self.each.call(workload, device, inputs)
    }
}

/// Whether the load is there, for whoever is told.
pub(super) type Told = Option<Arc<AtomicBool>>;
