//! A model of how the hardware shares itself: channel groups take turns.
//!
//! A group with work holds the GPU until its slice is over or its queue runs dry, then the next one with work gets it; a
//! change of group costs [`SWITCH_US`]. A kernel that is taken off goes on where it was. A group whose channels are all
//! disabled gets no turn; one that is disabled while it holds the GPU loses it at once. The process submits its next
//! kernel some time after the last one has ended, so a process with short kernels gives up most of its turn: that is why
//! slices alone are no shares.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::DEFAULT_SLICE_US;
use super::log::Change;
use crate::sys::RawHandle;

/// Kernels whose latency is remembered.
const MAX_LATENCIES: usize = 100_000;
/// Cost of a change between groups, µs.
pub const SWITCH_US: u64 = 150;

/// What a process asks of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Length of a kernel, µs; 0 for none.
    pub kernel_us: u64,
    /// Kernels in flight.
    pub depth: u64,
    /// From a kernel's end to the next one's being there, µs.
    pub think_us: u64,
}

impl Load {
    /// Nothing.
    pub const IDLE: Load = Load { kernel_us: 0, depth: 0, think_us: 0 };

    /// Kernels of this length, back to back, two in flight.
    pub const fn saturating(kernel_us: u64) -> Load {
        Load { kernel_us, depth: 2, think_us: 20 }
    }
}

struct Group {
    pid: u32,
    /// What the log calls it: the lowest number that is nobody's, so that a later one may have it.
    context: u32,
    load: Load,
    slice_us: u64,
    channels: usize,
    disabled: HashSet<(RawHandle, RawHandle)>,
    /// What is left of the kernel that has begun; 0 for none.
    left_us: u64,
    /// When further kernels came, which wait.
    waiting: VecDeque<u64>,
    /// When the one that runs came.
    began_us: u64,
    /// How long the last kernels took from their coming to their end.
    latencies: VecDeque<u64>,
    /// When kernels that were asked for arrive.
    arrivals: Vec<u64>,
    /// Lengths of kernels of a program that says itself what it does, whether one of them has begun, and how many have ended.
    asked: VecDeque<u64>,
    of_asked: bool,
    ended: u64,
    held_us: u64,
}

impl Group {
    fn enabled(&self) -> bool {
        self.disabled.len() < self.channels.max(1)
    }

    fn ready(&self) -> bool {
        self.enabled() && (self.left_us > 0 || !self.waiting.is_empty() || !self.asked.is_empty())
    }
}

/// The GPU.
#[derive(Default)]
pub struct Gpu {
    groups: BTreeMap<usize, Group>,
    next: usize,
    now_us: u64,
    /// Who holds the GPU, and how much of the slice is used.
    holder: Option<(usize, u64)>,
    switches: u64,
    /// What is on the GPU: process and context, which may have gone since.
    resident: Option<(u32, u32)>,
    changes: Vec<Change>,
    /// Nothing runs, and whatever is asked of it is refused with this status: it has fallen off the bus, for one.
    pub(super) refuses: Option<u32>,
}

impl Gpu {
    /// A group of a process; its number.
    pub fn add(&mut self, pid: u32, load: Load) -> usize {
        self.next += 1;
        let waiting = if load.kernel_us > 0 { load.depth } else { 0 };
        let waiting = (0..waiting).map(|_| self.now_us).collect();
        let taken: HashSet<u32> = self.groups.values().map(|g| g.context).collect();
        let context = (1..).find(|c| !taken.contains(c)).unwrap_or_default();
        let group = Group {
            pid,
            context,
            load,
            slice_us: DEFAULT_SLICE_US,
            channels: 0,
            disabled: HashSet::new(),
            left_us: 0,
            waiting,
            began_us: 0,
            latencies: VecDeque::new(),
            arrivals: Vec::new(),
            asked: VecDeque::new(),
            of_asked: false,
            ended: 0,
            held_us: 0,
        };
        self.groups.insert(self.next, group);
        self.next
    }

    pub(super) fn add_channel(&mut self, group: usize) {
        if let Some(g) = self.groups.get_mut(&group) {
            g.channels += 1;
        }
    }

    pub(super) fn remove(&mut self, group: usize) {
        self.groups.remove(&group);
    }

    /// The first group of a process asks for this from now on; what it has in flight ends first.
    pub(super) fn set_load(&mut self, pid: u32, load: Load) {
        let now = self.now_us;
        if let Some(g) = self.groups.values_mut().find(|g| g.pid == pid) {
            let in_flight = (g.waiting.len() + g.arrivals.len()) as u64 + u64::from(g.left_us > 0);
            g.load = load;
            if load.kernel_us == 0 {
                (g.waiting, g.arrivals) = (VecDeque::new(), Vec::new());
            } else {
                g.waiting.extend((in_flight..load.depth).map(|_| now));
            }
        }
    }

    /// The first group of a process has one kernel more to do, which lasts so long; its number among these.
    pub(super) fn ask(&mut self, pid: u32, us: u64) -> Option<u64> {
        let g = self.groups.values_mut().find(|g| g.pid == pid)?;
        g.asked.push_back(us.max(1));
        Some(g.ended + u64::from(g.of_asked && g.left_us > 0) + g.asked.len() as u64)
    }

    /// No kernel that was asked for ends sooner than in so many µs, if nobody is let on or asks for another meanwhile.
    pub(super) fn soonest_us(&self) -> Option<u64> {
        let holder = self.holder.map_or(0, |(n, _)| n);
        let able = self.groups.iter().filter(|(_, g)| g.enabled() && (g.of_asked || !g.asked.is_empty()));
        let ends = able.filter_map(|(n, g)| {
            let left = if g.left_us > 0 { g.left_us } else { *g.asked.front()? };
            Some(left + if *n == holder { 0 } else { SWITCH_US })
        });
        ends.min()
    }

    /// Whether that has ended; that of a process which has gone, too.
    pub(super) fn has_ended(&self, pid: u32, kernel: u64) -> bool {
        self.groups.values().find(|g| g.pid == pid).is_none_or(|g| g.ended >= kernel)
    }

    pub(super) fn is_suspended(&self, pid: u32) -> bool {
        self.groups.values().any(|g| g.pid == pid && !g.disabled.is_empty())
    }

    pub(super) fn is_sliced(&self, pid: u32) -> bool {
        self.groups.values().any(|g| g.pid == pid && g.slice_us != DEFAULT_SLICE_US)
    }

    pub(super) fn slice(&self, group: usize) -> u64 {
        self.groups.get(&group).map_or(0, |g| g.slice_us)
    }

    pub(super) fn set_slice(&mut self, group: usize, us: u64) {
        if let Some(g) = self.groups.get_mut(&group) {
            g.slice_us = us;
        }
    }

    pub(super) fn enable(&mut self, group: usize, channel: (RawHandle, RawHandle), on: bool) {
        if let Some(g) = self.groups.get_mut(&group) {
            if on {
                g.disabled.remove(&channel);
            } else {
                g.disabled.insert(channel);
            }
        }
    }

    /// µs that a process has held the GPU.
    pub fn time_of(&self, pid: u32) -> Option<u64> {
        let mut of = self.groups.values().filter(|g| g.pid == pid).peekable();
        of.peek()?;
        Some(of.map(|g| g.held_us).sum())
    }

    /// Changes between groups.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// How long the last kernels of a process took from their coming to their end, µs.
    pub(super) fn latencies(&mut self, pid: u32) -> Vec<u64> {
        self.groups.values_mut().filter(|g| g.pid == pid).flat_map(|g| std::mem::take(&mut g.latencies)).collect()
    }

    /// µs since it began.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// What its log has recorded since this was asked last.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The context of `to` comes onto the GPU at `at_us`, that of whoever was there has gone when the switch began.
    fn load(&mut self, to: usize, at_us: u64) {
        let began = at_us.saturating_sub(SWITCH_US);
        let (pid, context) = self.groups.get(&to).map_or((0, 0), |g| (g.pid, g.context));
        if let Some((pid, context)) = self.resident.replace((pid, context)) {
            self.changes.push(Change { at_us: began, pid, context, begins: false });
        }
        self.changes.push(Change { at_us, pid, context, begins: true });
    }

    fn arrive(&mut self) {
        let now = self.now_us;
        for g in self.groups.values_mut() {
            let waiting = &mut g.waiting;
            g.arrivals.retain(|at| {
                if *at <= now {
                    waiting.push_back(*at);
                }
                *at > now
            });
        }
    }

    /// The next group with work behind `after`, around.
    fn pick(&self, after: usize) -> Option<usize> {
        let behind = self.groups.range(after + 1..).chain(self.groups.range(..=after));
        behind.filter(|(_, g)| g.ready()).map(|(n, _)| *n).next()
    }

    /// Lets `us` pass.
    pub fn run(&mut self, us: u64) {
        let end = self.now_us + us;
        if self.refuses.is_some() {
            self.now_us = end;
        }
        while self.now_us < end {
            self.arrive();
            let (holder, used) = self.holder.unwrap_or((0, 0));
            let keeps = self.groups.get(&holder).is_some_and(|g| g.ready() && used < g.slice_us);
            if !keeps {
                match self.pick(holder) {
                    // The same one again: a new slice, no change.
                    Some(next) if next == holder => self.holder = Some((next, 0)),
                    Some(next) => {
                        self.switches += 1;
                        self.now_us += SWITCH_US;
                        self.holder = Some((next, 0));
                        self.load(next, self.now_us);
                        continue;
                    }
                    None => {
                        // Idle until something arrives; whoever held the GPU keeps its context there.
                        let next = self.groups.values().flat_map(|g| &g.arrivals).min().copied();
                        self.now_us = next.unwrap_or(end).clamp(self.now_us + 1, end.max(self.now_us + 1));
                        continue;
                    }
                }
            }
            let Some((holder, used)) = self.holder else { continue };
            let now = self.now_us;
            let Some(g) = self.groups.get_mut(&holder) else { continue };
            if g.left_us == 0 {
                let asked = g.asked.pop_front();
                g.of_asked = asked.is_some();
                g.left_us = asked.unwrap_or(g.load.kernel_us);
                g.began_us = if g.of_asked { now } else { g.waiting.pop_front().unwrap_or(now) };
            }
            let step = g.left_us.min(g.slice_us.saturating_sub(used).max(1)).min(end.saturating_sub(now).max(1));
            g.left_us -= step;
            g.held_us += step;
            if g.left_us == 0 && g.of_asked {
                g.ended += 1;
            } else if g.left_us == 0 && g.load.kernel_us > 0 {
                g.arrivals.push(now + step + g.load.think_us);
                g.latencies.truncate(MAX_LATENCIES - 1);
                g.latencies.push_front(now + step - g.began_us);
            }
            self.now_us += step;
            self.holder = Some((holder, used + step));
        }
    }
}
