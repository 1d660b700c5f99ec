//! Whether a process has work all the time, or a little now and then only.
//!
//! Who is alone in its window holds the GPU in the log's eyes, with work or without; so one that has a short kernel now and
//! then would show as busy in all of its windows, and have as many as one that is.
//!
//! Rules:
//! 1. Who may be on the GPU and has work comes onto it as soon as another's slice is over. When another stays longer than
//!    [`STAY_NS`], it has none: it is light.
//! 2. It is light, too, if it uses less than [`IDLE_PERCENT`] of a window of its own in which somebody is beside it.
//! 3. For that somebody is beside an owner for [`CHECK_NS`], after [`FIRST_CHECK_NS`] of its windows, and ever more seldom
//!    while it is busy; again at its next window where it was the owner who stayed, which says nothing of it.
//! 4. A light process has no windows of its own, and is off in nobody's. It is no longer light when it has used more than
//!    [`IDLE_PERCENT`] of [`LIGHT_NS`] beside others.

use super::IDLE_PERCENT;

/// Longer than it takes to let the owner of a window on, a slice of whoever is there, and a switch.
pub const STAY_NS: u64 = 5_000_000;
/// Somebody is beside an owner for so long: enough turns of others for one whose own are short.
pub const CHECK_NS: u64 = 20_000_000;
/// So much of its windows passes before that, at first and at most.
const FIRST_CHECK_NS: u64 = 500_000_000;
const MAX_CHECK_NS: u64 = 4_000_000_000;
/// A light process is looked at over so long.
const LIGHT_NS: u64 = 100_000_000;

/// What is known of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Light {
    is: bool,
    /// What it has used of others' windows, and how long they were.
    beside_ns: (u64, u64),
    /// Its windows since it was looked at, and after how much of them that is due again.
    unchecked_ns: u64,
    check_ns: u64,
}

impl Default for Light {
    fn default() -> Self {
        Light { is: false, beside_ns: (0, 0), unchecked_ns: 0, check_ns: FIRST_CHECK_NS }
    }
}

impl Light {
    /// Rule 3.
    pub(super) fn is_to_be_checked(&self) -> bool {
        self.unchecked_ns >= self.check_ns
    }

    /// It is light, as was just seen.
    pub(super) fn found(&mut self) {
        *self = Light { is: true, ..Light::default() };
    }

    /// It has been alone in a window of its own.
    pub(super) fn was_alone(&mut self, ns: u64) {
        self.unchecked_ns = self.unchecked_ns.saturating_add(ns);
    }

    /// It was busy with somebody beside it.
    pub(super) fn was_busy(&mut self) {
        self.unchecked_ns = 0;
        self.check_ns = (2 * self.check_ns).min(MAX_CHECK_NS);
    }

    /// It has used so much of somebody else's window: whether it has work of which a light one would have less.
    pub(super) fn has_more(&mut self, used_ns: u64, passed_ns: u64) -> bool {
        let (used, passed) = (self.beside_ns.0 + used_ns, self.beside_ns.1 + passed_ns);
        self.is &= used * 100 < passed.max(LIGHT_NS) * IDLE_PERCENT;
        self.beside_ns = if self.is && passed < LIGHT_NS { (used, passed) } else { (0, 0) };
        !self.is
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_busy_one_is_looked_at_ever_more_seldom_and_a_light_one_as_often_as_a_new_one() {
        let mut l = Light::default();
        let mut windows = Vec::new();
        for _ in 0..6 {
            let mut n = 0;
            while !l.is_to_be_checked() {
                l.was_alone(50 * MS);
                n += 1;
            }
            windows.push(n);
            l.was_busy();
        }
        assert_eq!(windows, [10, 20, 40, 80, 80, 80]);
        l.found();
        l.was_alone(500 * MS);
        assert!(l.is_to_be_checked());
    }

    #[test]
    fn a_light_one_is_so_until_it_uses_more_than_its_part_of_others_windows() {
        let mut l = Light::default();
        assert!(l.has_more(1, 100 * MS), "who is not light has more with the first thing that it does");
        l.found();
        // A kernel may be a good part of a short window.
        for passed in [5, 100, 20, 30, 50].into_iter().cycle().take(50) {
            assert!(!l.has_more(MS * passed / 25, passed * MS));
            assert!(!l.has_more(0, 2 * MS));
        }
        // Nor is it much of two windows that are looked at together.
        l.found();
        assert!(!l.has_more(2 * MS, 80 * MS) && !l.has_more(4 * MS, 100 * MS));
        assert!((0..3).any(|_| l.has_more(2 * MS, 20 * MS)));
        assert!(l.has_more(1, MS));
    }
}
