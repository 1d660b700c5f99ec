//! What the machine has used: the processors' own counters (RAPL, as the kernel shows them) and those of NVIDIA GPUs.
//!
//! They count everything that runs on the machine, not one program's part. The processors' may be read by root only.

use std::path::{Path, PathBuf};

/// Where the kernel shows the processors' counters.
const POWERCAP: &str = "/sys/class/powercap";

/// Counters of energy.
pub struct Energy {
    /// A counter in µJ, where it wraps, what it said last, and the sum so far.
    packages: Vec<(PathBuf, u64, u64)>,
    nvml: Option<nvml_wrapper::Nvml>,
    /// What each GPU said last, mJ.
    gpus: Vec<u64>,
    joules: f64,
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

impl Energy {
    /// The counters of this machine that may be read; none if there is none.
    pub fn open() -> Option<Self> {
        Self::with(Path::new(POWERCAP), nvml_wrapper::Nvml::init().ok())
    }

    fn with(powercap: &Path, nvml: Option<nvml_wrapper::Nvml>) -> Option<Self> {
        let mut packages = Vec::new();
        for entry in std::fs::read_dir(powercap).into_iter().flatten().flatten() {
            // A package, as "intel-rapl:0"; its parts are counted in it.
            let name = entry.file_name();
            let is_package =
                name.to_str().and_then(|n| n.split_once(':')).is_some_and(|(_, n)| n.parse::<u32>().is_ok());
            let counter = entry.path().join("energy_uj");
            let range = number(&entry.path().join("max_energy_range_uj"));
            if let (true, Some(now), Some(range)) = (is_package, number(&counter), range) {
                packages.push((counter, range, now));
            }
        }
        let gpus = nvml.as_ref().map(said).unwrap_or_default();
        let any = !packages.is_empty() || gpus.iter().any(|g| *g > 0);
        any.then_some(Energy { packages, nvml, gpus, joules: 0.0 })
    }

    /// What was used since it was opened, J.
    pub fn joules(&mut self) -> f64 {
        for (path, range, last) in &mut self.packages {
            let Some(now) = number(path) else { continue };
            let used = if now >= *last { now - *last } else { (*range - (*last).min(*range)).saturating_add(now) };
            *last = now;
            self.joules += used as f64 / 1e6;
        }
        if let Some(nvml) = &self.nvml {
            let now = said(nvml);
            let used: u64 = now.iter().zip(&self.gpus).map(|(n, l)| n.saturating_sub(*l)).sum();
            self.joules += used as f64 / 1e3;
            self.gpus = now;
        }
        self.joules
    }
}

/// What every GPU has used since its driver was loaded, mJ; 0 for one that does not count.
fn said(nvml: &nvml_wrapper::Nvml) -> Vec<u64> {
    let of = |n| nvml.device_by_index(n).and_then(|d| d.total_energy_consumption()).unwrap_or(0);
    (0..nvml.device_count().unwrap_or(0)).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_summed_wrap_and_may_be_missing() {
        let dir = std::env::temp_dir().join(format!("forebay-energy-{}", std::process::id()));
        assert!(Energy::with(&dir, None).is_none());
        let set = |package: &str, what: &str, n: u64| {
            std::fs::create_dir_all(dir.join(package)).unwrap();
            std::fs::write(dir.join(package).join(what), format!("{n}\n")).unwrap();
        };
        for p in ["intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl"] {
            set(p, "max_energy_range_uj", 10_000_000);
            set(p, "energy_uj", 9_000_000);
        }
        let mut e = Energy::with(&dir, None).unwrap();
        assert_eq!(e.joules(), 0.0);
        set("intel-rapl:0", "energy_uj", 9_500_000);
        set("intel-rapl:0:0", "energy_uj", 9_900_000);
        // Wrapped.
        set("intel-rapl:1", "energy_uj", 1_000_000);
        assert!((e.joules() - 2.5).abs() < 1e-9);
        std::fs::remove_file(dir.join("intel-rapl:1/energy_uj")).unwrap();
        set("intel-rapl:0", "energy_uj", 9_600_000);
        assert!((e.joules() - 2.6).abs() < 1e-9);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn energy_times_time_is_told_of_each_thing_that_was_done() {
        let dir = tempfile::tempdir().unwrap();
        let package = dir.path().join("intel-rapl:0");
        std::fs::create_dir(&package).unwrap();
        let set = |what: &str, n: u64| std::fs::write(package.join(what), n.to_string()).unwrap();
        set("max_energy_range_uj", 10_000_000);
        set("energy_uj", 1_000_000);
        let count = crate::place::Counter::default();
        let begun = std::time::Instant::now();
        let mut tracker = count.energy_time(Energy::with(dir.path(), None).unwrap());
        assert!(tracker().is_nan(), "nothing was done");
        let from = std::time::Instant::now();
        count.add(4);
        set("energy_uj", 3_000_000);
        std::thread::sleep(std::time::Duration::from_millis(20));
        let least = from.elapsed().as_secs_f64();
        let said = tracker();
        // Two joules for four.
        let of = |seconds: f64| 0.5 * seconds / 4.0;
        assert!((of(least)..=of(begun.elapsed().as_secs_f64())).contains(&said), "{said}");
        assert!(tracker().is_nan());
    }
}
