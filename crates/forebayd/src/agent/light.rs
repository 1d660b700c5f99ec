//! Whether a process has work all the time, or a little now and then only.
//!
//! Who is alone in its window holds the GPU in the log's eyes, with work or without; so one that has a short kernel now and
//! then would show as busy in all of its windows, and have as many as one that is.
//!
//! Rules:
//! 1. Who may be on the GPU and has work comes onto it as soon as another's slice is over. When another stays for
//!    [`STAY_NS`] or longer, it has none: it is light.
//! 2. It is light, too, if it uses less than [`IDLE_PERCENT`] of a window of its own in which somebody is beside it, unless it
//!    came back at each turn ([`Beside::comes_back`]): whoever has one kernel of 0.1 ms after the other, and none in its queue meanwhile,
//!    has a twenty-fifth of the GPU beside somebody who fills the driver's turns, and may want all of it.
//! 3. For that somebody is beside an owner, after [`FIRST_CHECK_NS`] of its windows, and ever more seldom while it is busy; again
//!    at its next window where it was the owner who stayed, which says nothing of it. For the first of [`CHECK_NS`], as others
//!    wait meanwhile; that shows who comes back at each turn. Of others the next window, of the second's length, decides.
//! 4. A light process has no windows of its own, and is off in nobody's. It is no longer light when it has used more than
//!    [`IDLE_PERCENT`] of [`LIGHT_NS`] beside others, or came back at each turn of these.

use super::IDLE_PERCENT;

/// Longer than it takes to let the owner of a window on, a slice of whoever is there, and a switch.
pub const STAY_NS: u64 = 5_000_000;
/// Somebody is beside an owner for so long: more than two of the stays that tell a light one, wherever its kernel comes; then enough
/// turns of others for one whose own are short.
const CHECK_NS: [u64; 2] = [10_000_000, 20_000_000];
/// So much of its windows passes before that, at first and at most.
const FIRST_CHECK_NS: u64 = 500_000_000;
const MAX_CHECK_NS: u64 = 4_000_000_000;
/// A light process is looked at over so long.
const LIGHT_NS: u64 = 100_000_000;

/// A turn of the driver's, a switch, and what it takes to let somebody on.
const TURN_NS: u64 = 4_000_000;
/// Who comes back at each turn has used so much, in hundredths.
const LEAST_PERCENT: u64 = 2;

/// What somebody has used beside others.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beside {
    pub(super) used_ns: u64,
    pub(super) passed_ns: u64,
    /// The others' longest stay on the GPU; 0 where their turns are short, which says nothing.
    pub(super) stay_ns: u64,
    /// How often it came onto the GPU, where that is counted.
    pub(super) times: Option<u64>,
}

impl Beside {
    /// Whether it came back at each of the others' turns, and not for next to nothing.
    pub(super) fn comes_back(&self) -> bool {
        self.is_often() && self.has_some()
    }

    /// Whether it came back at each of the others' turns. What it used in few of them says less: a hold may have been taken to
    /// last for longer than it did, by as long as a change takes, and what comes then is not counted twice.
    pub(super) fn is_often(&self) -> bool {
        // In a turn of its own and one of another.
        let often = self.times.map_or(self.has_some(), |n| n.saturating_mul(2 * TURN_NS) >= self.passed_ns);
        often && (1..=TURN_NS).contains(&self.stay_ns)
    }

    fn has_some(&self) -> bool {
        self.used_ns * 100 >= self.passed_ns * LEAST_PERCENT
    }

    /// This and what came then.
    fn and(self, then: Beside) -> Beside {
        let times = if self.passed_ns == 0 { then.times } else { self.times.zip(then.times).map(|(a, b)| a + b) };
        let (used_ns, passed_ns) = (self.used_ns + then.used_ns, self.passed_ns + then.passed_ns);
        Beside { used_ns, passed_ns, stay_ns: self.stay_ns.max(then.stay_ns), times }
    }
}

/// What is known of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Light {
    is: bool,
    /// What it has used of others' windows.
    beside: Beside,
    /// Its windows since it was looked at, and after how much of them that is due again.
    unchecked_ns: u64,
    check_ns: u64,
    /// The first look at it did not tell.
    closer: bool,
}

impl Default for Light {
    fn default() -> Self {
        Light { is: false, beside: Beside::default(), unchecked_ns: 0, check_ns: FIRST_CHECK_NS, closer: false }
    }
}

impl Light {
    /// Rule 3: for how long somebody is to be beside it.
    pub(super) fn is_to_be_checked(&self) -> Option<u64> {
        (self.unchecked_ns >= self.check_ns).then_some(CHECK_NS[usize::from(self.closer)])
    }

    /// Whether this is the first look, which does not tell of one that did not come back at each turn.
    pub(super) fn is_unsure(&mut self, comes_back: bool) -> bool {
        !comes_back && !std::mem::replace(&mut self.closer, !comes_back)
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
        (self.unchecked_ns, self.closer) = (0, false);
        self.check_ns = (2 * self.check_ns).min(MAX_CHECK_NS);
    }

    /// It has used so much of somebody else's window: whether it has work of which a light one would have less.
    pub(super) fn has_more(&mut self, now: Beside) -> bool {
        let all = self.beside.and(now);
        self.is &= all.used_ns * 100 < all.passed_ns.max(LIGHT_NS) * IDLE_PERCENT;
        self.is &= all.passed_ns < LIGHT_NS || !all.comes_back();
        self.beside = if self.is && all.passed_ns < LIGHT_NS { all } else { Beside::default() };
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
            while l.is_to_be_checked().is_none() {
                l.was_alone(50 * MS);
                n += 1;
            }
            windows.push(n);
            l.was_busy();
        }
        assert_eq!(windows, [10, 20, 40, 80, 80, 80]);
        l.found();
        l.was_alone(500 * MS);
        assert_eq!(l.is_to_be_checked(), Some(CHECK_NS[0]));
        // Who is back at each turn is known at once, others at the second look.
        assert!(!l.is_unsure(true));
        assert!(l.is_unsure(false));
        assert_eq!(l.is_to_be_checked(), Some(CHECK_NS[1]));
        assert!(!l.is_unsure(false));
    }

    #[test]
    fn a_light_one_is_so_until_it_uses_more_than_its_part_of_others_windows() {
        let mut l = Light::default();
        let of = |used_ns, passed_ns, stay_ns, times| Beside { used_ns, passed_ns, stay_ns, times };
        let more = |l: &mut Light, used, passed| l.has_more(of(used, passed, passed, None));
        assert!(more(&mut l, 1, 100 * MS), "who is not light has more with the first thing that it does");
        l.found();
        // A kernel may be a good part of a short window.
        for passed in [5, 100, 20, 30, 50].into_iter().cycle().take(50) {
            assert!(!more(&mut l, MS * passed / 25, passed * MS));
            assert!(!more(&mut l, 0, 2 * MS));
        }
        // Nor is it much of two windows that are looked at together.
        l.found();
        assert!(!more(&mut l, 2 * MS, 80 * MS) && !more(&mut l, 4 * MS, 100 * MS));
        assert!((0..3).any(|_| more(&mut l, 2 * MS, 20 * MS)));
        assert!(more(&mut l, 1, MS));
        // One that is back at each turn has more, however little that comes to.
        for times in [None, Some(10)] {
            l.found();
            assert!((0..5).any(|_| l.has_more(of(MS, 25 * MS, 2 * MS, times))));
        }
        // Not so where others stayed, or where it was others who came between.
        for (stay, times) in [(5 * MS, Some(10)), (5 * MS, None), (3 * MS, Some(2))] {
            l.found();
            assert!((0..5).all(|_| !l.has_more(of(MS, 25 * MS, stay, times))));
        }
    }
}
