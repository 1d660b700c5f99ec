//! Effective priority: static priority plus boosts, after PTask figure 9.
//!
//! A task's effective priority rises when it has waited longer than the ready tasks do on average (now, or usually),
//! when its invocations run shorter than theirs, and when the thread that asked has a better OS priority than theirs.
//! Each difference is expressed in steps ([`step_ns`]: a millisecond, or the mean run time where that is longer, so that
//! a level means as much among long tasks as among short ones). Each boost is limited to ±[`MAX_BOOST`], except that of
//! the current wait: a waiting task overtakes any static priority in bounded time ([`starvation_ns`] for one level),
//! which is the starvation bound.

/// Shortest step: a wait longer than the average by a step is worth [`WAIT_GAIN`] points.
pub const STEP_NS: u64 = 1_000_000;
/// Points per step of current wait.
pub const WAIT_GAIN: i64 = 1;
/// Points of one level of static priority: five steps of waiting.
pub const LEVEL: i64 = 5;
/// Largest boost from each of: usual wait, run time, proxy priority. Two of them do not make up for a level.
pub const MAX_BOOST: i64 = 2;

/// A step among tasks with these averages, ns.
pub fn step_ns(mean: &Averages) -> u64 {
    STEP_NS.max(mean.avg_run_ns)
}

/// Wait, beyond the average, after which a task has caught up with one level of static priority.
pub fn starvation_ns(mean: &Averages) -> u64 {
    step_ns(mean).saturating_mul((LEVEL / WAIT_GAIN) as u64)
}

/// What is known about a ready task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Static priority; higher is more urgent. 0 is the default.
    pub priority: i32,
    /// OS priority of the requesting thread as nice value, -20 (urgent) to 19; real-time threads count as below -20.
    pub nice: i32,
    /// How long it has been ready, ns.
    pub wait_ns: u64,
    /// Decayed average of its waits, ns.
    pub avg_wait_ns: u64,
    /// Decayed average of its run times, ns.
    pub avg_run_ns: u64,
}

/// Averages over the ready tasks, against which a task is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Averages {
    /// Mean current wait, ns.
    pub wait_ns: u64,
    /// Mean usual wait, ns.
    pub avg_wait_ns: u64,
    /// Mean run time, ns.
    pub avg_run_ns: u64,
    /// Mean nice value.
    pub nice: i32,
}

impl Averages {
    /// The averages of a set of tasks; all zero for none.
    pub fn of(tasks: impl Iterator<Item = Stats>) -> Self {
        let (mut n, mut wait, mut avg_wait, mut avg_run, mut nice) = (0u128, 0u128, 0u128, 0u128, 0i64);
        for t in tasks {
            n += 1;
            wait += u128::from(t.wait_ns);
            avg_wait += u128::from(t.avg_wait_ns);
            avg_run += u128::from(t.avg_run_ns);
            nice += i64::from(t.nice);
        }
        let n = n.max(1);
        Averages {
            wait_ns: (wait / n) as u64,
            avg_wait_ns: (avg_wait / n) as u64,
            avg_run_ns: (avg_run / n) as u64,
            nice: (nice / n as i64) as i32,
        }
    }
}

fn steps(value: u64, mean: u64, step: u64) -> i64 {
    let difference = i128::from(value) - i128::from(mean);
    (difference / i128::from(step)).clamp(i128::from(i64::MIN / 4), i128::from(i64::MAX / 4)) as i64
}

/// The effective priority of a task among ready tasks with these averages; higher goes first.
pub fn effective(t: &Stats, mean: &Averages) -> i64 {
    let step = step_ns(mean);
    // No limit downwards either: the mean is the same for all, so without one the order is that of the waits themselves.
    let current = steps(t.wait_ns, mean.wait_ns, step).saturating_mul(WAIT_GAIN);
    let usual = steps(t.avg_wait_ns, mean.avg_wait_ns, step).clamp(-MAX_BOOST, MAX_BOOST);
    let short = steps(mean.avg_run_ns, t.avg_run_ns, step).clamp(-MAX_BOOST, MAX_BOOST);
    // Nice counts downwards; ten of its levels are a point.
    let proxy = ((i64::from(mean.nice) - i64::from(t.nice)) / 10).clamp(-MAX_BOOST, MAX_BOOST);
    (i64::from(t.priority) * LEVEL).saturating_add(current).saturating_add(usual + short + proxy)
}

/// The decayed average after one more sample: 7/8 of the old, 1/8 of the new; the first sample counts whole.
pub fn decay(old: u64, sample: u64) -> u64 {
    if old == 0 { sample } else { (old - old / 8).saturating_add(sample / 8) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stats() -> impl Strategy<Value = Stats> {
        (-20i32..20, -21i32..20, 0u64..10_u64.pow(10), 0u64..10_u64.pow(10), 0u64..10_u64.pow(10)).prop_map(
            |(priority, nice, wait_ns, avg_wait_ns, avg_run_ns)| Stats {
                priority,
                nice,
                wait_ns,
                avg_wait_ns,
                avg_run_ns,
            },
        )
    }

    proptest! {
        #[test]
        fn better_in_one_respect_is_never_worse(t in stats(), all in proptest::collection::vec(stats(), 1..20)) {
            let mean = Averages::of(all.into_iter());
            let base = effective(&t, &mean);
            let other = effective(&Stats { priority: t.priority + 1, ..t }, &mean);
            prop_assert!(other > base);
            let other = effective(&Stats { wait_ns: t.wait_ns + STEP_NS, ..t }, &mean);
            prop_assert!(other >= base);
            let other = effective(&Stats { avg_wait_ns: t.avg_wait_ns + STEP_NS, ..t }, &mean);
            prop_assert!(other >= base);
            let other = effective(&Stats { avg_run_ns: t.avg_run_ns + STEP_NS, ..t }, &mean);
            prop_assert!(other <= base);
            let other = effective(&Stats { nice: t.nice - 1, ..t }, &mean);
            prop_assert!(other >= base);
        }

        /// The starvation bound: waiting beats any static priority after a known time.
        #[test]
        fn waiting_overtakes_any_priority(low in stats(), high in stats(), mean in stats()) {
            let mean = Averages::of([mean].into_iter());
            let high = Stats { wait_ns: 0, ..high };
            let levels = (high.priority - low.priority).max(0) as u64 + 1;
            // 3 boosts of at most 2 × MAX_BOOST apart, and MAX_BOOST of current wait.
            let margin = (7 * MAX_BOOST / WAIT_GAIN) as u64 * step_ns(&mean);
            let low = Stats { wait_ns: mean.wait_ns + levels * starvation_ns(&mean) + margin + step_ns(&mean), ..low };
            prop_assert!(effective(&low, &mean) > effective(&high, &mean));
        }

        #[test]
        fn extremes_do_not_overflow(p in any::<i32>(), n in any::<i32>(), w in any::<u64>(), a in any::<u64>(), r in any::<u64>()) {
            let t = Stats { priority: p, nice: n.clamp(-21, 19), wait_ns: w, avg_wait_ns: a, avg_run_ns: r };
            effective(&t, &Averages::of([t, Stats::default()].into_iter()));
            decay(a, r);
        }
    }
}
