//! One call of the driver: what its number says it is, from a program's memory into the fake and back.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use bytemuck::Pod;
use forebay_rm::error::INVALID_ARGUMENT;
use forebay_rm::sys::{
    Alloc, CLASS_SYSTEM_MEMORY, CMD_IMPORT_OBJECT, Card, Control, ESC_ALLOC, ESC_CARD_INFO, ESC_CONTROL, ESC_FREE,
    ESC_MAP_MEMORY, ESC_REGISTER_FD, ESC_UNMAP_MEMORY, Free, ImportObject, MapMemory, UnmapMemory,
};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::files::{Files, Found, Node};
use crate::memory::Memory;

/// A call of the model's own: the caller's process has one more kernel to do on the first GPU, of so many µs; the kernel's number
/// comes in their place.
const ESC_KERNEL: u8 = 240;
/// Another one, with that number: it returns when the kernel has ended.
const ESC_WAIT: u8 = 241;
/// Most bytes of a command's parameters.
const MAX_PARAMS: u32 = 1 << 20;

/// Who calls, and with what.
pub struct Caller<'a> {
    /// Its process, which all its threads share.
    pub process: &'a OwnedFd,
    /// Its number.
    pub pid: u32,
    /// Its memory.
    pub memory: Memory,
    /// The request's number and size.
    pub request: (u8, usize),
    /// Where its structure lies.
    pub at: u64,
}

/// What becomes of a call.
pub enum Answer {
    /// It is not the driver's.
    NotOurs,
    /// It is done.
    Done,
    /// It is done when this kernel of the caller's has had its time.
    Later(u64),
    /// It is done when this file is in the place of the caller's descriptor of that number.
    Put(Arc<OwnedFd>, i32),
}

fn refused(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Bytes as words, which all that is not text is made of.
fn hex(params: &[u8]) -> String {
    let word = |w: &[u8]| w.iter().rev().map(|b| format!("{b:02x}")).collect::<String>();
    let all: Vec<String> = params.chunks(4).map(word).collect();
    all.join(" ")
}

impl Caller<'_> {
    fn descriptor(&self, fd: i32) -> io::Result<OwnedFd> {
        Ok(pidfd_getfd(self.process, fd, PidfdGetfdFlags::empty())?)
    }

    /// The structure, which must be of the size that the request says.
    fn structure<T: Pod>(&self) -> io::Result<T> {
        if self.request.1 == size_of::<T>() { self.memory.get(self.at) } else { Err(refused(libc::EINVAL)) }
    }

    fn params(&self, address: u64, size: u32) -> io::Result<Vec<u8>> {
        if size > MAX_PARAMS {
            return Err(refused(libc::EINVAL));
        }
        let mut params = vec![0; size as usize];
        if size > 0 {
            self.memory.read(address, &mut params)?;
        }
        Ok(params)
    }

    /// Answers the call on descriptor `fd`.
    pub fn answer(&self, files: &mut Files, fd: i32) -> io::Result<Answer> {
        let Ok(fd) = self.descriptor(fd) else { return Ok(Answer::NotOurs) };
        let Some(found) = files.find(self.pid, fd.as_fd())? else { return Ok(Answer::NotOurs) };
        drop(fd);
        match (found.node, self.request.0) {
            (Node::Control, ESC_CONTROL) => self.control(files, &found),
            (Node::Control, ESC_ALLOC) => {
                let mut c: Alloc = self.structure()?;
                let mut params = self.params(c.params, c.params_size)?;
                let asked = params.clone();
                found.file.alloc(&mut c, &mut params)?;
                files.note(|| format!("{} alloc {:x} {} -> {:x}", self.pid, c.class, hex(&asked), c.status));
                self.memory.put(self.at, &c)?;
                self.give_back(c.params, &params)
            }
            (Node::Control, ESC_FREE) => {
                let mut c: Free = self.structure()?;
                found.file.free(&mut c)?;
                files.note(|| format!("{} free {:x} of {:x} -> {:x}", self.pid, c.old, c.parent, c.status));
                self.memory.put(self.at, &c)?;
                Ok(Answer::Done)
            }
            (Node::Control, ESC_MAP_MEMORY) => self.map(files, &found),
            (Node::Control, ESC_UNMAP_MEMORY) => {
                let mut c: UnmapMemory = self.structure()?;
                found.file.unmap(&mut c)?;
                self.memory.put(self.at, &c)?;
                Ok(Answer::Done)
            }
            (Node::Control, ESC_CARD_INFO) => {
                let mut cards = found.file.cards()?;
                let room = self.request.1 / size_of::<Card>();
                if room == 0 || !self.request.1.is_multiple_of(size_of::<Card>()) || cards.len() > room {
                    return Err(refused(libc::EINVAL));
                }
                cards.resize(room, Card::default());
                self.memory.write(self.at, bytemuck::cast_slice(&cards))?;
                Ok(Answer::Done)
            }
            (Node::Control, ESC_KERNEL) => {
                let kernel = files.rm().ask(self.pid, self.structure()?).ok_or_else(|| refused(libc::EINVAL))?;
                self.memory.put(self.at, &kernel)?;
                Ok(Answer::Done)
            }
            (Node::Control, ESC_WAIT) => Ok(Answer::Later(self.structure()?)),
            (Node::Gpu(_), ESC_REGISTER_FD) => {
                let control = self.descriptor(self.structure()?)?;
                let is_control = files.find(self.pid, control.as_fd())?.is_some_and(|f| f.node == Node::Control);
                if is_control && files.tie(found.name) { Ok(Answer::Done) } else { Err(refused(libc::EINVAL)) }
            }
            _ => Err(refused(libc::EINVAL)),
        }
    }

    fn give_back(&self, address: u64, params: &[u8]) -> io::Result<Answer> {
        if !params.is_empty() {
            self.memory.write(address, params)?;
        }
        Ok(Answer::Done)
    }

    fn control(&self, files: &mut Files, found: &Found) -> io::Result<Answer> {
        let mut c: Control = self.structure()?;
        // The driver's own check of every command.
        if (c.params == 0) != (c.params_size == 0) {
            c.status = INVALID_ARGUMENT;
            self.memory.put(self.at, &c)?;
            return Ok(Answer::Done);
        }
        let mut params = self.params(c.params, c.params_size)?;
        let asked = params.clone();
        if c.cmd == CMD_IMPORT_OBJECT && params.len() == size_of::<ImportObject>() {
            // The descriptor that it names is the caller's.
            let mut p: ImportObject = bytemuck::pod_read_unaligned(&params);
            let theirs = p.fd;
            let ours = self.descriptor(p.fd)?;
            p.fd = ours.as_raw_fd();
            params.copy_from_slice(bytemuck::bytes_of(&p));
            found.file.control(&mut c, &mut params)?;
            p = bytemuck::pod_read_unaligned(&params);
            p.fd = theirs;
            params.copy_from_slice(bytemuck::bytes_of(&p));
        } else {
            found.file.control(&mut c, &mut params)?;
        }
        files.note(|| format!("{} control {:x} {} -> {:x}", self.pid, c.cmd, hex(&asked), c.status));
        self.memory.put(self.at, &c)?;
        self.give_back(c.params, &params)
    }

    /// The memory comes in the place of the file through which the caller is about to map it. Memory of a GPU goes through
    /// that GPU's file, which is tied to a control file; memory of the system through a control file that is not the one
    /// the call is made on.
    fn map(&self, files: &mut Files, found: &Found) -> io::Result<Answer> {
        let mut c: MapMemory = self.structure()?;
        let through = self.descriptor(c.fd)?;
        let through = files.find(self.pid, through.as_fd())?.ok_or_else(|| refused(libc::EINVAL))?;
        if through.name == found.name || c.offset != 0 {
            return Err(refused(libc::EINVAL));
        }
        let is_system = files.rm().class_of(c.client, c.memory) == Some(CLASS_SYSTEM_MEMORY);
        let window = match through.node {
            Node::Control if is_system => found.file.map_system(&mut c)?,
            Node::Gpu(gpu) if !is_system && files.is_tied(through.name) => found.file.map(gpu, &mut c)?,
            _ => {
                c.status = INVALID_ARGUMENT;
                None
            }
        };
        let (length, flags, through) = (c.length, c.flags, through.node);
        files.note(|| format!("{} map {length} bytes, flags {flags:x}, by {through:?} -> {:x}", self.pid, c.status));
        self.memory.put(self.at, &c)?;
        let memory = window.and_then(|_| files.rm().memory_of(c.linear));
        Ok(memory.map_or(Answer::Done, |m| Answer::Put(m, c.fd)))
    }
}
