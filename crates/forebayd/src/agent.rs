//! Time division of one GPU: in a window its owner runs, and everybody else who would use it is suspended.
//!
//! Rules:
//! 1. The policy ([`forebay_policy::share::Divider`]) says whose window is next; the agent makes it so: first the others
//!    are taken off, then the owner is let on.
//! 2. Whoever is idle is left on the GPU, so that work is noticed as use ([`Meter`]) at the end of the window in which it
//!    comes; from then on it has windows of its own. That holds for background processes, too: one that was idle and off
//!    could never show that it has work again.
//! 3. An owner that uses less than [`IDLE_PERCENT`] of its window is idle, and the next window is somebody else's.
//! 4. `interactive` processes are never suspended, and `suspended` ones always are.
//! 5. What the agent took is given back when it is dropped; when it is killed instead, the next one lets everybody on
//!    that it adopts ([`Agent::adopt`]).
//! 6. A process that has gone is forgotten at the next thing that is done to it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use forebay_policy::share::{Class, Divider, Member, Refusal, WHOLE, Window, admit};
use forebay_rm::{Client, Error, Suspension, Target};

use crate::ledger::Ledger;

/// An owner that uses less of its window than this is idle.
pub const IDLE_PERCENT: u64 = 5;
/// Length of a round of windows.
pub const PERIOD_NS: u64 = 100_000_000;
/// Windows over which use is averaged.
const AVERAGE: u64 = 16;

/// Where use is measured.
pub trait Meter {
    /// Time for which the process has used the GPU so far, ns; none when it is not known (any more).
    fn used_ns(&mut self, pid: u32) -> Option<u64>;
}

impl<M: Meter + ?Sized> Meter for Box<M> {
    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        (**self).used_ns(pid)
    }
}

/// Why a process was not adopted.
#[derive(Debug)]
pub enum Refused {
    /// The guardian could not remember its channels.
    Ledger,
    /// The policy's reason.
    Policy(Refusal),
    /// The driver's.
    Driver(Error),
}

struct Process {
    target: Target,
    class: Class,
    /// Its use when it was looked at last.
    used_ns: u64,
    /// Its use of a window, averaged.
    average_ns: u64,
    off: Option<Suspension>,
}

/// Divides one GPU.
pub struct Agent<M> {
    own: Arc<Client>,
    meter: M,
    divider: Divider,
    processes: BTreeMap<u32, Process>,
    window: Option<Window>,
    /// Where the guardian finds what may have to be given back.
    ledger: Option<Arc<Ledger>>,
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
    /// Whether it is off the GPU.
    pub off: bool,
}

impl<M: Meter> Agent<M> {
    /// An agent without processes.
    pub fn new(own: Arc<Client>, meter: M) -> Self {
        let divider = Divider::new(PERIOD_NS);
        Agent { own, meter, divider, processes: BTreeMap::new(), window: None, ledger: None, passed_ns: 0 }
    }

    /// An agent whose guardian reads this ledger.
    pub fn guarded(own: Arc<Client>, meter: M, ledger: Arc<Ledger>) -> Self {
        let mut agent = Self::new(own, meter);
        agent.ledger = Some(ledger);
        agent
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
            Some((pid, View { member, share, used, spent_ns: p.used_ns, off: p.off.is_some() }))
        })
    }

    /// Takes a process in, or changes its class. It is let on the GPU, whatever state it was left in.
    ///
    /// # Errors
    /// [`Refused`]; the process is as it was then.
    pub fn adopt(&mut self, pid: u32, class: Class, nice: i32) -> Result<(), Refused> {
        let member = Member { id: pid.into(), class, nice, active: true };
        if let Some(p) = self.processes.get_mut(&pid) {
            self.divider.set(member).map_err(Refused::Policy)?;
            p.class = class;
            return Ok(());
        }
        let known: HashSet<_> =
            self.processes.values().flat_map(|p| p.target.channels().iter().map(|h| h.client)).collect();
        let target = Target::find(&self.own, pid, &known).map_err(Refused::Driver)?;
        self.divider.set(member).map_err(Refused::Policy)?;
        if let Some(ledger) = &self.ledger
            && !ledger.enter(target.channels())
        {
            self.divider.remove(pid.into());
            return Err(Refused::Ledger);
        }
        if let Err(e) = target.release(&self.own) {
            self.strike(&target);
            self.divider.remove(pid.into());
            return Err(Refused::Driver(e));
        }
        let used_ns = self.meter.used_ns(pid).unwrap_or(0);
        self.processes.insert(pid, Process { target, class, used_ns, average_ns: 0, off: None });
        Ok(())
    }

    /// Lets a process go, on the GPU.
    pub fn forget(&mut self, pid: u32) {
        if let Some(mut p) = self.processes.remove(&pid) {
            // On the GPU first, out of the ledger then.
            p.off = None;
            self.strike(&p.target);
        }
        self.divider.remove(pid.into());
    }

    fn strike(&self, target: &Target) {
        self.ledger.iter().for_each(|l| l.strike(target.channels()));
    }

    /// The processes, and the share of each now, in millionths.
    pub fn shares(&self) -> BTreeMap<u32, u64> {
        self.divider.members().map(|(m, share)| (m.id as u32, share)).collect()
    }

    /// Begins the next window; the caller lets its length pass and then calls [`Agent::end`]. Without one there is nobody
    /// to divide among, and the caller looks again after a while.
    pub fn begin(&mut self) -> Option<Window> {
        self.window = self.divider.next();
        let active: BTreeMap<u32, bool> = self.divider.members().map(|(m, _)| (m.id as u32, m.active)).collect();
        let owner = self.window.map(|w| w.owner as u32);
        let mut gone = Vec::new();
        let stays_off = |pid: u32, p: &Process| match p.class {
            Class::Interactive => false,
            Class::Suspended => true,
            _ => Some(pid) != owner && active.get(&pid) == Some(&true),
        };
        for (&pid, p) in self.processes.iter_mut() {
            if stays_off(pid, p) && p.off.is_none() {
                match p.target.suspend(&self.own) {
                    Ok(s) => p.off = Some(s),
                    Err(_) => gone.push(pid),
                }
            }
        }
        for (&pid, p) in self.processes.iter_mut() {
            if !stays_off(pid, p)
                && let Some(s) = p.off.take()
                && s.resume().is_err()
            {
                gone.push(pid);
            }
        }
        for pid in gone {
            self.forget(pid);
        }
        self.window
    }

    /// Ends the window, which lasted `passed_ns`: charges what was used, and notices who is idle and who is not.
    pub fn end(&mut self, passed_ns: u64) {
        let owner = self.window.take();
        self.passed_ns = self.passed_ns - self.passed_ns / AVERAGE + passed_ns;
        let mut gone = Vec::new();
        for (&pid, p) in self.processes.iter_mut() {
            let Some(now) = self.meter.used_ns(pid) else {
                gone.push(pid);
                continue;
            };
            let used = now.saturating_sub(std::mem::replace(&mut p.used_ns, now));
            p.average_ns = p.average_ns - p.average_ns / AVERAGE + used;
            if p.class == Class::Interactive {
                continue;
            }
            if used > 0 {
                self.divider.charge(pid.into(), used);
            }
            match owner.filter(|w| w.owner == u64::from(pid)) {
                Some(_) => self.divider.set_active(pid.into(), used * 100 >= passed_ns * IDLE_PERCENT),
                None if used > 0 => self.divider.set_active(pid.into(), true),
                None => {}
            }
        }
        for pid in gone {
            self.forget(pid);
        }
    }
}

impl<M> Drop for Agent<M> {
    fn drop(&mut self) {
        for p in std::mem::take(&mut self.processes).into_values() {
            let channels = p.target.channels().to_vec();
            drop(p);
            self.ledger.iter().for_each(|l| l.strike(&channels));
        }
    }
}
