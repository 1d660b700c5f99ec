//! Schedulers that decide for all programs at once: HEFT's rule over the times that each workload takes alone (a call goes where
//! it would end first, behind what was sent there before); and one that knows everything, since it has tried it: the best of
//! all assignments of workloads to devices, without the load and beside it, and whether the load is there now.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::hal::discover;
use forebay::place::Accelerated;
use forebay::{Datablock, Impl, Kind, Runtime};

use super::{Load, Loaded, Result, Work, call, done, median, only, rate_of, text};

/// Calls that each time is the median of.
const SAMPLES: usize = 9;
/// How long each assignment is tried, and those that were best once more.
const TRIAL: Duration = Duration::from_millis(400);
const AGAIN: Duration = Duration::from_secs(2);
/// How many of them.
const FINAL: usize = 4;

/// Each workload on the CPU (0) and on the accelerator (1) only.
pub(super) struct Both(Vec<[Accelerated; 2]>);

impl Both {
    pub(super) fn new(rt: &Runtime, works: &[Work]) -> Result<Self> {
        let on = |w: &Work, device: usize| {
            rt.accelerate(1, || only(w, |i| matches!(i, Impl::Host(_)) == (device == 0))).map_err(text)
        };
        works.iter().map(|w| Ok([on(w, 0)?, on(w, 1)?])).collect::<Result<_>>().map(Both)
    }

    /// What each takes alone, s.
    pub(super) fn times(&self, works: &[Work]) -> Result<Vec<[f64; 2]>> {
        let time = |task: &Accelerated, w: &Work| -> Result<f64> {
            call(task, w, 3)?;
            Ok(median((0..SAMPLES).map(|_| call(task, w, 1)).collect::<Result<Vec<_>>>()?))
        };
        self.0.iter().zip(works).map(|([a, b], w)| Ok([time(a, w)?, time(b, w)?])).collect()
    }

    fn call(&self, workload: usize, device: usize, inputs: &[Datablock]) -> Result<()> {
        done(&self.0[workload][device], inputs)
    }

    /// The assignment (a bit for each workload: on the accelerator) at which most is done: all are tried, the best of them
    /// for longer.
    fn best(&self, works: &[Work]) -> Result<usize> {
        let rate = |mask: usize, time| rate_of(works, time, &|i, inputs| self.call(i, mask >> i & 1, inputs));
        let mut all = (0..1 << works.len()).map(|m| Ok((rate(m, TRIAL)?, m))).collect::<Result<Vec<(f64, usize)>>>()?;
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let last = all.iter().take(FINAL).map(|(_, m)| Ok((rate(*m, AGAIN)?, *m))).collect::<Result<Vec<_>>>()?;
        last.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, m)| m).ok_or_else(|| "no assignment".into())
    }
}

/// Knows everything.
pub(super) struct Omniscient<'a> {
    both: &'a Both,
    /// The best assignment without the load, and beside it.
    best: [usize; 2],
}

impl<'a> Omniscient<'a> {
    /// Tries everything: a minute or two.
    pub(super) fn new(both: &'a Both, works: &[Work]) -> Result<Self> {
        let alone = both.best(works)?;
        let load = Loaded::start(Load::Cpu)?;
        let beside = both.best(works)?;
        drop(load);
        Ok(Omniscient { both, best: [alone, beside] })
    }

    /// One call of a workload, while the load is there or not.
    pub(super) fn call(&self, workload: usize, loaded: Option<&AtomicBool>, inputs: &[Datablock]) -> Result<()> {
        let there = loaded.is_some_and(|l| l.load(Ordering::Relaxed));
        self.both.call(workload, self.best[usize::from(there)] >> workload & 1, inputs)
    }
}

/// HEFT.
pub(super) struct Heft<'a> {
    both: &'a Both,
    times: &'a [[f64; 2]],
    /// When each server is free: one for each core, one for the accelerator.
    free: Mutex<Vec<Instant>>,
    cores: usize,
    /// The accelerator is the cores by another name: what goes there has all of them.
    same: bool,
}

impl<'a> Heft<'a> {
    pub(super) fn new(both: &'a Both, times: &'a [[f64; 2]]) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let same = discover(&[Kind::OpenCl, Kind::Cuda]).0.iter().all(|d| d.info().is_cpu);
        Heft { both, times, free: Mutex::new(vec![Instant::now(); cores + 1]), cores, same }
    }

    /// One call of a workload.
    pub(super) fn call(&self, workload: usize, inputs: &[Datablock]) -> Result<()> {
        let times = self.times[workload];
        let device = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let all = free.iter().copied().max().unwrap_or(now);
            let end = |(at, f): (usize, &Instant)| {
                let device = usize::from(at == self.cores);
                let from = if device == 1 && self.same { all } else { *f };
                (from.max(now) + Duration::from_secs_f64(times[device]), at, device)
            };
            let Some((end, at, device)) = free.iter().enumerate().map(end).min() else {
                return Err("no device".into());
            };
            if device == 1 && self.same {
                free.fill(end);
            } else {
                free[at] = end;
            }
            device
        };
        self.both.call(workload, device, inputs)
    }
}

/// Whether the load is there, for whoever is told.
pub(super) type Told = Option<Arc<AtomicBool>>;
