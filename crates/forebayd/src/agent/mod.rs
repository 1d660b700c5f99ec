//! Time division of one GPU: in a window its owner runs, and everybody else who would use it is suspended, by the driver's
//! channels ([`Hardware`]) or its process lock ([`lock`]).
//!
//! Rules:
//! 1. The policy ([`forebay_policy::share::Divider`]) says whose window is next; the agent makes it so. Where that does not keep
//!    those who are to go from going ([`Reach::lets_on_first`]), nor somebody who is first in line, the owner is let on first:
//!    the GPU does not wait for the driver's calls then. What the others use until they are off is charged to them ([`LATE_NS`]).
//! 2. Whoever is idle is left on the GPU, so that work is noticed as use ([`Meter`]) at the end of the window in which it
//!    comes; from then on it has windows of its own. That holds for background processes, too: one that was idle and off
//!    could never show that it has work again.
//! 3. An owner that uses less than [`IDLE_PERCENT`] of its window is idle, and the next window is somebody else's. Whoever
//!    was off has used nothing, even if its context was still there (nobody else came). In a probe (rule 6), of which the
//!    driver's calls take half, one that has had a slice is not idle.
//! 4. `interactive` processes are never suspended while they are first in line (rule 7), and `suspended` ones always are.
//! 5. While there is an interactive process that is first in line, the others' slices are short: the hardware lets it
//!    through within a few hundred µs, in anybody's window. Windows are of unequal lengths then ([`UNEQUAL`]): who comes
//!    60 times a second would meet the end of one, and with it a turn more, at every third time.
//! 6. One that comes back as soon as it is its turn again ([`BURST_AWAY_NS`]) has the GPU to itself for
//!    [`BURST_WINDOW_NS`], then for [`PROBE_NS`] not, which shows whether it still does so.
//! 7. Both last as long as its reserve does ([`forebay_policy::reserve`]), which only pays for what somebody else would have
//!    had. Without it an interactive process is divided among like a normal one.
//! 8. Who has the GPU to itself holds it in the log's eyes, with work or without. So while others wait, it is alone for
//!    [`ALONE_NS`] at most; then one of them is let on beside it for [`GUEST_NS`], and an owner that is idle does not come
//!    back from that.
//!    Who has a little work now and then only has no windows: see `light`.
//! 9. What the agent took is given back when it is dropped; when it is killed instead, its guardian does so, and the next
//!    one lets everybody on that it adopts ([`Agent::adopt`]).
//! 10. Who should be on the GPU is let on every [`LET_ON_NS`], whoever took it off: on drivers of today anybody with access to
//!     the device can suspend others.
//! 11. Where everybody with work fills turns, there are turns of such lengths in the windows' place: see `turns`.
//! 12. A process that has gone, or has nothing on the GPU any more, is forgotten at the next thing that is done to it, or when
//!     it is not among those who have the driver open. One that has made channel groups since it was adopted is looked into
//!     again, and so is one that may have made them anew: those may have the handles of the former ones, whose suspension and slices
//!     they do not have, and in the log their contexts' names. It is noticed by what is new in the log; and every [`CHECK_NS`] by
//!     coming onto the GPU while it is off, by slices that are not what they were, by the number of the driver's files that
//!     it has, or because the log has gaps. Where no more than one has work, so that no record tells of one that is lost, whoever
//!     is to be off for good is taken off once more.

mod grip;
mod hardware;
mod light;
pub mod lock;
mod meter;
mod process;
mod turns;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use forebay_policy::share::{Class, Divider, Member, Refusal, WHOLE, Window, admit};
use forebay_rm::sys::RawHandle;
use forebay_rm::{Client, Error};

pub use self::grip::{Gone, Grip, Reach};
pub use self::hardware::{Hardware, SHORT_SLICE_US};
use self::light::{Beside, STAY_NS};
pub use self::meter::Meter;
pub use self::process::LATE_NS;
use self::process::{AVERAGE, Process};
use self::turns::Turns;

/// An owner that uses less of its window than this is idle.
pub const IDLE_PERCENT: u64 = 5;
/// Length of a round of windows.
pub const PERIOD_NS: u64 = 80_000_000;
/// Away for less than this: the turn of another with a short slice, and both switches.
pub const BURST_AWAY_NS: u64 = 1_000_000;
/// For so long an interactive process that bursts has the GPU to itself. It could not show in the meantime that it has
/// nothing to do any more. Of its kernels of 100 µs fewer than one in a hundred then meets others in between.
pub const BURST_WINDOW_NS: u64 = 100_000_000;
/// Then for so long others are there as well.
pub const PROBE_NS: u64 = 2_000_000;
/// The part of a window (one in so many) by which it may be shorter than another.
pub const UNEQUAL: u64 = 8;
/// An owner may be alone for so long while others wait.
pub const ALONE_NS: u64 = 150_000_000;
/// Then somebody is beside it for so long: more than two turns of each.
pub const GUEST_NS: u64 = 5_000_000;

/// The golden section of 2^64.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Between two times that everybody who should be on the GPU is let on.
pub const LET_ON_NS: u64 = 5_000_000_000;
/// Between two looks whether somebody has other channels than are known: some microseconds for each file that a process has open.
pub const CHECK_NS: u64 = 1_000_000_000;

/// Why a process was not adopted.
#[derive(Debug)]
pub enum Refused {
    /// The guardian could not remember its channels.
    Ledger,
    /// The policy's reason.
    Policy(Refusal),
    /// The driver's.
    Driver(Error),
    /// The process lock's.
    Lock(String),
}

/// Divides one GPU.
pub struct Agent<M> {
    reach: Box<dyn Reach>,
    meter: M,
    divider: Divider,
    processes: BTreeMap<u32, Process>,
    window: Option<Window>,
    /// The window is an interactive process's own.
    burst: bool,
    /// Who is let on beside the window's owner, and who was so last.
    guest: Option<u32>,
    last_guest: u32,
    /// The guest is there to see how busy the owner is.
    checks: bool,
    /// Whose windows the last ones were, and how long all of them together.
    alone: (u64, u64),
    turns: Turns,
    /// Time since everybody was let on.
    since_let_on_ns: u64,
    /// Time since it was looked whether anybody has other channels, and what the log had missed then.
    since_checked_ns: u64,
    gaps: u64,
    /// Goes through fractions of 2^64 that have no period (multiples of the golden section).
    fraction: u64,
    /// Length of the windows, averaged: for the share that a process has had lately.
    passed_ns: u64,
}

/// A process on the GPU, as others may see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Its class and whether it has work.
    pub member: Member,
    /// Its share now, in millionths.
    pub share: u64,
    /// What it has had lately, in millionths.
    pub used: u64,
    /// What it has used, ns.
    pub spent_ns: u64,
    /// Time for which it was kept off the GPU, ns.
    pub off_ns: u64,
    /// How often it has come onto the GPU, where that is known.
    pub switches: Option<u64>,
    /// Whether it is off the GPU.
    pub off: bool,
    /// Whether its use is from samples, where that of others is from a log.
    pub sampled: bool,
}

/// How the policy sees a class: an interactive process without reserve is like others.
fn divided(class: Class, first: bool) -> Class {
    if class == Class::Interactive && !first { Class::Normal } else { class }
}

impl<M: Meter> Agent<M> {
    /// An agent without processes or guardian, by the driver's channels.
    pub fn new(own: Arc<Client>, meter: M) -> Self {
        Self::by(Box::new(Hardware::new(own, None)), meter, PERIOD_NS)
    }

    /// An agent without processes that comes to them in this way, with rounds of windows of this length.
    pub fn by(reach: Box<dyn Reach>, meter: M, period_ns: u64) -> Self {
        Agent {
            reach,
            meter,
            divider: Divider::new(period_ns),
            processes: BTreeMap::new(),
            window: None,
            burst: false,
            guest: None,
            last_guest: 0,
            checks: false,
            alone: (0, 0),
            turns: Turns::default(),
            since_let_on_ns: 0,
            since_checked_ns: 0,
            gaps: 0,
            fraction: 0,
            passed_ns: 0,
        }
    }

    /// Nobody with work all the time is further from its share of the windows than this, ns ([`Divider::bound_ns`]).
    pub fn bound_ns(&self) -> u64 {
        self.divider.bound_ns()
    }

    /// Whether a process may have this class.
    ///
    /// # Errors
    /// The policy's.
    pub fn admit(&self, pid: u32, class: Class, nice: i32) -> Result<(), Refusal> {
        let members: Vec<Member> = self.divider.members().map(|(m, _)| m).collect();
        admit(&members, &Member { id: pid.into(), class, nice, active: true })
    }

    /// The processes.
    pub fn views(&self) -> impl Iterator<Item = (u32, View)> {
        self.divider.members().filter_map(|(member, share)| {
            let pid = member.id as u32;
            let p = self.processes.get(&pid)?;
            let used = (p.average_ns * WHOLE).checked_div(self.passed_ns).unwrap_or(0).min(WHOLE);
            let (spent_ns, off_ns, off, switches) = (p.spent_ns, p.off_ns, p.is_off(), self.meter.switches(pid));
            let member = Member { class: p.class, ..member };
            let sampled = self.meter.is_sampled(pid);
            Some((pid, View { member, share, used, spent_ns, off_ns, switches, off, sampled }))
        })
    }

    /// How often a process of this number has come onto the GPU, by the GPU's own log, adopted or not; 0 where there is none.
    pub fn seen(&self, pid: u32) -> u64 {
        self.meter.switches(pid).unwrap_or(0)
    }

    /// Whether everybody has turns at the moment, in the windows' place.
    pub fn has_turns(&self) -> bool {
        self.turns.are()
    }

    /// Whether a window should end before its time: something has happened that turns do not go on with.
    pub fn is_to_be_ended(&self) -> bool {
        turns::is_of_all(self.window) && !self.turns.are()
    }

    /// Lets the meter hear what would not be said any more when the window ends; how soon again, ns, while there is a window.
    pub fn glance(&mut self) -> Option<u64> {
        let every = self.meter.glance_every_ns().filter(|_| self.window.is_some())?;
        self.meter.glance();
        Some(every)
    }

    /// Why the GPU is not there any more, if it is not.
    pub fn lost(&self) -> Option<String> {
        self.reach.lost()
    }

    /// What the meter has to say, for the log.
    pub fn trouble(&mut self) -> Option<String> {
        self.meter.trouble()
    }

    fn clients(&self, but: Option<u32>) -> HashSet<RawHandle> {
        self.processes.iter().filter(|(pid, _)| Some(**pid) != but).flat_map(|(_, p)| p.grip.clients()).collect()
    }

    /// A process's clients of the driver, as far as they were found.
    pub fn clients_of(&self, pid: u32) -> Vec<RawHandle> {
        self.processes.get(&pid).map_or_else(|| self.reach.clients_of(pid), |p| p.grip.clients())
    }

    /// Clients that an earlier service found a process to have, which is to be adopted.
    pub fn remember(&self, pid: u32, clients: &[RawHandle]) {
        self.reach.remember(pid, clients);
    }

    /// What a process has is to be known: it is looked into if it may have other channels than before, or, without any, at the
    /// next look.
    pub fn look_soon(&mut self, pid: u32) {
        match self.processes.get_mut(&pid).map(|p| p.grip.may_be_other()) {
            Some(true) => self.look_into([(pid, false)]),
            Some(false) => {}
            None => self.reach.look_soon(pid),
        }
    }

    /// A process is on the GPU and was not found ([`Reach::look_further`]).
    pub fn look_further(&self, pid: u32) -> bool {
        self.reach.look_further(pid)
    }

    /// Takes a process in, or changes its class. It is let on the GPU, whatever state it was left in.
    ///
    /// # Errors
    /// [`Refused`]; the process is as it was then.
    pub fn adopt(&mut self, pid: u32, class: Class, nice: i32) -> Result<(), Refused> {
        let mut member = Member { id: pid.into(), class, nice, active: true };
        if let Some(p) = self.processes.get_mut(&pid) {
            member.class = divided(class, p.reserve.is_first());
            self.divider.set(member).map_err(Refused::Policy)?;
            if (p.class, p.nice) != (class, nice) {
                (p.class, p.nice) = (class, nice);
                self.turns.disturb();
            }
            return Ok(());
        }
        let known = self.clients(None);
        self.divider.set(member).map_err(Refused::Policy)?;
        match self.reach.find(pid, &known) {
            Ok(grip) => {
                let mut p = Process::new(grip, (class, nice));
                self.meter.refresh(true);
                p.used_ns = self.meter.used_ns(pid).unwrap_or(0);
                p.spent_ns = p.used_ns;
                self.processes.insert(pid, p);
                self.turns.disturb();
                Ok(())
            }
            Err(e) => {
                self.divider.remove(pid.into());
                Err(e)
            }
        }
    }

    /// Lets a process go, on the GPU.
    pub fn forget(&mut self, pid: u32) {
        if self.processes.remove(&pid).is_some() {
            self.turns.disturb();
        }
        self.divider.remove(pid.into());
        self.reach.forget(pid);
        self.meter.forget(pid);
    }

    /// A process has gone, or what it had there; adopted anew at the next look if it is there, by the clients that it had.
    fn lose(&mut self, pid: u32) {
        let clients = self.clients_of(pid);
        self.forget(pid);
        self.reach.remember(pid, &clients);
    }

    /// The processes, and the share of each now, in millionths.
    pub fn shares(&self) -> BTreeMap<u32, u64> {
        self.divider.members().map(|(m, share)| (m.id as u32, share)).collect()
    }

    /// Begins the next window; the caller lets its length pass and then calls [`Agent::end`]. Without one there is nobody
    /// to divide among, and the caller looks again after a while.
    pub fn begin(&mut self) -> Option<Window> {
        if let Some(turns) = self.take_turns() {
            self.window = Some(turns);
            return self.window;
        }
        let first = |p: &Process| p.class == Class::Interactive && p.reserve.is_first();
        let bursts = self.processes.iter().find(|(_, p)| first(p) && p.bursts).map(|(pid, _)| u64::from(*pid));
        let probes = std::mem::take(&mut self.burst);
        self.window = match bursts.filter(|_| !probes) {
            Some(owner) => {
                self.burst = true;
                Some(Window { owner, length_ns: BURST_WINDOW_NS })
            }
            None => self.divider.next().map(|w| Window { length_ns: if probes { PROBE_NS } else { w.length_ns }, ..w }),
        };
        let short = self.processes.values().any(first);
        let active: BTreeMap<u32, bool> = self.divider.members().map(|(m, _)| (m.id as u32, m.active)).collect();
        let owner = self.window.map(|w| w.owner as u32);
        if let Some(w) = self.window.as_mut().filter(|_| !self.burst) {
            if short {
                self.fraction = self.fraction.wrapping_add(GOLDEN);
                w.length_ns -= w.length_ns / UNEQUAL * (self.fraction >> 56) / 256;
            }
            let alone = self.alone.0 == w.owner && self.alone.1 >= ALONE_NS;
            let check_ns = self.processes.get(&(w.owner as u32)).and_then(|p| p.light.is_to_be_checked());
            self.checks = check_ns.is_some();
            if alone || self.checks {
                let waits = |(pid, p): (&u32, &Process)| {
                    let may = u64::from(*pid) != w.owner && p.class != Class::Suspended && !first(p);
                    (may && (self.checks || p.is_off()) && active.get(pid) == Some(&true)).then_some(*pid)
                };
                // By turns.
                let behind = self.processes.range(self.last_guest.saturating_add(1)..).find_map(waits);
                self.guest = behind.or_else(|| self.processes.iter().find_map(waits));
                if let Some(guest) = self.guest {
                    w.length_ns = check_ns.unwrap_or(GUEST_NS);
                    self.last_guest = guest;
                }
            }
            if alone {
                self.alone.1 = 0;
            }
        }
        let guest = self.guest;
        let stays_off = |pid: u32, p: &Process| match p.class {
            _ if first(p) => false,
            Class::Suspended => true,
            _ => Some(pid) != owner && Some(pid) != guest && active.get(&pid) == Some(&true),
        };
        let mut gone = Vec::new();
        // Who is first in line would have two turns of others to wait for.
        let on_first = self.reach.lets_on_first() && !short;
        for lets_on in [on_first, !on_first] {
            for (&pid, p) in self.processes.iter_mut().filter(|(pid, p)| stays_off(**pid, p) != lets_on) {
                if lets_on {
                    p.grip.slice((short && !first(p)).then_some(SHORT_SLICE_US));
                }
                if p.let_on(lets_on).is_err() {
                    gone.push(pid);
                }
            }
        }
        for pid in gone {
            self.lose(pid);
        }
        self.window
    }

    /// Rule 12, for what the log does not tell of: those who may be on the GPU with other channels than are known.
    /// And whether the log has to do with it, so that they are to be looked for widely.
    fn check(&mut self, passed_ns: u64) -> Vec<(u32, bool)> {
        self.since_checked_ns += passed_ns;
        if self.since_checked_ns < CHECK_NS {
            return Vec::new();
        }
        self.since_checked_ns = 0;
        let gaps = std::mem::replace(&mut self.gaps, self.meter.gaps()) != self.gaps;
        let works = |m: &Member| m.active && m.class != Class::Suspended;
        let is_shared = self.divider.members().filter(|(m, _)| works(m)).count() > 1;
        let mut others = Vec::new();
        for (&pid, p) in &mut self.processes {
            let slipped = std::mem::take(&mut p.slipped);
            // That it came onto the GPU may be what the log has lost. Where several work the next record shows that, and the
            // driver's call would be at the cost of a window; who is alone may be one that was only taken to be there.
            let is_held = is_shared || p.class != Class::Suspended || p.grip.hold().is_ok();
            let widely = gaps || slipped;
            if p.grip.may_be_other() || widely || !is_held {
                others.push((pid, widely));
            }
        }
        others
    }

    /// Ends the window, which lasted `passed_ns`: charges what was used, and notices who is idle and who is not.
    pub fn end(&mut self, passed_ns: u64) {
        let more = self.end_window(passed_ns);
        let others = self.check(passed_ns);
        self.look_into(more.into_iter().map(|pid| (pid, true)).chain(others));
    }

    /// Those who have made channels since they were looked into come back.
    fn end_window(&mut self, passed_ns: u64) -> Vec<u32> {
        let (owner, guest, checks) = (self.window.take(), self.guest.take(), std::mem::take(&mut self.checks));
        let same = owner.is_some_and(|w| w.owner == self.alone.0);
        self.alone = (owner.map_or(0, |w| w.owner), if same { self.alone.1 + passed_ns } else { passed_ns });
        self.passed_ns = self.passed_ns - self.passed_ns / AVERAGE + passed_ns;
        self.since_let_on_ns += passed_ns;
        if self.since_let_on_ns >= LET_ON_NS {
            self.since_let_on_ns = 0;
            self.processes.values_mut().for_each(|p| p.grip.let_on());
        }
        for (&pid, p) in &self.processes {
            self.meter.passed(pid, !p.is_off(), passed_ns);
        }
        // Without a window nothing is decided by it.
        self.meter.refresh(owner.is_some());
        if turns::is_of_all(owner) {
            self.look_at_turns(passed_ns);
            return Vec::new();
        }
        let first = |id: u64| {
            let p = self.processes.get(&(id as u32));
            p.is_some_and(|p| p.class == Class::Interactive && p.reserve.is_first())
        };
        let contended = self.divider.members().any(|(m, _)| m.active && m.class != Class::Suspended && !first(m.id));
        let on = self.processes.iter().filter(|(_, p)| !p.is_off()).map(|(pid, _)| *pid);
        let stays: Vec<(u32, u64)> = on.filter_map(|pid| Some((pid, self.meter.longest_stay_ns(pid)?))).collect();
        let of_others =
            |pid: u32| stays.iter().filter(|(other, _)| *other != pid).map(|(_, ns)| *ns).max().unwrap_or(0);
        let mut gone = Vec::new();
        let mut more = Vec::new();
        let mut calm = owner.is_some() && !self.burst;
        let short = self.processes.keys().any(|pid| first(u64::from(*pid)));
        for (&pid, p) in self.processes.iter_mut() {
            let Some(now) = self.meter.used_ns(pid) else {
                gone.push(pid);
                continue;
            };
            let away = self.meter.longest_away_ns(pid);
            // Rule 3.
            let (used, times) = (p.use_until(now, passed_ns), p.came_since(&self.meter, pid));
            if self.meter.contexts(pid) > p.contexts {
                more.push(pid);
            }
            if p.class == Class::Interactive {
                let first = p.reserve.is_first();
                // Where nobody else came it held the GPU, with work or without.
                let unopposed = !self.burst && self.meter.longest_stay_ns(pid).is_some() && of_others(pid) == 0;
                let contended = contended && !unopposed;
                // That a window ended late is nothing that it did; it may have held the GPU without work, too.
                let most = owner.map_or(u64::MAX, |w| w.length_ns);
                p.reserve.pass(passed_ns, if contended { used.min(most) } else { 0 });
                if !self.burst {
                    p.bursts = contended && used > 0 && away.is_some_and(|a| a < BURST_AWAY_NS);
                }
                if first != p.reserve.is_first() {
                    let class = divided(p.class, p.reserve.is_first());
                    // An interactive or normal class is always admitted to somebody who is there.
                    let _ = self.divider.set(Member { id: pid.into(), class, nice: p.nice, active: true });
                }
                if p.reserve.is_first() {
                    continue;
                }
            }
            if used > 0 {
                self.divider.charge(pid.into(), used);
            }
            let others_ns = of_others(pid);
            let stay_ns = if short { 0 } else { others_ns };
            let beside = Beside { used_ns: used, passed_ns, stay_ns, times };
            let comes_back = beside.comes_back();
            let any = used > 0 && owner.is_some_and(|w| w.length_ns <= PROBE_NS);
            let busy = used * 100 >= passed_ns * IDLE_PERCENT || any || guest.is_some() && beside.is_often();
            let stays = stays.iter().any(|(of, ns)| *of == pid && *ns >= STAY_NS);
            if !p.is_off() && others_ns >= STAY_NS {
                p.light.found();
                calm &= !self.divider.set_active(pid.into(), false);
                continue;
            }
            match owner.filter(|w| w.owner == u64::from(pid)) {
                // It keeps its windows until that is sure.
                Some(_) if guest.is_some() && checks && p.light.is_unsure(comes_back) => {}
                Some(_) => {
                    match guest {
                        Some(_) if checks && !busy => p.light.found(),
                        // Where it stayed the guest had nothing to do, either.
                        Some(_) if checks && !stays => {
                            p.light.was_busy();
                            p.fills = turns::fills(self.meter.longest_stay_ns(pid));
                        }
                        Some(_) => {}
                        None => p.light.was_alone(passed_ns),
                    }
                    calm &= busy;
                    self.divider.set_active(pid.into(), busy);
                }
                // Of one that stayed it cannot be said how much of that was work.
                None if used > 0 && p.light.has_more(Beside { used_ns: if stays { 0 } else { used }, ..beside }) => {
                    calm &= !self.divider.set_active(pid.into(), true);
                }
                // One with a little work.
                None if used > 0 => calm = false,
                None => {}
            }
        }
        if calm {
            self.turns.calm(passed_ns);
        } else {
            self.turns.disturb();
        }
        for pid in gone {
            self.lose(pid);
        }
        more
    }

    /// Looks into processes again; those who cannot be steered as they are, are adopted anew at the next look for processes.
    fn look_into(&mut self, pids: impl IntoIterator<Item = (u32, bool)>) {
        for (pid, widely) in pids {
            let (contexts, known) = (self.meter.contexts(pid), self.clients(Some(pid)));
            let Some(p) = self.processes.get_mut(&pid) else { continue };
            p.contexts = contexts;
            if !p.grip.look_again(&known, widely) {
                self.lose(pid);
            }
        }
    }
}
