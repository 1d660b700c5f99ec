//! Connections: their pages, and their accounts on devices.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use forebay_policy::share::Member;
use forebay_proto::memory::Made;
use forebay_proto::page::{AccountWords, ClientPage, MAX_DEVICES, ProgramPage, ProgramWords};
use forebay_proto::wire::{self, Class, Refusal, Reply};

use super::tick::publish;
use super::{MAX_SESSIONS, MAX_SESSIONS_PER_USER, Service, World, policy, refusal};

/// Number of a connection.
pub type SessionId = u64;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The process that connected.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Whether it may set anything.
    pub privileged: bool,
}

pub(super) struct Session {
    pub(super) peer: Peer,
    pub(super) greeted: bool,
    pub(super) since_ns: u64,
    pub(super) client: Made<ClientPage>,
    pub(super) program: Made<ProgramPage>,
    /// Device of each account.
    pub(super) accounts: Vec<Option<usize>>,
    /// What the program says it has used, by account, as far as it was counted.
    counted_ns: [Cell<u64>; MAX_DEVICES],
}

/// An account of a session.
#[derive(Clone, Copy)]
pub(super) struct Account<'a> {
    /// The service's words.
    pub(super) words: &'a AccountWords,
    /// The program's.
    pub(super) program: &'a ProgramWords,
    pub(super) counted_ns: &'a Cell<u64>,
}

impl Account<'_> {
    /// What the program says it has used by now and was not counted yet. One that takes back what it said has used nothing.
    fn uncounted_ns(&self, now_ns: u64) -> u64 {
        self.program.used_ns(|| now_ns).saturating_sub(self.counted_ns.get())
    }

    /// Counts that, as far as there is room for.
    pub(super) fn count(&self, now_ns: u64, room_ns: u64) -> u64 {
        let ns = self.uncounted_ns(now_ns).min(room_ns);
        self.counted_ns.set(self.counted_ns.get() + ns);
        ns
    }

    /// For how long what is in the device now is there, ns; 0 when nothing is.
    pub(super) fn there_ns(&self, now_ns: u64) -> u64 {
        match self.program.since.load(Ordering::Relaxed) {
            0 => 0,
            since => now_ns.saturating_sub(since),
        }
    }
}

impl Session {
    /// Its accounts.
    pub(super) fn accounts(&self) -> impl Iterator<Item = (Option<usize>, Account<'_>)> {
        let words = self.client.accounts.iter().zip(&self.program.accounts).zip(&self.counted_ns);
        let account = |((words, program), counted_ns)| Account { words, program, counted_ns };
        self.accounts.iter().copied().zip(words.map(account))
    }

    /// Its accounts on a device.
    pub(super) fn on(&self, device: usize) -> impl Iterator<Item = Account<'_>> {
        self.accounts().filter(move |(on, _)| *on == Some(device)).map(|(_, account)| account)
    }
}

impl<W: World> Service<W> {
    /// Files of the pages of a session, for its welcome.
    pub fn files(&self, id: SessionId) -> Option<[std::os::fd::BorrowedFd<'_>; 3]> {
        let s = self.sessions.get(&id)?;
        Some([self.global.file(), s.client.file(), s.program.file()])
    }

    /// The pages of a session, for tests and simulation.
    pub fn pages(&self, id: SessionId) -> Option<(&ClientPage, &ProgramPage)> {
        self.sessions.get(&id).map(|s| (&*s.client, &*s.program))
    }

    /// Somebody connects.
    ///
    /// # Errors
    /// Why not; nothing is kept of it then.
    pub fn connect(&mut self, id: SessionId, peer: Peer) -> Result<(), String> {
        if self.sessions.len() >= MAX_SESSIONS {
            return Err(format!("{MAX_SESSIONS} connections are open"));
        }
        let same = self.sessions.values().filter(|s| s.peer.uid == peer.uid).count();
        if !peer.privileged && same >= MAX_SESSIONS_PER_USER {
            return Err(format!("user {} has {MAX_SESSIONS_PER_USER} connections", peer.uid));
        }
        let page = |e: rustix::io::Errno| format!("a page: {e}");
        let client = Made::new("forebay-client", false).map_err(page)?;
        let program = Made::new("forebay-program", true).map_err(page)?;
        let since_ns = self.now_ns;
        let (accounts, counted_ns) = (Vec::new(), Default::default());
        self.sessions.insert(id, Session { peer, greeted: false, since_ns, client, program, accounts, counted_ns });
        Ok(())
    }

    /// A connection has ended, or is to be ended.
    pub fn disconnect(&mut self, id: SessionId) {
        // Its process stays a member of its devices until it ends: what it owes it could otherwise leave behind.
        let until_ns = self.next_tick_ns();
        let Some(s) = self.sessions.remove(&id) else { return };
        if let Some(p) = self.processes.get_mut(&s.peer.pid) {
            s.accounts()
                .filter_map(|(on, account)| Some((on?, account)))
                .for_each(|(on, account)| p.settle(on, account, until_ns));
        }
    }

    /// Sessions that have not said hello for so long.
    pub fn silent(&self, longer_than_ns: u64) -> Vec<SessionId> {
        let late = |s: &Session| !s.greeted && self.now_ns.saturating_sub(s.since_ns) > longer_than_ns;
        self.sessions.iter().filter(|(_, s)| late(s)).map(|(id, _)| *id).collect()
    }

    pub(super) fn join(&mut self, id: SessionId, pid: u32, name: &str) -> Result<Reply, Refusal> {
        let name = wire::short_name(name);
        let device = self.devices.iter().position(|d| d.about.name == name).ok_or(Refusal::NoDevice(name))?;
        let spent = self.world.cpu_time_ns(pid);
        let p = self.processes.get(&pid).ok_or(Refusal::NoProcess(pid))?;
        let s = self.sessions.get_mut(&id).ok_or(Refusal::NoProcess(pid))?;
        let account = match s.accounts.iter().position(Option::is_none) {
            Some(free) => free,
            None if s.accounts.len() < MAX_DEVICES => {
                s.accounts.push(None);
                s.accounts.len() - 1
            }
            None => return Err(Refusal::Limit { what: "accounts".into(), limit: MAX_DEVICES as u64 }),
        };
        let d = &mut self.devices[device];
        if d.metered && spent.is_none() {
            return Err(Refusal::NoProcess(pid));
        }
        let member = Member { id: pid.into(), class: policy(p.class), nice: p.nice.into(), active: true };
        d.bank.set(member, if d.metered { spent.unwrap_or(0) } else { 0 }).map_err(|e| refusal(&d.about.name, e))?;
        s.accounts[account] = Some(device);
        let (words, program) = (&s.client.accounts[account], &s.program.accounts[account]);
        words.precedence.store((p.class == Class::Interactive).into(), Ordering::Relaxed);
        let account_of = Account { words, program, counted_ns: &s.counted_ns[account] };
        // Of what was used before nothing is known, and nothing is owed.
        account_of.counted_ns.set(program.used_ns(|| self.now_ns));
        publish(&account_of, d.allowance(pid.into(), &account_of), None);
        let metered = d.metered;
        self.refreshed_ns = 0;
        Ok(Reply::Joined { account: account as u8, metered })
    }

    /// Whoever goes with work in a device is taken to have it there until then.
    fn next_tick_ns(&self) -> u64 {
        self.now_ns.saturating_add(self.tick_ns())
    }

    pub(super) fn leave(&mut self, id: SessionId, pid: u32, number: u8) -> Result<Reply, Refusal> {
        let none = || Refusal::Invalid(format!("there is no account {number}"));
        let until_ns = self.next_tick_ns();
        let s = self.sessions.get_mut(&id).ok_or_else(none)?;
        let device = s.accounts.get_mut(usize::from(number)).and_then(Option::take).ok_or_else(none)?;
        if let Some(p) = self.processes.get_mut(&pid)
            && let Some((_, account)) = s.accounts().nth(number.into())
        {
            p.settle(device, account, until_ns);
        }
        Ok(Reply::Done)
    }
}
