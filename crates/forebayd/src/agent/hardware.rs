//! A process taken off the GPU and let on by the driver: its channels disabled and enabled, its slices shortened and given
//! back. Whatever is done to it is in the ledger first.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use forebay_rm::sys::RawHandle;
use forebay_rm::{Client, Error, Search, Slices, Suspension, Target};

use super::Refused;
use super::grip::{Gone, Grip, Reach};
use crate::ledger::Ledger;

/// Slice of those who must let others through at once: shorter ones help no more, and cost switches.
pub const SHORT_SLICE_US: u64 = 50;

/// Slices for long turns end like this in decimal, as nobody else's do: so they are known for ours when we have left them behind.
const MARK_US: u64 = 77;
const MARKED_US: u64 = 100;

/// The slice nearest to a turn's length that is known for ours.
pub fn slice_of_turn(length_ns: u64) -> u64 {
    let us = length_ns / 1000;
    (us.saturating_sub(MARK_US) + MARKED_US / 2) / MARKED_US * MARKED_US + MARK_US
}

/// Whether that is a slice of ours.
fn is_left(us: u64) -> bool {
    us == SHORT_SLICE_US || us % MARKED_US == MARK_US
}

/// A process that has the driver open and no channels is about to make some, or it only asks the driver how things are. So many
/// times it is looked into whenever that is asked for, then more seldom, down to every fourth time; from the beginning when
/// it has opened or closed one of the driver's files, as whoever makes a channel does.
const LOOKS: (u32, u32) = (20, 4);
/// The same for the search for its clients: the kernel's log has a line for each that is not there.
const SEARCHES: (u32, u32) = (3, 128);
/// One with channels is looked into again at so many looks in a row at which it has another number of the driver's files, or
/// not what it had, and then more seldom: the driver may not give slices just as they were set.
const ODD: (u32, u32) = (5, 64);
/// Most such processes that are remembered.
const MAX_WAITING: usize = 1024;

/// The way to processes by a client of our own.
pub struct Hardware {
    own: Arc<Client>,
    /// Where the guardian finds what may have to be given back.
    ledger: Option<Arc<Ledger>>,
    /// Processes without channels.
    waiting: RefCell<HashMap<u32, Waiting>>,
    /// Clients that are asked about to find a process that is older than this one.
    further: u32,
}

/// A process without channels.
#[derive(Default)]
struct Waiting {
    search: Search,
    /// How often it was asked for since it last had another number of the driver's files open.
    asked: u32,
    files: usize,
    /// It was or is being looked for further down.
    further: bool,
}

impl Waiting {
    /// It is asked for while it has so many files open: how often it was before.
    fn ask(&mut self, files: usize) -> u32 {
        if files != self.files {
            (self.files, self.asked) = (files, 0);
        }
        self.asked = self.asked.wrapping_add(1);
        self.asked.wrapping_sub(1)
    }
}

/// Whether it is the turn of this one: always at first, then every second, fourth, and so on.
fn is_due(n: u32, (always, most): (u32, u32)) -> bool {
    n.is_multiple_of((n / always).max(1).next_power_of_two().min(most))
}

impl Hardware {
    /// Without a ledger nobody gives back what is taken when this process is killed.
    pub fn new(own: Arc<Client>, ledger: Option<Arc<Ledger>>) -> Self {
        Hardware { own, ledger, waiting: RefCell::default(), further: 0 }
    }

    /// To find processes that began long before this one, so many clients further down are asked about once for each. Those
    /// that are not there leave a line in the kernel's log.
    #[must_use]
    pub fn searching(self, further: u32) -> Self {
        Hardware { further, ..self }
    }
}

impl Reach for Hardware {
    fn find(&self, pid: u32, known: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() > MAX_WAITING {
            waiting.clear();
        }
        let w = waiting.entry(pid).or_default();
        let n = w.ask(self.own.rm().count_files(pid));
        let further = w.search.further > 0;
        if !further && !is_due(n, LOOKS) {
            return Err(Refused::Driver(Error::NoChannels { pid, files: 0, calls: 0 }));
        }
        w.search.nowhere_else = !is_due(n, SEARCHES);
        let (own, ledger) = (self.own.clone(), self.ledger.clone());
        let target = enter(&own, pid, known, ledger.as_ref(), &mut w.search)?;
        let search = waiting.remove(&pid).unwrap_or_default().search;
        let files = own.rm().count_files(pid);
        Ok(Box::new(Process { own, target, search, ledger, off: None, slices: None, files, odd: 0 }))
    }

    fn lets_on_first(&self) -> bool {
        true
    }

    fn lost(&self) -> Option<String> {
        self.own.lost()
    }

    fn remember(&self, pid: u32, clients: &[RawHandle]) {
        let search = Search::from(clients.to_vec());
        self.waiting.borrow_mut().entry(pid).or_insert(Waiting { search, ..Waiting::default() });
    }

    fn clients_of(&self, pid: u32) -> Vec<RawHandle> {
        self.waiting.borrow().get(&pid).map_or_else(Vec::new, |w| w.search.clients.clone())
    }

    fn look_soon(&self, pid: u32) {
        self.waiting.borrow_mut().entry(pid).and_modify(|w| w.asked = 0);
    }

    fn look_further(&self, pid: u32) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let Some(w) = waiting.get_mut(&pid) else { return false };
        if !std::mem::replace(&mut w.further, true) {
            w.search.further = self.further;
        }
        w.search.further > 0
    }

    fn forget(&self, pid: u32) {
        self.waiting.borrow_mut().remove(&pid);
    }
}

struct Process {
    own: Arc<Client>,
    target: Target,
    /// Its clients.
    search: Search,
    ledger: Option<Arc<Ledger>>,
    off: Option<Suspension>,
    /// Slices that are not its own, of so many µs.
    slices: Option<(u64, Slices)>,
    /// How many of the driver's files it has open.
    files: usize,
    /// Looks in a row at which something about it was not as it was.
    odd: u32,
}

impl Grip for Process {
    fn clients(&self) -> Vec<RawHandle> {
        self.search.clients.clone()
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

    fn hold(&mut self) -> Result<(), Gone> {
        self.off.as_ref().map_or(Ok(()), Suspension::again).map_err(|_| Gone)
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

    fn slice(&mut self, us: Option<u64>) -> bool {
        let is = self.slices.as_ref().map(|(us, _)| *us);
        let Some(us) = us.filter(|us| is != Some(*us)) else {
            if us.is_none() && is.is_some() {
                self.slices = None;
                self.strike_groups();
            }
            return true;
        };
        if let Some((is, slices)) = &mut self.slices {
            let set = slices.set(us).is_ok();
            // Not known when that failed: they are set the next time.
            *is = if set { us } else { 0 };
            return set;
        }
        if self.ledger.as_ref().is_some_and(|l| !l.enter_groups(self.target.pid(), self.target.groups())) {
            return false;
        }
        self.slices = self.target.slice(&self.own, us).ok().map(|s| (us, s));
        if self.slices.is_none() {
            self.strike_groups();
        }
        self.slices.is_some()
    }

    fn may_be_other(&mut self) -> bool {
        // Slices that are not known are set the next time.
        let us = self.slices.as_ref().map(|(us, _)| *us);
        // One that cannot be looked into has gone, which is noticed otherwise.
        let Ok((is, files)) = self.target.is_as_found(&self.own, us) else { return false };
        if (is || us == Some(0)) && files == self.files {
            self.odd = 0;
            return false;
        }
        self.files = files;
        let n = self.odd;
        self.odd = n.wrapping_add(1);
        is_due(n, ODD)
    }

    fn look_again(&mut self, known: &HashSet<RawHandle>, widely: bool) -> bool {
        let mut search = self.search.clone();
        search.nowhere_else = !widely;
        let mut now = Target::search(&self.own, self.target.pid(), known, &mut search);
        if !widely && matches!(now, Err(Error::NoChannels { .. })) {
            search = self.search.clone();
            search.nowhere_else = false;
            now = Target::search(&self.own, self.target.pid(), known, &mut search);
        }
        // One that cannot be looked into has gone, or is steered as it was.
        let Ok(now) = now else { return true };
        if now.channels() == self.target.channels() {
            return self.hold_again(now);
        }
        self.let_go();
        search.nowhere_else = true;
        self.search = search;
        match enter(&self.own, self.target.pid(), known, self.ledger.as_ref(), &mut self.search) {
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

    /// Its channels have the handles that they had, and may have been made anew: on the GPU, with slices of their own. False if
    /// it cannot be held.
    fn hold_again(&mut self, now: Target) -> bool {
        if self.slices.is_none() {
            self.target = now;
        } else if let Some((is, slices)) = &mut self.slices
            && now.groups().iter().any(|g| g.slice_us != *is)
            && slices.set(*is).is_err()
        {
            // Not known: they are set the next time.
            *is = 0;
        }
        self.hold().is_ok()
    }

    /// On the GPU first, with its own slices, out of the ledger then.
    fn let_go(&mut self) {
        (self.off, self.slices) = (None, None);
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
    search: &mut Search,
) -> Result<Target, Refused> {
    let mut target = Target::search(own, pid, known, search).map_err(Refused::Driver)?;
    if ledger.is_some_and(|l| !l.enter(target.channels())) {
        return Err(Refused::Ledger);
    }
    if let Err(e) = target.release(own).and_then(|()| target.heal_slices(own, is_left)) {
        ledger.iter().for_each(|l| l.strike(target.channels()));
        return Err(Refused::Driver(e));
    }
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_another_number_of_files_it_is_asked_for_from_the_beginning() {
        let mut w = Waiting::default();
        let asked: Vec<u32> = [2, 2, 2, 1, 1].into_iter().map(|n| w.ask(n)).collect();
        assert_eq!(asked, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn slices_of_all_turns_are_known_for_ours_and_the_drivers_is_not() {
        let [shortest, longest] = forebay_policy::share::TURN_NS;
        for length in (shortest..=longest).step_by(12_345) {
            let us = slice_of_turn(length);
            assert!(is_left(us) && us.abs_diff(length / 1000) <= 50, "{us} for {length} ns");
            assert!((forebay_rm::MIN_SLICE_US..=forebay_rm::MAX_SLICE_US).contains(&us), "{us}");
        }
        assert!(is_left(SHORT_SLICE_US) && !is_left(forebay_rm::DEFAULT_SLICE_US));
    }

    #[test]
    fn pauses_grow_to_the_longest() {
        let due = |of, n| (0..n).filter(|i| is_due(*i, of)).count();
        assert_eq!(due(LOOKS, 40), 40);
        assert_eq!(due(LOOKS, 1000) - due(LOOKS, 800), 50);
        assert_eq!(due(SEARCHES, 6), 6);
        assert!(due(SEARCHES, 1000) < 40);
        assert_eq!(due(SEARCHES, 12_800 + 1280) - due(SEARCHES, 12_800), 10);
    }
}
