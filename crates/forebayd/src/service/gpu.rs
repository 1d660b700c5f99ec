//! The GPUs whose time the service divides itself.
//!
//! A GPU that falls off:
//! 1. Whether it is there is asked at every look for processes, and known from whatever failed for that reason in between
//!    ([`Agent::lost`]); that is said once.
//! 2. From then on nobody there is steered, and nothing is asked of it: its processes are let go of, which the driver
//!    answers as it likes, and what was opened for it is closed, so that it can be reset or taken out.
//! 3. It stays on the list of devices, without a load. Other GPUs, and what a process has on these, go on as before.
//! 4. It is divided again by a service that starts when it is back.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_policy::share::{Refusal as Denied, WHOLE};
use forebay_proto::page::{DeviceLoad, MAX_DEVICES};
use forebay_proto::wire::{self, Class, Level, Source};
use forebay_rm::sys::RawHandle;

use super::{MAX_ANCESTORS, Service, World, policy, refusal};
use crate::agent::{Agent, Grip, Meter, PERIOD_NS, Reach, Refused};

/// Until somebody is there to divide a GPU among, it is looked at this often.
const GPU_LOOK_NS: u64 = 25_000_000;

/// Looks at somebody who is on a GPU and whose channels are not found, until that is said: a program that begins is found at
/// one of the first.
const UNFOUND_LOOKS: u32 = 20;

/// A GPU whose time the service divides itself.
pub(super) struct Gpu {
    pub(super) about: wire::Device,
    pub(super) agent: Agent<Box<dyn Meter>>,
    pub(super) source: Source,
    /// Beginning of the window, and when it is over.
    window: (u64, u64),
    /// When its meter is to be let hear what is said only once; never where that is not so.
    glance_ns: u64,
    /// Processes that were not adopted, so that each is tried and spoken of once.
    pub(super) refused: BTreeSet<u32>,
    /// Processes whose absolute share there was no room for when they came: normal ones until there is.
    pub(super) lowered: BTreeSet<u32>,
    /// Processes whose channels were not found: how often its log had seen their number, and at how many looks in between they had
    /// come onto it.
    unfound: BTreeMap<u32, (u64, u32)>,
    /// Processes that are known here and were not on the list at the last look.
    absent: BTreeSet<u32>,
    /// Whether somebody says who has how much of its memory.
    pub(super) has_memory: bool,
    /// Processes that had more than their limit of it, at so many looks in a row.
    pub(super) over: BTreeMap<u32, u32>,
    /// It has fallen off.
    lost: bool,
}

/// The way to a GPU that is not there.
struct Nowhere;

impl Reach for Nowhere {
    fn find(&self, _: u32, _: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
        Err(Refused::Lock("the GPU is not there any more".into()))
    }
}

impl Meter for Nowhere {
    fn used_ns(&mut self, _: u32) -> Option<u64> {
        None
    }
}

impl Gpu {
    /// Lets go of those who live and have the driver open no more, as one whose memory was moved off. At the second look: a
    /// list may miss one.
    fn let_go(&mut self, listed: &[u32]) {
        let absent: BTreeSet<u32> = self.agent.shares().into_keys().filter(|p| !listed.contains(p)).collect();
        for &pid in absent.intersection(&self.absent) {
            self.agent.forget(pid);
        }
        self.absent = absent;
    }

    /// Lets go of everybody, and of the GPU itself.
    fn lose(&mut self) {
        self.agent = Agent::by(Box::new(Nowhere), Box::new(Nowhere) as Box<dyn Meter>, PERIOD_NS);
        (self.lost, self.has_memory) = (true, false);
        self.refused.clear();
        self.lowered.clear();
        self.unfound.clear();
        self.over.clear();
    }
}

impl<W: World> Service<W> {
    /// Adds a GPU that is divided by these means; `has_memory` when [`Service::memory`] will be told of it. Its number, or none when there are too many devices.
    pub fn add_gpu(
        &mut self,
        name: &str,
        agent: Agent<Box<dyn Meter>>,
        (level, source): (Level, Source),
        has_memory: bool,
    ) -> Option<usize> {
        let index = self.devices.len() + self.gpus.len();
        if index >= MAX_DEVICES {
            return None;
        }
        let about = wire::Device { name: wire::short_name(name), index: index as u8, units: 1, level };
        let (window, refused, lowered) = ((self.now_ns, self.now_ns), BTreeSet::new(), BTreeSet::new());
        let (unfound, over) = (BTreeMap::new(), BTreeMap::new());
        let (glance_ns, absent, lost) = (0, BTreeSet::new(), false);
        let g =
            Gpu { about, agent, source, window, glance_ns, refused, lowered, unfound, absent, has_memory, over, lost };
        self.gpus.push(g);
        Some(self.gpus.len() - 1)
    }

    /// These processes have the GPU's driver open. Those that are new are adopted, with the class that they have, and those
    /// that have not any more are let go of; what went wrong comes back, once for each.
    pub fn gpu_processes(&mut self, gpu: usize, pids: &[u32]) -> Vec<String> {
        let mut wrong = Vec::new();
        let Some(g) = self.gpus.get_mut(gpu).filter(|g| !g.lost) else { return wrong };
        if let Some(why) = g.agent.lost() {
            g.lose();
            let then = "nobody is steered there any more, until the service starts anew with the GPU back";
            return vec![format!("{} has fallen off, or is being reset: {why}; {then}", g.about.name)];
        }
        g.let_go(pids);
        let known = g.agent.shares();
        let spoken = |pid: &u32| g.unfound.contains_key(pid) || g.refused.contains(pid);
        let is_first = |pid: &u32| !known.contains_key(pid) && !spoken(pid);
        let first: Vec<u32> = pids.iter().copied().filter(is_first).collect();
        self.look_into_makers(gpu, first);
        let Some(g) = self.gpus.get_mut(gpu) else { return wrong };
        let known = g.agent.shares();
        wrong.extend(self.raise(gpu));
        let Some(g) = self.gpus.get_mut(gpu) else { return wrong };
        g.unfound.retain(|pid, _| pids.contains(pid) && !known.contains_key(pid));
        for pid in self.oldest_first(pids.iter().copied().filter(|p| !known.contains_key(p))) {
            let (class, nice) = match self.known(pid) {
                Ok(p) => (p.class, p.nice),
                Err(_) => continue,
            };
            let elsewhere = self.locked_on(gpu, pid).map(str::to_owned);
            let Some(g) = self.gpus.get_mut(gpu) else { break };
            if let Some(other) = elsewhere {
                if g.refused.insert(pid) {
                    let why = format!("the process lock stops it on all its GPUs, and does so by its turn on {other}");
                    wrong.push(format!("process {pid} is not steered on {}: {why}", g.about.name));
                }
                continue;
            }
            if let Some(clients) = self.found.get(&pid) {
                g.agent.remember(pid, clients);
            }
            // Steered by nobody it would be there in everybody's windows.
            let denied = g.agent.admit(pid, policy(class), nice.into()).err();
            let no_room = denied.filter(|e| matches!(e, Denied::Overbooked { .. }));
            let class = if no_room.is_some() { Class::Normal } else { class };
            let why = match g.agent.adopt(pid, policy(class), nice.into()) {
                Ok(()) => {
                    g.refused.remove(&pid);
                    self.dirty = true;
                    if let Some(e) = no_room {
                        let (why, name) = (refusal(&g.about.name, e), &g.about.name);
                        wrong.push(format!("process {pid} is like a normal one on {name} until there is room: {why}"));
                        g.lowered.insert(pid);
                    }
                    continue;
                }
                Err(Refused::Driver(forebay_rm::Error::NoChannels { .. })) => {
                    // Who was seen before may have had the number before.
                    let now = g.agent.seen(pid);
                    let (seen, looks) = g.unfound.entry(pid).or_insert((now, 0));
                    if std::mem::replace(seen, now) == now {
                        // It has the driver open and does not use the GPU: the next look may find more.
                        continue;
                    }
                    *looks = looks.saturating_add(1);
                    if *looks < UNFOUND_LOOKS || g.agent.look_further(pid) {
                        continue;
                    }
                    "its channels are not found, though it is on the GPU: most likely it began long before this service; to have it \
                     steered, start it anew, or the service with a larger --search"
                        .into()
                }
                Err(Refused::Driver(e)) => e.to_string(),
                Err(Refused::Policy(e)) => refusal(&g.about.name, e).to_string(),
                Err(Refused::Lock(why)) => why,
                Err(Refused::Ledger) => "the guardian's ledger is full".into(),
            };
            if g.refused.insert(pid) {
                wrong.push(format!("process {pid} is not steered on {}: {why}", g.about.name));
            }
        }
        wrong
    }

    /// Whoever was forked has the files of the driver that those it comes from had opened, and through them all that these have
    /// on the GPU: before somebody is looked into for the first time, that is known, and of those who are new the older ones'
    /// comes first.
    fn look_into_makers(&mut self, gpu: usize, new: Vec<u32>) {
        let mut makers = BTreeSet::new();
        for pid in new {
            let mut above = self.world.describe(pid).map_or(0, |p| p.parent);
            for _ in 0..MAX_ANCESTORS {
                let Some(p) = (above > 1).then(|| self.world.describe(above)).flatten() else { break };
                if !makers.insert((p.began, above)) {
                    // It has brought its own makers along.
                    break;
                }
                above = p.parent;
            }
        }
        if let Some(g) = self.gpus.get_mut(gpu) {
            makers.into_iter().for_each(|(_, pid)| g.agent.look_soon(pid));
        }
    }

    fn oldest_first(&mut self, pids: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut all: Vec<(u64, u32)> =
            pids.filter_map(|pid| self.known(pid).ok().map(|p| (p.about.began, pid))).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, pid)| pid).collect()
    }

    /// Whether a GPU has fallen off; what was opened for it elsewhere should be closed then.
    pub fn is_lost(&self, gpu: usize) -> bool {
        self.gpus.get(gpu).is_some_and(|g| g.lost)
    }

    /// Whoever has not had its absolute share on a GPU for want of room has it, if there is some now; that is said.
    fn raise(&mut self, gpu: usize) -> Vec<String> {
        let Some(g) = self.gpus.get_mut(gpu) else { return Vec::new() };
        let mut said = Vec::new();
        for pid in g.lowered.clone() {
            let Some(p) = self.processes.get(&pid).filter(|_| g.agent.shares().contains_key(&pid)) else {
                g.lowered.remove(&pid);
                continue;
            };
            if g.agent.adopt(pid, policy(p.class), p.nice.into()).is_ok() {
                g.lowered.remove(&pid);
                said.push(format!("process {pid} has the share that it is to have on {}", g.about.name));
            }
        }
        said
    }

    /// Another GPU, if the process is taken off it by the lock, which `gpu` is divided by, too: it can be locked for one
    /// reason at a time.
    fn locked_on(&self, gpu: usize, pid: u32) -> Option<&str> {
        let by_lock = |g: &Gpu| g.about.level == Level::Lock;
        self.gpus.get(gpu).filter(|g| by_lock(g))?;
        let others = self.gpus.iter().enumerate().filter(|(i, g)| *i != gpu && by_lock(g));
        others.map(|(_, g)| g).find(|g| g.agent.shares().contains_key(&pid)).map(|g| g.about.name.as_str())
    }

    /// What has gone wrong or right on the GPUs, each thing once.
    pub fn trouble(&mut self) -> Vec<String> {
        let of = |g: &mut Gpu| g.agent.trouble().map(|t| format!("{}: {t}", g.about.name));
        self.gpus.iter_mut().filter_map(of).collect()
    }

    /// Ends windows that are over and begins the next; when to call again.
    pub fn turn(&mut self, now_ns: u64) -> Option<u64> {
        let there = || |g: &&mut Gpu| !g.lost;
        for g in self.gpus.iter_mut().filter(there()).filter(|g| g.window.1 <= now_ns || g.agent.is_to_be_ended()) {
            g.agent.end(now_ns.saturating_sub(g.window.0));
            let length = g.agent.begin().map_or(GPU_LOOK_NS, |w| w.length_ns);
            g.window = (now_ns, now_ns.saturating_add(length));
            if g.glance_ns == u64::MAX {
                g.glance_ns = now_ns;
            }
        }
        for g in self.gpus.iter_mut().filter(there()).filter(|g| g.glance_ns <= now_ns) {
            g.glance_ns = g.agent.glance().map_or(u64::MAX, |every| now_ns.saturating_add(every));
        }
        self.gpus.iter().filter(|g| !g.lost).map(|g| g.window.1.min(g.glance_ns)).min()
    }

    pub(super) fn refresh_gpus(&mut self) {
        for g in &self.gpus {
            if g.lost {
                self.global.set(g.about.index.into(), &DeviceLoad::default());
                continue;
            }
            let mut load = DeviceLoad { at_ns: self.now_ns.max(1), units: 1, ..DeviceLoad::default() };
            for (pid, v) in g.agent.views() {
                load.utilisation += v.used;
                load.active += u64::from(v.member.active);
                load.waiting += u64::from(v.off);
                if let Some(p) = self.processes.get(&pid) {
                    load.classes[p.class.index()] += 1;
                }
            }
            load.utilisation = load.utilisation.min(WHOLE);
            self.global.set(g.about.index.into(), &load);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_policy::credit::Order;
    use forebay_proto::page::AccountWords;
    use forebay_rm::Client;
    use forebay_rm::fake::{FakeRm, Load};

    use super::super::Described;
    use super::*;
    use crate::accounts::LogMeter;
    use crate::agent::{Hardware, PERIOD_NS};

    /// Processes of user 7.
    struct Few;

    impl World for Few {
        fn describe(&mut self, pid: u32) -> Option<Described> {
            // Numbers go round: 41 is of 40's, and 4 of 40's, too; 5 is of 4's.
            let (began, parent) = match pid {
                4 | 41 => (100, 40),
                5 => (101, 4),
                _ => (u64::from(pid), 1),
            };
            Some(Described { uid: 7, name: "p".into(), began, parent, nice: 0 })
        }
        fn cpu_time_ns(&mut self, _: u32) -> Option<u64> {
            Some(0)
        }
        fn wake(&mut self, _: &AccountWords) {}
        fn watch(&mut self, _: u32) {}
        fn end(&mut self, _: u32, _: u64) -> Result<(), String> {
            Err("nobody is ended here".into())
        }
    }

    /// What is said of three processes, of which one is older than 300 others and one has the driver open only, by a
    /// service that begins after them and looks for so many clients further down, in two long whiles; and who is steered.
    fn said_of_an_old_one(further: u32) -> ([Vec<String>; 2], Vec<u32>) {
        let rm = FakeRm::default();
        rm.start(10, 1, 2, Load::saturating(1000));
        // So many programs have come and gone since.
        (0..300).for_each(|_| drop(Client::open(Arc::new(rm.clone()), 0).unwrap()));
        rm.start(20, 1, 2, Load::saturating(1000));
        rm.start(30, 0, 0, Load::IDLE);
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        let meter: Box<dyn Meter> = Box::new(LogMeter::open(own.clone()).unwrap());
        let agent = Agent::by(Box::new(Hardware::new(own, None).searching(further)), meter, PERIOD_NS);
        let mut s = Service::new(Few, 1, Order::Share, 0).unwrap();
        s.add_gpu("gpu0", agent, (Level::Hardware, Source::Switches), false).unwrap();
        let mut now_ns = 0;
        let mut look = || {
            let look = |_| {
                rm.run(50_000);
                now_ns += 50_000_000;
                s.turn(now_ns);
                s.gpu_processes(0, &[10, 20, 30])
            };
            (0..4 * UNFOUND_LOOKS).flat_map(look).collect()
        };
        let said = [look(), look()];
        (said, s.gpus[0].agent.shares().into_keys().collect())
    }

    #[test]
    fn whoever_is_on_a_gpu_and_too_old_to_be_found_is_told_of_once() {
        for further in [0, 100] {
            let ([first, then], steered) = said_of_an_old_one(further);
            let begin = "process 10 is not steered on gpu0: its channels are not found";
            assert!(first.len() == 1 && first[0].starts_with(begin) && then.is_empty(), "{first:?} {then:?}");
            assert_eq!(steered, [20]);
        }
    }

    #[test]
    fn whoever_is_older_is_found_by_a_search_that_goes_further() {
        assert_eq!(said_of_an_old_one(1000), ([vec![], vec![]], vec![10, 20]));
    }

    #[test]
    fn whose_share_there_is_no_room_for_is_like_a_normal_one_until_there_is() {
        let rm = FakeRm::default();
        [10, 20, 30].into_iter().for_each(|pid| rm.start(pid, 1, 2, Load::saturating(1000)));
        rm.start(40, 0, 0, Load::IDLE);
        let mut s = service_of(&rm, &[0]);
        // Before they are seen on the GPU, as `forebay run --share` does.
        let root = crate::service::Peer { pid: 1, uid: 0, privileged: true };
        for pid in [10, 20, 40] {
            s.set(root, pid, Some(Class::Custom(600_000)), None).unwrap();
        }
        let shares = |s: &Service<Few>| s.gpus[0].agent.shares();
        let said = s.gpu_processes(0, &[10, 20, 30, 40]);
        // The last one is not on it.
        assert!(said.len() == 1 && said[0].starts_with("process 20 is like a normal one on gpu0"), "{said:?}");
        assert_eq!(shares(&s), BTreeMap::from([(10, 600_000), (20, 200_000), (30, 200_000)]));
        assert_eq!(
            (s.gpu_processes(0, &[10, 20, 30, 40]).len(), s.known(20).unwrap().class),
            (0, Class::Custom(600_000))
        );
        // Its nice value can be set meanwhile, and its class: then nothing is kept for it.
        s.set(root, 20, None, Some(1)).unwrap();
        assert!(s.set(root, 20, Some(Class::Custom(500_000)), None).is_err());
        s.exited(10);
        rm.kill(10);
        let said = s.gpu_processes(0, &[20, 30, 40]);
        assert!(said.len() == 1 && said[0].starts_with("process 20 has the share"), "{said:?}");
        assert_eq!(shares(&s), BTreeMap::from([(20, 600_000), (30, 400_000)]));
        assert!(s.gpu_processes(0, &[20, 30, 40]).is_empty());
    }

    /// A service of these GPUs.
    fn service_of(rm: &FakeRm, gpus: &[u32]) -> Service<Few> {
        let mut s = Service::new(Few, 1, Order::Share, 0).unwrap();
        for gpu in gpus {
            let own = Arc::new(Client::open(Arc::new(rm.clone()), *gpu).unwrap());
            let meter: Box<dyn Meter> = Box::new(LogMeter::open(own.clone()).unwrap());
            let agent = Agent::by(Box::new(Hardware::new(own, None)), meter, PERIOD_NS);
            s.add_gpu(&format!("gpu{gpu}"), agent, (Level::Hardware, Source::Switches), false).unwrap();
        }
        s
    }

    #[test]
    fn where_a_gpu_is_divided_no_device_is_brought() {
        use forebay_proto::wire::{Refusal, Reply, Request};

        use super::super::{Answer, Peer};
        let bring = |gpus: &[u32]| {
            let mut s = service_of(&FakeRm::default(), gpus);
            s.connect(1, Peer { pid: 10, uid: 7, privileged: true }).unwrap();
            s.message(1, &wire::encode(&Request::Hello { version: wire::VERSION, name: "p".into() }));
            match s.message(1, &wire::encode(&Request::Bring { device: "the same GPU".into() })) {
                Answer::Reply(reply) => reply,
                Answer::Welcome(_) | Answer::Close(_) => panic!("no answer"),
            }
        };
        assert!(matches!(bring(&[0]), Reply::Refused(Refusal::NoDevice(_))));
        assert!(matches!(bring(&[]), Reply::Joined { .. }));
    }

    #[test]
    fn who_has_the_number_of_one_that_was_on_the_gpu_is_not_taken_for_it() {
        let rm = FakeRm::default();
        [10, 20].into_iter().for_each(|pid| rm.start(pid, 1, 2, Load::saturating(1000)));
        let mut s = service_of(&rm, &[0]);
        let mut now_ns = 0;
        let mut look = |s: &mut Service<Few>| {
            rm.run(50_000);
            now_ns += 50_000_000;
            s.turn(now_ns);
            s.gpu_processes(0, &[10, 20])
        };
        (0..10).for_each(|_| assert_eq!(look(&mut s), Vec::<String>::new()));
        // It ends while it is on the GPU: the log tells of that later.
        s.exited(10);
        rm.kill(10);
        rm.start(10, 0, 0, Load::IDLE);
        for _ in 0..4 * UNFOUND_LOOKS {
            assert_eq!(look(&mut s), Vec::<String>::new());
        }
        assert!(s.gpus[0].agent.seen(10) > 0, "the number has been on it");
        assert_eq!(s.gpus[0].agent.shares().into_keys().collect::<Vec<_>>(), [20]);
    }

    #[test]
    fn programs_without_channels_or_on_a_gpu_that_fell_off_are_found_by_the_next_service() {
        let rm = FakeRm::with_gpus(2);
        [10, 20].into_iter().for_each(|pid| rm.start(pid, 0, 0, Load::IDLE));
        rm.use_gpu(1, 10, 1, 2, Load::saturating(1000));
        let mut s = service_of(&rm, &[0, 1]);
        assert!((0..2).all(|gpu| s.gpu_processes(gpu, &[10, 20]).is_empty()));
        rm.lose_gpu(1);
        let said = s.gpu_processes(1, &[10, 20]);
        assert!(said.len() == 1 && s.is_lost(1) && s.gpu_processes(1, &[10, 20]).is_empty(), "{said:?}");
        let saved = s.save();
        drop(s);
        (0..300).for_each(|_| drop(Client::open(Arc::new(rm.clone()), 0).unwrap()));
        let mut s = service_of(&rm, &[0]);
        s.restore(saved);
        [10, 20].into_iter().for_each(|pid| rm.use_gpu(0, pid, 1, 2, Load::saturating(1000)));
        s.gpu_processes(0, &[10, 20]);
        assert_eq!(s.gpus[0].agent.shares().into_keys().collect::<Vec<_>>(), [10, 20]);
    }

    /// As the workers that load data for PyTorch: they have the files of whoever made them, and nothing of their own there.
    #[test]
    fn whoever_was_forked_is_not_taken_for_whoever_made_it() {
        for late in [false, true] {
            let rm = FakeRm::default();
            rm.be_silent_of_files();
            let mut s = service_of(&rm, &[0]);
            rm.start(20, 1, 2, Load::saturating(1000));
            rm.start(40, 0, 0, Load::IDLE);
            if late {
                // It has had the driver open for long, so that it is not looked into at each look.
                (0..101).for_each(|_| drop(s.gpu_processes(0, &[20, 40])));
            }
            rm.use_gpu(0, 40, 1, 2, Load::saturating(1000));
            [4, 41].into_iter().for_each(|pid| rm.fork(40, pid));
            for _ in 0..3 {
                assert!(s.gpu_processes(0, &[4, 41, 20, 40]).is_empty());
                assert_eq!(s.gpus[0].agent.shares().into_keys().collect::<Vec<_>>(), [20, 40], "late: {late}");
            }
            // What they had the files of goes on when they end.
            for pid in [4, 41] {
                s.exited(pid);
                rm.kill(pid);
            }
            s.gpu_processes(0, &[20, 40]);
            assert_eq!(s.gpus[0].agent.shares().into_keys().collect::<Vec<_>>(), [20, 40]);
        }
    }

    /// 40 is back on the GPU and not looked at yet; of those that come from it only one that its worker has made has its files.
    #[test]
    fn whoever_was_forked_by_one_that_was_forked_is_not_taken_for_the_first() {
        let rm = FakeRm::default();
        rm.be_silent_of_files();
        let mut s = service_of(&rm, &[0]);
        rm.start(20, 1, 2, Load::saturating(1000));
        rm.start(40, 1, 2, Load::saturating(1000));
        s.gpu_processes(0, &[20, 40]);
        rm.leave(40);
        rm.start(40, 1, 2, Load::saturating(1000));
        rm.fork(40, 5);
        s.gpu_processes(0, &[5, 20, 40]);
        assert_eq!(s.gpus[0].agent.shares().into_keys().collect::<Vec<_>>(), [20, 40]);
    }

    /// As by `forebay checkpoint`, and `restore`.
    #[test]
    fn a_program_that_is_moved_off_keeps_its_class_and_nothing_is_kept_for_it_meanwhile() {
        let rm = FakeRm::default();
        [10, 20].into_iter().for_each(|pid| rm.start(pid, 1, 2, Load::saturating(1000)));
        let mut s = service_of(&rm, &[0]);
        let root = crate::service::Peer { pid: 1, uid: 0, privileged: true };
        s.set(root, 10, Some(Class::Custom(600_000)), None).unwrap();
        let shares = |s: &Service<Few>| s.gpus[0].agent.shares();
        assert!(s.gpu_processes(0, &[10, 20]).is_empty());
        let both = shares(&s);
        assert_eq!(both, BTreeMap::from([(10, 600_000), (20, 400_000)]));
        rm.leave(10);
        // A list may miss one.
        s.gpu_processes(0, &[20]);
        s.gpu_processes(0, &[10, 20]);
        s.gpu_processes(0, &[20]);
        assert_eq!(shares(&s), both);
        assert!(s.gpu_processes(0, &[20]).is_empty());
        assert_eq!(shares(&s), BTreeMap::from([(20, WHOLE)]));
        rm.start(10, 1, 2, Load::saturating(1000));
        assert!(s.gpu_processes(0, &[10, 20]).is_empty());
        assert_eq!(shares(&s), both);
    }

    /// One program on both of two GPUs, beside one on each: each GPU is divided for itself.
    #[test]
    fn a_program_on_two_gpus_has_its_share_of_each() {
        let rm = FakeRm::with_gpus(2);
        rm.start(10, 1, 2, Load::saturating(5000));
        rm.use_gpu(1, 10, 1, 2, Load::saturating(5000));
        rm.start(20, 1, 2, Load::saturating(5000));
        rm.start(30, 0, 0, Load::IDLE);
        rm.use_gpu(1, 30, 1, 2, Load::saturating(5000));
        let mut s = service_of(&rm, &[0, 1]);
        let mut now_ns = 0;
        let mut pass = |ms: u64| {
            let end = now_ns + ms * 1_000_000;
            while now_ns < end {
                rm.run(1000);
                now_ns += 1_000_000;
                s.turn(now_ns);
                if now_ns % 50_000_000 == 0 {
                    let wrong: Vec<String> = (0..2).flat_map(|gpu| s.gpu_processes(gpu, &[10, 20, 30])).collect();
                    assert!(wrong.is_empty(), "{wrong:?}");
                }
            }
        };
        let time = || [(0, 10), (0, 20), (1, 10), (1, 30)].map(|(gpu, pid)| rm.gpu_time_on(gpu, pid).unwrap() as f64);
        pass(1000);
        let before = time();
        pass(5000);
        let got: Vec<f64> = time().into_iter().zip(before).map(|(now, before)| (now - before) / 5e6).collect();
        assert!(got.iter().all(|share| (share - 0.5).abs() < 0.03), "{got:?}");
        let steered: Vec<Vec<u32>> = s.gpus.iter().map(|g| g.agent.shares().into_keys().collect()).collect();
        assert_eq!(steered, [vec![10, 20], vec![10, 30]]);
        // Both take whom they have off by turns, each on its own GPU.
        assert!(s.gpus.iter().all(|g| g.agent.views().all(|(_, v)| v.off_ns > 0)));
    }
}
