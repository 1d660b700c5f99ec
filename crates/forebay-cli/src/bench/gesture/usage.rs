//! What a process uses: CPU time, memory and threads, of itself and of its children; and how busy the GPU is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Outcome;

/// Time between two looks at the GPU.
const GPU_PERIOD: Duration = Duration::from_millis(50);

/// CPU time of this process and of its children that have ended, s: user, system.
pub fn cpu() -> (f64, f64) {
    // Fields 14 to 17 of proc_pid_stat(5), counted behind the parenthesised name.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = stat.rsplit(") ").next().unwrap_or_default();
    let f: Vec<f64> = rest.split(' ').skip(11).take(4).filter_map(|v| v.parse().ok()).collect();
    let hz = rustix::param::clock_ticks_per_second() as f64;
    let at = |i: usize| f.get(i).copied().unwrap_or(0.0) / hz;
    (at(0) + at(2), at(1) + at(3))
}

/// Largest resident memory so far, MiB, and threads now, of process `pid` ("self" for this one).
pub fn size(pid: &str) -> (f64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    (field("VmHWM:").unwrap_or(0) as f64 / 1024.0, field("Threads:").unwrap_or(0))
}

/// Mean utilisation of the first NVIDIA GPU while `f` runs, %, as its management library reports it (for the device, so
/// on a machine that nobody else uses); none without one.
pub fn gpu_during<T>(f: impl FnOnce() -> Outcome<T>) -> Outcome<(T, Option<f64>)> {
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let watcher = s.spawn(|| {
            let nvml = nvml_wrapper::Nvml::init().ok()?;
            let device = nvml.device_by_index(0).ok()?;
            let mut seen = Vec::new();
            while !done.load(Ordering::Relaxed) {
                seen.push(f64::from(device.utilization_rates().ok()?.gpu));
                std::thread::sleep(GPU_PERIOD);
            }
            (!seen.is_empty()).then(|| seen.iter().sum::<f64>() / seen.len() as f64)
        });
        let result = f();
        done.store(true, Ordering::Relaxed);
        let gpu = watcher.join().unwrap_or(None);
        Ok((result?, gpu))
    })
}
