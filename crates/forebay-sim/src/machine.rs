//! A machine with several GPUs: the service whole, as its daemon runs it, on the fake driver. What it hears of processes,
//! of time and of GPUs it hears late, or wrongly, or not at all.
//!
//! Programs come, each on some of the GPUs, begin to use another one, end what they have on one and make it anew, are moved
//! off all of theirs and come back, make others that have their files and make more, pause, change class, and die, with
//! those that they made or before them; some ends are heard of late, and then the number may be somebody else's already.
//! GPUs fall off. The service is killed (its guardian gives back what it had taken, and the next one has what was saved),
//! is kept from running for a while, and its clock jumps. The GPUs' logs lose records, or are forgotten by the driver.
//! Other programs come to the driver and go. After every calm stretch, on each GPU that is there:
//! 1. programs with work all the time have had their shares of its time, within [`TOLERANCE`];
//! 2. it was not idle while somebody had work, within twice that;
//! 3. suspended programs have had nothing;
//! 4. the kernels of an interactive program with a short one every few milliseconds are done within 700 µs for each such program, but for one in
//!    a hundred;
//! 5. the service knows exactly the programs that are on it, and their classes; of a GPU that has fallen off it knows none,
//!    and it remembers nobody who has ended;
//! 6. there is nothing at the driver but what programs have, and one client and one log of the service's for each GPU;
//! 7. what the service said is what was to be said: once of each GPU that fell off, of its log when that was forgotten.
//!
//! At the end the service goes, and nobody is suspended or sliced, and nothing of it is left.

use std::collections::{BTreeMap, BTreeSet};

use forebay_policy::share::{self, Member, WHOLE, shares};
use forebay_proto::wire::{Class, Reply, Request};
use forebay_rm::Client;
use forebay_rm::fake::{FakeRm, Load, SWITCH_US};
use forebayd::service::Answer;

use crate::office::{Office, policy};
use crate::{BEGIN, Outcome, noted};

/// Allowed distance from a share, in millionths of a GPU: three points, and a half as whoever is let on for 5 ms of 155 beside a
/// lone owner may stay until the driver has taken it off.
pub const TOLERANCE: u64 = 35_000;
const STRETCH_US: u64 = 4_000_000;
/// Until what changed has settled, µs: a log that was forgotten is opened anew after one second of the clock.
const SETTLE_US: u64 = 2_000_000;
const STRETCHES: usize = 4;
/// As the daemon's: between two looks for processes.
const LOOK_US: u64 = 150_000;
/// The service is kept from running for so long at most: longer, and its guardian would end it.
const HANG_US: u64 = 1_500_000;
/// An end is heard of so much later at most.
const LATE_US: u64 = 800_000;
/// A kernel of an interactive program, µs; and within so much it is done, for each such program on the machine, but for one in a hundred.
const CALL_US: u64 = 100;
const PROMPT_US: u64 = 700;
/// The clock jumps by so much at most, ns.
const JUMP_NS: u64 = 60_000_000_000;

struct Program {
    class: Class,
    load: Load,
    working: bool,
    /// The GPUs that it is on, with how many channel groups and channels in each.
    on: BTreeMap<usize, (usize, usize)>,
    /// It was moved off them; until then (µs) the service does not know.
    away: Option<u64>,
    /// It is interactive, with a short kernel now and then.
    calls: bool,
    /// Who made it with the driver open (1 once that one has ended); it has nothing on GPUs itself.
    maker: Option<u32>,
    /// The first of those that it comes from, whose files it has.
    first: Option<u32>,
    /// That one has ended: what it had is there as long as somebody has its files, and may be taken to be this one's.
    heir: bool,
}

impl Program {
    fn asks(&self) -> Load {
        if self.working { self.load } else { Load::IDLE }
    }
}

struct Machine {
    rng: fastrand::Rng,
    rm: FakeRm,
    office: Office,
    /// GPUs that have fallen off.
    lost: BTreeSet<usize>,
    programs: BTreeMap<u32, Program>,
    /// Numbers of programs that have ended.
    free: Vec<u32>,
    next_pid: u32,
    /// Ends that are heard of later: when, whose, and the beginning of who that was.
    late: Vec<(u64, u32, u64)>,
    /// The service's clock is so much ahead of the GPUs', ns.
    ahead_ns: u64,
    turn_us: u64,
    look_us: u64,
    tick_us: u64,
    /// Those of which the service has not said so yet.
    falling: BTreeSet<usize>,
    /// GPUs whose log the driver has forgotten since the service began.
    forgotten: BTreeSet<usize>,
    /// A mistake that the oracles must find: the service hears of no end.
    broken: bool,
    hash: u64,
}

/// Runs one scenario. `broken`: a mistake that the oracles must find: the service hears of no end.
pub fn run(seed: u64, broken: bool) -> Outcome {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x6d61_6368);
    let rm = FakeRm::with_gpus(rng.usize(1..4));
    if rng.bool() {
        rm.let_calls_take_time();
    }
    let office = Office::with_gpus(2, rm.clone());
    let mut m = Machine {
        rng,
        rm,
        office,
        lost: BTreeSet::new(),
        programs: BTreeMap::new(),
        free: Vec::new(),
        next_pid: 100,
        late: Vec::new(),
        ahead_ns: 1,
        turn_us: 0,
        look_us: 0,
        tick_us: 0,
        falling: BTreeSet::new(),
        forgotten: BTreeSet::new(),
        broken,
        hash: BEGIN,
    };
    for _ in 0..m.rng.usize(2..6) {
        m.arrive();
    }
    for _ in 0..STRETCHES {
        m.pass(LOOK_US);
        for _ in 0..m.rng.usize(1..4) {
            m.event();
            let us = m.rng.u64(0..2 * LOOK_US);
            m.pass(us);
        }
        // Where little happens the log would be without records for longer than what changed takes to settle.
        m.rm.lose_records(0);
        m.pass(SETTLE_US);
        m.judge();
    }
    m.end()
}

impl Machine {
    fn now_ns(&self) -> u64 {
        self.rm.now_us() * 1000 + self.ahead_ns
    }

    fn there(&self) -> Vec<usize> {
        (0..self.rm.gpus()).filter(|g| !self.lost.contains(g)).collect()
    }

    fn class(&mut self) -> Class {
        match self.rng.u32(0..8) {
            0..3 => Class::Custom(self.rng.u32(50_000..300_000)),
            3 => Class::Background,
            4 => Class::Suspended,
            _ => Class::Normal,
        }
    }

    /// A program comes; maybe with the number of one that has ended.
    fn arrive(&mut self) {
        let again = self.free.pop().filter(|_| self.rng.bool());
        let pid = again.unwrap_or(self.next_pid);
        self.next_pid += u32::from(again.is_none());
        self.office.birth(pid, 1);
        let kernel_us = [100, 500, 1000, 2000][self.rng.usize(0..4)];
        let calls = self.rng.u32(0..6) == 0;
        let think_us = self.rng.u64(3000..7000);
        let call = Load { kernel_us: CALL_US, depth: 1, think_us };
        let load = if calls { call } else { Load::saturating(kernel_us) };
        self.rm.start(pid, 0, 0, Load::IDLE);
        let (class, on) = (Class::Normal, BTreeMap::new());
        let made = Program { class, load, working: true, on, away: None, calls, maker: None, first: None, heir: false };
        self.programs.insert(pid, made);
        self.begin_to_use(pid);
        if self.rng.bool() {
            self.begin_to_use(pid);
        }
        self.hash = noted(self.hash, u64::from(pid) << 32 | kernel_us);
        let class = if calls { Class::Interactive } else { self.class() };
        self.set(pid, class);
    }

    /// A program makes channels on a GPU that is there.
    fn begin_to_use(&mut self, pid: u32) {
        let there = self.there();
        let gpu = there[self.rng.usize(0..there.len())];
        let shape = self.shape();
        let may = |p: &&mut Program| p.maker.is_none() && !p.on.contains_key(&gpu);
        let Some(p) = self.programs.get_mut(&pid).filter(may) else { return };
        p.on.insert(gpu, shape);
        self.rm.use_gpu(gpu, pid, shape.0, shape.1, p.asks());
    }

    /// A program makes another one, which has its files of the driver and uses none of them.
    fn fork(&mut self, maker: u32) {
        let may = |p: &&Program| p.away.is_none();
        let of = |p: &Program| (p.class, p.first.or(Some(maker)), p.heir);
        let Some((class, first, heir)) = self.programs.get(&maker).filter(may).map(of) else { return };
        let again = self.free.pop().filter(|_| self.rng.bool());
        let pid = again.unwrap_or(self.next_pid);
        self.next_pid += u32::from(again.is_none());
        self.office.birth(pid, maker);
        self.rm.fork(maker, pid);
        // An absolute share is one program's own.
        let class = if let Class::Custom(_) = class { Class::Normal } else { class };
        let (load, on) = (Load::IDLE, BTreeMap::new());
        let made =
            Program { class, load, working: false, on, away: None, calls: false, maker: Some(maker), first, heir };
        self.programs.insert(pid, made);
    }

    /// How many channel groups a program has on a GPU, and channels in each.
    fn shape(&mut self) -> (usize, usize) {
        (self.rng.usize(1..4), self.rng.usize(1..6))
    }

    /// A program ends its context on a GPU and makes another one, maybe just like it.
    fn begin_anew(&mut self, pid: u32) {
        let other = self.shape();
        let (which, alike) = (self.rng.usize(0..3), self.rng.bool());
        let Some(p) = self.programs.get_mut(&pid) else { return };
        let asks = p.asks();
        let Some((gpu, shape)) = p.on.iter_mut().nth(which).filter(|(gpu, _)| !self.lost.contains(gpu)) else { return };
        if !alike {
            *shape = other;
        }
        self.rm.end_context(*gpu, pid);
        self.rm.use_gpu(*gpu, pid, shape.0, shape.1, asks);
    }

    /// A program is moved off its GPUs, as by a checkpoint.
    fn move_off(&mut self, pid: u32) {
        if self.programs[&pid].maker.is_some() {
            return;
        }
        let known_until = self.rm.now_us() + self.rng.u64(0..LATE_US);
        self.rm.leave(pid);
        self.programs.entry(pid).and_modify(|p| p.away = Some(known_until));
    }

    /// It is back, on those that are there.
    fn move_back(&mut self, pid: u32) {
        let Some(p) = self.programs.get_mut(&pid) else { return };
        p.away = None;
        p.on.retain(|gpu, _| !self.lost.contains(gpu));
        self.rm.start(pid, 0, 0, Load::IDLE);
        for (gpu, (groups, channels)) in &p.on {
            self.rm.use_gpu(*gpu, pid, *groups, *channels, p.asks());
        }
    }

    fn set(&mut self, pid: u32, class: Class) {
        if self.office.set(pid, class) {
            self.programs.entry(pid).and_modify(|p| p.class = class);
        }
    }

    /// Whom a program has made, and whom these have.
    fn made_by(&self, pid: u32) -> Vec<u32> {
        let mut all = vec![pid];
        let mut next = 0;
        while let Some(maker) = all.get(next).copied() {
            all.extend(self.programs.iter().filter(|(_, p)| p.maker == Some(maker)).map(|(pid, _)| *pid));
            next += 1;
        }
        all.split_off(1)
    }

    /// Those that it has made go first, or with it, or stay.
    fn die(&mut self, pid: u32) {
        let made = self.made_by(pid);
        let (first, stay) = (self.rng.bool(), self.rng.u32(0..3) == 0);
        made.iter().filter(|_| first && !stay).for_each(|made| self.end_one(*made));
        for (kept, p) in self.programs.iter_mut().filter(|(kept, _)| stay || !made.contains(kept)) {
            p.heir |= p.first == Some(pid);
            if p.maker == Some(pid) {
                p.maker = Some(1);
                self.office.service.world().processes.entry(*kept).and_modify(|(about, _)| about.parent = 1);
            }
        }
        self.end_one(pid);
        made.iter().filter(|_| !first && !stay).for_each(|made| self.end_one(*made));
    }

    fn end_one(&mut self, pid: u32) {
        let Some(_) = self.programs.remove(&pid) else { return };
        self.rm.kill(pid);
        let was = self.office.service.world().processes.remove(&pid);
        // While somebody has its files its number is what the log says of what it had.
        if !self.programs.values().any(|p| p.first == Some(pid)) {
            self.free.push(pid);
        }
        if self.broken {
        } else if self.rng.bool() {
            self.office.service.exited(pid);
        } else if let Some((about, _)) = was {
            self.late.push((self.rm.now_us() + self.rng.u64(0..LATE_US), pid, about.began));
        }
    }

    fn any(&mut self) -> Option<u32> {
        let n = self.programs.len();
        if n == 0 { None } else { self.programs.keys().nth(self.rng.usize(0..n)).copied() }
    }

    fn event(&mut self) {
        let what = self.rng.u32(0..19);
        self.hash = noted(self.hash, u64::from(what));
        for _ in 0..self.rng.usize(0..30) {
            drop(Client::open(std::sync::Arc::new(self.rm.clone()), self.there()[0] as u32));
        }
        let Some(pid) = self.any() else { return self.arrive() };
        let is_away = self.programs[&pid].away.is_some();
        match what {
            2 | 3 | 9..14 => {}
            _ if is_away => return self.move_back(pid),
            _ => {}
        }
        match what {
            0 | 1 => self.arrive(),
            2 => self.die(pid),
            3 => {
                // Its number is somebody else's at once.
                self.die(pid);
                self.arrive();
            }
            4 | 5 => {
                let Some(p) = self.programs.get_mut(&pid) else { return };
                p.working = !p.working;
                self.rm.set_load(pid, if p.working { p.load } else { Load::IDLE });
            }
            6 | 7 if !self.programs[&pid].calls => {
                let class = self.class();
                self.set(pid, class);
            }
            6..9 => self.begin_to_use(pid),
            9 => {
                self.office.restart(self.now_ns());
                (self.turn_us, self.look_us, self.tick_us) = (0, 0, 0);
                self.falling.clear();
                self.forgotten.clear();
            }
            10 => {
                let there = self.there();
                if there.len() > 1 {
                    let gpu = there[self.rng.usize(0..there.len())];
                    self.rm.lose_gpu(gpu);
                    self.lost.insert(gpu);
                    self.falling.insert(gpu);
                }
            }
            11 => self.rm.lose_records(self.rng.u32(1..40)),
            12 => {
                // Whatever was due in the meantime is too late.
                let us = self.rng.u64(0..HANG_US);
                self.rm.run(us);
                self.ahead_ns += self.rng.u64(0..2) * self.rng.u64(0..JUMP_NS);
            }
            13 => {
                self.rm.forget_logs();
                self.forgotten.extend(self.there());
            }
            14 => self.move_off(pid),
            17 | 18 => self.fork(pid),
            _ => self.begin_anew(pid),
        }
    }

    /// Lets time pass, with the service called when it wants to be, as its daemon does.
    fn pass(&mut self, us: u64) {
        let end = self.rm.now_us() + us;
        while self.rm.now_us() < end {
            let now = self.rm.now_us();
            let late = self.late.iter().map(|(at, ..)| *at).min().unwrap_or(u64::MAX);
            let next = [self.turn_us, self.look_us, self.tick_us, late, end].into_iter().min().unwrap_or(end);
            self.rm.run(next.saturating_sub(now).max(1));
            let now = self.rm.now_us();
            self.hear_of_ends(now);
            let turn_ns = self.office.service.turn(self.now_ns());
            self.turn_us = turn_ns.map_or(u64::MAX, |ns| ns.saturating_sub(self.ahead_ns) / 1000);
            if now >= self.look_us {
                self.look_us = now + LOOK_US;
                self.look();
            }
            if now >= self.tick_us {
                self.tick_us = now + self.office.service.tick_ns() / 1000;
                self.office.service.tick(self.now_ns(), 0);
            }
        }
    }

    fn hear_of_ends(&mut self, now: u64) {
        let (due, late): (Vec<_>, _) = std::mem::take(&mut self.late).into_iter().partition(|(at, ..)| *at <= now);
        self.late = late;
        for (_, pid, began) in due {
            // Once the service watches who has the number now, nothing comes of who had it before.
            if self.office.service.save().iter().any(|s| s.pid == pid && s.began == began) {
                self.office.service.exited(pid);
            }
        }
    }

    fn look(&mut self) {
        let now = self.rm.now_us();
        let has = |p: &Program| p.away.is_none_or(|known_until| now < known_until);
        let pids: Vec<u32> = self.programs.iter().filter(|(_, p)| has(p)).map(|(pid, _)| *pid).collect();
        let mut said = Vec::new();
        for gpu in 0..self.office.numbers.len() {
            said.extend(self.office.service.gpu_processes(gpu, &pids));
        }
        said.extend(self.office.service.trouble());
        for line in said {
            // Of shares there was no room for others on the GPU when a program came.
            if line.contains("until there is room") || line.contains("the share that it is to have") {
                continue;
            }
            let of = |gpu: &usize| line.starts_with(&format!("gpu{gpu}"));
            let of_log = line.contains("cannot be read") || line.contains("can be read again");
            if of_log && self.forgotten.iter().any(of) {
                continue;
            }
            let fallen = self.falling.iter().copied().find(|gpu| of(gpu) && line.contains("has fallen off"));
            if !fallen.is_some_and(|gpu| self.falling.remove(&gpu)) {
                self.office.wrong(format!("it said: {line}"));
            }
        }
    }

    /// What is to be on a GPU.
    fn members(&self, gpu: usize) -> Vec<(u32, Member)> {
        let of = |(pid, p): (&u32, &Program)| {
            let class = policy(p.class);
            let active = p.working && p.class != Class::Suspended;
            (*pid, Member { id: u64::from(*pid), class, nice: 0, active })
        };
        self.programs.iter().filter(|(_, p)| p.away.is_none() && p.on.contains_key(&gpu)).map(of).collect()
    }

    fn judge(&mut self) {
        let there = self.there();
        let time = |m: &Machine| -> BTreeMap<(usize, u32), u64> {
            let of = |gpu: usize| m.members(gpu).into_iter().map(move |(pid, _)| (gpu, pid));
            let all = there.iter().flat_map(|gpu| of(*gpu));
            all.map(|(gpu, pid)| ((gpu, pid), m.rm.gpu_time_on(gpu, pid).unwrap_or(0))).collect()
        };
        self.programs.keys().for_each(|pid| drop(self.rm.latencies(*pid)));
        let before = time(self);
        let began = self.rm.now_us();
        self.pass(STRETCH_US);
        let passed = self.rm.now_us() - began;
        let after = time(self);
        for gpu in &there {
            let (interactive, members): (Vec<_>, Vec<_>) =
                self.members(*gpu).into_iter().partition(|(_, m)| m.class == share::Class::Interactive);
            let only: Vec<Member> = members.iter().map(|(_, m)| *m).collect();
            // Whoever comes every 3 ms takes two switches and a kernel.
            let calls = interactive.len() as u64 * (2 * SWITCH_US + CALL_US) * WHOLE / 3000;
            let want = shares(&only);
            let got: Vec<u64> = members.iter().map(|(pid, _)| after[&(*gpu, *pid)] - before[&(*gpu, *pid)]).collect();
            got.iter().for_each(|g| self.hash = noted(self.hash, *g));
            let total: u64 = got.iter().sum();
            if want.iter().sum::<u64>() > 0 && total * WHOLE / passed < WHOLE - 2 * TOLERANCE - calls {
                self.office.wrong(format!("gpu{gpu} was used for {total} of {passed} µs by {only:?}"));
            }
            let reserved = |m: &Member| if let share::Class::Custom(s) = m.class { u64::from(s) } else { 0 };
            if only.iter().map(reserved).sum::<u64>() > WHOLE {
                // Who came last is like a normal one.
                continue;
            }
            for ((m, want), got) in only.iter().zip(want).zip(got) {
                let share = (got * WHOLE).checked_div(total).unwrap_or(0);
                if share.abs_diff(want) > TOLERANCE || m.class == share::Class::Suspended && got > 0 {
                    self.office.wrong(format!("gpu{gpu}: {m:?} had {share} instead of {want} millionths ({got} µs)"));
                }
            }
        }
        let calls = |p: &Program| p.calls && p.working && p.away.is_none();
        for (pid, p) in self.programs.iter().filter(|(_, p)| calls(p)) {
            let mut took = self.rm.latencies(*pid);
            took.sort_unstable();
            let p99 = took.get(took.len() * 99 / 100).copied();
            let is_there = p.on.keys().any(|gpu| there.contains(gpu));
            // It may have to wait for others of its kind.
            let others = self.programs.values().filter(|p| calls(p)).count() as u64;
            if is_there && p99.is_none_or(|us| us > PROMPT_US * others) {
                self.office.wrong(format!("interactive {pid} waited {p99:?} µs, of {} times", took.len()));
            }
        }
        self.judge_known(&there);
        let at_driver = self.rm.clients_of(self.programs.keys().copied());
        let (found, due) = ((self.rm.clients(), self.rm.logs()), (at_driver + there.len(), there.len()));
        if found != due {
            self.office.wrong(format!("the driver has {found:?} clients and logs of {due:?}"));
        }
        for gpu in std::mem::take(&mut self.falling) {
            self.office.wrong(format!("it did not say that gpu{gpu} has fallen off"));
        }
    }

    /// The fifth oracle.
    fn judge_known(&mut self, there: &[usize]) {
        let mut known = BTreeSet::new();
        let mut after = 0;
        while let Answer::Reply(Reply::Processes { processes, more }) =
            self.office.ask_as_root(&Request::List { after })
        {
            after = processes.last().map_or(after, |p| p.pid);
            known.extend(processes.into_iter().map(|p| (p.device, p.pid, p.class.to_string())));
            if !more {
                break;
            }
        }
        let is: BTreeSet<(String, u32, String)> = there
            .iter()
            .flat_map(|gpu| self.members(*gpu).into_iter().map(move |(pid, _)| (*gpu, pid)))
            .map(|(gpu, pid)| (format!("gpu{gpu}"), pid, self.programs[&pid].class.to_string()))
            .collect();
        // One of its heirs may be taken to have what a program had.
        let mut taken = BTreeSet::new();
        known.retain(|(device, pid, _)| {
            let of = self.programs.get(pid).filter(|p| p.heir).and_then(|p| p.first);
            of.is_none_or(|first| !taken.insert((device.clone(), first)))
        });
        if known != is {
            let (more, less): (Vec<_>, Vec<_>) = (known.difference(&is).collect(), is.difference(&known).collect());
            self.office.wrong(format!("it knows {more:?}, which are not, and not {less:?}"));
        }
        let saved = self.office.service.save();
        let there = &self.office.service.world().processes;
        let lives = |pid: u32, began: u64| there.get(&pid).is_some_and(|(about, _)| about.began == began);
        let ended: Vec<u32> = saved.into_iter().filter(|s| !lives(s.pid, s.began)).map(|s| s.pid).collect();
        if !ended.is_empty() {
            self.office.wrong(format!("it remembers {ended:?}, which have ended"));
        }
    }

    fn end(self) -> Outcome {
        let Machine { rm, office, programs, lost, hash, .. } = self;
        let mut violations = office.end();
        for gpu in (0..rm.gpus()).filter(|g| !lost.contains(g)) {
            let off = programs.keys().filter(|p| rm.is_suspended_on(gpu, **p));
            violations.extend(off.map(|p| format!("{p} was left suspended on gpu{gpu}")));
            let sliced = programs.keys().filter(|p| rm.is_sliced_on(gpu, **p));
            violations.extend(sliced.map(|p| format!("{p} was left with another slice on gpu{gpu}")));
        }
        let left = (rm.clients(), rm.logs(), rm.mappings(), rm.wrong_order());
        if left != (rm.clients_of(programs.keys().copied()), 0, 0, 0) {
            violations.push(format!("clients, logs, mappings and what went in the wrong order: {left:?} are left"));
        }
        Outcome { hash, judged: STRETCHES, violations }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those that once found something.
    const FOUND: [u64; 5] = [2421, 2818, 5228, 104_801, 1_201_209];

    #[test]
    fn the_oracles_are_content_with_the_service() {
        for seed in (0..25).chain(FOUND) {
            let o = run(seed, false);
            assert_eq!(o.violations, Vec::<String>::new(), "seed {seed}");
        }
    }

    #[test]
    fn the_same_seed_is_the_same_story_and_another_one_is_another() {
        assert_eq!(run(3, false), run(3, false));
        assert_ne!(run(3, false).hash, run(4, false).hash);
    }

    #[test]
    fn a_service_that_hears_of_no_end_is_caught() {
        let caught = (0..20).filter(|s| !run(*s, true).violations.is_empty()).count();
        assert!(caught >= 5, "{caught} of 20");
    }
}
