//! What the stories of credit, of accelerators and of machines have in common: the service's core, the processes of a machine, and how
//! they come to the service and are set by somebody in charge.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use forebay_policy::credit::Order;
use forebay_policy::share;
use forebay_proto::page::AccountWords;
use forebay_proto::wire::{self, Class, Level, Refusal, Reply, Request, Source};
use forebay_rm::Client;
use forebay_rm::fake::FakeRm;
use forebay_rm::sys::RawHandle;
use forebayd::accounts::LogMeter;
use forebayd::agent::{Agent, Grip, Hardware, Meter, PERIOD_NS, Reach, Refused};
use forebayd::service::{Answer, Described, Peer, Ready, Service, SessionId, World};

/// The user of the programs; the service's is another one.
pub(crate) const USER: u32 = 1000;

/// The operating system, as far as the service asks.
#[derive(Default)]
pub(crate) struct Os {
    /// What is there, and how much of the CPU each has had, ns.
    pub(crate) processes: BTreeMap<u32, (Described, u64)>,
    /// How long threads of each were ready and had no core.
    pub(crate) ready: BTreeMap<u32, Ready>,
    pub(crate) watched: BTreeSet<u32>,
    /// Whom the service has ended, with their beginnings.
    pub(crate) ended: Vec<(u32, u64)>,
}

impl World for Os {
    fn describe(&mut self, pid: u32) -> Option<Described> {
        self.processes.get(&pid).map(|p| p.0.clone())
    }

    fn cpu_time_ns(&mut self, pid: u32) -> Option<u64> {
        self.processes.get(&pid).map(|p| p.1)
    }

    fn ready(&mut self, pid: u32) -> Option<Ready> {
        self.ready.get(&pid).copied()
    }

    fn wake(&mut self, _: &AccountWords) {}

    fn watch(&mut self, pid: u32) {
        self.watched.insert(pid);
    }

    fn end(&mut self, pid: u32, began: u64) -> Result<(), String> {
        self.ended.push((pid, began));
        Ok(())
    }
}

/// A GPU that nobody has work on; it has memory.
struct Empty;

impl Reach for Empty {
    fn find(&self, _: u32, _: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
        Err(Refused::Lock("nobody is here".into()))
    }
}

impl Meter for Empty {
    fn used_ns(&mut self, _: u32) -> Option<u64> {
        Some(0)
    }
}

/// As the policy has it.
pub(crate) fn policy(class: Class) -> share::Class {
    match class {
        Class::Interactive => share::Class::Interactive,
        Class::Custom(s) => share::Class::Custom(s),
        Class::Normal => share::Class::Normal,
        Class::Background => share::Class::Background,
        Class::Suspended => share::Class::Suspended,
    }
}

/// The service, and who comes to it.
pub(crate) struct Office {
    pub(crate) service: Service<Os>,
    cores: u64,
    /// Accelerators whose use programs report, and how much each does at a time. With any there is a GPU, too, whose memory
    /// is seen.
    accelerators: &'static [(&'static str, u32)],
    /// The driver of GPUs that are divided.
    rm: Option<FakeRm>,
    /// Which GPU of the driver's each of the service's is.
    pub(crate) numbers: Vec<usize>,
    next_session: SessionId,
    births: u64,
    pub(crate) violations: Vec<String>,
}

fn service(os: Os, cores: u64, accelerators: &[(&str, u32)], now_ns: u64) -> Service<Os> {
    let mut s = match Service::new(os, cores as u32, Order::Share, now_ns) {
        Ok(s) => s,
        Err(e) => panic!("a page for the simulation: {e}"),
    };
    for (name, units) in accelerators {
        s.add_device(name, *units, Order::Share);
    }
    if !accelerators.is_empty() {
        let agent = Agent::by(Box::new(Empty), Box::new(Empty) as Box<dyn Meter>, 1);
        s.add_gpu("gpu0", agent, (Level::Hardware, Source::Nvml), true);
    }
    s
}

impl Office {
    pub(crate) fn new(cores: u64, accelerators: &'static [(&'static str, u32)]) -> Self {
        let service = service(Os::default(), cores, accelerators, 1);
        let (rm, numbers) = (None, Vec::new());
        Office { service, cores, accelerators, rm, numbers, next_session: 1, births: 1, violations: Vec::new() }
    }

    /// One that divides all GPUs of this driver's.
    pub(crate) fn with_gpus(cores: u64, rm: FakeRm) -> Self {
        let mut office = Office { rm: Some(rm), ..Self::new(cores, &[]) };
        office.open_gpus();
        office
    }

    /// As the daemon does: those that have fallen off are left out.
    fn open_gpus(&mut self) {
        let Some(rm) = &self.rm else { return };
        self.numbers.clear();
        for gpu in 0..rm.gpus() {
            let Ok(own) = Client::open(Arc::new(rm.clone()), gpu as u32).map(Arc::new) else { continue };
            let Ok(log) = LogMeter::open(own.clone()) else { continue };
            let meter: Box<dyn Meter> = Box::new(log);
            let agent = Agent::by(Box::new(Hardware::new(own, None)), meter, PERIOD_NS);
            let level = (Level::Hardware, Source::Switches);
            self.numbers.extend(self.service.add_gpu(&format!("gpu{gpu}"), agent, level, false).map(|_| gpu));
        }
    }

    /// The service goes; what was found wrong.
    pub(crate) fn end(self) -> Vec<String> {
        drop(self.service);
        self.violations
    }

    /// Killed; the next one has what was saved, and no connections.
    pub(crate) fn restart(&mut self, now_ns: u64) {
        let saved = self.service.save();
        let os = std::mem::take(self.service.world());
        // What it had taken its guardian gives back.
        self.service = service(os, self.cores, self.accelerators, now_ns);
        self.service.restore(saved);
        self.open_gpus();
    }

    pub(crate) fn wrong(&mut self, what: String) {
        self.violations.push(what);
    }

    pub(crate) fn ask(&mut self, session: SessionId, r: &Request) -> Answer {
        self.service.message(session, &wire::encode(r))
    }

    /// A process comes into being; when.
    pub(crate) fn birth(&mut self, pid: u32, parent: u32) -> u64 {
        self.births += 1;
        let began = self.births;
        let about = Described { uid: USER, name: format!("p{pid}"), began, parent, nice: 0 };
        self.service.world().processes.insert(pid, (about, 0));
        began
    }

    pub(crate) fn connect(&mut self, pid: u32) -> SessionId {
        let id = self.next_session;
        self.next_session += 1;
        if let Err(e) = self.service.connect(id, Peer { pid, uid: USER, privileged: false }) {
            self.wrong(format!("{pid} could not connect: {e}"));
        }
        id
    }

    /// Connects and joins a device.
    pub(crate) fn register(&mut self, pid: u32, device: &str, is_metered: bool) -> SessionId {
        let id = self.connect(pid);
        let hello = Request::Hello { version: wire::VERSION, name: String::new() };
        if !matches!(self.ask(id, &hello), Answer::Welcome(_)) {
            self.wrong(format!("{pid} was not welcomed"));
        }
        match self.ask(id, &Request::Join { device: device.into() }) {
            Answer::Reply(Reply::Joined { account: 0, metered }) if metered == is_metered => {}
            other => self.wrong(format!("{pid} could not join: {other:?}")),
        }
        id
    }

    /// Somebody in charge asks for something.
    pub(crate) fn ask_as_root(&mut self, r: &Request) -> Answer {
        let root = self.next_session;
        self.next_session += 1;
        let init = || (Described { uid: 0, name: "init".into(), began: 0, parent: 0, nice: 0 }, 0);
        self.service.world().processes.entry(1).or_insert_with(init);
        let _ = self.service.connect(root, Peer { pid: 1, uid: 0, privileged: true });
        let _ = self.ask(root, &Request::Hello { version: wire::VERSION, name: "root".into() });
        let answer = self.ask(root, r);
        self.service.disconnect(root);
        answer
    }

    /// Sets a class, as root does; whether there was room for it.
    pub(crate) fn set(&mut self, pid: u32, class: Class) -> bool {
        match self.ask_as_root(&Request::Set { pid, class: Some(class), nice: None }) {
            Answer::Reply(Reply::Done) => true,
            Answer::Reply(Reply::Refused(Refusal::Overbooked { .. })) => false,
            other => {
                self.wrong(format!("the class of {pid} was not set: {other:?}"));
                false
            }
        }
    }

    /// The service knows exactly these programs, and their classes.
    pub(crate) fn judge_known(&mut self, programs: impl Iterator<Item = (u32, Class)>) {
        let known: BTreeMap<u32, Class> = self.service.save().into_iter().map(|s| (s.pid, s.class)).collect();
        for (pid, class) in programs {
            if known.get(&pid) != Some(&class) {
                self.violations.push(format!("{pid} is {class:?} and known as {:?}", known.get(&pid)));
            }
        }
    }
}
