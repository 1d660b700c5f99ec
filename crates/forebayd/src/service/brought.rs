//! Devices that programs bring: nobody has named them, so nobody need.
//!
//! Rules:
//! 1. Who asks to bring a device has an account on it: if the service does not know the name, it knows it from then on, as that of a
//!    device which does one thing at a time. All programs of a device have one name for it. They say what they used of it, as
//!    of those that were named when the service started.
//! 2. Not where the service divides GPUs: a program's device may be one of them, under another name.
//! 3. There are [`MAX_BROUGHT`] at most, of which a user has brought [`MAX_BROUGHT_BY_USER`]; one that nobody uses any more gives its
//!    place to the next.

use forebay_policy::credit::Bank;
use forebay_proto::page::MAX_DEVICES;
use forebay_proto::wire::{self, Refusal, Reply};

use super::session::{Peer, SessionId};
use super::{Service, World};

/// Most devices that programs have brought.
pub const MAX_BROUGHT: usize = 8;
/// Most of them that one user has brought, unless it is one that may set anything.
pub const MAX_BROUGHT_BY_USER: usize = 4;

impl<W: World> Service<W> {
    pub(super) fn bring(&mut self, id: SessionId, peer: Peer, name: &str) -> Result<Reply, Refusal> {
        let name = wire::short_name(name);
        let known = self.devices.iter().any(|d| d.about.name == name);
        if !known {
            self.add_brought(peer, &name)?;
        }
        self.join(id, peer.pid, &name)
    }

    fn add_brought(&mut self, peer: Peer, name: &str) -> Result<(), Refusal> {
        if !self.gpus.is_empty() || name.trim().is_empty() {
            return Err(Refusal::NoDevice(name.into()));
        }
        let full = |limit: usize| Refusal::Limit { what: "devices that programs bring".into(), limit: limit as u64 };
        let brought: Vec<(usize, u32)> =
            self.devices.iter().enumerate().filter_map(|(at, d)| Some((at, d.by?))).collect();
        let has_room = brought.len() < MAX_BROUGHT && self.devices.len() < MAX_DEVICES;
        let own = brought.iter().find(|(at, by)| *by == peer.uid && self.is_idle(*at));
        let any = || brought.iter().find(|(at, _)| !has_room && self.is_idle(*at));
        let of_user = brought.iter().filter(|(_, by)| *by == peer.uid).count();
        if own.is_none() && !peer.privileged && of_user >= MAX_BROUGHT_BY_USER {
            return Err(full(MAX_BROUGHT_BY_USER));
        }
        let at = match own.or_else(any) {
            Some(&(at, _)) => {
                self.renew(at, name);
                at
            }
            None if has_room => self.add_device(name, 1, self.order).ok_or_else(|| full(MAX_BROUGHT))?,
            None => return Err(full(MAX_BROUGHT)),
        };
        self.devices[at].by = Some(peer.uid);
        self.said.push(format!("{name:?} is shared from now on: process {} has brought it", peer.pid));
        Ok(())
    }

    /// Whether nobody has an account on a device, or owes anything of it.
    fn is_idle(&self, at: usize) -> bool {
        self.devices[at].bank.views().next().is_none()
            && !self.sessions.values().any(|s| s.accounts.contains(&Some(at)))
    }

    /// Another device takes the place of one that is idle.
    fn renew(&mut self, at: usize, name: &str) {
        let d = &mut self.devices[at];
        (d.about.name, d.bank) = (name.into(), Bank::new(1, self.order));
        (d.tasks, d.over_ns) = ((0, 0), 0);
        self.processes.values_mut().for_each(|p| p.late_ns[at] = 0);
    }
}

#[cfg(test)]
mod tests {
    use forebay_policy::credit::Order;
    use forebay_proto::page::AccountWords;
    use forebay_proto::wire::{CPU, Request};

    use super::super::{Answer, Described, Ready};
    use super::*;

    /// Any process, of the user that its number's hundreds say.
    struct Any;

    impl World for Any {
        fn describe(&mut self, pid: u32) -> Option<Described> {
            Some(Described { uid: pid / 100, name: "p".into(), began: 1, parent: 1, nice: 0 })
        }
        fn cpu_time_ns(&mut self, _: u32) -> Option<u64> {
            Some(0)
        }
        fn ready(&mut self, _: u32) -> Option<Ready> {
            None
        }
        fn wake(&mut self, _: &AccountWords) {}
        fn watch(&mut self, _: u32) {}
        fn end(&mut self, _: u32, _: u64) -> Result<(), String> {
            Err("nobody is ended here".into())
        }
    }

    fn ask(s: &mut Service<Any>, pid: u32, request: &Request) -> Result<Reply, Refusal> {
        if !s.sessions.contains_key(&pid.into()) {
            s.connect(pid.into(), Peer { pid, uid: pid / 100, privileged: false }).unwrap();
            s.message(pid.into(), &wire::encode(&Request::Hello { version: wire::VERSION, name: "p".into() }));
        }
        match s.message(pid.into(), &wire::encode(request)) {
            Answer::Reply(Reply::Refused(why)) => Err(why),
            Answer::Reply(reply) => Ok(reply),
            Answer::Welcome(_) | Answer::Close(_) => panic!("no answer"),
        }
    }

    fn bring(s: &mut Service<Any>, pid: u32, name: &str) -> Result<Reply, Refusal> {
        ask(s, pid, &Request::Bring { device: name.into() })
    }

    fn names(s: &Service<Any>) -> Vec<&str> {
        s.devices.iter().map(|d| &*d.about.name).collect()
    }

    #[test]
    fn whoever_brings_a_device_shares_it_with_others_who_do() {
        let mut s = Service::new(Any, 1, Order::Share, 0).unwrap();
        let long = "a name that is longer than what is kept of names, which are 64 bytes at most";
        for device in ["iris", long] {
            let joined = [100, 200].map(|pid| bring(&mut s, pid, device).unwrap());
            assert_eq!(joined[0], joined[1]);
            assert!(matches!(joined[0], Reply::Joined { metered: false, .. }));
        }
        assert_eq!(names(&s), [CPU, "iris", &wire::short_name(long)]);
        let join = |s: &mut Service<Any>, device: &str| ask(s, 300, &Request::Join { device: device.into() });
        assert!(join(&mut s, long).is_ok() && matches!(join(&mut s, "arc"), Err(Refusal::NoDevice(_))));
        // What is known is joined, not brought once more.
        assert!(matches!(bring(&mut s, 300, CPU), Ok(Reply::Joined { metered: true, .. })));
        assert!(matches!(bring(&mut s, 300, " "), Err(Refusal::NoDevice(_))));
        assert_eq!(names(&s).len(), 3);
    }

    #[test]
    fn so_many_devices_are_brought_and_idle_ones_make_room() {
        let mut s = Service::new(Any, 1, Order::Share, 0).unwrap();
        let is_full = |answer, most| matches!(answer, Err(Refusal::Limit { limit, .. }) if limit == most as u64);
        for user in [1, 2] {
            for n in 0..MAX_BROUGHT_BY_USER {
                bring(&mut s, user * 100 + n as u32, &format!("{user} {n}")).unwrap();
            }
            assert!(is_full(bring(&mut s, user * 100, "one more"), MAX_BROUGHT_BY_USER));
        }
        assert!(is_full(bring(&mut s, 300, "one more"), MAX_BROUGHT));
        s.processes.get_mut(&200).unwrap().late_ns[2] = 5;
        // A program that has ended uses nothing, but as long as it is connected its place is its.
        s.exited(101);
        s.disconnect(101);
        bring(&mut s, 300, "one more").unwrap();
        assert_eq!(names(&s)[2], "one more");
        assert_eq!(s.processes[&200].late_ns[2], 0);
        assert!(is_full(bring(&mut s, 301, "and another"), MAX_BROUGHT));
        // The user's own place first.
        for pid in [102, 203] {
            s.exited(pid);
            s.disconnect(pid.into());
        }
        bring(&mut s, 200, "2 new").unwrap();
        assert_eq!((names(&s)[3], names(&s)[8]), ("1 2", "2 new"));
    }
}
