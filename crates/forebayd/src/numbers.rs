//! Whose the numbers in the GPU's log are, where this is a container with process numbers of its own: the log has the
//! machine's, and nothing that a container may ask translates them. So it is seen who is on the GPU when who is kept off.
//!
//! Rules:
//! 1. At the end of each window the agent says who was kept off the GPU ([`Meter::passed`]), and the log which numbers came
//!    onto it, from [`SETTLED_NS`] after the window's beginning on. A number that came is not that of a process that was off.
//!    One that was there before and still is says nothing: it may do nothing, and nobody else has come.
//! 2. A number is a process's when it was there in [`ENOUGH`] windows of that one and missing in [`ENOUGH`] in which that was
//!    off, with none in between that says otherwise, and no other process could say the same.
//! 3. The last process without a number has the last number without a process, once it was there in [`ENOUGH`] windows.
//! 4. A process without a number has used what numbers without a process, which might be its, have held while it was on the
//!    GPU. So it counts as one with work, is divided among those, and is kept off in others' windows, as rule 2 needs it.
//! 5. A number that comes in [`WRONG`] windows one after another in which its process is off was never that one's, which
//!    loses it and is looked at anew. One such window may be somebody who was taken off late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use forebay_rm::holds::KERNEL_PID;

use crate::accounts::LogMeter;
use crate::agent::Meter;

/// Whoever is taken off has gone so long after the beginning of a window.
pub const SETTLED_NS: u64 = 3_000_000;
/// Windows that say the same before it is believed.
pub const ENOUGH: u32 = 4;
/// Windows after which a number that was not a process's may be, if nothing said so meanwhile.
const AGAIN: u64 = 16;
/// Windows against a number before it is given up.
pub const WRONG: u32 = 2;
/// Numbers that are remembered, and windows after which one that has not been there is forgotten.
const MAX_NUMBERS: usize = 256;
const FORGOTTEN: u64 = 1000;

#[derive(Debug, Default)]
struct Process {
    /// Its number, and what that had used when it became that.
    number: Option<(u32, u64)>,
    /// What it had used until then.
    used_ns: u64,
    /// Whether it was on the GPU in this window.
    on: Option<bool>,
    /// In how many windows each number was there while it was on, and missing while it was off.
    seen: BTreeMap<u32, [u32; 2]>,
    /// Numbers that are not its, and the window that last said so.
    not: BTreeMap<u32, u64>,
    /// Windows that say it of the number that it has, one after another.
    wrong: u32,
}

impl Process {
    fn could_be(&self, number: u32) -> bool {
        self.seen.get(&number).is_some_and(|s| s.iter().all(|n| *n >= ENOUGH))
    }
}

/// What the log says of a number in a window.
#[derive(Default)]
struct Held {
    ns: u64,
    /// It has come onto the GPU.
    came: bool,
    /// It is there at the end.
    stays: bool,
}

/// The log, by this container's numbers.
pub struct Numbers {
    log: LogMeter,
    processes: BTreeMap<u32, Process>,
    /// Numbers without a process, and the window in which each was there last.
    free: BTreeMap<u32, u64>,
    window: u64,
    /// When the window began, on the log's clock.
    began_ns: u64,
    said: VecDeque<String>,
}

impl Numbers {
    /// Of this log.
    pub fn new(mut log: LogMeter) -> Self {
        log.keep_holds();
        let (processes, free) = (BTreeMap::new(), BTreeMap::new());
        Numbers { began_ns: log.now_ns(), log, processes, free, window: 0, said: VecDeque::new() }
    }

    /// The log's number of a process, if it is known.
    pub fn number_of(&self, pid: u32) -> Option<u32> {
        Some(self.processes.get(&pid)?.number?.0)
    }

    /// A window is over: what is to be learnt from it.
    fn learn(&mut self) {
        self.window += 1;
        let (began, now) = (self.began_ns, self.log.now_ns());
        self.began_ns = now;
        let mut held = BTreeMap::<u32, Held>::new();
        for h in self.log.take_holds().iter().filter(|h| h.pid != 0 && h.pid != KERNEL_PID) {
            let of = held.entry(h.pid).or_default();
            of.ns += h.to_ns.min(now).saturating_sub(h.from_ns.max(began));
            of.came |= h.from_ns >= began + SETTLED_NS;
            of.stays |= h.to_ns >= now;
        }
        let came = |number: &u32| held.get(number).is_some_and(|h| h.came);
        let stays = |number: &u32| held.get(number).is_some_and(|h| h.stays);
        for p in self.processes.values_mut() {
            // Rule 5.
            let (Some((number, at)), Some(false)) = (p.number, p.on) else { continue };
            p.wrong = if came(&number) { p.wrong + 1 } else { 0 };
            if p.wrong >= WRONG {
                p.used_ns += self.log.used_ns(number).unwrap_or(at).saturating_sub(at);
                (p.number, p.seen, p.wrong) = (None, BTreeMap::new(), 0);
                p.not.insert(number, self.window);
                self.free.insert(number, self.window);
            }
        }
        let owned: BTreeSet<u32> = self.processes.values().filter_map(|p| Some(p.number?.0)).collect();
        for number in held.keys().filter(|n| !owned.contains(n)) {
            if self.free.len() < MAX_NUMBERS || self.free.contains_key(number) {
                self.free.insert(*number, self.window);
            }
        }
        let window = self.window;
        self.processes.values_mut().for_each(|p| p.not.retain(|_, at| window - *at < AGAIN));
        self.free.retain(|_, last| window - *last < FORGOTTEN);
        for p in self.processes.values_mut().filter(|p| p.number.is_none()) {
            let Some(on) = p.on else { continue };
            if on {
                // Rule 4.
                let its = held.iter().filter(|(n, _)| !owned.contains(n) && !p.not.contains_key(n));
                p.used_ns += its.map(|(_, h)| h.ns).sum::<u64>().min(now.saturating_sub(began));
            }
            for number in self.free.keys() {
                let seen = p.seen.entry(*number).or_default();
                match (on, came(number), stays(number)) {
                    (true, true, _) | (true, _, true) => seen[0] += 1,
                    (false, false, false) => seen[1] += 1,
                    (false, true, _) => {
                        *seen = [0, 0];
                        p.not.insert(*number, window);
                    }
                    _ => {}
                }
            }
            p.seen.retain(|n, _| self.free.contains_key(n));
        }
        self.conclude();
        self.processes.values_mut().for_each(|p| p.on = None);
    }

    fn conclude(&mut self) {
        for number in self.free.keys().copied().collect::<Vec<_>>() {
            let mut fits = self.processes.iter().filter(|(_, p)| p.number.is_none() && p.could_be(number));
            if let (Some((pid, _)), None) = (fits.next(), fits.next()) {
                self.settle(*pid, number);
            }
        }
        // Rule 3.
        let without: Vec<u32> =
            self.processes.iter().filter(|(_, p)| p.number.is_none()).map(|(pid, _)| *pid).collect();
        let numbers: Vec<u32> = self.free.keys().copied().collect();
        if let ([pid], [number]) = (&without[..], &numbers[..])
            && let Some(p) = self.processes.get(pid)
            && !p.not.contains_key(number)
            && p.seen.get(number).is_some_and(|s| s[0] >= ENOUGH)
        {
            self.settle(*pid, *number);
        }
    }

    fn settle(&mut self, pid: u32, number: u32) {
        let at = self.log.used_ns(number).unwrap_or(0);
        self.free.remove(&number);
        if let Some(p) = self.processes.get_mut(&pid) {
            (p.number, p.seen) = (Some((number, at)), BTreeMap::new());
            self.said.push_back(format!("process {pid} is {number} to the GPU's log"));
        }
    }
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut all = f.debug_struct("Numbers");
        all.field("processes", &self.processes).field("free", &self.free).field("window", &self.window).finish()
    }
}

impl Meter for Numbers {
    fn passed(&mut self, pid: u32, on: bool, _: u64) {
        self.processes.entry(pid).or_default().on = Some(on);
    }

    fn refresh(&mut self, to_the_moment: bool) {
        self.log.refresh(to_the_moment);
        // Somebody may only want to know how things are.
        if self.processes.values().any(|p| p.on.is_some()) {
            self.learn();
        }
    }

    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        let Some(p) = self.processes.get(&pid) else { return Some(0) };
        let since = p.number.map_or(0, |(number, at)| self.log.used_ns(number).unwrap_or(at).saturating_sub(at));
        Some(p.used_ns + since)
    }

    fn switches(&self, pid: u32) -> Option<u64> {
        self.log.switches(self.number_of(pid)?)
    }

    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        self.log.longest_away_ns(self.number_of(pid)?)
    }

    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        self.log.longest_stay_ns(self.number_of(pid)?)
    }

    fn gaps(&self) -> u64 {
        self.log.gaps()
    }

    fn contexts(&self, pid: u32) -> usize {
        self.number_of(pid).map_or(0, |number| self.log.contexts(number))
    }

    fn forget(&mut self, pid: u32) {
        if let Some((number, _)) = self.processes.remove(&pid).and_then(|p| p.number) {
            self.log.forget(number);
        }
    }

    fn trouble(&mut self) -> Option<String> {
        self.log.trouble().or_else(|| self.said.pop_front())
    }
}
