//! Groups of one user's programs that share a GPU in space, under NVIDIA MPS.
//!
//! Rules:
//! 1. A group is a user and a name. The first program that asks for it starts its control daemon, as that user and in a
//!    folder that only that user can open, so that a group is never two users'.
//!    The group's class is what its programs may have: it goes no higher than their own.
//! 2. A server of MPS is a child of the control daemon, and owns the channels of all programs of the group. So it is what is
//!    steered: it has the class that was asked for the group, an absolute share included, and the name of the group.
//! 3. When a group has had no program for [`GRACE_NS`] its daemon is told to end. Until it has, nobody joins.
//! 4. A daemon that ends while programs are there is told of; the next program starts another.
//! 5. A service that starts anew takes over daemons and programs from what the last one saved. One that ends tells the
//!    daemons without programs to end, and leaves the others for the next.

use forebay_proto::wire::{Class, Refusal, Reply};

use super::{Peer, Service, World, policy, refusal};

/// A group without programs lasts so long.
pub const GRACE_NS: u64 = 5_000_000_000;
/// Most groups, and most of one user.
pub const MAX_GROUPS: usize = 64;
/// Most groups of one user.
pub const MAX_GROUPS_PER_USER: usize = 8;
/// Longest name.
const MAX_NAME: usize = 32;

/// What a process is in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The control daemon.
    Daemon,
    /// A server, whose channels are everybody's.
    Server,
    /// A program.
    Program,
}

/// A group whose control daemon runs.
pub(super) struct Group {
    pub(super) daemon: u32,
    /// Where it has its pipe.
    pub(super) folder: String,
    /// Since when there has been no program.
    empty_ns: Option<u64>,
    /// It was told to end.
    ends: bool,
}

/// A user and a name.
pub(super) type GroupName = (u32, String);

/// With what the names of a group's folders begin.
fn folder((uid, name): &GroupName) -> String {
    format!("{uid}-{name}")
}

/// What a server is called, for people; others keep their names.
pub(super) fn name_in(group: &str, role: Role) -> Option<String> {
    (role == Role::Server).then(|| format!("co-run {group}"))
}

fn check(name: &str) -> Result<(), Refusal> {
    let right = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(right) {
        return Ok(());
    }
    Err(Refusal::Invalid(format!("the name of a group is 1 to {MAX_NAME} letters, digits, - and _")))
}

impl<W: World> Service<W> {
    /// The process joins a group, whose class is to be this, if that is said.
    pub(super) fn co_run(
        &mut self,
        peer: Peer,
        name: &str,
        class: Option<Class>,
        nice: Option<i8>,
    ) -> Result<Reply, Refusal> {
        check(name)?;
        // Before anything is started. What the program may have, its group may.
        self.may_set(peer, peer.pid, class, nice)?;
        let group = (peer.uid, name.to_owned());
        if self.groups.get(&group).is_some_and(|g| g.ends) {
            return Err(Refusal::Ending(name.to_owned()));
        }
        let new = !self.groups.contains_key(&group);
        if new {
            let of_user = self.groups.keys().filter(|(uid, _)| *uid == peer.uid).count();
            for (n, limit) in [(self.groups.len(), MAX_GROUPS), (of_user, MAX_GROUPS_PER_USER)] {
                if n >= limit {
                    return Err(Refusal::Limit { what: "co-run groups".into(), limit: limit as u64 });
                }
            }
            let started = self.world.start_mps(peer.pid, peer.uid, &folder(&group));
            let (daemon, folder) = started.map_err(Refusal::NoMps)?;
            self.groups.insert(group.clone(), Group { daemon, folder, empty_ns: None, ends: false });
            // One that has ended already is heard of at once.
            if let Ok(p) = self.known(daemon) {
                p.group = Some((name.to_owned(), Role::Daemon));
            }
        }
        if class.is_some() || nice.is_some() {
            self.set_group(Peer { privileged: true, ..peer }, &group, class, nice)?;
        }
        if let Some(p) = self.processes.get_mut(&peer.pid) {
            p.group = Some((name.to_owned(), Role::Program));
        }
        if let Some(g) = self.groups.get_mut(&group) {
            g.empty_ns = None;
        }
        (self.dirty, self.promised) = (true, true);
        let at = self.groups.get(&group).map_or(String::new(), |g| g.folder.clone());
        let (pipe, log) = self.world.mps_folders(&at);
        Ok(Reply::CoRuns { pipe, log })
    }

    /// The class of the daemon, which servers begin with, and of the servers that are there.
    fn set_group(
        &mut self,
        peer: Peer,
        group: &GroupName,
        class: Option<Class>,
        nice: Option<i8>,
    ) -> Result<(), Refusal> {
        let Some(daemon) = self.groups.get(group).map(|g| g.daemon) else { return Ok(()) };
        let servers = self.in_group(group, Role::Server);
        if let Some(class) = class.filter(|_| servers.is_empty()) {
            // The daemon is on no GPU; whether its servers will be admitted is asked now.
            for g in &self.gpus {
                let admitted = g.agent.admit(daemon, policy(class), nice.unwrap_or(0).into());
                admitted.map_err(|e| refusal(&g.about.name, e))?;
            }
        }
        for server in servers {
            self.set(peer, server, class, nice)?;
        }
        self.set(peer, daemon, class, nice).map(drop)
    }

    /// The processes that are this in the group.
    pub(super) fn in_group(&self, group: &GroupName, role: Role) -> Vec<u32> {
        let is = |p: &super::Process| {
            p.about.uid == group.0 && p.group.as_ref().is_some_and(|(n, r)| *n == group.1 && *r == role)
        };
        self.processes.iter().filter(|(_, p)| is(p)).map(|(pid, _)| *pid).collect()
    }

    /// A process of a group has ended.
    pub(super) fn left_group(&mut self, pid: u32, group: &GroupName, role: Role) {
        let ended = self.groups.get(group).is_some_and(|g| role == Role::Daemon && g.daemon == pid);
        if ended && let Some(g) = self.groups.remove(group) {
            self.world.forget_mps(&g.folder);
            let left = self.in_group(group, Role::Program).len();
            if left > 0 && !g.ends {
                let (uid, name) = group;
                self.said.push(format!(
                    "the MPS daemon of co-run group {name:?} of user {uid} has ended, and {left} programs were there"
                ));
            }
        }
    }

    /// What is empty for long is told to end (rule 3).
    pub(super) fn end_empty_groups(&mut self) {
        let mut over = Vec::new();
        let programs: Vec<(GroupName, usize)> =
            self.groups.keys().map(|g| (g.clone(), self.in_group(g, Role::Program).len())).collect();
        for (name, programs) in programs {
            let Some(g) = self.groups.get_mut(&name) else { continue };
            if programs > 0 {
                g.empty_ns = None;
            } else if self.now_ns.saturating_sub(*g.empty_ns.get_or_insert(self.now_ns)) >= GRACE_NS && !g.ends {
                g.ends = true;
                over.push(g.folder.clone());
            }
        }
        over.iter().for_each(|f| self.world.quit_mps(f));
    }

    /// What happened to groups, and which devices came, since this was asked last, for the log.
    pub fn said(&mut self) -> Vec<String> {
        std::mem::take(&mut self.said)
    }

    /// The service ends: so do groups without programs (rule 5).
    pub fn end(&mut self) {
        let empty = self.groups.iter().filter(|(g, _)| self.in_group(g, Role::Program).is_empty());
        let folders: Vec<String> = empty.map(|(_, g)| g.folder.clone()).collect();
        folders.iter().for_each(|f| self.world.quit_mps(f));
    }

    /// A process was taken over from an earlier service.
    pub(super) fn restore_group(&mut self, pid: u32, group: GroupName, role: Role, folder: String) {
        if role == Role::Daemon {
            self.groups.insert(group, Group { daemon: pid, folder, empty_ns: None, ends: false });
        }
    }
}
