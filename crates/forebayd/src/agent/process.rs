//! A process on the GPU in the agent's hands: taken off and let on, its slices shortened and given back. Whatever is done
//! to it is in the ledger first.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_policy::reserve::Reserve;
use forebay_policy::share::Class;
use forebay_rm::sys::RawHandle;
use forebay_rm::{Client, Error, Slices, Suspension, Target};

use super::Refused;
use crate::ledger::Ledger;

/// Slice of those who must let others through at once: shorter ones help no more, and cost switches.
pub const SHORT_SLICE_US: u64 = 50;

/// A process.
pub(super) struct Process {
    target: Target,
    ledger: Option<Arc<Ledger>>,
    pub(super) class: Class,
    pub(super) nice: i32,
    /// Its use when it was looked at last.
    pub(super) used_ns: u64,
    /// What it has used while it was on the GPU.
    pub(super) spent_ns: u64,
    /// Its use of a window, averaged.
    pub(super) average_ns: u64,
    /// Time for which it was off the GPU by our doing.
    pub(super) off_ns: u64,
    /// Of an interactive one: how long it may go on being first, and whether it comes back as soon as it can.
    pub(super) reserve: Reserve,
    pub(super) bursts: bool,
    /// Its channel groups that had been on the GPU when it was looked into.
    pub(super) contexts: usize,
    off: Option<Suspension>,
    short: Option<Slices>,
}

impl Process {
    /// Looks into a process and lets it on the GPU, with slices of its own, whatever state it was left in.
    pub(super) fn find(
        own: &Arc<Client>,
        pid: u32,
        known: &HashSet<RawHandle>,
        ledger: Option<Arc<Ledger>>,
        (class, nice): (Class, i32),
    ) -> Result<Self, Refused> {
        let target = enter(own, pid, known, ledger.as_ref())?;
        Ok(Process {
            target,
            ledger,
            class,
            nice,
            used_ns: 0,
            spent_ns: 0,
            average_ns: 0,
            off_ns: 0,
            reserve: Reserve::default(),
            bursts: false,
            contexts: 0,
            off: None,
            short: None,
        })
    }

    /// Its clients.
    pub(super) fn clients(&self) -> impl Iterator<Item = RawHandle> {
        self.target.channels().iter().map(|h| h.client)
    }

    pub(super) fn is_off(&self) -> bool {
        self.off.is_some()
    }

    /// Takes it off the GPU, if it is on it.
    pub(super) fn suspend(&mut self, own: &Arc<Client>) -> Result<(), Error> {
        if self.off.is_none() {
            self.off = Some(self.target.suspend(own)?);
        }
        Ok(())
    }

    /// Lets it on the GPU, if it is off it.
    pub(super) fn resume(&mut self) -> Result<(), Error> {
        self.off.take().map_or(Ok(()), Suspension::resume)
    }

    /// Makes its slices short, or gives it its own back. Where they cannot be changed they stay as they are.
    pub(super) fn shorten(&mut self, own: &Arc<Client>, short: bool) {
        if short == self.short.is_some() {
            return;
        }
        if !short {
            self.short = None;
            self.strike_groups();
            return;
        }
        let entered = self.ledger.as_ref().is_none_or(|l| l.enter_groups(self.target.pid(), self.target.groups()));
        if entered {
            self.short = self.target.slice(own, SHORT_SLICE_US).ok();
            if self.short.is_none() {
                self.strike_groups();
            }
        }
    }

    fn strike_groups(&self) {
        self.ledger.iter().for_each(|l| l.strike_groups(self.target.groups()));
    }

    /// So many channel groups of it have been on the GPU, more than when it was looked into: once again, for what it has
    /// made since. False when it cannot be steered any more: nothing of it is in the ledger then, and it is on the GPU.
    #[must_use]
    pub(super) fn look_again(&mut self, own: &Arc<Client>, contexts: usize, known: &HashSet<RawHandle>) -> bool {
        self.contexts = contexts;
        // One that cannot be looked into has gone, or is steered as it was.
        let Ok(now) = Target::find(own, self.target.pid(), known) else { return true };
        if now.channels() == self.target.channels() {
            return true;
        }
        self.let_go();
        match enter(own, self.target.pid(), known, self.ledger.as_ref()) {
            Ok(target) => {
                self.target = target;
                true
            }
            Err(_) => false,
        }
    }

    /// On the GPU first, with its own slices, out of the ledger then.
    fn let_go(&mut self) {
        (self.off, self.short) = (None, None);
        self.strike_groups();
        self.ledger.iter().for_each(|l| l.strike(self.target.channels()));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Finds a process, enters it and lets it on the GPU.
fn enter(
    own: &Arc<Client>,
    pid: u32,
    known: &HashSet<RawHandle>,
    ledger: Option<&Arc<Ledger>>,
) -> Result<Target, Refused> {
    let mut target = Target::find(own, pid, known).map_err(Refused::Driver)?;
    if ledger.is_some_and(|l| !l.enter(target.channels())) {
        return Err(Refused::Ledger);
    }
    if let Err(e) = target.release(own).and_then(|()| target.heal_slices(own, SHORT_SLICE_US)) {
        ledger.iter().for_each(|l| l.strike(target.channels()));
        return Err(Refused::Driver(e));
    }
    Ok(target)
}
