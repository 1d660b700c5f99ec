//! NVML as the service asks it: who is on a GPU, and how busy each is.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper_sys::bindings::{
    nvmlProcessUtilizationSample_t as Row, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
};

use crate::samples::{Sample, Samples};
use crate::system::now_ns;

/// Rows of samples for which there is room. The driver refuses less than the 72 that it keeps, however few there are.
const ROWS: usize = 256;
/// Most of them.
const MOST_ROWS: usize = 1 << 16;

/// The driver samples a few times a second, and windows may be shorter.
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

    /// Its name for CUDA_VISIBLE_DEVICES; none where NVML does not say.
    pub fn uuid(&self) -> Option<String> {
        self.nvml.device_by_index(self.index).and_then(|d| d.uuid()).ok()
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

impl Gpu {
    /// What it has sampled since; called past the wrapper, which asks for as many rows as there are.
    fn rows(&self, since_us: u64) -> Result<Vec<Row>, String> {
        let why = |what: String| format!("NVML: {what}");
        let call = self.nvml.lib().nvmlDeviceGetProcessUtilization.as_ref().map_err(|e| why(e.to_string()))?;
        let device = self.nvml.device_by_index(self.index).map_err(|e| why(e.to_string()))?;
        let mut room = ROWS;
        loop {
            let none = Row { pid: 0, timeStamp: 0, smUtil: 0, memUtil: 0, encUtil: 0, decUtil: 0 };
            let (mut rows, mut n) = (vec![none; room], room as u32);
            // SAFETY: the handle is the device's, which lives; there are as many rows as is said.
            let code = unsafe { call(device.handle(), rows.as_mut_ptr(), &mut n, since_us) };
            match code {
                SUCCESS => {
                    rows.truncate(n as usize);
                    return Ok(rows);
                }
                // Nothing new.
                NOT_FOUND => return Ok(Vec::new()),
                INSUFFICIENT_SIZE if room < MOST_ROWS => room = (2 * room).max(n as usize).min(MOST_ROWS),
                other => return Err(why(format!("error {other} from nvmlDeviceGetProcessUtilization"))),
            }
        }
    }
}

impl Samples for Gpu {
    fn clocks_us(&self) -> [u64; 2] {
        let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        [date.as_micros().min(u128::from(u64::MAX)) as u64, now_ns() / 1000]
    }

    fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String> {
        if self.asked.is_some_and(|at| at.elapsed() < LEAST_BETWEEN) {
            return Ok(Vec::new());
        }
        self.asked = Some(Instant::now());
        let rows = self.rows(since_us)?;
        // Rows that it has not filled have no process.
        let filled = rows.into_iter().filter(|r| r.pid != 0);
        Ok(filled.map(|r| Sample { pid: r.pid, at_us: r.timeStamp, percent: r.smUtil }).collect())
    }
}
