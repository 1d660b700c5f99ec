//! What happens as time passes: credit is handed out, and the pages are written.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use forebay_policy::credit::Report;
use forebay_policy::share::{self, WHOLE};
use forebay_proto::page::{AccountWords, DeviceLoad, Standing};
use forebay_proto::wire::Class;

use super::{Process, REFRESH_NS, STUCK_TICKS, Service, Session, World};

/// Most use of a device beyond what it could do that is remembered.
const MAX_OVER_NS: u64 = 1_000_000_000;

/// What a program says of itself on a device.
#[derive(Clone, Copy, Default)]
struct Said {
    spent: u64,
    tasks: u64,
    demand: u64,
    busy: bool,
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
            // What each program says, over all its connections.
            let mut said: BTreeMap<u64, Said> = BTreeMap::new();
            for s in self.sessions.values() {
                for (_, w) in s.accounts.iter().zip(&s.program.accounts).filter(|(a, _)| **a == Some(at)) {
                    let all = said.entry(s.peer.pid.into()).or_default();
                    all.spent = all.spent.saturating_add(w.spent.load(Ordering::Relaxed));
                    all.tasks = all.tasks.wrapping_add(w.tasks.load(Ordering::Relaxed));
                    all.demand = all.demand.saturating_add(w.demand.load(Ordering::Relaxed).into());
                    all.busy |= w.busy.load(Ordering::Relaxed) != 0;
                }
            }
            // No program can have used more than the device could do meanwhile.
            let most = passed.saturating_mul(d.about.units.into()).saturating_mul(2);
            let mut reports = BTreeMap::new();
            let (mut used, mut tasks) = (0u64, 0u64);
            for v in d.bank.views() {
                let (id, was) = (v.member.id, v.spent_ns);
                let said = said.get(&id).copied().unwrap_or_default();
                let now = if d.metered {
                    self.world.cpu_time_ns(id as u32)
                } else {
                    Some(said.spent.clamp(was, was.saturating_add(most)))
                };
                let Some(spent_ns) = now else { continue };
                // Nobody says: then it is taken to want everything.
                let demand = if said.demand == 0 { WHOLE } else { said.demand.min(WHOLE) };
                reports.insert(id, Report { spent_ns, demand });
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
            d.bank.tick(passed, spare, |id| reports.get(&id).copied());
            d.tasks = (d.tasks.0.saturating_add(used), tasks);
        }
        self.write_allowances();
        self.write_holds();
        if self.now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS || self.refreshed_ns == 0 {
            self.refreshed_ns = self.now_ns;
            self.end_empty_groups();
            self.refresh();
            self.refresh_gpus();
        }
    }

    pub(super) fn write_allowances(&mut self) {
        for (at, d) in self.devices.iter_mut().enumerate() {
            for s in self.sessions.values() {
                let mine = s.accounts.iter().zip(&s.client.accounts).filter(|(a, _)| **a == Some(at));
                for (_, words) in mine {
                    let now = d.bank.allowance(s.peer.pid.into()).unwrap_or(0);
                    if publish(words, now, None) {
                        self.world.wake(words);
                    }
                }
            }
        }
    }

    /// Rule 5.
    pub(super) fn write_holds(&mut self) {
        for (at, d) in self.devices.iter().enumerate() {
            let of = |s: &Session| s.accounts.contains(&Some(at));
            let works = |s: &Session| {
                s.accounts
                    .iter()
                    .zip(&s.program.accounts)
                    .any(|(a, w)| *a == Some(at) && w.busy.load(Ordering::Relaxed) != 0)
            };
            let first = |s: &&Session| {
                let believed = |p: &Process| p.class == Class::Interactive && p.stuck < STUCK_TICKS;
                let credit = |id: u64| d.bank.views().find(|v| v.member.id == id).is_some_and(|v| v.balance_ns > 0);
                of(s) && self.processes.get(&s.peer.pid).is_some_and(believed) && works(s) && credit(s.peer.pid.into())
            };
            let held = self.sessions.values().any(|s| first(&s));
            for s in self.sessions.values().filter(|s| of(s)) {
                let interactive = self.processes.get(&s.peer.pid).is_some_and(|p| p.class == Class::Interactive);
                let mine = s.accounts.iter().zip(&s.client.accounts).filter(|(a, _)| **a == Some(at));
                for (_, words) in mine {
                    let allowance = words.allowance.load(Ordering::Relaxed);
                    if publish(words, allowance, Some(held && !interactive)) {
                        self.world.wake(words);
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
                let mine = s.accounts.iter().zip(&s.client.accounts).filter(|(a, _)| **a == Some(at));
                for ((_, words), v) in mine.zip(views.get(&u64::from(s.peer.pid)).into_iter().cycle()) {
                    let own = if let share::Class::Custom(c) = v.member.class { u64::from(c) } else { 0 };
                    let ceiling = WHOLE.saturating_sub(booked - own);
                    words.set_standing(&Standing { share: v.share, used: v.used, ceiling, at_ns: self.now_ns });
                }
            }
        }
    }
}

/// Writes an account; whether somebody may have slept on it who can go on now.
pub(super) fn publish(words: &AccountWords, allowance: u64, hold: Option<bool>) -> bool {
    let before = words.allowance.swap(allowance, Ordering::Relaxed);
    let held = words.hold.load(Ordering::Relaxed);
    let hold = hold.map_or(held, u32::from);
    if (before, held) == (allowance, hold) {
        return false;
    }
    words.hold.store(hold, Ordering::Relaxed);
    words.bell.fetch_add(1, Ordering::Release);
    allowance > before || hold < held
}
