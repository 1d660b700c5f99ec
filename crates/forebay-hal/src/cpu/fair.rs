//! The order of jobs that several sources want done: by start-time fair queueing, so that each source has the same time of the
//! workers, however long its jobs are. One that always has a short job ready does not hold up the others, and does not wait
//! for a job of every other one.
//!
//! 1. A job begins, in the queue's time, where its source's time is, or where the queue's is if that is later: who has
//!    wanted nothing for a while has saved nothing.
//! 2. The source's time then goes on by what the job is estimated to take.
//! 3. The job that begins first is next, of equals the oldest, and the queue's time is then its beginning.
//!
//! Jobs without a source are one source together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::pool::{Job, UNKNOWN_NS};

/// What a job is taken for while nothing is known of it, ns.
const GUESS_NS: u64 = 1_000_000;

/// How far a source of jobs is, ns of the queue's time.
#[derive(Debug, Default)]
pub struct Turn(AtomicU64);

impl Turn {
    /// When something of this source that takes `cost_ns` begins, if the queue is at `now`; it counts from then on.
    pub fn begin(&self, now: u64, cost_ns: u64) -> u64 {
        let begins = self.0.load(Ordering::Relaxed).max(now);
        // A source has one job at a time, as a rule; if two overlap one of them counts, and that is fair enough.
        self.0.store(begins.saturating_add(cost_ns), Ordering::Relaxed);
        begins
    }
}

struct Waiting {
    begins: u64,
    number: u64,
    job: Job,
}

impl Waiting {
    fn order(&self) -> Reverse<(u64, u64)> {
        Reverse((self.begins, self.number))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Waiting {}

/// The queue.
pub(super) struct Fair {
    waiting: BinaryHeap<Waiting>,
    now: u64,
    number: u64,
    others: Turn,
}

impl Fair {
    pub(super) fn new(room: usize) -> Self {
        Fair { waiting: BinaryHeap::with_capacity(room), now: 0, number: 0, others: Turn::default() }
    }

    pub(super) fn push(&mut self, job: Job, turn: Option<&Turn>) {
        let cost = if job.cost_ns == UNKNOWN_NS { GUESS_NS } else { u64::from(job.cost_ns) };
        let begins = turn.unwrap_or(&self.others).begin(self.now, cost);
        self.waiting.push(Waiting { begins, number: self.number, job });
        self.number += 1;
    }

    pub(super) fn pop(&mut self) -> Option<Job> {
        let next = self.waiting.pop()?;
        self.now = self.now.max(next.begins);
        Some(next.job)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Worker;

    unsafe fn nothing(_: *const (), _: &Worker) {}

    fn job(source: usize, cost_ns: u32) -> Job {
        Job { run: nothing, data: std::ptr::without_provenance(source), cost_ns }
    }

    /// One worker; each source has its next job ready as soon as one was done. Time that each has had after `total` ns.
    fn share(costs: &[u32], total: u64) -> Vec<u64> {
        let (mut q, turns) = (Fair::new(4), costs.iter().map(|_| Turn::default()).collect::<Vec<_>>());
        costs.iter().enumerate().for_each(|(i, c)| q.push(job(i, *c), Some(&turns[i])));
        let (mut had, mut now) = (vec![0; costs.len()], 0);
        while now < total {
            let at = q.pop().unwrap().data.addr();
            had[at] += u64::from(costs[at]);
            now += u64::from(costs[at]);
            q.push(job(at, costs[at]), Some(&turns[at]));
        }
        had
    }

    #[test]
    fn sources_have_the_same_time_however_long_their_jobs_are() {
        let costs = [12_500_000, 800_000, 3_300_000, 20_000];
        let total = 10_000_000_000;
        for had in share(&costs, total) {
            assert!(had.abs_diff(total / 4) <= 12_500_000, "{had}");
        }
    }

    #[test]
    fn who_has_wanted_nothing_for_a_while_has_saved_nothing_and_waits_for_one_job_of_each() {
        let (mut q, [a, b]) = (Fair::new(4), [Turn::default(), Turn::default()]);
        for _ in 0..1000 {
            q.push(job(1, 1_000_000), Some(&a));
            q.pop();
        }
        q.push(job(1, 1_000_000), Some(&a));
        for _ in 0..3 {
            q.push(job(2, 1_000_000), Some(&b));
        }
        let order: Vec<usize> = std::iter::from_fn(|| q.pop()).map(|j| j.data.addr()).collect();
        assert_eq!(order, [2, 1, 2, 2]);
    }

    #[test]
    fn of_equals_the_oldest_is_first_and_jobs_of_nobody_are_one_source() {
        let (mut q, turn) = (Fair::new(4), Turn::default());
        (1..=3).for_each(|i| q.push(job(i, 1000), None));
        q.push(job(4, UNKNOWN_NS), Some(&turn));
        let order: Vec<usize> = std::iter::from_fn(|| q.pop()).map(|j| j.data.addr()).collect();
        assert_eq!((order, q.len()), (vec![1, 4, 2, 3], 0));
    }
}
