//! NVML as the service asks it: who is on a GPU, and how busy each is.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use rustix::time::{ClockId, clock_gettime};

use crate::samples::{Sample, Samples};

/// The driver samples a few times a second; to ask is two calls of it. Windows may be shorter.
const LEAST_BETWEEN: Duration = Duration::from_millis(50);

/// A GPU by its number (N of `/dev/nvidiaN`).
#[derive(Clone)]
pub struct Gpu {
    nvml: Rc<Nvml>,
    index: u32,
    /// When it was last asked how busy processes are.
    asked: Option<Instant>,
}

impl Gpu {
    /// Opens NVML and finds the GPU.
    ///
    /// # Errors
    /// That the library or the GPU is not there.
    pub fn open(minor: u32) -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|e| format!("NVML: {e}"))?;
        let of = |i| nvml.device_by_index(i).and_then(|d| d.minor_number());
        let index = (0..nvml.device_count().unwrap_or(0)).find(|&i| of(i).is_ok_and(|m| m == minor));
        let index = index.ok_or_else(|| format!("NVML knows no GPU {minor}"))?;
        Ok(Gpu { nvml: Rc::new(nvml), index, asked: None })
    }

    /// Processes that have a context on it, and how much of its memory each has, bytes; none where NVML does not say.
    ///
    /// # Errors
    /// What NVML says.
    pub fn processes(&self) -> Result<BTreeMap<u32, Option<u64>>, String> {
        let on = self.nvml.device_by_index(self.index).and_then(|d| d.running_compute_processes());
        let mut all = BTreeMap::new();
        for p in on.map_err(|e| format!("NVML: {e}"))? {
            let more = if let UsedGpuMemory::Used(bytes) = p.used_gpu_memory { Some(bytes) } else { None };
            // One that has several parts of a divided GPU is there several times.
            let has: &mut Option<u64> = all.entry(p.pid).or_default();
            *has = has.map_or(more, |b| Some(b.saturating_add(more.unwrap_or(0))));
        }
        Ok(all)
    }
}

impl Samples for Gpu {
    fn clocks_us(&self) -> [u64; 2] {
        let of = |id| {
            let t = clock_gettime(id);
            let [seconds, ns] = [t.tv_sec, t.tv_nsec].map(|v| u64::try_from(v).unwrap_or(0));
            seconds.saturating_mul(1_000_000).saturating_add(ns / 1000)
        };
        [of(ClockId::Realtime), of(ClockId::Monotonic)]
    }

    fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String> {
        if self.asked.is_some_and(|at| at.elapsed() < LEAST_BETWEEN) {
            return Ok(Vec::new());
        }
        self.asked = Some(Instant::now());
        let said = self.nvml.device_by_index(self.index).and_then(|d| d.process_utilization_stats(since_us));
        match said {
            Ok(all) => {
                let sample = |s: nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample| Sample {
                    pid: s.pid,
                    at_us: s.timestamp,
                    percent: s.sm_util,
                };
                // Rows that it has not filled have no process.
                Ok(all.into_iter().map(sample).filter(|s| s.pid != 0).collect())
            }
            // Nothing new; or more than there were a moment ago, which the next look will find.
            Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Ok(Vec::new()),
            Err(e) => Err(format!("NVML: {e}")),
        }
    }
}
