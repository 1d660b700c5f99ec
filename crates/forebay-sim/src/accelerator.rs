//! Programs on an accelerator whose use they report themselves, with limits of what they may have of a GPU's memory.
//!
//! The accelerator serves everybody with work in it by turns, as GPUs do. A connection of a program is a queue of it, in
//! order; of each piece of work it says when it began and how long it took: from its issue, or the end of the one before, to
//! its end, which contains others' turns. Programs come with one connection or two, make new ones, start others, pause, change class and
//! die; the service is killed. After every calm stretch:
//! 1. programs with work all the time have had their shares of the accelerator, within [`TOLERANCE`];
//! 2. it was not idle while somebody had work, within [`IDLE`];
//! 3. suspended programs have had nothing;
//! 4. the service knows exactly the programs that are there, and their classes;
//! 5. whoever had more memory than its limit at two looks in a row was ended, and nobody else.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering;

use forebay_policy::begin;
use forebay_policy::credit::TICK_NS;
use forebay_policy::share::{self, Member, WHOLE, shares};
use forebay_proto::wire::{Class, Reply, Request};
use forebayd::service::{Answer, Service, SessionId};

use crate::office::{Office, Os, policy};
use crate::{BEGIN, Outcome, noted};

/// Allowed distance from a share, in millionths.
pub const TOLERANCE: u64 = 30_000;
/// What may be idle while somebody has work, in millionths.
pub const IDLE: u64 = 60_000;
const STRETCH_US: u64 = 5_000_000;
const SETTLE_US: u64 = 2_000_000;
const STRETCHES: usize = 4;
const STEP_US: u64 = 100;
/// The service looks at memory so often.
const LOOK_US: u64 = 250_000;
/// What the driver has in a program of the library is not its own.
const DRIVERS_OWN: u64 = 1 << 30;
const DEVICE: &str = "accelerator";

/// A connection, and what is in its queue.
struct Queue {
    session: SessionId,
    /// When each piece of work was issued, and how much of it is left, ns.
    work: VecDeque<(u64, u64)>,
    /// The end of the one before, ns.
    done_ns: u64,
    /// What a piece takes, as far as is known.
    each_ns: u64,
}

struct Program {
    began: u64,
    class: Class,
    task_ns: u64,
    /// Pieces of work in a queue at a time.
    depth: usize,
    working: bool,
    queues: Vec<Queue>,
    /// What it has had of the accelerator.
    had_ns: u64,
    memory: u64,
    limit: Option<u64>,
    /// Whether it had too much at the last look.
    was_over: bool,
}

struct Machine {
    rng: fastrand::Rng,
    office: Office,
    programs: BTreeMap<u32, Program>,
    next_pid: u32,
    now_ns: u64,
    since_tick_ns: u64,
    broken: bool,
    hash: u64,
}

/// Runs one scenario. `broken`: a mistake that the oracles must find: programs do not ask for credit.
pub fn run(seed: u64, broken: bool) -> Outcome {
    let mut m = Machine {
        rng: fastrand::Rng::with_seed(seed ^ 0xacce1),
        office: Office::new(2, &[(DEVICE, 1)]),
        programs: BTreeMap::new(),
        next_pid: 100,
        now_ns: 1,
        since_tick_ns: 0,
        broken,
        hash: BEGIN,
    };
    for _ in 0..m.rng.usize(2..6) {
        m.arrive(1);
    }
    for _ in 0..STRETCHES {
        for _ in 0..m.rng.usize(1..4) {
            m.event();
        }
        m.pass(SETTLE_US);
        m.judge();
    }
    Outcome { hash: m.hash, judged: STRETCHES, violations: m.office.violations }
}

impl Program {
    /// Fills its queues, if it has credit.
    fn issue(&mut self, service: &Service<Os>, now_ns: u64, anyhow: bool) {
        for q in self.queues.iter_mut().filter(|_| self.working) {
            let Some((c, page)) = service.pages(q.session) else { continue };
            let (a, mine) = (&c.accounts[0], &page.accounts[0]);
            // As the library does (`run/issue.rs`): what is in the queue already will be used as well.
            let may = |there: usize| {
                let used = mine.used_ns(|| now_ns) + begin::of_pieces(there as u64, q.each_ns);
                a.allowance.load(Ordering::Relaxed) > used && a.hold.load(Ordering::Relaxed) == 0
            };
            while q.work.len() < self.depth && (may(q.work.len()) || anyhow) {
                q.work.push_back((now_ns, self.task_ns));
            }
            if !q.work.is_empty() && mine.since.load(Ordering::Relaxed) == 0 {
                mine.since.store(now_ns, Ordering::Relaxed);
            }
        }
    }
}

impl Machine {
    fn queue(&mut self, pid: u32) -> Queue {
        Queue { session: self.office.register(pid, DEVICE, false), work: VecDeque::new(), done_ns: 0, each_ns: 0 }
    }

    /// A program begins, started by that one.
    fn arrive(&mut self, parent: u32) {
        let pid = self.next_pid;
        self.next_pid += 1;
        let began = self.office.birth(pid, parent);
        let queues = (0..self.rng.usize(1..3)).map(|_| self.queue(pid)).collect();
        let task_ns = [100_000, 500_000, 1_000_000, 5_000_000, 20_000_000][self.rng.usize(0..5)];
        let depth = self.rng.usize(1..4);
        // A share is one process's own; everything else comes with where it is from.
        let from = self.programs.get(&parent);
        let class =
            from.map_or(Class::Normal, |p| if let Class::Custom(_) = p.class { Class::Normal } else { p.class });
        let limit = from.and_then(|p| p.limit);
        let p = Program {
            began,
            class,
            task_ns,
            depth,
            working: true,
            queues,
            had_ns: 0,
            memory: 0,
            limit,
            was_over: false,
        };
        self.programs.insert(pid, p);
        self.hash = noted(self.hash, u64::from(pid) ^ task_ns);
        if parent == 1 {
            let class = self.class();
            self.set(pid, class);
        }
    }

    fn class(&mut self) -> Class {
        match self.rng.u32(0..8) {
            0..3 => Class::Custom(self.rng.u32(50_000..400_000)),
            3 => Class::Background,
            4 => Class::Suspended,
            _ => Class::Normal,
        }
    }

    fn set(&mut self, pid: u32, class: Class) {
        if self.office.set(pid, class) {
            self.programs.entry(pid).and_modify(|p| p.class = class);
        }
    }

    fn die(&mut self, pid: u32) {
        let Some(p) = self.programs.remove(&pid) else { return };
        self.office.service.world().processes.remove(&pid);
        self.office.service.exited(pid);
        p.queues.iter().for_each(|q| self.office.service.disconnect(q.session));
    }

    fn event(&mut self) {
        let what = self.rng.u32(0..11);
        self.hash = noted(self.hash, u64::from(what));
        let n = self.programs.len();
        let any = if n == 0 { None } else { self.programs.keys().nth(self.rng.usize(0..n)).copied() };
        let Some(pid) = any else { return self.arrive(1) };
        match what {
            0 => self.arrive(1),
            1 => self.arrive(pid),
            2 => self.die(pid),
            3 | 4 => drop(self.programs.entry(pid).and_modify(|p| p.working = !p.working)),
            5 => {
                let class = self.class();
                self.set(pid, class);
            }
            6 => {
                // It begins anew with what is in its queues, over other connections.
                let old: Vec<SessionId> =
                    self.programs.get(&pid).map_or(vec![], |p| p.queues.iter().map(|q| q.session).collect());
                old.iter().for_each(|session| self.office.service.disconnect(*session));
                let new: Vec<Queue> = old.iter().map(|_| self.queue(pid)).collect();
                self.programs.entry(pid).and_modify(|p| p.queues = new);
            }
            7 => {
                self.office.restart(self.now_ns);
                for pid in self.programs.keys().copied().collect::<Vec<_>>() {
                    let sessions: Vec<SessionId> = (0..self.programs[&pid].queues.len())
                        .map(|_| self.office.register(pid, DEVICE, false))
                        .collect();
                    let renew = |p: &mut Program| {
                        p.queues.iter_mut().zip(&sessions).for_each(|(q, session)| q.session = *session);
                    };
                    self.programs.entry(pid).and_modify(renew);
                }
            }
            8 => {
                let limit = (self.rng.u32(0..4) > 0).then(|| self.rng.u64(1..8) << 30);
                match self.office.ask_as_root(&Request::Limit { pid, memory: limit }) {
                    Answer::Reply(Reply::Done) => drop(self.programs.entry(pid).and_modify(|p| p.limit = limit)),
                    other => self.office.wrong(format!("{pid} was not limited: {other:?}")),
                }
            }
            _ => {
                let more = [0, 1, DRIVERS_OWN, DRIVERS_OWN + 1][self.rng.usize(0..4)];
                self.programs.entry(pid).and_modify(|p| p.memory = p.limit.unwrap_or(DRIVERS_OWN) + more);
            }
        }
    }

    /// The fifth oracle.
    fn look(&mut self) {
        let has: BTreeMap<u32, u64> = self.programs.iter().map(|(pid, p)| (*pid, p.memory)).collect();
        let mut due = BTreeSet::new();
        for (pid, p) in &mut self.programs {
            let over = p.limit.is_some_and(|limit| p.memory > limit + DRIVERS_OWN);
            if over && p.was_over {
                due.insert((*pid, p.began));
            }
            p.was_over = over;
        }
        let said = self.office.service.memory(0, &has);
        let ended: BTreeSet<(u32, u64)> = std::mem::take(&mut self.office.service.world().ended).into_iter().collect();
        if ended != due {
            self.office.wrong(format!("{ended:?} were ended, {due:?} were due, and the log says {said:?}"));
        }
        due.into_iter().chain(ended).for_each(|(pid, _)| self.die(pid));
    }

    fn pass(&mut self, us: u64) {
        for step in 0..us / STEP_US {
            self.step();
            if (step * STEP_US).is_multiple_of(LOOK_US) {
                self.look();
            }
        }
    }

    fn step(&mut self) {
        let step_ns = STEP_US * 1000;
        let service = &self.office.service;
        for p in self.programs.values_mut() {
            p.issue(service, self.now_ns, self.broken);
        }
        let busy = self.programs.values().flat_map(|p| &p.queues).filter(|q| !q.work.is_empty()).count();
        let each = step_ns / busy.max(1) as u64;
        let now_ns = self.now_ns + step_ns;
        for p in self.programs.values_mut() {
            for i in 0..p.queues.len() {
                let mut time = each;
                while let Some((issued, left)) = p.queues.get_mut(i).and_then(|q| q.work.front_mut()) {
                    let now = time.min(*left);
                    (*left, time) = (*left - now, time - now);
                    p.had_ns += now;
                    if *left > 0 {
                        break;
                    }
                    let (issued, q) = (*issued, &mut p.queues[i]);
                    let took = now_ns - issued.max(q.done_ns);
                    q.done_ns = now_ns;
                    q.work.pop_front();
                    q.each_ns = if q.each_ns == 0 { took } else { (3 * q.each_ns + took) / 4 };
                    if let Some((_, page)) = service.pages(q.session) {
                        let since = if q.work.is_empty() { 0 } else { now_ns };
                        page.accounts[0].since.store(since, Ordering::Relaxed);
                        page.accounts[0].spent.fetch_add(took, Ordering::Relaxed);
                    }
                    // What is left of the time goes into what it issues next.
                    p.issue(service, now_ns, self.broken);
                }
            }
        }
        self.now_ns = now_ns;
        self.since_tick_ns += step_ns;
        // Now and then the service is late.
        let late = if self.rng.u32(0..200) == 0 { 3 * TICK_NS } else { 0 };
        if self.since_tick_ns >= self.office.service.tick_ns() + late {
            self.since_tick_ns = 0;
            self.office.service.tick(now_ns, 0);
        }
    }

    fn judge(&mut self) {
        let had = |m: &Machine| m.programs.iter().map(|(pid, p)| (*pid, p.had_ns)).collect::<BTreeMap<u32, u64>>();
        let before = had(self);
        self.pass(STRETCH_US);
        // Whoever was ended meanwhile makes it no calm stretch.
        let calm = before.len() == self.programs.len();
        let got: Vec<u64> = had(self).iter().map(|(pid, ns)| ns - before[pid]).collect();
        got.iter().for_each(|g| self.hash = noted(self.hash, *g));
        let members: Vec<Member> = self
            .programs
            .iter()
            .map(|(pid, p)| {
                let class = policy(p.class);
                Member { id: u64::from(*pid), class, nice: 0, active: p.working && p.class != Class::Suspended }
            })
            .collect();
        let want = shares(&members);
        let total: u64 = got.iter().sum();
        let stretch_ns = STRETCH_US * 1000;
        if calm && want.iter().sum::<u64>() > 0 && total < stretch_ns / WHOLE * (WHOLE - IDLE) {
            self.office.wrong(format!("{} of {stretch_ns} ns were idle with {members:?}", stretch_ns - total));
        }
        for ((m, want), got) in members.iter().zip(want).zip(&got) {
            let part = (u128::from(*got) * u128::from(WHOLE)).checked_div(total.into()).unwrap_or(0) as u64;
            if calm && part.abs_diff(want) > TOLERANCE {
                self.office.wrong(format!("{m:?} had {part} instead of {want} millionths"));
            }
            if m.class == share::Class::Suspended && *got > 0 {
                self.office.wrong(format!("{m:?} is suspended and had {got} ns"));
            }
        }
        self.office.judge_known(self.programs.iter().map(|(pid, p)| (*pid, p.class)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first five: one with a queue of short tasks beside some with two of long ones was held up by them, and could not
    /// hold what it lacked. The next two: one that rested kept what it held of what others owed. The last one: one held what
    /// background programs owed, who pay nothing back, and was ahead of its share for seconds later. The very last: one issued
    /// six pieces of 20 ms at once, and paid for them for so long that it mattered in five seconds.
    const FOUND: [u64; 9] = [
        1_795_512_211,
        1_795_512_310,
        1_795_512_576,
        1_795_512_611,
        1_795_512_629,
        1_795_512_286,
        1_795_512_436,
        5491,
        1_795_574_133,
    ];

    #[test]
    fn the_oracles_are_content_with_the_service() {
        for seed in (0..30).chain(FOUND) {
            let o = run(seed, false);
            assert_eq!(o.violations, Vec::<String>::new(), "seed {seed}");
        }
    }

    #[test]
    fn the_same_seed_is_the_same_story_and_another_one_is_another() {
        assert_eq!(run(7, false), run(7, false));
        assert_ne!(run(7, false).hash, run(8, false).hash);
    }

    #[test]
    fn programs_that_do_not_ask_are_caught() {
        let caught = (0..10).filter(|s| !run(*s, true).violations.is_empty()).count();
        assert!(caught >= 8, "{caught} of 10");
    }
}
