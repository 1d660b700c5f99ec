//! Another process on the GPU: found, sliced, suspended.

use std::collections::HashSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::client::{Client, class_of};
use crate::error::{Error, Result};
use crate::rm::{ControlFile, control};
use crate::several;
use crate::sys::{
    CLASS_GROUP, CLASS_SUBDEVICE, CMD_GET_TIMESLICE, CMD_HANDLE_INFO, CMD_SET_TIMESLICE, FIRST_CLIENT, FIRST_OBJECT,
    HandleInfo, INFO_PARENT, RawHandle, Timeslice, is_channel,
};

/// Clients looked at, downwards from a little above the newest.
const MAX_CLIENTS: u32 = 128;
/// Clients above it that are looked at: those made since.
const ABOVE: u32 = 32;
/// Clients that a search further down asks about at a time: some tens of milliseconds.
const FURTHER_AT_A_TIME: u32 = 4096;
/// Objects looked at in one client.
const MAX_OBJECTS: u32 = 0x1000;
/// Handles without an object after which a client is believed to have no more.
const MAX_MISSES: u32 = 512;
/// Shortest slice that leaves a process able to get on: a context switch costs about 150 µs.
pub const MIN_SLICE_US: u64 = 50;
/// What the driver gives a compute group.
pub const DEFAULT_SLICE_US: u64 = 2048;
/// Longest slice.
pub const MAX_SLICE_US: u64 = 100_000;

/// An object of another process's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// The client.
    pub client: RawHandle,
    /// The object.
    pub object: RawHandle,
}

/// A channel group of another process: what the hardware gives turns to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelGroup {
    /// Its name.
    pub handle: Handle,
    /// Its time slice when it was found, µs.
    pub slice_us: u64,
}

/// What a process has on the client's GPU, as found at one moment.
#[derive(Clone, Debug)]
pub struct Target {
    pid: u32,
    groups: Vec<ChannelGroup>,
    channels: Vec<Handle>,
    /// Control calls that finding it took.
    pub calls: usize,
}

/// Where to look for the clients of a process.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Clients that it had when it was looked for last: they are looked into first.
    pub clients: Vec<RawHandle>,
    /// Look nowhere else. Every client that is asked about and does not exist is a line in the kernel's log.
    pub nowhere_else: bool,
    /// Below those that are looked at otherwise, so many may be asked about, some thousands in a search that looks
    /// nowhere else then.
    pub further: u32,
    /// How far down that has come.
    down_to: Option<RawHandle>,
}

impl Search {
    /// For a process that had these clients.
    pub fn from(clients: Vec<RawHandle>) -> Self {
        Search { clients, ..Search::default() }
    }

    /// The clients further down that are next.
    fn next_further(&mut self, top: RawHandle) -> Range<RawHandle> {
        let end = self.down_to.unwrap_or(top).max(FIRST_CLIENT);
        let n = self.further.min(FURTHER_AT_A_TIME).min(end - FIRST_CLIENT);
        let begin = end - n;
        self.further = if begin == FIRST_CLIENT { 0 } else { self.further - n };
        self.down_to = Some(begin);
        begin..end
    }
}

/// Handles around one.
fn around(client: RawHandle) -> RangeInclusive<RawHandle> {
    let top = client.saturating_add(ABOVE);
    top.saturating_sub(MAX_CLIENTS).max(FIRST_CLIENT)..=top
}

impl Target {
    /// Finds the channel groups and channels of process `pid`. `known` are clients that belong to others for sure; they
    /// are not asked about.
    ///
    /// # Errors
    /// As [`Target::search`].
    pub fn find(own: &Client, pid: u32, known: &HashSet<RawHandle>) -> Result<Target> {
        Self::search(own, pid, known, &mut Search::default())
    }

    /// The same, for a process that was looked for before; `search` has its clients afterwards, whether it has channels or not.
    ///
    /// RM may number clients upwards for as long as the machine is up, or give the lowest number that is free: a process that
    /// is new has the numbers below the newest, which a client of our own that we make for that tells, and in the other
    /// case they are near our own. One that is older than the service, and than a hundred clients, is found only by a search
    /// further down ([`Search::further`]).
    ///
    /// # Errors
    /// [`Error::Process`], [`Error::NoChannels`], [`Error::WhichGpu`], or what the driver refused.
    pub fn search(own: &Client, pid: u32, known: &HashSet<RawHandle>, search: &mut Search) -> Result<Target> {
        let gpu = own.among_several()?;
        let files = own.rm().files_of(pid)?;
        let mut t = Target { pid, groups: Vec::new(), channels: Vec::new(), calls: 0 };
        let mut mine: HashSet<RawHandle> = HashSet::new();
        for file in &files {
            for client in search.clients.iter().filter(|c| !known.contains(c)) {
                t.ask(gpu, &**file, *client, &mut mine)?;
            }
        }
        if search.further > 0 {
            // Our own client was made when the service began: who is older is below it.
            let next = search.next_further(*around(own.handle()).start());
            for file in &files {
                for client in next.clone().rev().filter(|c| !known.contains(c)) {
                    t.ask(gpu, &**file, client, &mut mine)?;
                }
            }
        } else if !search.nowhere_else {
            let newest = own.newest().unwrap_or(own.handle());
            let windows = [around(newest), around(own.handle())];
            for (i, window) in windows.iter().enumerate() {
                // The second only for whoever is not near the newest.
                if i > 0 && !mine.is_empty() {
                    break;
                }
                let asked = |c: RawHandle| i > 0 && windows[0].contains(&c);
                let ours = |c: RawHandle| c == own.handle() || c == newest;
                for file in &files {
                    for client in window.clone().rev().filter(|c| !asked(*c) && !ours(*c) && !known.contains(c)) {
                        t.ask(gpu, &**file, client, &mut mine)?;
                    }
                }
            }
        }
        search.clients = mine.into_iter().collect();
        search.clients.sort_unstable();
        if t.channels.is_empty() {
            return Err(Error::NoChannels { pid, files: files.len(), calls: t.calls });
        }
        Ok(t)
    }

    /// Looks into a client for what it has on `gpu` (on any, if there is one only), if it is one of this file and was not found before.
    fn ask(
        &mut self,
        gpu: Option<u32>,
        file: &dyn ControlFile,
        client: RawHandle,
        mine: &mut HashSet<RawHandle>,
    ) -> Result<()> {
        if mine.contains(&client) {
            return Ok(());
        }
        self.calls += 1;
        if class_of(file, client, client)?.is_some() {
            mine.insert(client);
            self.look_into(gpu, file, client)?;
        }
        Ok(())
    }

    fn look_into(&mut self, gpu: Option<u32>, file: &dyn ControlFile, client: RawHandle) -> Result<()> {
        let (mut objects, mut misses) = (Vec::new(), 0);
        for object in FIRST_OBJECT..FIRST_OBJECT + MAX_OBJECTS {
            self.calls += 1;
            match class_of(file, client, object)? {
                None => misses += 1,
                Some(class) => {
                    misses = 0;
                    if class == CLASS_GROUP || class == CLASS_SUBDEVICE || is_channel(class) {
                        objects.push((object, class));
                    }
                }
            }
            if misses >= MAX_MISSES {
                break;
            }
        }
        if let Some(gpu) = gpu {
            let (here, calls) = several::on_gpu(file, client, &objects, gpu)?;
            self.calls += calls;
            objects.retain(|(object, _)| here.contains(object));
        }
        for (object, class) in objects {
            let handle = Handle { client, object };
            if class == CLASS_GROUP {
                let mut slice = Timeslice::default();
                control(file, "get time slice", client, object, CMD_GET_TIMESLICE, &mut slice)?;
                self.calls += 1;
                self.groups.push(ChannelGroup { handle, slice_us: slice.us });
            } else if is_channel(class) {
                self.channels.push(handle);
            }
        }
        Ok(())
    }

    /// Groups with a slice that somebody who ended badly has left behind, as `is_left` says of its µs, get the driver's default.
    ///
    /// # Errors
    /// As [`Target::slice`].
    pub fn heal_slices(&mut self, own: &Client, is_left: impl Fn(u64) -> bool) -> Result<()> {
        let left: Vec<ChannelGroup> = self.groups.iter().copied().filter(|g| is_left(g.slice_us)).collect();
        self.groups.iter_mut().filter(|g| is_left(g.slice_us)).for_each(|g| g.slice_us = DEFAULT_SLICE_US);
        if left.is_empty() { Ok(()) } else { set_slices(own, self.pid, &left, |_| DEFAULT_SLICE_US) }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its channel groups.
    pub fn groups(&self) -> &[ChannelGroup] {
        &self.groups
    }

    /// Its channels.
    pub fn channels(&self) -> &[Handle] {
        &self.channels
    }

    /// Whether its groups are there, with slices of `us` or those that they had when they were found, and how many of the
    /// driver's files it has open: costs little beside a search.
    ///
    /// # Errors
    /// [`Error::Process`].
    pub fn is_as_found(&self, own: &Client, us: Option<u64>) -> Result<(bool, usize)> {
        let (files, open) = own.rm().files_and_count(self.pid)?;
        let slice = |g: &ChannelGroup| {
            // A client lives on one of the files; the others refuse.
            files.iter().find_map(|file| {
                let (mut p, Handle { client, object }) = (Timeslice::default(), g.handle);
                control(&**file, "get time slice", client, object, CMD_GET_TIMESLICE, &mut p).ok().map(|()| p.us)
            })
        };
        Ok((self.groups.iter().all(|g| slice(g) == Some(us.unwrap_or(g.slice_us))), open))
    }

    /// The handle of the group or device that an object hangs from.
    ///
    /// # Errors
    /// [`Error::Process`], or what the driver refused.
    pub fn parent_of(&self, own: &Client, h: Handle) -> Result<RawHandle> {
        let mut result = Err(Error::NoChannels { pid: self.pid, files: 0, calls: 0 });
        for file in own.rm().files_of(self.pid)? {
            let mut info = HandleInfo { object: h.object, index: INFO_PARENT, answer: 0 };
            result = control(&*file, "get handle info", h.client, h.client, CMD_HANDLE_INFO, &mut info)
                .map(|()| info.answer as RawHandle);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// Takes the process off the GPU until the result is dropped or resumed. In the middle of a kernel, too; it goes on
    /// where it was.
    ///
    /// # Errors
    /// What the driver refused; nothing stays suspended then.
    pub fn suspend(&self, own: &Arc<Client>) -> Result<Suspension> {
        let s = Suspension { own: own.clone(), channels: self.channels.clone() };
        // On a failure `s` is dropped, which undoes what went through.
        own.schedule(&s.channels, false)?;
        Ok(s)
    }

    /// Lets the process on the GPU, whoever took it off: for a start after a service that ended badly.
    ///
    /// # Errors
    /// What the driver refused.
    pub fn release(&self, own: &Client) -> Result<()> {
        own.schedule(&self.channels, true)
    }

    /// Gives all its channel groups time slices of `us` until the result is dropped or restored.
    ///
    /// # Errors
    /// [`Error::Slice`] for a slice out of bounds, [`Error::Process`] for a process that is gone, or what the driver
    /// refused; nothing stays changed then.
    pub fn slice(&self, own: &Arc<Client>, us: u64) -> Result<Slices> {
        let s = Slices { own: own.clone(), pid: self.pid, groups: self.groups.clone() };
        s.set(us)?;
        Ok(s)
    }
}

/// Gives channel groups of a process the slices that are said of them: for a guardian, who knows what was changed.
///
/// # Errors
/// The first failure; all are tried.
pub fn restore_slices(own: &Client, pid: u32, groups: &[ChannelGroup]) -> Result<()> {
    set_slices(own, pid, groups, |g| g.slice_us)
}

/// Sets slices through the process's own files, which are held for no longer than that.
fn set_slices(own: &Client, pid: u32, groups: &[ChannelGroup], us: impl Fn(&ChannelGroup) -> u64) -> Result<()> {
    let files = own.rm().files_of(pid)?;
    let mut result = Ok(());
    for g in groups {
        let set = |file: &dyn ControlFile| {
            let mut p = Timeslice { us: us(g) };
            control(file, "set time slice", g.handle.client, g.handle.object, CMD_SET_TIMESLICE, &mut p)
        };
        // A client lives on one of the files; the others refuse.
        let mut one = Err(Error::NoChannels { pid, files: files.len(), calls: 0 });
        for file in &files {
            one = set(&**file);
            if one.is_ok() {
                break;
            }
        }
        result = result.and(one);
    }
    result
}

/// A process that is off the GPU. Dropping it resumes the process.
#[must_use = "dropping it resumes the process at once"]
pub struct Suspension {
    own: Arc<Client>,
    channels: Vec<Handle>,
}

impl Suspension {
    /// Takes it off once more: channels that were made anew with the handles of former ones are on the GPU.
    ///
    /// # Errors
    /// What the driver refused.
    pub fn again(&self) -> Result<()> {
        self.own.schedule(&self.channels, false)
    }

    /// Lets the process back on the GPU.
    ///
    /// # Errors
    /// What the driver refused. Channels that have gone with their process are no failure of note.
    pub fn resume(mut self) -> Result<()> {
        let channels = std::mem::take(&mut self.channels);
        self.own.schedule(&channels, true)
    }
}

impl Drop for Suspension {
    fn drop(&mut self) {
        if !self.channels.is_empty() && self.own.is_ours() {
            // Nobody is left to hear of a failure; the process may have gone.
            let _ = self.own.schedule(&self.channels, true);
        }
    }
}

/// Slices that were changed. Dropping it gives every group its own back.
#[must_use = "dropping it restores the slices at once"]
pub struct Slices {
    own: Arc<Client>,
    pid: u32,
    groups: Vec<ChannelGroup>,
}

impl Slices {
    /// Gives all of them other slices, of `us`.
    ///
    /// # Errors
    /// As [`Target::slice`]; some of them may have their new slices then.
    pub fn set(&self, us: u64) -> Result<()> {
        if !(MIN_SLICE_US..=MAX_SLICE_US).contains(&us) {
            return Err(Error::Slice { us, min: MIN_SLICE_US, max: MAX_SLICE_US });
        }
        set_slices(&self.own, self.pid, &self.groups, |_| us)
    }

    /// Gives every group the slice that it had.
    ///
    /// # Errors
    /// As [`Target::slice`].
    pub fn restore(mut self) -> Result<()> {
        let groups = std::mem::take(&mut self.groups);
        set_slices(&self.own, self.pid, &groups, |g| g.slice_us)
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        if !self.groups.is_empty() && self.own.is_ours() {
            let _ = set_slices(&self.own, self.pid, &self.groups, |g| g.slice_us);
        }
    }
}
