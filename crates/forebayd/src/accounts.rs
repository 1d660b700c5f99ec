//! GPU time of every process, from the GPU's own log of context switches.
//!
//! Rules:
//! 1. What a process has held is the sum of its holds ([`forebay_rm::holds`]), the one that is open included; what was
//!    said once is never taken back.
//! 2. A hold is time on the GPU, with work or without. So whoever is alone on it, or was there last, counts as using it;
//!    who divides the GPU knows whom it let on and corrects for that.
//! 3. Where records are missing, less is charged, never more; how many is told. What was said of a hold whose end went
//!    missing stays said, and what comes is added to that.
//! 4. Records are asked for (0.2 ms) where the moment counts, at the end of a window; otherwise they come by themselves, 30
//!    times a second.
//! 5. A log that fails is opened anew, once a second; until then nobody is charged. Where nothing is asked of it and it says
//!    nothing, whether the driver still has it is asked once a second.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forebay_rm::holds::{Hold, Holds};
use forebay_rm::sys::Record;
use forebay_rm::{Client, Error, SwitchLog};

use crate::agent::Meter;

/// Processes that are remembered.
const MAX_ACCOUNTS: usize = 4096;
/// Channel groups of a process that are told apart.
const MAX_CONTEXTS: usize = 256;
/// Holds that are kept for somebody: more than come in any window.
const MAX_HOLDS: usize = 1 << 16;
/// Whether the log is there is asked at least so often.
const ASK_NS: u64 = 1_000_000_000;
/// What is said of an open hold may be so much ahead of the records, which come 30 times a second.
const AHEAD_NS: u64 = 100_000_000;
/// A log that failed is tried again after this, by the GPU's clock.
const RETRY_NS: u64 = 1_000_000_000;

#[derive(Default)]
struct Account {
    closed_ns: u64,
    said_ns: u64,
    switches: u64,
    left_ns: u64,
    longest_away_ns: u64,
    /// Channel groups that have been on the GPU.
    contexts: BTreeSet<u32>,
}

/// The GPU's log, summed up.
pub struct LogMeter {
    own: Arc<Client>,
    log: Option<SwitchLog>,
    holds: Holds,
    accounts: BTreeMap<u32, Account>,
    records: Vec<Record>,
    now_ns: u64,
    failed_ns: Option<u64>,
    trouble: Option<String>,
    /// When the log was last asked for something, by the GPU's clock.
    asked_ns: u64,
    /// Whether the driver makes records visible when asked; else they come by themselves, a little later.
    flushes: bool,
    /// Records that were dropped or went missing before this log.
    lost: u64,
    /// How often the log was opened anew.
    reopened: u64,
    /// Longest stays since it was brought up to the moment last but one, and when that was; none where it is not at the moment.
    stays: Option<BTreeMap<u32, u64>>,
    moment_ns: u64,
    /// The last holds, where somebody wants to have them.
    recent: Option<Vec<Hold>>,
}

impl LogMeter {
    /// Switches the log on.
    ///
    /// # Errors
    /// What the driver refused; it takes root.
    pub fn open(own: Arc<Client>) -> Result<Self, Error> {
        let log = SwitchLog::open(&own)?;
        let now_ns = log.now_ns()?;
        let flushes = log.flush().is_ok();
        Ok(LogMeter {
            own,
            log: Some(log),
            holds: Holds::new(now_ns),
            accounts: BTreeMap::new(),
            records: Vec::new(),
            now_ns,
            failed_ns: None,
            asked_ns: now_ns,
            trouble: None,
            flushes,
            lost: 0,
            reopened: 0,
            stays: None,
            moment_ns: now_ns,
            recent: None,
        })
    }

    /// From now on holds are kept until they are taken.
    pub(crate) fn keep_holds(&mut self) {
        self.recent = Some(Vec::new());
    }

    /// The holds since this was asked last, the one that is open included.
    pub(crate) fn take_holds(&mut self) -> Vec<Hold> {
        let open = self.holds.open(self.now_ns);
        let mut all = self.recent.as_mut().map(std::mem::take).unwrap_or_default();
        all.extend(open);
        all
    }

    /// Up to when it is known who held the GPU, on its own clock.
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Records of switches that were lost so far.
    pub fn lost(&self) -> u64 {
        self.lost + self.holds.missing
    }

    fn reopen(&mut self) -> Result<(), Error> {
        let log = SwitchLog::open(&self.own)?;
        self.now_ns = log.now_ns()?;
        self.lost += self.holds.missing;
        self.holds = Holds::new(self.now_ns);
        self.log = Some(log);
        self.reopened += 1;
        Ok(())
    }

    fn advance(&mut self, to_the_moment: bool) -> Result<(), Error> {
        // What is not known anew is not known any more.
        self.stays = None;
        let Some(log) = &mut self.log else { return Ok(()) };
        if self.flushes && to_the_moment {
            log.flush()?;
            self.asked_ns = self.now_ns;
        } else if self.now_ns.saturating_sub(self.asked_ns) >= ASK_NS {
            log.say_read()?;
            self.asked_ns = self.now_ns;
        }
        self.records.clear();
        let read = log.read(&mut self.records);
        let now = log.now_ns();
        let mut stays = BTreeMap::<u32, u64>::new();
        let began = self.moment_ns;
        let mut stay = |h: &Hold| {
            let of = stays.entry(h.pid).or_default();
            *of = h.to_ns.saturating_sub(h.from_ns.max(began)).max(*of);
        };
        for r in &self.records {
            let held_before = self.holds.open(0);
            if let Some(h) = self.holds.feed(r) {
                charge(&mut self.accounts, &h);
                stay(&h);
                self.recent.iter_mut().filter(|all| all.len() < MAX_HOLDS).for_each(|all| all.push(h));
            }
            if let Some(h) = self.holds.open(0).filter(|h| held_before.is_none_or(|b| b.from_ns != h.from_ns)) {
                come(&mut self.accounts, &h);
            }
        }
        self.lost += read?;
        self.now_ns = now?.max(self.now_ns);
        self.holds.open(self.now_ns).iter().for_each(stay);
        let at_the_moment = self.flushes && to_the_moment;
        self.stays = at_the_moment.then_some(stays);
        self.moment_ns = self.now_ns;
        Ok(())
    }
}

fn come(accounts: &mut BTreeMap<u32, Account>, h: &Hold) {
    if accounts.len() >= MAX_ACCOUNTS && !accounts.contains_key(&h.pid) {
        // Whoever has been away for longest makes room.
        if let Some(pid) = accounts.iter().min_by_key(|(_, a)| a.left_ns).map(|(pid, _)| *pid) {
            accounts.remove(&pid);
        }
    }
    let a = accounts.entry(h.pid).or_default();
    a.switches += 1;
    if a.contexts.len() < MAX_CONTEXTS {
        a.contexts.insert(h.context);
    }
    if a.left_ns > 0 {
        a.longest_away_ns = a.longest_away_ns.max(h.from_ns.saturating_sub(a.left_ns));
    }
}

fn charge(accounts: &mut BTreeMap<u32, Account>, h: &Hold) {
    let a = accounts.entry(h.pid).or_default();
    a.closed_ns += h.ns();
    a.left_ns = h.to_ns;
}

impl Meter for LogMeter {
    fn refresh(&mut self, to_the_moment: bool) {
        // A GPU that does not say what time it is has no log, either.
        let clock = if self.log.is_none() { self.own.now_ns().ok() } else { None };
        if let Some(now) = clock.filter(|now| self.failed_ns.is_none_or(|at| now.saturating_sub(at) >= RETRY_NS)) {
            self.failed_ns = Some(now);
            if self.reopen().is_ok() {
                self.failed_ns = None;
                let before = self.trouble.take().map(|t| format!("{t}; ")).unwrap_or_default();
                self.trouble = Some(format!("{before}the log of context switches can be read again"));
            }
        }
        if let Err(e) = self.advance(to_the_moment) {
            self.trouble = Some(format!("the log of context switches cannot be read, nobody is charged: {e}"));
            self.failed_ns = self.own.now_ns().ok();
            self.log = None;
        }
    }

    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        let open = self.holds.open(self.now_ns).filter(|h| h.pid == pid && self.log.is_some()).map_or(0, |h| h.ns());
        let Some(a) = self.accounts.get_mut(&pid) else { return Some(open) };
        // It may have been a little ahead of the records. By more it was of a hold whose end was never heard of: it must not
        // have to be caught up with, which may be as long as somebody was alone on the GPU.
        let ahead = a.said_ns.saturating_sub(a.closed_ns + open);
        if ahead > AHEAD_NS {
            a.closed_ns += ahead;
        }
        a.said_ns = a.said_ns.max(a.closed_ns + open);
        Some(a.said_ns)
    }

    fn switches(&self, pid: u32) -> Option<u64> {
        Some(self.accounts.get(&pid).map_or(0, |a| a.switches))
    }

    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        let now = self.now_ns;
        let here = self.holds.open(now).is_some_and(|h| h.pid == pid);
        let a = self.accounts.get_mut(&pid)?;
        let since = if here || a.left_ns == 0 { 0 } else { now.saturating_sub(a.left_ns) };
        Some(std::mem::take(&mut a.longest_away_ns).max(since))
    }

    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        Some(self.stays.as_ref()?.get(&pid).copied().unwrap_or(0))
    }

    fn gaps(&self) -> u64 {
        self.lost() + self.reopened
    }

    fn contexts(&self, pid: u32) -> usize {
        self.accounts.get(&pid).map_or(0, |a| a.contexts.len())
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
    use forebay_rm::fake::{FakeRm, Load, SWITCH_US};

    fn setup() -> (FakeRm, LogMeter) {
        let rm = FakeRm::default();
        rm.start(10, 1, 2, Load { kernel_us: 100, depth: 1, think_us: 20 });
        rm.start(20, 2, 2, Load::saturating(5000));
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        (rm, LogMeter::open(own).unwrap())
    }

    #[test]
    fn sums_are_the_gpus_own_and_never_go_back() {
        let (rm, mut m) = setup();
        let mut before = [0, 0];
        for step in 0..200 {
            rm.run(1700 + step * 13);
            m.refresh(true);
            for (was, pid) in before.iter_mut().zip([10, 20]) {
                let now = m.used_ns(pid).unwrap();
                assert!(now >= *was);
                *was = now;
                let truth = rm.gpu_time(pid).unwrap() * 1000;
                let slack = truth / 10 + 2 * SWITCH_US * 1000;
                // Who was there before the log shows at its first end.
                assert!(step < 3 || now.abs_diff(truth) <= slack, "{pid}: {now} instead of {truth}");
            }
        }
        assert!(m.switches(10).unwrap() > 50 && m.switches(99) == Some(0));
        assert!(m.lost() == 0 && m.trouble().is_none());
        // A turn of the other one, there and back.
        let away = m.longest_away_ns(10).unwrap();
        assert!((2_000_000..3_000_000).contains(&away), "{away}");
        m.forget(10);
        assert_eq!(m.accounts.len(), 1);
    }

    #[test]
    fn a_log_that_fails_is_told_of_once_and_opened_again() {
        let (rm, mut m) = setup();
        rm.run(100_000);
        m.refresh(true);
        let used = m.used_ns(20).unwrap();
        // Nobody is on it for longer than a slice beside another.
        assert!((1..3_000_000).contains(&m.longest_stay_ns(20).unwrap()) && m.longest_stay_ns(99) == Some(0));
        // The driver forgets the buffer, as after a reset.
        rm.forget_logs();
        rm.run(100_000);
        m.refresh(true);
        assert!(m.trouble().unwrap().contains("cannot be read"));
        assert_eq!(m.longest_stay_ns(20), None);
        m.refresh(true);
        assert_eq!((m.trouble(), m.used_ns(20).unwrap() >= used), (None, true));
        rm.run(RETRY_NS / 1000);
        m.refresh(true);
        assert!(m.trouble().unwrap().contains("again"));
        // While nobody asks for the moment it is noticed all the same.
        rm.forget_logs();
        for _ in 0..45 {
            rm.run(25_000);
            m.refresh(false);
        }
        assert!(m.trouble().unwrap().contains("cannot be read"));
        rm.run(RETRY_NS / 1000);
        m.refresh(false);
        assert!(m.trouble().unwrap().contains("again"));
        let used = m.used_ns(20).unwrap();
        rm.run(100_000);
        m.refresh(true);
        assert!(m.used_ns(20).unwrap() > used + 50_000_000);
    }

    /// It was alone on the GPU for a minute, and nobody heard how that ended.
    #[test]
    fn who_was_alone_for_long_is_charged_again_at_once_after_records_or_the_log_were_lost() {
        for forget in [false, true] {
            let (rm, mut m) = setup();
            rm.set_load(20, Load::IDLE);
            rm.run(60_000_000);
            m.refresh(true);
            let alone = m.used_ns(10).unwrap();
            assert!(alone > 59_000_000_000);
            rm.set_load(20, Load::saturating(5000));
            if forget {
                rm.forget_logs();
            } else {
                rm.lose_records(6);
            }
            for _ in 0..40 {
                rm.run(50_000);
                m.refresh(true);
            }
            let (used, truth) = (m.used_ns(10).unwrap(), rm.gpu_time(10).unwrap());
            for _ in 0..20 {
                rm.run(50_000);
                m.refresh(true);
            }
            let more = m.used_ns(10).unwrap() - used;
            let had = (rm.gpu_time(10).unwrap() - truth) * 1000;
            assert!(had > 30_000_000 && more.abs_diff(had) < had / 4, "{more} of {had}, forget: {forget}");
        }
    }

    #[test]
    fn more_processes_than_are_remembered_do_not_grow_it() {
        let (_, mut m) = setup();
        for pid in 0..2 * MAX_ACCOUNTS as u32 {
            let at = u64::from(pid) * 1000 + 1;
            let h = Hold { pid, context: 0, from_ns: at, to_ns: at + 500 };
            come(&mut m.accounts, &h);
            charge(&mut m.accounts, &h);
        }
        assert_eq!(m.accounts.len(), MAX_ACCOUNTS);
        assert!(m.accounts.contains_key(&(2 * MAX_ACCOUNTS as u32 - 1)));
    }
}
