//! Keeping decisions stable: who moves at every small change, or together with everybody else, moves back again.
//!
//! Rules:
//! 1. A task has a home, the device that was predicted to be fastest. Elsewhere counts as slower than home, by the threshold,
//!    so that only a queue at home drives an invocation away.
//! 2. Another device becomes home in two steps. First it must be faster than home by the threshold. Then, after the load has
//!    been published anew, and a time that is random and may be longer after each move, it must be so still: whoever moved
//!    meanwhile is in the load, and the others stay.
//! 3. After a move the task stays for as long as moving took, ten times over.

use forebay_policy::{Counts, MAX_PLACED as MAX};

/// Gain, as a part of the time at home, below which nobody moves.
const THRESHOLD: f64 = 0.15;
/// Between both steps, at least: twice the time between publications of the load, and its smoothing.
const SETTLE_NS: u64 = 60_000_000;
/// And up to this more at first, and as much again for each move so far (no more than eight times).
const APART_NS: u64 = 250_000_000;
/// What is staked on a move is to be had back this often.
const STAY: u64 = 10;

/// The decisions of a task.
#[derive(Clone, Debug)]
pub struct Stability {
    home: Option<usize>,
    /// Where it wants to move, and when it may.
    wants: Option<(usize, u64)>,
    /// No move before.
    stays_until: u64,
    random: u64,
    moves: u64,
}

impl Stability {
    /// For a task; `seed` is different for each program.
    pub fn new(seed: u64) -> Self {
        Stability { home: None, wants: None, stays_until: 0, random: seed, moves: 0 }
    }

    /// The time between both steps.
    fn settle(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        SETTLE_NS + (z ^ z >> 31) % (APART_NS * (1 + self.moves.min(8)))
    }

    /// The device where it belongs.
    pub fn home(&self) -> Option<usize> {
        self.home
    }

    /// How often it moved.
    pub fn moves(&self) -> u64 {
        self.moves
    }

    /// Forgets where home is: the next decision is as the first.
    pub fn unsettle(&mut self) {
        self.home = None;
        self.wants = None;
    }

    /// What each device is to count as, given the ns that each is predicted to take under the present load (infinite: it is
    /// not there).
    /// `moving_ns` is what a move costs.
    pub fn weigh(&mut self, now_ns: u64, predicted: &[f64], moving_ns: u64) -> Counts {
        let predicted = &predicted[..predicted.len().min(MAX)];
        let at = |d: usize| predicted.get(d).copied().unwrap_or(f64::INFINITY);
        let (mut best, mut least) = (None, f64::INFINITY);
        for (d, ns) in predicted.iter().enumerate() {
            if *ns < least {
                (best, least) = (Some(d), *ns);
            }
        }
        let Some(best) = best else { return [u64::MAX; MAX] };
        match self.home {
            Some(h) if at(h) < f64::INFINITY => {
                if best != h && at(h) - at(best) > THRESHOLD * at(h) && now_ns >= self.stays_until {
                    match self.wants {
                        Some((d, may)) if d == best => {
                            if now_ns >= may {
                                self.home = Some(best);
                                self.wants = None;
                                self.moves += 1;
                                self.stays_until = now_ns.saturating_add(moving_ns.saturating_mul(STAY));
                            }
                        }
                        _ => self.wants = Some((best, now_ns.saturating_add(self.settle()))),
                    }
                } else {
                    self.wants = None;
                }
            }
            _ => self.home = Some(best),
        }
        let home = self.home.unwrap_or(best);
        let mut out = [u64::MAX; MAX];
        let there = at(home);
        for ((d, ns), to) in predicted.iter().enumerate().zip(&mut out) {
            if *ns < f64::INFINITY {
                let counts = if d == home { *ns } else { ns.max(there) + THRESHOLD * there };
                *to = counts as u64;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABSENT: f64 = f64::INFINITY;

    const MS: u64 = 1_000_000;

    #[test]
    fn small_and_short_changes_move_nobody() {
        let mut s = Stability::new(1);
        s.weigh(0, &[100.0, 90.0], 0);
        assert_eq!(s.home(), Some(1));
        for t in 1..100 {
            s.weigh(t * 20 * MS, &[if t % 4 == 0 { 10.0 } else { 80.0 }, 90.0], 0);
        }
        assert_eq!((s.home(), s.moves()), (Some(1), 0), "a tenth faster, and now and then much faster");
    }

    #[test]
    fn what_stays_faster_becomes_home_and_then_it_stays_for_a_while() {
        let mut s = Stability::new(1);
        s.weigh(0, &[100.0, 50.0], 0);
        let out = s.weigh(MS, &[20.0, 50.0], 30 * MS);
        assert!(out[0] > out[1], "not before the second step: {out:?}");
        let moved = (2..).find(|t| {
            s.weigh(t * MS, &[20.0, 50.0], 90 * MS);
            s.home() == Some(0)
        });
        let moved = moved.unwrap();
        assert!((60..320).contains(&moved) && s.moves() == 1, "{moved}");
        let back = (moved..).find(|t| {
            s.weigh(t * MS, &[200.0, 50.0], 90 * MS);
            s.home() == Some(1)
        });
        assert!(back.unwrap() >= moved + 900, "the move is not paid for before");
    }

    #[test]
    fn a_device_that_goes_away_is_left_at_once() {
        let mut s = Stability::new(1);
        s.weigh(0, &[100.0, 50.0], 0);
        let out = s.weigh(1, &[100.0, ABSENT], 0);
        assert_eq!((s.home(), out[0], out[1]), (Some(0), 100, u64::MAX));
        assert_eq!(s.weigh(2, &[ABSENT, ABSENT], 0), [u64::MAX; MAX]);
    }

    /// Programs that are all alike, on two devices of which one is three times as fast, with a load that is published every
    /// 25 ms: how often each moves until nobody does any more.
    fn settle(programs: u64, seed: u64) -> (u64, Vec<usize>) {
        let mut all: Vec<Stability> = (0..programs).map(|p| Stability::new(seed * 100 + p)).collect();
        let mut published = [0usize; 2];
        for t in 0..4000u64 {
            if t % 25 == 0 {
                published = [0, 1].map(|d| all.iter().filter(|s| s.home() == Some(d)).count());
            }
            for s in &mut all {
                let own = |d: usize| usize::from(s.home() == Some(d));
                // Others there, and oneself.
                let share = |d: usize| 1.0 / (published[d].saturating_sub(own(d)) + 1) as f64;
                let predicted = [3e6 / share(0), 1e6 / share(1)];
                s.weigh(t * MS, &predicted, MS);
            }
        }
        let homes = [0, 1].map(|d| all.iter().filter(|s| s.home() == Some(d)).count());
        (all.iter().map(Stability::moves).max().unwrap(), homes.to_vec())
    }

    #[test]
    fn five_alike_settle_within_three_offloads() {
        for seed in 0..50 {
            let (moves, homes) = settle(5, seed);
            assert!(moves <= 3, "seed {seed}: {moves} moves");
            // Four on the fast one and one on the slow one is even (4:3), five and none is not (5:3).
            assert!(homes[0] >= 1 && homes[1] >= 3, "seed {seed}: {homes:?}");
        }
    }
}
