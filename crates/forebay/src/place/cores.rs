//! The processor's cores: not all of them need be equally fast.
//!
//! A core's capacity is what the kernel says of it (`cpu_capacity`: 1024 for the fastest of the machine), or, where it says
//! nothing, its highest clock; without either, cores are alike. Threads are taken to be where the kernel puts them when it
//! can choose: on the fastest cores first.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// The fastest core's capacity.
const FULL: u32 = 1024;
/// Clocks that differ by less than this part are one class: turbo limits of single cores are not another kind of core.
const ALIKE: f64 = 0.15;

/// Cores that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreClass {
    /// Their numbers.
    pub cpus: Vec<usize>,
    /// What one of them does, of 1024 for the fastest.
    pub capacity: u32,
}

impl CoreClass {
    /// Whether these are the fastest cores of a machine that has others, too.
    pub fn is_fast(&self, all: &[CoreClass]) -> bool {
        all.len() > 1 && self.capacity == FULL
    }
}

/// The classes of the cores that this process may use, the fastest first.
pub fn core_classes() -> Vec<CoreClass> {
    let mine = rustix::thread::sched_getaffinity(None).ok();
    let may = |cpu: usize| mine.as_ref().is_none_or(|set| set.is_set(cpu));
    classes(Path::new("/sys/devices/system/cpu"), may)
}

fn classes(root: &Path, may: impl Fn(usize) -> bool) -> Vec<CoreClass> {
    let number = |cpu: usize, file: &str| -> Option<f64> {
        let text = fs::read_to_string(root.join(format!("cpu{cpu}")).join(file)).ok()?;
        text.trim().parse::<f64>().ok().filter(|v| v.is_finite() && *v > 0.0)
    };
    let there = fs::read_dir(root).into_iter().flatten().flatten();
    let name = |e: fs::DirEntry| e.file_name().to_string_lossy().strip_prefix("cpu")?.parse::<usize>().ok();
    let mut cpus: Vec<usize> = there.filter_map(name).filter(|c| may(*c)).collect();
    cpus.sort_unstable();
    let by = |file: &str| cpus.iter().map(|c| number(*c, file)).collect::<Option<Vec<f64>>>();
    let said = by("cpu_capacity").filter(|v| !v.is_empty());
    let speeds = said.or_else(|| by("cpufreq/cpuinfo_max_freq")).unwrap_or_else(|| vec![1.0; cpus.len()]);
    let mut sorted: Vec<(f64, usize)> = speeds.into_iter().zip(cpus).collect();
    sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let fastest = sorted.first().map_or(1.0, |s| s.0);
    let mut out: Vec<(f64, CoreClass)> = Vec::new();
    for (speed, cpu) in sorted {
        match out.last_mut() {
            Some((first, class)) if speed >= *first * (1.0 - ALIKE) => class.cpus.push(cpu),
            _ => {
                let capacity = (speed / fastest * f64::from(FULL)).round() as u32;
                out.push((speed, CoreClass { cpus: vec![cpu], capacity }));
            }
        }
    }
    out.into_iter().map(|(_, class)| class).collect()
}

/// What so many threads get of the cores.
#[derive(Clone, Debug)]
pub(crate) struct Cores {
    /// What the fastest k cores do together, in fast cores; nothing at 0.
    sums: Vec<f64>,
}

impl Cores {
    /// This machine's.
    pub(crate) fn here() -> &'static Cores {
        static HERE: OnceLock<Cores> = OnceLock::new();
        HERE.get_or_init(|| {
            // A limit on the processor's time lets fewer cores' worth be used than there are.
            let most = std::thread::available_parallelism().map_or(1, |n| n.get());
            let each = core_classes().into_iter().flat_map(|c| vec![c.capacity; c.cpus.len()]);
            let capacities: Vec<u32> = each.take(most).collect();
            if capacities.len() < most { Cores::alike(most) } else { Cores::of(&capacities) }
        })
    }

    pub(crate) fn alike(n: usize) -> Cores {
        Cores::of(&vec![FULL; n])
    }

    fn of(capacities: &[u32]) -> Cores {
        let mut sum = 0.0;
        let each = capacities.iter().map(|c| {
            sum += f64::from(*c) / f64::from(FULL);
            sum
        });
        Cores { sums: std::iter::once(0.0).chain(each).collect() }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.sums.len() - 1
    }

    /// What each of `threads` (of whomever) gets of a fast core, when an even scheduler has them all.
    #[inline]
    pub(crate) fn part(&self, threads: f64) -> f64 {
        let whole = threads as usize;
        let all = match self.sums.get(whole.saturating_add(1)) {
            Some(next) => self.sums[whole] + (next - self.sums[whole]) * (threads - whole as f64),
            None => self.sums[self.sums.len() - 1],
        };
        if threads > 0.0 { (all / threads).min(1.0) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(name: &str, files: &[(&str, &str)]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("forebay-cores-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn cores_are_classed_by_what_the_kernel_says() {
        let root = tree(
            "capacity",
            &[
                ("cpu0/cpu_capacity", "446\n"),
                ("cpu1/cpu_capacity", "446\n"),
                ("cpu2/cpu_capacity", "1024\n"),
                ("cpu10/cpu_capacity", "1024\n"),
                ("cpufreq/policy0", ""),
            ],
        );
        let all = classes(&root, |_| true);
        let of = |cpus: &[usize], capacity| CoreClass { cpus: cpus.to_vec(), capacity };
        assert_eq!(all, [of(&[2, 10], 1024), of(&[0, 1], 446)]);
        assert_eq!(all.iter().map(|c| c.is_fast(&all)).collect::<Vec<_>>(), [true, false]);
        // Those that this process may use, of which the fastest is the measure.
        assert_eq!(classes(&root, |c| c < 2), [of(&[0, 1], 1024)]);
        fs::remove_dir_all(root).unwrap();
        // By clocks: a core that may go a little higher is no class of its own.
        let f = "cpufreq/cpuinfo_max_freq";
        let files = [(0, "5200000"), (1, "5000000"), (2, "3800000"), (3, "junk")];
        let files: Vec<(String, &str)> = files.iter().map(|(c, v)| (format!("cpu{c}/{f}"), *v)).collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(p, v)| (p.as_str(), *v)).collect();
        let root = tree("clocks", &files);
        assert_eq!(classes(&root, |c| c < 3), [of(&[0, 1], 1024), of(&[2], 748)]);
        // One of which nothing is known makes all of them alike.
        assert_eq!(classes(&root, |_| true), [of(&[0, 1, 2, 3], 1024)]);
        fs::remove_dir_all(root).unwrap();
        assert_eq!(classes(Path::new("/nowhere"), |_| true), []);
        let here = core_classes();
        assert!(!here.is_empty() && here[0].capacity == 1024, "{here:?}");
    }

    #[test]
    fn threads_are_on_the_fastest_cores_first() {
        let two = Cores::of(&[1024, 1024, 512, 512]);
        assert_eq!([1.0, 2.0, 4.0, 6.0].map(|t| two.part(t)), [1.0, 1.0, 0.75, 0.5]);
        assert!((two.part(2.5) - 2.25 / 2.5).abs() < 1e-12);
        let alike = Cores::alike(2);
        assert_eq!([0.0, 1.0, 2.0, 3.0, 4.0].map(|t| alike.part(t)), [1.0, 1.0, 1.0, 2.0 / 3.0, 0.5]);
    }
}
