//! What happens as time passes: credit is handed out, and the pages are written.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use forebay_policy::credit::{Report, TICK_NS};
use forebay_policy::overlap::{self, Presence};
use forebay_policy::share::{self, WHOLE};
use forebay_proto::bell;
use forebay_proto::page::{DeviceLoad, ProgramWords, Standing};
use forebay_proto::wire::Class;

use super::session::{Account, Session};
use super::{Process, REFRESH_NS, STUCK_TICKS, Service, World};

/// Most use of a device beyond what it could do that is remembered.
const MAX_OVER_NS: u64 = 1_000_000_000;

/// What a program says of itself on a device, over all its connections.
#[derive(Clone, Copy, Default)]
struct Said {
    tasks: u64,
    demand: u64,
    busy: bool,
}

impl Said {
    fn and(self, w: &ProgramWords) -> Self {
        Said {
            tasks: self.tasks.wrapping_add(w.tasks.load(Ordering::Relaxed)),
            demand: self.demand.saturating_add(w.demand.load(Ordering::Relaxed).into()),
            busy: self.busy || w.busy.load(Ordering::Relaxed) != 0,
        }
    }
}

impl<W: World> Service<W> {
    /// Time passes. `spare_ns` is the time in which the CPU had nothing to do since the last tick, over all cores.
    pub fn tick(&mut self, now_ns: u64, spare_ns: u64) {
        // A clock that jumps back, or far ahead, is not believed for this once, and followed from then on.
        let passed = now_ns.saturating_sub(self.now_ns).min(1_000_000_000);
        if now_ns < self.now_ns {
            self.refreshed_ns = 0;
        }
        self.now_ns = now_ns;
        for (at, d) in self.devices.iter_mut().enumerate() {
            // A few vectors a tick: members are few, and looked up in order.
            let accounts = self.sessions.values();
            let accounts = accounts.flat_map(|s| s.on(at).map(move |account| (s.peer.pid.into(), account)));
            let mut accounts: Vec<(u64, Account<'_>)> = accounts.collect();
            accounts.sort_unstable_by_key(|(pid, _)| *pid);
            // No program can have used more than the device could do meanwhile.
            let most = passed.saturating_mul(d.about.units.into()).saturating_mul(2);
            let accounts_of = |id: u64| {
                let from = accounts.partition_point(|(pid, _)| *pid < id);
                accounts[from..].iter().take_while(move |(pid, _)| *pid == id).map(|(_, account)| account)
            };
            let mut own_ns = BTreeMap::<u64, u64>::new();
            if !d.metered {
                let counted = |account: &Account<'_>| Presence {
                    since_ns: account.there_ns(now_ns),
                    // What does not fit is counted at the next ticks.
                    ns: account.count(now_ns, most),
                };
                let mut said: Vec<(u64, Presence)> = accounts.iter().map(|(pid, a)| (*pid, counted(a))).collect();
                // Of connections that have ended.
                for id in d.bank.views().map(|v| v.member.id) {
                    let late = self.processes.get_mut(&(id as u32)).and_then(|p| p.late_ns.get_mut(at));
                    if let Some(late) = late.filter(|late| **late > 0) {
                        let ns = most.min(*late);
                        *late -= ns;
                        said.push((id, Presence { ns, since_ns: 0 }));
                    }
                }
                let presences: Vec<Presence> = said.iter().map(|(_, p)| *p).collect();
                let own = overlap::own(d.about.units, passed, &presences);
                said.iter().zip(own).for_each(|((id, _), ns)| *own_ns.entry(*id).or_default() += ns);
            }
            if d.metered {
                let little: Vec<u64> = d.bank.views().filter(|v| v.uses_little).map(|v| v.member.id).collect();
                self.waits.ask(now_ns, &little, &mut self.world);
            }
            let mut reports: Vec<(u64, Report)> = Vec::with_capacity(accounts.len());
            let (mut used, mut tasks) = (0u64, 0u64);
            for v in d.bank.views() {
                let (id, was) = (v.member.id, v.spent_ns);
                let said = accounts_of(id).fold(Said::default(), |all, account| all.and(account.program));
                let now = if d.metered {
                    self.world.cpu_time_ns(id as u32)
                } else {
                    Some(was.saturating_add(own_ns.get(&id).copied().unwrap_or(0)))
                };
                let Some(spent_ns) = now else { continue };
                // Nobody says: then it is taken to want everything.
                let demand = if said.demand == 0 { WHOLE } else { said.demand.min(WHOLE) };
                let ready_ns = if d.metered { self.waits.of(id, now_ns, passed) } else { 0 };
                reports.push((id, Report { spent_ns, demand, ready_ns }));
                let new = spent_ns.saturating_sub(was);
                used = used.saturating_add(new);
                tasks = tasks.wrapping_add(said.tasks);
                if let Some(p) = self.processes.get_mut(&(id as u32)) {
                    p.stuck = if said.busy && new == 0 { p.stuck.saturating_add(1) } else { 0 };
                }
            }
            let could = passed.saturating_mul(d.about.units.into());
            // Use is reported in lumps: what is more than fits a tick was used in earlier ones, or will be in the next.
            let load = used.saturating_add(d.over_ns);
            d.over_ns = load.saturating_sub(could).min(MAX_OVER_NS);
            let spare = if d.metered { spare_ns } else { could.saturating_sub(load) };
            let reported = |id| reports.binary_search_by_key(&id, |(of, _)| *of).ok().map(|at| reports[at].1);
            d.bank.tick(passed, spare, reported);
            d.tasks = (d.tasks.0.saturating_add(used), tasks);
        }
        self.write_allowances();
        self.write_holds();
        // A tick that comes a little early is the one that was meant: the next may be as late as 40 ms.
        let due = REFRESH_NS - TICK_NS / 2;
        if self.now_ns.saturating_sub(self.refreshed_ns) >= due || self.refreshed_ns == 0 {
            self.refreshed_ns = self.now_ns;
            self.end_empty_groups();
            self.refresh();
            self.refresh_gpus();
        }
    }

    pub(super) fn write_allowances(&mut self) {
        for (at, d) in self.devices.iter().enumerate() {
            for s in self.sessions.values() {
                for account in s.on(at) {
                    let id = s.peer.pid.into();
                    if publish(&account, d.allowance(id, &account), None) && d.bank.may(id) {
                        self.world.wake(account.words);
                    }
                }
            }
        }
    }

    /// Rule 5.
    pub(super) fn write_holds(&mut self) {
        for (at, d) in self.devices.iter().enumerate() {
            let of = |s: &Session| s.accounts.contains(&Some(at));
            let works = |s: &Session| s.on(at).any(|a| a.program.busy.load(Ordering::Relaxed) != 0);
            let first = |s: &&Session| {
                let believed = |p: &Process| p.class == Class::Interactive && p.stuck < STUCK_TICKS;
                let is_believed = self.processes.get(&s.peer.pid).is_some_and(believed);
                of(s) && is_believed && works(s) && d.bank.may(s.peer.pid.into())
            };
            let held = self.sessions.values().any(|s| first(&s));
            for s in self.sessions.values().filter(|s| of(s)) {
                let interactive = self.processes.get(&s.peer.pid).is_some_and(|p| p.class == Class::Interactive);
                for account in s.on(at) {
                    let allowance = account.words.allowance.load(Ordering::Relaxed);
                    let hold = Some(held && !interactive);
                    if publish(&account, allowance, hold) && d.bank.may(s.peer.pid.into()) {
                        self.world.wake(account.words);
                    }
                }
            }
        }
    }

    fn refresh(&mut self) {
        for (at, d) in self.devices.iter().enumerate() {
            let mut load =
                DeviceLoad { at_ns: self.now_ns.max(1), units: d.about.units.into(), ..DeviceLoad::default() };
            let views: BTreeMap<u64, _> = d.bank.views().map(|v| (v.member.id, v)).collect();
            let booked: u64 = views
                .values()
                .map(|v| if let share::Class::Custom(s) = v.member.class { u64::from(s) } else { 0 })
                .sum();
            for v in views.values() {
                load.utilisation += v.used;
                load.active += u64::from(v.member.active);
                load.waiting += u64::from(v.member.active && v.balance_ns <= 0);
                if let Some(p) = self.processes.get(&(v.member.id as u32)) {
                    load.classes[p.class.index()] += 1;
                }
            }
            load.utilisation = load.utilisation.min(WHOLE);
            load.task_ns = d.tasks.0.checked_div(d.tasks.1).unwrap_or(0);
            self.global.set(at, &load);
            for s in self.sessions.values() {
                for (account, v) in s.on(at).zip(views.get(&u64::from(s.peer.pid)).into_iter().cycle()) {
                    let own = if let share::Class::Custom(c) = v.member.class { u64::from(c) } else { 0 };
                    let ceiling = WHOLE.saturating_sub(booked - own);
                    account.words.set_standing(&Standing { share: v.share, used: v.used, ceiling, at_ns: self.now_ns });
                }
            }
        }
    }
}

/// Writes an account; whether somebody sleeps on it whom nobody holds up any more.
pub(super) fn publish(account: &Account<'_>, allowance: u64, hold: Option<bool>) -> bool {
    let words = account.words;
    let before = words.allowance.swap(allowance, Ordering::Relaxed);
    let held = words.hold.load(Ordering::Relaxed);
    let hold = hold.map_or(held, u32::from);
    if (before, held) == (allowance, hold) {
        return false;
    }
    words.hold.store(hold, Ordering::Relaxed);
    let anybody = bell::ring(&words.bell, &account.program.sleepers);
    anybody && hold == 0 && (allowance > before || held != 0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use forebay_policy::credit::Order;
    use forebay_proto::page::AccountWords;
    use forebay_proto::wire::{self, CPU, Request};

    use super::super::{Described, Peer, Ready, Waits};
    use super::*;

    /// Processes that have had what a test says of the CPU.
    #[derive(Default)]
    struct Few {
        spent: BTreeMap<u32, u64>,
        /// Who was asked about.
        asked: Vec<u32>,
        woken: Cell<u32>,
    }

    impl World for Few {
        fn describe(&mut self, pid: u32) -> Option<Described> {
            Some(Described { uid: 7, name: "p".into(), began: 1, parent: 1, nice: 0 })
                .filter(|_| self.spent.contains_key(&pid))
        }
        fn cpu_time_ns(&mut self, pid: u32) -> Option<u64> {
            self.spent.get(&pid).copied()
        }
        fn ready(&mut self, pid: u32) -> Option<Ready> {
            self.asked.push(pid);
            // It has one thread, which has had no core for as long as the service has been there.
            Some(Ready { ns: 20_000_000 * self.asked.len() as u64, threads: 1 })
        }
        fn wake(&mut self, _: &AccountWords) {
            self.woken.set(self.woken.get() + 1);
        }
        fn watch(&mut self, _: u32) {}
        fn end(&mut self, _: u32, _: u64) -> Result<(), String> {
            Err("nobody is ended here".into())
        }
    }

    /// A service of one core with so many programs that have joined it, numbered from 2, each by a session of its number.
    fn service(programs: u32) -> Service<Few> {
        let mut s = Service::new(Few::default(), 1, Order::Share, 0).unwrap();
        for pid in 2..2 + programs {
            s.world().spent.insert(pid, 0);
            s.connect(pid.into(), Peer { pid, uid: 7, privileged: false }).unwrap();
            for request in
                [Request::Hello { version: wire::VERSION, name: "p".into() }, Request::Join { device: CPU.into() }]
            {
                s.message(pid.into(), &wire::encode(&request));
            }
        }
        s
    }

    #[test]
    fn only_who_sleeps_and_may_go_on_is_woken() {
        let mut s = service(1);
        let mut now = 1;
        let mut tick = |s: &mut Service<Few>, used: u64| {
            *s.world().spent.get_mut(&2).unwrap() += used;
            now += TICK_NS;
            s.tick(now, TICK_NS - used.min(TICK_NS));
            s.world().woken.take()
        };
        let sleepers = |s: &Service<Few>, n| s.pages(2).unwrap().1.accounts[0].sleepers.store(n, Ordering::Relaxed);
        assert_eq!(tick(&mut s, TICK_NS), 0, "nobody sleeps");
        sleepers(&s, 1);
        // So deep in debt that a few ticks do not pay it.
        assert_eq!(tick(&mut s, 50 * TICK_NS), 0, "it sleeps, and has no credit");
        let before = s.pages(2).unwrap().0.accounts[0].allowance.load(Ordering::Relaxed);
        assert_eq!(tick(&mut s, 0), 0, "its allowance grows, and is still used up");
        let (client, _) = s.pages(2).unwrap();
        assert!(client.accounts[0].allowance.load(Ordering::Relaxed) > before);
        let woken = (0..100).map(|_| tick(&mut s, 0)).find(|woken| *woken > 0);
        assert_eq!(woken, Some(1));
        assert!(s.bank(0).unwrap().may(2));
        // It works a little, and so its allowance goes on growing.
        sleepers(&s, 0);
        assert_eq!((0..20).map(|_| tick(&mut s, TICK_NS / 2)).sum::<u32>(), 0, "nobody sleeps any more");
    }

    /// One that uses a twentieth of the core, beside one that could use all of it.
    #[test]
    fn who_has_credit_and_uses_little_is_asked_about_and_others_have_less_if_it_was_ready() {
        let taken = |is_known: bool| {
            let mut s = service(2);
            let mut taken = 0;
            for tick in 1..1000u64 {
                *s.world().spent.get_mut(&2).unwrap() += TICK_NS / 20;
                let more = if s.bank(0).unwrap().may(3) { TICK_NS * 19 / 20 } else { 0 };
                *s.world().spent.get_mut(&3).unwrap() += more;
                taken += more;
                s.tick(tick * TICK_NS, TICK_NS * 19 / 20 - more);
                if !is_known {
                    s.waits = Waits::default();
                }
            }
            let asked = std::mem::take(&mut s.world().asked);
            assert!(asked.iter().all(|pid| *pid == 2) && asked.len() > 50, "{asked:?}");
            taken / 1000
        };
        let (unknown, known) = (taken(false), taken(true));
        assert!(known * 10 < unknown * 9, "{known} {unknown}");
        // What others do not get is of the first one's share at most: they have their own.
        assert!(known > TICK_NS * 45 / 100, "{known}");
    }

    #[test]
    fn whoever_is_held_is_woken_when_it_is_let_go_and_not_before() {
        let mut s = service(2);
        let set = Request::Set { pid: 3, class: Some(Class::Interactive), nice: None };
        s.connect(99, Peer { pid: 3, uid: 0, privileged: true }).unwrap();
        s.message(99, &wire::encode(&Request::Hello { version: wire::VERSION, name: "root".into() }));
        s.message(99, &wire::encode(&set));
        s.pages(2).unwrap().1.accounts[0].sleepers.store(1, Ordering::Relaxed);
        s.tick(TICK_NS, 0);
        s.world().woken.take();
        let busy = |s: &mut Service<Few>, is| {
            s.pages(3).unwrap().1.accounts[0].busy.store(is, Ordering::Relaxed);
            s.doorbell(3);
            (s.pages(2).unwrap().0.accounts[0].hold.load(Ordering::Relaxed), s.world().woken.take())
        };
        assert_eq!(busy(&mut s, 1), (1, 0));
        // Its allowance grows meanwhile.
        let allowance = |s: &Service<Few>| s.pages(2).unwrap().0.accounts[0].allowance.load(Ordering::Relaxed);
        let before = allowance(&s);
        s.world().spent.values_mut().for_each(|spent| *spent += TICK_NS / 2);
        s.tick(2 * TICK_NS, 0);
        assert!(allowance(&s) > before && s.bank(0).unwrap().may(2));
        assert_eq!(s.world().woken.take(), 0, "it may not go on");
        assert_eq!(busy(&mut s, 0), (0, 1));
    }

    #[test]
    fn ticks_are_further_apart_the_more_programs_there_are_and_pages_are_refreshed_all_the_same() {
        for (programs, ticks) in [(1, 1), (7, 1), (8, 2), (31, 2), (32, 4), (100, 4)] {
            let mut s = service(programs);
            (2..2 + programs).for_each(|pid| *s.world().spent.get_mut(&pid).unwrap() += TICK_NS / 10);
            s.tick(1, 0);
            assert_eq!(s.tick_ns(), ticks * TICK_NS, "{programs}");
            let mut now = 1;
            for i in 0..40u64 {
                (2..2 + programs).for_each(|pid| *s.world().spent.get_mut(&pid).unwrap() += TICK_NS / 10);
                // A timer is never quite on time.
                now += s.tick_ns() - 100_000 * (i % 2);
                let at = s.global.device(0).unwrap().at_ns;
                assert!(now - at < 25_000_000, "{programs}: {now} {at}");
                s.tick(now, 0);
            }
        }
        let mut idle = service(0);
        idle.tick(1, 0);
        assert_eq!(idle.tick_ns(), REFRESH_NS);
    }

    /// What a device that programs report themselves has given to two of them in a few seconds, both of which always have
    /// tasks of 1 ms, one at a time over each connection: the first over as many as `first` says, and making a new one in
    /// the place of one every so many ticks; the second over one. The device serves whoever has work in it by turns.
    fn given(first: u64, renew: usize) -> [u64; 2] {
        const DEVICE: &str = "pocl";
        const TASK_NS: u64 = 1_000_000;
        const TURN_NS: u64 = 50_000;
        let mut s = service(2);
        s.add_device(DEVICE, 1, Order::Share).unwrap();
        fn join(s: &mut Service<Few>, id: u64, pid: u32) {
            s.connect(id, Peer { pid, uid: 7, privileged: false }).unwrap();
            s.message(id, &wire::encode(&Request::Hello { version: wire::VERSION, name: "p".into() }));
            s.message(id, &wire::encode(&Request::Join { device: DEVICE.into() }));
        }
        let mut all: Vec<(u64, u32)> = (0..=first).map(|n| (100 + n, if n < first { 2 } else { 3 })).collect();
        all.iter().for_each(|(id, pid)| join(&mut s, *id, *pid));
        let (mut now, mut next, mut given) = (1, 0, [0; 2]);
        let mut left = BTreeMap::<u64, u64>::new();
        for tick in 1..=1000 {
            for turn in 0..TICK_NS / TURN_NS {
                let at = now + turn * TURN_NS;
                for (id, _) in &all {
                    let (client, program) = s.pages(*id).unwrap();
                    let mine = &program.accounts[0];
                    let may = client.accounts[0].allowance.load(Ordering::Relaxed) > mine.used_ns(|| at);
                    if may && left.get(id).is_none_or(|left| *left == 0) {
                        mine.since.store(at, Ordering::Relaxed);
                        left.insert(*id, TASK_NS);
                    }
                }
                next += 1;
                let mut turns = (0..all.len()).map(|n| all[(next + n) % all.len()]);
                let Some((id, pid)) = turns.find(|(id, _)| left.get(id).is_some_and(|left| *left > 0)) else {
                    continue;
                };
                given[pid as usize - 2] += TURN_NS;
                left.entry(id).and_modify(|left| *left -= TURN_NS);
                if left[&id] == 0 {
                    let mine = &s.pages(id).unwrap().1.accounts[0];
                    let issued = mine.since.swap(0, Ordering::Relaxed);
                    mine.spent.fetch_add(at + TURN_NS - issued, Ordering::Relaxed);
                }
            }
            if renew > 0 && tick % renew == 0 {
                let (id, pid) = all.remove(0);
                s.disconnect(id);
                let new = (10_000 + tick as u64, pid);
                join(&mut s, new.0, pid);
                all.insert(first as usize - 1, new);
            }
            now += TICK_NS;
            s.tick(now, 0);
        }
        given
    }

    #[test]
    fn a_share_is_a_programs_however_many_connections_it_has_and_however_long() {
        for (connections, renew) in [(1, 0), (2, 0), (5, 0), (1, 4), (1, 1), (3, 2)] {
            let [many, one] = given(connections, renew);
            let share = many as f64 / (many + one) as f64;
            assert!((0.48..0.52).contains(&share), "{connections} connections, renewed every {renew} ticks: {share}");
            assert!(many + one > 4_500_000_000, "{many} {one}");
        }
    }
}
