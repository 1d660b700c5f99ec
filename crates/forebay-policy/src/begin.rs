//! When a program that has credit begins what: the programs' side of [`crate::credit`]. The library does so, and so do the
//! programs of the simulation.
//!
//! Rules:
//! 1. Who begins long work everywhere as long as it owes nothing owes all of it at once, and others have none of the device
//!    meanwhile. So what has been begun counts before it has ended: what is left of long tasks, about half of each, and the
//!    pieces that are in a device's queue behind the first one. Each counts as [`MOST_NS`] at most: however long they are,
//!    who is alone uses all of the device.
//! 2. Work on every core for a part of the time is in the way of those who have threads for fewer cores than their share; as
//!    much work on some cores all the time isn't. So with less than [`ENOUGH_NS`] a program has as many threads at work as
//!    its share is cores.

use crate::credit::SLACK_NS;
use crate::share::WHOLE;

/// Shorter tasks are not counted while they last: it would cost each of them something, and they are over at once.
pub const LONG_NS: u64 = 500_000;
/// What one task or piece of work counts as at most: less than half of what somebody alone has in hand for each core.
pub const MOST_NS: u64 = 20_000_000;
/// Credit for each core with which all threads may be at work: half of what somebody comes to hold whose share is more than it
/// uses, and no more than what those are brought to who get what others leave.
pub const ENOUGH_NS: u64 = SLACK_NS / 2;

/// What a task that takes so long counts as while it lasts, ns.
pub fn of_task(cost_ns: u64) -> u64 {
    if cost_ns < LONG_NS { 0 } else { cost_ns.min(MOST_NS) / 2 }
}

/// What so many pieces in a queue count as when each takes so long, ns.
pub fn of_pieces(there: u64, each_ns: u64) -> u64 {
    each_ns.min(MOST_NS).saturating_mul(there.saturating_sub(1))
}

/// Threads that may be at work with little credit and a share (in millionths) of so many cores.
pub fn width(share: u64, cores: u64) -> u64 {
    (share.saturating_mul(cores) / WHOLE).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::FLOAT_NS;

    #[test]
    fn half_of_a_long_task_counts_and_nothing_of_a_short_one() {
        assert_eq!(
            [0, LONG_NS - 1, LONG_NS, 4_000_000, MOST_NS, u64::MAX].map(of_task),
            [0, 0, LONG_NS / 2, 2_000_000, MOST_NS / 2, MOST_NS / 2]
        );
    }

    #[test]
    fn the_first_piece_in_a_queue_does_not_count() {
        assert_eq!([0, 1, 2, 4].map(|there| of_pieces(there, 3_000_000)), [0, 0, 3_000_000, 9_000_000]);
        assert_eq!([of_pieces(2, u64::MAX), of_pieces(u64::MAX, u64::MAX)], [MOST_NS, u64::MAX]);
    }

    #[test]
    fn as_many_threads_as_the_share_is_cores_and_one_at_least() {
        assert_eq!([0, 499_999, 500_000, 999_999, WHOLE].map(|share| width(share, 4)), [1, 1, 2, 3, 4]);
        assert_eq!(width(u64::MAX, u64::MAX), u64::MAX / WHOLE);
    }

    /// Of a machine of any size, in which each core has a task that is longer than anything.
    #[test]
    fn who_is_alone_works_on_every_core() {
        for cores in [1, 2, 16, 256] {
            let holds = (SLACK_NS + FLOAT_NS) * cores;
            assert!(holds > (cores - 1) * of_task(u64::MAX) + ENOUGH_NS * cores, "{cores}");
        }
    }
}
