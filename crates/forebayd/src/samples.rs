//! GPU time of every process from samples of how busy each was: the second source, where the GPU's log is not to be had.
//!
//! Rules:
//! 1. A sample says which part of the driver's last period the process was busy. So it is divided by the part of that
//!    period for which the process was on the GPU at all ([`Spans`]): what comes out is how busy it is when it may be.
//! 2. A period ends when the driver says, for all processes at once, a few times a second, whenever its samples are looked
//!    at: mostly in the middle of somebody's window. It began where the one before ended, [`PERIOD_NS`] earlier at most. The
//!    driver says nothing any more of the one before the last; so it is asked more often than periods end
//!    ([`Meter::glance`], every [`GLANCE_NS`]), and what it said is kept until the window ends.
//! 3. The driver's clock is the one of the machine's clocks by which its newest sample is neither of the future nor older than
//!    [`FRESH_US`]. If it is none of them, then of the last [`LOOKS`] looks with samples the one that found the freshest says by
//!    how much it differs: which is wrong by as much as looks always come late, where windows and periods are in step.
//! 4. Of who does nothing the driver says nothing: one that was on the GPU for [`LEAST_NS`] of a period in which others have
//!    samples and it has none is idle, and one that was there for [`SILENCE_NS`] without a sample of anybody.
//! 5. Until the next sample a process counts as being as busy as the last one said, and as busy all the time before the
//!    first.
//! 6. A clock can be set back, and one sample can be of a time far from now. After [`IN_VAIN`] looks that found nothing new the
//!    driver is asked for all that it has; what was not there at such a look before is new, however old it looks, and time counts
//!    from there on. What was there is old, however new it looks.
//! 7. What was said once is never taken back. Samples that fail are told of once; until they come again everybody is as busy
//!    as before.

use std::collections::{BTreeMap, VecDeque};

use crate::agent::Meter;
use crate::spans::Spans;

/// All of a process's time, in millionths.
const WHOLE: u64 = 1_000_000;
/// Longer than between two samples of a busy process (the driver's own period is up to a second).
pub const SILENCE_NS: u64 = 1_500_000_000;
/// Whoever was on the GPU for less than this of a period has not shown what it does.
pub const LEAST_NS: u64 = 20_000_000;
/// The driver's longest period.
pub const PERIOD_NS: u64 = 1_000_000_000;
/// The driver is asked so often while a GPU is divided: its shortest period is a sixth of a second.
pub const GLANCE_NS: u64 = 80_000_000;
/// Periods that are kept until a window ends.
const MAX_PERIODS: usize = 32;
/// Looks with samples that tell how the driver's clock differs from ours.
pub const LOOKS: usize = 32;
/// Looks without a new sample after which all are asked for. A period is about as long, so that it happens seldom while nothing is
/// wrong; it does no harm then.
pub const IN_VAIN: u32 = 16;
/// A sample is younger than this when it is looked at for the first time, µs: longer than a period and a window.
pub const FRESH_US: u64 = 5_000_000;
/// Samples of one period are taken within this, µs.
const TOGETHER_US: u64 = 20_000;
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

    /// The machine's clocks, µs; the last one goes on steadily.
    fn clocks_us(&self) -> [u64; 2];
}

struct Account {
    used_ns: u64,
    /// How busy it is when it is on the GPU, in millionths.
    busy: u64,
    spans: Spans,
    /// Time on the GPU since anybody's last sample.
    silent_ns: u64,
}

/// A period of the driver's that has ended.
struct Period {
    samples: Vec<Sample>,
    ns: u64,
    /// When it ended, on one of our clocks, µs.
    end_us: i128,
    clock: usize,
}

/// Samples, summed up.
pub struct SampleMeter<S> {
    samples: S,
    last_us: u64,
    /// Looks since the last new sample.
    in_vain: u32,
    /// Times of all that there was at the last look for all, if there was one since.
    before: Option<Vec<u64>>,
    /// Times of what is old, though it looks new.
    stale: Vec<u64>,
    /// How much our clock was ahead of the newest sample, µs, at the last looks that found one.
    ahead_us: VecDeque<i128>,
    periods: VecDeque<Period>,
    accounts: BTreeMap<u32, Account>,
    failed: bool,
    trouble: Option<String>,
}

impl<S: Samples> SampleMeter<S> {
    /// Nobody has used anything yet.
    pub fn new(samples: S) -> Self {
        SampleMeter {
            samples,
            last_us: 0,
            in_vain: 0,
            before: None,
            stale: Vec::new(),
            ahead_us: VecDeque::new(),
            periods: VecDeque::new(),
            accounts: BTreeMap::new(),
            failed: false,
            trouble: None,
        }
    }
}

impl<S: Samples> SampleMeter<S> {
    /// Asks the driver for what it has sampled since.
    fn ask(&mut self) {
        let all = self.in_vain >= IN_VAIN;
        let samples = match self.samples.since(if all { 0 } else { self.last_us }) {
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
        let is_new = |s: &&Sample| s.at_us > self.last_us && !self.stale.contains(&s.at_us);
        let mut new: Vec<Sample> = samples.iter().filter(is_new).copied().collect();
        new.sort_unstable_by_key(|s| s.at_us);
        let Some(newest) = new.last() else {
            self.in_vain = self.in_vain.saturating_add(1);
            // None at all says nothing: it may have been asked too soon.
            if all && !samples.is_empty() {
                self.look_back(samples.iter().map(|s| s.at_us).collect());
            }
            return;
        };
        (self.in_vain, self.before) = (0, None);
        let clocks = self.samples.clocks_us();
        let fits = |c: &u64| c.checked_sub(newest.at_us).is_some_and(|age| age < FRESH_US);
        let (clock, ahead_us) = match clocks.iter().position(fits) {
            Some(clock) => (clock, 0),
            None => {
                self.ahead_us.truncate(LOOKS - 1);
                self.ahead_us.push_front(i128::from(clocks[1]) - i128::from(newest.at_us));
                (1, self.ahead_us.iter().copied().min().unwrap_or(0))
            }
        };
        for period in new.chunk_by(|a, b| b.at_us - a.at_us <= TOGETHER_US) {
            let end_us = period.last().map_or(0, |s| s.at_us);
            // Nothing is known of when the first one began.
            let ns = end_us.saturating_sub(self.last_us).saturating_mul(1000).min(PERIOD_NS);
            self.last_us = end_us;
            self.periods.truncate(MAX_PERIODS - 1);
            let end_us = i128::from(end_us) + ahead_us;
            self.periods.push_front(Period { samples: period.to_vec(), ns, end_us, clock });
        }
    }

    /// Finds out whether time goes on where it looks old, from the times of all that there is (rule 6).
    fn look_back(&mut self, times: Vec<u64>) {
        let goes_on = self.before.as_ref().and_then(|b| times.iter().filter(|t| !b.contains(t)).max().copied());
        match (goes_on, self.before.take()) {
            (Some(now_us), Some(before)) => {
                (self.last_us, self.stale, self.in_vain) = (now_us, before, 0);
                self.ahead_us.clear();
            }
            _ => self.before = Some(times),
        }
    }

    /// A period of the driver's, which ended `age_ns` ago.
    fn take(&mut self, period: &Period, age_ns: u64) {
        let mut percents = BTreeMap::<u32, u32>::new();
        for s in &period.samples {
            let percent = percents.entry(s.pid).or_default();
            *percent = s.percent.min(100).max(*percent);
        }
        for (pid, a) in &mut self.accounts {
            let percent = percents.get(pid).copied();
            let (on_ns, all_ns) = a.spans.within(age_ns, period.ns);
            if on_ns >= LEAST_NS || percent.is_some_and(|_| on_ns > 0) {
                let busy_ns = u128::from(all_ns) * u128::from(percent.unwrap_or(0)) / 100;
                a.busy = (busy_ns * u128::from(WHOLE) / u128::from(on_ns)).min(u128::from(WHOLE)) as u64;
            }
            a.silent_ns = 0;
        }
    }
}

impl<S: Samples> Meter for SampleMeter<S> {
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        if self.accounts.len() >= MAX_ACCOUNTS && !self.accounts.contains_key(&pid) {
            return;
        }
        let new = || Account { used_ns: 0, busy: WHOLE, spans: Spans::default(), silent_ns: 0 };
        let a = self.accounts.entry(pid).or_insert_with(new);
        a.spans.push(on, ns);
        if on {
            a.silent_ns = a.silent_ns.saturating_add(ns);
            a.used_ns += (u128::from(ns) * u128::from(a.busy) / u128::from(WHOLE)) as u64;
        }
        if a.silent_ns > SILENCE_NS && !self.failed {
            a.busy = 0;
        }
    }

    fn glance(&mut self) {
        self.ask();
    }

    fn glance_every_ns(&self) -> Option<u64> {
        Some(GLANCE_NS)
    }

    fn refresh(&mut self, _: bool) {
        self.ask();
        if self.periods.is_empty() {
            return;
        }
        let clocks = self.samples.clocks_us();
        for period in std::mem::take(&mut self.periods).iter().rev() {
            let age_us = u64::try_from(i128::from(clocks[period.clock]) - period.end_us).unwrap_or(0);
            self.take(period, age_us.saturating_mul(1000));
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

    /// Samples that the test hands over, each time as fresh as can be.
    #[derive(Default)]
    struct Script(Vec<Result<Vec<Sample>, String>>, u64);

    impl Samples for Script {
        fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String> {
            let next = if self.0.is_empty() { Ok(Vec::new()) } else { self.0.remove(0) };
            let new = next.map(|all| all.into_iter().filter(|s| s.at_us > since_us).collect::<Vec<_>>())?;
            self.1 = new.iter().map(|s| s.at_us).max().unwrap_or(self.1);
            Ok(new)
        }

        fn clocks_us(&self) -> [u64; 2] {
            [0, self.1]
        }
    }

    fn script(said: Vec<Result<Vec<Sample>, String>>) -> Script {
        Script(said, 0)
    }

    const MS: u64 = 1_000_000;

    fn sample(pid: u32, at_us: u64, percent: u32) -> Sample {
        Sample { pid, at_us, percent }
    }

    #[test]
    fn who_was_kept_off_half_the_time_and_busy_half_of_it_is_busy() {
        let mut m =
            SampleMeter::new(script(vec![Ok(vec![sample(1, 2_000_000, 50), sample(2, 2_000_100, 25)]), Ok(vec![])]));
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
        let mut m =
            SampleMeter::new(script(vec![Ok(vec![sample(1, 2_000_000, 80)]), Ok(vec![sample(2, 2_200_000, 90)])]));
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

    /// A driver with periods of its own, as long as they like, and a clock of its own, which says the truth of two processes
    /// that work whenever they may.
    struct Periods {
        period_us: u64,
        now_us: u64,
        begun_us: u64,
        on_us: [u64; 2],
        taken: Vec<Sample>,
        /// Samples that it has whatever happens.
        kept: Vec<Sample>,
        /// Its clock, as much as it is ahead of the one that goes on steadily.
        ahead_us: u64,
    }

    impl Periods {
        fn run(&mut self, who: usize, us: u64) {
            for _ in 0..us / 1000 {
                (self.now_us, self.on_us[who]) = (self.now_us + 1000, self.on_us[who] + 1000);
                if self.now_us - self.begun_us >= self.period_us {
                    let on = self.on_us.iter().enumerate().filter(|(_, on)| **on > 0);
                    let percent = |on| (on * 100 / self.period_us) as u32;
                    self.taken =
                        on.map(|(i, on)| sample(i as u32, self.now_us + self.ahead_us, percent(*on))).collect();
                    (self.begun_us, self.on_us) = (self.now_us, [0; 2]);
                }
            }
        }
    }

    impl Samples for Periods {
        fn since(&mut self, since_us: u64) -> Result<Vec<Sample>, String> {
            Ok(self.taken.iter().chain(&self.kept).copied().filter(|s| s.at_us > since_us).collect())
        }

        fn clocks_us(&self) -> [u64; 2] {
            [self.now_us + self.ahead_us, self.now_us]
        }
    }

    #[test]
    fn periods_that_end_in_the_middle_of_windows_are_told_apart() {
        // In step with the windows, too, as none is that ends when a window does.
        for (period_us, begun_us) in
            [(100_000, 30_000), (167_000, 0), (200_000, 50_000), (333_000, 0), (1_000_000, 70_000)]
        {
            let (on_us, taken, ahead_us) = ([0; 2], Vec::new(), 1_700_000_000_000_000);
            let driver = Periods { period_us, now_us: begun_us, begun_us, on_us, taken, kept: Vec::new(), ahead_us };
            let mut m = SampleMeter::new(driver);
            let mut on_ns = [0; 2];
            let mut before = [0; 2];
            for window in 0..400 {
                let (who, us) = [(0, 150_000), (0, 150_000), (1, 100_000)][window % 3];
                // Looked at now and then, as often as that is asked for.
                let looks = us / 50_000;
                for _ in 0..looks {
                    m.samples.run(who, us / looks);
                    m.glance();
                }
                (0..2).for_each(|i| m.passed(i as u32, i == who, us * 1000));
                m.refresh(true);
                on_ns[who] += us * 1000;
                if window == 50 {
                    on_ns = [0; 2];
                    before = [0, 1].map(|i| m.used_ns(i).unwrap());
                }
            }
            let used = [0, 1].map(|i| m.used_ns(i).unwrap() - before[i as usize]);
            let parts = [0, 1].map(|i| used[i] as f64 / on_ns[i] as f64);
            assert!(parts.iter().all(|p| (0.9..=1.0).contains(p)), "{period_us} µs: {parts:?} of it seen as work");
        }
    }

    #[test]
    fn a_clock_that_is_set_back_is_followed_and_one_sample_of_another_time_is_not() {
        const HOUR_US: u64 = 3_600_000_000;
        // Set back or not; what the driver goes on having: nothing else, what it had, a sample from far in the future.
        for (back, keeps) in [(false, 0), (true, 0), (true, 1), (false, 2), (true, 2)] {
            let (on_us, taken, ahead_us) = ([0; 2], Vec::new(), 1_700_000_000_000_000);
            let driver =
                Periods { period_us: 200_000, now_us: 0, begun_us: 0, on_us, taken, kept: Vec::new(), ahead_us };
            let mut m = SampleMeter::new(driver);
            let run = |m: &mut SampleMeter<Periods>, windows| {
                for window in 0..windows {
                    for _ in 0..2 {
                        m.samples.run(window % 2, 50_000);
                        m.glance();
                    }
                    (0..2).for_each(|i| m.passed(i as u32, i == window % 2, 100_000_000));
                    m.refresh(true);
                }
            };
            run(&mut m, 40);
            m.samples.kept = match keeps {
                0 => Vec::new(),
                1 => m.samples.taken.clone(),
                _ => vec![sample(7, ahead_us + 2 * HOUR_US, 100)],
            };
            if back {
                m.samples.ahead_us -= HOUR_US;
            }
            run(&mut m, 30);
            let before = m.used_ns(0).unwrap();
            run(&mut m, 40);
            let part = (m.used_ns(0).unwrap() - before) as f64 / 2e9;
            assert!((0.9..=1.0).contains(&part), "set back: {back}, keeps: {keeps}, {part} of it seen as work");
        }
    }

    #[test]
    fn old_wild_and_failing_samples_do_no_harm() {
        let mut m = SampleMeter::new(script(vec![
            Ok(vec![sample(1, 2_000_000, 4_000_000_000), sample(9, u64::MAX - 1, 100)]),
            Err("no".into()),
            Err("no".into()),
            Ok(vec![sample(1, 2_000_000, 0)]),
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
