//! Limits of device memory, for programs that know nothing of them.
//!
//! Rules:
//! 1. A limit is of each process on each GPU that the service steers. What a process starts begins with the same one, for
//!    itself. A restart of the service keeps it.
//! 2. What a process has there NVML says. It is asked while anybody has a limit, whenever processes are looked for.
//! 3. NVML counts the driver's own memory in the process too: contexts, code, stacks. A program of the library keeps what it
//!    allocates within the limit itself, so one that is connected may have [`DRIVERS_OWN`] more before it is ended.
//! 4. Who has more than its limit at two looks in a row is ended (SIGKILL), as the kernel does with a control group's: memory
//!    can't be refused from outside, and taken back only whole. The log says who had how much.
//! 5. A process's user sets any limit for it, and takes it away; but none above what somebody in charge has said of another's.
//! 6. Where nothing could end anybody it is refused, and programs are held by their own library only.

use std::collections::{BTreeMap, BTreeSet};

use forebay_proto::wire::{Refusal, Reply};

use super::{Peer, Service, World};

/// What the driver takes for itself in a process, at most: some 600 MB on the largest GPUs.
const DRIVERS_OWN: u64 = 1 << 30;

/// Looks in a row at which one that has too much is ended; and once more after so many, should it be there still.
const LOOKS: u32 = 2;
const AGAIN: u32 = 64;

/// What bounds a process's device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// The limit, bytes.
    pub(super) memory: Option<u64>,
    /// The highest that its user may set.
    pub(super) most: Option<u64>,
}

impl<W: World> Service<W> {
    pub(super) fn limit(&mut self, peer: Peer, pid: u32, memory: Option<u64>) -> Result<Reply, Refusal> {
        if memory == Some(0) {
            return Err(Refusal::Invalid("a limit of memory is more than nothing".into()));
        }
        let seen = self.gpus.iter().any(|g| g.has_memory);
        let p = self.known(pid)?;
        if !peer.privileged && p.about.uid != peer.uid {
            return Err(Refusal::NotPermitted(format!("process {pid} is another user's")));
        }
        if let Some(most) = p.limits.most.filter(|most| !peer.privileged && memory.is_none_or(|m| m > *most)) {
            return Err(Refusal::NotPermitted(format!("{most} bytes is as far as this user may set process {pid}")));
        }
        if !seen && memory.is_some() {
            let why = "this service steers no GPU on which it sees who has how much memory";
            return Err(Refusal::Unenforceable(why.into()));
        }
        if peer.privileged && peer.uid != p.about.uid {
            p.limits.most = memory;
        }
        if p.limits.memory != memory {
            p.limits.memory = memory;
            (self.dirty, self.promised) = (true, true);
        }
        Ok(Reply::Done)
    }

    /// Whether anybody has a limit, so that somebody has to look.
    pub fn has_limits(&self) -> bool {
        self.processes.values().any(|p| p.limits.memory.is_some())
    }

    /// So much memory of a GPU has each process, bytes. Who was ended for it comes back, for the log.
    pub fn memory(&mut self, gpu: usize, has: &BTreeMap<u32, u64>) -> Vec<String> {
        let Some(g) = self.gpus.get_mut(gpu) else { return Vec::new() };
        let connected: BTreeSet<u32> = self.sessions.values().filter(|s| s.greeted).map(|s| s.peer.pid).collect();
        let over = |pid: &u32, bytes: &u64| {
            let limit = self.processes.get(pid)?.limits.memory?;
            let more = if connected.contains(pid) { DRIVERS_OWN } else { 0 };
            (*bytes > limit.saturating_add(more)).then_some((*pid, (*bytes, limit)))
        };
        let over: BTreeMap<u32, (u64, u64)> = has.iter().filter_map(|(pid, bytes)| over(pid, bytes)).collect();
        let looks = |pid: &u32| g.over.get(pid).map_or(1, |n| n.saturating_add(1));
        let in_a_row: BTreeMap<u32, u32> = over.keys().map(|pid| (*pid, looks(pid))).collect();
        let due = |pid: &u32| in_a_row.get(pid).is_some_and(|n| *n == LOOKS || n.is_multiple_of(AGAIN));
        let again: Vec<_> = over.iter().filter(|(pid, _)| due(pid)).collect();
        let mut ended = Vec::new();
        for (pid, (bytes, limit)) in again {
            let Some(p) = self.processes.get(pid) else { continue };
            let mib = |b: &u64| *b as f64 / 1048576.0;
            let had = format!("had {:.0} MiB of {}, its limit is {:.0} MiB", mib(bytes), g.about.name, mib(limit));
            ended.push(match self.world.end(*pid, p.about.began) {
                Ok(()) => format!("process {pid} ({}) was ended: it {had}", p.about.name),
                Err(why) => format!("process {pid} ({}) cannot be ended, though it {had}: {why}", p.about.name),
            });
        }
        g.over = in_a_row;
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use forebay_policy::credit::Order;
    use forebay_proto::page::AccountWords;
    use forebay_proto::wire::{self, Level, Request, Source};
    use forebay_rm::sys::RawHandle;

    use super::super::Described;
    use super::*;
    use crate::agent::{Agent, Grip, Meter, Reach, Refused};

    /// Processes of user 7, all children of process 1 or of 20.
    #[derive(Default)]
    struct Few(Vec<u32>);

    impl World for Few {
        fn describe(&mut self, pid: u32) -> Option<Described> {
            let parent = if pid == 21 { 20 } else { 1 };
            (pid > 1).then(|| Described { uid: 7, name: "p".into(), began: 1, parent, nice: 0 })
        }
        fn cpu_time_ns(&mut self, _: u32) -> Option<u64> {
            Some(0)
        }
        fn wake(&mut self, _: &AccountWords) {}
        fn watch(&mut self, _: u32) {}
        fn end(&mut self, pid: u32, began: u64) -> Result<(), String> {
            assert_eq!(began, 1);
            self.0.push(pid);
            Ok(())
        }
    }

    struct Nothing;

    impl Reach for Nothing {
        fn find(&self, _: u32, _: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
            Err(Refused::Lock("nobody is here".into()))
        }
    }

    impl Meter for Nothing {
        fn used_ns(&mut self, _: u32) -> Option<u64> {
            Some(0)
        }
    }

    const USER: Peer = Peer { pid: 2, uid: 7, privileged: false };
    const ROOT: Peer = Peer { pid: 3, uid: 0, privileged: true };

    fn service(has_memory: bool) -> Service<Few> {
        let mut s = Service::new(Few::default(), 1, Order::Share, 0).unwrap();
        let agent = Agent::by(Box::new(Nothing) as Box<dyn Reach>, Box::new(Nothing) as Box<dyn Meter>, 1);
        s.add_gpu("gpu0", agent, (Level::Hardware, Source::Nvml), has_memory).unwrap();
        s
    }

    fn looks(s: &mut Service<Few>, looks: &[&[(u32, u64)]]) -> Vec<u32> {
        for look in looks {
            s.memory(0, &look.iter().copied().collect());
        }
        std::mem::take(&mut s.world().0)
    }

    #[test]
    fn who_has_more_twice_in_a_row_is_ended_and_nobody_else() {
        let mut s = service(true);
        for pid in [20, 30, 40] {
            s.limit(USER, pid, Some(100)).unwrap();
        }
        s.known(21).unwrap();
        s.known(50).unwrap();
        assert_eq!(looks(&mut s, &[&[(20, 101), (30, 100), (40, 101), (50, 1000), (99, 1000)]]), [0; 0]);
        assert_eq!(looks(&mut s, &[&[(20, 101), (30, 100), (50, 1000), (99, 1000)]]), [20]);
        // Not in a row; and what one that has a limit started.
        assert_eq!(looks(&mut s, &[&[(40, 101)], &[], &[(40, 101), (21, 101)], &[(40, 100), (21, 200)]]), [21]);
        s.limit(USER, 40, None).unwrap();
        assert_eq!(looks(&mut s, &[&[(40, 101)], &[(40, 101)]]), [0; 0]);
        assert!(s.has_limits());
        [20, 21, 30].into_iter().for_each(|pid| s.exited(pid));
        assert!(!s.has_limits());
    }

    #[test]
    fn what_the_driver_has_in_a_program_of_the_library_is_not_its_own() {
        let mut s = service(true);
        let bytes = 100 + DRIVERS_OWN;
        for pid in [20, 30] {
            s.limit(USER, pid, Some(100)).unwrap();
            s.connect(pid.into(), Peer { pid, ..USER }).unwrap();
        }
        // One only opens a connection; the other one says hello.
        let hello = Request::Hello { version: wire::VERSION, name: "p".into() };
        assert!(matches!(s.message(30, &wire::encode(&hello)), super::super::Answer::Welcome(_)));
        assert_eq!(looks(&mut s, &[&[(20, bytes), (30, bytes)], &[(20, bytes), (30, bytes)]]), [20]);
        // One that does not end at once is not ended, and told of, at every look.
        assert_eq!(looks(&mut s, &[&[(30, bytes + 1)][..]; 63]), [30]);
        assert_eq!(looks(&mut s, &[&[(30, bytes + 1)]]), [30]);
    }

    #[test]
    fn nobody_sets_another_users_or_more_than_somebody_in_charge_said() {
        let mut s = service(true);
        let other = Peer { uid: 8, ..USER };
        let denied = |r| matches!(r, Err(Refusal::NotPermitted(_)));
        assert!(denied(s.limit(other, 20, Some(1))));
        assert!(matches!(s.limit(USER, 20, Some(0)), Err(Refusal::Invalid(_))));
        s.limit(USER, 20, Some(50)).unwrap();
        s.limit(USER, 20, Some(500)).unwrap();
        s.limit(ROOT, 20, Some(100)).unwrap();
        assert!(denied(s.limit(USER, 20, Some(101))) && denied(s.limit(USER, 20, None)));
        assert!(denied(s.limit(USER, 21, None)), "what it started is held as it is");
        s.limit(USER, 20, Some(90)).unwrap();
        // A restart changes nothing of it.
        let mut again = service(true);
        again.restore(s.save());
        assert!(denied(again.limit(USER, 20, Some(101))));
        assert_eq!(looks(&mut again, &[&[(20, 91)], &[(20, 91)]]), [20]);
        s.limit(ROOT, 20, None).unwrap();
        s.limit(USER, 20, Some(1 << 40)).unwrap();
        s.limit(USER, 20, None).unwrap();
        assert!(matches!(service(false).limit(USER, 20, Some(1)), Err(Refusal::Unenforceable(_))));
        service(false).limit(USER, 20, None).unwrap();
    }
}
