//! GPU time of every process from samples of how busy each was: the second source, where the GPU's log is not to be had.
//!
//! Rules:
//! 1. A sample says which part of the driver's last period the process was busy. So it is divided by the part of that
//!    period for which the process was on the GPU at all: what comes out is how busy it is when it may be.
//! 2. A period ends where samples come, for all processes at once, a few times a second. Of who does nothing the driver says
//!    nothing: one that was on the GPU for [`LEAST_NS`] of a period in which others have samples and it has none is idle,
//!    and one that was there for [`SILENCE_NS`] without a sample of anybody.
//! 3. Until the next sample a process counts as being as busy as the last one said, and as busy all the time before the
//!    first.
//! 4. What was said once is never taken back. Samples that fail are told of once; until they come again everybody is as busy
//!    as before.

use std::collections::BTreeMap;

use crate::agent::Meter;

/// All of a process's time, in millionths.
const WHOLE: u64 = 1_000_000;
/// Longer than between two samples of a busy process (the driver's own period is up to a second).
pub const SILENCE_NS: u64 = 1_500_000_000;
/// Whoever was on the GPU for less than this of a period has not shown what it does.
pub const LEAST_NS: u64 = 20_000_000;
/// Processes that are remembered.
const MAX_ACCOUNTS: usize = 4096;

/// How busy a process was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The process.
    pub pid: u32,
    /// When the sample was taken, µs of the driver's clock.
    pub at_us: u64,
    /// Part of the driver's last period, percent; of several processes together not always 100 at most.
    pub percent: u32,
}

/// Where samples come from.
pub trait Samples {
    /// Samples later than `since_us`, in any order; none is no error.
    ///
    /// # Errors
    /// What the driver says.
    fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String>;
}

struct Account {
    used_ns: u64,
    /// How busy it is when it is on the GPU, in millionths.
    busy: u64,
    /// The part of this period that it was on the GPU.
    on_ns: u64,
    /// Length of this period so far.
    all_ns: u64,
    /// Time on the GPU since anybody's last sample.
    silent_ns: u64,
}

/// Samples, summed up.
pub struct SampleMeter<S> {
    samples: S,
    last_us: u64,
    accounts: BTreeMap<u32, Account>,
    failed: bool,
    trouble: Option<String>,
}

impl<S: Samples> SampleMeter<S> {
    /// Nobody has used anything yet.
    pub fn new(samples: S) -> Self {
        SampleMeter { samples, last_us: 0, accounts: BTreeMap::new(), failed: false, trouble: None }
    }
}

impl<S: Samples> Meter for SampleMeter<S> {
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        if self.accounts.len() >= MAX_ACCOUNTS && !self.accounts.contains_key(&pid) {
            return;
        }
        let new = || Account { used_ns: 0, busy: WHOLE, all_ns: 0, on_ns: 0, silent_ns: 0 };
        let a = self.accounts.entry(pid).or_insert_with(new);
        a.all_ns = a.all_ns.saturating_add(ns);
        if on {
            a.on_ns = a.on_ns.saturating_add(ns);
            a.silent_ns = a.silent_ns.saturating_add(ns);
            a.used_ns += (u128::from(ns) * u128::from(a.busy) / u128::from(WHOLE)) as u64;
        }
        if a.silent_ns > SILENCE_NS && !self.failed {
            a.busy = 0;
        }
    }

    fn refresh(&mut self, _: bool) {
        let samples = match self.samples.since(self.last_us) {
            Ok(s) => s,
            Err(e) => {
                if !std::mem::replace(&mut self.failed, true) {
                    self.trouble = Some(format!("how busy processes are is not known: {e}"));
                }
                return;
            }
        };
        if std::mem::take(&mut self.failed) {
            self.trouble = Some("how busy processes are is known again".into());
        }
        let mut percents = BTreeMap::<u32, u32>::new();
        for s in samples.iter().filter(|s| s.at_us > self.last_us) {
            // Of several periods that have ended since the last look each process's busiest counts.
            let percent = percents.entry(s.pid).or_default();
            *percent = s.percent.min(100).max(*percent);
        }
        if percents.is_empty() {
            return;
        }
        self.last_us = samples.iter().map(|s| s.at_us).fold(self.last_us, u64::max);
        for (pid, a) in &mut self.accounts {
            let percent = percents.get(pid).copied();
            if a.on_ns >= LEAST_NS || percent.is_some_and(|_| a.on_ns > 0) {
                let busy_ns = u128::from(a.all_ns) * u128::from(percent.unwrap_or(0)) / 100;
                a.busy = (busy_ns * u128::from(WHOLE) / u128::from(a.on_ns)).min(u128::from(WHOLE)) as u64;
            }
            (a.all_ns, a.on_ns, a.silent_ns) = (0, 0, 0);
        }
    }

    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        Some(self.accounts.get(&pid).map_or(0, |a| a.used_ns))
    }

    fn forget(&mut self, pid: u32) {
        self.accounts.remove(&pid);
    }

    fn trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples that the test hands over.
    #[derive(Default)]
    struct Script(Vec<Result<Vec<Sample>, String>>);

    impl Samples for Script {
        fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String> {
            let next = if self.0.is_empty() { Ok(Vec::new()) } else { self.0.remove(0) };
            next.map(|all| all.into_iter().filter(|s| s.at_us > since_us).collect())
        }
    }

    const MS: u64 = 1_000_000;

    fn sample(pid: u32, at_us: u64, percent: u32) -> Sample {
        Sample { pid, at_us, percent }
    }

    #[test]
    fn who_was_kept_off_half_the_time_and_busy_half_of_it_is_busy() {
        let mut m = SampleMeter::new(Script(vec![Ok(vec![sample(1, 10, 50), sample(2, 11, 25)]), Ok(vec![])]));
        for on in [true, false] {
            m.passed(1, on, 100 * MS);
            m.passed(2, !on, 100 * MS);
        }
        // As long as nothing is known both are busy.
        assert_eq!([1, 2].map(|p| m.used_ns(p)), [Some(100 * MS); 2]);
        m.refresh(false);
        for pid in [1, 2] {
            m.passed(pid, true, 100 * MS);
        }
        m.refresh(false);
        assert_eq!([1, 2].map(|p| m.used_ns(p)), [Some(200 * MS), Some(150 * MS)]);
    }

    #[test]
    fn who_is_silent_is_idle_until_it_is_heard_of_again() {
        let mut m = SampleMeter::new(Script(vec![Ok(vec![sample(1, 10, 80)]), Ok(vec![sample(2, 20, 90)])]));
        for _ in 0..20 {
            m.passed(1, true, 100 * MS);
        }
        let used = m.used_ns(1).unwrap();
        assert_eq!(used, 1600 * MS, "busy for as long as it could be");
        m.passed(1, true, 100 * MS);
        assert_eq!(m.used_ns(1), Some(used));
        m.refresh(false);
        m.passed(1, true, 100 * MS);
        assert_eq!(m.used_ns(1), Some(used + 80 * MS));
        // Somebody else has a sample: it is idle, at once.
        m.passed(2, true, 100 * MS);
        m.refresh(false);
        m.passed(1, true, 100 * MS);
        assert_eq!(m.used_ns(1), Some(used + 80 * MS));
        m.forget(1);
        assert_eq!(m.used_ns(1), Some(0));
    }

    #[test]
    fn old_wild_and_failing_samples_do_no_harm() {
        let mut m = SampleMeter::new(Script(vec![
            Ok(vec![sample(1, 20, 4_000_000_000), sample(9, u64::MAX - 1, 100)]),
            Err("no".into()),
            Err("no".into()),
            Ok(vec![sample(1, 20, 0)]),
        ]));
        m.passed(1, true, u64::MAX / 4);
        m.refresh(false);
        m.passed(1, true, MS);
        let used = m.used_ns(1).unwrap();
        for said in [true, false, true, false] {
            m.refresh(false);
            assert_eq!(m.trouble().is_some(), said);
        }
        m.passed(1, true, MS);
        assert!(m.used_ns(1).unwrap() >= used);
    }
}
