//! A GPU divided by suspension: the service's own policy and agent, on the fake driver with its model of the hardware's
//! turns.
//!
//! A scenario is drawn from its seed: processes with kernels of other lengths and other classes, which pause, die, arrive
//! late and change class, and an agent that now and then is killed without a chance to give anything back. After every
//! calm stretch the oracles are asked:
//! 1. whoever had work all the time has its share of the time, within [`TOLERANCE`];
//! 2. the GPU was not idle while somebody had work: the total is what is possible, within [`TOLERANCE`];
//! 3. once the agent has gone by itself, nobody is suspended and nobody's slices are changed; and once a killed one's
//!    successor has adopted everybody, nobody is suspended who should not be;
//! 4. the kernels of an interactive process with a short one every few milliseconds are done within 700 µs, but for
//!    one in a hundred; and one that never rests takes no more than its reserve and a normal member's share from others.
//!
//! Time on the GPU is what the agent reads from the log of context switches; the oracles ask the fake itself.
//!
//! Everything follows from the seed; the trace's hash says so.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_policy::reserve;
use forebay_policy::share::{Class, Member, WHOLE, shares};
use forebay_rm::Client;
use forebay_rm::fake::{FakeRm, Load, SWITCH_US};
use forebayd::accounts::LogMeter;
use forebayd::agent::{Agent, Refused, SHORT_SLICE_US};

use crate::{BEGIN, Outcome, noted};

/// Allowed distance from a share, in millionths of the device.
pub const TOLERANCE: u64 = 30_000;
/// And more where an owner may have one short kernel at a time: whoever is let on beside it for 5 ms of 155 has them all.
const GUESTS: u64 = 5_000;
/// Length of a calm stretch, µs of virtual time.
const STRETCH_US: u64 = 5_000_000;
/// Time for the agent to notice what changed before a stretch is judged, µs.
const SETTLE_US: u64 = 1_000_000;
/// What an idle agent waits before it looks again, µs.
const IDLE_LOOK_US: u64 = 25_000;
/// Within so much an interactive process's kernel of 100 µs is done, µs: somebody's short turn, switches, and itself.
const PROMPT_US: u64 = 700;
/// So much time of its windows shows that a process has work now and then only, µs, and a round more.
const LIGHT_US: u64 = 600_000;
/// Kernels of such a process, and the shortest time between two, µs.
const LIGHT_KERNEL_US: u64 = 300;
const LIGHT_THINK_US: u64 = 12_000;
/// At most so much time passes between an event and its stretch in slow stories, µs: enough for everybody to be seen to fill turns.
const SLOW_US: u64 = 15_000_000;
/// Stretches of a scenario.
const STRETCHES: usize = 6;

struct World {
    rng: fastrand::Rng,
    /// How many others have come and gone: apart, so that seeds mean what they did before.
    others: fastrand::Rng,
    rm: FakeRm,
    agent: Agent<LogMeter>,
    /// Class of each process, and whether it has work.
    processes: BTreeMap<u32, (Class, bool)>,
    /// Interactive processes, and whether each never rests.
    interactive: BTreeMap<u32, bool>,
    /// A normal process with a short kernel now and then, in some stories. It is no reason for others to wait.
    light: Option<u32>,
    next_pid: u32,
    /// Whether much time passes between two events, and looks at turns in the windows' place.
    slow: bool,
    turns: usize,
    /// A mistake that the oracles must find: windows are not charged.
    broken: bool,
    hash: u64,
    violations: Vec<String>,
}

fn open(rm: &FakeRm) -> Agent<LogMeter> {
    let agent = Client::open(Arc::new(rm.clone()), 0).and_then(|own| {
        let own = Arc::new(own);
        Ok(Agent::new(own.clone(), LogMeter::open(own)?))
    });
    agent.unwrap_or_else(|e| unreachable!("the fake has a driver and a log: {e}"))
}

/// Runs one scenario.
///
/// `broken` makes a mistake that the oracles must find: windows are not charged.
pub fn run(seed: u64, broken: bool) -> Outcome {
    tell(seed, broken, false).0
}

/// Runs one in which more time passes between two events, so that windows give way to turns; some programs have nothing in
/// their queues between two kernels, and so fill none; and the driver's calls take as long as they do on a GPU.
pub fn run_slow(seed: u64, broken: bool) -> Outcome {
    tell(seed, broken, true).0
}

/// What came of it, and in how many windows' places there were turns.
fn tell(seed: u64, broken: bool, slow: bool) -> (Outcome, usize) {
    let rm = FakeRm::default();
    if slow {
        rm.let_calls_take_time();
    }
    let mut w = World {
        rng: fastrand::Rng::with_seed(seed),
        others: fastrand::Rng::with_seed(seed ^ 0x07e5),
        agent: open(&rm),
        rm,
        processes: BTreeMap::new(),
        interactive: BTreeMap::new(),
        light: None,
        slow,
        turns: 0,
        next_pid: 100,
        broken,
        hash: BEGIN,
        violations: Vec::new(),
    };
    for _ in 0..w.rng.usize(2..6) {
        w.arrive();
    }
    if w.others.u32(0..3) == 0 {
        w.come_lightly();
    }
    for i in 0..STRETCHES {
        let restarted = w.event();
        w.pass(SETTLE_US);
        if w.slow {
            let us = w.others.u64(0..SLOW_US);
            w.pass(us);
        }
        if w.light.is_some() && (i == 0 || restarted) {
            // Half a second of its own windows shows what it is.
            w.pass(LIGHT_US * (w.processes.len() as u64 + 1));
        }
        w.judge();
    }
    let World { rm, agent, processes, interactive, turns, hash, mut violations, .. } = w;
    drop(agent);
    let all = || processes.keys().chain(interactive.keys());
    violations.extend(all().filter(|p| rm.is_sliced(**p)).map(|p| format!("{p} was left with another slice")));
    violations.extend(processes.keys().filter(|p| rm.is_suspended(**p)).map(|p| format!("{p} was left suspended")));
    (Outcome { hash, judged: STRETCHES, violations }, turns)
}

impl World {
    fn note(&mut self, v: u64) {
        self.hash = noted(self.hash, v);
    }

    fn class(&mut self) -> Class {
        match self.rng.u32(0..10) {
            0..2 => Class::Custom(self.rng.u32(50_000..300_000)),
            2..8 => Class::Normal,
            8 => Class::Background,
            _ => Class::Suspended,
        }
    }

    fn arrive(&mut self) {
        let pid = self.next_pid;
        self.next_pid += 1;
        // Long against a window's switch, short against the window: what time division is for.
        let kernel_us = [100, 500, 1000, 2000][self.rng.usize(0..4)];
        let (groups, channels) = (self.rng.usize(1..5), self.rng.usize(1..8));
        let one = Load { kernel_us, depth: 1, think_us: kernel_us / 100 };
        let load = if self.slow && self.others.u32(0..4) == 0 { one } else { Load::saturating(kernel_us) };
        self.rm.start(pid, groups, channels, load);
        let class = self.class();
        self.processes.insert(pid, (class, true));
        self.adopt(pid, class);
        self.note(u64::from(pid) << 32 | kernel_us);
    }

    /// Adopts, or takes a class that fits when the custom shares would be too much.
    fn adopt(&mut self, pid: u32, class: Class) {
        match self.agent.adopt(pid, class, 0) {
            Ok(()) => drop(self.processes.insert(pid, (class, self.processes.get(&pid).is_none_or(|p| p.1)))),
            Err(Refused::Policy(_)) => self.adopt(pid, Class::Normal),
            Err(Refused::Driver(e)) => self.violations.push(format!("{pid} was not adopted: {e}")),
            Err(e @ (Refused::Ledger | Refused::Lock(_))) => {
                self.violations.push(format!("{pid} was not adopted: {e:?}"))
            }
        }
    }

    /// Someone who wants to be let through at once: now and then, or (seldom) all the time.
    fn call(&mut self) {
        let pid = self.next_pid;
        self.next_pid += 1;
        let never_rests = self.rng.u32(0..4) == 0;
        let think_us = if never_rests { 20 } else { self.rng.u64(3000..7000) };
        self.rm.start(pid, 1, 2, Load { kernel_us: 100, depth: 1, think_us });
        match self.agent.adopt(pid, Class::Interactive, 0) {
            Ok(()) => drop(self.interactive.insert(pid, never_rests)),
            Err(e) => self.violations.push(format!("{pid} was not adopted: {e:?}")),
        }
        self.note(u64::from(pid) << 32 | think_us);
    }

    fn come_lightly(&mut self) {
        let pid = self.next_pid + 10_000;
        let think_us = self.others.u64(LIGHT_THINK_US..3 * LIGHT_THINK_US);
        self.rm.start(pid, 1, 2, Load { kernel_us: LIGHT_KERNEL_US, depth: 1, think_us });
        self.light = Some(pid);
        self.adopt_light();
        self.note(u64::from(pid) << 32 | think_us);
    }

    fn adopt_light(&mut self) {
        let Some(pid) = self.light else { return };
        if let Err(e) = self.agent.adopt(pid, Class::Normal, 0) {
            self.violations.push(format!("{pid} was not adopted: {e:?}"));
        }
    }

    fn any(&mut self) -> Option<u32> {
        let n = self.processes.len();
        if n == 0 { None } else { self.processes.keys().nth(self.rng.usize(0..n)).copied() }
    }

    /// Something happens; whether the agent has begun anew.
    fn event(&mut self) -> bool {
        let what = self.rng.u32(0..9);
        self.note(u64::from(what));
        // Others come and go all the while, and look at the GPU: the driver numbers their clients, too.
        for _ in 0..self.others.u32(0..200) {
            drop(Client::open(Arc::new(self.rm.clone()), 0));
        }
        let Some(pid) = self.any() else {
            self.arrive();
            return false;
        };
        match what {
            0 => self.arrive(),
            1 => {
                self.rm.kill(pid);
                self.processes.remove(&pid);
            }
            2 | 3 => {
                let (_, busy) = self.processes[&pid];
                self.rm.set_load(pid, if busy { Load::IDLE } else { Load::saturating(1000) });
                self.processes.entry(pid).and_modify(|p| p.1 = !busy);
            }
            4 => {
                let class = self.class();
                self.adopt(pid, class);
            }
            5 => {
                // Killed: nothing is given back. The next one adopts everybody, whose clients the service had written down.
                let killed = std::mem::replace(&mut self.agent, open(&self.rm));
                for pid in self.interactive.keys().chain(self.processes.keys()).chain(&self.light) {
                    self.agent.remember(*pid, &killed.clients_of(*pid));
                }
                std::mem::forget(killed);
                self.adopt_light();
                for pid in self.interactive.clone().into_keys() {
                    if let Err(e) = self.agent.adopt(pid, Class::Interactive, 0) {
                        self.violations.push(format!("{pid} was not adopted again: {e:?}"));
                    }
                }
                for (pid, (class, _)) in self.processes.clone() {
                    self.adopt(pid, class);
                    if self.rm.is_sliced(pid) {
                        self.violations.push(format!("{pid} still has another slice after it was adopted"));
                    }
                    if self.rm.is_suspended(pid) {
                        self.violations.push(format!("{pid} is still suspended after it was adopted"));
                    }
                }
            }
            6 if self.interactive.is_empty() => self.call(),
            6 => {
                if let Some((pid, _)) = self.interactive.pop_first() {
                    self.rm.kill(pid);
                    // Nothing is ever done to it; the service hears of its end.
                    self.agent.forget(pid);
                }
            }
            _ => {}
        }
        what == 5
    }

    /// Lets time pass in windows, as the agent wants them.
    fn pass(&mut self, us: u64) {
        let mut begun = self.rm.now_us();
        let end = begun + us;
        while begun < end {
            let length = self.agent.begin().map_or(IDLE_LOOK_US, |w| w.length_ns / 1000);
            self.rm.run((begun + length).min(end).saturating_sub(self.rm.now_us()).max(1));
            self.turns += usize::from(self.agent.has_turns());
            // What the agent needs for the end of a window is the next one's time.
            let now = self.rm.now_us();
            if !self.broken {
                self.agent.end((now - begun) * 1000);
            }
            begun = now;
        }
    }

    fn judge(&mut self) {
        let busy = |c: &Class, has_work: bool| has_work && *c != Class::Suspended;
        let members: Vec<Member> = self
            .processes
            .iter()
            .map(|(pid, (class, work))| Member {
                id: u64::from(*pid),
                class: *class,
                nice: 0,
                active: busy(class, *work),
            })
            .collect();
        let want = shares(&members);
        let time = |w: &World, m: &Member| w.rm.gpu_time(m.id as u32).unwrap_or(0);
        self.interactive.keys().for_each(|p| drop(self.rm.latencies(*p)));
        let before: Vec<u64> = members.iter().map(|m| time(self, m)).collect();
        self.pass(STRETCH_US);
        let got: Vec<u64> = members.iter().zip(before).map(|(m, b)| time(self, m) - b).collect();
        got.iter().for_each(|g| self.note(*g));
        let total: u64 = got.iter().sum();
        let wanted: u64 = want.iter().sum();
        self.judge_interactive();
        if self.interactive.values().any(|never_rests| *never_rests) {
            // What it takes beyond its reserve depends on how it is classed from moment to moment; the others share what
            // is left of the time in proportion, and that is at least so much, but for the windows that anybody may be
            // behind by: who is due less than a window may have none in a stretch.
            let one_more = Member { id: 0, class: Class::Normal, nice: 0, active: true };
            let want = shares(&[members.as_slice(), &[one_more]].concat());
            for ((m, want), got) in members.iter().zip(want).zip(got) {
                let least = want * (WHOLE - reserve::SHARE) / WHOLE * 7 / 10;
                let calls = if self.slow { TOLERANCE } else { 0 };
                let behind = self.agent.bound_ns() / 1000 * WHOLE / STRETCH_US + calls;
                if m.class != Class::Background && got * WHOLE / STRETCH_US + behind < least {
                    self.violations
                        .push(format!("{m:?} had {got} µs beside one that never rests: {least} millionths due"));
                }
            }
            return;
        }
        // A window begins with a switch, and kernels run past its end.
        // Whoever comes every 3 ms takes two switches and a kernel.
        let calls = if self.interactive.is_empty() { 0 } else { (2 * SWITCH_US + 100) * WHOLE / 3000 };
        // Beside an interactive one slices are short, and a kernel takes several.
        let turns = if self.interactive.is_empty() { 1 } else { LIGHT_KERNEL_US / SHORT_SLICE_US };
        let cost_us = (2 * turns + 1) * SWITCH_US + LIGHT_KERNEL_US;
        let light = self.light.map_or(0, |_| cost_us * WHOLE / LIGHT_THINK_US);
        if wanted > 0 && total * WHOLE / STRETCH_US < WHOLE - 2 * TOLERANCE - calls - light {
            self.violations.push(format!("the GPU was used for {total} of {STRETCH_US} µs by {members:?}"));
        }
        for ((m, want), got) in members.iter().zip(want).zip(got) {
            let share = (got * WHOLE).checked_div(total).unwrap_or(0);
            if share.abs_diff(want) > TOLERANCE + if self.slow { GUESTS } else { 0 } {
                self.violations.push(format!("{m:?} had {share} instead of {want} millionths"));
            }
        }
    }
}

impl World {
    /// The fourth oracle.
    fn judge_interactive(&mut self) {
        for (pid, never_rests) in self.interactive.clone() {
            let mut took = self.rm.latencies(pid);
            took.sort_unstable();
            took.iter().for_each(|t| self.note(*t));
            let p99 = took.get(took.len() * 99 / 100).copied();
            if !never_rests && p99.is_none_or(|t| t > PROMPT_US) {
                self.violations.push(format!("interactive {pid} waited {p99:?} µs, of {} times", took.len()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 178: an idle background process was suspended with everybody else and never came back. 65, 142: an idle process was
    /// alone on the GPU, held it in the log's eyes, and others waited for ever. 1795384038: of somebody who was due a
    /// third of a window the oracle wanted to see it within a stretch.
    /// 21699: what a light process used was due to others in unequal parts, which one of them had at once much later.
    /// 81644: an interactive process came at the end of every fourth window, while a light one had its turn.
    /// 470014: an interactive process was there alone in the window of somebody who had gone, and counted as never resting.
    const FOUND: [u64; 7] = [178, 65, 142, 1_795_384_038, 21_699, 81_644, 470_014];

    #[test]
    fn the_oracles_are_content_with_the_service() {
        // Beside some seeds in a row, those that once found something.
        for seed in (0..40).chain(FOUND) {
            let o = run(seed, false);
            assert_eq!(o.violations, Vec::<String>::new(), "seed {seed}");
        }
    }

    /// 17: one with short kernels one at a time was taken for a light process. 7000: the same, when a guest was let on beside it, and
    /// a background process had its time. 30377: two with one kernel at a time shared turns that they gave up, and changed
    /// places at each. 74176: a light process beside an interactive one came often, as all slices were short, and had windows.
    /// 1795727999: owners of probes had one slice of 50 µs there, counted as idle, and were left on the GPU for the next 100 ms of
    /// one that never rests, which was charged a third of that and had its reserve for good.
    const FOUND_SLOW: [u64; 6] = [17, 7000, 30_377, 74_176, 1_795_727_999, 1_795_755_599];

    #[test]
    fn they_are_content_with_turns_too() {
        let mut with_turns = 0;
        for seed in (0..20).chain(FOUND_SLOW) {
            let (o, turns) = tell(seed, false, true);
            assert_eq!(o.violations, Vec::<String>::new(), "seed {seed}");
            with_turns += usize::from(turns > 20);
        }
        assert!(with_turns >= 5, "in {with_turns}");
    }

    #[test]
    fn the_same_seed_is_the_same_story_and_another_one_is_another() {
        assert_eq!(run(7, false), run(7, false));
        assert_ne!(run(7, false).hash, run(8, false).hash);
    }

    #[test]
    fn a_broken_service_is_caught() {
        let caught = (0..10).filter(|s| !run(*s, true).violations.is_empty()).count();
        assert!(caught >= 8, "{caught} of 10");
    }
}
