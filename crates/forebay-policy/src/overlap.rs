//! How much of a device each of several programs has had, from when each had work in it.
//!
//! A program sees its work from the issue to the end, and others' work on the device at the same time is in that: taken as
//! it is said, two that are there all the time would each have had all of it, and the device would be held to be overbooked.
//!
//! Rules:
//! 1. Of a while that has passed each says for how long it had work in the device, and since when what is in it is there. The
//!    latter is the end of the while; the rest was at its beginning, when credit is handed out.
//! 2. Whoever is there at a moment has an equal part of the device, and at most one of the things that it does at once: so
//!    GPUs of today serve programs, by turns. Where nobody was the device was idle.
//! 3. What one says beyond the while is of several queues, each of which counts.

use std::collections::BTreeMap;

/// Most queues of one program that count.
const MAX_QUEUES: u64 = 16;

/// What a program says of a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// It had work in the device for so long, ns, all of its queues together.
    pub ns: u64,
    /// There is work in it for so long already, ns; 0 when there is none.
    pub since_ns: u64,
}

impl Presence {
    /// When it was there, from the beginning of the while to its end.
    fn intervals(self, passed_ns: u64) -> impl Iterator<Item = (u64, u64)> {
        let tail = self.since_ns.min(self.ns).min(passed_ns);
        let rest = self.ns - tail;
        let whole = rest.checked_div(passed_ns).unwrap_or(0).min(MAX_QUEUES);
        let all = std::iter::repeat_n((0, passed_ns), whole as usize);
        let head = rest.checked_rem(passed_ns).unwrap_or(0);
        all.chain([(0, head), (passed_ns - tail, passed_ns)]).filter(|(from, to)| from < to)
    }
}

/// What each has had of a device that can do `units` things at once, in a while of `passed_ns`, ns.
pub fn own(units: u32, passed_ns: u64, said: &[Presence]) -> Vec<u64> {
    let units = u64::from(units.max(1));
    // How many come and go, and when.
    let mut edges = BTreeMap::<u64, (u64, u64)>::new();
    for (from, to) in said.iter().flat_map(|p| p.intervals(passed_ns)) {
        edges.entry(from).or_default().0 += 1;
        edges.entry(to).or_default().1 += 1;
    }
    // What one that is there all the time would have had by then.
    let (mut there, mut had, mut before) = (0u64, 0u64, 0u64);
    let mut by = BTreeMap::new();
    for (at, (come, go)) in edges {
        let ns = at - before;
        had += if there <= units { ns } else { ns.saturating_mul(units) / there };
        by.insert(at, had);
        (there, before) = ((there + come).saturating_sub(go), at);
    }
    let had = |at: u64| by.get(&at).copied().unwrap_or(0);
    let of = |p: &Presence| p.intervals(passed_ns).map(|(from, to)| had(to) - had(from)).sum();
    said.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: u64 = 1_000_000;

    fn ended(ns: u64) -> Presence {
        Presence { ns, since_ns: 0 }
    }

    fn there(ns: u64, since_ns: u64) -> Presence {
        Presence { ns, since_ns }
    }

    #[test]
    fn who_is_alone_has_all_and_equals_have_equal_parts() {
        assert_eq!(own(1, TICK, &[]), [0; 0]);
        assert_eq!(own(1, TICK, &[ended(400_000)]), [400_000]);
        assert_eq!(own(1, TICK, &[there(TICK, TICK); 2]), [500_000; 2]);
        assert_eq!(own(1, TICK, &[there(TICK, 10); 5]), [200_000; 5]);
        assert_eq!(own(2, TICK, &[there(TICK, TICK); 4]), [500_000; 4]);
        assert_eq!(own(4, TICK, &[there(TICK, TICK); 4]), [TICK; 4]);
    }

    #[test]
    fn who_comes_now_and_then_halves_only_that_time() {
        // Always there, and for three fifths of the time.
        assert_eq!(own(1, TICK, &[there(TICK, TICK), ended(600_000)]), [700_000, 300_000]);
        // The first goes before the second comes; and they meet for a fifth of the time.
        assert_eq!(own(1, TICK, &[ended(400_000), there(600_000, 600_000)]), [400_000, 600_000]);
        assert_eq!(own(1, TICK, &[ended(600_000), there(600_000, 600_000)]), [500_000; 2]);
        // Both begin when credit comes, and the device is idle when they have used it up.
        assert_eq!(own(1, TICK, &[ended(600_000); 2]), [300_000; 2]);
        // It went, and came back.
        assert_eq!(own(1, TICK, &[there(500_000, 200_000), there(TICK, TICK)]), [250_000, 750_000]);
    }

    #[test]
    fn a_second_queue_is_as_much_as_a_second_program() {
        let two = there(2 * TICK, TICK);
        let [first, second] = own(1, TICK, &[two, there(TICK, TICK)])[..] else { panic!("two") };
        assert_eq!((first / 1000, second / 1000), (666, 333));
    }

    proptest! {
        #[test]
        fn nobody_has_more_than_there_is_and_nothing_that_is_said_breaks_it(
            said in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20),
            passed in any::<u64>(),
            units in any::<u32>(),
        ) {
            let said: Vec<Presence> = said.into_iter().map(|(ns, since_ns)| Presence { ns, since_ns }).collect();
            let passed = passed >> 24;
            let own = own(units, passed, &said);
            prop_assert!(own.iter().zip(&said).all(|(own, said)| *own <= said.ns));
            let all: u128 = own.iter().map(|ns| u128::from(*ns)).sum();
            prop_assert!(all <= u128::from(passed) * u128::from(units.max(1)));
        }

        #[test]
        fn a_device_is_idle_only_while_nobody_is_there(
            said in prop::collection::vec((0..TICK, 0..TICK), 1..12),
        ) {
            let said: Vec<Presence> = said.into_iter().map(|(ns, since_ns)| Presence { ns, since_ns }).collect();
            let all: u64 = own(1, TICK, &said).iter().sum();
            // By millionths of the while, one by one.
            let mut is_there = vec![false; TICK as usize];
            for (from, to) in said.iter().flat_map(|p| p.intervals(TICK)) {
                is_there[from as usize..to as usize].fill(true);
            }
            let busy = is_there.iter().filter(|b| **b).count() as u64;
            prop_assert!(busy.abs_diff(all) <= 1000, "{busy} {all}");
        }
    }
}
