//! The GPU's log with its gaps filled from a second source.
//!
//! Rules:
//! 1. Whoever came onto the GPU or left it since the last look is charged by the log.
//! 2. Who held the GPU all that time without a switch (alone on it, or there last) holds it with work or without, and the log
//!    cannot tell: of that time the samples say how much was work.
//! 3. Samples say less than the log, never more: they are an average, and late.

use std::collections::BTreeMap;

use crate::agent::Meter;

#[derive(Default)]
struct Account {
    used_ns: u64,
    /// What log, samples and the log's count of switches said last.
    last: (u64, u64, Option<u64>),
    sampled: bool,
}

/// A log and samples of the same processes.
pub struct Filled<L, S> {
    log: L,
    samples: S,
    accounts: BTreeMap<u32, Account>,
}

impl<L: Meter, S: Meter> Filled<L, S> {
    /// Gaps of `log` are filled from `samples`.
    pub fn new(log: L, samples: S) -> Self {
        Filled { log, samples, accounts: BTreeMap::new() }
    }
}

impl<L: Meter, S: Meter> Meter for Filled<L, S> {
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        self.log.passed(pid, on, ns);
        self.samples.passed(pid, on, ns);
    }

    fn refresh(&mut self, to_the_moment: bool) {
        self.log.refresh(to_the_moment);
        self.samples.refresh(to_the_moment);
    }

    fn glance(&mut self) {
        self.log.glance();
        self.samples.glance();
    }

    fn glance_every_ns(&self) -> Option<u64> {
        self.log.glance_every_ns().into_iter().chain(self.samples.glance_every_ns()).min()
    }

    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        let log = self.log.used_ns(pid)?;
        let now = (log, self.samples.used_ns(pid).unwrap_or(log), self.log.switches(pid));
        let new = || Account { used_ns: log, last: now, sampled: false };
        let a = self.accounts.entry(pid).or_insert_with(new);
        let (held, busy) = (log.saturating_sub(a.last.0), now.1.saturating_sub(a.last.1));
        if held > 0 {
            a.sampled = now.2 == a.last.2;
            a.used_ns += if a.sampled { held.min(busy) } else { held };
        }
        a.last = now;
        Some(a.used_ns)
    }

    fn is_sampled(&self, pid: u32) -> bool {
        self.accounts.get(&pid).is_some_and(|a| a.sampled)
    }

    fn switches(&self, pid: u32) -> Option<u64> {
        self.log.switches(pid)
    }

    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        self.log.longest_away_ns(pid)
    }

    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        self.log.longest_stay_ns(pid)
    }

    fn gaps(&self) -> u64 {
        self.log.gaps()
    }

    fn contexts(&self, pid: u32) -> usize {
        self.log.contexts(pid)
    }

    fn forget(&mut self, pid: u32) {
        self.log.forget(pid);
        self.samples.forget(pid);
        self.accounts.remove(&pid);
    }

    fn trouble(&mut self) -> Option<String> {
        self.log.trouble().or_else(|| self.samples.trouble())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the test says.
    #[derive(Default)]
    struct Said {
        used: u64,
        switches: Option<u64>,
    }

    impl Meter for Said {
        fn used_ns(&mut self, _: u32) -> Option<u64> {
            Some(self.used)
        }
        fn switches(&self, _: u32) -> Option<u64> {
            self.switches
        }
    }

    #[test]
    fn a_lone_holder_is_charged_for_what_it_works_and_others_for_what_they_hold() {
        let mut m = Filled::new(Said { used: 0, switches: Some(1) }, Said::default());
        assert_eq!(m.used_ns(1), Some(0));
        // It switches: the log's time, whatever the samples say.
        (m.log.used, m.log.switches, m.samples.used) = (100, Some(2), 10);
        assert_eq!((m.used_ns(1), m.is_sampled(1)), (Some(100), false));
        // It holds: what it was busy.
        (m.log.used, m.samples.used) = (200, 40);
        assert_eq!((m.used_ns(1), m.is_sampled(1)), (Some(130), true));
        // Samples that come late never make it more than it held.
        (m.log.used, m.samples.used) = (250, 400);
        assert_eq!(m.used_ns(1), Some(180));
        // Off the GPU nothing is charged, and what was said stands.
        assert_eq!((m.used_ns(1), m.is_sampled(1)), (Some(180), true));
        m.forget(1);
        assert_eq!((m.used_ns(1), m.is_sampled(1)), (Some(250), false));
    }
}
