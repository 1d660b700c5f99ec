//! The ready queue, the four scheduling modes of PTask, section 5.3.1, and adaptive placement.
//!
//! - **first-available**: the oldest ready task that some free device can run, on the strongest such device; a task
//!   that no free device can run does not hold up the others.
//! - **fifo**: strictly the oldest ready task; while no free device can run it, nothing else starts.
//! - **priority**: the ready task of highest effective priority that some free device can run (ties: the oldest).
//! - **data-aware**: as priority, but a task prefers the device that holds most of its input bytes. While that device
//!   is busy the task waits, unless its effective priority exceeds [`WAIT_LIMIT`]; since waiting raises effective
//!   priority, it moves at last.
//! - **adaptive**: in the order of effective priority, and of equals whoever has had least time, each task belongs to the device that is predicted to end it first:
//!   what is ahead of it there, and what it takes. If that device is free it starts; if not it waits, counts as work ahead of
//!   the others, and starts anywhere once it has waited four times as long as it takes, and [`PATIENCE_NS`]. Devices that are
//!   the host's cores by another name end no sooner than the cores have done all work that is on them ([`ReadyQueue::sharing`]).
//!   How fast that is depends on how many threads others have: beside them more threads of one's own get more of the cores.
//!
//! `pick` looks at every ready task, so it costs time linear in their number; queues hold tasks that are ready and not
//! yet running, which is few, and at most [`MAX_READY`].

use crate::priority::{Averages, Stats, effective};

/// Most ready tasks in one queue.
pub const MAX_READY: usize = 1 << 16;

/// Effective priority at which a data-aware task stops waiting for its preferred device: about 10 ms beyond the
/// average wait for a task of default priority, the order of moving 500 MB over PCIe.
pub const WAIT_LIMIT: i64 = 10;

/// The least that an adaptively placed task waits for the device where it belongs.
pub const PATIENCE_NS: u64 = 20_000_000;

/// Most devices that adaptive placement distinguishes: the cores, eight GPUs, and some more. Each decision fills arrays of this
/// length.
pub const MAX_PLACED: usize = 12;

/// What a task is predicted to take on each device, ns; [`u64::MAX`] where it cannot run or nothing is known.
pub type Counts = [u64; MAX_PLACED];

/// A set of devices, as bits; device numbers are below 32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSet(pub u32);

impl DeviceSet {
    /// Most devices.
    pub const MAX: usize = 32;

    /// Whether device `d` is in the set.
    pub fn has(self, d: usize) -> bool {
        d < Self::MAX && self.0 & (1 << d) != 0
    }

    /// The set with device `d`.
    pub fn with(self, d: usize) -> Self {
        if d < Self::MAX { DeviceSet(self.0 | 1 << d) } else { self }
    }

    /// Devices in both sets.
    pub fn and(self, other: Self) -> Self {
        DeviceSet(self.0 & other.0)
    }

    /// True for no device.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The devices in rising order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Self::MAX).filter(move |&d| self.has(d))
    }
}

/// How ready tasks are ordered and matched with devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Any free device, oldest first, nothing held up.
    FirstAvailable,
    /// Strict order of becoming ready.
    Fifo,
    /// Effective priority.
    Priority,
    /// Effective priority, and where the data is: with the device that has it, or with one that is stronger than the host, if
    /// the host has it.
    #[default]
    DataAware,
    /// Where it is predicted to end first.
    Adaptive,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 5] = [Mode::FirstAvailable, Mode::Fifo, Mode::Priority, Mode::DataAware, Mode::Adaptive];

    /// The name on the command line and in graph files.
    pub fn name(self) -> &'static str {
        match self {
            Mode::FirstAvailable => "first-available",
            Mode::Fifo => "fifo",
            Mode::Priority => "priority",
            Mode::DataAware => "data-aware",
            Mode::Adaptive => "adaptive",
        }
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Mode::ALL.into_iter().find(|m| m.name() == s).ok_or_else(|| {
            format!("unknown scheduling mode {s:?}; known: first-available, fifo, priority, data-aware, adaptive")
        })
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A task that can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready<K> {
    /// The caller's name for it.
    pub key: K,
    /// Devices that have an implementation.
    pub devices: DeviceSet,
    /// The device that holds most of its input bytes, if any input is anywhere; the host is device 0.
    pub near: Option<usize>,
    /// For adaptive placement: what it counts as on each device.
    pub counts: Counts,
    /// Of devices that share the host's cores: for so long it keeps one core busy, or so many cores for its part of that, ns.
    pub work: Counts,
    /// For adaptive placement, among tasks of one effective priority: where its turn is, by what it has had so far.
    pub turn: u64,
    /// When it became ready, ns on the caller's clock.
    pub since_ns: u64,
    /// For effective priority; `wait_ns` is ignored here and computed from `since_ns`.
    pub stats: Stats,
}

/// A decision: run this task on that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick<K> {
    /// The task.
    pub key: K,
    /// The device.
    pub device: usize,
    /// Where its turn was.
    pub turn: u64,
    /// How long it had been ready, ns.
    pub waited_ns: u64,
    /// What it counts as there, ns; [`u64::MAX`] when nothing is known.
    pub count_ns: u64,
    /// Work on the host's cores, ns of one core; what it counts as on other devices.
    pub work_ns: u64,
}

/// What has begun, for adaptive placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// The time until each device could begin something new, ns.
    pub until: Counts,
    /// Work that is left to the host's cores, ns of one core.
    pub work: u64,
    /// Threads that are at it.
    pub threads: u64,
    /// Threads of others that want the cores, in thousandths.
    pub others: u64,
}

impl Ahead {
    /// How long the cores take for all that is on them and `work` more on device `d`, ns. The system gives every thread the same,
    /// and whatever is the cores by another name (the host is device 0) comes with threads of its own.
    fn all_done(&self, work: u64, d: usize, cores: u64) -> u64 {
        let comes = d > 0 && self.until[d] == 0;
        let threads = if comes { self.threads.saturating_add(cores) } else { self.threads.max(cores) };
        let work = u128::from(self.work.saturating_add(work));
        // Of so many cores that part is ours; there are no fewer threads than cores.
        let (own, all) = (u128::from(threads) * 1000, u128::from(threads) * 1000 + u128::from(self.others));
        u64::try_from(work.saturating_mul(all) / (own * u128::from(cores)).max(1)).unwrap_or(u64::MAX)
    }
}

/// Ready tasks in the order in which they became ready.
#[derive(Clone, Debug)]
pub struct ReadyQueue<K> {
    mode: Mode,
    /// Relative speeds by device number, for choosing the strongest.
    strengths: Vec<u64>,
    /// Devices that are stronger than the host, which is device 0.
    stronger: DeviceSet,
    /// Devices that are the host's cores, and how many cores.
    shared: (DeviceSet, u64),
    tasks: std::collections::VecDeque<Ready<K>>,
}

impl<K: Copy + PartialEq> ReadyQueue<K> {
    /// An empty queue for devices of these relative strengths (by number).
    pub fn new(mode: Mode, strengths: Vec<u64>) -> Self {
        let host = strengths.first().copied().unwrap_or(0);
        let stronger = strengths.iter().enumerate().filter(|(_, s)| **s > host);
        let stronger = stronger.fold(DeviceSet::default(), |set, (d, _)| set.with(d));
        let shared = (DeviceSet::default(), 1);
        ReadyQueue { mode, strengths, stronger, shared, tasks: std::collections::VecDeque::with_capacity(64) }
    }

    /// These devices are all the same cores, so many of them: what one does the others do not do meanwhile.
    pub fn sharing(self, devices: DeviceSet, cores: usize) -> Self {
        ReadyQueue { shared: (devices, cores.max(1) as u64), ..self }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Number of ready tasks.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// True when nothing is ready.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Adds a task; false when it is refused because the queue is full or no device could ever run it.
    #[must_use]
    pub fn push(&mut self, r: Ready<K>) -> bool {
        if self.tasks.len() >= MAX_READY || r.devices.is_empty() {
            return false;
        }
        self.tasks.push_back(r);
        true
    }

    /// Removes a task, if it is there.
    pub fn remove(&mut self, key: K) -> bool {
        match self.tasks.iter().position(|t| t.key == key) {
            Some(at) => self.tasks.remove(at).is_some(),
            None => false,
        }
    }

    fn strongest(&self, set: DeviceSet) -> Option<usize> {
        // Of equals the lowest number.
        set.iter().max_by_key(|&d| (self.strengths.get(d).copied().unwrap_or(0), std::cmp::Reverse(d)))
    }

    /// For a data-aware task: the devices of which it takes the strongest that is free, and waits a while if none is. It is the
    /// one that has the data; but what the host has (device 0) goes to devices that are stronger, if there are such: all data
    /// comes from the host at first, and nothing would ever get to them.
    fn home(&self, t: &Ready<K>) -> DeviceSet {
        match t.near.filter(|&d| self.mode == Mode::DataAware && t.devices.has(d)) {
            None => DeviceSet::default(),
            Some(0) => {
                let stronger = t.devices.and(self.stronger);
                if stronger.is_empty() { DeviceSet::default().with(0) } else { stronger }
            }
            Some(d) => DeviceSet::default().with(d),
        }
    }

    /// Adaptive placement: which task on which device.
    fn place(&self, now_ns: u64, free: DeviceSet, ahead: &Ahead) -> Option<(usize, usize)> {
        // What the others have had since its turn stands for the time that it has waited: who takes long each time would
        // otherwise have the devices for longer, and whoever asks for little wait for one of each.
        let last = self.tasks.iter().map(|t| t.turn).max().unwrap_or(0);
        let current = |t: &Ready<K>| Stats { wait_ns: last - t.turn, ..t.stats };
        let mean = Averages::of(self.tasks.iter().map(current));
        let mut ahead = *ahead;
        // The highest first; of equals who has had least, and then the oldest.
        let order = |(i, t): (usize, &Ready<K>)| (std::cmp::Reverse(effective(&current(t), &mean)), t.turn, i);
        let mut left: Vec<_> = self.tasks.iter().enumerate().map(order).collect();
        left.sort_unstable();
        for (_, _, i) in left {
            let t = &self.tasks[i];
            let known = || t.devices.iter().filter(|&d| d < MAX_PLACED && t.counts[d] != u64::MAX);
            let (shared, cores) = self.shared;
            let best = |set: DeviceSet, ahead: &Ahead| {
                let end = |d: usize| {
                    let all = if shared.has(d) { ahead.all_done(t.work[d], d, cores) } else { 0 };
                    ahead.until[d].saturating_add(t.counts[d]).max(all)
                };
                known().filter(|&d| set.has(d)).min_by_key(|&d| (end(d), d))
            };
            let Some(d) = best(t.devices, &ahead) else {
                // Nothing is known of it.
                match self.strongest(t.devices.and(free)) {
                    Some(d) => return Some((i, d)),
                    None => continue,
                }
            };
            let waited = now_ns.saturating_sub(t.since_ns);
            let patient = waited < PATIENCE_NS.max(t.counts[d].saturating_mul(4));
            match if patient { free.has(d).then_some(d) } else { best(t.devices.and(free), &ahead) } {
                Some(d) => return Some((i, d)),
                None => {
                    ahead.until[d] = ahead.until[d].saturating_add(t.counts[d]);
                    ahead.work = ahead.work.saturating_add(if shared.has(d) { t.work[d] } else { 0 });
                }
            }
        }
        None
    }

    /// Takes the task to run next, given the devices that could start one now, and, for adaptive placement, what has begun.
    pub fn pick(&mut self, now_ns: u64, free: DeviceSet, ahead: &Ahead) -> Option<Pick<K>> {
        let wait = |t: &Ready<K>| now_ns.saturating_sub(t.since_ns);
        let (at, device) = match self.mode {
            Mode::FirstAvailable => {
                self.tasks.iter().enumerate().find_map(|(i, t)| self.strongest(t.devices.and(free)).map(|d| (i, d)))?
            }
            Mode::Fifo => (0, self.strongest(self.tasks.front()?.devices.and(free))?),
            Mode::Priority | Mode::DataAware => {
                let current = |t: &Ready<K>| Stats { wait_ns: wait(t), ..t.stats };
                let mean = Averages::of(self.tasks.iter().map(current));
                let mut best: Option<(i64, usize, usize)> = None;
                for (i, t) in self.tasks.iter().enumerate() {
                    let e = effective(&current(t), &mean);
                    let home = self.home(t);
                    let patient = e <= WAIT_LIMIT && wait(t) < WAIT_LIMIT as u64 * crate::priority::STEP_NS;
                    let device = match self.strongest(home.and(free)) {
                        None if home.is_empty() || !patient => self.strongest(t.devices.and(free)),
                        at_home => at_home,
                    };
                    if let Some(d) = device
                        && best.is_none_or(|(b, _, _)| e > b)
                    {
                        best = Some((e, i, d));
                    }
                }
                let (_, i, d) = best?;
                (i, d)
            }
            Mode::Adaptive => self.place(now_ns, free, ahead)?,
        };
        let t = self.tasks.remove(at)?;
        let count_ns = t.counts.get(device).copied().unwrap_or(u64::MAX);
        let of = if self.shared.0.has(device) { &t.work } else { &t.counts };
        let work_ns = of.get(device).copied().filter(|_| count_ns != u64::MAX).unwrap_or(t.stats.avg_run_ns);
        Some(Pick { key: t.key, device, turn: t.turn, waited_ns: wait(&t), count_ns, work_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Ahead = Ahead { until: [0; MAX_PLACED], work: 0, threads: 0, others: 0 };
    use proptest::prelude::*;

    fn task(key: u32, devices: u32, near: Option<usize>, since_ns: u64, priority: i32) -> Ready<u32> {
        let stats = Stats { priority, ..Stats::default() };
        Ready {
            key,
            devices: DeviceSet(devices),
            near,
            counts: [u64::MAX; MAX_PLACED],
            work: [0; MAX_PLACED],
            turn: 0,
            since_ns,
            stats,
        }
    }

    /// Figure 13 in virtual time: four tasks that always want the one device; each stands in line again at once.
    #[test]
    fn rates_rise_with_priority_and_nobody_starves() {
        const RUN_NS: u64 = 250_000;
        for mode in [Mode::Priority, Mode::Fifo] {
            let mut q = ReadyQueue::new(mode, vec![1]);
            let device = DeviceSet::default().with(0);
            let mut done = [0u32; 4];
            let mut waits = [0u64; 4];
            let mut now = 0;
            let stand = |q: &mut ReadyQueue<usize>, key: usize, now, avg_wait_ns| {
                let priority = [2, 4, 6, 8][key];
                let stats = Stats { priority, avg_wait_ns, avg_run_ns: RUN_NS, ..Stats::default() };
                assert!(q.push(Ready {
                    key,
                    devices: device,
                    near: None,
                    counts: [u64::MAX; MAX_PLACED],
                    work: [0; MAX_PLACED],
                    turn: 0,
                    since_ns: now,
                    stats
                }));
            };
            (0..4).for_each(|key| stand(&mut q, key, 0, 0));
            while now < 2_000_000_000 {
                let p = q.pick(now, device, &IDLE).unwrap();
                waits[p.key] = crate::priority::decay(waits[p.key], p.waited_ns);
                now += RUN_NS;
                done[p.key] += 1;
                stand(&mut q, p.key, now, waits[p.key]);
            }
            if mode == Mode::Fifo {
                assert!(done.iter().all(|d| d.abs_diff(done[0]) <= 1), "{done:?}");
            } else {
                assert!(done.windows(2).all(|w| w[0] < w[1]), "{done:?}");
                // 30 points behind: no more than about 30 steps of waiting, so some sixty turns in two seconds.
                assert!(done[0] > 50, "{done:?}");
            }
        }
    }

    #[test]
    fn fifo_waits_for_the_head_and_first_available_does_not() {
        for (mode, want) in [(Mode::Fifo, None), (Mode::FirstAvailable, Some(2))] {
            let mut q = ReadyQueue::new(mode, vec![1, 2]);
            assert!(q.push(task(1, 0b10, None, 0, 0)) && q.push(task(2, 0b01, None, 1, 0)));
            assert_eq!(q.pick(5, DeviceSet(0b01), &IDLE).map(|p| p.key), want, "{mode}");
        }
    }

    #[test]
    fn the_strongest_device_is_taken_unless_the_data_is_elsewhere() {
        let mut q = ReadyQueue::new(Mode::Priority, vec![1, 9]);
        assert!(q.push(task(1, 0b11, Some(0), 0, 0)));
        assert_eq!(q.pick(0, DeviceSet(0b11), &IDLE).map(|p| p.device), Some(1));
        let mut q = ReadyQueue::new(Mode::DataAware, vec![1, 9, 8]);
        assert!(q.push(task(1, 0b111, Some(2), 0, 0)));
        assert_eq!(q.pick(0, DeviceSet(0b111), &IDLE).map(|p| p.device), Some(2));
    }

    #[test]
    fn a_data_aware_task_waits_for_its_device_and_moves_at_last() {
        let mut q = ReadyQueue::new(Mode::DataAware, vec![1, 9, 8]);
        assert!(q.push(task(1, 0b111, Some(2), 0, 0)));
        assert_eq!(q.pick(1_000_000, DeviceSet(0b011), &IDLE), None);
        assert_eq!(q.pick(20_000_000, DeviceSet(0b011), &IDLE).map(|p| p.device), Some(1));
    }

    /// Everything comes from the host at first: that is no reason to stay there.
    #[test]
    fn data_of_the_host_goes_to_what_is_stronger() {
        let at = |strengths: &[u64], devices, free, now| {
            let mut q = ReadyQueue::new(Mode::DataAware, strengths.to_vec());
            assert!(q.push(task(1, devices, Some(0), 0, 0)));
            q.pick(now, DeviceSet(free), &IDLE).map(|p| p.device)
        };
        assert_eq!(at(&[4, 9, 9], 0b111, 0b111, 0), Some(1));
        assert_eq!(at(&[4, 9, 9], 0b111, 0b101, 0), Some(2), "two that are alike");
        // A device that is weaker, as an OpenCL driver for the same cores is, gets it only if it has to wait for long.
        assert_eq!(at(&[4, 3], 0b11, 0b11, 0), Some(0));
        assert_eq!(at(&[4, 3], 0b11, 0b10, 1_000_000), None);
        assert_eq!(at(&[4, 3], 0b11, 0b10, 20_000_000), Some(1));
        // So does the host, while all that are stronger have enough to do.
        assert_eq!(at(&[4, 9], 0b11, 0b01, 1_000_000), None);
        assert_eq!(at(&[4, 9], 0b11, 0b01, 20_000_000), Some(0));
        assert_eq!(at(&[4, 9], 0b01, 0b11, 0), Some(0), "it has no other implementation");
    }

    #[test]
    fn priority_orders_and_age_breaks_ties() {
        let mut q = ReadyQueue::new(Mode::Priority, vec![1]);
        for (k, p) in [(1, 2), (2, 8), (3, 4), (4, 8)] {
            assert!(q.push(task(k, 1, None, 0, p)));
        }
        let order: Vec<u32> = std::iter::from_fn(|| q.pick(10, DeviceSet(1), &IDLE).map(|p| p.key)).collect();
        assert_eq!(order, [2, 4, 3, 1]);
    }

    fn counted(key: u32, since_ns: u64, priority: i32, counts: &[u64]) -> Ready<u32> {
        let mut t = task(key, (1 << counts.len()) - 1, None, since_ns, priority);
        t.counts[..counts.len()].copy_from_slice(counts);
        t
    }

    fn ahead(of: &[u64]) -> Ahead {
        let mut a = IDLE;
        a.until[..of.len()].copy_from_slice(of);
        a
    }

    #[test]
    fn adaptive_tasks_go_where_they_end_first() {
        const MS: u64 = 1_000_000;
        let queue = |tasks: &[Ready<u32>]| {
            let mut q = ReadyQueue::new(Mode::Adaptive, vec![1, 9]);
            tasks.iter().for_each(|t| assert!(q.push(*t)));
            q
        };
        let device =
            |q: &mut ReadyQueue<u32>, free, a: &[u64]| q.pick(0, DeviceSet(free), &ahead(a)).map(|p| (p.key, p.device));
        let slow_and_fast = counted(1, 0, 0, &[10 * MS, 3 * MS]);
        assert_eq!(device(&mut queue(&[slow_and_fast]), 0b11, &[0, 0]), Some((1, 1)));
        // The queue ahead counts: a wait of 5 is worth it, one of 8 is not.
        assert_eq!(device(&mut queue(&[slow_and_fast]), 0b01, &[0, 5 * MS]), None);
        assert_eq!(device(&mut queue(&[slow_and_fast]), 0b01, &[0, 8 * MS]), Some((1, 0)));
        // Of three that would all rather have the fast one, the first two wait for it, and the third does not.
        let three = [1, 2, 3].map(|k| counted(k, 0, 0, &[10 * MS, 3 * MS]));
        assert_eq!(device(&mut queue(&three), 0b01, &[0, 3 * MS]), Some((3, 0)));
        // The more urgent one chooses first.
        let two = [counted(1, 0, 0, &[4 * MS, 3 * MS]), counted(2, 0, 30, &[4 * MS, 3 * MS])];
        assert_eq!(device(&mut queue(&two), 0b11, &[0, 0]), Some((2, 1)));
        // The second device is the two cores of the first: alone it ends sooner there, and beside what they have left to do only
        // if it is less work.
        let shared = |work: [u64; 2]| {
            let mut t = counted(1, 0, 0, &[10 * MS, 6 * MS]);
            t.work[..2].copy_from_slice(&work.map(|w| w * MS));
            let mut q = ReadyQueue::new(Mode::Adaptive, vec![1, 9]).sharing(DeviceSet(0b11), 2);
            assert!(q.push(t));
            q
        };
        let busy = Ahead { work: 10 * MS, ..IDLE };
        let placed = |work, a: &Ahead| shared(work).pick(0, DeviceSet(0b11), a).map(|p| (p.device, p.work_ns / MS));
        assert_eq!(placed([10, 12], &IDLE), Some((1, 12)));
        assert_eq!(placed([10, 12], &busy), Some((0, 10)));
        assert_eq!(placed([10, 8], &busy), Some((1, 8)));
        // Beside four threads of others two get a third of the cores, and with the two that come along a half.
        let beside = Ahead { threads: 2, others: 4000, ..busy };
        assert_eq!(placed([10, 12], &beside), Some((1, 12)));
        assert_eq!(placed([10, 30], &beside), Some((0, 10)), "too much more work");
        let done = |others, d| {
            let mut a = beside;
            a.others = others;
            a.all_done(10 * MS, d, 2) / MS
        };
        assert_eq!([(0, 0), (0, 1), (4000, 0), (4000, 1)].map(|(others, d)| done(others, d)), [10, 10, 30, 20]);
        let full = Ahead { work: u64::MAX, others: u64::MAX, ..IDLE };
        assert_eq!(full.all_done(1, 0, 1), u64::MAX);
        // Of equals whoever has had least, and not the oldest.
        let had = |key, turn| Ready { turn, ..counted(key, u64::from(key), 0, &[4 * MS, 3 * MS]) };
        let mut q = queue(&[had(1, 7), had(2, 5), had(3, 6)]);
        let order: Vec<_> = std::iter::from_fn(|| q.pick(9, DeviceSet(0b11), &IDLE)).map(|p| (p.key, p.turn)).collect();
        assert_eq!(order, [(2, 5), (3, 6), (1, 7)]);
        // Whoever has waited far too long takes what there is.
        let mut q = queue(&[counted(1, 0, 0, &[100 * MS, 3 * MS])]);
        assert_eq!(q.pick(10 * MS, DeviceSet(0b01), &ahead(&[0, MS])), None);
        assert_eq!(q.pick(21 * MS, DeviceSet(0b01), &ahead(&[0, MS])).map(|p| p.device), Some(0));
        // Of an unknown task nothing is predicted.
        assert_eq!(device(&mut queue(&[task(1, 0b11, None, 0, 0)]), 0b11, &[0, 0]), Some((1, 1)));
    }

    proptest! {
        /// Every mode: a pick is a ready task on a free device that can run it; everything is picked once; with all
        /// devices free for long enough nothing is left over.
        #[test]
        fn every_task_runs_once_where_it_can(
            mode in 0usize..5,
            tasks in proptest::collection::vec((1u32..16, proptest::option::of(0usize..4), 0u64..1000, -5i32..5, 0u64..9_000_000), 0..40),
            frees in proptest::collection::vec(0u32..16, 0..40),
        ) {
            let mode = Mode::ALL[mode];
            let mut q = ReadyQueue::new(mode, vec![3, 1, 4, 1]);
            for (i, &(d, near, since, p, count)) in tasks.iter().enumerate() {
                let mut t = task(i as u32, d, near, since, p);
                t.counts[..4].copy_from_slice(&[count, count / 2, count / 3 * 4, u64::MAX]);
                prop_assert!(q.push(t));
            }
            let mut seen = std::collections::HashSet::new();
            let endless = std::iter::repeat(0b1111u32);
            let mut now = 1000;
            for free in frees.into_iter().chain(endless) {
                now += 1_000_000;
                if q.is_empty() { break; }
                if let Some(p) = q.pick(now, DeviceSet(free), &IDLE) {
                    prop_assert!(seen.insert(p.key));
                    prop_assert!(DeviceSet(free).has(p.device) && DeviceSet(tasks[p.key as usize].0).has(p.device));
                } else if free == 0b1111 {
                    prop_assert!(false, "all devices are free, {} tasks are ready, none was picked", q.len());
                }
            }
            prop_assert_eq!(seen.len(), tasks.len());
        }

        /// Under fifo the order of picks is the order of pushes, whatever the priorities.
        #[test]
        fn fifo_is_fifo(priorities in proptest::collection::vec(-9i32..9, 1..50)) {
            let mut q = ReadyQueue::new(Mode::Fifo, vec![1]);
            for (i, &p) in priorities.iter().enumerate() {
                prop_assert!(q.push(task(i as u32, 1, None, 0, p)));
            }
            let order: Vec<u32> = std::iter::from_fn(|| q.pick(1 << 40, DeviceSet(1), &IDLE).map(|p| p.key)).collect();
            prop_assert_eq!(order, (0..priorities.len() as u32).collect::<Vec<_>>());
        }
    }
}
