//! How long somebody who is let through at once may go on like that.
//!
//! Rules:
//! 1. A reserve grows with the time that passes, at [`SHARE`] of it, up to [`MOST_NS`]; use is taken from it, and more than
//!    there was is owed.
//! 2. Who has used it up is served like everybody else until half of it has grown again, so that there is no going to and
//!    fro.
//! 3. So over any stretch of time, somebody who is first in line is so for at most `SHARE` of it and `MOST_NS`.

use crate::share::WHOLE;

/// Part of the device, in millionths, that a reserve grows by.
pub const SHARE: u64 = 300_000;
/// Most that it holds, ns.
pub const MOST_NS: i64 = 500_000_000;

/// What is left of being first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve {
    left_ns: i64,
    spent: bool,
}

impl Default for Reserve {
    fn default() -> Self {
        Reserve { left_ns: MOST_NS, spent: false }
    }
}

impl Reserve {
    /// Whether its owner is first in line.
    pub fn is_first(&self) -> bool {
        !self.spent
    }

    /// What is left, ns; less than nothing for what is owed.
    pub fn left_ns(&self) -> i64 {
        self.left_ns
    }

    /// `passed_ns` have passed, in which its owner has used `used_ns`.
    pub fn pass(&mut self, passed_ns: u64, used_ns: u64) {
        let grown = i128::from(passed_ns) * i128::from(SHARE) / i128::from(WHOLE);
        // Served like others, it pays others' price, and its reserve grows all the while.
        let used = if self.spent { 0 } else { i128::from(used_ns) };
        let bound = i128::from(MOST_NS);
        self.left_ns = (i128::from(self.left_ns) + grown - used).clamp(-bound, bound) as i64;
        self.spent = self.left_ns < if self.spent { MOST_NS / 2 } else { 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_that_is_seldom_there_is_always_first_and_one_that_never_rests_is_so_for_its_part() {
        let (mut seldom, mut always) = (Reserve::default(), Reserve::default());
        let mut first = 0;
        for _ in 0..10_000 {
            seldom.pass(10_000_000, 2_000_000);
            assert!(seldom.is_first());
            first += u64::from(always.is_first());
            always.pass(10_000_000, 10_000_000);
        }
        assert!((2000..3500).contains(&first), "{first}");
    }

    proptest! {
        #[test]
        fn nobody_is_first_for_more_than_the_reserve_allows(steps in proptest::collection::vec((1u64..200_000_000, 0u64..=100), 1..200)) {
            let mut r = Reserve::default();
            let (mut passed, mut used_first) = (0u128, 0u128);
            for (ns, percent) in steps {
                let used = ns * percent / 100;
                if r.is_first() {
                    used_first += u128::from(used);
                }
                r.pass(ns, used);
                passed += u128::from(ns);
                // The last step may go beyond what was left.
                let bound = passed * u128::from(SHARE) / u128::from(WHOLE) + MOST_NS as u128 + 200_000_000;
                prop_assert!(used_first <= bound, "{used_first} of {bound}");
                prop_assert!(r.left_ns() <= MOST_NS);
            }
        }
    }
}
