//! How long programs' threads were ready and had no core: what tells one that is held up by others from one that has nothing
//! to do. Of one that a limit of its own holds up, too, nothing can be told.
//!
//! Asking costs a file a thread, so:
//! 1. Only those are asked about of whom it matters ([`View::uses_little`]), one at a time and in turn.
//! 2. After one was asked about the next is at the earliest so much later that all asking takes well under a hundredth of a
//!    core, however many threads somebody has.
//! 3. What was found holds for [`HOLDS_NS`]; of somebody asked about once nothing is known yet.
//!
//! [`View::uses_little`]: forebay_policy::credit::View::uses_little

use std::collections::BTreeMap;

use super::World;

/// Least time between two questions.
const APART_NS: u64 = 50_000_000;
/// The same for each thread that was asked about: a file of it takes about ten microseconds.
const APART_A_THREAD_NS: u64 = 2_000_000;
/// How long an answer holds.
const HOLDS_NS: u64 = 5_000_000_000;
/// Rates are in parts of this.
const SECOND_NS: u128 = 1_000_000_000;

/// Time that threads of a process have been ready and had no core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// Since they began, over all of them, ns.
    pub ns: u64,
    /// Threads that were asked about.
    pub threads: u32,
}

/// An answer.
struct Found {
    at_ns: u64,
    ready_ns: u64,
    /// Since the answer before it, ns a second; over all threads, so it may be many seconds.
    rate: Option<u64>,
}

/// What is known of whom.
#[derive(Default)]
pub(super) struct Waits {
    /// When somebody may be asked about again.
    due_ns: u64,
    /// Who was last.
    last: u64,
    found: BTreeMap<u64, Found>,
}

impl Waits {
    /// Asks about one of those that matter, if it is time to. `ids` are in order.
    pub(super) fn ask(&mut self, now_ns: u64, ids: &[u64], world: &mut impl World) {
        // A clock that has jumped back is followed.
        if ids.is_empty() || now_ns < self.due_ns && self.due_ns - now_ns < HOLDS_NS {
            return;
        }
        let holds = |f: &Found| now_ns.checked_sub(f.at_ns).is_some_and(|ns| ns < HOLDS_NS);
        self.found.retain(|_, f| holds(f));
        let Some(&id) = ids.get(ids.partition_point(|id| *id <= self.last)).or(ids.first()) else { return };
        self.last = id;
        self.due_ns = now_ns.saturating_add(APART_NS);
        let Some(Ready { ns, threads }) = u32::try_from(id).ok().and_then(|pid| world.ready(pid)) else { return };
        self.due_ns = now_ns.saturating_add(APART_NS.max(APART_A_THREAD_NS.saturating_mul(threads.into())));
        let before = self.found.get(&id);
        let rate = before.filter(|f| now_ns > f.at_ns).map(|f| {
            // Threads that have ended meanwhile took what they had waited with them.
            let more = u128::from(ns.saturating_sub(f.ready_ns));
            u64::try_from(more * SECOND_NS / u128::from(now_ns - f.at_ns)).unwrap_or(u64::MAX)
        });
        self.found.insert(id, Found { at_ns: now_ns, ready_ns: ns, rate });
    }

    /// For how long of the time that has passed threads of this one were ready without a core, as far as is known, ns.
    pub(super) fn of(&self, id: u64, now_ns: u64, passed_ns: u64) -> u64 {
        let found = self.found.get(&id).filter(|f| now_ns.saturating_sub(f.at_ns) < HOLDS_NS);
        let rate = found.and_then(|f| f.rate).unwrap_or(0);
        u64::try_from(u128::from(rate) * u128::from(passed_ns) / SECOND_NS).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use forebay_proto::page::AccountWords;

    use super::super::Described;
    use super::*;

    /// Processes with so many threads each that have waited so long, and who was asked about.
    struct Asked(BTreeMap<u32, Ready>, Vec<u32>);

    impl World for Asked {
        fn describe(&mut self, _: u32) -> Option<Described> {
            None
        }
        fn cpu_time_ns(&mut self, _: u32) -> Option<u64> {
            None
        }
        fn ready(&mut self, pid: u32) -> Option<Ready> {
            self.1.push(pid);
            self.0.get(&pid).copied()
        }
        fn wake(&mut self, _: &AccountWords) {}
        fn watch(&mut self, _: u32) {}
        fn end(&mut self, _: u32, _: u64) -> Result<(), String> {
            Err("nobody is ended here".into())
        }
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn all_are_asked_about_in_turn_and_no_more_often_than_is_cheap() {
        let mut world = Asked((2..5).map(|pid| (pid, Ready { ns: 0, threads: 1 })).collect(), Vec::new());
        let mut w = Waits::default();
        for tick in 1..=240 {
            w.ask(tick * 5 * MS, &[2, 3, 4, 9], &mut world);
        }
        // Twelve hundred milliseconds; the last one is not there, and is asked about in its turn.
        assert_eq!(world.1.len(), 24);
        assert_eq!(world.1[..6], [2, 3, 4, 9, 2, 3]);
        // With a thousand threads it would be ten milliseconds of work: two seconds to the next.
        world.0.insert(2, Ready { ns: 0, threads: 1000 });
        world.1.clear();
        (1..=200).for_each(|tick| w.ask(3_000 * MS + tick * 5 * MS, &[2], &mut world));
        assert_eq!(world.1.len(), 1);
        (0..10).for_each(|tick| w.ask(tick * 5 * MS, &[2], &mut world));
        assert_eq!(world.1.len(), 2, "the clock jumped back");
    }

    #[test]
    fn the_time_between_two_answers_counts_and_not_for_ever() {
        let mut world = Asked(BTreeMap::new(), Vec::new());
        let mut w = Waits::default();
        let mut ask = |w: &mut Waits, at_ms: u64, ns| {
            world.0.insert(7, Ready { ns, threads: 2 });
            w.ask(at_ms * MS, &[7], &mut world);
        };
        ask(&mut w, 100, 5_000 * MS);
        assert_eq!(w.of(7, 100 * MS, 5 * MS), 0, "once is not enough");
        ask(&mut w, 200, 5_150 * MS);
        assert_eq!(w.of(7, 200 * MS, 5 * MS), 7_500_000, "two threads, three quarters of the time");
        assert_eq!((w.of(8, 200 * MS, 5 * MS), w.of(7, 5_300 * MS, 5 * MS)), (0, 0));
        ask(&mut w, 300, 0);
        assert_eq!(w.of(7, 300 * MS, 5 * MS), 0, "a thread has ended");
        ask(&mut w, 9_000, 50_000 * MS);
        assert_eq!(w.of(7, 9_000 * MS, 5 * MS), 0, "what was known is too old");
    }
}
