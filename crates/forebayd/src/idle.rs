//! How much time the machine's cores have to spare.
//!
//! `/proc/uptime` says it cheaply. `/proc/stat` says more (how long cores waited for disks) and is never wrong, but takes the
//! system long to write: on a machine with many cores and interrupts up to a millisecond. Kernels before 5.16 leave out of
//! the former what a core has slept since it last woke; once the two disagree, only the latter is asked.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Time between two looks: the system's accounts have a resolution of 10 ms.
const LOOK_NS: u64 = 20_000_000;
/// Time between two looks at `/proc/stat`.
const STAT_NS: u64 = 1_000_000_000;
/// `/proc/uptime` is not believed any more when it falls so far behind `/proc/stat` in that time: both go by steps of 10 ms.
const LAG_NS: u64 = 100_000_000;
/// Resolution of `/proc/stat`, ns (`USER_HZ` is 100 on every Linux of today).
const STEP_NS: u64 = 10_000_000;
/// Bytes that are read of either file: its first line.
const LINE: usize = 256;

/// A clock that is read now and then, and how fast it goes.
#[derive(Default)]
struct Rate {
    read_ns: u64,
    clock: u64,
    /// Millionths.
    rate: u64,
}

impl Rate {
    fn is_due(&self, now_ns: u64, every_ns: u64) -> bool {
        // A clock that went back is begun with anew.
        now_ns < self.read_ns || now_ns - self.read_ns >= every_ns
    }

    /// The rate, from what the clock says now if it was last read long enough ago.
    fn at(&mut self, now_ns: u64, every_ns: u64, clock: impl FnOnce() -> Option<u64>) -> u64 {
        if self.is_due(now_ns, every_ns) {
            let passed = now_ns.saturating_sub(self.read_ns);
            // Nobody says: then it stands still.
            let clock = clock().unwrap_or(self.clock);
            let gone = u128::from(clock.saturating_sub(self.clock));
            // The first look has nothing to compare with.
            let known = self.read_ns != 0 && passed > 0;
            self.rate = if known { (gone * 1_000_000 / u128::from(passed)) as u64 } else { 0 };
            (self.read_ns, self.clock) = (now_ns, clock);
        }
        self.rate
    }
}

/// The machine's idle time. Its files are kept open: opening one costs more than reading it.
#[derive(Default)]
pub struct Idle {
    uptime: Option<File>,
    stat: Option<File>,
    nothing: Rate,
    disk: Rate,
    asked_ns: u64,
    /// What both files said last that cores had nothing to do, ns.
    both: Option<[u64; 2]>,
}

fn first_line<T>(file: Option<&File>, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut bytes = [0; LINE];
    let n = file?.read_at(&mut bytes, 0).ok()?;
    parse(std::str::from_utf8(&bytes[..n]).ok()?.lines().next()?)
}

/// Nanoseconds in which cores had nothing to do, of `/proc/uptime`.
fn nothing_ns(line: &str) -> Option<u64> {
    let (seconds, hundredths) = line.split_whitespace().nth(1)?.split_once('.')?;
    let (seconds, hundredths): (u64, u64) = (seconds.parse().ok()?, hundredths.parse().ok()?);
    Some(seconds.saturating_mul(1_000_000_000).saturating_add(hundredths.saturating_mul(10_000_000)))
}

/// Nanoseconds in which cores had nothing to do, and waited for disks, of `/proc/stat`: the fourth and fifth number behind
/// the name.
fn stat_ns(line: &str) -> Option<[u64; 2]> {
    let mut numbers = line.strip_prefix("cpu ")?.split_whitespace().skip(3).map(|n| n.parse::<u64>().ok());
    let mut ns = || Some(numbers.next()??.saturating_mul(STEP_NS));
    Some([ns()?, ns()?])
}

/// Whether the first file fell behind the second.
fn lags(before: [u64; 2], now: [u64; 2]) -> bool {
    let [uptime, stat] = [0, 1].map(|i| now[i].saturating_sub(before[i]));
    stat.saturating_sub(uptime) > LAG_NS
}

impl Idle {
    /// Where the system tells of it; nothing to spare where it does not.
    pub fn open() -> Self {
        let open = |path| File::open(path).ok();
        Idle { uptime: open("/proc/uptime"), stat: open("/proc/stat"), ..Idle::default() }
    }

    /// About how long cores had nothing to do since this was last asked, ns over all of them.
    pub fn spare_ns(&mut self, now_ns: u64) -> u64 {
        let stat = || first_line(self.stat.as_ref(), stat_ns);
        if self.uptime.is_some() && self.disk.is_due(now_ns, STAT_NS) {
            let uptime = first_line(self.uptime.as_ref(), nothing_ns);
            let both = uptime.zip(stat()).map(|(uptime, [stat, _])| [uptime, stat]);
            if self.both.zip(both).is_some_and(|(before, now)| lags(before, now)) {
                (self.uptime, self.nothing) = (None, Rate::default());
            }
            self.both = both;
        }
        let nothing = self.nothing.at(now_ns, LOOK_NS, || match &self.uptime {
            Some(file) => first_line(Some(file), nothing_ns),
            None => Some(stat()?[0]),
        });
        let disk = self.disk.at(now_ns, STAT_NS, || Some(stat()?[1]));
        let passed = now_ns.saturating_sub(self.asked_ns);
        self.asked_ns = now_ns;
        (u128::from(passed) * u128::from(nothing + disk) / 1_000_000) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_follows_its_clock_and_is_asked_seldom() {
        let (mut r, ms) = (Rate::default(), 1_000_000);
        let never = || -> Option<u64> { panic!("asked too soon") };
        assert_eq!(r.at(50 * ms, 20 * ms, || Some(7 * ms)), 0, "nothing to compare with");
        assert_eq!(r.at(60 * ms, 20 * ms, never), 0);
        assert_eq!(r.at(70 * ms, 20 * ms, || Some(17 * ms)), 500_000);
        assert_eq!(r.at(89 * ms, 20 * ms, never), 500_000);
        // Two cores with nothing to do.
        assert_eq!(r.at(90 * ms, 20 * ms, || Some(57 * ms)), 2_000_000);
        assert_eq!(r.at(110 * ms, 20 * ms, || None), 0, "a file that cannot be read any more");
        assert_eq!(r.at(130 * ms, 20 * ms, || Some(1)), 0, "a clock that goes back");
        assert_eq!(r.at(10 * ms, 20 * ms, || Some(2)), 0, "time that goes back");
        assert_eq!(r.at(30 * ms, 20 * ms, || Some(10 * ms + 2)), 500_000);
    }

    #[test]
    fn only_what_the_files_really_say_is_believed() {
        assert_eq!(nothing_ns("350735.47 234388.91"), Some(234_388_910_000_000));
        let stat = "cpu  10132153 290696 3084719 46828483 16683 0 25195 0 175628 0";
        assert_eq!(stat_ns(stat), Some([468_284_830_000_000, 166_830_000_000]));
        for bad in ["", "1.0", "1.0 x.y", "1.0 5", "1.0 -5.00"] {
            assert_eq!(nothing_ns(bad), None, "{bad}");
        }
        for bad in ["", "cpu0 1 2 3 4 5", "cpu  1 2 3 4", "cpu  1 2 3 4 many"] {
            assert_eq!(stat_ns(bad), None, "{bad}");
        }
        assert!(nothing_ns("1 18446744073709551615.99").is_some(), "no overflow");
    }

    #[test]
    fn a_file_that_falls_behind_is_not_asked_any_more() {
        let s = 1_000_000_000;
        assert!(!lags([5 * s, 7 * s], [6 * s, 8 * s + 20_000_000]), "steps");
        assert!(lags([5 * s, 7 * s], [5 * s, 8 * s]), "a core that slept all the time");
        assert!(!lags([5 * s, 7 * s], [7 * s, 7 * s]), "it woke, and what was left out is told");
        let folder = std::env::temp_dir().join(format!("forebay-idle-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [uptime, stat] = ["uptime", "stat"].map(|name| folder.join(name));
        let mut idle = Idle::default();
        let mut at = |seconds: u64, says: [u64; 2]| {
            std::fs::write(&uptime, format!("{seconds}.00 {}.00", says[0])).unwrap();
            std::fs::write(&stat, format!("cpu  1 2 3 {} 0 0", says[1] * 100)).unwrap();
            if seconds == 1 {
                (idle.uptime, idle.stat) = (File::open(&uptime).ok(), File::open(&stat).ok());
            }
            (idle.spare_ns(seconds * s), idle.uptime.is_some())
        };
        assert_eq!(at(1, [10, 10]), (0, true));
        assert_eq!(at(2, [11, 11]), (s, true));
        assert_eq!(at(3, [11, 12]), (0, false), "from now on the other one, with nothing yet to compare");
        assert_eq!(at(4, [11, 13]), (s, false));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn this_machine_says_both() {
        let mut idle = Idle::open();
        assert!(first_line(idle.uptime.as_ref(), nothing_ns).is_some_and(|ns| ns > 0));
        assert!(first_line(idle.stat.as_ref(), stat_ns).is_some());
        let cores = std::thread::available_parallelism().unwrap().get() as u64;
        let now = crate::system::now_ns();
        idle.spare_ns(now);
        std::thread::sleep(std::time::Duration::from_millis(100));
        let then = crate::system::now_ns();
        let spare = idle.spare_ns(then);
        // A container may have fewer cores than are counted; a step of the accounts for each.
        let online = std::fs::read_to_string("/proc/stat").unwrap().lines().filter(|l| l.starts_with("cpu")).count();
        let most = (then - now + STEP_NS) * cores.max(online as u64);
        assert!(spare <= most, "{spare} of {most}");
    }
}
