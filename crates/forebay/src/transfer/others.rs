//! What others had of the processors while something was measured: figures from a busy machine are doubtful.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// More than this part of all processors' time makes figures doubtful.
const BUSY: f64 = 0.25;
/// Ticks below which nothing can be said.
const FEWEST: u64 = 20;
/// Of `/proc/stat`, on every Linux of today (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// What processors had done until some moment, and what this process had of it.
pub(super) struct Moment {
    all: u64,
    busy: u64,
    own: Duration,
}

impl Moment {
    /// Now; none where the kernel does not tell.
    pub(super) fn now() -> Option<Self> {
        let (all, busy) = ticks(&std::fs::read_to_string("/proc/stat").ok()?)?;
        let own = clock_gettime(ClockId::ProcessCPUTime);
        Some(Moment { all, busy, own: own.try_into().ok()? })
    }

    /// Whether others had so much of the time since then that what was measured meanwhile is doubtful.
    pub(super) fn was_busy_until(&self, now: &Moment) -> bool {
        let all = now.all.saturating_sub(self.all);
        let own = now.own.saturating_sub(self.own).as_secs_f64() * TICKS_PER_SECOND;
        let others = now.busy.saturating_sub(self.busy) as f64 - own;
        all >= FEWEST && others > BUSY * all as f64
    }
}

/// All ticks, and those in which something ran, of the first line (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq,
/// steal. What the host of a virtual machine took from it counts as neither.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_ascii_whitespace().take(7).map(str::parse).collect::<Result<_, _>>().ok()?;
    let [user, nice, system, idle, waiting, irq, softirq] = ticks[..] else { return None };
    let busy = [nice, system, irq, softirq].into_iter().fold(user, u64::saturating_add);
    Some((busy.saturating_add(idle).saturating_add(waiting), busy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_did_is_not_others() {
        assert_eq!(ticks("cpu  100 10 20 300 5 1 4 60 7 3\ncpu0 1 2 3\n"), Some((440, 135)));
        assert!(["", "cpu0 1 2", "cpu  1 2 3", "cpu  1 2 3 4 5 6 x"].iter().all(|s| ticks(s).is_none()));
        let moment = |all, busy, ms| Moment { all, busy, own: Duration::from_millis(ms) };
        let since = |all: u64, busy: u64, ms: u64| {
            moment(1000, 500, 70).was_busy_until(&moment(1000 + all, 500 + busy, 70 + ms))
        };
        // Two cores for two seconds, of which this process had one and a half.
        assert!(!since(400, 300, 3000));
        assert!(!since(400, 380, 3000));
        assert!(since(400, 380, 2500));
        assert!(!since(19, 19, 0), "too short");
        assert!(!moment(1000, 500, 70).was_busy_until(&moment(0, 0, 0)), "clocks that went back");
        assert!(Moment::now().is_some());
    }
}
