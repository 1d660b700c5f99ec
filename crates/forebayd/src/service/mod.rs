//! What the service knows and decides, without sockets, clocks or processes: those are the [`World`]'s. The daemon
//! (`server`) and the simulation drive the same code.
//!
//! Rules:
//! 1. A process is known from the first time that it connects or is named until it ends. It keeps its class and nice value
//!    as long, across connections and a restart of the service; and what it owes on a device across connections.
//! 2. A process that comes from one that was given a class begins with that class.
//! 3. The service's user, root and the group `forebay` may set anything. Others may set their own processes only, and no
//!    higher than the ceiling: `normal` and the process's own nice value, or what somebody who may has said last.
//! 4. At every [`Service::tick`] the banks hand out credit, and pages are written; a waiting process is woken when it may
//!    go on: it has credit, and nobody goes before it. Credit is a process's, however many connections it has: what is used
//!    over one is taken from all.
//! 5. While an `interactive` process has work and credit, others begin nothing; one that has work but uses nothing for
//!    [`STUCK_TICKS`] does not count.
//! 6. Device memory: see `limit`.
//! 7. Whatever a program writes to its own page, and whatever it sends, has an effect on nothing but itself, within limits.

mod brought;
mod corun;
mod gpu;
mod limit;
mod ready;
mod session;
mod tick;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use forebay_policy::credit::{Bank, Order, TICK_NS};
use forebay_policy::share::{self, Member, Refusal as Denied, WHOLE};
use forebay_proto::memory::Made;
use forebay_proto::page::{AccountWords, GlobalPage, MAX_DEVICES};
use forebay_proto::wire::{self, CPU, Class, Level, MAX_LISTED, MAX_REQUEST, Refusal, Reply, Request, Saved, Source};

pub use self::brought::{MAX_BROUGHT, MAX_BROUGHT_BY_USER};
pub use self::corun::{GRACE_NS, MAX_GROUPS, MAX_GROUPS_PER_USER};
use self::corun::{Group, GroupName, Role, name_in};
use self::gpu::Gpu;
use self::limit::Limits;
pub use self::ready::Ready;
use self::ready::Waits;
use self::session::{Account, Session};
pub use self::session::{Peer, SessionId};
use crate::agent::Refused;
use crate::metrics;

/// Most connections.
pub const MAX_SESSIONS: usize = 1024;
/// Most connections of one user, unless it is one that may set anything.
pub const MAX_SESSIONS_PER_USER: usize = 128;
/// Most processes that have a class.
pub const MAX_PROCESSES: usize = 4096;
/// Most clients of drivers that are remembered of a process.
const MAX_CLIENTS: usize = 64;
/// Ticks without use after which an interactive process that says it works is not believed.
pub const STUCK_TICKS: u32 = 4;
/// Pages are refreshed so often, at a tick.
pub const REFRESH_NS: u64 = 4 * TICK_NS;
/// Active programs from which on ticks are twice as far apart; from four times as many on, four times. A tick costs
/// something for each of them, and with many each one's part of the longer time is still no more than a few had of the
/// shorter.
const MANY: usize = 8;
/// Those that a process comes from: they are asked for a class, and looked into before it.
const MAX_ANCESTORS: usize = 16;

/// A process, as the operating system describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its user.
    pub uid: u32,
    /// Its name.
    pub name: String,
    /// When it began; a process with the same number and another beginning is another one.
    pub began: u64,
    /// Its parent.
    pub parent: u32,
    /// Its nice value, with what its control groups add.
    pub nice: i32,
}

/// What the service asks of the system.
pub trait World {
    /// A process; none when it is not there.
    fn describe(&mut self, pid: u32) -> Option<Described>;
    /// Time that a process has had of the CPU, ns.
    fn cpu_time_ns(&mut self, pid: u32) -> Option<u64>;
    /// How long threads of a process have been ready and had no core; none where the system does not say.
    fn ready(&mut self, pid: u32) -> Option<Ready> {
        let _ = pid;
        None
    }
    /// Wakes whoever sleeps on a word of a page.
    fn wake(&mut self, page: &AccountWords);
    /// From now on [`Service::exited`] is to be called when the process ends.
    fn watch(&mut self, pid: u32);
    /// Ends a process at once, if it is still the one that began then.
    ///
    /// # Errors
    /// Why not, for the log.
    fn end(&mut self, pid: u32, began: u64) -> Result<(), String>;
    /// Starts a control daemon of MPS as this user, on behalf of process `by`; its number, and the name of its folder, which
    /// begins with that of the group. It is ready when its pipe is there.
    ///
    /// # Errors
    /// Why not, for whoever asked.
    fn start_mps(&mut self, by: u32, uid: u32, group: &str) -> Result<(u32, String), String> {
        let _ = (by, uid, group);
        Err("there is no MPS here".into())
    }
    /// Where the control daemon of a folder has its pipe, and its log.
    fn mps_folders(&self, folder: &str) -> (String, String) {
        (folder.into(), folder.into())
    }
    /// Tells a control daemon to end, once its programs have.
    fn quit_mps(&mut self, folder: &str) {
        let _ = folder;
    }
    /// A control daemon has ended: its folder is of no use any more.
    fn forget_mps(&mut self, folder: &str) {
        let _ = folder;
    }
}

/// What becomes of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// This goes back.
    Reply(Reply),
    /// This goes back, with the session's files.
    Welcome(Reply),
    /// The connection ends, for this reason.
    Close(String),
}

struct Process {
    about: Described,
    class: Class,
    /// The class to go back to when it is resumed.
    before: Class,
    nice: i8,
    /// The highest class and the lowest nice value that its user may set.
    ceiling: (Class, i8),
    limits: Limits,
    /// Ticks for which it says that it works and uses nothing.
    stuck: u32,
    /// Use that it said over connections that have ended, and that was not counted yet, by device.
    late_ns: [u64; MAX_DEVICES],
    /// The co-run group that it belongs to, and as what.
    group: Option<(String, Role)>,
}

impl Process {
    /// It gives up an account on a device: what it has used over that will be counted.
    fn settle(&mut self, device: usize, account: Account<'_>, until_ns: u64) {
        if let Some(ns) = self.late_ns.get_mut(device) {
            *ns = ns.saturating_add(account.count(until_ns, u64::MAX));
        }
    }
}

struct Device {
    about: wire::Device,
    metered: bool,
    bank: Bank,
    tasks: (u64, u64),
    /// Use that was reported and did not fit the time that had passed.
    over_ns: u64,
    /// The user whose program has brought it.
    by: Option<u32>,
}

impl Device {
    /// How far an account of a process may get: by the kernel's clock of the process, or by what the account says itself,
    /// which is what was used over that one only.
    fn allowance(&self, id: u64, account: &Account<'_>) -> u64 {
        let all =
            if self.metered { self.bank.allowance(id) } else { self.bank.allowance_from(id, account.counted_ns.get()) };
        all.unwrap_or(0)
    }
}

/// The service.
pub struct Service<W> {
    world: W,
    global: Made<GlobalPage>,
    order: Order,
    devices: Vec<Device>,
    gpus: Vec<Gpu>,
    processes: BTreeMap<u32, Process>,
    groups: BTreeMap<GroupName, Group>,
    /// For the log.
    said: Vec<String>,
    sessions: BTreeMap<SessionId, Session>,
    began_ns: u64,
    now_ns: u64,
    refreshed_ns: u64,
    /// Who was ready and had no core.
    waits: Waits,
    /// Clients of GPUs' drivers that processes had under an earlier service.
    found: BTreeMap<u32, Vec<u32>>,
    /// The classes of processes have changed since they were saved.
    pub dirty: bool,
    /// Somebody was told that a class is set, and it is not saved yet.
    pub promised: bool,
}

fn policy(class: Class) -> share::Class {
    match class {
        Class::Interactive => share::Class::Interactive,
        Class::Custom(s) => share::Class::Custom(s),
        Class::Normal => share::Class::Normal,
        Class::Background => share::Class::Background,
        Class::Suspended => share::Class::Suspended,
    }
}

/// How much a class takes from others.
fn rank(class: Class) -> u8 {
    match class {
        Class::Suspended => 0,
        Class::Background => 1,
        Class::Normal => 2,
        Class::Custom(_) | Class::Interactive => 3,
    }
}

impl<W: World> Service<W> {
    /// A service with the CPU of so many cores.
    ///
    /// # Errors
    /// The kernel's, for the global page.
    pub fn new(world: W, cores: u32, order: Order, now_ns: u64) -> rustix::io::Result<Self> {
        let cpu = wire::Device { name: CPU.into(), index: 0, units: cores, level: Level::Credit };
        Ok(Service {
            world,
            global: Made::new("forebay-global", false)?,
            devices: vec![Device {
                about: cpu,
                metered: true,
                bank: Bank::new(cores, order),
                tasks: (0, 0),
                over_ns: 0,
                by: None,
            }],
            order,
            gpus: Vec::new(),
            processes: BTreeMap::new(),
            groups: BTreeMap::new(),
            said: Vec::new(),
            sessions: BTreeMap::new(),
            began_ns: now_ns,
            now_ns,
            refreshed_ns: 0,
            waits: Waits::default(),
            found: BTreeMap::new(),
            dirty: false,
            promised: false,
        })
    }

    /// Adds a device whose use programs report themselves; its number, or none when there are too many.
    pub fn add_device(&mut self, name: &str, units: u32, order: Order) -> Option<usize> {
        let (index, name) = (self.devices.len(), wire::short_name(name));
        if index >= MAX_DEVICES || self.devices.iter().any(|d| d.about.name == name) {
            return None;
        }
        let about = wire::Device { name, index: index as u8, units, level: Level::Credit };
        let bank = Bank::new(units, order);
        self.devices.push(Device { about, metered: false, bank, tasks: (0, 0), over_ns: 0, by: None });
        Some(index)
    }

    /// The world.
    pub fn world(&mut self) -> &mut W {
        &mut self.world
    }

    /// Time until the next tick, ns: [`TICK_NS`] while anybody is active, but longer the more there are (see `MANY`),
    /// and [`REFRESH_NS`] when nobody is.
    pub fn tick_ns(&self) -> u64 {
        match self.devices.iter().map(|d| d.bank.active()).sum::<usize>() {
            0 => REFRESH_NS,
            few if few < MANY => TICK_NS,
            many if many < 4 * MANY => 2 * TICK_NS,
            _ => REFRESH_NS,
        }
    }

    /// The members of a device, for tests and simulation.
    pub fn bank(&self, device: usize) -> Option<&Bank> {
        self.devices.get(device).map(|d| &d.bank)
    }

    /// A process has ended.
    pub fn exited(&mut self, pid: u32) {
        if let Some(p) = self.processes.remove(&pid) {
            self.dirty = true;
            if let Some((name, role)) = p.group {
                self.left_group(pid, &(p.about.uid, name), role);
            }
        }
        self.found.remove(&pid);
        for g in &mut self.gpus {
            g.agent.forget(pid);
            g.refused.remove(&pid);
            g.lowered.remove(&pid);
        }
        for d in &mut self.devices {
            d.bank.remove(pid.into());
        }
        // What is left of its connections is found closed; they must not count for whoever has its number next.
        for s in self.sessions.values_mut().filter(|s| s.peer.pid == pid) {
            s.accounts.iter_mut().for_each(|a| *a = None);
        }
    }

    /// A message has come.
    pub fn message(&mut self, id: SessionId, bytes: &[u8]) -> Answer {
        let Some(s) = self.sessions.get_mut(&id) else { return Answer::Close("no such session".into()) };
        let peer = s.peer;
        let request = match wire::decode::<Request>(bytes, MAX_REQUEST) {
            Ok(r) => r,
            Err(e) => return Answer::Close(e.to_string()),
        };
        match request {
            Request::Hello { version, .. } if version != wire::VERSION => {
                Answer::Close(format!("protocol version {version} instead of {}", wire::VERSION))
            }
            Request::Hello { .. } if s.greeted => Answer::Close("a second hello".into()),
            Request::Hello { name, .. } => {
                s.greeted = true;
                let up_ms = self.now_ns.saturating_sub(self.began_ns) / 1_000_000;
                match self.known(peer.pid) {
                    Ok(p) if p.about.uid == peer.uid || peer.privileged => {
                        if !name.is_empty() {
                            p.about.name = wire::short_name(&name);
                        }
                        Answer::Welcome(Reply::Welcome { service: env!("CARGO_PKG_VERSION").into(), up_ms })
                    }
                    // Between connecting and now the process has become another user's.
                    Ok(_) => Answer::Close("the process is another user's".into()),
                    Err(e) => Answer::Close(e.to_string()),
                }
            }
            _ if !s.greeted => Answer::Close("no hello".into()),
            Request::Join { device } => self.join(id, peer.pid, &device).into(),
            Request::Bring { device } => self.bring(id, peer, &device).into(),
            Request::Leave { account } => self.leave(id, peer.pid, account).into(),
            Request::Set { pid, class, nice } => self.set(peer, pid, class, nice).into(),
            Request::Limit { pid, memory } => self.limit(peer, pid, memory).into(),
            Request::Resume { pid } => self.resume(peer, pid).into(),
            Request::CoRun { group, class, nice } => self.co_run(peer, &group, class, nice).into(),
            Request::List { after } => Answer::Reply(self.list(after)),
            Request::Devices => Answer::Reply(Reply::Devices(
                self.devices.iter().map(|d| &d.about).chain(self.gpus.iter().map(|g| &g.about)).cloned().collect(),
            )),
        }
    }

    /// The process, known from now on (rules 1 and 2).
    fn known(&mut self, pid: u32) -> Result<&mut Process, Refusal> {
        let about = self.world.describe(pid).ok_or(Refusal::NoProcess(pid))?;
        if self.processes.get(&pid).is_some_and(|p| p.about.began != about.began) {
            // Its end has not been heard of yet.
            self.exited(pid);
        }
        if !self.processes.contains_key(&pid) {
            if self.processes.len() >= MAX_PROCESSES {
                return Err(Refusal::Limit { what: "processes".into(), limit: MAX_PROCESSES as u64 });
            }
            let (class, nice, ceiling, limits) = self.inherited(&about);
            let before = if class == Class::Suspended { Class::Normal } else { class };
            let daemon = self.processes.get(&about.parent).filter(|p| p.about.uid == about.uid);
            let group = daemon.and_then(|p| p.group.as_ref()).filter(|(_, role)| *role == Role::Daemon);
            let group = group.map(|(name, _)| (name.clone(), Role::Server));
            let late_ns = [0; MAX_DEVICES];
            let mut p = Process { about, class, before, nice, ceiling, limits, stuck: 0, late_ns, group };
            if let Some((name, role)) = &p.group {
                p.about.name = name_in(name, *role).unwrap_or(p.about.name);
            }
            self.processes.insert(pid, p);
            self.world.watch(pid);
            self.dirty = true;
        }
        self.processes.get_mut(&pid).ok_or(Refusal::NoProcess(pid))
    }

    fn inherited(&mut self, about: &Described) -> (Class, i8, (Class, i8), Limits) {
        let mut parent = about.parent;
        for _ in 0..MAX_ANCESTORS {
            if let Some(p) = self.processes.get(&parent).filter(|p| p.about.uid == about.uid) {
                // An absolute share is one process's own; what comes from it is not admitted for itself.
                // A group's share is that of its server.
                let daemon = p.group.as_ref().filter(|(_, role)| *role == Role::Daemon && parent == about.parent);
                let has_server = |name: &String| !self.in_group(&(about.uid, name.clone()), Role::Server).is_empty();
                let groups = daemon.is_some_and(|(name, _)| !has_server(name));
                let class = if let (Class::Custom(_), false) = (p.class, groups) { Class::Normal } else { p.class };
                return (class, p.nice, p.ceiling, p.limits);
            }
            match self.world.describe(parent) {
                Some(d) if parent > 1 && d.parent != parent => parent = d.parent,
                _ => break,
            }
        }
        let nice = about.nice.clamp(-20, 19) as i8;
        (Class::Normal, nice, (Class::Normal, nice), Limits::default())
    }

    /// Whether somebody may give a process this class and nice value, if they can be at all.
    fn may_set(&mut self, peer: Peer, pid: u32, class: Option<Class>, nice: Option<i8>) -> Result<(), Refusal> {
        if let Some(Class::Custom(s)) = class
            && !(1..=WHOLE).contains(&u64::from(s))
        {
            return Err(Refusal::Invalid("a share is more than 0 and at most 100 %".into()));
        }
        if nice.is_some_and(|n| !(-20..=19).contains(&n)) {
            return Err(Refusal::Invalid("a nice value is from -20 to 19".into()));
        }
        let p = self.known(pid)?;
        if peer.privileged {
            return Ok(());
        }
        if p.about.uid != peer.uid {
            return Err(Refusal::NotPermitted(format!("process {pid} is another user's")));
        }
        if let Some(class) = class.filter(|c| rank(*c) > rank(p.ceiling.0)) {
            return Err(Refusal::NotPermitted(format!(
                "{class} is higher than {}, which is as far as this user may set process {pid}",
                p.ceiling.0
            )));
        }
        if let Some(nice) = nice.filter(|n| *n < p.ceiling.1) {
            return Err(Refusal::NotPermitted(format!(
                "nice {nice} is lower than {}, which is as far as this user may set process {pid}",
                p.ceiling.1
            )));
        }
        Ok(())
    }

    fn set(&mut self, peer: Peer, pid: u32, class: Option<Class>, nice: Option<i8>) -> Result<Reply, Refusal> {
        self.may_set(peer, pid, class, nice)?;
        let p = self.known(pid)?;
        if let (Some(Class::Suspended), Some((group, Role::Program))) = (class, &p.group) {
            return Err(Refusal::Invalid(format!(
                "process {pid} shares its GPU under MPS; all of co-run group {group:?} can be suspended, by its server"
            )));
        }
        let (new_class, new_nice) = (class.unwrap_or(p.class), nice.unwrap_or(p.nice));
        let old = (p.class, p.nice);
        // One that waits for its share on a GPU may be told other things meanwhile.
        let on = |g: &Gpu| if class.is_none() && g.lowered.contains(&pid) { Class::Normal } else { new_class };
        let member = Member { id: pid.into(), class: policy(new_class), nice: new_nice.into(), active: true };
        // First all devices are asked, then all are changed; in between nothing can have come.
        for d in &self.devices {
            let members: Vec<Member> = d.bank.views().map(|v| v.member).collect();
            if members.iter().any(|m| m.id == u64::from(pid)) {
                share::admit(&members, &member).map_err(|e| refusal(&d.about.name, e))?;
            }
        }
        for g in &self.gpus {
            if g.agent.shares().contains_key(&pid) {
                g.agent.admit(pid, policy(on(g)), new_nice.into()).map_err(|e| refusal(&g.about.name, e))?;
            }
        }
        for g in &mut self.gpus {
            if g.agent.shares().contains_key(&pid)
                && let Err(Refused::Policy(e)) = g.agent.adopt(pid, policy(on(g)), new_nice.into())
            {
                return Err(refusal(&g.about.name, e));
            }
            if class.is_some() {
                g.lowered.remove(&pid);
            }
        }
        for d in &mut self.devices {
            if d.bank.allowance(pid.into()).is_some() {
                d.bank.set(member, 0).map_err(|e| refusal(&d.about.name, e))?;
            }
        }
        if let Some(p) = self.processes.get_mut(&pid) {
            (p.class, p.nice) = (new_class, new_nice);
            if new_class != Class::Suspended {
                p.before = new_class;
            }
            if peer.privileged {
                // What somebody in charge says of another's process is as far as its user may go from then on.
                let theirs = peer.uid != p.about.uid && class.is_some();
                let class = if theirs || rank(new_class) > rank(p.ceiling.0) { new_class } else { p.ceiling.0 };
                p.ceiling = (class, p.ceiling.1.min(new_nice));
            }
        }
        if old != (new_class, new_nice) {
            (self.dirty, self.promised) = (true, true);
        }
        for s in self.sessions.values().filter(|s| s.peer.pid == pid) {
            for words in &s.client.accounts {
                words.precedence.store((new_class == Class::Interactive).into(), Ordering::Relaxed);
            }
        }
        self.write_allowances();
        self.write_holds();
        self.refreshed_ns = 0;
        Ok(Reply::Done)
    }

    /// What a process had before it was suspended it may always have again, if it is still free.
    fn resume(&mut self, peer: Peer, pid: u32) -> Result<Reply, Refusal> {
        let p = self.known(pid)?;
        if !peer.privileged && p.about.uid != peer.uid {
            return Err(Refusal::NotPermitted(format!("process {pid} is another user's")));
        }
        if !peer.privileged && rank(p.before) > rank(p.ceiling.0) {
            return Err(Refusal::NotPermitted(format!("process {pid} was suspended by somebody in charge")));
        }
        match (p.class, p.before) {
            (Class::Suspended, before) => self.set(Peer { privileged: true, ..peer }, pid, Some(before), None),
            _ => Ok(Reply::Done),
        }
    }

    /// The figures for Prometheus.
    pub fn metrics(&self) -> String {
        let abouts = self.devices.iter().map(|d| &d.about).chain(self.gpus.iter().map(|g| &g.about));
        let devices: Vec<_> =
            abouts.map(|d| (d.clone(), self.global.device(d.index.into()).unwrap_or_default())).collect();
        let (mut processes, mut after) = (Vec::new(), 0);
        while let Reply::Processes { processes: some, more } = self.list(after) {
            after = some.last().map_or(after, |p| p.pid);
            let any = !some.is_empty();
            processes.extend(some);
            if !more || !any {
                break;
            }
        }
        metrics::text(self.now_ns.saturating_sub(self.began_ns) / 1_000_000, &devices, &processes)
    }

    fn list(&self, after: u32) -> Reply {
        let Some(from) = after.checked_add(1) else { return Reply::Processes { processes: Vec::new(), more: false } };
        let mut processes = Vec::new();
        for (&pid, p) in self.processes.range(from..) {
            // A process is listed once for each device; all of them fit in one reply or wait for the next.
            let views: Vec<_> = self
                .devices
                .iter()
                .filter_map(|d| Some((d, d.bank.views().find(|v| v.member.id == u64::from(pid))?)))
                .collect();
            let on_gpus: Vec<_> =
                self.gpus.iter().filter_map(|g| Some((g, g.agent.views().find(|(id, _)| *id == pid)?.1))).collect();
            if processes.len() + views.len() + on_gpus.len() > MAX_LISTED {
                return Reply::Processes { processes, more: true };
            }
            processes.extend(views.into_iter().map(|(d, v)| wire::Process {
                pid,
                uid: p.about.uid,
                name: p.about.name.clone(),
                device: d.about.name.clone(),
                class: p.class,
                nice: p.nice,
                active: v.member.active,
                waiting: v.balance_ns <= 0,
                share: v.share,
                used: v.used,
                spent_ns: v.spent_ns,
                source: if d.metered { Source::Kernel } else { Source::Program },
                switches: None,
                off_ns: None,
                level: d.about.level,
                memory_limit: None,
            }));
            processes.extend(on_gpus.into_iter().map(|(g, v)| wire::Process {
                pid,
                uid: p.about.uid,
                name: p.about.name.clone(),
                device: g.about.name.clone(),
                class: p.class,
                nice: p.nice,
                active: v.member.active,
                waiting: v.off,
                share: v.share,
                used: v.used,
                spent_ns: v.spent_ns,
                source: if v.sampled { Source::Nvml } else { g.source },
                switches: v.switches,
                off_ns: Some(v.off_ns),
                level: g.about.level,
                memory_limit: p.limits.memory.filter(|_| g.has_memory),
            }));
        }
        Reply::Processes { processes, more: false }
    }

    /// A program has rung its doorbell: its work begins or ends.
    pub fn doorbell(&mut self, id: SessionId) {
        let pid = self.sessions.get(&id).map(|s| s.peer.pid);
        let p = pid.and_then(|pid| self.processes.get_mut(&pid));
        // Nobody asked others to ring.
        if let Some(p) = p.filter(|p| p.class == Class::Interactive) {
            p.stuck = 0;
            self.write_holds();
        }
    }

    /// The classes that were set, for a restart.
    pub fn save(&self) -> Vec<Saved> {
        let of = |(&pid, p): (&u32, &Process)| Saved {
            pid,
            began: p.about.began,
            class: p.class,
            before: p.before,
            nice: p.nice,
            ceiling: p.ceiling,
            memory: [p.limits.memory, p.limits.most],
            group: p.group.as_ref().map(|(name, role)| (name.clone(), *role as u8)),
            folder: self.groups.values().find(|g| g.daemon == pid).map(|g| g.folder.clone()),
            clients: self.clients_of(pid),
        };
        self.processes.iter().map(of).collect()
    }

    /// A process's clients of all GPUs' drivers, those that it had before included.
    fn clients_of(&self, pid: u32) -> Vec<u32> {
        let now = self.gpus.iter().flat_map(|g| g.agent.clients_of(pid));
        let all: BTreeSet<u32> = now.chain(self.found.get(&pid).into_iter().flatten().copied()).collect();
        // The newest have the highest numbers.
        all.into_iter().rev().take(MAX_CLIENTS).collect()
    }

    /// Takes over what an earlier service saved, of processes that are still the same.
    pub fn restore(&mut self, saved: Vec<Saved>) {
        for s in saved.into_iter().take(MAX_PROCESSES) {
            if let Some(mut about) = self.world.describe(s.pid).filter(|d| d.began == s.began) {
                self.world.watch(s.pid);
                let roles = [Role::Daemon, Role::Server, Role::Program];
                let group = s.group.and_then(|(name, r)| Some((name, *roles.get(usize::from(r))?)));
                if let Some((name, role)) = &group {
                    about.name = name_in(name, *role).unwrap_or(about.name);
                    self.restore_group(s.pid, (about.uid, name.clone()), *role, s.folder.unwrap_or_default());
                }
                if !s.clients.is_empty() {
                    self.found.insert(s.pid, s.clients.into_iter().take(MAX_CLIENTS).collect());
                }
                let (class, before, nice, ceiling) = (s.class, s.before, s.nice, s.ceiling);
                let [memory, most] = s.memory;
                let limits = Limits { memory, most };
                let late_ns = [0; MAX_DEVICES];
                let p = Process { about, class, before, nice, ceiling, limits, stuck: 0, late_ns, group };
                self.processes.insert(s.pid, p);
            }
        }
    }
}

fn refusal(device: &str, d: Denied) -> Refusal {
    match d {
        Denied::Overbooked { wanted, free } => Refusal::Overbooked { device: device.to_owned(), wanted, free },
        Denied::TooMany => Refusal::Limit { what: format!("programs on {device}"), limit: share::MAX_MEMBERS as u64 },
    }
}

impl From<Result<Reply, Refusal>> for Answer {
    fn from(r: Result<Reply, Refusal>) -> Self {
        Answer::Reply(r.unwrap_or_else(Reply::Refused))
    }
}
