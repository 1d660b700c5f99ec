//! A process taken off the GPU and let on by the driver: its channels disabled and enabled, its slices shortened and given
//! back. Whatever is done to it is in the ledger first.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_rm::sys::RawHandle;
use forebay_rm::{Client, Slices, Suspension, Target};

use super::Refused;
use super::grip::{Gone, Grip, Reach};
use crate::ledger::Ledger;

/// Slice of those who must let others through at once: shorter ones help no more, and cost switches.
pub const SHORT_SLICE_US: u64 = 50;

/// The way to processes by a client of our own.
pub struct Hardware {
    own: Arc<Client>,
    /// Where the guardian finds what may have to be given back.
    ledger: Option<Arc<Ledger>>,
}

impl Hardware {
    /// Without a ledger nobody gives back what is taken when this process is killed.
    pub fn new(own: Arc<Client>, ledger: Option<Arc<Ledger>>) -> Self {
        Hardware { own, ledger }
    }
}

impl Reach for Hardware {
    fn find(&self, pid: u32, known: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
        let (own, ledger) = (self.own.clone(), self.ledger.clone());
        let target = enter(&own, pid, known, ledger.as_ref())?;
        Ok(Box::new(Process { own, target, ledger, off: None, short: None }))
    }
}

struct Process {
    own: Arc<Client>,
    target: Target,
    ledger: Option<Arc<Ledger>>,
    off: Option<Suspension>,
    short: Option<Slices>,
}

impl Grip for Process {
    fn clients(&self) -> Vec<RawHandle> {
        self.target.channels().iter().map(|h| h.client).collect()
    }

    fn is_off(&self) -> bool {
        self.off.is_some()
    }

    fn suspend(&mut self) -> Result<(), Gone> {
        if self.off.is_none() {
            self.off = Some(self.target.suspend(&self.own).map_err(|_| Gone)?);
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Gone> {
        self.off.take().map_or(Ok(()), Suspension::resume).map_err(|_| Gone)
    }

    fn let_on(&mut self) {
        if self.off.is_none() {
            // One that has gone is noticed at the next thing that is done to it.
            let _ = self.target.release(&self.own);
        }
    }

    fn shorten(&mut self, short: bool) {
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
            self.short = self.target.slice(&self.own, SHORT_SLICE_US).ok();
            if self.short.is_none() {
                self.strike_groups();
            }
        }
    }

    fn look_again(&mut self, known: &HashSet<RawHandle>) -> bool {
        // One that cannot be looked into has gone, or is steered as it was.
        let Ok(now) = Target::find(&self.own, self.target.pid(), known) else { return true };
        if now.channels() == self.target.channels() {
            return true;
        }
        self.let_go();
        match enter(&self.own, self.target.pid(), known, self.ledger.as_ref()) {
            Ok(target) => {
                self.target = target;
                true
            }
            Err(_) => false,
        }
    }
}

impl Process {
    fn strike_groups(&self) {
        self.ledger.iter().for_each(|l| l.strike_groups(self.target.groups()));
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
