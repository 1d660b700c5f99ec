//! Curves on disk: one entry for a machine, device and driver, in the same cache as compiled kernels.
//!
//! A damaged entry is absent (the cache checks it); one of another machine, driver or version has another key; one with
//! figures that cannot be is not believed. One that was measured while others kept the machine busy is used, and measured anew
//! after an hour.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_hal::cache::Cache;
use forebay_hal::{Device, Direction};
use serde::{Deserialize, Serialize};

use super::curve::{Cost, Curve, Curves, Host, MAX_POINTS, Measured, Together, Way};

/// Changes with the meaning of what is stored.
const VERSION: &str = "transfer curves 4";
/// Seconds after which doubtful figures are measured anew: not each time on a machine that is always busy.
const DOUBTFUL_FOR: u64 = 3600;

#[derive(Serialize, Deserialize)]
struct Stored {
    together: [Vec<Together>; 2],
    further: [u64; 2],
    /// Curves by "way, direction, memory"; points are pairs of median and tail.
    curves: BTreeMap<String, Vec<(u64, u64)>>,
    /// When, in seconds since 1970, if the machine was busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    doubtful: Option<u64>,
}

fn key(device: &dyn Device) -> String {
    let i = device.info();
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find(|l| l.starts_with("model name")).unwrap_or_default().to_owned();
    // Copies by our own code are slower without optimisation.
    let built = if cfg!(debug_assertions) { "debug" } else { "release" };
    // The same way may be another on the same device (memory that the processor shares, or not).
    let plain = device.plain_copy().map_or("", |m| m.name());
    let version = env!("CARGO_PKG_VERSION");
    let parts = [VERSION, version, built, machine.trim(), &model, i.kind.name(), &i.name, &i.driver, plain];
    Cache::key(&parts.map(str::as_bytes))
}

fn name(way: Way, direction: Direction, host: Host) -> String {
    format!("{}, {}, {}", way.name(), direction.name(), host.name())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn read(cache: &Cache, device: &dyn Device) -> Option<Stored> {
    toml::from_str(std::str::from_utf8(&cache.get(&key(device))?).ok()?).ok()
}

/// Whether what is stored is to be measured anew, though it can be used. (One from the future is: clocks are set.)
pub(super) fn is_due(cache: &Cache, device: &dyn Device) -> bool {
    let when = read(cache, device).and_then(|s| s.doubtful);
    when.is_some_and(|when| now().abs_diff(when) >= DOUBTFUL_FOR)
}

/// What was stored for this machine and device.
pub(super) fn load(cache: &Cache, device: &dyn Device) -> Option<Curves> {
    let stored = read(cache, device)?;
    let mut curves = Curves { together: stored.together, further: stored.further, ..Curves::default() };
    for way in Way::ALL {
        for (direction, host) in Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h))) {
            let Some(points) = stored.curves.get(&name(way, direction, host)) else { continue };
            let known = Way::of(device).any(|w| w == way);
            if points.is_empty() || points.len() > MAX_POINTS || !known || !way.serves(host) {
                return None;
            }
            let curve = Curve::new(points.iter().map(|&(median, tail)| Cost { median, tail }).collect());
            curves.all.push(Measured { way, direction, host, curve });
        }
    }
    // Every device has an engine.
    let engine = |d| curves.get(Way::ALL[0], d, Host::Pinned).is_some();
    Direction::ALL.into_iter().all(engine).then_some(curves)
}

/// Stores curves, which may be `doubtful`; a cache that cannot be written means measuring again next time.
pub(super) fn save(cache: &Cache, device: &dyn Device, curves: &Curves, doubtful: bool) {
    let points = |c: &Curve| c.points().map(|(_, c)| (c.median, c.tail)).collect();
    let stored = Stored {
        together: curves.together.clone(),
        further: curves.further,
        curves: curves.all.iter().map(|m| (name(m.way, m.direction, m.host), points(&m.curve))).collect(),
        doubtful: doubtful.then(now),
    };
    if let Ok(text) = toml::to_string(&stored) {
        cache.put(&key(device), text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_hal::{Buffer, DeviceInfo, Kernel, Kind, Method, Queue, Source};

    /// A device whose memory the processor shares.
    struct Shared<'a>(&'a dyn Device);

    impl Device for Shared<'_> {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }
        fn alloc(&self, bytes: usize) -> forebay_hal::Result<Buffer> {
            self.0.alloc(bytes)
        }
        fn compile(&self, source: &Source, entry: &str) -> forebay_hal::Result<Kernel> {
            self.0.compile(source, entry)
        }
        fn queue(&self) -> forebay_hal::Result<Box<dyn Queue>> {
            self.0.queue()
        }
        fn allocated(&self) -> u64 {
            self.0.allocated()
        }
        fn plain_copy(&self) -> Option<Method> {
            Some(Method::Mapped)
        }
    }

    #[test]
    fn memory_that_the_processor_shares_has_curves_of_its_own() {
        let (devices, _) = forebay_hal::discover(&[Kind::Sim]);
        let as_it_is = &*devices[0];
        assert_ne!(key(as_it_is), key(&Shared(as_it_is)));
        assert_eq!(key(&Shared(as_it_is)), key(&Shared(as_it_is)));
    }

    #[test]
    fn curves_come_back_and_what_cannot_be_is_not_believed() {
        let dir = std::env::temp_dir().join(format!("forebay-curves-{}", std::process::id()));
        let cache = Cache::at(&dir);
        let (devices, _) = forebay_hal::discover(&[Kind::Cpu, Kind::Sim]);
        let (cpu, sim) = (&*devices[0], &*devices[1]);
        assert_eq!(load(&cache, cpu), None);
        let point = |i: u64| Cost { median: 10 * i + 1, tail: 20 * i + 5 };
        let one = |way, direction, host| Measured {
            way,
            direction,
            host,
            curve: Curve::new((0..MAX_POINTS as u64).map(point).collect()),
        };
        let all = |ways: &[Way]| -> Vec<_> {
            let each = |w: &Way| Direction::ALL.map(|d| Host::ALL.map(|h| (*w, d, h)));
            let all = ways.iter().flat_map(each).flatten().filter(|(w, _, h)| w.serves(*h));
            all.map(|(w, d, h)| one(w, d, h)).collect()
        };
        let curves = Curves {
            all: all(&Way::ALL),
            together: [vec![Together { bytes: 1 << 20, permille: 1100 }], Vec::new()],
            further: [7, 8],
            ..Curves::default()
        };
        save(&cache, cpu, &curves, true);
        assert_eq!(load(&cache, cpu).as_ref(), Some(&curves));
        // Doubtful as they are, they are good for an hour.
        assert!(!is_due(&cache, cpu));
        let is_due_when = |seconds: u64| {
            let text = String::from_utf8(cache.get(&key(cpu)).unwrap()).unwrap();
            let (before, _) = text.split_once("doubtful = ").unwrap();
            let (_, after) = text.split_once("doubtful = ").unwrap().1.split_once('\n').unwrap();
            cache.put(&key(cpu), format!("{before}doubtful = {seconds}\n{after}").as_bytes());
            assert_eq!(load(&cache, cpu).as_ref(), Some(&curves));
            is_due(&cache, cpu)
        };
        let times = [now() - 3700, now() - 3500, now() + 3500, now() + 3700, 0, i64::MAX as u64];
        assert_eq!(times.map(is_due_when), [true, false, false, true, true, true]);
        save(&cache, cpu, &curves, false);
        assert!(!is_due(&cache, cpu));
        // Of another device, though the cache has an entry for the first.
        assert_eq!(load(&cache, sim), None);

        // Without an engine, with a method that the device lacks, with too many points, and no text at all.
        save(&cache, cpu, &Curves { all: all(&Way::ALL[1..]), ..curves.clone() }, false);
        assert_eq!(load(&cache, cpu), None);
        save(&cache, sim, &curves, false);
        assert_eq!(load(&cache, sim), None);
        let stored = String::from_utf8(cache.get(&key(sim)).unwrap()).unwrap();
        let longer = stored.replacen("[[", &format!("[{}[", "[1, 2], ".repeat(40)), 1);
        for text in ["", "further = 3", &longer, "\u{0}"] {
            cache.put(&key(cpu), text.as_bytes());
            assert_eq!(load(&cache, cpu), None, "{text:.60}");
        }
        // Figures that cannot be are bounded.
        let wild = stored.replacen("[[1, 5]", &format!("[[{}, 0]", i64::MAX), 1);
        cache.put(&key(cpu), wild.as_bytes());
        let bounded = load(&cache, cpu).unwrap();
        assert!(bounded.all.iter().all(|m| m.curve.points().all(|(_, c)| c.median <= c.tail)));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
