//! Schedulers that decide for all programs at once, from tables of measured times: each call goes where it would end first,
//! behind what they have sent there before. HEFT's rule, with the times that each workload takes alone; and the same by
//! somebody who also knows at every moment whether the load is there, and what each takes beside it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::hal::discover;
use forebay::place::Accelerated;
use forebay::{Datablock, Impl, Kind, Runtime};

use super::{Load, Loaded, Result, Work, call, median, only, text};

/// Calls that each time is the median of.
const SAMPLES: usize = 9;

/// What each workload takes on the CPU and on the accelerator: alone, and beside the load.
pub(super) struct Times {
    of: [Vec<[f64; 2]>; 2],
}

impl Times {
    pub(super) fn measure(rt: &Runtime, works: &[Work]) -> Result<Self> {
        let table = || -> Result<Vec<[f64; 2]>> {
            works.iter().map(|w| Ok([time(&on(rt, w, 0)?, w)?, time(&on(rt, w, 1)?, w)?])).collect()
        };
        let alone = table()?;
        let load = Loaded::start(Load::Cpu)?;
        let beside = table()?;
        drop(load);
        Ok(Times { of: [alone, beside] })
    }

    /// Whether a workload is faster on the CPU, alone.
    pub(super) fn prefers_host(&self, workload: usize) -> bool {
        self.of[0][workload][0] <= self.of[0][workload][1]
    }
}

/// A workload on the CPU (0) or the accelerator (1) only.
fn on(rt: &Runtime, w: &Work, device: usize) -> Result<Accelerated> {
    rt.accelerate(1, || only(w, |i| matches!(i, Impl::Host(_)) == (device == 0))).map_err(text)
}

fn time(task: &Accelerated, w: &Work) -> Result<f64> {
    call(task, w, 3)?;
    Ok(median((0..SAMPLES).map(|_| call(task, w, 1)).collect::<Result<Vec<_>>>()?))
}

/// A central scheduler.
pub(super) struct Central<'a> {
    times: &'a Times,
    /// Each workload on either.
    tasks: Vec<[Accelerated; 2]>,
    /// When each server is free: one for each core, one for the accelerator.
    free: Mutex<Vec<Instant>>,
    cores: usize,
    /// The accelerator is the cores by another name: what goes there has all of them.
    same: bool,
    /// Whether the load is there, for whoever knows.
    loaded: Option<Arc<AtomicBool>>,
}

impl<'a> Central<'a> {
    pub(super) fn new(rt: &Runtime, works: &[Work], times: &'a Times, loaded: Option<Arc<AtomicBool>>) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let tasks = works.iter().map(|w| Ok([on(rt, w, 0)?, on(rt, w, 1)?])).collect::<Result<_>>()?;
        let same = discover(&[Kind::OpenCl, Kind::Cuda]).0.iter().all(|d| d.info().is_cpu);
        let free = Mutex::new(vec![Instant::now(); cores + 1]);
        Ok(Central { times, tasks, free, cores, same, loaded })
    }

    /// One call of a workload.
    pub(super) fn call(&self, workload: usize, inputs: &[Datablock]) -> Result<()> {
        let there = self.loaded.as_ref().is_some_and(|l| l.load(Ordering::Relaxed));
        let times = self.times.of[usize::from(there)][workload];
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
        self.tasks[workload][device].call(inputs).map(drop).map_err(text)
    }
}
