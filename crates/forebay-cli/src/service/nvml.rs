//! What NVIDIA's management library says of processes' device memory. It is opened at run time; without it nobody knows.

use std::collections::BTreeMap;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

/// Device memory of each process that uses NVIDIA GPUs, bytes, over all of them.
pub fn memory() -> BTreeMap<u32, u64> {
    let mut all = BTreeMap::new();
    let Ok(nvml) = Nvml::init() else { return all };
    for n in 0..nvml.device_count().unwrap_or(0) {
        let processes = nvml.device_by_index(n).and_then(|d| d.running_compute_processes()).unwrap_or_default();
        for p in processes {
            if let UsedGpuMemory::Used(bytes) = p.used_gpu_memory {
                *all.entry(p.pid).or_default() += bytes;
            }
        }
    }
    all
}
