//! From records of context switches to who held the GPU from when to when. Pure.
//!
//! Rules:
//! 1. A start opens a hold, an end closes it. There is one engine, so at most one is open.
//! 2. Where a record is missing (the counter says so) nothing is invented: a start closes what is still open, and an end
//!    without a start counts for nothing, save the very first, whose hold has lasted since before the log.
//! 3. A hold lasts while its context is on the GPU, with work or without: who comes last holds it until somebody else comes.
//! 4. Time does not go back: a record that says so is taken to be of the moment of the one before.
//! 5. A reset of the engine closes what is open.

use crate::sys::{Record, TAG_CONTEXT_START, TAG_END, TAG_RESET, TAG_SAVE_END, TAG_START};

/// A process of the kernel's own.
pub const KERNEL_PID: u32 = u32::MAX;

/// A process's stay on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The process; 0 when it may not be shown, [`KERNEL_PID`] for the kernel.
    pub pid: u32,
    /// Which of its channel groups.
    pub context: u32,
    /// When it came, ns on the GPU's clock.
    pub from_ns: u64,
    /// When it had gone, or until when it is known to have stayed.
    pub to_ns: u64,
}

impl Hold {
    /// Its length, ns.
    pub fn ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }
}

/// Reads records in order.
#[derive(Clone, Debug, Default)]
pub struct Holds {
    began_ns: u64,
    last_ns: u64,
    open: Option<Hold>,
    seen: bool,
    sequence: Option<u16>,
    /// Records that are missing, by their counter.
    pub missing: u64,
    /// Records that do not fit those before: an end of somebody else's hold, time that goes back, unknown tags.
    pub odd: u64,
}

impl Holds {
    /// A log that began at this moment of the GPU's clock.
    pub fn new(began_ns: u64) -> Self {
        Holds { began_ns, last_ns: began_ns, ..Holds::default() }
    }

    /// The next record; the hold that it ends.
    pub fn feed(&mut self, r: &Record) -> Option<Hold> {
        if let Some(last) = self.sequence {
            self.missing += u64::from(r.sequence.wrapping_sub(last).wrapping_sub(1));
        }
        self.sequence = Some(r.sequence);
        self.odd += u64::from(r.at_ns < self.last_ns);
        let at = r.at_ns.max(self.last_ns);
        self.last_ns = at;
        let first = !std::mem::replace(&mut self.seen, true);
        let close = |h: Hold| Some(Hold { to_ns: at, ..h });
        match r.tag {
            TAG_START | TAG_CONTEXT_START => {
                let (pid, context) = (r.pid, r.context);
                self.open.replace(Hold { pid, context, from_ns: at, to_ns: at }).and_then(close)
            }
            TAG_END | TAG_SAVE_END => match self.open.take() {
                Some(h) => {
                    self.odd += u64::from((h.pid, h.context) != (r.pid, r.context));
                    close(h)
                }
                None if first => {
                    close(Hold { pid: r.pid, context: r.context, from_ns: self.began_ns.min(at), to_ns: at })
                }
                None => {
                    self.odd += 1;
                    None
                }
            },
            TAG_RESET => self.open.take().and_then(close),
            _ => {
                self.odd += 1;
                None
            }
        }
    }

    /// Who holds the GPU as far as the records say, until `now_ns`.
    pub fn open(&self, now_ns: u64) -> Option<Hold> {
        self.open.map(|h| Hold { to_ns: now_ns.max(h.from_ns), ..h })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(tag: u8, pid: u32, at_ns: u64, sequence: u16) -> Record {
        Record { tag, pid, context: pid + 1, at_ns, sequence, ..Record::default() }
    }

    fn feed(h: &mut Holds, all: &[Record]) -> Vec<(u32, u64, u64)> {
        all.iter().filter_map(|r| h.feed(r)).map(|h| (h.pid, h.from_ns, h.to_ns)).collect()
    }

    #[test]
    fn whoever_was_there_before_the_log_is_charged_from_its_beginning() {
        let mut h = Holds::new(1000);
        let r = |tag, pid, at, seq| record(tag, pid, at, seq);
        let got = feed(&mut h, &[r(TAG_END, 7, 1500, 9), r(TAG_START, 8, 1600, 10), r(TAG_END, 8, 2000, 11)]);
        assert_eq!(got, [(7, 1000, 1500), (8, 1600, 2000)]);
        assert_eq!((h.missing, h.odd, h.open(3000)), (0, 0, None));
    }

    #[test]
    fn missing_records_are_counted_and_nothing_is_invented() {
        let mut h = Holds::new(0);
        let r = |tag, pid, at, seq| record(tag, pid, at, seq);
        // The end of 1 is missing, then the start of 3.
        let all = [r(TAG_START, 1, 10, 65_534), r(TAG_START, 2, 30, 0), r(TAG_END, 2, 40, 1), r(TAG_END, 3, 60, 3)];
        assert_eq!(feed(&mut h, &all), [(1, 10, 30), (2, 30, 40)]);
        assert_eq!((h.missing, h.odd), (2, 1));
    }

    #[test]
    fn time_that_goes_back_an_unknown_tag_and_a_reset_do_no_harm() {
        let mut h = Holds::new(0);
        let all = [record(TAG_START, 1, 100, 0), record(TAG_END, 1, 50, 1), record(99, 5, 110, 2)];
        assert_eq!(feed(&mut h, &all), [(1, 100, 100)]);
        assert_eq!(h.odd, 2);
        assert_eq!(h.feed(&record(TAG_START, 4, 120, 3)), None);
        assert_eq!(h.open(150).unwrap().ns(), 30);
        assert_eq!(h.feed(&record(TAG_RESET, 0, 160, 4)).unwrap().ns(), 40);
        assert_eq!(h.open(200), None);
    }

    proptest! {
        /// Whatever the records say, no more time is given out than has passed, and no two holds overlap.
        #[test]
        fn holds_never_overlap(all in proptest::collection::vec((any::<u8>(), 0u32..4, any::<u64>(), any::<u16>()), 0..80)) {
            let mut h = Holds::new(0);
            let mut end = 0;
            for (tag, pid, at, seq) in all {
                if let Some(x) = h.feed(&record(tag % 9, pid, at, seq)) {
                    prop_assert!(x.from_ns >= end && x.to_ns >= x.from_ns);
                    end = x.to_ns;
                }
            }
            prop_assert!(h.open(u64::MAX).is_none_or(|x| x.from_ns >= end));
        }
    }
}
